"""``watch(stop_on=)``: the error stands at the user's call of the layer."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe, StoppedError, UsageError
from pytest_modelprobe.record import Statistics


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


def net(*layers: nn.Module) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), *layers)
    nn.init.eye_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    return model


def hooks(model: nn.Module) -> list[Any]:
    tables = (t for m in model.modules() for t in (m._forward_hooks, m._forward_pre_hooks))
    return [*(h for t in tables for h in t), *(h for p in model.parameters() for h in p._backward_hooks or ())]


def test_the_message_names_the_layer_its_output_and_its_inputs():
    model = net(Log(), nn.ReLU())
    with ModelProbe() as probe:
        watch = probe.watch(model, stop_on="nonfinite")
        with pytest.raises(StoppedError) as error:
            model(torch.tensor([[-1.0, 1.0], [0.0, 1.0]]))
    assert str(error.value) == (
        "layer '1' (Log): 2 of 4 elements of its output are NaN or infinite\n"
        "\n"
        "value    shape    NaN   infinite   min   max     rms\n"
        "input    (2, 2)     0          0    -1     1   0.866\n"
        "output   (2, 2)     1          1     0     0       0\n"
        "\n"
        "No output of a layer before it does, nor an input: look at the forward of Log."
    )
    assert (watch.closed, hooks(model)) == (True, [])
    assert watch.record["1"].calls[0].outputs[0].forward.statistics.nan == 1
    assert watch.record["2"].calls == ()
    with ModelProbe() as probe:
        probe.watch(model, stop_on="nonfinite")
        with pytest.raises(StoppedError, match="An input does too, and no recorded layer returned it"):
            model(torch.tensor([[torch.nan, 1.0]]))


def test_the_message_of_a_gradient_names_the_first_in_the_backward_pass():
    model = net(nn.ReLU(), Log())
    with ModelProbe() as probe:
        probe.watch(model, layers=["0", "1"], stop_on="nonfinite")
        loss = model(torch.tensor([[0.0, 1.0]])).sum()
        with pytest.raises(StoppedError) as error:
            loss.backward()
    assert str(error.value) == (
        "layer '1' (ReLU): 1 of 2 elements of the gradient of its output are NaN or infinite\n"
        "\n"
        "value                shape    NaN   infinite   min   max      rms\n"
        "gradient of output   (1, 2)     0          1     1     1        1\n"
        "output               (1, 2)     0          0     0     1   0.7071\n"
        "\n"
        "No gradient before it in the backward pass does: look at what uses this value, at last the loss."
    )


def test_a_gradient_of_a_parameter_alone_stops_too():
    model = net()
    with ModelProbe() as probe:
        probe.watch(model, stop_on="nonfinite")
        loss = (model(torch.full((1, 2), 3e38)) * 10).sum()
        with pytest.raises(StoppedError, match=r"layer '0' \(Linear\): 4 of 4 elements of the gradient of its weight"):
            loss.backward()


def test_a_callable_takes_the_statistics():
    def is_large(statistics: Statistics) -> bool:
        return statistics.rms is not None and statistics.rms > 2

    model = net(nn.ReLU())
    with ModelProbe() as probe:
        watch = probe.watch(model, stop_on=is_large)
        model(torch.ones(1, 2))
        assert not watch.closed
        with pytest.raises(StoppedError, match=r"layer '0' \(Linear\): its output meets stop_on=.*is_large"):
            model(torch.full((1, 2), 3.0))
        probe.watch(model, stop_on=lambda s: s.nothing)
        with pytest.raises(AttributeError, match="nothing"):
            model(torch.ones(1, 2))
        with pytest.raises(UsageError, match="stop_on is 'nonfinite', a callable that takes the statistics of a value"):
            probe.watch(model, stop_on="nan")  # type: ignore[arg-type]


def test_a_functional_call_stops_in_the_forward_that_makes_it():
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.relu(x / 0)

    with ModelProbe() as probe:
        model = Net()
        probe.watch(model, stop_on="nonfinite", functionals=True)
        with pytest.raises(StoppedError, match="relu: 2 of 2 elements of its output") as error:
            model(torch.ones(2))
    assert any("x / 0" in str(frame.line) for frame in traceback.extract_tb(error.tb))
    assert torch._C._len_torch_function_stack() == 0
