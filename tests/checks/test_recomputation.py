"""Models that checkpoint themselves in training: what runs again in the backward computes the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel

from pytest_modelprobe import ModelProbe, checks


class Block(nn.Module):
    """A residual block that checkpoints its own code in training."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 4)
        self.options = {"use_reentrant": False, **options}

    def mlp(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.mlp, x, **self.options) if self.training else self.mlp(x))


class Functional(Block):
    """Drops without a layer of its own."""

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.3, self.training))


class Sure(Block):
    """Draws random numbers that decide nothing."""

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * (torch.rand(8) > -1))


class Skipping(Block):
    """Scales by a random number of Python."""

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * random.random())


def net(block: type[Block], **options: Any) -> nn.Module:
    return ModelProbe().build(lambda: nn.Sequential(nn.Linear(4, 4), block(**options), nn.Linear(4, 2)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_drops_other_elements_when_it_runs_again_is_named(modelprobe: ModelProbe, reentrant: bool) -> None:
    model = net(Block, use_reentrant=reentrant, preserve_rng_state=False).eval()
    found = checks.checkpoint_parity.outcome(modelprobe, model, modelprobe.randn(3, 4))
    assert found.layer == "1.drop"
    assert found.text.startswith("1.drop computes something else when a checkpoint runs it again, so gradients are ")
    assert "Look for preserve_rng_state=False" in found.text


@pytest.mark.parametrize(("block", "keep"), [(Functional, False), (Skipping, True)])
def test_code_without_a_layer_that_draws_other_numbers_when_it_runs_again_is_named(
    modelprobe: ModelProbe, block: type[Block], keep: bool
) -> None:
    found = checks.checkpoint_parity.outcome(modelprobe, net(block, preserve_rng_state=keep), modelprobe.randn(3, 4))
    assert found.layer == "1"
    assert "so gradients are wrong: input of 1.down changed by" in found.text


@pytest.mark.parametrize(
    ("block", "options"),
    [(Block, {}), (Block, {"use_reentrant": True}), (Functional, {}), (Sure, {"preserve_rng_state": False})],
)
def test_a_model_that_draws_the_same_numbers_again_passes(
    modelprobe: ModelProbe, block: type[Block], options: dict[str, Any]
) -> None:
    assert checks.checkpoint_parity(modelprobe, net(block, **options), modelprobe.randn(3, 4)).verdict == "holds"


class Adjoint(torch.autograd.Function):
    """Calls a layer in the backward, on other inputs, as the adjoint method of a differential equation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer(gradient)
        return gradient, None


class Solver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field, self.drop = nn.Linear(4, 4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(Adjoint.apply(self.field(x), self.field))


def test_a_backward_that_calls_layers_on_other_inputs_passes(modelprobe: ModelProbe) -> None:
    assert checks.gradcheck(modelprobe, Solver(), modelprobe.randn(3, 4)).verdict == "holds"


@pytest.mark.parametrize("keep", [True, False])
def test_a_bert_that_checkpoints_its_layers_passes_if_it_keeps_the_random_state(
    modelprobe: ModelProbe, keep: bool
) -> None:
    config = BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    model = modelprobe.build(lambda: BertModel(config, add_pooling_layer=False))
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": keep})
    found = checks.checkpoint_parity.outcome(modelprobe, model, modelprobe.randint(0, 30, (2, 6)))
    assert found.layer == (None if keep else "encoder.layer.1.attention.self")


# --- buffers ------------------------------------------------------------------------------------------------------


class Counting(Block):
    """Counts its tokens: where it calls the checkpoint, or in what is checkpointed."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.twice = twice
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))

    def count(self, x: Tensor) -> None:
        self.tokens += x.shape[0]

    def mlp(self, x: Tensor) -> Tensor:
        if self.twice:
            self.count(x)
        return super().mlp(x)

    def forward(self, x: Tensor) -> Tensor:
        if not self.twice:
            self.count(x)
        return super().forward(x)


class Averaging(nn.Module):
    """Keeps an average of what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.average.lerp_(x.detach().mean(0), 0.1)
        return self.fc(x)  # type: ignore[no-any-return]


class Checkpointing(nn.Module):
    """Checkpoints a layer in training."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.layer, x, use_reentrant=False) if self.training else self.layer(x)
        return self.head(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("twice", [False, True])
def test_tokens_that_are_counted_again_in_the_backward_are_named(modelprobe: ModelProbe, twice: bool) -> None:
    model = modelprobe.build(lambda: nn.Sequential(nn.Linear(4, 4), Counting(twice=twice), nn.Linear(4, 2)))
    found = checks.checkpoint_parity.outcome(modelprobe, model.eval(), modelprobe.randn(20, 4))
    assert (found.verdict, found.layer) == (("broken", "1.tokens") if twice else ("holds", None))
    said = "1.tokens is written a second time when a checkpoint runs layer '1' (Counting) again: changed by 100 %\n"
    assert found.text.startswith(said) is twice


def test_an_average_that_a_checkpointed_layer_keeps_is_named_and_statistics_of_a_batch_norm_are_not(
    modelprobe: ModelProbe,
) -> None:
    x = modelprobe.randn(20, 4)
    found = checks.checkpoint_parity.outcome(modelprobe, Checkpointing(Averaging()), x)
    assert (found.verdict, found.layer) == ("broken", "layer.average")
    assert checks.checkpoint_parity(modelprobe, Checkpointing(nn.BatchNorm1d(4)), x).verdict == "holds"


@pytest.mark.parametrize(("block", "verdict"), [(Averaging, "hint"), (lambda: nn.BatchNorm1d(4), "holds")])
def test_state_that_is_written_twice_if_the_check_checkpoints_a_part_is_a_hint(
    modelprobe: ModelProbe, block: Any, verdict: str
) -> None:
    model = modelprobe.build(lambda: nn.Sequential(nn.Sequential(block(), nn.Linear(4, 4)), nn.ReLU()))
    found = checks.checkpoint_parity.outcome(modelprobe, model.train(), modelprobe.randn(20, 4))
    assert found.verdict == verdict
    said = "0.0.average is written a second time under checkpointing (not reentrant): "
    assert found.text.startswith(said) is (verdict == "hint")


def test_a_buffer_that_a_hook_of_the_backward_writes_is_a_hint(modelprobe: ModelProbe) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(x)
            if y.requires_grad:
                y.register_hook(self.look)
            return y * (1 + self.largest)

        def look(self, gradient: Tensor) -> None:
            self.largest.copy_(gradient.abs().max())

    found = checks.checkpoint_parity.outcome(modelprobe, Scaled(), modelprobe.randn(3, 4))
    assert (found.verdict, found.layer) == ("hint", "largest")
    assert found.text.startswith("largest is written by the backward: changed by ∞ %\n")
