"""Training and evaluation, inputs that reach nothing, rows for padding: what is healthy, what is told of a fault."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks
from pytest_modelprobe.checks import Outcome

ROWS, WIDTH, WORDS = 4, 8, 11


def named(outcome: Outcome) -> str | None:
    """Return the layer that is told of, first thing in the message."""
    assert outcome.verdict == "broken", outcome
    assert outcome.layer
    assert str(outcome).startswith(outcome.layer)
    return outcome.layer


@pytest.fixture
def probe() -> ModelProbe:
    return ModelProbe()


# --- initialised: rows for padding ---------------------------------------------------------------------------------


class Padded(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH, padding_idx=2), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def test_a_row_for_padding_that_an_initialisation_wrote_over_is_named(probe: ModelProbe) -> None:
    def factory() -> nn.Module:
        model = Padded()
        nn.init.constant_(model.embed.weight, 0.5)
        return model

    for options in {}, {"factory": factory}:
        found = checks.initialised.outcome(probe, factory(), **options)
        assert named(found) == "embed.weight"
        first = str(found).splitlines()[0]
        assert first == "embed.weight is not zero in row 2, its padding_idx: up to 0.5, which no gradient changes"


def test_a_row_for_padding_that_is_zero_is_counted(probe: ModelProbe) -> None:
    found = checks.initialised(probe, Padded())
    assert found.text == "2 parameters and buffers, as far as memory tells, 1 row for padding"


def test_a_row_for_padding_that_a_tied_head_trains_may_hold_anything(probe: ModelProbe) -> None:
    model = Padded(tied=True)
    nn.init.ones_(model.embed.weight)
    assert checks.initialised(probe, model).verdict == "holds"


def test_a_frozen_row_for_padding_may_hold_anything(probe: ModelProbe) -> None:
    model = nn.Embedding.from_pretrained(torch.ones(4, 2), padding_idx=0)
    assert checks.initialised(probe, model).verdict == "holds"
