"""Simple relations between a tensor and the expected one: scaled, shifted, a permutation.

They are hints, and not causes: a reader who knows that an output is scaled by 0.125 looks for the place himself. So
each is said only where the numbers leave hardly another reading.
"""

from __future__ import annotations

import math

from pytest_modelprobe.record import Reading, Statistics

_EXACT = 1e-3
"""Two numbers count as equal up to this relative difference, which is the rounding of float16."""

_AS_PRINTED = 1e-4
"""Statistics of permuted elements count as equal up to this relative difference.

Permuted elements are added in a different order, and files have six digits of the result.
"""

_CLEAR = 1e-2
"""A change above this share of the size is no rounding."""

_MANY_ZEROS = 0.2
"""A different activation or dropout changes the share of zeros by more than this. Different numbers hardly do."""


def hints(actual: Reading, expected: Reading) -> tuple[str, ...]:
    """Return what a change from one reading to another looks like.

    >>> from pytest_modelprobe.record import Statistics
    >>> numbers = Statistics(count=4, mean=0.0, deviations=4.0, min=-1.0, max=1.0)
    >>> old = Reading(statistics=numbers, fingerprint=(1.0, -1.0, 1.0, 1.0))
    >>> hints(Reading(statistics=numbers, fingerprint=(-1.0, 1.0, 1.0, -1.0)), old)
    ('a permutation of its elements',)
    """
    a, e = actual.statistics, expected.statistics
    if a is None or e is None:
        return ()
    if a.nonfinite > e.nonfinite:
        return (f"{a.nonfinite:,} elements are not finite any more",)
    if a.mean is None or e.mean is None:
        return ()
    if a.all_zero or e.all_zero:
        return ("all zero now",) if a.all_zero else ("all zero before",)
    return _of_fingerprints(actual, expected) or _of_moments(a, e, a.mean - e.mean)


def _of_fingerprints(actual: Reading, expected: Reading) -> tuple[str, ...]:
    """Return what fingerprints tell: the sums of a scaled tensor are scaled, those of permuted elements are others."""
    a, e, x, y = actual.statistics, expected.statistics, actual.fingerprint, expected.fingerprint
    size = 0.0 if y is None else math.hypot(*y)
    if a is None or e is None or x is None or y is None or not size:  # elements may cancel in all of its sums
        return ()
    scale = sum(p / size * (q / size) for p, q in zip(x, y, strict=True))  # squares of small numbers are 0
    rest = math.hypot(*(p - scale * q for p, q in zip(x, y, strict=True)))
    if rest < _EXACT * math.hypot(*x) and abs(scale - 1) > _EXACT:
        return ("its sign flipped",) if math.isclose(scale, -1, rel_tol=_EXACT) else (f"scaled by {scale:.4g}",)
    pairs = ((a.min, e.min), (a.max, e.max), (a.std, e.std))
    same = all(p is not None and q is not None and math.isclose(p, q, rel_tol=_AS_PRINTED) for p, q in pairs)
    same_mean = math.isclose(a.mean or 0.0, e.mean or 0.0, rel_tol=_AS_PRINTED, abs_tol=_AS_PRINTED * (e.rms or 1.0))
    moved = math.dist(x, y) > _CLEAR * size
    return ("a permutation of its elements",) if moved and same and same_mean else ()


def _of_moments(a: Statistics, e: Statistics, shift: float) -> tuple[str, ...]:
    if math.isclose(a.std or 0.0, e.std or 0.0, rel_tol=_EXACT) and abs(shift) > _CLEAR * (e.rms or 1.0):
        return (f"shifted by {shift:.4g}",)
    if a.count and abs(a.zeros / a.count - e.zeros / max(e.count, 1)) > _MANY_ZEROS:
        return (f"zeros {e.zeros / max(e.count, 1):.0%} → {a.zeros / a.count:.0%}",)
    return ()
