"""Change what layers compute while a test runs: by `intervene`, with ready-made `faults`.

A test that has never failed may be unable to fail: planting a fault shows whether it notices. The user's code is not
edited. Hooks make the changes, and at the end of a block the model is as it was before.
"""

from __future__ import annotations

from . import faults as faults
from .intervention import CallHook as CallHook
from .intervention import Change as Change
from .intervention import Intervention as Intervention
from .intervention import forward as forward
from .intervention import intervene as intervene
