"""Two records: their differences, and the causes of these."""

from __future__ import annotations

from .compare import compare, tolerance_factor
from .diagnosis import (
    ABSORBED,
    NO_EFFECT,
    Cause,
    CauseKind,
    Diagnosis,
    changes_code,
    diagnose,
    layers_behind_zeros,
)
from .matching import is_drawn_otherwise
from .ports import Pairing, pair, port_failure
from .tolerance import (
    BEHAVIOR,
    LARGEST_TOLERANCE,
    CallPair,
    Comparison,
    Difference,
    DifferenceKind,
    Parts,
    Precision,
    Tolerance,
    is_rounding,
    largest_gradient,
)

__all__ = [
    "ABSORBED",
    "BEHAVIOR",
    "CallPair",
    "Cause",
    "CauseKind",
    "Comparison",
    "Diagnosis",
    "Difference",
    "DifferenceKind",
    "LARGEST_TOLERANCE",
    "NO_EFFECT",
    "Pairing",
    "Parts",
    "Precision",
    "Tolerance",
    "compare",
    "diagnose",
    "is_drawn_otherwise",
    "is_rounding",
    "largest_gradient",
    "layers_behind_zeros",
    "changes_code",
    "pair",
    "port_failure",
    "tolerance_factor",
]
