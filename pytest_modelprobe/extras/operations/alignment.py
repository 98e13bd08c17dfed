"""Two streams of operations: the first operation of each whose result the other does not have.

Streams are aligned by values: a tensor is known to the other side if that takes or makes an equal one. So operations in
another order, or several in place of one, are no difference where their results are. What is left of each stream are
the operations whose results only this side has, up to what the layer gives out. If that does not show which operations
take the place of which, nothing is said.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from .stream import Numbers, Step

_ROUNDING = 1e-9
"""The change of a tensor relative to its norm up to which it is rounding: calls are made in float64."""

_ALIKE = 3
"""How many operations have to follow alike, so that the two before them are taken for each other."""

_MOST = 10
"""At most so many operations come, go, or stand for one. More are another order of the code."""

_Key = tuple[object, ...]


def first_difference(actual: Sequence[Step], expected: Sequence[Step]) -> str | None:
    """Return the first operations that differ in two streams, in words, or `None` if that cannot be told.

    Tensors are equal if their elements are, in this order. If that tells nothing, as of implementations with other
    layouts, it is enough that they have equal elements in some order, up to two operations that take the same.
    """
    for in_order in (True, False):
        a, e = (list(differing(*both, in_order=in_order)) for both in ((actual, expected), (expected, actual)))
        takes_same = bool(a and e) and _are_equal(a[0].takes, e[0].takes)
        if takes_same and a[0].function == e[0].function:
            return _pair(a[0], e[0], takes_same=True)
        if found := _passed_over(a, actual, expected):
            return _pair(a[0], found, takes_same=True)
        if found := _passed_over(e, expected, actual):
            return _pair(found, e[0], takes_same=True)
        if (in_order or takes_same) and (said := _said(a, e, takes_same=takes_same)):
            return said
    return None


def _said(a: Sequence[Step], e: Sequence[Step], *, takes_same: bool) -> str | None:
    """Return the first operations in words, given those that differ of the actual and of the expected."""
    if not (a or e):
        return None
    for some, others, what in ((a, e, "missing"), (e, a, "new")):
        if 0 < len(run := _left_out(some, others)) <= _MOST:
            more = f"the first of {len(run)} operations that are" if len(run) > 1 else "which is"
            return f"{run[0].operation}, {more} {what}"
    following = [[step.function for step in side[1 : 1 + _ALIKE]] for side in (a, e)]
    if takes_same and following[0] == following[1] and len(following[0]) == _ALIKE:
        return _pair(a[0], e[0], takes_same=takes_same)
    if takes_same:
        a, e = _once(a, e)
    while min(len(a), len(e)) > 1 and a[-1].function == e[-1].function:
        a, e = a[:-1], e[:-1]
    if len(a) == len(e) and (len(a) == 1 or takes_same):
        return _pair(a[0], e[0], takes_same=takes_same)
    if max(len(a), len(e)) > _MOST:
        return None
    if len(e) == 1:
        return f"{a[0].operation}, the first of {len(a)} operations in place of {e[0].operation}"
    return f"{a[0].operation}, in place of {len(e)} operations from {e[0].operation} on" if len(a) == 1 else None


def _once(a: Sequence[Step], e: Sequence[Step]) -> tuple[Sequence[Step], Sequence[Step]]:
    """Return the first operation of one side and those in its place, if the same stand in its place all over."""
    mine, theirs = ([step.function for step in side] for side in (a, e))
    for n in range(1, _MOST + 1):
        for few, many, numbers in ((mine, theirs, (1, n)), (theirs, mine, (n, 1))):
            in_place = (many[:n] if function == few[0] else [function] for function in few)
            if [*itertools.chain.from_iterable(in_place)] == many:
                return a[: numbers[0]], e[: numbers[1]]
    return a, e


def _passed_over(steps: Sequence[Step], own: Sequence[Step], other: Sequence[Step]) -> Step | None:
    """Return the other call of the first operation, if its result is known: as of a clamp that limits nothing."""
    if not steps:
        return None
    function, takes = steps[0].function, steps[0].takes
    made = [step.makes for step in own if step.function == function]
    alike = (step for step in other if step.function == function and _are_equal(step.takes, takes))
    return next((step for step in alike if not any(_are_equal(step.makes, makes) for makes in made)), None)


def _pair(a: Step, e: Step, *, takes_same: bool) -> str:
    elsewhere = a.operation != e.operation
    if takes_same or a.operation.name != e.operation.name:
        return f"{a.operation}{f', not {e.operation}' if elsewhere else ''}"
    return f"{a.operation}, which takes another tensor{f' than {e.operation}' if elsewhere else ''}"


def _left_out(some: Sequence[Step], others: Sequence[Step]) -> list[Step]:
    """Return the first run of operations that come between all those of the other side, or nothing."""
    left, run = list(some), list[list[Step]]()
    matched = True
    for step in reversed(others):
        if left and left[-1].function == step.function:
            left.pop()
            matched = True
            continue
        run = [[step], *run] if matched else [[step, *run[0]], *run[1:]]
        matched = False
    return run[0] if run and not left else []


def differing(steps: Sequence[Step], other: Sequence[Step], *, in_order: bool = True) -> Iterator[Step]:
    """Yield the operations with results that the other side does not have, from the first that takes what it has.

    Where all that is computed from a result is known to the other side again, it is no difference.
    """
    known, takers = _Known(other, in_order), defaultdict[_Key, list[int]](list)
    for number, step in enumerate(steps):
        for one in step.takes:
            takers[_key(one)].append(number)
    lasting = [False] * len(steps)
    for number, step in reversed([*enumerate(steps)]):
        for one in step.makes:
            if one not in known:
                after = [taker for taker in takers[_key(one)] if taker > number]
                lasting[number] = lasting[number] or not after or any(lasting[taker] for taker in after)
    began = False
    for lasts, step in zip(lasting, steps, strict=True):
        began = began or (lasts and all(one.given or one in known for one in step.takes))
        passes_on = any(_is_equal(made, taken, in_order) for made in step.makes for taken in step.takes)
        if lasts and began and not passes_on:
            yield step


# --- equal tensors ----------------------------------------------------------------------------------------------------


class _Known:
    """The tensors of a stream, to ask whether one is among them but for rounding."""

    def __init__(self, steps: Sequence[Step], in_order: bool) -> None:
        self._in_order = in_order
        rows = defaultdict[_Key, list[tuple[float, ...]]](list)
        for step in steps:
            for one in (*step.takes, *step.makes):
                rows[_kind(one, in_order)].append(_vector(one, in_order))
        self._rows = {kind: (found := np.array(some))[found[:, 0].argsort()] for kind, some in rows.items()}
        self._found: dict[_Key, bool] = {}

    def __contains__(self, one: Numbers) -> bool:
        key = _key(one)
        if key not in self._found:
            rows = self._rows.get(_kind(one, self._in_order))
            self._found[key] = rows is not None and _is_among(one, rows, self._in_order)
        return self._found[key]


def _is_among(one: Numbers, rows: npt.NDArray[np.float64], in_order: bool) -> bool:
    """Whether a tensor is among some, of which the rows are sorted."""
    vector = np.array(_vector(one, in_order))
    most = _ROUNDING * np.linalg.norm(vector)
    near = slice(*np.searchsorted(rows[:, 0], (vector[0] - most, np.nextafter(vector[0] + most, np.inf))))
    return bool((np.linalg.norm(rows[near] - vector, axis=1) <= most).any())


def _is_equal(one: Numbers, other: Numbers, in_order: bool) -> bool:
    same_kind = _kind(one, in_order) == _kind(other, in_order)
    return same_kind and _is_among(one, np.array([_vector(other, in_order)]), in_order)


def _are_equal(a: Sequence[Numbers], e: Sequence[Numbers]) -> bool:
    """Whether the tensors that two operations take, or make, are equal."""
    equal = functools.partial(_is_equal, in_order=True)
    return len(a) == len(e) and all(map(equal, a, e))


def _key(one: Numbers) -> _Key:
    """Return what is equal for one tensor wherever it is taken."""
    return one.shape, one.reading.fingerprint, one.reading.digest, one.reading.statistics


def _kind(one: Numbers, in_order: bool) -> _Key:
    """Return what is equal for equal tensors to the bit."""
    found = one.reading.statistics
    nonfinite = found and (found.nan, found.posinf, found.neginf)
    return (one.shape, one.reading.digest, nonfinite) if in_order else (math.prod(one.shape), nonfinite)


def _vector(one: Numbers, in_order: bool) -> tuple[float, ...]:
    """Return numbers that differ for tensors that do. What has no numbers equals nothing."""
    reading, nothing = one.reading, (math.nan,)
    if in_order:
        return reading.fingerprint or nothing
    found = reading.statistics
    return nothing if found is None else tuple(x or 0.0 for x in (found.mean, found.std, found.min, found.max))
