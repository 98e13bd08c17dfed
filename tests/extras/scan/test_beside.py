"""`modelprobe scan NAME --base REF`: a model beside the one of another commit, without a test."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_modelprobe.cli import main

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
"""

Git = Callable[..., str]
Scan = Callable[..., tuple[int, str]]


@pytest.fixture
def git(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, _forked: None) -> Git:
    """Return what runs git in a repository with one commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", *arguments]
        return subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, check=True).stdout

    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("vision.py").write_text(NET)
    git("init", "-q", "-b", "main")
    git("add", "vision.py")
    git("commit", "-q", "-m", "a model without tests")
    return git


@pytest.fixture
def scan(git: Git, capfd: pytest.CaptureFixture[str]) -> Scan:
    """Return what runs the command, and returns its status and what it printed."""

    def scan(name: str, *arguments: str) -> tuple[int, str]:
        status = main(["scan", name, *arguments])
        return status, re.sub(r"\b[0-9a-f]{10}\b", "COMMIT", "".join(capfd.readouterr()))

    return scan


def edit(old: str, new: str) -> None:
    text = Path("vision.py").read_text()
    assert old in text
    Path("vision.py").write_text(text.replace(old, new))


def test_the_layer_that_changed_is_named_and_the_tree_is_left_as_it_was(scan: Scan, git: Git) -> None:
    edit("BatchNorm2d(8)", "BatchNorm2d(8, eps=1e-2)")
    before = git("status", "--porcelain", "-uall")
    status, said = scan("vision:Net", "--base", "main")
    assert status == 1
    inputs, _, told = said.partition("\n\n")
    assert inputs.startswith("Inputs: ")
    assert inputs.endswith(" (guessed; --input gives others)")
    assert told.startswith("Beside main (COMMIT): changed\n\nnorm.eps 1e-05 → 0.01: its output changed by ")
    assert "  vision.py:7 Net.__init__\n  - " in told
    assert git("status", "--porcelain", "-uall") == before
    assert len(git("worktree", "list").splitlines()) == 1


def test_other_code_that_computes_the_same_is_the_same(scan: Scan) -> None:
    edit(".relu()", ".clamp(min=0)")
    assert scan("vision:Net", "--base", "main", "--input", "2x3x8x8") == (
        0,
        "Inputs: 2x3x8x8\n\nBeside main (COMMIT): the same\n",
    )


def test_a_model_of_an_installed_library_is_the_same(scan: Scan) -> None:
    status, said = scan("hf-tiny:BertModel", "--base", "HEAD")
    assert status == 0
    assert said.endswith("\n\nBeside HEAD (COMMIT): the same\n")


NEWER = """
class Newer(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
"""

CLOCK = ".mean((2, 3)) + __import__('time').perf_counter()"


@pytest.mark.parametrize(
    ("edited", "name", "base", "why"),
    [
        (("class Net", f"{NEWER}\nclass Net"), "vision:Newer", "main",
         "vision:Newer does not run at COMMIT: failed: pytest_modelprobe.exceptions.UsageError: vision has no Newer"),
        (("nn.Linear", "nn.Linear"), "vision:Net", "mian", "there is no revision 'mian' here"),
        (("nn.Linear", "nn.Linear"), "vision:Net --input=2x9", "main", "vision:Net does not run here: failed: "),
        ((".mean((2, 3))", CLOCK), "vision:Net", "main", "vision:Net gives other numbers when it runs again here\n"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_said_in_a_sentence(
    scan: Scan, edited: tuple[str, str], name: str, base: str, why: str
) -> None:
    edit(*edited)
    status, said = scan(*name.split(), "--base", base)
    assert status == 2
    assert why in said
    assert ("Inputs: " in said) == (base == "main")  # a revision that is not there is said before they are guessed


def test_a_folder_without_git_is_refused(pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["scan", "torch.nn:Identity", "--input", "2x3", "--base", "main"]) == 2
    assert "git" in capfd.readouterr().err
