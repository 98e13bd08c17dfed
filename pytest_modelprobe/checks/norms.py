"""Normalization by formulas of a model's own: the scale of the input has to cancel.

A norm divides by the scale of its input, so twice the input gives the same output. A formula that divides by the
variance in place of its root does not.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe.models import CallTracer, ModuleCall, has_dense_storage, map_tensors
from pytest_modelprobe.text import count, number

from .machinery.check import check
from .machinery.prepared import PreparedModel
from .machinery.rounding import as_double
from .outcome import NotApplicableError, Violation

_NORM = re.compile(r"Norm([123][dD])?$")
"""Types that say that they normalize."""

_SCALE = 10.0
"""Root mean square of the inputs: large beside the usual eps."""

_LEAST, _MOST = 0.9, 2.2
"""The output of a norm keeps its size if the input is doubled; with constant or running statistics it may double."""


@check
def norms_cancel_scale(prepared: PreparedModel) -> Violation | str:
    """Check that a norm of the model's own gives no other scale than 1 to 2 times the output for twice the input.

    Looked at are modules whose type name ends with ``Norm``, as they are called in training mode, alone. One that
    divides by the variance instead of its root returns half the output for twice the input. It is a hint.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.norms_cancel_scale(probe, nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), probe.randn(2, 4)))
    norms_cancel_scale holds for Sequential: 1 norm
    """
    factors = {layer: factor for layer, call in _norm_calls(prepared).items() if (factor := _factor(*call)) is not None}
    if not factors:
        raise NotApplicableError("no module whose type ends with Norm returns a tensor of its input's shape")
    found = [(layer, factor) for layer, factor in factors.items() if not _LEAST <= factor <= _MOST]
    if not found:
        return count(len(factors), "norm")
    return Violation.first_of(
        found,
        f"returns {number(found[0][1])} times the output for twice the input, less what it adds",
        columns=("layer", "times the output"),
        advice="A norm divides by the root of the variance: look for a missing sqrt, and for a power.",
        level="hint",
    )


_Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _norm_calls(prepared: PreparedModel) -> dict[str, _Call]:
    """Return the first call of each norm in training mode, on a copy of the module in double precision."""
    calls: dict[str, _Call] = {}

    def begin(call: ModuleCall, args: Any, kwargs: Any) -> None:
        module = prepared.layers.modules[call.layer]
        if call.layer not in calls and _NORM.search(type(module).__name__) and _is_dense(*args[:1]):
            given = map_tensors(lambda x: as_double(x.detach()).clone(), (args, dict(kwargs)))
            calls[call.layer] = (module, *given)

    with CallTracer(prepared.layers.modules, ModuleCall, before=begin):
        prepared.reference(mode="train")
    return calls


def _is_dense(x: object = None) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and has_dense_storage(x) and x.numel() > 0


def _factor(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Return how much larger the output is for twice the input, less the output for zeros.

    It is `None` if the module does not run in double precision, or has no such factor.
    """
    x, *rest = args
    size = x.square().mean().sqrt()
    if isinstance(module, nn.LocalResponseNorm) or not size > 0:  # its scale is a power by definition
        return None
    try:
        zero, one, two = (
            copy.deepcopy(module).double().train()(x * (scale / size), *rest, **kwargs)
            for scale in (0.0, _SCALE, 2 * _SCALE)
        )
    except Exception:  # noqa: BLE001 - what a module raises that runs in its own dtype alone
        return None
    if not isinstance(one, Tensor) or one.shape != x.shape:
        return None
    shift = torch.nan_to_num(zero)
    factor = ((two - shift).norm() / (one - shift).norm()).item()
    return factor if torch.tensor(factor).isfinite() else None
