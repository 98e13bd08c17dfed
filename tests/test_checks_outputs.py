"""Checks look at everything that a model gives out, along the axes that are the batch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from pytest_modelprobe import ModelProbe, checks


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._forward = forward

    def forward(self, *inputs: Any) -> Any:
        return self._forward(self, *inputs)


@pytest.fixture
def probe() -> ModelProbe:
    return ModelProbe()


# --- outputs that are no containers of tensors --------------------------------------------------------------------


def policy(wrap: Callable[[Any], Any]) -> nn.Module:
    def forward(model: Any, x: Tensor) -> Any:
        return wrap(Categorical(logits=model.head(x).softmax(1)))  # over time

    return Model(forward, head=nn.Linear(4, 4))


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: (d.logits[:, :1], d)], ids=["alone", "beside a tensor"])
def test_a_distribution_that_knows_of_later_positions_is_named(probe: ModelProbe, wrap: Callable[[Any], Any]) -> None:
    assert checks.causal.outcome(probe, policy(wrap), probe.randn(2, 6, 4)).layer == "(root)"


def test_a_distribution_that_mixes_the_batch_is_named(probe: ModelProbe) -> None:
    model = Model(lambda model, x: Categorical(logits=model.head(x).softmax(0)), head=nn.Linear(4, 4))
    assert checks.batch_independent.outcome(probe, model, probe.randn(3, 4)).layer == "(root)"


@pytest.mark.parametrize("check", checks.STANDARD)
def test_an_output_that_cannot_be_looked_into_is_refused_by_every_check(probe: ModelProbe, check: str) -> None:
    model = Model(lambda model, x: (model.head(x), iter([model.head(x)])), head=nn.Linear(4, 4))
    outcome = checks.STANDARD[check].outcome(probe, model, probe.randn(3, 4), loss=lambda out: out[0].sum())
    if check in ("registered", "initialised", "copy_and_pickle"):
        return  # they look at no output, or the model cannot be copied
    assert outcome.verdict == "not applicable"
    if check not in ("train_eval_differ", "checkpoint_parity", "padding_invariant"):
        assert outcome.text == (
            "output[1] cannot be looked into (list_iterator): give out tensors, or wrap the model in a module that does"
        )


def test_inputs_inside_objects_are_copied_and_cut(probe: ModelProbe) -> None:
    class Batch:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    batch = Batch(probe.randn(4, 3))
    before = batch.x.clone()
    model = Model(lambda _, batch: batch.x.mul_(2).softmax(0))
    assert checks.batch_independent.outcome(probe, model, batch).layer == "(root)"
    assert torch.equal(batch.x, before)
