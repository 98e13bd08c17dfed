"""The distance of two readings of one value, its tolerance, and the differences of which a comparison is made.

A change is the distance of two tensors relative to the norm of the expected one, ‖x − y‖ / ‖y‖, estimated from their
fingerprints. The tolerance is a multiple of the noise measured with the expected record, plus the precision of a
fingerprint in a file. It is at least the floor of the dtype, and at most a hundredth: a value with more noise is not
repeatable, and no number in a file may switch the comparison off.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pytest_modelprobe.record import (
    Call,
    NamesBefore,
    Plain,
    Reading,
    Record,
    Statistics,
    estimated_change,
    estimated_share,
    is_read,
)

Direction = Literal["forward", "backward", "state"]

Precision = Literal["exact", "measured", "unmeasured"]
"""What is known of an expected value. ``exact``: the same machine and versions computed it, and it was in no file, so
only its noise is allowed for. ``measured``: its noise was measured."""

NOISE_FACTOR = 4.0
"""Tolerance in units of the measured noise.

Harmless changes stay within it, except for changes that are smaller than the floor: see evidence/TOLERANCE.md.
"""

NOISE_GROWTH = 10.0
"""A new snapshot counts as more tolerant if its noise is more than this many times that of the old one."""

LARGEST_TOLERANCE: dict[Direction, float] = {"forward": 1e-2, "backward": 2e-2, "state": 1e-2}
"""The largest tolerance from noise, relative to the norm.

Gradients change by 0.01 if one ReLU gate flips, and by 0.017 in a ResNet on another CPU.
"""

UNREPEATABLE = 0.1
"""A gradient with at least this noise has not one digit that repeats."""

ROUNDING = 1e-4
"""A gradient that does not repeat is rounding alone if its norm is at most this share of the step's largest.

Such gradients are left where gradients cancel: at the bias of an attention's keys, or before a constant loss.
"""

_EPSILON = {"float64": 2.2e-16, "float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.8e-3}
# The fingerprint and the digits in a file cannot resolve a smaller change than this.
_FLOOR: dict[Direction, float] = {"forward": 2e-6, "backward": 2e-6, "state": 3e-6}
# A record of a watch has no noise, so its values get a fixed tolerance. Weights are stored and not computed.
_UNMEASURED: dict[Direction, float] = {"forward": 1e-4, "backward": 2e-2, "state": 3e-6}
_FLOORS: dict[Precision, dict[Direction, float]] = {
    "exact": {"forward": 0.0, "backward": 0.0, "state": 0.0}, "measured": _FLOOR, "unmeasured": _UNMEASURED,
}  # fmt: skip
_PRINTED_PRECISION = 2e-5  # statistics in a file have six digits
_ZERO_SHARE = 1e-5  # a value below this share of the scale may be zero in exact arithmetic
_MOMENTS_FACTOR = 4.0  # limit of the change of mean, deviation and range, in units of the tolerance
_ZEROS_SHARE = 0.01  # this share of the elements may round to zero in one record and not in the other


class ValueChange(NamedTuple):
    """The change of a value, and its tolerance."""

    change: float | None
    """The change relative to the expected norm, or the share of elements that differ for integers.

    It is infinite if the expected value was zero or missing, and `None` if it is unknown.
    """
    noise: float | None = None
    limit: float = 0.0
    sizes: str = ""
    """Of an infinite change, which has no percentage: both values, as ``rms 0 → 0.31`` or ``0 → 12 not finite``."""

    @property
    def known(self) -> bool:
        """Whether the two could be compared."""
        return self.change is not None

    @property
    def differs(self) -> bool:
        """Whether the change exceeds the tolerance."""
        return self.change is not None and not self.change <= self.limit

    @property
    def same(self) -> bool:
        """Whether the two are known to be the same within the tolerance."""
        return self.change is not None and self.change <= self.limit

    @property
    def is_resolved(self) -> bool:
        """Whether the change is more than the digits in a file may be the reason of."""
        return self.change is not None and self.change > _FLOOR["forward"]

    @property
    def units(self) -> float:
        """The change in units of the tolerance."""
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
    precision: Precision = "unmeasured",
    scale: Callable[[], float] = float,
    times: float = 1.0,
    rounding: float = 0.0,
    same_signs: bool = True,
) -> ValueChange:
    """Return the change from ``expected`` to ``actual``. A value that only one of the two has counts as different.

    Args:
        actual: The reading now.
        expected: The expected reading, with its noise.
        direction: ``forward`` for values, ``backward`` for gradients, ``state`` for parameters and buffers.
        dtype: Dtype of the value. Narrow dtypes have higher floors.
        precision: What is known of the expected value.
        scale: Returns the norm that a value is compared with if it is zero in exact arithmetic. This is the largest
            norm in the call, or `LargestGradient.beside`.
        times: The user's factor for the tolerance.
        rounding: The largest `epsilon` of any dtype in the run, or of a response what float32 may round: noise allows
            four of it, and the noise of ``actual`` counts up to it.
        same_signs: Whether fingerprints and digests can be compared. If not, the other numbers are: they show how large
            the change is at least, and are equal for elements in another order too.

    >>> one, two = (Reading(statistics=Statistics(count=4, mean=m), fingerprint=(m, m)) for m in (1.0, 1.01))
    >>> found = change(two, one)
    >>> round(found.change, 6), found.limit, found.differs
    (0.007071, 0.0001, True)
    """
    if direction == "state" and actual.reason is not None:
        return UNKNOWN  # the weights changed after the forward
    if direction == "backward" and is_rounding(expected, scale):
        largest = scale()  # of the gradients of the step
        most = 10 * ROUNDING * largest if math.isfinite(largest) else 100 * norm(expected) or math.inf
        return ValueChange(0.0, expected.noise) if norm(actual) <= most else CAME
    x, y = actual.fingerprint, expected.fingerprint
    if x is None or y is None or actual.digest is not None or expected.digest is not None:
        both = is_read(actual) and is_read(expected)
        in_part = actual.reason or expected.reason  # such as of an expanded tensor, without a fingerprint
        if not both or (_available(actual) != _available(expected) and not in_part):
            return GONE if is_read(expected) else CAME if is_read(actual) else UNKNOWN
    a, e = actual.statistics, expected.statistics
    if actual.tensors != expected.tensors or not _same(_COUNTS, a, e):
        return CAME
    floor = _floor(direction, dtype, precision)
    noise = max(0.0, expected.noise or 0.0)  # in this order the largest of 0 and NaN is 0
    if rounding > _EPSILON["float32"]:  # the actual run rounds too, but a loss of precision is no excuse of itself
        noise = max(noise, min(actual.noise or 0.0, rounding))
    noise *= NOISE_FACTOR
    most = max(LARGEST_TOLERANCE[direction], NOISE_FACTOR * rounding)
    resolved = min(floor, _FLOOR[direction])
    limit = max(floor, min(resolved + noise, most)) * times
    if None not in (actual.digest, expected.digest) and same_signs:
        same = actual.digest == expected.digest and _same_zeros(actual, expected)
        share = 0.0 if same and _moments_change(a, e, 0.0) <= _MOMENTS_FACTOR * floor else _share(actual, expected)
        return ValueChange(share, expected.noise, min(noise, LARGEST_TOLERANCE[direction]) * times)
    is_told = same_signs or e is None or not e.deviations  # else equal numbers may be of other elements
    if x is None or y is None:
        found = _moments_change(a, e, 0.0)
        return ValueChange(found, expected.noise, max(limit, _PRINTED_PRECISION)) if found or is_told else UNKNOWN
    if (x == y or not same_signs) and _same(_MOMENTS, a, e):
        return ValueChange(0.0, expected.noise, limit) if is_told else UNKNOWN
    # The norm is exact by the moments; non-finite elements are in the fingerprint alone.
    size = e.norm if e is not None and not e.nonfinite else math.hypot(*y)
    found, least = estimated_change(x, y, size) if same_signs else 0.0, 0.0
    if found == 0 and same_signs and not _same_zeros(actual, expected):
        return ValueChange(math.inf, expected.noise, limit)
    moments = 0.0 if found > limit else _moments_change(a, e, 0.0)
    if found > limit or moments > _MOMENTS_FACTOR * limit:
        scaled = scale()
        if size < _ZERO_SHARE * scaled:
            size = least = _ZERO_SHARE * scaled
            found = estimated_change(x, y, size) if same_signs else 0.0
        if size:  # a value that is nearly zero is all noise: compared with the scale
            nothing = NOISE_FACTOR * max(_ZERO_SHARE, rounding) * scaled / size
            limit = max(floor, min(resolved + noise, max(most, nothing))) * times
        moments = 0.0 if found > limit else _moments_change(a, e, least)
    if moments > _MOMENTS_FACTOR * limit:
        return ValueChange(moments, expected.noise, limit)
    return ValueChange(found, expected.noise, limit) if same_signs else UNKNOWN


def sizes(actual: Reading, expected: Reading) -> str:
    """Return both values of a change without a percentage: ``rms 0 → 0.31``."""
    a, e = actual.statistics, expected.statistics
    if a is None or e is None:
        return ""
    if a.count != e.count:
        return f"{e.count:,} → {a.count:,} elements"
    if a.nonfinite != e.nonfinite:
        return f"{e.nonfinite:,} → {a.nonfinite:,} not finite"
    return "" if a.rms == e.rms else f"rms {e.rms or 0.0:.3g} → {a.rms or 0.0:.3g}"


def allows_more(actual: Reading, expected: Reading, *, direction: Direction, dtype: str, precision: Precision) -> bool:
    """Whether the noise of ``actual`` is more than ten times that of ``expected``.

    >>> quiet, loud = (Reading(noise=noise) for noise in (1e-6, 1e-3))
    >>> allows_more(loud, quiet, direction="forward", dtype="float32", precision="measured")
    True
    """
    floor = 0.0 if expected.digest is not None else _floor(direction, dtype, precision)
    return NOISE_FACTOR * (actual.noise or 0.0) > NOISE_GROWTH * max(floor, NOISE_FACTOR * (expected.noise or 0.0))


def norm(reading: Reading | None) -> float:
    """Return the norm of a reading, or 0 if it has no statistics."""
    return 0.0 if reading is None or reading.statistics is None else reading.statistics.norm


class LargestGradient(NamedTuple):
    """What the gradients of a step are small against."""

    norm: float
    """Largest norm of a gradient that repeats; infinity if none does."""
    effect: float
    """Largest product of the norms of such a gradient and of its value: what scaling the value does to the loss."""

    def beside(self, value: Reading) -> float:
        """Return the norm that a gradient of this value is small against.

        Small values have large gradients, also where these are rounding.

        >>> largest = LargestGradient(norm=1.0, effect=10.0)
        >>> [largest.beside(Reading(statistics=Statistics(count=1, mean=mean))) for mean in (100.0, 0.01, 0.0)]
        [1.0, 1000.0, 1.0]
        """
        size = norm(value)
        return max(self.norm, self.effect / size if size else 0.0)


def largest_gradient(record: Record) -> LargestGradient:
    """Return the largest gradient in all of a record.

    Where gradients cancel, what is left is the rounding of those that canceled, which may be anywhere on the way.
    """
    values = {id(v): v for _, call in record.calls for v in (*call.inputs, *call.outputs)}.values()
    found = [(v.forward, gradient) for v in values for gradient in (v.backward, v.backward_inner)]
    found += [(parameter.reading, parameter.gradient) for parameter in record.parameters]
    norms = [(norm(of), norm(g)) for of, g in found if g is not None and (g.noise or 0.0) < UNREPEATABLE]
    effects = (of * gradient for of, gradient in norms if math.isfinite(of))
    return LargestGradient(max((g for _, g in norms), default=0.0) or math.inf, max(effects, default=0.0))


def is_rounding(gradient: Reading, scale: Callable[[], float]) -> bool:
    """Return whether a gradient does not repeat and is nearly nothing beside the largest: it is what cancels.

    >>> one = Reading(noise=1.4, statistics=Statistics(count=1, mean=1e-7))
    >>> is_rounding(one, lambda: 1.0), is_rounding(one, lambda: 1e-6)
    (True, False)
    """
    return (gradient.noise or 0.0) >= UNREPEATABLE and norm(gradient) <= ROUNDING * scale()


def epsilon(dtype: str) -> float:
    """Return the relative rounding error of a dtype, which is 0 for integers.

    >>> epsilon("bfloat16"), epsilon("int64")
    (0.0078, 0.0)
    """
    return _EPSILON.get(dtype, 0.0)


@functools.cache
def _floor(direction: Direction, dtype: str, precision: Precision) -> float:
    floor = _FLOORS[precision][direction]
    return max(floor, _EPSILON.get(dtype, 0.0) / 4) if floor else 0.0


def _available(reading: Reading) -> tuple[bool, bool]:
    """Return whether a reading has a fingerprint, and whether it has a digest."""
    return reading.fingerprint is not None, reading.digest is not None


def _share(actual: Reading, expected: Reading) -> float:
    """Return the share of integers that differ: at least one does."""
    count = expected.statistics.count if expected.statistics is not None else 0
    if actual.fingerprint is None or expected.fingerprint is None or not count:
        return 1.0
    return max(estimated_share(actual.fingerprint, expected.fingerprint, count), 1 / count)


_COUNTS = operator.attrgetter("count", "nan", "posinf", "neginf", "first_nan", "first_posinf", "first_neginf")
"""Of elements, of those that are not finite, and since which forward there are any."""

_MOMENTS = operator.attrgetter("mean", "deviations", "min", "max", "zeros")
"""All that `_moments_change` and `_same_zeros` compare."""


def _same(numbers: operator.attrgetter[Any], a: Statistics | None, e: Statistics | None) -> bool:
    """Whether these numbers are equal, or there are no statistics on either side."""
    return a is e if a is None or e is None else bool(numbers(a) == numbers(e))


def _moments_change(a: Statistics | None, e: Statistics | None, least: float) -> float:
    """Return a lower bound of the distance of two tensors, relative to the norm of the second, at least ``least``.

    No element moves by more than the distance, and mean and deviation by no more than its share of one element.
    Differences below the printed precision count as 0. Both have the same counts.
    """
    if a is None or e is None or a.mean is None or e.mean is None:
        return 0.0 if (a and a.mean) is (e and e.mean) else math.inf
    finite = e.finite
    a_std, e_std = math.sqrt(a.deviations / finite), math.sqrt(e.deviations / finite)
    if (a.min is None) != (e.min is None):  # all that a file has of a gradient
        x, y = math.hypot(a_std, a.mean), math.hypot(e_std, e.mean)
        return _scaled_difference(x, y, max(e.norm, least) / math.sqrt(finite))
    norm = max(e.norm, least)
    element = norm / math.sqrt(finite)
    return max(
        _scaled_difference(a.mean, e.mean, element),
        _scaled_difference(a_std, e_std, element),
        _scaled_difference(a.min, e.min, norm),
        _scaled_difference(a.max, e.max, norm),
    )


def _scaled_difference(x: float | None, y: float | None, size: float) -> float:
    if x is None or y is None:
        return 0.0 if x is y else math.inf
    if abs(x - y) <= _PRINTED_PRECISION * abs(y):
        return 0.0
    return abs(x - y) / size if size else math.inf


def _same_zeros(a: Reading, e: Reading) -> bool:
    """Whether two readings of the same elements count the same zeros."""
    if a.statistics is None or e.statistics is None:
        return a.statistics is e.statistics
    few = 0.0 if e.digest is not None else _ZEROS_SHARE * e.statistics.count
    return abs(a.statistics.zeros - e.statistics.zeros) <= few


# --- the differences between two records ------------------------------------------------------------------------------

DifferenceKind = Literal[
    "layer added", "layer removed", "layer renamed", "type", "attribute", "mode", "name",
    "parameter added", "parameter removed", "parameter shape", "parameter dtype", "parameter trainable",
    "parameter tied", "parameter order", "buffer added", "buffer removed", "buffer shape", "buffer dtype",
    "buffer tied", "buffer persistent", "calls", "source", "interface", "path", "input added", "input removed",
    "argument", "context", "seed", "loss", "forwards", "input", "weights", "buffer", "output", "state", "response",
    "gradient", "gradient presence", "parameter gradient", "response gradient", "update presence",
    "optimizer", "update", "noise", "run",
]  # fmt: skip


BEHAVIOR: frozenset[DifferenceKind] = frozenset({
    "seed", "loss", "forwards", "input", "weights", "buffer", "output", "state", "response",
    "gradient", "gradient presence", "parameter gradient", "response gradient", "update presence",
    "optimizer", "update", "noise", "run",
})  # fmt: skip
"""Kinds of differences of values; the others are of the architecture."""


Parts = Literal["all", "architecture", "behavior"]


Tolerance = float | Mapping[str, float] | None


CallKey = tuple[str, bool | None, int]
"""Root, its mode where forwards of both modes were recorded, and the index of the call."""


ValueKey = tuple[str, CallKey | None, str, str]
"""Layer, call, side, and path or name. The call is `None` for a value of the layer itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference between two records."""

    layer: str
    """Name in the actual record; of a removed layer, in the expected one."""
    kind: DifferenceKind
    what: str = ""
    """Which attribute, parameter or value."""
    call: int = 0
    """Which call of the layer, from 0."""
    actual: Plain = None
    expected: Plain = None
    change: float | None = None
    """Change relative to the expected norm, or the share of elements for integers; infinite if there was nothing."""
    noise: float | None = None
    """Measured noise of the expected value, or `None` if it was not measured."""
    limit: float | None = None
    """Tolerance of the change."""
    sizes: str = ""
    """Both values of an infinite change; see `ValueChange.sizes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPair:
    """One call that is in both records."""

    layer: str
    key: CallKey
    actual: Call
    expected: Call

    @property
    def outermost(self) -> bool:
        """Whether the call is a forward, whose inputs come from the test."""
        return self.layer == self.actual.root and self.actual.index == 0

    @property
    def same_signs(self) -> bool:
        """Whether fingerprints of its values have the same signs in both records: they are those of the samples."""
        return self.actual.samples == self.expected.samples

    @property
    def has_signs_of_inputs(self) -> bool:
        """Whether its inputs have signs of their own in both records: it is a forward, and not of an older file."""
        return self.outermost and None not in (self.actual.samples, self.expected.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All differences between two records, and the change of every value."""

    actual: Record
    expected: Record
    """With the layers under their names in the actual record."""
    found: tuple[Difference, ...] = ()
    """All differences, also of layers that were not selected."""
    notes: tuple[Difference, ...] = ()
    """Attributes that only one record has, and values of other names: an effect of theirs is a difference itself."""
    strict: bool = False
    """Whether a refactoring differs, where every value is the same; else it is noted."""
    looser: tuple[Difference, ...] = ()
    """Values whose noise grew tenfold: an update would tolerate larger changes."""
    wanted: frozenset[str] | None = None
    """The selected layers, or `None` if all are."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Renamed layers: expected → actual name."""
    names_before: NamesBefore = field(default_factory=NamesBefore)
    """What had another name in the expected record."""
    changes: Mapping[ValueKey, ValueChange] = field(default_factory=dict, repr=False)
    """The change of each value."""
    calls: tuple[CallPair, ...] = field(default=(), repr=False)
    """The calls in both records, in order of execution of the actual one."""

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences of the selected layers."""
        if self.wanted is None:
            return self.found
        return tuple(difference for difference in self.found if difference.layer in self.wanted)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def unknown(self) -> int:
        """The number of values without numbers in both records; they count as equal."""
        return sum(not change.known for change in self.changes.values())

    @property
    def has_same_gradients(self) -> bool:
        """Whether gradients were compared, and those of the parameters and of the model's inputs are the same."""
        roots = {(pair.layer, pair.key) for pair in self.calls if pair.outermost}
        compared = [
            (side, change)
            for (layer, key, side, _), change in self.changes.items()
            if side == "parameter gradient" or (side == "input gradient" and (layer, key) in roots)
        ]
        known = any(side == "parameter gradient" and change.known for side, change in compared)
        return known and not any(change.differs for _, change in compared)

    @property
    def hands_on_same_gradients(self) -> bool:
        """Whether no gradient differs but of the model's outputs, or none that parameters and inputs get."""
        roots = {(pair.layer, pair.key) for pair in self.calls if pair.outermost}
        differing = ((place[:2], place[2]) for place, change in self.changes.items() if change.differs)
        return self.has_same_gradients or all(
            not side.endswith("gradient") or (side == "gradient" and place in roots) for place, side in differing
        )

    def change(self, layer: str, key: CallKey | None, side: str, path: str) -> ValueChange:
        """Return the change of a value; `UNKNOWN` if it was not compared."""
        return self.changes.get((layer, key, side, path), UNKNOWN)
