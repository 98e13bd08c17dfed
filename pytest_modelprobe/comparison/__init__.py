"""Two records: their differences, and the causes of these."""

from __future__ import annotations

from .compare import BEHAVIOR, Comparison, Difference, Parts, Tolerance, compare
from .diagnosis import Cause, CauseKind, Diagnosis, diagnose, hidden, tells_of_code
from .tolerance import LARGEST_TOLERANCE

__all__ = [
    "BEHAVIOR",
    "Cause",
    "CauseKind",
    "Comparison",
    "Diagnosis",
    "Difference",
    "LARGEST_TOLERANCE",
    "Parts",
    "Tolerance",
    "compare",
    "diagnose",
    "hidden",
    "tells_of_code",
]
