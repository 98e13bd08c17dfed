"""How calls are written: differences that change nothing that is computed, where every value is the same."""

from __future__ import annotations

from pytest_modelprobe.comparison.differences import CallPair, Difference
from pytest_modelprobe.comparison.pairing import comparable, is_same
from pytest_modelprobe.record import NOT_DEFAULT, Value

from .computation import has_new_source
from .index import ComparisonIndex

_NOTHING = (None, False, "=None", "=False")


def is_of_call_syntax(index: ComparisonIndex, difference: Difference) -> bool:
    """Whether a difference is one of how a call is written; what it gets or gives is the same, or is not used.

    So are arguments with their default, ``None`` or ``False``; a tensor that the code called does not use; another
    shape of the same elements; a mask in another dtype; and an output inside the model that nobody uses. Where a value
    differs, all of these may matter.
    """
    pair = index.pair_at(difference)
    if pair is None:
        return False
    if difference.kind in ("input added", "input removed"):
        return not pair.outermost and _is_unused(index, pair, difference)
    if difference.kind == "argument":
        return _is_same_argument(pair, difference) and not (pair.outermost and not _is_nothing(difference))
    if difference.kind == "interface":
        return not pair.outermost and _has_same_elements(pair, difference.what)
    if difference.kind == "path":
        return not pair.outermost
    if difference.kind == "source":
        above = index.caller_of(pair)
        return above is not None and not has_new_source(index, difference, above)
    if difference.kind == "response":
        return difference.change is None and _is_handed_alike(index, pair, difference)
    if difference.kind == "response gradient":
        came_or_went = {d.what for d in index.of_call(pair, "input added", "input removed")}
        return difference.what in came_or_went
    return False


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
    return bool(found) and all(_is_reshaped(*values) or _is_recast(*values) for values in found)


def _at(values: tuple[Value, ...], path: str) -> list[Value]:
    return [value for value in values if value.path == path]


def _is_reshaped(now: Value, then: Value) -> bool:
    if now.dtype != then.dtype:
        return False
    if is_same(now.forward, then.forward):
        return True
    a, e = now.forward.statistics, then.forward.statistics
    # In another order of axes; the fingerprint of one that is split into other samples is another one, too.
    return a is not None and e is not None and a.count == e.count and a == e


def _is_recast(now: Value, then: Value) -> bool:
    """Whether a mask that no layer gives out is one of bools, integers or floats now, and was another."""
    return now.shape == then.shape and None is now.source is then.source and now.is_floating != then.is_floating


def _is_handed_alike(index: ComparisonIndex, pair: CallPair, difference: Difference) -> bool:
    """Whether what the code passes to a child differs only in how the call of the child is written."""
    child, space, path = difference.what.rpartition(" ")
    called = index.child_call(pair, child) if space else None
    if called is None:
        return False
    sides = {str(side).removesuffix(NOT_DEFAULT) for side in (difference.actual, difference.expected)}
    if any(str(side).endswith(NOT_DEFAULT) for side in (difference.actual, difference.expected)):
        return False
    if sides <= {"None", "=None", "=False"}:
        return True
    found = [d for d in index.of_call(called, "argument", "input added", "input removed") if d.what == path]
    return bool(found) and all(is_of_call_syntax(index, d) for d in found)
