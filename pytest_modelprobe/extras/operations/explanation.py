"""The first operation that differs, in layers whose code differs and whose two models are there."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pytest_modelprobe.comparison import Comparison, Diagnosis
from pytest_modelprobe.models import Layers, run_eagerly
from pytest_modelprobe.record import Record, codec
from pytest_modelprobe.runs import in_float32
from pytest_modelprobe.text import pattern

from .alignment import differing, first_difference
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
    found, before = diagnosis.comparison, diagnosis.comparison.names_before.layers
    layers = [layer for layer, _ in _layers(diagnosis)]
    if actual.live_run is not None and expected.live_run is not None and layers:
        here, there = _Recorders(), _Recorders()
        names = found.names_before
        now = actual.live_run.isolated(actual, like=found.expected, names=names, only=layers, within=here)
        then = expected.live_run.isolated(expected, only=[before.get(one, one) for one in layers], within=there)
        yield from _sentences(diagnosis, here.steps(now), there.steps(then))


def streams(record: Record, layers: Sequence[str], found: Comparison | None = None) -> Iterator[str]:
    """Yield the operations of some layers, of the first of each kind, as JSON.

    Args:
        record: The record of a model that is there.
        layers: The layers.
        found: The comparison with the record that has the recipes of the synthetic tensors, if there is one.
    """
    first: dict[tuple[str, str], str] = {}
    for layer in layers:
        first.setdefault((pattern(layer), record.layers[layer].type), layer)
    if record.live_run is not None and first:
        recorders, only = _Recorders(), [*first.values()]
        if found is None:
            ran = record.live_run.isolated(record, only=only, within=recorders)
        else:
            names = found.names_before
            ran = record.live_run.isolated(record, like=found.expected, names=names, only=only, within=recorders)
        yield json.dumps({layer: codec.encode(calls) for layer, calls in recorders.steps(ran).items()})


def of_streams(diagnosis: Diagnosis, actual: Sequence[str], expected: Sequence[str]) -> Iterator[str]:
    """Yield what `of_diagnosis` does, of what `streams` returned for both sides."""
    for mine, theirs in zip(actual, expected, strict=False):
        here, there = (
            {layer: codec.decode(_Calls, calls) for layer, calls in json.loads(text).items()} for text in (mine, theirs)
        )
        yield from _sentences(diagnosis, here, there)


_Calls = tuple[tuple[Step, ...], ...]
"""The operations of each call of a layer that is called alone."""


def _layers(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return the layers whose own code is a cause, of repeated ones the first, with their labels."""
    layers = diagnosis.comparison.actual.layers
    found: dict[tuple[str, str], str] = {}
    for cause in diagnosis.causes:
        if cause.kind == "computation" and cause.changes_code and cause.layer in layers:
            found.setdefault((pattern(cause.layer), layers[cause.layer].type), cause.layer)
    return [(layer, layers[layer].label) for layer in [*found.values()][:_MOST]]


def _sentences(diagnosis: Diagnosis, here: Mapping[str, _Calls], there: Mapping[str, _Calls]) -> Iterator[str]:
    before, layers = diagnosis.comparison.names_before.layers, _layers(diagnosis)
    for layer, label in layers:
        calls = zip(here.get(layer, ()), there.get(before.get(layer, layer), ()), strict=False)
        if said := next(filter(None, (first_difference(*call) for call in calls)), None):
            yield f"First operation that differs{f' in {label}' if len(layers) > 1 else ''}: {said}."


class _Recorders:
    """Makes a recorder for each call. The first is kept, of a call that is made with other arguments too.

    Of a layer of which a call raises, as in float64, nothing is told: what did not run would read as missing.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], Recorder] = {}

    def __call__(self, call: tuple[str, int]) -> Recorder:
        recorder = Recorder()
        self._first.setdefault(call, recorder)
        return recorder

    def steps(self, ran: Record) -> dict[str, _Calls]:
        """Return the operations of each layer, given the record that the calls were made for."""
        found: dict[str, _Calls] = {}
        for (layer, _), recorder in self._first.items():
            found[layer] = (*found.get(layer, ()), recorder.steps())
        responses = [(layer, call.response) for layer in ran.layers.values() for call in layer.calls]
        failed = {layer.name for layer, response in responses if response is not None and response.reason}
        return {layer: calls for layer, calls in found.items() if layer not in failed}


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
            with Recorder() as recorder:
                output = forward(*args, **kwargs)
            recorders.append(recorder)  # unless it raised: what did not run would read as missing
            return output

        with run_eagerly(layers), in_float32(model, torch.float64):
            vars(module)["forward"] = recorded
            yield

    if record.live_run is not None:
        with contextlib.suppress(Exception):  # a model may fail in another dtype
            record.live_run.again(record, within)
    return recorders[index].steps() if index < len(recorders) else []


def of_runs(actual: Callable[[], object], expected: Callable[[], object]) -> Iterator[str]:
    """Yield a sentence with the first operation that differs between two runs in float64, of which neither raises."""
    recorders = Recorder(), Recorder()
    with contextlib.suppress(Exception):  # a model may fail in another dtype
        for recorder, run in zip(recorders, (actual, expected), strict=True):
            with recorder:
                run()
        if said := first_difference(*(recorder.steps() for recorder in recorders)):
            yield f"First operation that differs: {said}."


def of_run(run: Callable[[], object]) -> Iterator[str]:
    """Yield a sentence with the first operation whose result differs when a run is repeated."""
    recorders = [Recorder(), Recorder()]
    for recorder in recorders:
        with recorder:
            run()
    first = next(differing(*(recorder.steps() for recorder in recorders)), None)
    if first is not None:
        yield f"The first operation whose result differs: {first.operation}."
