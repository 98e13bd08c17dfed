"""What a model computes before any training: its first loss.

A classifier that was just initialized knows nothing, so its cross entropy is close to that of equal guesses, ln C for
C classes. The loss function may scale and weight it, or add to it. So the calls of torch's losses are looked at, not
the value of the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pytest_modelprobe.record import ROOT
from pytest_modelprobe.text import Cell, count, listed, number

from .check import check_unmodified
from .outcome import NotApplicableError, Violation
from .session import PreparedModel

_TIMES = 2.0
"""Up to so many times the cross entropy of equal guesses is as usual: logits of variance v add v / 2."""

_FEWEST = 4
"""Targets from which on a mean is not by chance."""

_ERRORS = 2.0
"""Standard errors by which the mean has to be beyond the limit."""


@check_unmodified
def initial_loss(prepared: PreparedModel) -> Violation | str:
    """Check that the first cross entropy is close to that of equal guesses: ln C for C classes, ln 2 for yes or no.

    A cross entropy of more than twice, or of less than half as much, is a hint. Logits that are too large at the
    beginning are confident wrong guesses, which the first steps have to unlearn. A loss that is too small has seen the
    targets. So a trained model has, and one whose last bias has the frequencies of the classes: do not call it for
    these. Looked at are the calls of torch's ``cross_entropy``, ``nll_loss`` and
    ``binary_cross_entropy_with_logits`` in training mode, by the model or by ``loss=``; weights, smoothing and
    reduction are left out. Yes and no are only looked at from above, as few answers may be yes.

    Args:
        prepared: The model as it was initialized, and its inputs, with a loss or targets among the inputs.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> model = probe.build(lambda: nn.Linear(20, 10))
    >>> target = probe.randint(0, 10, (16,))
    >>> loss = lambda logits: nn.functional.cross_entropy(logits, target)
    >>> print(checks.initial_loss(probe, model, probe.randn(16, 20), loss=loss))
    initial_loss holds for Linear: a cross entropy of 2.379 for 16 targets of 10 classes, where equal guesses have 2.303
    """
    prepared.reference(mode="train", backward=True)
    with (seen := _Entropies()):
        prepared.variation(mode="train", backward=True)
    if not seen.found:
        raise NotApplicableError(
            listed(seen.left)
            or "no cross entropy of torch.nn.functional was computed: pass loss=, or the targets to a model that "
            "returns its loss"
        )
    far = [one for one in seen.found if one.is_far]
    if not far:
        return "; ".join(str(one) for one in seen.found[:_SHOWN])
    first = far[0]
    advice = (
        "It begins with confident wrong guesses: look at the scale of the last layer and of the inputs."
        if first.mean > first.guesses
        else "It knows the targets: is it trained, are they among its inputs, or has its last bias their frequencies?"
    )
    rows: list[tuple[Cell, ...]] = [
        (one.function, one.classes, one.targets, one.mean, one.guesses, one.low, one.high) for one in far
    ]
    return Violation.at(
        ROOT,
        f"begins at {first}",
        columns=("function", "classes", "targets", "cross entropy", "equal guesses", "logits min", "logits max"),
        rows=rows,
        advice=advice,
        level="hint",
    )


_SHOWN = 3


@dataclass(frozen=True, slots=True)
class _Entropy:
    """What a call of a loss function has as its cross entropy."""

    function: str
    classes: int
    targets: int
    mean: float
    error: float
    """The standard error of the mean."""
    low: float
    high: float

    @property
    def guesses(self) -> float:
        """The cross entropy of equal guesses."""
        return math.log(self.classes)

    @property
    def is_far(self) -> bool:
        """Whether the mean is far from that of equal guesses, and not by chance."""
        most = self.mean - _ERRORS * self.error > _TIMES * self.guesses
        least = self.mean + _ERRORS * self.error < self.guesses / _TIMES
        return most or (least and self.function != F.binary_cross_entropy_with_logits.__name__)

    def __str__(self) -> str:
        return (
            f"a cross entropy of {number(self.mean)} for {count(self.targets, 'target')} of "
            f"{count(self.classes, 'class')}, where equal guesses have {number(self.guesses)}"
        )


class _Entropies(TorchFunctionMode):
    """Sees the calls of loss functions, and computes the cross entropy of each target."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[_Entropy] = []
        self.left: list[str] = []
        """Why a call was left out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _LOSSES:
            with torch.no_grad():
                self._look_at(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _look_at(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        named = {**dict(zip(_ARGUMENTS, args, strict=False)), **options}
        logits, target = named["input"], named["target"]
        if func is F.binary_cross_entropy_with_logits:
            classes, losses = 2, func(logits.double(), target.double(), reduction="none")
        else:
            classes = logits.shape[min(logits.dim() - 1, 1)]
            ignored = named.get("ignore_index", -100)
            if func is F.nll_loss and not _are_log_probabilities(logits):
                self.left.append("the input of nll_loss has no logarithms of probabilities")
                return
            soft = target.is_floating_point()
            losses = func(logits.double(), target.double() if soft else target, reduction="none")
            losses = losses if soft else losses[target != ignored]
        if classes < 2:
            self.left.append("a cross entropy of one class is 0")
        elif losses.numel() < _FEWEST:
            seen = count(losses.numel(), "target")
            self.left.append(f"a cross entropy of {seen} may be far by chance: give a larger batch")
        else:
            error = losses.std().item() / math.sqrt(losses.numel())
            low, high = logits.min().item(), logits.max().item()
            self.found.append(_Entropy(func.__name__, classes, losses.numel(), losses.mean().item(), error, low, high))


_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index")
_LOSSES = (F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits)


def _are_log_probabilities(x: Tensor) -> bool:
    total = x.double().logsumexp(min(x.dim() - 1, 1))
    return bool((total.abs() < 1e-2).all())
