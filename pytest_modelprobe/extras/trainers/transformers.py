"""A callback for `transformers.Trainer`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from .step_log import StepLog

_Callback: Any = importlib.import_module("transformers").TrainerCallback


class TrainerProbe(_Callback):  # type: ignore[misc]
    """Writes the record of every N-th step: ``Trainer(..., callbacks=[TrainerProbe("records", every=100)])``.

    Args:
        folder: Where to write.
        **options: Of `StepLog`.
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        self._log = StepLog(folder, **options)

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        """Begin a step, with all its accumulated forwards."""
        self._log.begin(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the record."""
        self._log.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop."""
        self._log.close()
