"""Values whose elements are the same in another form: another shape, or a mask of another dtype.

Libraries change these forms freely: a mask of bools becomes one of floats, and is expanded later than before. What a
layer gets is then the same, although nothing about the tensor is. Such differences explain nothing and fail no test by
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_modelprobe.comparison.differences import CallPair, Difference
from pytest_modelprobe.comparison.pairing import emitted, is_same
from pytest_modelprobe.record import Reading, Value, relative_name

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
    a, e, path = pair.actual, pair.expected, difference.what
    taken = value_at(a.inputs, path), value_at(e.inputs, path)
    given = value_at(a.outputs, path), value_at(e.outputs, path)
    found = [(now, then) for now, then in (taken, given) if now is not None and then is not None]
    return bool(found) and all(
        _is_reshaped(now, then) or (now is taken[0] and _is_same_mask(index, pair, now, then, expanded=expanded))
        for now, then in found
    )


def value_at(values: Sequence[Value], path: str) -> Value | None:
    """Return the value at a path, or `None` if there is none."""
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
    if now.source or then.source or _hidden_shares(now).isdisjoint(_hidden_shares(then)):
        return False
    if now.shape != then.shape:
        return expanded
    step = index.step_of(pair)
    caller = index.pair_of(step.parent)
    if caller is None:
        return False
    where = f"{relative_name(step.name, caller.layer)} {now.path}"
    a, e = ({h.where: h for h in emitted(call.response)} for call in (caller.actual, caller.expected))
    if where not in a or where not in e or any(d.what == where for d in index.of_call(caller, "response")):
        return False
    # What the caller passes on is compared where it was made.
    return a[where].passed is not None or index.has_comparable_responses(caller)


def _hidden_shares(value: Value) -> set[float]:
    """Return the shares of its entries that a mask of any shape and dtype may hide; nothing if it is no mask."""
    numbers = value.forward.statistics
    count = 0 if numbers is None else numbers.count
    return {round(n / count, 6) for n in hidden_counts(value)} if count else set()


def hidden_counts(value: Value) -> Sequence[int]:
    """Return how many entries a mask may hide; nothing if it is no mask.

    A bool may stand for what is masked, or for what is not.
    """
    numbers, masked = value.forward.statistics, masked_count(value)
    if numbers is None or masked is None:
        return ()
    return (masked, numbers.zeros) if value.dtype == "bool" else (masked,)


def masked_count(value: Value) -> int | None:
    """Return how many entries of a mask are nonzero; None if it is not a mask of two values."""
    numbers = value.forward.statistics
    if numbers is None:
        return None
    additive = value.is_floating and (numbers.max or 0.0) <= 0 and not numbers.nan and not numbers.posinf
    return numbers.count - numbers.zeros if additive or value.dtype == "bool" else None
