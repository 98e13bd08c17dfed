"""A record as a report shows it: what is wrong with each layer, and which call of the model feeds which.

An edge of the flow joins two calls that one call makes, as a box of the graph holds what one module makes. What a layer
deep inside takes from elsewhere is an edge between the two modules around which the code passed it on. Every edge is
recorded. Where code made the input of a call, it is only said which call ran last before that: what a report draws from
there is a guess, and it must not guess what the record contradicts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from pytest_modelprobe.assertions.activations import Dead, find_dead
from pytest_modelprobe.assertions.findings import findings, hints
from pytest_modelprobe.assertions.ranges import MIN_SLOPE, find_saturated
from pytest_modelprobe.assertions.structure import uncalled, weights_in_use
from pytest_modelprobe.comparison import CauseKind, Diagnosis
from pytest_modelprobe.record import (
    Call,
    CallTree,
    Layer,
    Parameter,
    Reading,
    Record,
    Statistics,
    Step,
    Value,
    has_nonfinite,
)

from .results import Flow, Run, StepResult, UnitCounts


class Observed(NamedTuple):
    """A run or watch of a test."""

    name: str
    kind: Literal["run", "watch"]
    record: Record | None
    """The record, or `None` if it could not be made."""
    error: str = ""
    """Why the record could not be made."""
    steps: Sequence[Record] = ()
    """The records of the steps of training, if it is a watch that keeps several."""
    findings: Sequence[str] = ()
    """The findings of other plugins."""


class Known(NamedTuple):
    """What a comparison with a snapshot found of a record."""

    record: Record
    """The record, as the test gave it."""
    diagnosis: Diagnosis | None = None
    """The causes, or `None` if nothing differs or there was no snapshot."""
    expected: Record | None = None
    """The record in the snapshot, with the current names of layers."""


def runs_of(observed: Iterable[Observed], compared: Sequence[Known]) -> tuple[Run, ...]:
    """Return the runs and watches of a test, each with what a comparison of its record found.

    A record that was compared and is that of no run, such as the first forward of a watch, is a run of its own. One
    that cannot be shown becomes a run with its error: a report must not end the run of pytest.
    """
    sources = list(observed)
    for one in compared:
        if not any(source.record is one.record for source in sources):
            sources.append(Observed(one.record.model, "run", one.record))
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


def run_of(source: Observed, known: Known | None = None) -> Run:
    """Return a run or watch whose record could be made.

    >>> run_of(Observed("Net", "run", Record(model="Net", forwards=1))).name
    'Net'
    """
    record = source.record
    assert record is not None
    dead, tree = find_dead(record, record.layers), CallTree(record)
    first = {step.layer.name: step.call for step in reversed(tree.started)}
    ended = sorted(first, key=lambda name: first[name].finished if first[name].finished >= 0 else math.inf)
    ordered = [record.layers[name] for name in dict.fromkeys((*ended, *record.layers))]
    units = {name: found for name, call in first.items() if (found := _units(record.layers[name], call))}
    before = known.expected.layers.values() if known and known.expected else ()
    shown = {layer.name: next((v.forward.statistics for _, v in layer.outputs), None) for layer in before}
    return Run(
        name=source.name,
        kind=source.kind,
        record=replace(record, layers={layer.name: _shown(layer, first.get(layer.name)) for layer in ordered}),
        findings=(*findings(record, dead), *source.findings),
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
        flow=dataflow(record, tree),
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


# --- which call feeds which -------------------------------------------------------------------------------------------

MOST_CALLS = 8
"""How many calls of a layer are told apart. The last of them stands for those after it: a cell may run 1,000 times."""


def dataflow(record: Record, tree: CallTree) -> tuple[Flow, ...]:
    """Return the calls in the order in which they ended, and by position in this list which others feed them.

    Of a module that is called several times, only the first call has its inner calls here: the others are alike.
    """
    place = _places(tree)
    calls = [Flow(layer="")] * (max(place.values(), default=-1) + 1)
    sources: dict[int, set[int]] = defaultdict(set)
    takers: dict[tuple[object, _Key], Step] = {}
    """Which of the calls that one call makes takes a tensor first."""
    for step in tree.started:
        for value in step.call.inputs:
            for key in _keys(value):
                takers.setdefault((step.place, key), step)
            producer = tree.producer(step, value)
            around = zip(_chain(producer[0]), _chain(step), strict=False) if producer else ()
            # The calls around the two that the same call made; none if one runs inside the other.
            source, target = next(((place.get(a), place.get(b)) for a, b in around if a is not b), (None, None))
            if source is not None and target is not None and source < target:
                sources[target].add(source)
    parameters = (p for layer in record.layers.values() for p in (*layer.parameters, *layer.buffers))
    owned = {key for parameter in parameters for key in _elements(parameter.reading)}
    for step, n in place.items():
        before = (place[b] for b in _before_its_inputs(tree, step, takers, owned) if b in place)
        after = max((i for i in before if i < n), default=calls[n].after)
        first = calls[n] if calls[n].layer else Flow(layer=step.layer.name, call=step.call.index + 1, more=-1)
        calls[n] = replace(first, more=first.more + 1, sources=tuple(sorted(sources[n])), after=after)
    return tuple(calls)


def _places(tree: CallTree) -> dict[Step, int]:
    """Return the position of each call. The last of those of a layer that are told apart has all calls after it."""
    first: dict[str, Step] = {}
    for step in tree.started:
        first.setdefault(step.layer.name, step)
    found: dict[Step, int] = {}
    known: dict[str, list[int]] = {}
    for step in dict.fromkeys((*tree.returned, *tree.started)):  # a call that did not return is among the last
        name = step.layer.name
        inside_a_later_call = step.parent is not None and step.parent is not first[step.parent.layer.name]
        if inside_a_later_call or step.place[:2] != first[name].place[:2]:
            continue
        mine = known.setdefault(name, [])
        if len(mine) < MOST_CALLS:
            mine.append(sum(map(len, known.values())))
        found[step] = mine[-1]
    return found


def _chain(step: Step | None) -> list[Step]:
    """Return the calls around a call, the outermost first, and the call."""
    found: list[Step] = []
    while step is not None:
        found.append(step)
        step = step.parent
    return found[::-1]


_Key = tuple[object, ...]
"""What tensors with the same elements share."""


def _elements(reading: Reading) -> Iterator[_Key]:
    """Yield numbers that tensors with the same elements share in any order and shape, unless all are equal."""
    s = reading.statistics
    if s is not None and s.min != s.max:
        yield s.count, s.zeros, s.nonfinite, s.min, s.max


def _keys(value: Value) -> Iterator[_Key]:
    yield from [(value.tensor,)] if value.tensor >= 0 else []
    yield from _elements(value.forward)


def _before_its_inputs(
    tree: CallTree, step: Step, takers: dict[tuple[object, _Key], Step], owned: set[_Key]
) -> Iterable[Step]:
    """Yield, for each input that the code around a call made, the last call before that code."""
    around = _chain(step.parent)
    if not around:  # a forward: its inputs come from the test
        return
    if not step.call.inputs_known and step.previous is not None:
        yield step.previous
    given = {key for outer in around for value in outer.call.inputs for key in _keys(value)}
    for value in step.call.inputs:
        keys = list(_keys(value))
        made = value.is_floating and tree.producer(step, value) is None
        if made and given.isdisjoint(keys) and owned.isdisjoint(keys):
            taking = [step, *(takers[step.place, key] for key in keys)]
            previous = min(taking, key=lambda one: one.call.started).previous
            while previous is not None and step.call.grad_enabled and _is_cut_off(previous, value):
                previous = previous.previous
            if previous is not None:
                yield previous


def _is_cut_off(step: Step, value: Value) -> bool:
    """Whether autograd knows that a value is not computed from any output of a call."""
    outputs = [output.requires_grad for output in step.call.outputs if output.is_floating]
    return not value.requires_grad and bool(outputs) and all(outputs)
