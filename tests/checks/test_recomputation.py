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
