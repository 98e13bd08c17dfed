"""`--modelprobe-base`: the tests with the code of another commit, and their models beside those of the working tree."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import pytest

from pytest_modelprobe.plugin.revisions import NOTHING_COMPARED

NET = """
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(8, 16)
            self.norm = nn.LayerNorm(16)
            self.fc2 = nn.Linear(16, 4)

        def forward(self, x):
            return self.fc2(self.norm(self.fc1(x)).relu())
"""

TESTS = """
    import torch
    from net import Net

    def test_run(modelprobe):
        modelprobe.run(modelprobe.build(Net), modelprobe.randn(4, 8), loss="random")

    def test_shapes(modelprobe):
        modelprobe.architecture(Net(), torch.ones(2, 8))

    def test_step(modelprobe):
        net = modelprobe.build(Net)
        optimizer = torch.optim.AdamW(net.parameters())
        modelprobe.watch(net)
        net(modelprobe.randn(4, 8)).square().mean().backward()
        optimizer.step()

    def test_without_a_model():
        pass
"""


class Project:
    """A repository with a package `net` in ``src``, and its tests."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.path = pytester.path
        self._pytester = pytester
        self.git("init", "-q", "-b", "main")
        self.write("pyproject.toml", '[tool.pytest.ini_options]\npythonpath = ["src"]\naddopts = "-p no:randomly"\n')
        self.write(".gitignore", ".pytest_cache\n__pycache__\nignored.txt\n")
        self.write("src/net.py", NET)
        self.write("tests/test_net.py", TESTS)
        self.commit("first")

    def git(self, *arguments: str) -> str:
        user = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        done = subprocess.run(["git", *user, *arguments], cwd=self.path, capture_output=True, text=True, check=True)
        return done.stdout

    def write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
        path.write_text("".join(f"{line[indent:]}\n" for line in lines), "utf-8")

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.path / name).read_text("utf-8")
        assert old in text
        (self.path / name).write_text(text.replace(old, new), "utf-8")

    def commit(self, message: str) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)
        return self.git("rev-parse", "HEAD").strip()

    def run(self, *arguments: str) -> pytest.RunResult:
        return self._pytester.runpytest_inprocess(*arguments)

    def worktrees(self) -> int:
        return len(self.git("worktree", "list").splitlines())


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, _forked: None) -> Project:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    return Project(pytester)


def text_of(result: pytest.RunResult) -> str:
    return re.sub(r"\b[0-9a-f]{10}\b", "COMMIT", "\n".join(result.outlines))


def test_a_change_is_named_as_by_a_snapshot(project: Project) -> None:
    project.git("switch", "-q", "-c", "other")
    project.replace("src/net.py", "LayerNorm(16)", "LayerNorm(16, eps=1e-4)")
    project.write(
        "tests/test_new.py",
        "def test_new(modelprobe):\n    modelprobe.run(__import__('net').Net(), modelprobe.randn(2, 8))\n",
    )
    project.commit("other epsilon")
    project.git("switch", "-q", "main")
    project.replace("tests/test_net.py", "test_shapes", "test_architecture")
    project.commit("on main")
    project.git("switch", "-q", "other")
    result = project.run("--modelprobe-base=main", "--modelprobe-base-all", "--modelprobe-base-fail-on=changed")
    said = text_of(result)
    assert result.ret == 1
    # The test that is new runs on both sides too, for both run the tests of this one.
    assert "4 tests ran 4 models of 1 class: 4 changed\n" in said
    assert "tests/test_net.py::test_run, run 1:\nnorm.eps 1e-05 → 0.0001: its output changed by 0.017 %" in said
    assert (
        "  src/net.py:7 Net.__init__\n  - self.norm = nn.LayerNorm(16)\n  + self.norm = nn.LayerNorm(16, eps=1e-4)"
        in said
    )
    assert "tests/test_net.py::test_shapes, tests/test_net.py::test_step and tests/test_new.py::test_new." in said


def test_the_user_s_tree_is_as_it_was(project: Project) -> None:
    project.write("ignored.txt", "mine\n")
    project.replace("src/net.py", "16", "32")
    project.git("stash")
    project.replace("src/net.py", "LayerNorm(16)", "LayerNorm(16, eps=1e-5)")
    project.git("add", "-A")
    project.write("src/untracked.py", "x = 1\n")

    def state() -> list[str]:
        files = ["ls-files", "-co", "-x", "__pycache__", "-x", ".pytest_cache", "-x", "std*", "-x", "runpytest-*"]
        commands = (files, ["status", "--porcelain", "src", "tests"], ["stash", "list"], ["ls-files", "-s"])
        return [project.git(*command) for command in (*commands, ["for-each-ref"])]

    before = state()
    index = (project.path / ".git/index").read_bytes()
    result = project.run("--modelprobe-base=HEAD", "--modelprobe-base-all")
    assert "3 tests ran 3 models of 1 class: 3 the same" in result.outlines
    assert (project.path / ".git/index").read_bytes() == index
    assert state() == before
    assert not (project.path / ".git/worktrees").exists()


def test_a_commit_that_cannot_be_imported_is_said(project: Project) -> None:
    project.replace("src/net.py", "class Net", "import no_such_module\n\nclass Net")
    project.commit("broken")
    project.replace("src/net.py", "import no_such_module\n", "")
    result = project.run("--modelprobe-base=HEAD")
    said = "\n".join(result.outlines)
    assert "3 tests only here" in said
    assert "there tests/test_net.py: ModuleNotFoundError: No module named 'no_such_module'" in said
    assert result.ret == NOTHING_COMPARED


def test_a_new_test_that_needs_what_the_commit_lacks_is_said(project: Project) -> None:
    project.write("src/new.py", NET)
    project.write("tests/test_new.py", TESTS.replace("from net", "from new"))
    result = project.run("--modelprobe-base=HEAD", "tests/test_new.py")
    said = "\n".join(result.outlines)
    assert "nothing was compared; 3 tests only here\n" in said
    assert "there tests/test_new.py: ModuleNotFoundError: No module named 'new'" in said
    assert result.ret == NOTHING_COMPARED


def test_a_conftest_that_raises_there_leaves_the_other_side_its_own(project: Project) -> None:
    project.replace("src/net.py", "class Net", "NEW = 1\n\nclass Net")
    project.write("conftest.py", "import net\n\nassert net.NEW\n")
    assert "3 tests ran 3 models of 1 class: 3 the same" in project.run("--modelprobe-base=HEAD").outlines
    project.replace("src/net.py", "NEW = 1", "")
    project.commit("a conftest that raises")
    project.replace("src/net.py", "class Net", "NEW = 1\n\nclass Net")
    result = project.run("--modelprobe-base=HEAD")
    said = "\n".join(result.outlines)
    assert "nothing was compared; 3 tests only here\n" in said
    assert "there tests/test_net.py: ConftestImportFailure: AttributeError: module 'net' has no attribute 'NEW'" in said
    assert result.ret == NOTHING_COMPARED


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modelprobe-base=no-such"], "--modelprobe-base=no-such: there is no revision 'no-such' here: git fetch"),
        (["--modelprobe-base-python=/no/python"], "--modelprobe-base-python: there is no interpreter /no/python"),
        ([f"--modelprobe-base-python={shutil.which('git')}"], " is no Python that runs: "),
    ],
)
def test_a_side_that_is_not_there_is_refused_before_the_tests(
    project: Project, arguments: list[str], said: str
) -> None:
    result = project.run(*arguments)
    assert result.ret == 4
    assert said in "\n".join((*result.outlines, *result.errlines))


def test_a_run_without_models_compares_nothing(project: Project) -> None:
    result = project.run("--modelprobe-base=HEAD", "--modelprobe-base-all", "-k", "without_a_model")
    assert result.ret == NOTHING_COMPARED
    assert "nothing was compared: no test that passed makes or calls a model of your own classes" in text_of(result)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent to a process alone")
def test_ctrl_c_leaves_no_worktree(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    running = tmp_path_factory.mktemp("side") / "running"
    slow = f"open({str(running)!r}, 'w'); import time; time.sleep(60)"
    project.replace("src/net.py", "super().__init__()", f"super().__init__(); {slow}")
    project.commit("slow")
    project.replace("src/net.py", slow, "pass")

    def interrupt() -> None:
        while not running.exists():  # before, Python may ignore what a handler raises, in a fork
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        project.run("--modelprobe-base=HEAD")
    assert project.worktrees() == 1
    assert not (project.path / ".git/worktrees").exists()


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="the interpreter is played by a script of sh")
def test_the_other_side_may_have_another_interpreter(
    project: Project, tmp_path_factory: pytest.TempPathFactory
) -> None:
    python = tmp_path_factory.mktemp("bin") / "python"
    versions = '{"side": true, "pytest-modelprobe": "1", "torch": "9.9"}'
    python.write_text(f"""#!/bin/sh
if test "$1" = -c; then echo '{versions}'; else echo ran >> {python}.log; exec "{sys.executable}" "$@"; fi
""")
    python.chmod(0o755)
    result = project.run("--modelprobe-base=HEAD", f"--modelprobe-base-python={python}")
    assert result.ret == 0
    assert f"beside HEAD (COMMIT) under {python} =" in text_of(result)
    assert f"torch: {metadata.version('torch')} here, 9.9 there" in result.outlines
    assert Path(f"{python}.log").read_text("ascii") == "ran\n"  # once, for nothing changed
    assert "3 tests ran 3 models of 1 class: 3 the same" in result.outlines


@pytest.mark.long
def test_it_works_under_xdist(project: Project) -> None:
    pytest.importorskip("xdist")
    project.replace("src/net.py", "LayerNorm(16)", "LayerNorm(16, eps=1e-4)")
    result = project.run("-n2", "--modelprobe-base=HEAD", "--modelprobe-base-all", "--modelprobe-base-fail-on=changed")
    assert result.ret == 1
    assert "3 tests ran 3 models of 1 class: 3 changed" in result.outlines


RANDOM = (
    "self.norm(self.fc1(x)).relu()",
    "self.norm(self.fc1(x)).relu() + int.from_bytes(__import__('os').urandom(4), 'big') * 1e-10",
)


def test_a_model_that_does_not_repeat_is_not_called_changed(project: Project) -> None:
    project.replace("src/net.py", *RANDOM)
    project.commit("random")
    project.replace("src/net.py", *reversed(RANDOM))
    result = project.run("--modelprobe-base=HEAD", "-k", "test_run")
    assert "1 test ran 1 model of 1 class: 1 not repeatable" in result.outlines
    told = r"tests/test_net\.py::test_run, run 1: not compared, for it is not repeatable at HEAD \(\w+\)"
    assert [line for line in result.outlines if re.fullmatch(told, line)]
    assert result.ret == NOTHING_COMPARED
