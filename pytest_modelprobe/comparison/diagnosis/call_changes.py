"""How calls are written: differences that change nothing that is computed, where every value is the same."""

from __future__ import annotations

import math

from pytest_modelprobe.comparison.compare import is_quantity
from pytest_modelprobe.comparison.differences import CallPair, Difference
from pytest_modelprobe.comparison.pairing import comparable, is_same
from pytest_modelprobe.record import Reading, Value

from .computation import has_new_source
from .index import ComparisonIndex

_NOTHING = (None, False)


def is_of_call_syntax(index: ComparisonIndex, difference: Difference) -> bool:
    """Whether a difference is one of how a call is written; what it gets or gives is the same, or is not used.

    So are arguments with their default, ``None`` or ``False``; a tensor that the code called does not use; another
    shape of the same elements; a mask in another dtype; and an output inside the model that nobody uses. Where a value
    differs, all of these may matter.
    """
    if difference.kind in ("response", "response gradient"):
        return True  # the run does not show it; where zeros may hide it, see `layers_behind_zeros`
    if difference.kind in ("buffer added", "buffer removed"):
        return _is_kept_beside(index, difference)
    pair = index.pair_at(difference)
    if pair is None:
        return False
    if difference.kind in ("input added", "input removed"):
        return not pair.outermost and _is_unused(index, pair, difference)
    if difference.kind == "argument":
        return _is_same_argument(pair, difference) and not (pair.outermost and not _is_nothing(difference))
    if difference.kind in ("interface", "input"):
        return not pair.outermost and _has_same_elements(pair, difference.what)
    if difference.kind == "path":
        return not pair.outermost
    if difference.kind == "source":
        above = index.caller_of(pair)
        return above is not None and not has_new_source(index, difference, above)
    return False


def _is_kept_beside(index: ComparisonIndex, difference: Difference) -> bool:
    """Whether a buffer came or went that is in no checkpoint: like an attribute of one record alone."""
    record = index.comparison.actual if difference.kind == "buffer added" else index.comparison.expected
    buffers = {buffer.name: buffer for buffer in record.layers[difference.layer].buffers}
    return buffers[difference.what].persistent is False


def _is_nothing(difference: Difference) -> bool:
    return difference.actual in _NOTHING and difference.expected in _NOTHING


def _is_same_argument(pair: CallPair, difference: Difference) -> bool:
    """Whether a plain argument means the same: ``None`` or ``False``, its default, or one that the code has no more."""
    if _is_nothing(difference):
        return True
    response = pair.actual.response
    if (
        None not in (difference.actual, difference.expected)
        or response is None
        or response.arguments_matter is not False
    ):
        return False
    given = difference.expected if difference.actual is None else difference.actual
    return difference.what not in response.defaults or response.defaults[difference.what] == given


def _is_unused(index: ComparisonIndex, pair: CallPair, difference: Difference) -> bool:
    """Whether the code of a call answers the same, alone, with a tensor and without it."""
    first = index.first_calls[pair.layer]
    a, e = first.actual.response, first.expected.response
    if a is None or e is None or not comparable(a, e):
        return False
    recipe = (a if difference.kind == "input added" else e).recipes.get(difference.what, "")
    _, _, kind = recipe.partition(" ")
    # A mask that masks nothing makes no difference, and the next one may.
    if not kind or kind.startswith(("const", "true", "false")):
        return False
    return all(d.change is None for d in index.of_call(first, "response"))


def _has_same_elements(pair: CallPair, path: str) -> bool:
    """Whether a value has the same elements in another shape, or is a mask that has another dtype."""
    found = [
        (now, then)
        for mine, theirs in ((pair.actual.inputs, pair.expected.inputs), (pair.actual.outputs, pair.expected.outputs))
        for now, then in zip(_at(mine, path), _at(theirs, path), strict=False)
    ]
    return bool(found) and all(_is_reshaped(*values) or _is_same_mask(*values) for values in found)


def _at(values: tuple[Value, ...], path: str) -> list[Value]:
    return [value for value in values if value.path == path]


def _is_reshaped(now: Value, then: Value) -> bool:
    if now.dtype != then.dtype:
        return False
    if is_same(now.forward, then.forward):
        return True
    a, e = now.forward.statistics, then.forward.statistics
    # In another order of axes; the fingerprint of one that is split into other samples is another one, too.
    return a is not None and e is not None and is_same(Reading(statistics=a), Reading(statistics=e))


def _is_same_mask(now: Value, then: Value) -> bool:
    """Whether a value that no layer gives out is a mask of the same share, in another dtype or expanded."""
    shares = [_attended(value) for value in (now, then) if value.source is None]
    return len(shares) == 2 and None not in shares and math.isclose(*shares, abs_tol=1e-6)


def _attended(value: Value) -> float | None:
    """Return the share of a mask that is not masked out; None of what is no mask."""
    numbers = value.forward.statistics
    if numbers is None or numbers.nan or numbers.posinf or numbers.min is None or numbers.max is None:
        return None
    zeros = numbers.zeros / numbers.count
    if value.is_floating and not is_quantity(value):
        return zeros
    if not value.is_floating and 0 <= numbers.min <= numbers.max <= 1:
        return 1 - zeros
    return None
