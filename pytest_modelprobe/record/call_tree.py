"""The calls of a record as a tree: which call ran inside which, and in which order.

A record keeps the calls of each layer by themselves, because that is how they are merged, stored and compared. Each
call has the positions of its start and its end among those of all calls. The tree is made of these positions when
someone asks which call ran inside which.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .layer import ROOT, Call, Layer, Value, address, call_name, label_of
from .record import Record

ForwardKind = tuple[str, bool]
"""The layer whose outermost call a forward is, and its training mode."""

CallScope = tuple[str, bool, "Step | None"]
"""Root, its training mode, and the parent. A scope has all calls that one call makes, or all forwards of one kind."""


@dataclass(eq=False, slots=True)
class Step:
    """A call in the tree."""

    layer: Layer
    call: Call
    parent: Step | None
    """The innermost recorded call during which it ran."""
    previous: Step | None
    """The call before it with the same parent, or `None` if it is the first."""
    last_child: Step | None = None
    """The last call that ran directly inside it."""

    @property
    def place(self) -> CallScope:
        """Where the call ran."""
        return self.call.root, self.call.root_training, self.parent

    @property
    def inside(self) -> CallScope:
        """Where the calls that it makes run."""
        return self.call.root, self.call.root_training, self

    @property
    def outermost(self) -> bool:
        """Whether the call is a forward: its inputs come from the test."""
        return self.layer.name == self.call.root and self.call.index == 0

    @property
    def name(self) -> str:
        """The layer's name, with the number of the call from the second one on."""
        return call_name(self.layer.name, self.call)

    @property
    def label(self) -> str:
        """Name of the call in a sentence, see `label_of`."""
        return label_of(self.name, self.layer.type_name)

    def between(self) -> str:
        """Return where the code runs that makes the inputs of the call: ``between fc1 and fc2``."""
        where = f"before {self.label}" if self.previous is None else f"between {self.previous.label} and {self.label}"
        return where + forward_of(self.parent)


def forward_of(step: Step | None) -> str:
    """Return `` in block's forward``; an empty string for the root."""
    return "" if step is None or step.layer.name == ROOT else f" in {step.layer.label}'s forward"


class CallTree:
    """The calls of a record in order; forwards of different kinds one after the other."""

    def __init__(self, record: Record) -> None:
        kinds: dict[ForwardKind, list[tuple[Layer, Call]]] = {}
        for layer in record.layers.values():
            for call in layer.calls:
                # Positions count within one forward, so they cannot order the calls of forwards of different kinds.
                kinds.setdefault((call.root, call.root_training), []).append((layer, call))
        self.started: list[Step] = []
        """In order of start: a container before what is inside it."""
        self.returned: list[Step] = []
        """Those that returned, in that order: a container after what is inside it."""
        for pairs in kinds.values():
            steps = list(_placed(sorted(pairs, key=lambda pair: pair[1].started)))
            self.started += steps
            self.returned += sorted((s for s in steps if s.call.finished >= 0), key=lambda s: s.call.finished)

    @functools.cached_property
    def _producers(self) -> dict[tuple[str, bool, str], tuple[Step, Value]]:
        return {
            (*step.place[:2], address(step.layer.name, step.call, value.path)): (step, value)
            for step in self.returned
            for value in step.call.outputs
        }

    def producer(self, step: Step, value: Value) -> tuple[Step, Value] | None:
        """Return the call and its output that an input of ``step`` is; `None` if code between layers made the input."""
        if value.source is None or step.outermost:  # what a forward is given, an earlier one may have returned
            return None
        return self._producers.get((*step.place[:2], value.source))

    def untracked_inputs(self, step: Step) -> Iterable[Value]:
        """Yield the first input of a call if no recorded layer returned it, so that code between layers made it."""
        return (value for value in step.call.inputs[:1] if self.producer(step, value) is None)


def _placed(pairs: Iterable[tuple[Layer, Call]]) -> Iterator[Step]:
    running: list[Step] = []
    outermost: Step | None = None
    for layer, call in pairs:
        # A call that did not return has no end (-1) and stays on the stack: what started later counts as inside it.
        while running and 0 <= running[-1].call.finished < call.started:
            running.pop()
        parent = running[-1] if running else None
        step = Step(layer, call, parent, previous=parent.last_child if parent else outermost)
        if parent:
            parent.last_child = step
        else:
            outermost = step
        running.append(step)
        yield step
