"""The order of calls: implied by the order of lines, or written as timelines.

The order is needed to read a file, because a tensor is written where it is first seen. A timeline lists the starts and
ends of the calls of one kind of forward: ``3`` is the start of the next call of the layer on the third line, ``-3`` the
end of its newest. If each layer is called once, inside its containers, the order of lines implies the timelines, and
the file has none.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from pytest_modelprobe.record import ROOT, Call, ForwardKind, Layer, Record

from .specs import FormatError

Timeline = list[int]


class Event(NamedTuple):
    """The start or the end of a call."""

    layer: int
    """Index of the layer among the lines."""
    call: int
    """Index of the call among the layer's."""
    end: bool


def forward_kind_of(call: Call) -> ForwardKind:
    """Return which kind of forward a call belongs to."""
    return call.root, call.root_training


def forward_order(record: Record) -> list[tuple[str, Layer, list[Call]]]:
    """Return names, layers and calls in the order of the file.

    Layers are in the order of their first calls, and a layer without one is last. Calls are by kind and index.
    """

    def first_call(layer: Layer) -> tuple[bool, ForwardKind, int]:
        started = [(False, forward_kind_of(call), call.started) for call in layer.calls if call.started >= 0]
        return min(started, default=(True, ("", False), 0))

    def number(call: Call) -> tuple[ForwardKind, int]:
        return forward_kind_of(call), call.index

    layers = sorted(record.layers.items(), key=lambda item: first_call(item[1]))
    return [(name, layer, sorted(layer.calls, key=number)) for name, layer in layers]


def parameter_order(record: Record, lines: Iterable[tuple[str, Layer, list[Call]]]) -> list[int] | None:
    """Return the layers with parameters in the order of the model, as their places among the lines with some.

    Returns None if the lines are in this order. The order counts: optimizers know parameters by their position.
    """
    places = {name: i for i, name in enumerate(name for name, layer, _ in lines if layer.parameters)}
    found = [places[name] for name, layer in record.layers.items() if layer.parameters]
    return found if found != sorted(found) else None


def in_model_order(layers: Mapping[str, Layer], order: Sequence[int]) -> dict[str, Layer]:
    """Return the layers with those that have parameters in the order of the model, as `parameter_order` tells it."""
    own = [name for name, layer in layers.items() if layer.parameters]
    if not all(type(place) is int for place in order) or sorted(order) != [*range(len(own))]:
        raise FormatError(f"the order of parameters is no order of {len(own):,} layers")
    following = iter(order)
    names = [own[next(following)] if layer.parameters else name for name, layer in layers.items()]
    return {name: layers[name] for name in names}


def containers(names: Collection[str]) -> set[str]:
    """Return the names that contain others, and that of the root unless it is the only one.

    >>> sorted(containers(["a", "a.b", "ab"]))
    ['(root)', 'a']
    """
    ordered = sorted(names)
    found = {ROOT} if len(ordered) > 1 else set()
    for name in ordered:
        after = bisect.bisect_left(ordered, f"{name}.")
        if after < len(ordered) and ordered[after].startswith(f"{name}."):
            found.add(name)
    return found


def timelines(calls: Sequence[Sequence[Call]]) -> list[Timeline]:
    """Return the timeline of each kind of forward, kinds in their order, from the calls of each line's layer."""
    events: dict[ForwardKind, list[tuple[int, bool, int]]] = {}
    for line, of_layer in enumerate(calls, start=1):
        for call in of_layer:
            found = events.setdefault(forward_kind_of(call), [])
            if call.started >= 0:
                found.append((call.started, False, line))
                if call.finished >= 0:
                    found.append((max(call.finished, call.started), True, line))
    return [[-line if end else line for _, end, line in sorted(events[kind])] for kind in sorted(events)]


def implied_timelines(names: Sequence[str], calls: Sequence[Sequence[Call]]) -> list[Timeline]:
    """Return the timelines if each layer is called once, inside its containers, in the order of lines."""
    kinds: dict[ForwardKind, tuple[Timeline, list[int]]] = {}
    for line, (name, of_layer) in enumerate(zip(names, calls, strict=True), start=1):
        for kind in dict.fromkeys(map(forward_kind_of, of_layer)):
            timeline, running = kinds.setdefault(kind, ([], []))
            while running and not _inside(name, names[running[-1] - 1]):
                timeline.append(-running.pop())
            timeline.append(line)
            running.append(line)
    for timeline, running in kinds.values():
        timeline += [-line for line in reversed(running)]
    return [kinds[kind][0] for kind in sorted(kinds)]


def _inside(name: str, layer: str) -> bool:
    return layer == ROOT or name.startswith(f"{layer}.")


def events(given: Sequence[Timeline], calls: Sequence[Sequence[Call]]) -> list[list[Event]]:
    """Return the events of the timelines: starts are assigned to the calls of a layer in turn.

    Raises:
        FormatError: The timelines do not fit the calls.
    """
    by_kind: dict[ForwardKind, dict[int, list[int]]] = {}
    for line, of_layer in enumerate(calls, start=1):
        for i, call in enumerate(of_layer):
            by_kind.setdefault(forward_kind_of(call), {}).setdefault(line, []).append(i)
    if len(given) != len(by_kind):
        raise FormatError(f"the order is of {len(given)} kinds of forwards, the calls are of {len(by_kind)}")
    found = []
    for timeline, kind in zip(given, sorted(by_kind), strict=True):
        waiting = {line: iter(of_layer) for line, of_layer in by_kind[kind].items()}
        running: dict[int, list[int]] = {}
        here: list[Event] = []
        for token in timeline:
            line = abs(token)
            if token > 0:
                index = next(waiting.get(line, iter(())), None)
                if index is not None:
                    running.setdefault(line, []).append(index)
            else:
                index = running[line].pop() if running.get(line) else None
            if index is None:
                raise FormatError(f"the order speaks of a call of layer {line} that is not there")
            here.append(Event(line - 1, index, token < 0))
        found.append(here)
    return found


def all_events(known: Iterable[Sequence[Event]], calls: Sequence[Sequence[Call]]) -> Collection[Event]:
    """Return the starts and ends of all calls in order. Those that are in no timeline come last."""
    seen = dict.fromkeys(itertools.chain.from_iterable(known))
    for i, of_layer in enumerate(calls):
        for j in range(len(of_layer)):
            seen.setdefault(Event(i, j, False))
            seen.setdefault(Event(i, j, True))
    return seen
