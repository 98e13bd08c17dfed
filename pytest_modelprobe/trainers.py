"""Callbacks for training runs: `LightningProbe`, `TrainerProbe` of transformers, `MMEngineProbe`, and `StepLog`.

Each is made when it is first asked for, because its base class comes from a library that may not be installed.
"""

from __future__ import annotations

from typing import Any

from pytest_modelprobe import extension


def __getattr__(name: str) -> Any:
    return extension.attribute("trainers", name, __name__)
