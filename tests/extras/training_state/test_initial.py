"""The first loss of a classifier: each fault beside a healthy twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks

CLASSES = 10
DIGITS = load_digits()
IMAGES = torch.tensor(DIGITS.data[:64], dtype=torch.float32) / 16
LABELS = torch.tensor(DIGITS.target[:64])


def net(outputs: int = CLASSES) -> nn.Sequential:
    return ModelProbe().build(lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs)))


def first_loss(model: nn.Module, *inputs: Any, loss: Callable[[Tensor], Tensor] | None = None) -> Any:
    return checks.initial_loss.outcome(ModelProbe(), model, *(inputs or (IMAGES,)), loss=loss)


def entropy(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, LABELS)


def test_images_that_are_not_scaled_are_a_hint() -> None:
    found = first_loss(net(), IMAGES * 255, loss=entropy)
    assert found.verdict == "hint"
    first, advice = found.text.split("\n\n")
    assert first.startswith("(root) begins at a cross entropy of ")
    assert first.endswith(" for 64 targets of 10 classes, where equal guesses have 2.303")
    assert advice == "It begins with confident wrong guesses: look at the scale of the last layer and of the inputs."


def test_images_that_are_scaled_are_none() -> None:
    found = first_loss(net(), loss=entropy)
    assert found.verdict == "holds"
    assert found.text.endswith(" for 64 targets of 10 classes, where equal guesses have 2.303")


def test_a_model_that_has_seen_the_targets_is_a_hint() -> None:
    class Leaking(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(8 * F.one_hot(labels, CLASSES) + x.sum() * 0, labels)

    found = first_loss(Leaking(), IMAGES.clone().requires_grad_(), LABELS)
    assert found.verdict == "hint"
    assert "It knows the targets" in found.text


ALIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum": lambda y: F.cross_entropy(y, LABELS, reduction="sum"),
    "weights and smoothing": lambda y: F.cross_entropy(y, LABELS, torch.full((CLASSES,), 50.0), label_smoothing=0.1),
    "log probabilities": lambda y: F.nll_loss(y.log_softmax(-1), LABELS),
    "probabilities as targets": lambda y: F.cross_entropy(y, F.one_hot(LABELS, CLASSES).float()),
    "yes or no": lambda y: F.binary_cross_entropy_with_logits(y, F.one_hot(LABELS, CLASSES).float()),
}


@pytest.mark.parametrize("name", ALIKE)
def test_the_value_of_the_loss_does_not_matter(name: str) -> None:
    assert first_loss(net(), loss=ALIKE[name]).verdict == "holds"
    found = first_loss(net(), IMAGES * 1000, loss=ALIKE[name])
    assert found.verdict == "hint"
    assert "confident wrong guesses" in found.text


def test_positions_that_are_ignored_do_not_count() -> None:
    labels = torch.where(torch.arange(64) < 32, LABELS, -100)
    found = first_loss(net(), loss=lambda y: F.cross_entropy(y, labels))
    assert "for 32 targets of 10 classes" in found.text


def test_a_detector_may_say_no_from_the_beginning() -> None:
    model = net(1)
    nn.init.constant_(model[2].bias, -4.6)
    no = (LABELS == CLASSES).float()[:, None]
    assert first_loss(model, loss=lambda y: F.binary_cross_entropy_with_logits(y, no)).verdict == "holds"


NOT_APPLICABLE: dict[str, Callable[[Tensor], Tensor] | None] = {
    "another loss": lambda y: y.square().mean(),
    "no loss": None,
    "no probabilities": lambda y: F.nll_loss(y, LABELS),
}


@pytest.mark.parametrize("name", NOT_APPLICABLE)
def test_what_has_no_equal_guesses_is_not_applicable(name: str) -> None:
    assert first_loss(net(), loss=NOT_APPLICABLE[name]).text == (
        "no cross entropy of torch.nn.functional for 4 or more targets was computed: pass loss=, or the targets to a "
        "model that returns its loss"
    )
