"""What a check has to see, and what it must not take for a fault: one model for each claim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, UsageError, checks


class Code(nn.Module):
    """Any code, as a layer; attributes by keyword."""

    def __init__(self, code: Any, **attributes: Any) -> None:
        super().__init__()
        self.code = code
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.code(self, *args, **kwargs)


@pytest.fixture
def probe() -> ModelProbe:
    return ModelProbe()


# --- batch --------------------------------------------------------------------------------------------------------


class LastStep(nn.Module):
    """Classifies a sequence by its last step."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 8, batch_first=batch_first), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_a_recurrence_over_the_batch_is_named(probe: ModelProbe) -> None:
    found = checks.batch_independent.outcome(probe, LastStep(batch_first=False), probe.randn(4, 6, 3))
    assert found.layer == "lstm"
    assert str(found).startswith("lstm mixes the batch: the last row changed by ")


def test_a_recurrence_over_the_steps_keeps_rows_apart(probe: ModelProbe) -> None:
    found = checks.batch_independent(probe, LastStep(batch_first=True), probe.randn(4, 6, 3))
    assert found.text == "the first and the last of 4 rows, in 3 layers"


@pytest.mark.parametrize("rows", [2, 5])
def test_a_sum_of_the_rows_so_far_is_named(probe: ModelProbe, rows: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Code(lambda self, x: x.cumsum(0)))
    assert checks.batch_independent.outcome(probe, model, probe.randn(rows, 3)).layer == "1"
