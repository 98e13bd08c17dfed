"""Nothing waits for the device in a step that is watched: not in a hook, not after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cuda
import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe

pytestmark = pytest.mark.cuda
STEPS = 5
Step = Callable[[nn.Module, torch.optim.Optimizer], object]


class Net(nn.Module):
    """A convolution with batch norm and dropout, and attention over its places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.25)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.dropout(self.relu(self.norm(self.conv(x)))).flatten(2).mT
        return self.head(self.attention(places, places, places)[0].mean(1))


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(4, 3, 4, 4, device="cuda")).square().mean()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()


def discarded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()
    loss(model).backward()


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        loss(model)


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def in_half_precision(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss(model).backward()
    optimizer.step()


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    SCALER.scale(loss(model)).backward()
    SCALER.step(optimizer)
    SCALER.update()


SCALER = torch.amp.GradScaler("cuda", init_scale=8.0)
STEP: list[Step] = [trained, discarded, evaluated, accumulated, clipped, in_half_precision, scaled]
WATCH: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "histograms": {"histograms": True},
    "attention": {"attention": True},
    "profile": {"profile": True},
    "functionals": {"functionals": True},
    "several steps": {"steps": 3},
    "outputs": {"keep": "**"},
    "no isolation": {"isolate": False},
}


def waits_of(step: Step, options: dict[str, Any] | None) -> list[list[str]]:
    torch.manual_seed(0)
    probe = ModelProbe(device="cuda", seed=0)
    model = Net().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = None if options is None else probe.watch(model, **options)
    found = []
    for _ in range(STEPS):
        with fake_cuda.waits() as waits:
            step(model, optimizer)
        found.append(waits)
    if watch is not None:
        watch.close()
        assert watch.record.forwards >= STEPS
    return found


@pytest.mark.parametrize("step", STEP, ids=lambda step: step.__name__)
@pytest.mark.parametrize("options", WATCH.values(), ids=WATCH)
def test_a_watched_step_waits_no_more_than_an_unwatched_one(step: Step, options: dict[str, Any]) -> None:
    unwatched, watched = waits_of(step, None), waits_of(step, options)
    assert [len(waits) for waits in watched[1:]] == [len(waits) for waits in unwatched[1:]], watched[-1]
