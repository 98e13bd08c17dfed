"""Simple relations between a tensor and the expected one: scaled, shifted, a permutation."""

from __future__ import annotations

import math

from pytest_modelprobe.record import Reading


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
    x, y = actual.fingerprint, expected.fingerprint
    if x is not None and y is not None and (size := math.hypot(*y)):  # elements may cancel in all of its sums
        scale = sum(p / size * (q / size) for p, q in zip(x, y, strict=True))  # squares of small numbers are 0
        rest = math.hypot(*(p - scale * q for p, q in zip(x, y, strict=True)))
        if rest < 1e-3 * math.hypot(*x) and abs(scale - 1) > 1e-3:
            return ("its sign flipped",) if math.isclose(scale, -1, rel_tol=1e-3) else (f"scaled by {scale:.4g}",)
        pairs = ((a.min, e.min), (a.max, e.max), (a.std, e.std))
        same = all(p is not None and q is not None and math.isclose(p, q, rel_tol=1e-4) for p, q in pairs)
        moved = math.dist(x, y) > 1e-2 * size
        if moved and same and math.isclose(a.mean, e.mean, rel_tol=1e-4, abs_tol=1e-4 * (e.rms or 1.0)):
            return ("a permutation of its elements",)
    shift = a.mean - e.mean
    if math.isclose(a.std or 0.0, e.std or 0.0, rel_tol=1e-3) and abs(shift) > 1e-2 * (e.rms or 1.0):
        return (f"shifted by {shift:.4g}",)
    if a.count and abs(a.zeros / a.count - e.zeros / max(e.count, 1)) > 0.2:
        return (f"zeros {e.zeros / max(e.count, 1):.0%} → {a.zeros / a.count:.0%}",)
    return ()
