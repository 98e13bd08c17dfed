"""Where something non-finite began: the operation, its inputs, the line of the model."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.record import Operation
from pytest_modelprobe.runs.origin import find_gradient_origin, find_origin


def line_of(function: object, text: str) -> str:
    """Return ``file:line`` of the first line with ``text`` in a function's source."""
    lines, start = inspect.getsourcelines(function)
    return f"test_origin.py:{start + next(i for i, line in enumerate(lines) if text in line)}"


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)


def test_the_operation_is_named_with_its_line_and_the_range_of_its_inputs() -> None:
    record = ModelProbe().run(nn.Sequential(nn.Identity(), Log()), torch.tensor([[-0.3, 2.0]]))
    assert record.origin == Operation(
        name="torch.log", location=line_of(Log, "torch.log"), detail="input min -0.3, max 2"
    )


def test_the_first_operation_is_named_and_not_those_it_spoils() -> None:
    found = find_origin(lambda: (torch.sqrt(torch.tensor([-1.0])) * 2).sum().log())
    assert found is not None
    assert found.name == "torch.sqrt"


def test_inputs_are_looked_at_before_a_call_that_writes_in_place() -> None:
    found = find_origin(lambda: torch.tensor([-4.0, 1.0]).log_())
    assert found is not None
    assert found.detail == "input min -4, max 1"


def test_what_comes_in_as_nan_began_elsewhere() -> None:
    bad = torch.tensor([math.nan])
    assert find_origin(lambda: bad * 2) is None


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: x.masked_fill(x < 0, -math.inf),
        lambda x: torch.where(x < 0, -math.inf, x),
        lambda x: torch.full_like(x, -math.inf).triu(1) + x,
    ],
    ids=["masked_fill", "where", "full_like"],
)
def test_a_constant_infinity_begins_nothing(mask: object) -> None:
    x = torch.tensor([[-1.0, 1.0], [1.0, 1.0]])
    assert find_origin(lambda: F.softmax(mask(x), dim=-1)) is None


def test_an_overflow_and_the_nan_it_leads_to_are_both_named() -> None:
    def forward() -> torch.Tensor:
        y = torch.exp(torch.tensor([100.0]))
        return (-y * 2) + y

    found = find_origin(forward)
    assert found is not None
    assert (found.name, found.location) == ("torch.exp", line_of(forward, "torch.exp"))
    assert found.detail.startswith("input min 100, max 100; the first NaN in ")
    assert found.detail.count("the first NaN") == 1
    assert found.detail.endswith(f"add at {line_of(forward, '-y * 2')}")


def test_a_model_of_torch_modules_alone_has_no_line_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=-1))
    with torch.no_grad():
        model[0].weight.fill_(3e38)
    origin = ModelProbe().run(model, torch.ones(1, 2)).origin
    assert origin is not None
    assert (origin.name, origin.location) == ("torch.nn.functional.linear", None)


def test_an_infinity_of_the_backward_is_named_where_it_began() -> None:
    def loss() -> torch.Tensor:
        x = torch.zeros(3, requires_grad=True)
        doubled = x * 2
        return torch.sqrt(doubled).sum()

    found = find_gradient_origin(loss)
    assert found is not None
    assert found.location == line_of(loss, "torch.sqrt")
    assert str(found) == f"SqrtBackward0 at {found.location}, which made inf of a finite gradient"


def test_a_nan_made_of_an_infinity_is_not_the_origin() -> None:
    def loss() -> torch.Tensor:
        x = torch.zeros(3, requires_grad=True)
        squared = x * 0
        return torch.sqrt(squared).sum()

    found = find_gradient_origin(loss)
    assert found is not None
    assert found.name == "SqrtBackward0"  # and not MulBackward0, in which inf * 0 becomes NaN


def test_anomaly_detection_is_off_again_afterwards() -> None:
    find_gradient_origin(lambda: torch.zeros(1, requires_grad=True).sqrt().sum())
    assert not torch.is_anomaly_enabled()
