"""`modelprobe compare`: two implementations, named on the command line."""

from __future__ import annotations

import pytest

from pytest_modelprobe import cli

MODELS = """
import torch
from torch import nn

class A(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.act = nn.Linear(8, 8), nn.Linear(8, 4), nn.ReLU()

    def forward(self, x):
        return self.act(torch.cat([self.q(x), self.k(x)], -1))

class B(nn.Module):
    def __init__(self):
        super().__init__()
        self.qk, self.relu = nn.Linear(8, 12), nn.ReLU()

    def forward(self, x):
        return self.relu(self.qk(x))

class Zeros(B):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.qk.bias)

class Masked(B):
    def forward(self, x, mask):
        return super().forward(x) * mask

class Flat(B):
    def forward(self, x):
        assert x.ndim == 2
        return super().forward(x)

class Named(B):
    def forward(self, *, hidden):
        return super().forward(hidden)
"""


@pytest.fixture(autouse=True)
def _module(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(two_nets=MODELS)
    monkeypatch.syspath_prepend(pytester.path)


def test_weights_are_carried_into_a_fused_layer_and_the_port_is_the_same(capsys):
    assert cli.main(["compare", "two_nets:A", "two_nets:B", "--input", "4x8", "--weights", "a"]) == 0
    out = capsys.readouterr().out
    assert "qk.weight = rows of q.weight, k.weight" in out
    assert "2 layers of A without a partner: q and k" in out


def test_a_port_without_a_batch_axis_is_given_the_same_tokens(capsys):
    given = ["--input", "1x4x8", "--input-b", "4x8", "--weights", "a"]
    assert cli.main(["compare", "two_nets:A", "two_nets:Flat", *given]) == 0
    assert "Same: 2 pairs of layers" in capsys.readouterr().out


def test_a_pairing_that_renames_nothing_leaves_no_blank_lines(capsys):
    assert cli.main(["compare", "two_nets:A", "two_nets:A", "--input", "4x8"]) == 0
    assert capsys.readouterr().out == "Weights: 4 parameters of B recognized in A, 0 not\n\nSame: 4 pairs of layers\n"


def test_weights_that_are_not_known_are_named_in_the_first_line(capsys):
    assert cli.main(["compare", "two_nets:A", "two_nets:B", "--input", "4x8"]) == 1
    assert "weights inside are not those of the expected: qk.weight and qk.bias" in capsys.readouterr().out


def test_zeros_are_not_told_apart(capsys):
    assert cli.main(["compare", "two_nets:Zeros", "two_nets:Zeros", "--input", "4x8"]) == 0
    out = capsys.readouterr().out
    assert "Weights: 1 parameter of B recognized in A, 1 not told apart, 0 not\n" in out
    assert "  not told apart, as all their elements are one number: qk.bias\n" in out


def test_an_input_has_another_name_in_b(capsys):
    command = ["compare", "two_nets:A", "two_nets:Named", "--input", "4x8", "--weights", "a"]
    assert cli.main([*command, "--input-b", "hidden=4x8"]) == 0
    assert cli.main(command) == 2
    assert "B (Named) does not run on these inputs: " in capsys.readouterr().err


@pytest.mark.parametrize("mask", ["4x12", "mask=4x12"])
def test_an_input_that_only_one_takes_leaves_the_values_comparable(capsys, mask):
    given = ["--input-b", "4x8" if mask == "4x12" else "x=4x8", "--input-b", mask]
    assert cli.main(["compare", "two_nets:A", "two_nets:Masked", "--input", "4x8", *given, "--weights", "a"]) == 1
    out = capsys.readouterr().out
    assert "\n(root) does not compute what (root) does: " in out
    assert "qk" not in out.partition("\n(root)")[2].partition("rename")[0]
    given = ["--input", given[1], "--input", mask, "--input-b", "4x8"]
    assert cli.main(["compare", "two_nets:Masked", "two_nets:B", *given, "--weights", "a"]) == 1
    assert "\n(root) does not compute what (root) does: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rename", "x"], "'x' is no rename: write B's glob and A's"),
        (["--input-b", "4x9"], "--input-b 4x9 has another shape than (4, 8), that of A's input"),
        (["--input-b", "4x8", "--input-b", "4x8"], "2 inputs given, but B takes x"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(capsys, more, message):
    assert cli.main(["compare", "two_nets:A", "two_nets:B", "--input", "4x8", *more]) == 2
    assert message in capsys.readouterr().err
