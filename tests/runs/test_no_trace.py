"""Whatever a forward changes is as it was: after a run, after a snapshot was written anew, after a check."""

from __future__ import annotations

import collections
import gc
import logging
import os
import random
import re
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe, UsageError, checks
from pytest_modelprobe.models.restoring import GENERATORS, SETTINGS, settings_preserved
from pytest_modelprobe.models.seeding import forked_rng


@dataclass(frozen=True)
class Frozen:
    seen: list[int] = field(default_factory=list)


class Ordered(collections.OrderedDict[str, int]):
    """A subclass that keeps something of its own."""

    calls = 0


def optimizer() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    adam = torch.optim.Adam([parameter])
    adam.step()
    return adam


def step(adam: torch.optim.Optimizer) -> None:
    adam.step()
    adam.param_groups[0]["lr"] *= 0.5


def change_ordered(owner: Any) -> None:
    owner.move_to_end("a")
    owner["c"] = 1
    owner.calls += 1


def bits(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tensor.detach().flatten().view(torch.uint8).tolist()


def everything_of(adam: Any) -> Any:
    state = [[(key, bits(x)) for key, x in values.items()] for values in adam.state.values()]
    return state, adam.param_groups[0]["lr"], bits(adam.param_groups[0]["params"][0])


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "probe.md"

Case = tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]

KINDS: dict[str, Case] = {
    "list": (lambda: [1, 2], lambda x: x.append(3), list),
    "dict": (lambda: {"a": 1, "b": 2}, lambda x: x.update(a=x.pop("b")), lambda x: list(x.items())),
    "OrderedDict of the user": (
        lambda: Ordered(a=1, b=2), change_ordered, lambda x: (list(x.items()), vars(x)),
    ),
    "deque": (lambda: collections.deque([1, 2, 3], maxlen=3), lambda x: x.append(4), lambda x: (list(x), x.maxlen)),
    "set": (lambda: {1, 2}, lambda x: x.symmetric_difference_update({2, 3}), set),
    "array": (lambda: np.ones(3), lambda x: np.add(x, 1, out=x), np.ndarray.tolist),
    "numpy Generator": (
        lambda: np.random.default_rng(0), lambda x: x.normal(), lambda x: str(x.bit_generator.state),
    ),
    "random.Random": (lambda: random.Random(0), lambda x: x.random(), random.Random.getstate),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(0), lambda x: torch.rand((), generator=x), lambda x: bits(x.get_state()),
    ),
    "tensor": (lambda: torch.ones(3), lambda x: x.add_(1), bits),
    "tensor without a version": (lambda: torch.ones(3), lambda x: x.data.add_(1), bits),
    "attribute of a tensor": (
        lambda: nn.Parameter(torch.ones(1)), lambda x: vars(x).update(seen=1), lambda x: dict(vars(x)),
    ),
    "optimizer": (optimizer, step, everything_of),
    "object": (lambda: Frozen([1]), lambda x: x.seen.append(2), lambda x: x.seen),
    "SimpleNamespace": (
        lambda: types.SimpleNamespace(calls=0), lambda x: vars(x).update(calls=1, new=1), lambda x: dict(vars(x)),
    ),
    "buffer of a module": (lambda: nn.BatchNorm1d(2), lambda x: x(torch.ones(3, 2)), lambda x: bits(x.running_mean)),
    "mode of a module": (lambda: nn.Dropout(), lambda x: x.train(not x.training), lambda x: x.training),
    "gradient of a module": (
        lambda: nn.Linear(1, 1),
        lambda x: setattr(x.weight, "grad", torch.ones(1, 1)),
        lambda x: None if x.weight.grad is None else bits(x.weight.grad),
    ),
}  # fmt: skip


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


def deep(value: Any) -> Any:
    for _ in range(50):
        value = [value]
    return value


DEPTHS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda value: value,
    "in a tuple in a list": lambda value: [(1, value)],
    "in an object in a dict in an object": lambda value: Box({"a": Box(value)}),
    "fifty lists deep": deep,
}


class Stateful(nn.Module):
    def __init__(self, held: Any, change: Callable[[], object]) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.held, self.change = held, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change()
        return self.fc(x)


def run(model: nn.Module) -> None:
    ModelProbe().run(model, torch.ones(3, 2), loss="random")


def update(model: nn.Module) -> None:
    probe = ModelProbe()
    record = probe.run(model, torch.ones(3, 2), loss="random")
    assert record.live_run is not None
    measured = record.live_run.measured(record, record)
    assert not [note for note in measured.notes if "raised" in note]


def check(model: nn.Module) -> None:
    checks.deterministic.outcome(ModelProbe(), model, torch.ones(3, 2))


ACTIONS = {"run": run, "update": update, "check": check}


@pytest.mark.parametrize(
    ("kind", "depth", "action"),
    [
        *((kind, "attribute", "run") for kind in KINDS),
        *(("list", depth, "run") for depth in DEPTHS if depth != "attribute"),
        *(("optimizer", "in an object in a dict in an object", action) for action in ("update", "check")),
    ],
)
def test_what_a_forward_changes_is_as_it_was(kind: str, depth: str, action: str) -> None:
    make, change, see = KINDS[kind]
    value = make()
    model = Stateful(DEPTHS[depth](value), lambda: change(value))
    before = see(value)
    ACTIONS[action](model)
    assert see(value) == before
    change(value)  # and it goes on from there
    untouched = make()
    change(untouched)
    assert see(value) == see(untouched)


# --- the process ----------------------------------------------------------------------------------------------------


"""Modes that stay on are held here: torch 2.6 ends the process where it takes one off that nothing else holds."""


def change_environment() -> None:
    os.environ["A_FORWARD_SET"] = "1"
    os.environ.pop("PATH", None)


def change_autocast() -> None:
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_enabled("cpu", True)


def change_cudnn(name: str) -> Callable[[], object]:
    return lambda: setattr(torch.backends.cudnn, name, not getattr(torch.backends.cudnn, name))


CHANGES: dict[str, Callable[[], object]] = {
    "environment": change_environment,
    "warning filters": lambda: warnings.simplefilter("ignore"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "autocast": change_autocast,
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    **{f"cuDNN {name}": change_cudnn(name) for name in ("benchmark", "deterministic", "enabled")},
    "precision of float32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "generator of torch on the CPU": lambda: torch.rand(()),
    "generator of MPS": lambda: torch.rand((), device="mps"),
    "generators of XPU": lambda: torch.rand((), device="xpu"),
    "generators of CUDA": lambda: torch.rand((), device="cuda"),
    "generator of numpy": lambda: np.random.rand(),  # noqa: NPY002
    "generator of random": random.random,
}
TABLE = {one.name: one for one in (*SETTINGS, *GENERATORS)}
CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ONLY: dict[str, Any] = {
    "generators of CUDA": CUDA,
}


def seen(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [seen(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


@contextmanager
def everything_preserved() -> Iterator[None]:
    with settings_preserved(), forked_rng():
        yield


@pytest.mark.parametrize(
    ("name", "action"),
    [
        pytest.param(name, action, marks=ONLY.get(name, []))
        for name in TABLE
        for action in (ACTIONS if name in ("default dtype", "generator of random") else ("run",))
    ],
)
def test_what_a_forward_sets_for_the_whole_process_is_as_it_was(name: str, action: str) -> None:
    if "CUDA" in name:
        torch.cuda.init()
    model = Stateful(None, CHANGES[name])
    with everything_preserved():
        before = seen(TABLE[name].get())
        with suppress(UsageError):  # without gradients there is no loss
            ACTIONS[action](model)
        assert seen(TABLE[name].get()) == before
        CHANGES[name]()
        assert seen(TABLE[name].get()) != before


def test_the_documentation_names_what_the_table_puts_back_and_nothing_else() -> None:
    section = PAGE.read_text("utf-8").partition("| setting of the process |")[2].partition("\n\n")[0]
    documented = re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE)
    assert set(documented) == set(CHANGES)
    assert set(TABLE) <= set(documented)


# --- where it stops -------------------------------------------------------------------------------------------------


def notes(held: Any) -> tuple[str, ...]:
    return ModelProbe().run(Stateful(held, lambda: None), torch.ones(3, 2)).notes


def test_where_there_are_too_many_objects_a_note_says_where_it_stops() -> None:
    several = [[Box(i) for i in range(30_000)], {"near": [1]}]
    (note,) = notes(several)
    assert note == (
        "held[0][19998] and what comes after it stays as a forward leaves it: 20,000 objects in the attributes of the "
        "model were looked at"
    )


def test_what_is_not_of_the_model_is_left_alone() -> None:
    seen = []
    logger = logging.getLogger("test_no_trace")
    probe = ModelProbe()
    watched = nn.Linear(2, 2)
    with probe.watch(watched) as watch:
        model = Stateful([logger, probe, watch], lambda: (seen.append(1), watched(torch.ones(1, 2))))
        probe.run(model, torch.ones(3, 2))
        assert watch.record.forwards == len(seen) == 1


def test_a_generator_that_is_put_back_makes_no_run_repeatable() -> None:
    generator = torch.Generator().manual_seed(0)

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = ({"a": generator},)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(x.shape, generator=generator)

    before, probe, model, x = generator.get_state(), ModelProbe(), Noisy(), torch.ones(3, 2)
    record = probe.run(model, x)
    assert record.live_run is not None
    assert record.live_run.measured(record).noise == "not repeatable"
    assert checks.deterministic.outcome(probe, model, x).verdict == "broken"
    assert torch.equal(generator.get_state(), before)
    assert probe.run(model, x).layers == record.layers


def test_gradients_from_before_a_run_are_as_they_were_also_those_in_a_bucket_that_it_writes_to() -> None:
    class Bucketed(nn.Linear):
        """Writes its gradients into a bucket, of which its parameters have views, as distributed training does."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bucket.fill_(7.0)
            return super().forward(x)

    bucket, model = torch.ones(12), Bucketed(3, 3)
    model.weight.grad, model.bias.grad = bucket[:9].view(3, 3), torch.ones(3)
    number, bias = id(model.weight.grad), model.bias.grad  # one that is referred to here is copied anyway
    with ModelProbe() as probe:
        probe.run(model, probe.randn(2, 3), loss="random")
    assert id(model.weight.grad) == number
    assert model.bias.grad is bias
    assert bucket.tolist() == [1.0] * 12
    assert bias.tolist() == [1.0] * 3


def test_a_gradient_that_something_else_refers_to_is_as_it_was() -> None:
    class Halving(nn.Linear):
        """Has its gradient under another name too, and writes to it, as fused accumulation does."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.main_grad.mul_(0.5)
            return super().forward(x)

    model = Halving(2, 2)
    model.weight.grad = model.main_grad = torch.ones(2, 2)
    with ModelProbe() as probe:
        probe.run(model, probe.randn(2, 2), loss="random")
    assert model.main_grad is model.weight.grad
    assert model.main_grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_run_leaves_nothing_to_the_garbage_collector() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    with ModelProbe() as probe:
        x = probe.randn(3, 4)
        probe.run(model, x, loss="random")
        gc.collect()
        gc.disable()
        try:
            probe.run(model, x, loss="random")
            assert gc.collect() == 0
        finally:
            gc.enable()
