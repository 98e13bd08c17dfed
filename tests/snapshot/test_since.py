"""A snapshot that differs shows what changed in the source of the cause since it was written, where git knows."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

NET = """
from torch import nn

class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        "Return the input, scaled."
        return x * self.factor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(8, 4), Scale(2.0)

    def forward(self, x):
        return self.scale(self.fc(x))
"""

TEST = """
from net import Net

def test_net(modelprobe, modelprobe_snapshot):
    assert modelprobe.run(modelprobe.build(Net), modelprobe.randn(4, 8)) == modelprobe_snapshot
"""


def git(*arguments: str) -> None:
    user = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *user, *arguments], capture_output=True, check=True)


def failure(pytester: pytest.Pytester) -> str:
    lines = pytester.runpytest("-p", "no:randomly").outlines
    text = "\n".join(line.removeprefix("E").strip() for line in lines if line.startswith("E"))
    return re.sub(r"\b[0-9a-f]{7,10}\b|\d{4}-\d\d-\d\d", "*", text)


def test_a_changed_method_is_shown_with_the_commits_that_changed_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(pytester.path)
    net = pytester.path / "net.py"
    net.write_text(NET)
    pytester.makepyfile(TEST)
    assert pytester.runpytest("--snapshot-update", "-p", "no:randomly").ret == 0
    net.write_text(NET.replace("return x * self.factor", "return x * self.factor + 1"))
    assert "Since its snapshot" not in failure(pytester)  # there is no repository
    net.write_text(NET)
    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    net.write_text(NET.replace("return x * self.factor", "return x * self.factor + 1"))
    code = "Since its snapshot was written, in *:\nnet.py:11 Scale.forward\n- return x * self.factor\n"
    assert f"\n\n{code}+ return x * self.factor + 1\n\nIntended? " in failure(pytester)  # which is not committed
    git("commit", "-q", "-a", "-m", "Add one")
    assert f"{code}+ return x * self.factor + 1\nin * (*, a: Add one)\n\nIntended? " in failure(pytester)
    net.write_text("\n\n" + net.read_text().replace("factor + 1", "factor + 2"))
    assert "in *" not in failure(pytester).partition("+ return")[2].partition("Intended")[0]  # lines have other numbers
    net.write_text(NET.replace("Scale(2.0)", "Scale(3.0)"))  # the class of the layer is as it was
    assert "net.py:16 Net.__init__\n- self.fc, self.scale = nn.Linear(8, 4), Scale(2.0)\n" in failure(pytester)
