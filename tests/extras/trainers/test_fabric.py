"""Lightning's Fabric: a loop of one's own, with a model that it wraps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning")

ROW = "Lightning, `Fabric`"

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_loop(case: str, forwards: int, make: Any, samples: Any, holds: Any) -> None:
    def fit(model: nn.Module) -> None:
        lightning.seed_everything(1, verbose=False)
        precision = "bf16-mixed" if case == "bf16" else "32-true"
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        wrapped, optimizer = fabric.setup(model, optimizer)
        for number, (x, y) in enumerate(fabric.setup_dataloaders(DataLoader(samples, 8, shuffle=True)), start=1):
            fabric.backward(nn.functional.cross_entropy(wrapped(x), y))
            if number % forwards == 0:
                if case == "clipping":
                    fabric.clip_gradients(wrapped, optimizer, max_norm=1e-3)
                optimizer.step()
                optimizer.zero_grad()
            if case == "evaluation":
                with torch.no_grad():
                    wrapped(x)

    holds(make, fit, forwards=forwards, frozen="stem", evaluated=case == "evaluation")


def test_a_model_that_fabric_wrapped_has_the_names_of_its_own_layers(
    network: Any, samples: Any, modelprobe: Any
) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = network()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    watch = modelprobe.watch(wrapped)
    x, y = samples[:8]
    fabric.backward(nn.functional.cross_entropy(wrapped(x), y))
    optimizer.step()
    assert list(watch.first_step.layers) == ["(root)", "fc", "act", "drop", "stem", "head"]
    assert (watch.first_step.forwards, watch.first_step.backwards) == (1, 1)
