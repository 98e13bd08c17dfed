"""Each side has its own code: a model that is compared with itself is always the same."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from pytest_modelprobe.plugin.revisions import NOTHING_COMPARED

from .test_base import Project, text_of
from .test_base import project as project
from .test_worktree import commit, git, repository

NET = """
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8, eps=1e-5)

        def forward(self, x):
            return self.norm(x)
"""

TEST = "import torch\nfrom {module} import Net\n\ndef test_net():\n    Net()(torch.ones(2, 8).cumsum(1))\n"

EPSILON = "eps=1e-5", "eps=1e-4"


def test_a_submodule_is_at_the_commit_that_the_base_names(project: Project, tmp_path: Path) -> None:
    inner = repository(tmp_path / "inner", **{"net.py": textwrap.dedent(NET)})
    other = repository(tmp_path / "other", readme="")
    git(other, "submodule", "add", "-q", str(inner), "inner")
    commit(other)
    git(project.path, "submodule", "add", "-q", str(other), "src/part")
    git(project.path, "submodule", "update", "-q", "--init", "--recursive")
    project.write("tests/test_net.py", TEST.format(module="part.inner.net"))
    project.commit("submodules")
    project.replace("src/part/inner/net.py", *EPSILON)
    commit(project.path / "src/part/inner")
    project.replace("src/part/inner/net.py", "eps=1e-4", "eps=1e-3")
    project.write("src/part/inner/untracked.py", "")
    said = text_of(project.run("--modelprobe-base=HEAD", "tests"))
    assert "norm.eps 1e-05 → 0.001: its output changed by" in said
    for folder in (".git", ".git/modules/src/part", ".git/modules/src/part/modules/inner"):
        assert not (project.path / folder / "worktrees").exists()
    assert (project.path / "src/part/inner/untracked.py").exists()


def test_a_compiled_file_whose_source_differs_is_said(project: Project) -> None:
    project.write(".gitignore", ".pytest_cache\n__pycache__\n*.so\n")
    project.write("src/net.py", NET.replace("from torch", "from pathlib import Path\n\n    from torch"))
    project.write("src/fast.c", "3")
    project.write("src/fast.so", "3")
    project.write("tests/test_net.py", TEST.format(module="net"))
    project.replace("src/net.py", "self.norm(x)", "self.norm(x) * int(Path(__file__).with_name('fast.so').read_text())")
    project.commit("a kernel")
    project.write("src/fast.c", "4")
    project.write("src/fast.so", "4")
    assert (
        "1 test ran 1 model of 1 class: 1 the same; both sides use fast.so as built here, so what differs in "
        "src/fast.c is not compared: take a snapshot with the other build\n"
    ) in text_of(project.run("--modelprobe-base=HEAD"))


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_an_installed_copy_is_not_compared_with_itself(
    project: Project, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    project.write(".git/info/exclude", ".tox\n")
    project.write("pytest.ini", "[pytest]\n")
    project.write("python/mypkg/net.py", NET)
    project.write("tests/test_net.py", TEST.format(module="mypkg.net"))
    project.commit("a package")
    project.replace("python/mypkg/net.py", *EPSILON)
    environment = project.path / ".tox" if where == "inside" else tmp_path_factory.mktemp("environment")
    installed = environment / "site-packages/mypkg/net.py"
    installed.parent.mkdir(parents=True)
    installed.write_bytes((project.path / "python/mypkg/net.py").read_bytes())
    monkeypatch.setenv("PYTHONPATH", str(installed.parents[1]), prepend=":")
    monkeypatch.syspath_prepend(installed.parents[1])
    result = project.run("--modelprobe-base=HEAD")
    assert result.ret == NOTHING_COMPARED
    assert f"nothing was compared: mypkg.net was imported from {installed}, and not from " in text_of(result)
