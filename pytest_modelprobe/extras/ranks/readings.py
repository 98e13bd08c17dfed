"""Readings of several ranks as one, and what has to be equal in all of them.

`merging` and `tensor_parallel` decide which readings belong together, and the functions here add them up. A number that
would not be exact is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pytest_modelprobe.record import Histogram, Layer, Reading, Statistics, Units

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
