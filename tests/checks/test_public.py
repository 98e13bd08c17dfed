"""What checks say of classes of public packages: each test has the part of the class that was judged wrongly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks


@pytest.fixture
def probe() -> ModelProbe:
    return ModelProbe()


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """Needs the shape of its input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.spatial(torch.ones(len(x), 8))
        return out


class Contextual(nn.Module):
    """Writes into what it gave to a child, after the call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(8, 8), Positions()
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * 1
        positions = self.positions(x)
        x += positions
        out: Tensor = self.head(x)
        return out


def test_signal_jepa_contextual_of_braindecode_writes_into_what_a_part_took(probe: ModelProbe) -> None:
    found = checks.checkpoint_parity.outcome(probe, Contextual(), probe.randn(4, 8))
    assert found.layer == "positions"
    assert found.text.startswith(
        "positions takes what (root) changes in place after the call, and cannot be checkpointed (not "
        "reentrant): RuntimeError: one of the variables needed"
    )
    assert found.text.endswith("Compute it out of place there (inplace=False, x = x + ...), or clone the input first.")
