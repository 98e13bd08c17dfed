"""Change what layers compute while a test runs: by `intervene` with ready-made `faults`, or by `ablation`.

A test that has never failed may be unable to fail: planting a fault shows whether it notices. The user's code is not
edited. Hooks make the changes, and at the end of a block the model is as it was before.
"""

from __future__ import annotations

from . import faults as faults
from .ablations import Ablated as Ablated
from .ablations import Ablation as Ablation
from .ablations import Metric as Metric
from .ablations import ablation as ablation
from .ablations import assert_layer_matters as assert_layer_matters
from .intervention import CallHook as CallHook
from .intervention import Change as Change
from .intervention import Intervention as Intervention
from .intervention import intervene as intervene
