"""Lightning: the Trainer, which steps in a closure and begins with a sanity check, and Fabric."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning")

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed"},
    "clipping": {"gradient_clip_val": 1e-3},
    "evaluation": {},
    "compile": {},
}
IGNORED = pytest.mark.filterwarnings("ignore")


@IGNORED
@pytest.mark.parametrize("case", CASES)
def test_a_trainer(case: str, network: Any, samples: Any, holds: Any, tmp_path: Any) -> None:
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
            **CASES[case],
        ).fit(model, loader, evaluation if case == "evaluation" else None)

    holds(Lit, fit, forwards=2 if case == "accumulation" else 1, evaluated=case == "evaluation")


@IGNORED
def test_fabric(network: Any, samples: Any, modelprobe: Any) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = network()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    watch = modelprobe.watch(wrapped)
    x, y = samples[:8]
    fabric.backward(nn.functional.cross_entropy(wrapped(x), y))
    optimizer.step()
    assert list(watch.first_step.layers) == ["(root)", "fc", "act", "drop", "stem", "head"]
    assert (watch.first_step.forwards, watch.first_step.backwards) == (1, 1)
