"""Weights that stand in for meta tensors during calls only."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe.models import Offloaded


class Gone(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise FileNotFoundError(key)


@pytest.fixture(autouse=True)
def _accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", sys.modules.get("accelerate", ModuleType("accelerate")))


def test_a_meta_tensor_is_loaded_from_where_the_hook_nearest_to_it_keeps_it() -> None:
    model, far, near = nn.Sequential(nn.Linear(2, 2, device="meta")), torch.zeros(2, 2), torch.ones(2, 2)
    model._hf_hook = SimpleNamespace(weights_map={"0.weight": far, "0.bias": far[0]})
    model[0]._hf_hook = SimpleNamespace(hooks=(SimpleNamespace(), SimpleNamespace(weights_map={"weight": near})))
    offloaded = Offloaded(model.modules())
    assert model[0].weight in offloaded
    assert offloaded.load(model[0].weight) is near


@pytest.mark.parametrize("kept", [{}, Gone()], ids=["no such name", "no such file"])
def test_a_meta_tensor_that_is_kept_nowhere_stays_as_it_is(kept: Any) -> None:
    model = nn.Linear(2, 2, device="meta")
    model._hf_hook = SimpleNamespace(weights_map=kept)
    assert Offloaded([model]).load(model.weight) is model.weight
