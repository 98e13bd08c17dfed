"""What is wrong with each layer, in a few fixed words.

Every report takes the words from here, so that a table, a graph and a summary agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_modelprobe.assertions.activations import Dead
from pytest_modelprobe.assertions.ranges import find_saturated
from pytest_modelprobe.assertions.structure import uncalled, weights_in_use
from pytest_modelprobe.comparison import Cause, CauseKind, Diagnosis
from pytest_modelprobe.record import Layer, Reading, Record, has_nonfinite

STATUSES = (
    "own code", "structure", "weights", "nonfinite", "dead", "no gradient", "saturated", "not called", "moved",
)  # fmt: skip
"""The words, worst first: causes of a change, what is wrong without one, then what only follows."""

_OF_CAUSE: dict[CauseKind, str] = {
    "computation": "own code", "gradient": "own code", "architecture": "structure", "attribute": "structure",
    "weights": "weights", "buffers": "weights", "update": "weights",
}  # fmt: skip


def statuses(record: Record, dead: Sequence[Dead], diagnosis: Diagnosis | None) -> dict[str, list[str]]:
    """Return the status of each layer that has one, worst first.

    Args:
        record: The record.
        dead: What `find_dead` returned for all of its layers.
        diagnosis: The causes, or `None` if nothing differs or there was no snapshot. Only causes that are certain
            count.

    >>> from pytest_modelprobe.record import Parameter
    >>> weight = Parameter(name="weight", shape=(2, 2), dtype="float32", device="cpu")
    >>> fc = Layer(name="fc", type="Linear", parameters=(weight,))
    >>> statuses(Record(model="Net", layers={"fc": fc}, forwards=1), [], None)
    {'fc': ['not called']}
    """
    found: dict[str, set[str]] = {}
    for name, word in (*_changes(diagnosis), *_findings(record, dead)):
        if name in record.layers:
            found.setdefault(name, set()).add(word)
    return {name: sorted(words, key=STATUSES.index) for name, words in found.items()}


def _changes(diagnosis: Diagnosis | None) -> Iterator[tuple[str, str]]:
    if diagnosis is None:
        return
    for cause in diagnosis.causes:
        word = _OF_CAUSE.get(cause.kind)
        if word is not None:
            yield from ((name, word) for name in _layers_of(cause, diagnosis))
    yield from ((name, "moved") for name in diagnosis.moved)


def _layers_of(cause: Cause, diagnosis: Diagnosis) -> set[str]:
    if not cause.is_retraining:
        return {cause.layer}
    return {difference.layer for difference in diagnosis.comparison.differences if difference.kind == "weights"}


def _findings(record: Record, dead: Sequence[Dead]) -> Iterator[tuple[str, str]]:
    if not record.forwards:
        return
    yield from ((found.step.layer.name, "dead") for found in dead if not found.received)
    yield from ((layer.name, "saturated") for layer in find_saturated(record.layers.values()))
    in_use = weights_in_use(record)
    unused = {layer.name for layer in uncalled(record) if layer.parameters and layer.name not in in_use}
    yield from ((name, "not called") for name in unused)
    for layer in record.layers.values():
        if any(map(has_nonfinite, _readings(layer))):
            yield layer.name, "nonfinite"
        trained = [p for p in layer.parameters if p.requires_grad] if layer.name not in unused else []
        if record.backwards and any(p.gradient is None for p in trained):
            yield layer.name, "no gradient"


def _readings(layer: Layer) -> Iterator[Reading | None]:
    for _, value in layer.outputs:
        yield from (value.forward, value.backward)
    for parameter in layer.parameters:
        yield from (parameter.reading, parameter.gradient)
