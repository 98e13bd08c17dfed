"""Ignite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

engine = pytest.importorskip("ignite.engine")

CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "accumulation": {"gradient_accumulation_steps": 2}, "bf16": {"amp_mode": "amp"}, "evaluation": {}
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_a_supervised_trainer(case: str, network: Any, samples: Any, holds: Any) -> None:
    def fit(model: nn.Module) -> None:
        torch.manual_seed(0)
        loader = DataLoader(samples, 8, shuffle=True)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        loss = nn.functional.cross_entropy
        trainer = engine.create_supervised_trainer(model, optimizer, loss, device="cpu", **CASES[case])
        if case == "evaluation":
            evaluator = engine.create_supervised_evaluator(model, device="cpu")
            every = engine.Events.ITERATION_COMPLETED(every=2)
            trainer.add_event_handler(every, lambda _: evaluator.run(loader, epoch_length=1))
        trainer.run(loader, max_epochs=1, epoch_length=6)

    forwards = 2 if case == "accumulation" else 1
    holds(network, fit, forwards=forwards, frozen="stem", evaluated=case == "evaluation")
