"""The value of a call that is compared, in the form in which the other implementation has it.

An engine hands a residual on beside the hidden state and adds it in the next norm, where a model of transformers adds
it at once. Fingerprints are linear, so the fingerprint of the sum is the sum of the two.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from pytest_modelprobe.record import Reading, Step, Value

Sums = Collection[tuple[int, str, str]]
"""What is compared as a sum: of the actual (0) or the expected (1), the class of a layer, ``inputs`` or ``outputs``."""


def main(values: Sequence[Value]) -> Value | None:
    """Return the largest floating-point value, or the first value if there is none."""
    floating = [value for value in values if value.is_floating]
    return max(floating, key=size, default=values[0] if values else None)


def shared(a: Sequence[Value], e: Sequence[Value]) -> tuple[Sequence[Value], Sequence[Value]]:
    """Return the values of two calls without what only one has: what is larger than the main value of the other.

    An engine may take and return its cache. If it has no value as large as that of the other, all are returned.

    >>> x, cache = (Value(path=p, shape=(n,), dtype="float32", device="cpu") for p, n in (("x", 4), ("cache.k", 9)))
    >>> [value.path for value in shared([x, cache], [x])[0]]
    ['x']
    """
    mains = [main(values) for values in (a, e)]
    most = min((size(one) for one in mains if one), default=0)
    mine, theirs = ([value for value in values if not value.is_floating or size(value) <= most] for values in (a, e))
    same = all(one is not None and size(one) == most for one in map(main, (mine, theirs)))
    return (mine, theirs) if same else (a, e)


def size(value: Value) -> int:
    """Return the number of elements of a value."""
    return math.prod(d if isinstance(d, int) else d[1] for d in value.shape)


def forms(values: Sequence[Value]) -> list[Value]:
    """Return the main value, and the sum of the two largest if they are alike: a hidden state and its residual.

    >>> x, y = (
    ...     Value(path=p, shape=(2, 4), dtype="float32", device="cpu", forward=Reading(fingerprint=(n, 1.0)))
    ...     for p, n in (("output[0]", 2.0), ("output[1]", 3.0))
    ... )
    >>> [(form.path, form.forward.fingerprint) for form in forms([x, y])]
    [('output[0]', (2.0, 1.0)), ('output[0] + output[1]', (5.0, 2.0))]
    """
    first = main(values)
    if first is None or not first.is_floating:
        return [] if first is None else [first]
    alike = [v for v in values if (v.shape, v.dtype) == (first.shape, first.dtype) and v.forward.fingerprint]
    if len(alike) != 2 or alike[0].tensor == alike[1].tensor >= 0:
        return [first]
    pairs = zip(*(v.forward.fingerprint or () for v in alike), strict=True)
    reading = Reading(fingerprint=tuple(x + y for x, y in pairs))
    return [first, dataclasses.replace(first, path=" + ".join(v.path for v in alike), forward=reading)]


def chosen(pair: tuple[Step, Step], at: str, sums: Sums) -> list[Value | None]:
    """Return the values of the inputs or outputs of two calls that are compared."""
    found = enumerate(zip(pair, _forms_of(pair, at), strict=True))
    last = (((side, step.layer.type_name, at) in sums, all_of) for side, (step, all_of) in found)
    return [all_of[-is_sum] if all_of else None for is_sum, all_of in last]


def _forms_of(pair: tuple[Step, Step], at: str) -> list[list[Value]]:
    a, e = (getattr(step.call, at) for step in pair)
    return [forms(values) for values in shared(a, e)]


def sums_of(steps: Iterable[tuple[Step, Step]], is_same: Callable[[Value, Value], bool]) -> Sums:
    """Return what is compared as a sum: where as many layers of a class agree by that as by the main value alone.

    It is the same for all layers of a class, so that a layer with an error has no choice.
    """
    votes: Counter[tuple[int, str, str]] = Counter()
    for pair in steps:
        for at in ("inputs", "outputs"):
            both = _forms_of(pair, at)
            for side, step in enumerate(pair):
                if len(both[side]) > 1:
                    alone, together = (any(is_same(form, other) for other in both[1 - side]) for form in both[side])
                    votes[side, step.layer.type_name, at] += together - alone
    return {place for place, more in votes.items() if more >= 0}
