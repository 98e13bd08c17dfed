"""Ways to run a step of a model, watched and not, and how they are timed: in turns, as ratios within a round."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pytest_modelprobe import Watch
from pytest_modelprobe import statistics as reduction

Step = Callable[[], None]
Mode = Callable[[nn.Module], Any]


def nothing() -> None:
    pass


@contextlib.contextmanager
def unwatched(model: nn.Module) -> Iterator[Step]:
    yield nothing


@contextlib.contextmanager
def idle(model: nn.Module) -> Iterator[Step]:
    """Watched before, and no more."""
    Watch(model).close()
    yield nothing


@contextlib.contextmanager
def without_statistics(model: nn.Module) -> Iterator[Step]:
    """All of the watch but the reading of elements."""
    reduce = reduction.reduce
    reduction.reduce = lambda tensor, **options: reduction.Reduced(reason="not read")
    try:
        with Watch(model):
            yield nothing
    finally:
        reduction.reduce = reduce


@contextlib.contextmanager
def statistics_alone(model: nn.Module) -> Iterator[Step]:
    options = reduction.reduce.__kwdefaults__
    options["fingerprint"] = False
    try:
        with Watch(model):
            yield nothing
    finally:
        options["fingerprint"] = True


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[Step]:
    with Watch(model):
        yield nothing


@contextlib.contextmanager
def watched_and_read(model: nn.Module) -> Iterator[Step]:
    """The record is made after the step, from all steps so far."""
    with Watch(model) as watch:
        yield lambda: watch.record and None


@contextlib.contextmanager
def naive(model: nn.Module) -> Iterator[Step]:
    """What one writes by hand: eight statistics of each output and its gradient, each read at once."""
    kept: dict[str, list[float]] = {}

    def read(name: str, x: torch.Tensor) -> None:
        kept[name] = [
            x.mean().item(), x.std().item(), x.min().item(), x.max().item(), x.abs().mean().item(), x.norm().item(),
            (x == 0).float().mean().item(), torch.isnan(x).any().item(),
        ]  # fmt: skip

    def hook(name: str) -> Any:
        def see(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                read(name, output.detach())
                if output.requires_grad:
                    output.register_hook(lambda gradient: read(f"{name} gradient", gradient))

        return see

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    yield nothing
    for handle in handles:
        handle.remove()


MODES: dict[str, Mode] = {
    "unwatched": unwatched,
    "idle": idle,
    "hooks alone": without_statistics,
    "statistics alone": statistics_alone,
    "watched": watched,
    "watched, record read": watched_and_read,
    "naive hooks": naive,
}


def mean_square(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return tensor.float().pow(2).mean()


def forward_of(model: nn.Module, inputs: dict[str, Any]) -> Callable[[], Any]:
    args = [inputs["input"]] if "input" in inputs else []
    kwargs = {name: value for name, value in inputs.items() if name != "input"}
    return lambda: model(*args, **kwargs)


def step_of(model: nn.Module, inputs: dict[str, Any]) -> Step:
    forward = forward_of(model, inputs)

    def step() -> None:
        model.zero_grad()
        mean_square(forward()).backward()

    return step


def in_turns(
    model: nn.Module, step: Step, modes: dict[str, Mode], rounds: int, *, time_of_processor: bool = False
) -> dict[str, list[float]]:
    """Return seconds of each mode, a number a round. What attaching costs is measured apart."""
    clock = time.process_time if time_of_processor else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in modes}
    order = list(modes)
    shuffle = random.Random(0).shuffle
    gc.freeze()  # else each collection below looks at all of torch again
    for turn in itertools.count(-1):  # the first round warms up
        if turn == rounds:
            return times
        shuffle(order)
        for name in order:
            gc.collect()
            with modes[name](model) as finish:
                step()  # what is left of one step for the next to do counts as the next one's
                start = clock()
                step()
                finish()
                seconds = clock() - start
            if turn >= 0:
                times[name].append(seconds)
    return times


def ratios(times: dict[str, list[float]], base: str = "unwatched") -> dict[str, tuple[float, float, float]]:
    """Return lower quartile, median and upper quartile of each mode's ratio to the base."""
    found = {}
    for name, values in times.items():
        each = [a / b for a, b in zip(values, times[base], strict=True)]
        low, middle, high = statistics.quantiles(each, n=4)
        found[name] = low, middle, high
    return found
