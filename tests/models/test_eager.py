"""Compiled code that holds a watched model runs eagerly, and no other code."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe import Watch, _torch
from pytest_modelprobe.models import RUN_EAGERLY


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).relu()


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.models = {"main": model}

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.models["main"](x)


class Backend:
    """Counts the graphs compiled."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def whole(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, **options)


def in_place(model: nn.Module, **options: Any) -> Callable[..., Any]:
    model.compile(**options)
    return model


def closure(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(lambda x: model(x) * 2, **options)


def argument(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return functools.partial(torch.compile(lambda model, x: model(x) * 2, **options), model)


def attribute(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(Trainer(model).step, **options)


WAYS = [whole, in_place, closure, argument, attribute]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("compiled", "make"),
    [*((compiled, Net) for compiled in WAYS), (whole, lambda: nn.Sequential(nn.Linear(2, 2)))],
)
def test_compiled_before_the_watch_it_runs_eagerly(compiled: Any, make: Any):
    model, backend = make(), Backend()
    call = compiled(model, backend=backend, fullgraph=True)
    expected = call(torch.ones(1, 2))
    with Watch(model) as watch:
        found = call(torch.ones(1, 2))
    assert watch.record.forwards == 1
    assert backend.graphs == 1
    assert torch.equal(found, expected)


@pytest.mark.parametrize("compiled", WAYS)
def test_compiled_after_the_watch_began_it_runs_eagerly(compiled: Any):
    model, backend = Net(), Backend()
    with Watch(model) as watch:
        call = compiled(model, backend=backend, fullgraph=True)
        call(torch.ones(1, 2))
        assert (watch.record.forwards, backend.graphs) == (1, 0)
    call(torch.ones(1, 2))
    assert backend.graphs == 1


def test_compiled_code_without_the_model_stays_compiled():
    backend, twin = Backend(), Net()
    other, step = torch.compile(twin, backend=backend), torch.compile(lambda x: x * 2, backend=backend)
    with Watch(Net()) as watch:
        step(other(torch.ones(1, 2)).detach())
    assert backend.graphs == 2
    assert watch.record.notes == ()


def test_watches_may_be_closed_in_any_order():
    model, backend = Net(), Backend()
    call = torch.compile(model, backend=backend)
    first, second = Watch(model), Watch(model)
    first.close()
    call(torch.ones(1, 2))
    assert (second.record.forwards, backend.graphs) == (1, 0)
    second.close()
    call(torch.ones(1, 2))
    assert backend.graphs == 1


def train_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


@pytest.mark.parametrize(
    ("compiled", "note"),
    [
        (
            lambda model: torch.compile(model, backend="eager"),
            "(root) is compiled; it is run eagerly while it is watched",
        ),
        (lambda model: in_place(model, backend="eager"), "(root) " + RUN_EAGERLY),
        (lambda model: (model[0].compile(backend="eager"), model)[1], "0 " + RUN_EAGERLY),
        (
            lambda model: functools.partial(torch.compile(train_step, backend="eager"), model),
            "train_step " + RUN_EAGERLY,
        ),
    ],
)
def test_a_note_says_what_ran_eagerly(compiled: Any, note: str):
    model = nn.Sequential(nn.Linear(2, 2))
    with Watch(model) as watch:
        compiled(model)(torch.ones(1, 2))
    assert watch.record.notes == (note,)


def test_it_makes_no_difference_when_dynamo_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "stand_in.py").write_text("def _callback_from_stance(callback):\n    return callback\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_torch, "_DYNAMO", "stand_in")
    calls, finders = _torch.CompiledCalls(lambda fn, args, kwargs: fn == "held"), [*sys.meta_path]
    calls.intercept()
    stand_in = importlib.import_module("stand_in")

    def call(fn: str, *args: Any, **kwargs: Any) -> Any:
        return stand_in._callback_from_stance("compile")

    assert (call("held"), call("other")) == (None, "compile")
    calls.release()
    assert call("held") == "compile"
    assert sys.meta_path == finders
