"""The first operation that differs, of each layer whose own code is a cause and whose two models are there."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_modelprobe.comparison import Diagnosis
from pytest_modelprobe.record import Record
from pytest_modelprobe.text import pattern

from .alignment import first_difference
from .stream import Recorder

_MOST = 3
"""Of so many layers the operations are looked at."""


def first_operations(diagnosis: Diagnosis, actual: Record, expected: Record) -> Iterator[str]:
    """Yield a sentence for each layer whose code differs, with the first operation of each side that does.

    Args:
        diagnosis: The causes.
        actual: The record of a model that is there.
        expected: The record of the other model.
    """
    code = (cause for cause in diagnosis.causes if cause.kind == "computation" and cause.changes_code)
    types = diagnosis.comparison.actual.layers
    layers = {(pattern(cause.layer), types[cause.layer].type): cause.layer for cause in reversed([*code])}
    for layer in [*reversed(layers.values())][:_MOST]:
        if (found := _difference(layer, diagnosis, actual, expected)) is not None:
            where = f" in {types[layer].label}" if len(layers) > 1 else ""
            yield f"First operation that differs{where}: {found}."


def _difference(layer: str, diagnosis: Diagnosis, actual: Record, expected: Record) -> str | None:
    """Return the first difference between the operations of a layer, called alone on both sides."""
    found, names = diagnosis.comparison, diagnosis.comparison.names_before
    now, then = actual.live_run, expected.live_run
    if now is None or then is None:
        return None
    here, there = _Streams(), _Streams()
    before = names.layers.get(layer, layer)
    now.isolated(actual, like=found.expected, names=names, only=[layer], within=here)
    then.isolated(expected, only=[before], within=there)
    for (_, call), recorder in here.first.items():
        other = there.first.get((before, call))
        if other is not None and (said := first_difference(recorder.steps(), other.steps())):
            return said
    return None


class _Streams:
    """A recorder for each call. Only that of the first time that a call is made counts."""

    def __init__(self) -> None:
        self.first: dict[tuple[str, int], Recorder] = {}

    def __call__(self, call: tuple[str, int]) -> Recorder:
        recorder = Recorder()
        self.first.setdefault(call, recorder)
        return recorder
