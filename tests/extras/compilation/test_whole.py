"""What `torch.compile` makes of a model: one graph, and no other for the same sizes."""

from __future__ import annotations

import linecache
import re

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks

OLD = not hasattr(torch.compiler, "is_exporting")
"""Whether torch is 2.6."""


@pytest.fixture
def probe() -> ModelProbe:
    torch.manual_seed(0)  # of weights
    return ModelProbe()


class Scaled(nn.Module):
    """Divides by the largest element, as a number of Python or as a tensor."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.fc, self.breaks = nn.Linear(8, 8), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return x / x.abs().max().item() if self.breaks else x / x.abs().max()


class Counting(nn.Module):
    """Counts its calls, in an attribute or in a buffer."""

    count: Tensor

    def __init__(self, *, in_buffer: bool) -> None:
        super().__init__()
        self.fc, self.in_buffer, self.calls = nn.Linear(8, 8), in_buffer, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_buffer:
            self.count += 1
        else:
            self.calls += 1
        return self.fc(x) / (self.count if self.in_buffer else self.calls)


class Sampling(nn.Module):
    """Goes another way in training, where it is not one graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and x.sum() > 0 else x * 2


class Doubling(nn.Module):
    """Applies a step twice, and looks at a number in the loop."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.step(x)
            if x.sum() > 0:
                x = x * 2
        return x


class Halved(nn.Module):
    """Divides by its number of rows, which it takes for even or odd."""

    def forward(self, x: Tensor) -> Tensor:
        return x / len(x) if len(x) % 2 else x / 2


def whole(n: int) -> str:
    """Return what is said of a model that is one graph, for inputs of n rows."""
    runs = f"a forward, the same forward, a batch of {n + 1}, a batch of {n + 2}, a training step and the same step"
    return f"1 graph of {runs}"


def between(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), layer, nn.ReLU())


def line_of(place: str) -> str:
    """Return the line of code of a place in this file."""
    return linecache.getline(__file__, int(place.removeprefix("test_whole.py:"))).strip()


def test_a_graph_break_is_named_with_its_layer_and_line(probe: ModelProbe) -> None:
    x = probe.randn(3, 8)
    assert checks.compiles_whole(probe, between(Scaled(breaks=False)), x).text == whole(3)
    found = checks.compiles_whole.outcome(probe, between(Scaled(breaks=True)), x)
    first, _, head, row, *_ = found.text.splitlines()
    assert first.startswith("layer '1' (Scaled) breaks the graph of a forward at test_whole.py:")
    assert ".item" in first
    assert head.split() == ["layer", "line", "run", "reason"]
    assert row.startswith("1       test_whole.py:")
    assert "x.abs().max().item()" in line_of(row.split()[1])


@pytest.mark.parametrize("step", [nn.Linear(8, 8), nn.Identity()])
def test_a_break_in_a_loop_is_named_though_torch_skips_the_loop(probe: ModelProbe, step: nn.Module) -> None:
    found = checks.compiles_whole.outcome(probe, Doubling(step), probe.randn(3, 8))
    assert found.text.startswith("(root) breaks the graph of a forward at test_whole.py:")
    assert line_of(found.text.split(" at ")[1].partition(": ")[0]) == "if x.sum() > 0:"


@pytest.mark.skipif(OLD, reason="torch 2.6 does not say in which line a guard was made")
def test_what_makes_a_graph_for_each_forward_is_named(probe: ModelProbe) -> None:
    x = probe.randn(3, 8)
    assert checks.compiles_whole(probe, between(Counting(in_buffer=True)), x).text == whole(3)
    found = checks.compiles_whole.outcome(probe, between(Counting(in_buffer=False)), x)
    first, _, _, *rows = found.text.splitlines()
    assert first.startswith("layer '1' (Counting) is compiled again for the same forward at test_whole.py:")
    assert first.endswith(".calls == 1")
    assert line_of(first.split(" at ")[1].partition(": ")[0]) == "self.calls += 1"
    assert [re.split(" {3,}", row)[2] for row in rows[:3]] == ["the same forward", "a batch of 5", "the same step"]


def test_a_break_in_training_alone_is_told_as_of_the_training_step(probe: ModelProbe) -> None:
    found = checks.compiles_whole.outcome(probe, between(Sampling()), probe.randn(3, 8))
    assert found.text.startswith("layer '1' (Sampling) breaks the graph of a training step at test_whole.py:")


def test_a_graph_for_each_further_batch_size_is_named(probe: ModelProbe) -> None:
    found = checks.compiles_whole.outcome(probe, between(Halved()), probe.randn(3, 8))
    assert found.text.startswith("layer '1' (Halved) is compiled again for a batch of 5 at test_whole.py:")


def test_a_model_of_no_operation_has_no_graph(probe: ModelProbe) -> None:
    found = checks.compiles_whole.outcome(probe, nn.Identity(), probe.randn(3, 8))
    assert found.text == "torch.compile makes no graph of it, as it computes nothing"


def test_a_run_that_the_model_refuses_is_left_out(probe: ModelProbe) -> None:
    found = checks.compiles_whole(probe, nn.BatchNorm1d(8), probe.randn(1, 8))  # it does not train on one row
    assert found.text == "1 graph of a forward, the same forward, a batch of 2 and a batch of 3"


@pytest.mark.skipif(OLD, reason="torch 2.6 breaks the graph of a model of transformers 5")
def test_a_transformer_is_one_graph(probe: ModelProbe) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, use_cache=False
    )
    model = transformers.LlamaForCausalLM(config)
    assert checks.compiles_whole(probe, model, probe.randint(0, 32, (2, 7))).text == whole(2)
