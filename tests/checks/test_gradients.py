"""Losses that take in labels that are ignored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pytest_modelprobe import ModelProbe, checks


@pytest.fixture
def probe() -> ModelProbe:
    torch.manual_seed(0)  # of weights
    return ModelProbe()


# --- labels_ignored ------------------------------------------------------------------------------------------------

Scored = Callable[[Tensor, Tensor], Tensor]


class Tagger(nn.Module):
    """Returns the loss that a test chooses, and its logits."""

    def __init__(self, loss: Scored) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(9, 8), nn.Linear(8, 9), loss

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embed(ids))
        return self.loss(logits, labels), logits


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return 0.9 * nll - 0.1 * logits.log_softmax(-1).mean()


def given(probe: ModelProbe) -> tuple[Tensor, Tensor]:
    ids, labels = probe.randint(0, 9, (3, 6), name="ids"), probe.randint(0, 9, (3, 6), name="labels")
    return ids, labels.masked_fill(torch.arange(6) > torch.tensor([[5], [3], [2]]), -100)


def test_a_loss_of_positions_whose_label_is_ignored_is_a_hint(probe: ModelProbe) -> None:
    found = checks.labels_ignored.outcome(probe, Tagger(smoothed), *given(probe))
    assert (found.verdict, found.layer) == ("hint", "head")
    assert str(found).splitlines()[0] == "head gets a gradient of output[0] at 5 of 5 positions whose label is -100"


IGNORES: dict[str, Scored] = {
    "smoothing": lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1),
    "channels second": lambda logits, labels: F.cross_entropy(logits.movedim(-1, 1), labels),
    "the next token": lambda logits, labels: F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
    "a mask": lambda logits, labels: (logits.square().sum(-1) * (labels != -100)).mean(),
}


@pytest.mark.parametrize("name", IGNORES)
def test_a_loss_that_leaves_out_ignored_labels_holds(probe: ModelProbe, name: str) -> None:
    found = checks.labels_ignored(probe, Tagger(IGNORES[name]), *given(probe))
    assert str(found) == "labels_ignored holds for Tagger: 5 ignored labels, at head"


def test_labels_of_pixels_are_looked_at(probe: ModelProbe) -> None:
    class Segmenter(nn.Module):
        def __init__(self, regularized: bool) -> None:
            super().__init__()
            self.head, self.regularized = nn.Conv2d(3, 4, 1), regularized

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(x)
            return F.cross_entropy(logits, labels) + self.regularized * logits.square().mean()

    labels = torch.arange(16).view(1, 4, 4).expand(2, 4, 4) % 5 - 1
    labels = labels.masked_fill(labels < 0, -100)
    verdicts = [checks.labels_ignored.outcome(probe, Segmenter(r), probe.randn(2, 3, 4, 4), labels) for r in (0, 1)]
    assert [found.verdict for found in verdicts] == ["holds", "hint"]


def test_without_ignored_labels_or_a_loss_it_is_not_applicable(probe: ModelProbe) -> None:
    ids, labels = given(probe)
    model = Tagger(lambda logits, labels: logits)
    said = [checks.labels_ignored.outcome(probe, model, ids, x) for x in (ids, labels)]
    assert [str(found).partition(": ")[2] for found in said] == [
        "no input of integers has -100 among others",
        "the model returns no loss",
    ]
