"""Norms by formulas of a model's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pytest_modelprobe import ModelProbe, checks


@pytest.fixture
def probe() -> ModelProbe:
    torch.manual_seed(0)  # of weights
    return ModelProbe()


class OwnNorm(nn.Module):
    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.formula, self.scale, self.shift = formula, nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x) * self.scale + self.shift


def var(x: Tensor) -> Tensor:
    return x.var(-1, keepdim=True) + 1e-6


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True) + 1e-6


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "the variance": (lambda x: (x - x.mean(-1, keepdim=True)) / var(x), "0.5"),
    "its square": (lambda x: (x - x.mean(-1, keepdim=True)) / var(x) ** 2, "0.125"),
    "the mean square in float32": (lambda x: x.float() / mean_square(x.float()), "0.5"),
    "times the deviation": (lambda x: x * var(x).sqrt(), "4"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_norm_by_another_power_than_the_deviation_is_a_hint(probe: ModelProbe, name: str) -> None:
    formula, factor = WRONG[name]
    found = checks.norms_cancel_scale.outcome(
        probe, nn.Sequential(nn.Linear(4, 6), OwnNorm(formula)), probe.randn(8, 4)
    )
    assert (found.verdict, found.layer) == ("hint", "1")
    said = f"layer '1' (OwnNorm) returns {factor} times the output for twice the input, less what it adds"
    assert str(found).splitlines()[0] == said


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(6),
    "layer norm with a large eps": lambda: nn.LayerNorm(6, eps=1.0),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "RMS norm": lambda: nn.RMSNorm(6),
    "group norm": lambda: nn.GroupNorm(2, 6),
    "by hand": lambda: OwnNorm(lambda x: (x - x.mean(-1, keepdim=True)) / var(x).sqrt()),
    "without eps": lambda: OwnNorm(lambda x: x / x.norm(dim=-1, keepdim=True)),
    "by its length": lambda: OwnNorm(lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5)),
    "in float32": lambda: OwnNorm(lambda x: (x.float() / mean_square(x.float()).sqrt()).to(x.dtype)),
    "by a constant": lambda: OwnNorm(lambda x: (x - 0.5) / 0.25),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_norm_that_cancels_the_scale_holds(probe: ModelProbe, name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), RIGHT[name]())
    assert str(checks.norms_cancel_scale(probe, model, probe.randn(8, 4))).endswith("holds for Sequential: 1 norm")


class LengthNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.norm(dim=-1)


NOT_LOOKED_AT: dict[str, Callable[[], nn.Module]] = {
    "a norm in numbers": LengthNorm,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    "responses of neighbors": lambda: nn.LocalResponseNorm(2, alpha=1.0),
    "no norm": lambda: nn.Tanh(),
}


@pytest.mark.parametrize("name", NOT_LOOKED_AT)
def test_what_is_no_norm_of_its_input_is_not_looked_at(probe: ModelProbe, name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), NOT_LOOKED_AT[name]())
    assert checks.norms_cancel_scale.outcome(probe, model, probe.randn(8, 4)).verdict == "not applicable"


def test_spectral_norm_of_a_weight_holds(probe: ModelProbe) -> None:
    model = parametrizations.spectral_norm(nn.Linear(4, 6))
    assert checks.norms_cancel_scale.outcome(probe, model, probe.randn(8, 4)).verdict in ("holds", "not applicable")
