"""Numbers of one tensor: moments and counts, ranges of units, fingerprint.

All of them merge exactly, so that the forwards of a watch and the ranks of a run can be added one by one, in any order,
and no tensor has to be kept. Elements that are not finite are counted and change no other number: otherwise one NaN
would hide all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

# --- dataclasses that are made quickly, in which a NaN equals a NaN ---------------------------------------------------

T = TypeVar("T")


def quickly_made(kind: type[T]) -> type[T]:
    """Return a frozen dataclass with slots, with an ``__init__`` that sets each slot directly.

    The ``__init__`` that `dataclasses` writes for a frozen class passes the name of each field to
    ``object.__setattr__``, and takes twice as long.

    >>> from dataclasses import dataclass
    >>> @quickly_made
    ... @dataclass(frozen=True, slots=True, kw_only=True)
    ... class Size:
    ...     width: int
    ...     height: int = 1
    >>> Size(width=3)
    Size(width=3, height=1)
    """
    own = fields(kind)  # type: ignore[arg-type]
    names: dict[str, Any] = {"MISSING": MISSING}
    lines = []
    for slot in own:
        names[f"set_{slot.name}"] = getattr(kind, slot.name).__set__
        value = slot.name
        if slot.default_factory is not MISSING:
            names[f"make_{slot.name}"] = slot.default_factory
            value = f"make_{value}() if {value} is MISSING else {value}"
        lines.append(f"    set_{slot.name}(self, {value})")
    parameters = ", ".join(slot.name for slot in own)
    # Compiled from text, as in `dataclasses`: a loop over the slots would take longer than what it replaces.
    exec("\n".join([f"def __init__(self, *, {parameters}):", *lines]), names)
    made, written = names["__init__"], kind.__init__
    made.__kwdefaults__ = {
        slot.name: slot.default for slot in own if slot.default is not MISSING or slot.default_factory is not MISSING
    }
    made.__annotations__, made.__qualname__ = written.__annotations__, written.__qualname__
    kind.__init__ = made  # type: ignore[method-assign]
    return kind


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause cyclic garbage collection in a block that makes or drops thousands of objects, none of them in cycles.

    >>> with gc_paused():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class NanEqual:
    """Base of dataclasses that are equal if all fields are equal, where a NaN equals a NaN."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        values = _values_of(cast(Any, type(self)))
        # Most objects have no NaN, and the plain comparison is the faster one.
        return bool(values(self) == values(other)) or _fields(self) == _fields(other)

    def __hash__(self) -> int:
        return hash(_fields(self))


def _fields(numbers: Any) -> tuple[Any, ...]:
    return tuple(_with_one_nan(getattr(numbers, f.name)) for f in fields(numbers) if f.compare)


@functools.cache
def _values_of(kind: type[Any]) -> Callable[[object], object]:
    return operator.attrgetter(*(field.name for field in fields(kind) if field.compare))


def _with_one_nan(value: Any) -> Any:
    """Return the value with `math.nan` for every NaN: in tuples and mappings an object always equals itself."""
    if isinstance(value, tuple):
        return tuple(map(_with_one_nan, value))
    if isinstance(value, Mapping):
        return {key: _with_one_nan(part) for key, part in value.items()}
    return math.nan if isinstance(value, float) and math.isnan(value) else value


def merge_moments(
    n: float, mean: float, deviations: float, m: float, other_mean: float, other_deviations: float
) -> tuple[float, float]:
    """Return mean and sum of squared deviations of ``n`` elements and ``m`` others together.

    This is the formula of Chan, Golub and LeVeque (1979). It adds squared deviations, and so does not cancel as a
    difference of sums of squares does if the mean is large.

    >>> merge_moments(2, 1.0, 2.0, 2, 5.0, 2.0)
    (3.0, 20.0)
    """
    if n and m:
        delta = other_mean - mean
        mean += delta * (m / (n + m))
        deviations += delta * delta * (n * m / (n + m))
    elif m:
        mean = other_mean
    return mean, deviations + other_deviations


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Statistics(NanEqual):
    """Moments and counts of the elements of one tensor, or of several merged.

    Non-finite elements are counted apart. Every other number is that of the finite elements alone.
    """

    count: int
    """Elements, non-finite ones included."""
    nan: int = 0
    """Elements that are NaN."""
    posinf: int = 0
    """Elements that are +infinity."""
    neginf: int = 0
    """Elements that are -infinity."""
    zeros: int = 0
    """Elements equal to zero."""
    min: float | None = None
    """Smallest finite element, or `None` if there is none. Of a complex tensor it is the smallest magnitude."""
    max: float | None = None
    """Largest finite element, or `None` if there is none."""
    mean: float | None = None
    """Mean of the finite elements, or `None` if there is none."""
    deviations: float = 0.0
    """Sum of (x - mean)² over the finite elements."""
    first_nan: int | None = None
    """Index, from 0, of the first forward in which a NaN was seen."""
    first_posinf: int | None = None
    """Index of the first forward in which +infinity was seen."""
    first_neginf: int | None = None
    """Index of the first forward in which -infinity was seen."""

    @property
    def nonfinite(self) -> int:
        """Elements that are NaN or infinite."""
        return self.nan + self.posinf + self.neginf

    @property
    def finite(self) -> int:
        """Elements that are finite."""
        return self.count - self.nonfinite

    @property
    def std(self) -> float | None:
        """Population standard deviation of the finite elements."""
        return None if self.mean is None else math.sqrt(self.deviations / self.finite)

    @property
    def rms(self) -> float | None:
        """Root of the mean square of the finite elements."""
        if self.mean is None:
            return None
        return math.hypot(math.sqrt(self.deviations / self.finite), self.mean)

    @property
    def norm(self) -> float:
        """Root of the sum of squares of the finite elements."""
        if self.mean is None:
            return 0.0
        finite = self.count - self.nan - self.posinf - self.neginf  # no other property: this one is asked for most
        return math.hypot(math.sqrt(self.deviations), self.mean * math.sqrt(finite))

    @property
    def all_zero(self) -> bool:
        """Whether there are elements and each of them is zero."""
        return 0 < self.count == self.zeros

    def counted_from(self, first: int) -> Statistics:
        """Return the same statistics with forwards counted from forward number ``first``."""
        found = (self.first_nan, self.first_posinf, self.first_neginf)
        nan, posinf, neginf = (None if number is None else max(0, number - first) for number in found)
        return dataclasses.replace(self, first_nan=nan, first_posinf=posinf, first_neginf=neginf)

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of both sets of elements together.

        >>> a = Statistics(count=2, min=0.0, max=2.0, mean=1.0, deviations=2.0, zeros=1)
        >>> b = Statistics(count=2, min=4.0, max=6.0, mean=5.0, deviations=2.0)
        >>> both = a.merge(b)
        >>> both.mean, both.std, both.zeros
        (3.0, 2.23606797749979, 1)
        """
        n = 0 if self.mean is None else self.finite
        m = 0 if other.mean is None else other.finite
        mean, deviations = merge_moments(n, self.mean or 0.0, self.deviations, m, other.mean or 0.0, other.deviations)
        return Statistics(
            count=self.count + other.count,
            nan=self.nan + other.nan,
            posinf=self.posinf + other.posinf,
            neginf=self.neginf + other.neginf,
            zeros=self.zeros + other.zeros,
            min=_of_both(min, self.min, other.min),
            max=_of_both(max, self.max, other.max),
            mean=mean if n or m else None,
            deviations=deviations,
            first_nan=_of_both(min, self.first_nan, other.first_nan),
            first_posinf=_of_both(min, self.first_posinf, other.first_posinf),
            first_neginf=_of_both(min, self.first_neginf, other.first_neginf),
        )


if TYPE_CHECKING:

    class FiniteStatistics(Statistics):
        """`Statistics` with at least one finite element, so that each of these is a number."""

        min: float
        max: float
        mean: float
        std: float
        rms: float


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units(NanEqual):
    """The range of each unit (channel or feature) over everything else: batch, positions, calls."""

    axis: int
    """The axis of the units, counted from the end (-1 is the last)."""
    low: tuple[float, ...]
    """Smallest element of each unit, or NaN if the unit has a NaN."""
    high: tuple[float, ...]
    """Largest element of each unit, or NaN if the unit has a NaN."""

    def __len__(self) -> int:
        return len(self.low)

    @property
    def dead(self) -> int:
        """Units of which every element is zero."""
        return sum(low == high == 0 for low, high in zip(self.low, self.high, strict=True))


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of finite elements in exponential bins, two to an octave.

    The bins are the same for every tensor, so that counts of forwards, workers and runs add up. Bin k counts
    2**(k/2) <= x < 2**((k+1)/2), for k from -80 to 80. Smaller and larger elements are in the outermost bins.
    """

    first: int = 0
    """The k of the first bin."""
    negative: tuple[int, ...] = ()
    """Counts of negative elements by magnitude."""
    zero: int = 0
    """Elements equal to zero."""
    positive: tuple[int, ...] = ()
    """Counts of positive elements, in as many bins as the negative ones."""

    def bins(self) -> tuple[list[float], list[int]]:
        """Return the edges of all bins from the smallest number to the largest, and the count between each two.

        >>> Histogram(first=0, negative=(1, 2), zero=5, positive=(3, 4)).bins()
        ([-2.0, -1.4142135623730951, -1.0, 1.0, 1.4142135623730951, 2.0], [2, 1, 5, 3, 4])
        """
        magnitudes = [2.0 ** (k / 2) for k in range(self.first, self.first + len(self.positive) + 1)]
        edges = [-magnitude for magnitude in reversed(magnitudes)] + magnitudes
        return edges, [*reversed(self.negative), self.zero, *self.positive]

    def merge(self, other: Histogram) -> Histogram:
        """Return the counts of both together.

        >>> a = Histogram(first=-1, negative=(1, 0), positive=(0, 3))
        >>> a.merge(Histogram(first=1, negative=(0,), zero=2, positive=(4,)))
        Histogram(first=-1, negative=(1, 0, 0), zero=2, positive=(0, 3, 4))
        """
        have = [one for one in (self, other) if one.positive]
        first = min((one.first for one in have), default=0)
        last = max((one.first + len(one.positive) for one in have), default=0)

        def added(name: str) -> tuple[int, ...]:
            counts = [0] * (last - first)
            for one in have:
                for k, n in enumerate(getattr(one, name), one.first - first):
                    counts[k] += n
            return tuple(counts)

        zero = self.zero + other.zero
        return Histogram(first=first, negative=added("negative"), zero=zero, positive=added("positive"))


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading(NanEqual):
    """The numbers of one value in one direction."""

    tensors: int = 1
    """How many tensors are merged into it: 1, or one for each forward or backward pass. 0 if there was one, and it was
    not seen."""
    statistics: Statistics | None = None
    units: Units | None = None
    fingerprint: tuple[float, ...] | None = None
    """Signed random projections of the elements in logical order, see `fingerprint`."""
    digest: str | None = None
    """For integers and bools, an exact hash of all elements in logical order, as 16 hexadecimal digits."""
    noise: float | None = None
    """Change under harmless perturbations, relative to the norm, or as a share of integers. `None` if not measured."""
    reason: str | None = None
    """Why there are no statistics: the tensor is on the meta device, or sparse, or the like."""
    histogram: Histogram | None = field(default=None, compare=False)
    """Histogram of the values, with ``histograms=True``. It is never compared, and is in no snapshot file."""


def is_read(reading: Reading) -> bool:
    """Whether a reading has statistics, a fingerprint or a digest.

    >>> is_read(Reading(reason="a meta tensor")), is_read(Reading(digest="0"))
    (False, True)
    """
    return reading.statistics is not None or reading.fingerprint is not None or reading.digest is not None


def has_nonfinite(reading: Reading | None) -> bool:
    """Whether an element is NaN or infinite; False if there are no statistics."""
    return reading is not None and reading.statistics is not None and reading.statistics.nonfinite > 0


def estimated_change(a: Sequence[float], b: Sequence[float], norm: float | None = None) -> float:
    """Estimate ‖x - y‖ / ‖y‖ from the fingerprints of x and y.

    The standard error is 18 % for a generic difference, and 25 % for a difference that is in a single column or the
    same everywhere. The estimate is 0 for equal fingerprints, and infinite if y is zero and x is not. For the share of
    integers that differ see `estimated_share`.

    Args:
        a: `Reading.fingerprint` of x.
        b: `Reading.fingerprint` of y.
        norm: ‖y‖ if it is known exactly. Otherwise it is estimated too.

    >>> y = tuple([0.25, -0.25] * 8)
    >>> estimated_change([1.01 * s for s in y], y)
    0.010000000000000009
    """
    distance = math.dist(a, b)
    if norm is None:
        norm = math.hypot(*b)
    if not distance:
        return 0.0
    return distance / norm if norm else math.inf


def proportion(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return the factor of ``b`` that explains the fingerprint ``a`` best, and the norm of what is left.

    Fingerprints are sums, so the fingerprint of a multiple is exactly the multiple of the fingerprint.

    >>> proportion((2.0, 4.0), (1.0, 2.0)), proportion((0.0, 1.0), (1.0, 0.0)), proportion((3.0, 4.0), (0.0, 0.0))
    ((2.0, 0.0), (0.0, 1.0), (0.0, 5.0))
    """
    size = math.fsum(y * y for y in b)
    factor = math.fsum(x * y for x, y in zip(a, b, strict=True)) / size if size else 0.0
    return factor, math.hypot(*(x - factor * y for x, y in zip(a, b, strict=True)))


def estimated_share(a: Sequence[float], b: Sequence[float], count: int) -> float:
    """Estimate the share of ``count`` integers that differ from two fingerprints. Digests tell whether any does.

    >>> y = tuple([0.25, -0.25] * 8)
    >>> estimated_share(y, y, 10), estimated_share([0.0] * 16, y, 10)
    (0.0, 0.05)
    """
    return min(1.0, math.dist(a, b) ** 2 / (2 * count)) if count else 0.0


def _of_both(choose: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Return the number that ``choose`` takes of two, or the only one that there is."""
    return b if a is None else a if b is None else choose(a, b)
