"""A hook for the `Runner` of MMEngine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from .step_log import StepLog

_hooks: Any = importlib.import_module("mmengine.hooks")
_registry: Any = importlib.import_module("mmengine.registry")


@_registry.HOOKS.register_module()
class MMEngineProbe(_hooks.Hook):  # type: ignore[misc]
    """Writes the record of every N-th step: ``Runner(custom_hooks=[MMEngineProbe("records", every=100)])``.

    A configuration has ``dict(type="MMEngineProbe", folder="records")`` after this class was imported.

    Args:
        folder: Where to write.
        **options: Of `StepLog`.
    """

    # Before the hooks that change weights after a step, or write them.
    priority = "HIGH"

    def __init__(self, folder: str | Path, **options: Any) -> None:
        self._log = StepLog(folder, **options)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Begin a step; one with accumulation has several iterations."""
        self._log.begin(runner.model, runner.iter)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Write the record if the optimizer has stepped."""
        self._log.end()

    def after_train(self, runner: Any) -> None:
        """Stop."""
        self._log.close()
