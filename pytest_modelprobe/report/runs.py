"""A record as a report shows it: its layers in the order of execution, and what is wrong with each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from pytest_modelprobe.assertions.activations import Dead, find_dead
from pytest_modelprobe.assertions.findings import findings, hints
from pytest_modelprobe.assertions.ranges import MIN_SLOPE, find_saturated
from pytest_modelprobe.assertions.structure import uncalled, weights_in_use
from pytest_modelprobe.comparison import CauseKind, Diagnosis
from pytest_modelprobe.record import (
    Call,
    CallTree,
    Layer,
    NamedRecord,
    Parameter,
    Reading,
    Record,
    Statistics,
    Value,
    has_nonfinite,
)

from .results import Run, StepResult, UnitCounts


class Known(NamedTuple):
    """What a comparison with a snapshot found of a record."""

    record: Record
    """The record, as the test gave it."""
    diagnosis: Diagnosis | None = None
    """The causes, or `None` if nothing differs or there was no snapshot."""
    expected: Record | None = None
    """The record in the snapshot, with the current names of layers."""


def runs_of(observed: Iterable[NamedRecord], compared: Sequence[Known]) -> tuple[Run, ...]:
    """Return the runs and watches of a test, each with what a comparison of its record found.

    A record that was compared and is that of no run, such as the first forward of a watch, is a run of its own. One
    that cannot be shown becomes a run with its error: a report must not end the run of pytest.
    """
    sources = list(observed)
    for one in compared:
        if not any(source.record is one.record for source in sources):
            sources.append(NamedRecord(one.record.model, "run", one.record))
    runs = []
    for source in sources:
        # The first comparison that differs; else the first.
        mine = sorted((one for one in compared if one.record is source.record), key=lambda one: one.diagnosis is None)
        error = source.error
        try:
            if source.record is not None:
                runs.append(run_of(source, mine[0] if mine else None))
                continue
        except Exception as problem:  # noqa: BLE001 - any error in a record that other code made
            error = f"{type(problem).__name__}: {problem}"
        runs.append(Run(name=source.name, kind=source.kind, record=Record(model=source.name), error=error))
    return tuple(runs)


def run_of(source: NamedRecord, known: Known | None = None) -> Run:
    """Return a run or watch whose record could be made.

    >>> run_of(NamedRecord("Net", "run", Record(model="Net", forwards=1))).name
    'Net'
    """
    record = source.record
    assert record is not None
    dead = find_dead(record, record.layers)
    first = {step.layer.name: step.call for step in reversed(CallTree(record).started)}
    ended = sorted(first, key=lambda name: first[name].finished if first[name].finished >= 0 else math.inf)
    ordered = [record.layers[name] for name in dict.fromkeys((*ended, *record.layers))]
    units = {name: found for name, call in first.items() if (found := _units(record.layers[name], call))}
    before = known.expected.layers.values() if known and known.expected else ()
    shown = {layer.name: next((v.forward.statistics for _, v in layer.outputs), None) for layer in before}
    return Run(
        name=source.name,
        kind=source.kind,
        record=replace(record, layers={layer.name: _shown(layer, first.get(layer.name)) for layer in ordered}),
        findings=tuple(findings(record, dead)),
        hints=tuple(hints(record, dead)),
        status=statuses(record, dead, known.diagnosis if known else None),
        units=units,
        before={name: s for name, s in shown.items() if s is not None and name in record.layers},
        steps=tuple(
            StepResult(
                step=step.step,
                update_ratios={n: ratio for n, x in step.layers.items() if (ratio := update_ratio(x)) is not None},
            )
            for step in source.steps
        ),
    )


def _shown(layer: Layer, first: Call | None) -> Layer:
    """Return a layer with the values of its first call alone, and without what only a comparison needs."""

    def value(value: Value) -> Value:
        backward = value.backward and _bare(value.backward)
        return replace(value, forward=_bare(value.forward), backward=backward, backward_inner=None)

    def parameter(p: Parameter) -> Parameter:
        gradient = p.gradient and _bare(p.gradient)
        return replace(p, reading=_bare(p.reading), gradient=gradient, after=None, applied=None, update=None)

    calls = []
    for call in sorted(layer.calls, key=lambda call: call is not first):
        if call is first:
            inputs, outputs = tuple(map(value, call.inputs)), tuple(map(value, call.outputs))
            calls.append(replace(call, inputs=inputs, outputs=outputs, response=None))
        else:
            calls.append(Call(root=call.root, root_training=call.root_training, index=call.index))
    return replace(layer, calls=tuple(calls), parameters=tuple(map(parameter, layer.parameters)), buffers=())


def _bare(reading: Reading) -> Reading:
    return Reading(statistics=reading.statistics, histogram=reading.histogram, reason=reading.reason)


_SQRT = math.sqrt(1 - MIN_SLOPE)
_BENT = {"Tanh": (-_SQRT, _SQRT), "Sigmoid": ((1 - _SQRT) / 2, (1 + _SQRT) / 2)}
"""Type of an activation → the outputs between which its slope is at least `MIN_SLOPE` of the maximum.

The slope of tanh is 1 - y², and that of a sigmoid y (1 - y): this solves them for the output y.
"""


def _units(layer: Layer, call: Call) -> UnitCounts | None:
    units = call.outputs[0].forward.units if call.outputs else None
    if units is None:
        return None
    saturated = None
    if layer.type_name in _BENT:
        low, high = _BENT[layer.type_name]
        saturated = sum(least > high or most < low for least, most in zip(units.low, units.high, strict=True))
    # Dropout zeroes units by chance.
    return UnitCounts(count=len(units), dead=None if call.random else units.dead, saturated=saturated)


def merged(readings: Iterable[Reading | None]) -> Statistics | None:
    """Return the statistics of several tensors together, or `None` if no tensor has any."""
    found: Statistics | None = None
    for reading in readings:
        if reading is not None and reading.statistics is not None:
            found = reading.statistics if found is None else found.merge(reading.statistics)
    return found


def update_ratio(layer: Layer) -> float | None:
    """Return ‖w' − w‖ / ‖w‖ of all parameters of a layer in the record of a step.

    Parameters that were all zero before the step are left out. None if no others were in the optimizer, or one of them
    is not finite.

    >>> update_ratio(Layer(name="fc", type="Linear"))
    """
    changes, norms = [], []
    for own in layer.parameters:
        was = own.reading.statistics
        if own.update is None or was is None or was.nonfinite or not was.norm:
            continue
        if own.update.statistics is None or own.update.statistics.nonfinite:
            return None
        changes.append(own.update.statistics.norm)
        norms.append(was.norm)
    return math.hypot(*changes) / math.hypot(*norms) if norms else None


# --- the status of a layer --------------------------------------------------------------------------------------------

STATUSES = (
    "own code", "structure", "weights", "nonfinite", "dead", "no gradient", "saturated", "not called", "moved",
)  # fmt: skip
"""The words, worst first: causes of a change, what is wrong without one, then what only follows."""

_OF_CAUSE: dict[CauseKind, str] = {
    "computation": "own code", "gradient": "own code", "architecture": "structure", "attribute": "structure",
    "weights": "weights", "buffers": "weights", "update": "weights",
}  # fmt: skip


def statuses(record: Record, dead: Sequence[Dead], diagnosis: Diagnosis | None) -> dict[str, tuple[str, ...]]:
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
    {'fc': ('not called',)}
    """
    found: list[tuple[str, str]] = []
    if diagnosis is not None:
        retrained = {one.layer for one in diagnosis.comparison.differences if one.kind == "weights"}
        for cause in diagnosis.causes:
            word = _OF_CAUSE.get(cause.kind)
            if word is not None:
                found += [(name, word) for name in (retrained if cause.is_retraining else {cause.layer})]
        found += [(name, "moved") for name in diagnosis.moved]
    if record.forwards:
        found += [(one.step.layer.name, "dead") for one in dead if not one.received]
        found += [(layer.name, "saturated") for layer in find_saturated(record.layers.values())]
        in_use = weights_in_use(record)
        unused = {layer.name for layer in uncalled(record) if layer.parameters and layer.name not in in_use}
        found += [(name, "not called") for name in unused]
        for layer in record.layers.values():
            readings = [reading for _, value in layer.outputs for reading in (value.forward, value.backward)]
            readings += [reading for own in layer.parameters for reading in (own.reading, own.gradient)]
            if any(map(has_nonfinite, readings)):
                found.append((layer.name, "nonfinite"))
            trained = [p for p in layer.parameters if p.requires_grad] if layer.name not in unused else []
            if record.backwards and any(p.gradient is None for p in trained):
                found.append((layer.name, "no gradient"))
    words: dict[str, set[str]] = {}
    for name, word in found:
        if name in record.layers:
            words.setdefault(name, set()).add(word)
    return {name: tuple(sorted(of, key=STATUSES.index)) for name, of in words.items()}
