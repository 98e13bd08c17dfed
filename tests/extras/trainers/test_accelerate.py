"""Accelerate: a loop of one's own, with models and optimizers that it wraps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

accelerate = pytest.importorskip("accelerate")

ROW = "Accelerate"


@pytest.mark.filterwarnings("ignore")
def test_a_loop(case: str, forwards: int, make: Any, samples: Any, holds: Any) -> None:
    def fit(model: nn.Module) -> None:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.utils.set_seed(1)
        accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=forwards, mixed_precision="bf16" if case == "bf16" else "no"
        )
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, 8, shuffle=True))
        for x, y in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(nn.functional.cross_entropy(prepared(x), y))
                if case == "clipping":
                    accelerator.clip_grad_norm_(prepared.parameters(), 1e-3)
                optimizer.step()
                optimizer.zero_grad()
            if case == "evaluation":
                with torch.no_grad():
                    prepared(x)

    holds(make, fit, forwards=forwards, frozen="stem", evaluated=case == "evaluation")
