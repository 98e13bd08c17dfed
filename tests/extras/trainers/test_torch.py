"""What torch has for training beside a loop: averaged weights, compiled optimizers, pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import pipelining
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def trained(model: nn.Module, samples: Any, step: Callable[[], object]) -> None:
    torch.manual_seed(1)
    for x, y in DataLoader(samples, 8):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        step()


def averaged(model: nn.Module, samples: Any) -> None:
    optimizer, average = optimizer_of(model), AveragedModel(model)
    scheduler = SWALR(optimizer, swa_lr=1e-3)

    def step() -> None:
        optimizer.step()
        average.update_parameters(model)
        scheduler.step()
        average(samples[:8][0])

    trained(model, samples, step)


def compiled(model: nn.Module, samples: Any) -> None:
    torch.compiler.reset()
    trained(model, samples, torch.compile(optimizer_of(model).step, backend="eager"))


def pipeline(kind: Any) -> Callable[[nn.Module, Any], None]:
    def fit(model: nn.Module, samples: Any) -> None:
        torch.manual_seed(1)
        optimizer = optimizer_of(model)
        stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"))
        schedule = kind(stage, 4, loss_fn=nn.functional.cross_entropy)
        for x, y in DataLoader(samples, 16):
            optimizer.zero_grad()
            schedule.step(x, target=y)
            optimizer.step()

    return fit


WAYS: dict[str, Callable[[nn.Module, Any], None]] = {
    "`AveragedModel` and `SWALR`": averaged,
    "`torch.compile(optimizer.step)`": compiled,
    "`ScheduleGPipe`, 4 microbatches": pipeline(pipelining.ScheduleGPipe),
    "`Schedule1F1B`, 4 microbatches": pipeline(pipelining.Schedule1F1B),
}


@pytest.fixture
def _group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_group")
def test_a_way_to_train(way: str, forwards: int, network: Any, samples: Any, holds: Any) -> None:
    holds(network, lambda model: WAYS[way](model, samples), forwards=forwards, frozen="stem")
