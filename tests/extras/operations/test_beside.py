"""The first operation that differs beside another commit, whose model is in another process."""

from __future__ import annotations

import subprocess

import pytest

NET = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2)
        return self.out(torch.softmax(scores, dim=-1) @ v)


def make():
    return nn.Sequential(Attention(), Attention())
"""

TEST = """
from net import make


def test_run(modelprobe):
    modelprobe.run(modelprobe.build(make), modelprobe.randn(2, 4, 8))


def test_watch(modelprobe):
    net = modelprobe.build(make)
    modelprobe.watch(net)
    net(modelprobe.randn(2, 4, 8))
"""


@pytest.mark.usefixtures("_forked")
def test_the_operation_of_a_commit_is_named(pytester: pytest.Pytester) -> None:
    def git(*arguments: str) -> None:
        user = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *user, *arguments], cwd=pytester.path, capture_output=True, check=True)

    pytester.makepyfile(net=NET, test_net=TEST)
    pytester.makeini("[pytest]\npythonpath = .")
    for command in ("init -q -b main", "add -A", "commit -q -m first"):
        git(*command.split())
    pytester.makepyfile(net=NET.replace("torch.softmax(scores, dim=-1)", "torch.softmax(scores, dim=1)"))
    said = str(pytester.runpytest_inprocess("--modelprobe-base=main", "-p", "no:randomly").stdout)
    assert "layers '*': own code changed between qkv and out x2: " in said
    now, then = (f"torch.softmax(dim={dim}) at net.py:13" for dim in (1, -1))
    assert f"First operation that differs: {now}, not {then}." in said
    assert "1 other model changed alike: test_net.py::test_watch." in said
