"""`modelprobe bisect`: the commit that changed what the model of a test does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

import pytest

from pytest_modelprobe.cli import main

from ...revisions.test_base import Project  # noqa: TID252 - the folder of all tests is no package

TEST = """
    from net import Net

    def test_run(modelprobe):
        modelprobe.run(modelprobe.build(Net), modelprobe.randn(4, 8))
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, _forked: None) -> Project:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    project = Project(pytester)
    project.git("tag", "good")
    return project


CHANGES = {
    "tidy the norm": ("LayerNorm(16)", "LayerNorm(16, eps=1e-3)"),
    "break it": ("from torch import nn", "from torch import nn\nimport no_such_module"),
    "mend it": ("import no_such_module\n", ""),
    "faster": (".relu())", ".relu() * 1.01)"),
    "a smaller head": ("Linear(16, 4)", "Linear(16, 4, bias=False)"),
}


def history(project: Project) -> None:
    """Commit each change."""
    for subject, (old, new) in CHANGES.items():
        project.replace("src/net.py", old, new)
        project.commit(subject)
    project.write("tests/test_today.py", TEST)  # it is in no commit


Bisect = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bisect(project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Bisect:
    """Return what runs the command, and returns its status and what it printed to either stream."""
    monkeypatch.chdir(project.path)

    def bisect(*arguments: str, tests: Sequence[str] = ("--", "tests/test_today.py::test_run")) -> tuple[int, str, str]:
        return (main(["bisect", *arguments, *tests]), *capfd.readouterr())

    return bisect


def test_the_commit_that_changed_a_layer_is_found_and_one_that_cannot_be_imported_is_skipped(
    project: Project, bisect: Bisect
) -> None:
    history(project)
    before = [project.git(*command) for command in (["status", "--porcelain"], ["for-each-ref"], ["ls-files", "-s"])]
    status, out, err = bisect("good")
    assert status == 0, err
    first, _, where, said, *_ = out.splitlines()
    assert first.partition(" ")[2].startswith("(")
    assert re.search(r"a: tidy the norm\) is the first commit with a change; [3-5] runs of the tests$", first)
    assert where == "tests/test_today.py::test_run, run 1, beside good:"
    assert said.startswith("norm.eps 1e-05 → ")
    assert [project.git(*c) for c in (["status", "--porcelain"], ["for-each-ref"], ["ls-files", "-s"])] == before
    assert project.worktrees() == 1
    told = err.splitlines()
    assert told[0] == "run 1, good: good"
    assert all(re.match(r"run \d, (good|bad|skip): [0-9a-f]{7,} \w", line) for line in told[1:])

    _, out, err = bisect("good", "HEAD~2")
    assert "a: tidy the norm) is the first commit with a change" in out
    assert "skip: " in err
    assert "ModuleNotFoundError: No module named 'no_such_module'" in err


NOT_FOUND = {
    "good": "HEAD is as good, and so is each commit between them that was tried. If a change was taken back, name a ",
    "good no-such": "there is no revision 'no-such' here",
    "HEAD good": "good comes before HEAD: name the older commit first, as in good HEAD",
    "good good": "good and good are the same commit: name an older one first",
    "HEAD apart": "HEAD is no ancestor of apart: name a commit from which apart comes",
}


def test_what_cannot_be_found_is_said(project: Project, bisect: Bisect) -> None:
    project.write("src/other.py", "x = 1")
    project.commit("nothing of the model")
    project.git("branch", "apart", project.git("commit-tree", "-m", "apart", "HEAD^{tree}").strip())
    project.write("tests/test_today.py", TEST)
    for arguments, said in NOT_FOUND.items():
        status, _, err = bisect(*arguments.split())
        assert status == 2
        assert f"modelprobe: {said}" in err
        assert project.worktrees() == 1


def test_a_test_has_to_be_named(bisect: Bisect) -> None:
    status, _, err = bisect("good", tests=())
    assert status == 2
    assert "name a test behind --" in err
