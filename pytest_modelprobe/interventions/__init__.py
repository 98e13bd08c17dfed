"""Change what layers compute while a test runs: by `intervene` with ready-made `faults`, or by `ablation`.

A test that has never failed may be unable to fail: planting a fault shows whether it notices. The user's code is not
edited. Hooks make the changes, and at the end of a block the model is as it was before.
"""

from __future__ import annotations

from . import faults
from .ablations import Ablated, Ablation, Metric, ablation, assert_layer_matters
from .faults import Swap
from .intervention import CallHook, Change, Intervention, intervene

__all__ = [
    "Ablated",
    "Ablation",
    "CallHook",
    "Change",
    "Intervention",
    "Metric",
    "Swap",
    "ablation",
    "assert_layer_matters",
    "faults",
    "intervene",
]
