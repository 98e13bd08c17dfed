"""Readings of several ranks as one, and what has to be equal in all of them.

`merging` and `tensor_parallel` decide which readings belong together, and the functions here add them up. A number that
would not be exact is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pytest_modelprobe.record import (
    Call,
    Dimension,
    Histogram,
    Layer,
    Parameter,
    Reading,
    Statistics,
    Units,
    Value,
    address,
    qualified,
)

T = TypeVar("T")


SAME_START = "All ranks should have the same: look at the seed, at the weights that each loads, and at what is frozen"
NOT_REDUCED = (
    "Gradients were not reduced over the ranks before the optimizer's step: call the model that "
    "DistributedDataParallel wraps through the wrapper, and outside no_sync()"
)
OTHER_STEP = "The gradients are the same: look at each rank's optimizer, its hyperparameters and its state"


def demand_equal(
    have: Sequence[tuple[int, T]], name: str, what: str, of: Callable[[T], Any], advice: str = SAME_START
) -> None:
    """Raise `AssertionError` if a rank differs from the first in what all should have in common."""
    rank, first = have[0]
    for other, one in have[1:]:
        if of(one) != of(first):
            here, there = _shown(of(one)), _shown(of(first))
            if here == there:  # six digits do not show the difference
                here, there = str(of(one)), str(of(first))
            raise AssertionError(
                f"ranks disagree: {name} has another {what} in [rank {other}] than in [rank {rank}]: "
                f"{here}, not {there}. {advice}"
            )


def demand_alike(have: Sequence[tuple[int, Layer]]) -> None:
    """Raise `AssertionError` if a layer does not have the same class and parameters in all ranks."""
    label = have[0][1].label
    demand_equal(have, label, "class", lambda layer: layer.type)
    demand_equal(have, label, "parameters", lambda layer: [(p.name, p.shape) for p in layer.parameters])


def mean(reading: Reading | None) -> float | None:
    """Return the mean, or `None` if there is none."""
    return None if reading is None or reading.statistics is None else reading.statistics.mean


def rms(reading: Reading | None) -> float | None:
    """Return the root mean square, or `None` if there is none."""
    return None if reading is None or reading.statistics is None else reading.statistics.rms


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def together(readings: Sequence[Reading | None], *, adds_up: bool = False, of_step: bool = False) -> Reading | None:
    """Return the reading of the parts of all ranks together, or `None` if no rank has one.

    Args:
        readings: The reading of each rank.
        adds_up: Whether the parts are those of a batch, so that their fingerprints add up.
        of_step: Whether microbatches count as one batch.
    """
    have = [reading for reading in readings if reading is not None]
    if not have:
        return None
    unread = next((r for r in have if r.statistics is None and r.reason), None)
    if unread is not None:  # the numbers of the other ranks would pass for those of the whole
        return Reading(tensors=have[0].tensors, reason=unread.reason)
    statistics = [r.statistics for r in have if r.statistics is not None and r.statistics.count]
    histograms = [r.histogram for r in have if r.histogram is not None]
    return Reading(
        tensors=1 if of_step and adds_up else have[0].tensors,
        statistics=functools.reduce(Statistics.merge, statistics) if statistics else have[0].statistics,
        fingerprint=_sum_of_fingerprints(have) if adds_up else None,
        digest=added([reading.digest for reading in have]) if adds_up else None,
        units=_units([r.units for r in have]),
        reason=next((r.reason for r in have if r.reason), None),
        histogram=functools.reduce(Histogram.merge, histograms) if histograms else None,
    )


def _sum_of_fingerprints(readings: Sequence[Reading]) -> tuple[float, ...] | None:
    all_have = [reading.fingerprint for reading in readings if reading.fingerprint is not None]
    return tuple(map(math.fsum, zip(*all_have, strict=True))) if len(all_have) == len(readings) else None


def added(digests: Sequence[str | None]) -> str | None:
    """Return the digest of parts together, or `None` if one has none. A digest is a sum of hashes in 64 bits."""
    all_have = [int(digest, 16) for digest in digests if digest is not None]
    return f"{sum(all_have) % 2**64:016x}" if len(all_have) == len(digests) else None


def once(reading: Reading) -> Reading:
    """Return the reading of a value that is the same in every microbatch as if it had been read in one of them."""
    s, times = reading.statistics, reading.tensors
    # If the microbatches are not equally large, what one of them had is not known.
    if s is None or times == 1 or s.count % times:
        return reading
    counts = {name: getattr(s, name) // times for name in ("count", "zeros", "nan", "posinf", "neginf")}
    return dataclasses.replace(
        reading, tensors=1, statistics=dataclasses.replace(s, **counts, deviations=s.deviations / times)
    )


def _units(units: Sequence[Units | None]) -> Units | None:
    have = [one for one in units if one is not None]
    if len(have) < len(units) or len({(one.axis, len(one)) for one in have}) != 1:
        return None
    lows, highs = zip(*(one.low for one in have), strict=True), zip(*(one.high for one in have), strict=True)
    return Units(axis=have[0].axis, low=tuple(map(min, lows)), high=tuple(map(max, highs)))


def scaled(reading: Reading, factor: float) -> Reading:
    """Return the reading of the same tensor times a positive factor, without units and histogram."""
    s = reading.statistics
    if s is None or s.mean is None or s.min is None or s.max is None:
        return reading
    scaled = dataclasses.replace(
        s,
        min=s.min * factor,
        max=s.max * factor,
        mean=s.mean * factor,
        deviations=s.deviations * factor * factor,
    )
    fingerprint = None if reading.fingerprint is None else tuple(factor * x for x in reading.fingerprint)
    return dataclasses.replace(reading, statistics=scaled, units=None, fingerprint=fingerprint, histogram=None)


# --- tensor-parallel models -------------------------------------------------------------------------------------------

TENSOR_PARALLEL = "tensor parallel"
"""The note in the record of a tensor-parallel model begins with this."""
MIXED = "several kinds of parallelism"
"""The note in a record of which the parts are not known begins with this."""

_READINGS = ("reading", "after", "update", "gradient", "applied")
_LAST = 1 << 62  # the place of parameters in the order of computation: after every call
# Values of two ranks are the same within this share of the rms. All ranks add in the same order, but the kernels of a
# GPU need not.
_CLOSE = 1e-5
_A_TERM = "each rank has a term of it, and not the sum"
_UNKNOWN = "each rank has another, and no layout says which part of the whole it is"
_SHARD = re.compile(r"shard\((\d+)\)")


class Joining:
    """Puts together what the ranks have of a layer: shards along their dimension, and what all ranks have once."""

    def __init__(self) -> None:
        self.different: list[tuple[int, str]] = []
        """What should be the same in all ranks and differs, each with its place in the order of computation."""

    def layer(self, have: list[tuple[int, Layer]]) -> Layer:
        """Return one layer; raise `AssertionError` if ranks disagree on its structure or its parameters."""
        first = have[0][1]
        demand_alike(have)
        demand_equal(have, first.label, "number of calls", lambda layer: len(layer.calls))
        return dataclasses.replace(
            first,
            parameters=tuple(
                self._parameter(first.name, [(rank, layer.parameters[i]) for rank, layer in have])
                for i in range(len(first.parameters))
            ),
            calls=tuple(
                self._call(first, [(rank, layer.calls[i]) for rank, layer in have]) for i in range(len(first.calls))
            ),
        )

    def _parameter(self, layer: str, have: list[tuple[int, Parameter]]) -> Parameter:
        first, name = have[0][1], qualified(layer, have[0][1].name)
        demand_equal(have, name, "requires_grad", lambda parameter: parameter.requires_grad)
        demand_equal(have, name, "layout", lambda parameter: parameter.layout)
        if (first.layout or "").startswith("shard"):
            whole: dict[str, Any] = {field: together([getattr(own, field) for _, own in have]) for field in _READINGS}
            return dataclasses.replace(first, layout=None, **whole)
        for field in _READINGS:
            what = f"the gradient of {name}" if field in ("gradient", "applied") else name
            numbered = [(rank, getattr(own, field)) for rank, own in have]
            try:
                demand_equal(numbered, what, "mean", mean)
                demand_equal(numbered, what, "rms", rms)
            except AssertionError as error:
                if field == "reading":
                    raise
                # A gradient differs if a value did: only the first in the order of computation is told.
                self.different.append((_LAST, str(error)))
        return dataclasses.replace(first, layout=None)

    def _call(self, layer: Layer, have: list[tuple[int, Call]]) -> Call:
        first = have[0][1]
        random = {call.random for _, call in have}

        def values(side: str) -> tuple[Value, ...]:
            by_path = [(rank, {value.path: value for value in getattr(call, side)}) for rank, call in have]
            return tuple(
                self._value(
                    (first.started if side == "inputs" else first.finished, address(layer.name, first, path)),
                    [(rank, found[path]) for rank, found in by_path if path in found],
                )
                for path in by_path[0][1]
            )

        return dataclasses.replace(
            first,
            inputs=values("inputs"),
            outputs=values("outputs"),
            attention=(),
            random=first.random if len(random) == 1 else None,
            response=None,
        )

    def _value(self, where: tuple[int, str], have: list[tuple[int, Value]]) -> Value:
        first, values = have[0][1], [value for _, value in have]
        layouts = {value.layout for value in values}
        shard = _SHARD.fullmatch(first.layout or "")
        if len(layouts) == 1 and shard is not None:
            return _sharded(values, int(shard[1]))
        if "partial" in layouts:
            return dataclasses.replace(
                first, forward=_reason(first.forward, _A_TERM), backward=_same_or(values, _A_TERM)
            )
        other = next(((rank, value) for rank, value in have if not _are_equal(first.forward, value.forward)), None)
        if other is None:
            return dataclasses.replace(first, backward=_same_or(values, _A_TERM), layout="replicated")
        if layouts == {"replicated"}:
            self._note_difference(where, have[0], other)
        unknown = _reason(first.forward, _UNKNOWN)
        backward = None if first.backward is None else _reason(first.backward, _UNKNOWN)
        return dataclasses.replace(first, forward=unknown, backward=backward, backward_inner=None)

    def _note_difference(self, where: tuple[int, str], first: tuple[int, Value], other: tuple[int, Value]) -> None:
        (rank, one), (another, value) = first, other
        what, here, there = _difference(value.forward, one.forward)
        text = (
            f"ranks disagree: {where[1]} has another {what} in [rank {another}] than in [rank {rank}]: {here}, not "
            f"{there}. All ranks of a tensor-parallel model should "
            "have the same of it: look at the batch that each is given, and at what draws random numbers"
        )
        self.different.append((where[0], text))


def _sharded(values: Sequence[Value], dim: int) -> Value:
    """Return a value of which each rank has a part along a dimension."""
    first = values[0]
    axis = dim - len(first.shape)
    return dataclasses.replace(
        first,
        shape=_shape(values, dim),
        forward=_shards([value.forward for value in values], axis) or first.forward,
        backward=_shards([value.backward for value in values], axis),
        backward_inner=_shards([value.backward_inner for value in values], axis),
    )


def _shards(readings: Sequence[Reading | None], axis: int) -> Reading | None:
    found = together(readings)
    units = [reading.units for reading in readings if reading is not None and reading.units is not None]
    if found is None or len(units) < len(readings) or any(one.axis != axis for one in units):
        return found
    low, high = (sum((getattr(one, end) for one in units), ()) for end in ("low", "high"))
    return dataclasses.replace(found, units=Units(axis=axis, low=low, high=high))


def _shape(values: Sequence[Value], dim: int) -> tuple[Dimension, ...]:
    """Return the shape of the whole. A DTensor has this shape, but a local tensor has the shape of its part."""
    first = values[0]
    sizes = [value.shape[dim] for value in values]
    whole = [size for size in sizes if isinstance(size, int)]
    # The statistics are always those of the local part: if the shape has more elements, it is that of the whole.
    count = 0 if first.forward.statistics is None else first.forward.statistics.count
    elements = math.prod(size if isinstance(size, int) else 0 for size in first.shape) * first.forward.tensors
    if len(whole) < len(sizes) or (count and elements != count):
        return first.shape
    return *first.shape[:dim], sum(whole), *first.shape[dim + 1 :]


def _same_or(values: Sequence[Value], reason: str) -> Reading | None:
    """Return the gradient that all ranks have, or the reason why the gradient of the whole is not known."""
    first = values[0].backward
    others = [value.backward for value in values]
    if first is None or all(_are_equal(first, other) for other in others):
        return first
    return _reason(first, reason)


def _are_equal(a: Reading, b: Reading | None) -> bool:
    """Whether two readings are of the same numbers."""
    if b is None or (a.reason, a.tensors, a.digest) != (b.reason, b.tensors, b.digest):
        return False
    one, other = a.statistics, b.statistics
    if one is None or other is None:
        return one is other
    if (one.count, one.nan, one.posinf, one.neginf) != (other.count, other.nan, other.posinf, other.neginf):
        return False
    return all(_is_close(one, other, name) for name in ("min", "max", "mean", "rms"))


def _difference(a: Reading, b: Reading) -> tuple[str, str, str]:
    """Return the name of a number that differs between two readings, and this number in each."""
    one, other = a.statistics, b.statistics
    if one is None or other is None:
        return "mean", _shown_number(mean(a)), _shown_number(mean(b))
    if one.nonfinite != other.nonfinite:
        return "number of elements that are not finite", f"{one.nonfinite:,}", f"{other.nonfinite:,}"
    different = (name for name in ("mean", "rms", "min", "max") if not _is_close(other, one, name))
    name = next(different, "mean")
    return name, _shown_number(getattr(one, name)), _shown_number(getattr(other, name))


def _is_close(a: Statistics, b: Statistics, name: str) -> bool:
    one, other = getattr(a, name), getattr(b, name)
    if one is None or other is None:
        return one is other
    return bool(abs(one - other) <= _CLOSE * (a.rms or 0.0))


def _reason(reading: Reading, reason: str) -> Reading:
    return Reading(tensors=reading.tensors, reason=reading.reason or reason)


def _shown_number(x: float | None) -> str:
    return "not known" if x is None else f"{x:.6g}"
