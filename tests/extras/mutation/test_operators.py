"""Each operator plants its fault in a layer, which the assertion or check that it names notices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from pytest_modelprobe import (
    ModelProbe,
    assert_all_params_have_grad,
    assert_dtypes,
    assert_finite,
    assert_grad_flow,
    assert_no_dead_layers,
    checks,
)
from pytest_modelprobe.extras.mutation.operators import OPERATORS
from pytest_modelprobe.extras.mutation.planting import Observer
from pytest_modelprobe.extras.mutation.results import Place, Planted, Seen


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = (self.query(x) @ x.transpose(1, 2)).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ x


class Net(nn.Module):
    """Has a layer for each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.act = nn.ReLU()
        self.norm = nn.LayerNorm(8)
        self.batch_norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.softmax = nn.Softmax(-1)
        self.attention = Attends()
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(6, 6, dtype=torch.bool, device=x.device).tril()
        x = self.norm(x + self.block(self.act(self.fc(x))))
        x = self.attention(self.drop(self.batch_norm(x)), mask=mask)
        return self.head(self.softmax(x))


LAYER_OF = {
    "leave_out": "norm",
    "drop_residual": "block",
    "other_activation": "act",
    "normalize_over_batch": "norm",
    "softmax_over_batch": "softmax",
    "eps_times_1000": "norm",
    "other_mode": "drop",
    "no_dropout": "drop",
    "double_dropout": "drop",
    "shift_mask": "attention",
    "to_float64": "head",
    "zero": "act",
    "shuffle_batch": "norm",
}
IN_TRAINING = ("no_dropout", "double_dropout")
ASSERTIONS = {
    "assert_finite": assert_finite,
    "assert_no_dead_layers": assert_no_dead_layers,
    "assert_dtypes": lambda record: assert_dtypes(record, torch.float32),
    "assert_all_params_have_grad": assert_all_params_have_grad,
    "assert_grad_flow": assert_grad_flow,
}
CHECKS = {
    "checks.batch_independent": checks.batch_independent,
    "checks.eval_stable": checks.eval_stable,
    "checks.causal": checks.causal,
}


@contextlib.contextmanager
def planted(operator: str) -> Iterator[Planted]:
    """Plant a fault in a layer of `Net` within the block."""
    layer = LAYER_OF.get(operator, "fc")
    place = Place(f"{Net.__module__}:Net", layer, type(Net().get_submodule(layer)).__name__)
    observer, fault = Observer(), Planted(place, OPERATORS[operator])
    with observer.installed(), observer.observing(Seen(), fault):
        yield fault
    assert fault.fired


def run(probe: ModelProbe, model: nn.Module, operator: str = "") -> object:
    mode = "train" if operator in IN_TRAINING else "eval"
    return probe.run(model, probe.randn(4, 6, 8), loss="random", mode=mode)


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_the_assertion_or_check_that_an_operator_names_notices_it(operator: str) -> None:
    by = OPERATORS[operator].noticed_by
    with ModelProbe() as probe:
        model = probe.build(Net)
        clean = run(probe, model, operator)
        with planted(operator):
            if by in CHECKS:
                with pytest.raises(AssertionError):
                    CHECKS[by](probe, model.eval(), probe.randn(4, 6, 8))
            elif by in ASSERTIONS:
                with pytest.raises(AssertionError):
                    ASSERTIONS[by](run(probe, model, operator))
            else:
                assert run(probe, model, operator) != clean
        assert run(probe, model, operator) == clean


def test_each_operator_fits_the_layer_that_it_is_for() -> None:
    seen, observer = Seen(), Observer()
    with observer.installed(), observer.observing(seen):
        Net().train()(torch.randn(4, 6, 8))
    fitting = {place.layer: operators for place, operators in seen.places.items()}
    assert {name for name in OPERATORS if name in fitting[LAYER_OF.get(name, "fc")]} == {*OPERATORS}


def test_a_fault_is_gone_after_a_forward_that_fails() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(3, 3)).eval()
    place = Place("torch:Sequential(BatchNorm1d, Linear)", "0", "BatchNorm1d")
    observer = Observer()
    with observer.installed(), observer.observing(Seen(), Planted(place, OPERATORS["other_mode"])):
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 4))
        assert not model[0].training
    assert not model[0].training


def test_a_layer_that_is_called_by_itself_is_still_a_layer_of_its_model() -> None:
    model, seen, observer = nn.Sequential(nn.Linear(2, 2)), Seen(), Observer()
    with observer.installed(), observer.observing(seen):
        model(torch.ones(1, 2))
        model[0](torch.ones(1, 2))
    assert {(place.model, place.layer) for place in seen.places} == {
        ("torch:Sequential(Linear)", "(root)"),
        ("torch:Sequential(Linear)", "0"),
    }


def test_what_is_observed_is_the_same_bit_for_bit() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU()), torch.randn(8, 4)

    def outcome() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        output = model(x)
        output.sum().backward()
        return [output.detach(), model[0].weight.grad.clone(), torch.rand(2)]

    before, observer = outcome(), Observer()
    with observer.installed(), observer.observing(Seen()):
        during = outcome()
    assert all(map(torch.equal, before, during))
