"""Gradients equal finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks


class Potential(nn.Module):
    """The energy of four atoms, of their distances and of the angles at the first one."""

    def __init__(self, angles_of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.angles_of = angles_of
        self.distances = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))
        self.angles = nn.Sequential(nn.Linear(9, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, positions: Tensor) -> Tensor:
        arms = positions[:, 1:] - positions[:, :1]
        cosines = nn.functional.cosine_similarity(arms[:, :, None], arms[:, None], dim=-1).flatten(1)
        return self.distances(arms.norm(dim=-1)) + self.angles(self.angles_of(cosines))


def test_angles_that_are_detached_are_a_hint_at_the_input(probe: ModelProbe) -> None:
    positions = probe.randn(2, 4, 3)
    assert checks.gradients_agree(probe, Potential(lambda x: x), positions).verdict == "holds"
    found = checks.gradients_agree.outcome(probe, Potential(Tensor.detach), positions)
    assert found.verdict == "hint"
    assert found.text.startswith("input may have a wrong gradient: along one direction backward computes ")
    assert "straight-through estimators, vector quantization and targets" in found.text


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forgets: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.forgets = forgets
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradients[0] * (s + (1 - ctx.forgets) * x * s * (1 - s)), None


class Activated(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def between(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    """Return five layers, what computes the function is "2"."""
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Activated(function), nn.Linear(6, 6), nn.Linear(6, 3))


def test_a_wrong_backward_is_a_hint_at_the_parameter_before_it(probe: ModelProbe) -> None:
    x = probe.randn(5, 6)
    assert checks.gradients_agree(probe, between(lambda x: Swish.apply(x, 0.0)), x).text == (
        "9 gradients along one direction"
    )
    found = checks.gradients_agree.outcome(probe, between(lambda x: Swish.apply(x, 0.01)), x)
    assert (found.verdict, (found.layer or "").partition(".")[0]) == ("hint", "1")


class Narrow(torch.autograd.Function):
    """Rounds to float32 outside torch, and has the right gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy().astype("float32")).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def test_rounding_inside_is_no_wrong_gradient(probe: ModelProbe) -> None:
    model = between(lambda x: x + 1e-3 * Narrow.apply(x))
    assert checks.gradients_agree(probe, model, probe.randn(5, 6)).verdict == "holds"


def test_a_bias_that_is_zero_is_no_kink_where_the_inputs_are_zero(probe: ModelProbe) -> None:
    model = between(nn.functional.relu)
    for layer in (model[0], model[1]):
        nn.init.zeros_(layer.bias)
    assert checks.gradients_agree(probe, model, torch.zeros(5, 6)).verdict == "holds"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x - x).relu() + x,
        lambda x: (x * 0).abs() + x,
        lambda x: torch.stack([x, x]).amax(0),
        lambda x: x + x.round(),
        lambda x: x + nn.functional.one_hot(x.argmax(-1), x.shape[-1]),
        lambda x: nn.functional.dropout(x, 0.5, training=False),
        lambda x: x.topk(3).values.repeat(1, 2),
    ],
    ids=["relu at zero", "abs at zero", "equal values", "rounding", "argmax", "dropout off", "the largest"],
)
@pytest.mark.parametrize("x", [torch.zeros(5, 6), torch.ones(5, 6)], ids=["zeros", "ones"])
def test_what_has_kinks_and_jumps_is_no_wrong_gradient(
    probe: ModelProbe, function: Callable[[Tensor], Tensor], x: Tensor
) -> None:
    assert checks.gradients_agree.outcome(probe, between(function), x).verdict == "holds"


def test_inputs_that_are_one_tensor_have_one_gradient(probe: ModelProbe) -> None:
    x, model = probe.randn(2, 3, 4), nn.MultiheadAttention(4, 2, batch_first=True)
    for check in (checks.gradients_agree, checks.gradcheck):
        assert check.outcome(probe, model, x, x, x).verdict == "holds"


def test_what_computes_in_float32_alone_is_not_judged(probe: ModelProbe) -> None:
    found = checks.gradients_agree.outcome(
        probe, between(lambda x: torch.from_numpy(x.detach().numpy().astype("float32")).double() + x), probe.randn(5, 6)
    )
    assert found.text == "finite differences do not settle: the outputs have a kink or a jump there"
