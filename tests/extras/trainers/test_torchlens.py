"""TorchLens: it logs the operations of a watched model, and none of the watch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe

torchlens = pytest.importorskip("torchlens")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"functionals": True, "attention": True}, {"keep": "**"}], ids=repr)
def test_a_trace_has_the_operations_of_the_model_alone(options: dict[str, Any]) -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 4)
    alone = list(torchlens.trace(model, x).layer_labels)
    with ModelProbe() as probe:
        watch = probe.watch(model, **options)
        assert list(torchlens.trace(model, x).layer_labels) == alone
        assert watch.record.forwards == 1
