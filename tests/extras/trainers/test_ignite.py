"""Ignite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

engine = pytest.importorskip("ignite.engine")

ROW = "Ignite"
OPTIONS: dict[str, dict[str, Any]] = {"accumulation": {"gradient_accumulation_steps": 2}, "bf16": {"amp_mode": "amp"}}


@pytest.mark.filterwarnings("ignore")
def test_a_supervised_trainer(case: str, forwards: int, make: Any, samples: Any, holds: Any) -> None:
    def fit(model: nn.Module) -> None:
        torch.manual_seed(0)
        loader = DataLoader(samples, 8, shuffle=True)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        if case == "clipping":  # there is no option for it: a pre-hook of the optimizer is the short way
            optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1e-3) and None)
        loss, options = nn.functional.cross_entropy, OPTIONS.get(case, {})
        trainer = engine.create_supervised_trainer(model, optimizer, loss, device="cpu", **options)
        if case == "evaluation":
            evaluator = engine.create_supervised_evaluator(model, device="cpu")
            every = engine.Events.ITERATION_COMPLETED(every=2)
            trainer.add_event_handler(every, lambda _: evaluator.run(loader, epoch_length=1))
        trainer.run(loader, max_epochs=1, epoch_length=6)

    holds(make, fit, forwards=forwards, frozen="stem", evaluated=case == "evaluation")
