"""Calls whose output is thrown away, of layers with other calls that are trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelprobe import HintWarning, ModelProbe, Record, assert_grad_flow
from pytest_modelprobe.assertions.findings import findings, hints

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Gated(nn.Module):
    """A block with a projection that is called twice, for a gate and for the values."""

    def __init__(self, combine: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.proj, self.out = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 2)
        self.combine = combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, values = self.proj(x), self.proj(x + 1)
        return self.out(self.combine(x, gate, values))


def run(model: nn.Module) -> Record:
    return ModelProbe().run(model, X, loss="random")


def assert_silent(record: Record) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_grad_flow(record)
    assert (findings(record), hints(record)) == ([], [])


def test_a_call_whose_result_nobody_reads_is_a_hint() -> None:
    record = run(Gated(lambda x, gate, _: x * gate))
    assert (findings(record), hints(record)) == (
        [],
        ["no gradient at the output of 1 call: proj (call 2), but at other calls"],
    )
    with pytest.warns(HintWarning) as given:
        assert_grad_flow(record)
    (text,) = (str(one.message) for one in given)
    assert text == (
        "proj (call 2) gets no gradient, unlike other calls of it; 1 such call\n\n"
        "call            type         calls of the layer\n"
        "proj (call 2)   Sequential                    2\n\n"
        "Nothing that is trained depends on the output of proj (call 2): is its result used? It may be meant, as for a "
        "target that is detached."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_grad_flow(record, layers="out")


def test_calls_that_are_all_used_are_sound() -> None:
    assert_silent(run(Gated(lambda x, gate, values: x + gate * values)))


def test_a_call_under_no_grad_is_sound() -> None:
    class Target(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.proj(x)
            return F.mse_loss(self.out(self.proj(x)), target[:, :2])

    assert_silent(run(Target(lambda x, *_: x)))


def test_an_activation_without_parameters_is_sound() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.relu = nn.Linear(6, 6), nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.relu(self.fc(x))
            self.relu(y)
            return y

    assert_silent(run(Net()))


def test_a_layer_that_is_only_used_in_evaluation_is_sound() -> None:
    model = Gated(lambda x, gate, values: gate + values)
    with ModelProbe() as probe:
        watch = probe.watch(model)
        model(X).sum().backward()
        model.eval()(X)
        model.proj(X)
        assert_silent(watch.record)


def test_of_checkpointed_calls_those_that_are_used_are_sound() -> None:
    from torch.utils.checkpoint import checkpoint

    class Net(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = checkpoint(self.proj, x.requires_grad_(), use_reentrant=True)
            return self.out(checkpoint(self.proj, first, use_reentrant=False))

    assert_silent(run(Net(lambda x, *_: x)))
