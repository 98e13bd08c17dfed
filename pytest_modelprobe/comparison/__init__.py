"""Two records: their differences, and the causes of these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_modelprobe import extension

from .compare import compare
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
from .differences import BEHAVIOR, CallPair, Comparison, Difference, DifferenceKind, Parts, Tolerance
from .pairing import is_drawn_otherwise
from .tolerance import LARGEST_TOLERANCE, Precision, is_rounding, largest_gradient

if TYPE_CHECKING:
    from pytest_modelprobe.extras.ports.pairing import Pairing as Pairing
    from pytest_modelprobe.extras.ports.pairing import pair as pair
    from pytest_modelprobe.extras.ports.pairing import port_failure as port_failure

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
]


def __getattr__(name: str) -> Any:
    return extension.attribute("comparison", name, __name__)
