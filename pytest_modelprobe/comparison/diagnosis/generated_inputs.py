"""Masks, positions and tokens that a container generates for its children: which changed, and in how many entries.

A relative change says nothing about a mask: one entry of minus infinity decides its norm. What a reader wants to know
is how many of its entries differ. Where zeros can be counted that is known, else it is estimated from the fingerprints.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pytest_modelprobe.comparison.compare import is_quantity
from pytest_modelprobe.comparison.differences import CallPair, Difference
from pytest_modelprobe.comparison.pairing import emitted, split_place
from pytest_modelprobe.record import Statistics, Value

from .causes import ShareMethod
from .index import ComparisonIndex
from .same_elements import hidden_counts, masked_count, value_at


class GeneratedInput(NamedTuple):
    """A mask, positions or tokens that the code now generates with other values."""

    what: str
    """``attention_mask (for layers.0)``."""
    share: float | None
    """The share of its entries that differ; None: not known."""
    how: ShareMethod


def generated_input(index: ComparisonIndex, pair: CallPair, difference: Difference) -> GeneratedInput | None:
    """Return the mask, positions or tokens that a difference of a response is about, and the share that differs.

    None if it is a hidden state, or not the input of a child. The share is that of the run where the value differs
    there too, else that of the response where it is known.
    """
    child, path = split_place(difference.what)
    if not child or path == "after" or difference.change is None:
        return None
    call = index.child_call(pair, child)
    values = None if call is None else _both_inputs(call, path)
    if call is None or values is None or any(map(is_quantity, values)):
        return None
    share, how = _share_of(index, call, *values)
    if share is None and _is_read_exactly(pair, difference.what):
        share = difference.change
    return GeneratedInput(f"{path} (for {child})", share, how)


def generated_in_run(index: ComparisonIndex, child: CallPair, name: str) -> GeneratedInput | None:
    """Return the generated input of a call that differs in the run; None if hidden states differ too."""
    paths = [value.path for value in child.actual.inputs if index.change(child, "input", value.path).differs]
    differing = [values for path in paths if (values := _both_inputs(child, path)) is not None]
    if not differing or any(is_quantity(value) for values in differing for value in values):
        return None
    now, then = differing[0]
    share, how = _share_of(index, child, now, then)
    if now.dtype != then.dtype:
        share = _least_share(now, then)
        if not share:
            return None  # they may mask the same
    return GeneratedInput(f"{now.path} (for {name})", share, how)


def _is_read_exactly(pair: CallPair, where: str) -> bool:
    """Whether what is passed on is read as integers are, as masks are, so that a change is the share of entries."""
    handed = emitted(pair.expected.response)
    return any(h.where == where and h.reading is not None and h.reading.digest is not None for h in handed)


def _share_of(index: ComparisonIndex, call: CallPair, now: Value, then: Value) -> tuple[float | None, ShareMethod]:
    """Return the share of entries of an input that differ in the run; None if it is the same or cannot be compared."""
    found = index.change(call, "input", now.path)
    a, e = now.forward.statistics, then.forward.statistics
    if not found.differs or a is None or e is None or not a.count or a.count != e.count or now.dtype != then.dtype:
        return None, "estimated"
    if not call.same_signs:
        return None, "estimated"
    masked = masked_count(now), masked_count(then)
    if then.is_floating:
        x, y = now.forward.fingerprint, then.forward.fingerprint
        if None in masked or x is None or y is None:
            return None, "estimated"
        estimate = math.dist(x, y) ** 2 / max(_square_of_masked(a), _square_of_masked(e)) / a.count
    else:
        estimate = found.change or 0.0
    if masked[0] is None or masked[1] is None:
        return estimate, "estimated"
    # A lower bound; an estimate near it means that one mask contains the other.
    least = abs(masked[0] - masked[1]) / a.count
    if least and estimate <= 2 * least:
        return least, "counted"
    return max(estimate, 1 / a.count), "estimated"


def _square_of_masked(numbers: Statistics) -> float:
    """Return the mean square of what a float mask adds to the entries that it masks, as a fingerprint counts it."""
    largest = max(abs(numbers.min or 0.0), abs(numbers.max or 0.0))
    infinite = (2 * (largest or 1.0)) ** 2 * numbers.neginf
    return (numbers.norm**2 + infinite) / ((numbers.count - numbers.zeros) or 1) or 1.0


def _least_share(now: Value, then: Value) -> float:
    """Return the least share of entries in which a bool mask and an additive one differ; 0 if one is no mask."""
    numbers = now.forward.statistics
    count = 0 if numbers is None else numbers.count
    least = min((abs(x - y) for x in hidden_counts(now) for y in hidden_counts(then)), default=0)
    return least / count if count else 0.0


def _both_inputs(call: CallPair, path: str) -> tuple[Value, Value] | None:
    now, then = value_at(call.actual.inputs, path), value_at(call.expected.inputs, path)
    return None if now is None or then is None or now.shape != then.shape else (now, then)
