"""Change what layers compute while a test runs: `intervene`, ready-made `faults`; `ablation`, one layer at a time."""

from __future__ import annotations

from . import faults
from .ablations import Ablated, Ablation, Metric, ablation, assert_layer_matters
from .faults import Swap
from .intervention import Change, Intervention, intervene

__all__ = [
    "Ablated",
    "Ablation",
    "Change",
    "Intervention",
    "Metric",
    "Swap",
    "ablation",
    "assert_layer_matters",
    "faults",
    "intervene",
]
