"""What other tools take for numbers of each layer: a forward with them, in forwards of the same model without.

Each does what it is made for, all of it once: attach, run, hand over what it found. A tool that cannot take a model is
listed with the reason, one that does not come back in `_PATIENCE` seconds with that.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pytest_modelprobe import Watch
from pytest_modelprobe import statistics as reduction

Inputs = dict[str, Any]
Job = Callable[[], object]
_MESSAGE = 80
_PATIENCE = 60


def unwatched(model: nn.Module, inputs: Inputs) -> Job:
    return lambda: model(**inputs)


def probe(model: nn.Module, inputs: Inputs) -> Job:
    """Statistics and fingerprint of every input and output, and the record read."""

    def job() -> object:
        with Watch(model) as watch:
            model(**inputs)
            return watch.record

    return job


def probe_activations(model: nn.Module, inputs: Inputs) -> Job:
    """Statistics of inputs and outputs, as the hooks take them; a record reads the parameters too, as no other does."""
    options = reduction.reduce.__kwdefaults__

    def job() -> object:
        options["fingerprint"] = False
        try:
            with Watch(model):
                return model(**inputs)
        finally:
            options["fingerprint"] = True

    return job


def probe_statistics(model: nn.Module, inputs: Inputs) -> Job:
    """The record without fingerprints."""
    whole = probe(model, inputs)
    options = reduction.reduce.__kwdefaults__

    def job() -> object:
        options["fingerprint"] = False
        try:
            return whole()
        finally:
            options["fingerprint"] = True

    return job


def eight(x: torch.Tensor) -> list[float]:
    return [
        x.mean().item(), x.std().item(), x.min().item(), x.max().item(), x.abs().mean().item(), x.norm().item(),
        (x == 0).float().mean().item(), torch.isnan(x).any().item(),
    ]  # fmt: skip


def hooked(model: nn.Module, inputs: Inputs, read: Callable[[torch.Tensor], object]) -> Job:
    """Run with one forward hook a module that reads its output."""

    def job() -> object:
        found: dict[str, object] = {}

        def hook(name: str) -> Callable[..., None]:
            def see(module: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, torch.Tensor):
                    found[name] = read(output.detach())

            return see

        handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
        model(**inputs)
        for handle in handles:
            handle.remove()
        return found

    return job


def naive_hooks(model: nn.Module, inputs: Inputs) -> Job:
    """Eight statistics of each output, each with `.item()`."""
    return hooked(model, inputs, eight)


def histograms(model: nn.Module, inputs: Inputs) -> Job:
    """A histogram of 64 bins of each output, as experiment trackers log it."""
    return hooked(model, inputs, lambda x: torch.histc(x.float(), bins=64).tolist())


def torchinfo(model: nn.Module, inputs: Inputs) -> Job:
    """Shapes and parameters, no numbers of activations."""
    from torchinfo import summary

    return lambda: summary(model, input_data=inputs, verbose=0)


def captum(model: nn.Module, inputs: Inputs) -> Job:
    """`LayerActivation` of all leaves, and eight statistics of each."""
    from captum.attr import LayerActivation

    leaves = _called_leaves(model, inputs)  # of one that is not called it knows no device
    (name, first), *others = inputs.items()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(**{name: x}, **dict(others))[0]

    def job() -> object:
        found = LayerActivation(forward, leaves).attribute(first)
        return [eight(x) for x in found if isinstance(x, torch.Tensor)]

    return job


def _called_leaves(model: nn.Module, inputs: Inputs) -> list[nn.Module]:
    called: dict[nn.Module, None] = {}
    leaves = (module for module in model.modules() if not list(module.children()))
    handles = [leaf.register_forward_hook(lambda module, *_: called.setdefault(module)) for leaf in leaves]
    model(**inputs)
    for handle in handles:
        handle.remove()
    return list(called)


def torchlens(model: nn.Module, inputs: Inputs) -> Job:
    """`trace`: every operation, with its tensor."""
    import torchlens as tool

    return lambda: tool.trace(model, (), inputs)


def underflow_overflow(model: nn.Module, inputs: Inputs) -> Job:
    """`DebugUnderflowOverflow` of transformers: least and largest magnitude of everything."""
    from transformers.debug_utils import DebugUnderflowOverflow

    model = copy.deepcopy(model)  # its hooks stay
    DebugUnderflowOverflow(model)
    return lambda: model(**inputs)


def localize_divergence(model: nn.Module, inputs: Inputs) -> Job:
    """`localize_divergence` of pytest-torch: a model against its copy, two forwards."""
    import pytest_torch

    other = copy.deepcopy(model)
    return lambda: pytest_torch.localize_divergence(model, other, inputs)


def debug_mode(model: nn.Module, inputs: Inputs) -> Job:
    """`DebugMode` of torch: a hash of the output of every operation."""
    from torch.utils._debug_mode import DebugMode

    def job() -> object:
        with DebugMode(record_nn_module=True) as mode, mode.log_tensor_hashes(["norm"]):
            model(**inputs)
            return mode.logs

    return job


PEERS: dict[str, Callable[[nn.Module, Inputs], Job]] = {
    "unwatched": unwatched,
    "modelprobe, statistics of activations": probe_activations,
    "modelprobe, record with parameters, statistics alone": probe_statistics,
    "modelprobe, record with parameters": probe,
    "naive hooks, eight statistics": naive_hooks,
    "hooks with a histogram": histograms,
    "torchinfo `summary` (no numbers)": torchinfo,
    "captum `LayerActivation`, eight statistics": captum,
    "TorchLens `trace`": torchlens,
    "transformers `DebugUnderflowOverflow`": underflow_overflow,
    "pytest-torch `localize_divergence`": localize_divergence,
    "torch `DebugMode` with hashes": debug_mode,
}


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` after so many seconds."""

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def compare(model: nn.Module, inputs: Inputs, rounds: int) -> dict[str, float | str]:
    """Return the median of each tool's time in forwards of the same round, or why it could not."""
    jobs: dict[str, Job] = {}
    found: dict[str, float | str] = {}
    quiet = io.StringIO()
    for name, make in PEERS.items():
        try:
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), limited(_PATIENCE):
                job = make(model, inputs)
                job()
            jobs[name] = job
        except TimeoutError:
            found[name] = f"more than {_PATIENCE} s"
        except Exception as error:  # noqa: BLE001 - whatever another tool does with a model it was not made for
            found[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:_MESSAGE]}"
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        order = list(jobs)
        shuffle(order)
        for name in order:
            gc.collect()
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                start = time.perf_counter()
                jobs[name]()
                seconds[name].append(time.perf_counter() - start)
    for name, values in seconds.items():
        ratios = (a / b for a, b in zip(values, seconds["unwatched"], strict=True))
        found[name] = statistics.median(ratios)
    return {name: found[name] for name in PEERS}


def table(results: dict[str, dict[str, float | str]]) -> list[str]:
    """Return a table of tools by models."""
    models = list(results)
    lines = [f"| tool | {' | '.join(models)} |", f"|---|{'---|' * len(models)}"]
    for name in itertools.islice(PEERS, 1, None):
        cells = (results[model].get(name, "") for model in models)
        lines.append(f"| {name} | {' | '.join(c if isinstance(c, str) else f'{c:.2f}' for c in cells)} |")
    return lines
