"""Change what layers compute while a test runs: `intervene`, and ready-made `faults`."""

from __future__ import annotations

from . import faults
from .faults import Swap
from .intervention import Change, Intervention, intervene

__all__ = ["Change", "Intervention", "Swap", "faults", "intervene"]
