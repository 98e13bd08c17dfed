"""Callbacks for training runs: every N steps the record of one step, as JSON and as scalars of TensorBoard.

Each class is made when it is first asked for, because its base class comes from a library that may not be installed.
"""

from __future__ import annotations

import importlib
from typing import Any

from .step_log import StepLog

__all__ = ["LightningProbe", "MMEngineProbe", "StepLog", "TrainerProbe"]

_MODULES = {"LightningProbe": "lightning", "MMEngineProbe": "mmengine", "TrainerProbe": "transformers"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
