"""A loss without a gradient: the layer that cut the graph is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, UsageError


class Cuts(nn.Module):
    """Two layers, with code before, around and after the second."""

    def __init__(
        self,
        after: Callable[[Tensor], Tensor] = lambda x: x,
        around: Callable[[], Any] = nullcontext,
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.after, self.around = after, around

    def forward(self, x: Tensor) -> Tensor:
        with self.around():
            x = self.second(self.first(x))
        return self.after(x)


def message(model: nn.Module) -> str:
    with pytest.raises(UsageError) as raised:
        ModelProbe().run(model, torch.ones(2, 4), loss="random")
    return str(raised.value)


class Numbers(nn.Module):
    """A layer that detaches."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() * 2


def test_a_layer_that_detaches_is_named_and_not_the_one_after_it() -> None:
    assert message(nn.Sequential(nn.Linear(4, 4), Numbers(), nn.ReLU())) == (
        "layer '1' (Numbers) detaches its output from what it is computed of, so the loss has no gradient: look for "
        ".detach(), .data, .item(), a comparison or torch.no_grad() in its forward, and for layers whose outputs it "
        "does not use, or run without loss="
    )


def test_code_after_the_last_layer_is_that_of_the_block() -> None:
    assert message(nn.Sequential(Cuts(after=torch.detach))).startswith("layer '0' (Cuts) detaches its output")


def test_another_layer_that_detaches_is_not_blamed_for_the_code_after_it() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Sequential(nn.Linear(4, 4), Numbers()), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.teacher(x) + self.student(x)).detach()

    assert message(Teacher()).startswith("(root) detaches its output")


def test_a_run_within_inference_mode_blames_no_layer() -> None:
    with torch.inference_mode():
        assert message(nn.Linear(4, 4)) == (
            "loss= needs gradients, which torch.inference_mode() does not record: call run outside of it, or "
            "without loss="
        )
