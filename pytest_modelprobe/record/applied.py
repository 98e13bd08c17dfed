"""What became of gradients between the backward pass and the optimizer.

A training loop may clip gradients, unscale them, reset them too early, or replace them. The record of a step has each
gradient as it arrived and as the optimizer had it. If a gradient came in several passes, the readings of what arrived
add up as the gradient itself does, so the two can be compared. They are compared by fingerprints: these are sums, so
the fingerprint of a scaled gradient is the scaled fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from pytest_modelprobe.text import significant

from .layer import Parameter
from .tensor_statistics import proportion

AS_THEY_ARRIVED = "as they arrived"
RESET = "reset"
SCALED = "scaled"
OTHERS = "others"

_EXACT = 1e-3
"""Gradients count as multiples if no more than this share of the norm is left. Rounding and the precision of a
fingerprint leave far less."""


def what_was_applied(parameters: Iterable[Parameter]) -> str | None:
    """Return what optimizers had of the gradients that arrived at their parameters; `None` if it is not known.

    Args:
        parameters: The parameters in the record of a step of one process. With several ranks the gradients that arrive
            differ from those that are applied, because ranks average them.

    >>> what_was_applied([])
    """
    found = [one for parameter in parameters if (one := _applied(parameter)) is not None]
    if not found:
        return None
    others = sum(not is_multiple for _, is_multiple in found)
    if others:
        return f"{OTHERS} by {others} of {len(found)} parameters"
    factors = sorted(factor for factor, _ in found)
    factor = factors[len(factors) // 2]  # the median
    if any(abs(one - factor) > _EXACT * abs(factor) for one in factors):
        return f"{SCALED} by {significant(factors[0])} to {significant(factors[-1])}"
    if abs(factor - 1) <= _EXACT:
        return AS_THEY_ARRIVED
    return RESET if not factor else f"{SCALED} by {_factor_text(factor)}"


def _applied(parameter: Parameter) -> tuple[float, bool] | None:
    """Return how many times what arrived a gradient is that the optimizer had, and whether no other term is left."""
    arrived, applied = parameter.gradient, parameter.applied
    if parameter.group is None or arrived is None or arrived.fingerprint is None or arrived.statistics is None:
        return None
    # Zero is every multiple of zero, and a norm that leaves out elements does not tell how large the gradient was.
    if not arrived.statistics.norm or not math.isfinite(arrived.statistics.norm) or arrived.statistics.nonfinite:
        return None
    if applied is None:  # a gradient arrived, and the optimizer found none
        return 0.0, True
    if applied.fingerprint is None:
        return None
    factor, left = proportion(applied.fingerprint, arrived.fingerprint)
    return factor, left <= _EXACT * max(math.hypot(*applied.fingerprint), arrived.statistics.norm * abs(factor))


def _factor_text(factor: float) -> str:
    """Return a factor and its likely cause: a gradient scaler divides by a power of two, and clipping makes smaller."""
    inverse = 1 / factor
    power = round(math.log2(inverse)) if inverse > 1 else 0
    if power and abs(inverse - 2**power) <= _EXACT * inverse:
        return f"1/{2**power} (unscaled)"
    return f"{significant(factor)}{' (clipped)' if 0 < factor < 1 else ''}"
