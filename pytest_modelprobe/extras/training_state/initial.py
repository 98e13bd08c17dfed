"""What a model computes before any training: its first loss."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pytest_modelprobe.checks.check import check_unmodified
from pytest_modelprobe.checks.outcome import NotApplicableError, Violation
from pytest_modelprobe.checks.session import PreparedModel
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.text import count, number

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
            f"no cross entropy of torch.nn.functional for {_FEWEST} or more targets was computed: pass loss=, or the "
            "targets to a model that returns its loss"
        )
    said = []
    for classes, losses, yes_or_no in seen.found:
        mean, guesses = losses.mean().item(), math.log(classes)
        by_chance = _ERRORS * losses.std().item() / math.sqrt(losses.numel())
        said.append(
            f"a cross entropy of {number(mean)} for {count(losses.numel(), 'target')} of {count(classes, 'class')}, "
            f"where equal guesses have {number(guesses)}"
        )
        advice = ""
        if mean - by_chance > _TIMES * guesses:
            advice = "It begins with confident wrong guesses: look at the scale of the last layer and of the inputs."
        elif mean + by_chance < guesses / _TIMES and not yes_or_no:
            advice = "It knows the targets: is it trained, are they its inputs, or has its last bias their frequencies?"
        if advice:
            return Violation.at(ROOT, f"begins at {said[-1]}", advice=advice, level="hint")
    return "; ".join(said[:_SHOWN])


_SHOWN = 3


class _Entropies(TorchFunctionMode):
    """Sees the calls of loss functions, and computes the cross entropy of each target."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, Tensor, bool]] = []
        """The number of classes, the cross entropy of each target, and whether the answers are yes or no."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in (F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits):
            with torch.no_grad():
                names = ("input", "target", "weight", "size_average", "ignore_index")
                self._look_at(func, {**dict(zip(names, args, strict=False)), **(kwargs or {})})
        return func(*args, **(kwargs or {}))

    def _look_at(self, func: Any, given: dict[str, Any]) -> None:
        logits, target = given["input"].double(), given["target"]
        axis, yes_or_no = min(logits.dim() - 1, 1), func is F.binary_cross_entropy_with_logits
        if func is F.nll_loss and bool((logits.logsumexp(axis).abs() > 1e-2).any()):
            return  # it has no logarithms of probabilities
        soft = target.is_floating_point()
        losses = func(logits, target.double() if soft else target, reduction="none")
        losses = losses if soft else losses[target != given.get("ignore_index", -100)]
        classes = 2 if yes_or_no else logits.shape[axis]
        if classes > 1 and losses.numel() >= _FEWEST:
            self.found.append((classes, losses, yes_or_no))
