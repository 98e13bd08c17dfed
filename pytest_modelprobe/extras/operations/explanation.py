"""The first operation that differs, in layers whose code differs and whose two models are there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pytest_modelprobe.comparison import Diagnosis
from pytest_modelprobe.models import Layers, run_eagerly
from pytest_modelprobe.record import Record
from pytest_modelprobe.runs import in_float32
from pytest_modelprobe.text import pattern

from .alignment import first_difference
from .stream import Recorder, Step

_MOST = 3
"""Of so many layers the operations are looked at."""


def of_diagnosis(diagnosis: Diagnosis, actual: Record, expected: Record) -> Iterator[str]:
    """Yield a sentence for each layer whose own code is a cause, with the first operation that differs.

    Args:
        diagnosis: The causes.
        actual: The record of a model that is there.
        expected: The record of the other model.
    """
    code = (cause for cause in diagnosis.causes if cause.kind == "computation" and cause.changes_code)
    types = diagnosis.comparison.actual.layers
    layers = {(pattern(cause.layer), types[cause.layer].type): cause.layer for cause in reversed([*code])}
    for layer in [*reversed(layers.values())][:_MOST]:
        if said := _of_layer(layer, diagnosis, actual, expected):
            where = f" in {types[layer].label}" if len(layers) > 1 else ""
            yield f"First operation that differs{where}: {said}."


def _of_layer(layer: str, diagnosis: Diagnosis, actual: Record, expected: Record) -> str | None:
    """Return the first difference between the operations of a layer, called alone on both sides."""
    found, names = diagnosis.comparison, diagnosis.comparison.names_before
    now, then = actual.live_run, expected.live_run
    if now is None or then is None:
        return None
    here, there = _Recorders(), _Recorders()
    before = names.layers.get(layer, layer)
    now.isolated(actual, like=found.expected, names=names, only=[layer], within=here)
    then.isolated(expected, only=[before], within=there)
    for (_, call), recorder in here.first.items():
        other = there.first.get((before, call))
        if other is not None and (said := first_difference(recorder.steps(), other.steps())):
            return said
    return None


class _Recorders:
    """Makes a recorder for each call. The first is kept, of a call that is made several times."""

    def __init__(self) -> None:
        self.first: dict[tuple[str, int], Recorder] = {}

    def __call__(self, call: tuple[str, int]) -> Recorder:
        recorder = Recorder()
        self.first.setdefault(call, recorder)
        return recorder


def of_pair(pair: tuple[tuple[str, int], tuple[str, int]], actual: Record, expected: Record) -> Iterator[str]:
    """Yield a sentence with the first operation that differs between two calls, as they are in the run.

    Args:
        pair: Layer and index of a call of the actual, and of the expected. Both take the same tensors.
        actual: The record of a model that is there.
        expected: The record of the other model.
    """
    now, then = (_of_call(*call, record) for call, record in zip(pair, (actual, expected), strict=True))
    if said := now and then and first_difference(now, then):
        yield f"First operation that differs: {said}."


def _of_call(layer: str, index: int, record: Record) -> Sequence[Step]:
    """Return the operations of a call and of all calls inside it, in a run in float64."""
    recorders: list[Recorder] = []

    @contextlib.contextmanager
    def within(model: nn.Module) -> Iterator[None]:
        module, layers = Layers(model).modules[layer], Layers(model)
        forward = module.forward

        @functools.wraps(forward)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            recorders.append(Recorder())
            with recorders[-1]:
                return forward(*args, **kwargs)

        with run_eagerly(layers), in_float32(model, torch.float64):
            vars(module)["forward"] = recorded
            yield

    if record.live_run is not None:
        with contextlib.suppress(Exception):  # a model may fail in another dtype
            record.live_run.again(record, within)
    return recorders[index].steps() if index < len(recorders) else []
