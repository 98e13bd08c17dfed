"""Histograms of exponential bins: their quantiles, and the small pictures in the table of layers.

A record counts elements in bins of equal width on a logarithmic scale. All pictures of a table have one axis, so that
layers can be compared by eye.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .elements import Markup, tag

Histogram = dict[str, Any]

QUARTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""What the five lines of a box show: the ends of its whiskers, its edges, and the median."""

SMALLEST = 2.0**-39
"""The smallest magnitude that a record tells apart. A quantile below it is not known."""

_SIDE = 9
"""Columns on either side of zero."""

_HEIGHT = 9
"""Levels of a picture. The style sheet scales it, so that coordinates have one digit."""


def quantiles(histogram: Histogram, shares: Sequence[float]) -> list[float]:
    """Return quantiles of the magnitudes that are not zero, interpolated within a bin; empty if there are none.

    >>> quantiles({"exponents": [0, 1], "negative": [0, 0], "zero": 5, "positive": [2, 2], "per_octave": 1}, [0.5, 1])
    [2.0, 4.0]
    """
    first, per_octave = histogram["exponents"][0], histogram["per_octave"]
    counts = [a + b for a, b in zip(histogram["negative"], histogram["positive"], strict=True)]
    total = sum(counts)
    found: list[float] = []
    below, bin_ = 0, 0
    for wanted in (share * total for share in shares):
        while bin_ < len(counts) - 1 and below + counts[bin_] < wanted:
            below += counts[bin_]
            bin_ += 1
        if total:
            within = min(1.0, (wanted - below) / counts[bin_]) if counts[bin_] else 0.0
            found.append(2.0 ** ((first + bin_ + within) / per_octave))
    return found


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis for all histograms of a table: negative magnitudes, zero, positive magnitudes, by powers of two."""

    low: float
    """Power of two at which the columns next to zero begin; smaller magnitudes are in them too."""
    octaves: float
    """Width of a column."""

    @classmethod
    def of(cls, histograms: Iterable[Histogram]) -> Axis | None:
        """Return the axis that covers the upper half of each histogram and as much below it as there is room for."""
        middles, tops = [], []
        for histogram in histograms:
            if found := quantiles(histogram, [0.05, 1.0]):
                middles.append(math.log2(found[0]))
                tops.append(math.log2(found[1]))
        if not tops:
            return None
        top = math.ceil(max(tops))
        octaves = max(1.0, (top - min(middles)) / _SIDE)
        return cls(top - _SIDE * octaves, octaves)

    def limits(self) -> str:
        """Return the magnitudes that the axis covers, for the heading."""
        return f"{2**self.low:.1g} to {2 ** (self.low + _SIDE * self.octaves):.3g}"

    def columns(self, histogram: Histogram) -> list[int]:
        """Return the counts of the columns, from the most negative to the most positive."""
        sides = []
        for counts in (histogram["negative"], histogram["positive"]):
            side = [0] * _SIDE
            for bin_, count in enumerate(counts):
                exponent = (histogram["exponents"][0] + bin_) / histogram["per_octave"]
                side[min(_SIDE - 1, max(0, int((exponent - self.low) // self.octaves)))] += count
            sides.append(side)
        return [*reversed(sides[0]), histogram["zero"], *sides[1]]


def sparkline(axis: Axis, histogram: Histogram) -> Markup:
    """Return the picture of a histogram: an area."""
    return tag("svg", tag("path", d=_outline(axis.columns(histogram))))


def _outline(columns: Sequence[int]) -> str:
    """Return the outline as relative lines: coordinates of one digit, and level columns as one line."""
    top = max(columns) or 1
    heights = [0, *(_bar(count, top) for count in columns), 0]
    while len(heights) > 2 and heights[-2] == 0:
        heights.pop()
    path, run = f"M0 {_HEIGHT}", 0
    for height, following in itertools.pairwise(heights):
        if following == height:
            run += 1
        else:
            path += (f"h{run}" if run else "") + f"l1{height - following:+d}".replace("+", " ")
            run = 0
    return path


def _bar(count: int, top: int) -> int:
    # At least one level high, so that one element among millions is seen too.
    return max(1, round((_HEIGHT - 1) * count / top)) if count else 0
