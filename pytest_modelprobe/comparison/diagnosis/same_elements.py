"""Values whose elements are the same in another form: another shape, or a mask of another dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_modelprobe.comparison.differences import CallPair, Difference
from pytest_modelprobe.comparison.pairing import is_same
from pytest_modelprobe.record import Reading, Statistics, Value

from .layer_names import relative_name

if TYPE_CHECKING:
    from .index import ComparisonIndex


def has_same_elements(index: ComparisonIndex, pair: CallPair, difference: Difference, *, expanded: bool = True) -> bool:
    """Whether a value has the same elements in another shape, or is a mask of the same entries in another form.

    Args:
        index: What differs.
        pair: The call that takes the value or gives it out.
        difference: Of its shape or dtype, or of its numbers.
        expanded: Whether a mask may be expanded too: then no more is known than what share of it is masked out.
    """
    inputs = [value_at(call.inputs, difference.what) for call in (pair.actual, pair.expected)]
    outputs = [value_at(call.outputs, difference.what) for call in (pair.actual, pair.expected)]
    found = [(now, then) for now, then in (inputs, outputs) if now is not None and then is not None]
    return bool(found) and all(
        _is_reshaped(now, then) or (now is inputs[0] and _is_same_mask(index, pair, now, then, expanded=expanded))
        for now, then in found
    )


def value_at(values: Sequence[Value], path: str) -> Value | None:
    """Return the value at a path; None if there is none."""
    return next((value for value in values if value.path == path), None)


def _is_reshaped(now: Value, then: Value) -> bool:
    if now.dtype != then.dtype:
        return False
    if is_same(now.forward, then.forward):
        return True
    a, e = now.forward.statistics, then.forward.statistics
    # In another order of axes; the fingerprint of one that is split into other samples is another one, too.
    return a is not None and e is not None and is_same(Reading(statistics=a), Reading(statistics=e))


def _is_same_mask(index: ComparisonIndex, pair: CallPair, now: Value, then: Value, *, expanded: bool) -> bool:
    """Whether an input that no layer gives out masks the same: in another dtype, by another number, or expanded."""
    if now.source or then.source or not may_mask_the_same(now, then):
        return False
    above = index.caller_of(pair)
    caller = index.pair_of(above)
    step = index.step_of(pair)
    if now.shape != then.shape:
        return expanded
    if above is None or caller is None or step is None:
        return False
    where = f"{relative_name(step.name, above.layer.name)} {now.path}"
    a, e = ({h.where: h for h in r.handed} if r else {} for r in (caller.actual.response, caller.expected.response))
    if where not in a or where not in e or any(d.what == where for d in index.of_call(caller, "response")):
        return False
    # What the caller passes on is compared where it was made.
    return a[where].passed is not None or index.has_comparable_responses(caller)


def may_mask_the_same(now: Value, then: Value) -> bool:
    """Whether two masks, of any shape and dtype, hide the same share of entries."""
    shares = [
        {round(n / numbers.count, 6) for n in hidden_counts(value, numbers)}
        if numbers is not None and numbers.count
        else set()
        for value, numbers in ((value, value.forward.statistics) for value in (now, then))
    ]
    return not shares[0].isdisjoint(shares[1])


def hidden_counts(value: Value, numbers: Statistics) -> Sequence[int]:
    """Return how many entries a mask may hide; nothing if it is no mask."""
    masked = masked_count(value, numbers)
    return () if masked is None else (masked, numbers.zeros) if value.dtype == "bool" else (masked,)


def masked_count(value: Value, numbers: Statistics) -> int | None:
    """Return how many entries of a mask are nonzero; None if it is not a mask of two values."""
    if value.dtype == "bool":
        return numbers.count - numbers.zeros
    if not value.is_floating or (numbers.max or 0.0) > 0 or numbers.nan or numbers.posinf:
        return None
    return numbers.count - numbers.zeros
