"""Whether outputs and gradients are finite: no other check applies to those that are not.

Two runs that both return NaN agree, so comparing them would say nothing. Infinities that are meant, as in masks, are
told from those that are computed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from pytest_modelprobe.models import seeding
from pytest_modelprobe.record import Operation
from pytest_modelprobe.runs import find_gradient_origin
from pytest_modelprobe.text import count, listed

from .check import check_nonfinite
from .machinery.nonfinite import not_finite
from .outcome import NotApplicableError, Violation
from .session import PreparedModel

_MODES: tuple[tuple[Literal["eval", "train"], str], ...] = (("eval", "evaluation"), ("train", "training"))


@check_nonfinite
def finite(prepared: PreparedModel) -> Violation | str:
    """Check that outputs and gradients of parameters are finite, in evaluation and in training mode.

    NaN breaks it, and an infinity that the model computes. Other infinities are accepted: a constant, as in
    ``masked_fill(mask, -inf)``, one in a buffer or an input, and the logarithm of a mask of zeros and ones. Values
    inside the model that do not reach the output may be NaN or infinite.

    Every other check is not applicable to a model that breaks it, because NaN agrees with NaN.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> print(checks.finite(ModelProbe(), nn.Linear(2, 2), torch.ones(3, 2)))
    finite holds for Linear: 1 output and 2 gradients in evaluation and training mode
    >>> print(checks.finite.outcome(ModelProbe(), nn.Threshold(9.0, float("nan")), torch.ones(3, 2)).layer)
    (root)
    """
    looked_at, refused, gradients = [], [], 0
    outputs = 0
    for mode, said in _MODES:
        try:
            trace = prepared.reference(mode=mode)
        except NotApplicableError as reason:
            refused.append(reason)
            continue
        found = not_finite(prepared, trace, {"mode": mode})
        if found is not None:
            return found
        try:
            backward = prepared.reference(mode=mode, backward=True)
        except NotApplicableError:  # frozen, say
            backward = trace
        found = not_finite(prepared, backward, {"mode": mode, "backward": True})
        if found is not None:
            origin = _gradient_origin(prepared, mode) if found.layer in backward.gradients else None
            return dataclasses.replace(found, line=f"{found.line}, from {origin}") if origin else found
        looked_at.append(said)
        outputs, gradients = len(trace.final), max(gradients, len(backward.arrived))
    if not looked_at:
        raise refused[0]
    found_in = f"{count(outputs, 'output')} and {count(gradients, 'gradient')} in {listed(looked_at)} mode"
    return f"{found_in}; {refused[0]}" if refused else found_in


def _gradient_origin(prepared: PreparedModel, mode: Literal["eval", "train"]) -> Operation | None:
    """Return the operation whose backward first returned a value that is not finite, if it can be reproduced."""

    def make_loss() -> Tensor:
        args, kwargs = prepared.copied_inputs()
        return prepared.loss(prepared.model.train(mode == "train")(*args, **kwargs))

    seeds = seeding.seeded(seeding.derive(prepared.probe.seed, "check run"))
    try:
        with prepared.keep_changes(), seeds, torch.enable_grad():
            return find_gradient_origin(make_loss)
    except RuntimeError:  # a graph that cannot be looked into, as of reentrant checkpoints
        return None
