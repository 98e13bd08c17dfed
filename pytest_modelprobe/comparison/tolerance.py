"""How far two readings of one value are apart, and how far they may be.

A change is the distance of two tensors relative to the norm of the expected one, ‖x − y‖ / ‖y‖, estimated from their
fingerprints. It may be a small multiple of the noise that was measured with the expected, never less than a floor
that belongs to the dtype: what the fingerprint itself and its digits in a file leave open. Whatever the noise, it
allows a hundredth at most: a value that moves by more than that on its own is not repeatable, and no number in a file
may say that everything is the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from pytest_modelprobe.record import Reading, Statistics, estimated_change, estimated_share, is_read

Direction = Literal["forward", "backward", "state"]

MULTIPLE = 4.0
"""How many times its measured noise a value may change. See benchmarks/TOLERANCE.md for the measurements."""

GROWN = 10.0
"""How many times its noise may grow, before a snapshot says something else than it did."""

LARGEST_TOLERANCE: dict[Direction, float] = {"forward": 1e-2, "backward": 2e-2, "state": 1e-2}
"""The most that noise allows, relative to the norm. Gradients move by a hundredth where one ReLU gate flips, and by 1.7
hundredths in a ResNet on another CPU."""

_EPSILON = {"float64": 2.2e-16, "float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.8e-3}
_FLOOR: dict[Direction, float] = {"forward": 2e-6, "backward": 2e-6, "state": 3e-6}
_UNMEASURED: dict[Direction, float] = {"forward": 1e-4, "backward": 2e-2, "state": 3e-6}
_PRINTED = 2e-5  # statistics in a file have six digits
_NOTHING = 1e-5  # of the scale: what is zero in exact arithmetic is not larger
_SHOWN = 4.0  # what mean, deviation and range show a value to have moved at least, in units of what is allowed
_FEW_ZEROS = 0.01  # of the elements: as many may be zero or next to it, by how a machine rounds


class ValueChange(NamedTuple):
    """How far a value is from what it was, and how far it may be."""

    change: float | None
    """Relative to the expected norm (integers: share of elements); inf from nothing; None: cannot be told."""
    noise: float | None = None
    limit: float = 0.0

    @property
    def known(self) -> bool:
        """Whether the two could be compared."""
        return self.change is not None

    @property
    def differs(self) -> bool:
        """Whether the value changed by more than it may."""
        return self.change is not None and not self.change <= self.limit

    @property
    def units(self) -> float:
        """The change in units of what is allowed."""
        if self.change is None or self.change == 0:
            return 0.0
        return self.change / self.limit if self.limit else math.inf


UNKNOWN = ValueChange(None)
"""There is nothing to compare on either side."""
GONE = ValueChange(1.0)
"""From something to nothing."""
CAME = ValueChange(math.inf)
"""From nothing to something."""


def change(
    actual: Reading,
    expected: Reading,
    *,
    direction: Direction = "forward",
    dtype: str = "float32",
    measured: bool = False,
    scale: Callable[[], float] = float,
    times: float = 1.0,
    rounding: float = 0.0,
) -> ValueChange:
    """Return how far ``actual`` is from ``expected``; what only one of the two has differs.

    Args:
        actual: Of the value now.
        expected: Of the value then; its noise counts.
        direction: Of values, of gradients, or of parameters and buffers.
        dtype: Of the value; narrow ones have higher floors.
        measured: Whether noise was measured with the expected record.
        scale: Returns the norm of what belongs to the value: one that is zero in exact arithmetic is judged against it.
        times: The user's tolerance.
        rounding: The largest of any dtype that the run computed in, see `epsilon`: noise allows four of it.

    >>> one, two = (Reading(statistics=Statistics(count=4, mean=m), fingerprint=(m, m)) for m in (1.0, 1.01))
    >>> found = change(two, one)
    >>> round(found.change, 6), found.limit, found.differs
    (0.007071, 0.0001, True)
    """
    if direction == "state" and actual.reason is not None:
        return UNKNOWN  # of weights that changed since the forward nothing can be said
    x, y = actual.fingerprint, expected.fingerprint
    if x is None or y is None or actual.digest is not None or expected.digest is not None:
        both = is_read(actual) and is_read(expected)
        if not both or _kinds(actual) != _kinds(expected):
            return GONE if is_read(expected) else CAME if is_read(actual) else UNKNOWN
    if _counts(actual) != _counts(expected):
        return CAME
    floor, noise = _floor(direction, dtype, measured), MULTIPLE * (expected.noise or 0.0)
    most = max(LARGEST_TOLERANCE[direction], MULTIPLE * rounding)
    limit = max(floor, min(noise, most)) * times
    a, e = actual.statistics, expected.statistics
    if expected.digest is not None:
        same = actual.digest == expected.digest and _agree(actual, expected)
        share = 0.0 if same and _shown(a, e, 0.0) <= _SHOWN * floor else _share(actual, expected)
        return ValueChange(share, expected.noise, min(noise, LARGEST_TOLERANCE[direction]) * times)
    if x is None or y is None:
        return ValueChange(_shown(a, e, 0.0), expected.noise, max(limit, _PRINTED))
    if x == y and _same_moments(a, e):
        return ValueChange(0.0, expected.noise, limit)
    # The norm is exact by the moments; non-finite elements are in the fingerprint alone.
    norm = e.norm if e is not None and not e.nonfinite else math.hypot(*y)
    found, shown = estimated_change(x, y, norm), _shown(a, e, 0.0)
    if found == 0 and not _agree(actual, expected):
        return ValueChange(math.inf, expected.noise, limit)
    if found > limit or shown > _SHOWN * limit:
        least = _NOTHING * scale()
        if norm < least:
            norm, found = least, estimated_change(x, y, least)
            shown = _shown(a, e, least)
        if norm:  # what is nearly nothing is all noise: that is judged against the scale
            nothing = MULTIPLE * max(least, rounding * scale()) / norm
            limit = max(floor, min(noise, max(most, nothing))) * times
    return ValueChange(shown if found <= limit and shown > _SHOWN * limit else found, expected.noise, limit)


def allows_more(actual: Reading, expected: Reading, *, direction: Direction, dtype: str, measured: bool) -> bool:
    """Whether the noise of ``actual`` would allow far more than that of ``expected`` does: it grew tenfold.

    >>> quiet, loud = (Reading(noise=noise) for noise in (1e-6, 1e-3))
    >>> allows_more(loud, quiet, direction="forward", dtype="float32", measured=True)
    True
    """
    floor = 0.0 if expected.digest is not None else _floor(direction, dtype, measured)
    return MULTIPLE * (actual.noise or 0.0) > GROWN * max(floor, MULTIPLE * (expected.noise or 0.0))


def epsilon(dtype: str) -> float:
    """Return the rounding of a dtype, relative to a number; 0 of what is not rounded.

    >>> epsilon("bfloat16"), epsilon("int64")
    (0.0078, 0.0)
    """
    return _EPSILON.get(dtype, 0.0)


@functools.cache
def _floor(direction: Direction, dtype: str, measured: bool) -> float:
    floors = _FLOOR if measured else _UNMEASURED
    return max(floors[direction], _EPSILON.get(dtype, 0.0) / 4)


def _kinds(reading: Reading) -> tuple[bool, bool]:
    """Return which of the two that say the most a reading has."""
    return reading.fingerprint is not None, reading.digest is not None


def _share(actual: Reading, expected: Reading) -> float:
    """Return the share of integers that differ: at least one does."""
    count = expected.statistics.count if expected.statistics is not None else 0
    if actual.fingerprint is None or expected.fingerprint is None or not count:
        return 1.0
    return max(estimated_share(actual.fingerprint, expected.fingerprint, count), 1 / count)


def _counts(reading: Reading) -> tuple[int | None, ...]:
    """Return what of a reading is counted: of what it is, how much of that is not finite, and since which forward."""
    s = reading.statistics
    if s is None:
        return (reading.tensors,)
    return reading.tensors, s.count, s.nan, s.posinf, s.neginf, s.first_nan, s.first_posinf, s.first_neginf


def _same_moments(a: Statistics | None, e: Statistics | None) -> bool:
    """Whether all that `_shown` and `_agree` look at is the same."""
    if a is None or e is None:
        return a is e
    return (a.mean, a.deviations, a.min, a.max, a.zeros) == (e.mean, e.deviations, e.min, e.max, e.zeros)


def _shown(a: Statistics | None, e: Statistics | None, least: float) -> float:
    """Return how far two tensors are apart at least, relative to the norm of the second, or to a ``least`` norm.

    No element moved by more than the distance of the two, and neither mean nor deviation by more than its share of one
    element. What digits in a file leave open is nothing.
    """
    if a is None or e is None or a.mean is None or e.mean is None:
        return 0.0 if (a and a.mean) is (e and e.mean) else math.inf
    norm = max(e.norm, least)
    element = norm / math.sqrt(e.finite)
    if (a.min is None) != (e.min is None):  # all that a file has of a gradient
        return _beyond(a.rms, e.rms, element)
    pairs = ((a.mean, e.mean, element), (a.std, e.std, element), (a.min, e.min, norm), (a.max, e.max, norm))
    return max(_beyond(x, y, size) for x, y, size in pairs)


def _beyond(x: float | None, y: float | None, size: float) -> float:
    if x is None or y is None:
        return 0.0 if x is y else math.inf
    apart = abs(x - y)
    return 0.0 if apart <= _PRINTED * abs(y) else apart / size if size else math.inf


def _agree(a: Reading, e: Reading) -> bool:
    """Whether two readings of the same elements count the same zeros."""
    if a.statistics is None or e.statistics is None:
        return a.statistics is e.statistics
    few = 0.0 if e.digest is not None else _FEW_ZEROS * e.statistics.count
    return abs(a.statistics.zeros - e.statistics.zeros) <= few
