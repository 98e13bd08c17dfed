"""``--modelprobe-save`` and `modelprobe replay`: the call of a layer that differs, as a file."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pytest_modelprobe.snapshot.comparer
import pytest_modelprobe.snapshot.snapshot  # noqa: F401 - pytester forgets what its runs import
from pytest_modelprobe.cli import main

ATTENTION = """
from torch import nn

class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, causal=False):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return self.out((weights.softmax(-1) @ v).transpose(1, 2).flatten(2))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.norm = SelfAttention(16, 4), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.attn(x, causal=False))
"""

TEST = """
from models import Block

def test_block(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(Block)
    assert modelprobe.run(model, modelprobe.randn(2, 5, 16)) == modelprobe_snapshot
"""

Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture
def replay(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Replay:
    """Runs `modelprobe replay` as a new process would: with the code that is there now."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "path", [*sys.path])
        for name in [name for name in sys.modules if name in ("models", "test_it")]:
            del sys.modules[name]
        sys.dont_write_bytecode = True  # two versions of a file within one second have the same cache
        importlib.invalidate_caches()
        capsys.readouterr()
        code = main(["replay", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def changed(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """Writes a snapshot of a test, changes a line of its model, and runs the test again."""

    def run(old: str, new: str, *options: str, code: str = ATTENTION, test: str = TEST) -> pytest.RunResult:
        pytester.makepyfile(models=code, test_it=test)
        pytester.runpytest("--snapshot-update").assert_outcomes(passed=1)
        assert code.count(old) == 1
        pytester.makepyfile(models=code.replace(old, new))
        return pytester.runpytest("--modelprobe-save=calls", *options)

    return run


def saved(pytester: pytest.Pytester) -> Path:
    (file,) = (pytester.path / "calls").iterdir()
    return file


def test_a_layer_that_differs_is_one_file_that_tells_when_the_code_is_right_again(
    changed: Callable[..., pytest.RunResult], replay: Replay, pytester: pytest.Pytester
) -> None:
    result = changed("** -0.5", "** -1")
    result.assert_outcomes(failed=1)
    file = saved(pytester)
    assert file.name == "test_it.py.test_block.attn.safetensors"
    result.stdout.fnmatch_lines([f"the call of attn alone is saved: modelprobe replay calls/{file.name}"])

    code, out, _ = replay(file)
    assert code == 1
    told = re.fullmatch(
        r"attn still differs from the other side: out input by (\d+ %)\n\n"
        r"value +from what was saved +from the other side\nout input +0 % +(\d+ %)\n\n"
        r"Saved by test_it.py::test_block, in mode train on cpu\n",
        out,
    )
    assert told
    assert told[1] == told[2]

    pytester.makepyfile(models=ATTENTION)
    code, out, _ = replay(file)
    assert (code, out.splitlines()[0]) == (0, "attn no longer differs from the other side; 1 value looked at")
