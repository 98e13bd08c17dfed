"""What a container makes for its children that is no quantity: masks, positions, tokens; how many entries differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pytest_modelprobe.comparison.compare import CallPair, Difference, is_quantity
from pytest_modelprobe.record import Statistics, Value

from .causes import How
from .evidence import Evidence


class Built(NamedTuple):
    """What the code makes otherwise for a child."""

    what: str
    """``attention_mask (for layers.0)``."""
    share: float | None
    """Of its entries, that differ; None: not known."""
    how: How


def built(evidence: Evidence, pair: CallPair, difference: Difference) -> Built | None:
    """Return of a response that differs what the code makes otherwise, and the share of its entries that differ.

    None: it is computed as a hidden state is, or not handed to a child. The share is that of the run, where the value
    differs there too; else that of the response, where it is known.
    """
    child, space, path = difference.what.rpartition(" ")
    if not space or path == "after" or difference.change is None:
        return None
    call = evidence.called(pair, child)
    values = None if call is None else _values(call, path)
    if call is None or values is None or any(map(is_quantity, values)):
        return None
    if values[0].dtype != values[1].dtype:
        return None  # of a mask in another dtype it is not known whether it is another one
    share, how = share_of(evidence, call, *values)
    if share is None and not _is_floating(values[0]):
        share = difference.change
    return Built(f"{path} (for {child})", share, how)


def generated_in_run(evidence: Evidence, child: CallPair, name: str) -> Built | None:
    """Return of a call whose inputs differ in the run the one that is made otherwise; None: others differ too."""
    pairs = [(value, _values(child, value.path)) for value in child.actual.inputs]
    differing = [
        values
        for value, values in pairs
        if values is not None and evidence.comparison.change(child.layer, child.key, "input", value.path).differs
    ]
    if not differing or any(is_quantity(value) for values in differing for value in values):
        return None
    return Built(f"{differing[0][0].path} (for {name})", *share_of(evidence, child, *differing[0]))


def share_of(evidence: Evidence, call: CallPair, now: Value, then: Value) -> tuple[float | None, How]:
    """Return the share of entries of an input that differ in the run; None: none does, or it cannot be told."""
    found = evidence.comparison.change(call.layer, call.key, "input", now.path)
    a, e = now.forward.statistics, then.forward.statistics
    if not found.differs or a is None or e is None or not a.count or a.count != e.count:
        return None, "estimated"
    masked = _masked(now, a), _masked(then, e)
    if _is_floating(then):
        x, y = now.forward.fingerprint, then.forward.fingerprint
        if None in masked or x is None or y is None:
            return None, "estimated"
        estimate = _share(x, y, most=max(masked, key=lambda n: n or 0) or 0) / a.count
    else:
        estimate = found.change or 0.0
    if masked[0] is None or masked[1] is None:
        return estimate, "estimated"
    # As many at least; an estimate that says no more than that says that one mask is within the other.
    least = abs(masked[0] - masked[1]) / a.count
    if least and estimate <= 2 * least:
        return least, "counted"
    return max(estimate, 1 / a.count), "estimated"


def _share(x: Sequence[float], y: Sequence[float], *, most: int) -> float:
    """Return about how many entries differ of masks of floats, of which one has that many that are not zero."""
    norm = max(math.hypot(*x), math.hypot(*y))
    return most * (math.dist(x, y) / norm) ** 2 if norm else 0.0


def _masked(value: Value, numbers: Statistics) -> int | None:
    """Return how many entries a mask hides, or shows; None: it is no mask, or one with more in it."""
    if value.dtype == "bool":
        return numbers.count - numbers.zeros
    if not _is_floating(value) or (numbers.max or 0.0) > 0 or numbers.nan or numbers.posinf:
        return None
    return numbers.count - numbers.zeros


def _is_floating(value: Value) -> bool:
    return value.dtype.startswith(("float", "bfloat", "complex"))


def _values(call: CallPair, path: str) -> tuple[Value, Value] | None:
    now, then = ({v.path: v for v in side.inputs} for side in (call.actual, call.expected))
    return (now[path], then[path]) if path in now and path in then and now[path].shape == then[path].shape else None
