"""Lightning's Trainer, which steps in a closure and begins with a sanity check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning")

ROW = "Lightning, `Trainer`"
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed"},
    "clipping": {"gradient_clip_val": 1e-3},
}


@pytest.mark.filterwarnings("ignore")
def test_a_trainer(case: str, forwards: int, network: Any, samples: Any, holds: Any, tmp_path: Any) -> None:
    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            if case == "compile":
                self.net.compile(backend="eager")

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)

    def fit(model: nn.Module) -> None:
        lightning.seed_everything(1, verbose=False)
        loader, evaluation = DataLoader(samples, 8, shuffle=True), DataLoader(samples, 8)
        lightning.Trainer(
            max_steps=3,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **OPTIONS.get(case, {}),
        ).fit(model, loader, evaluation if case == "evaluation" else None)

    holds(Lit, fit, forwards=forwards, evaluated=case == "evaluation")
