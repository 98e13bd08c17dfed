"""Which call of a model feeds which, as plain data: a report draws the graph of the model from it.

An edge joins two calls that one call makes, as a box of the graph holds what one module makes. What a layer deep inside
takes from elsewhere is an edge between the two modules around which the code passed it on. Every edge is recorded.
Where code made the input of a call, it is only said which call ran last before that: what a report draws from there is
a guess, and it must not guess what the record contradicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pytest_modelprobe.record import CallTree, Reading, Record, Step, Value

from .values import text

MOST_CALLS = 8
"""How many calls of a layer are told apart. The last of them stands for those after it: a cell may run 1,000 times."""


@dataclass(eq=False, slots=True)
class _Entry:
    """A call, or the last of those that are told apart and the calls after it."""

    number: int
    layer: str
    call: int
    more: int = 0
    sources: set[int] = field(default_factory=set)
    after: int | None = None

    def to_dict(self) -> dict[str, Any]:
        known = {"layer": text(self.layer), "call": self.call, "more": self.more}
        return {**known, "from": sorted(self.sources), "after": self.after}


def dataflow(record: Record, tree: CallTree) -> list[dict[str, Any]]:
    """Return the calls in the order in which they ended, and by position in this list which others feed them.

    Of a module that is called several times, only the first call has its inner calls here: the others are alike.
    """
    entries = _entries(tree)
    for step in tree.started:
        for value in step.call.inputs:
            producer = tree.producer(step, value)
            ends = None if producer is None else _siblings(producer[0], step)
            if ends is not None:
                source, target = entries.get(ends[0]), entries.get(ends[1])
                if source and target and source.number < target.number:
                    target.sources.add(source.number)
    takers = _first_takers(tree)
    parameters = (p for layer in record.layers.values() for p in (*layer.parameters, *layer.buffers))
    owned = {key for parameter in parameters for key in _elements(parameter.reading)}
    for step, entry in entries.items():
        before = [entries[b].number for b in _before_its_inputs(tree, step, takers, owned) if b in entries]
        entry.after = max((n for n in before if n < entry.number), default=entry.after)
    return [entry.to_dict() for entry in dict.fromkeys(entries.values())]


def _entries(tree: CallTree) -> dict[Step, _Entry]:
    first: dict[str, Step] = {}
    for step in tree.started:
        first.setdefault(step.layer.name, step)
    found: dict[Step, _Entry] = {}
    known: dict[str, list[_Entry]] = {}
    for step in dict.fromkeys((*tree.returned, *tree.started)):  # a call that did not return is among the last
        name = step.layer.name
        inside_a_later_call = step.parent is not None and step.parent is not first[step.parent.layer.name]
        if inside_a_later_call or step.place[:2] != first[name].place[:2]:
            continue
        mine = known.setdefault(name, [])
        if len(mine) == MOST_CALLS:
            mine[-1].more += 1
        else:
            number = sum(map(len, known.values()))
            mine.append(_Entry(number, name, step.call.index + 1))
        found[step] = mine[-1]
    return found


def _siblings(a: Step, b: Step) -> tuple[Step, Step] | None:
    """Return the calls around two calls that the same call made; None if one runs inside the other."""
    for one, other in zip(_chain(a), _chain(b), strict=False):
        if one is not other:
            return one, other
    return None


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


def _first_takers(tree: CallTree) -> dict[tuple[object, _Key], Step]:
    """Return which of the calls that one call makes takes a tensor first."""
    found: dict[tuple[object, _Key], Step] = {}
    for step in tree.started:
        for value in step.call.inputs:
            for key in _keys(value):
                found.setdefault((step.place, key), step)
    return found


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
