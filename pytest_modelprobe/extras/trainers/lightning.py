"""A callback for Lightning's `Trainer`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from .step_log import StepLog

# Lightning comes as two packages, each with a base class of its own. The one that is imported already is meant.
_IS_OLD = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
_Callback: Any = importlib.import_module("pytorch_lightning" if _IS_OLD else "lightning.pytorch").Callback


class LightningProbe(_Callback):  # type: ignore[misc]
    """Writes the record of every N-th step: ``Trainer(callbacks=[LightningProbe("records", every=100)])``.

    Args:
        folder: Where to write.
        **options: Of `StepLog`.
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        self._log = StepLog(folder, **options)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step; one with accumulation has several batches."""
        self._log.begin(pl_module, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write the record if the optimizer has stepped."""
        self._log.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop, also after an error."""
        self._log.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop after an error."""
        self._log.close()
