"""A comparison made ready for questions: what differs in a layer or a call, whether what came in matches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_modelprobe.comparison.compare import CallPair, Comparison, Difference, DifferenceKind, children, comparable
from pytest_modelprobe.comparison.tolerance import ValueChange
from pytest_modelprobe.record import NOT_DEFAULT, CallTree, Step, qualified

from .places import parent

STRUCTURE: frozenset[DifferenceKind] = frozenset({
    "parameter added", "parameter removed", "parameter shape", "parameter dtype", "parameter trainable",
    "parameter tied", "buffer added", "buffer removed", "buffer shape", "buffer dtype", "buffer tied",
    "buffer persistent",
})  # fmt: skip
"""What a layer holds, but for its numbers."""

_OWN: frozenset[DifferenceKind] = STRUCTURE | {"type", "attribute", "mode", "weights", "buffer", "calls"}


@dataclass(frozen=True, slots=True)
class Inputs:
    """What came into a call, held against what came in then."""

    match: bool
    """Whether it is the same, as far as it is known."""
    known: bool = False
    """Whether all of it is."""
    units: float = 0.0
    """The largest change, in units of what is allowed."""


class Evidence:
    """A comparison, by layer and by call, and in the order in which the code ran."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.of_layer: dict[str, list[Difference]] = {}
        """The differences of each layer that has any."""
        self._of_call: dict[tuple[str, int], list[Difference]] = {}
        for difference in comparison.found:
            self.of_layer.setdefault(difference.layer, []).append(difference)
            self._of_call.setdefault((difference.layer, difference.call), []).append(difference)
        self.first = {pair.layer: pair for pair in reversed(comparison.calls)}
        """The first call of each layer."""
        self.course: Sequence[Step] = CallTree(comparison.actual).started
        """The calls of now, a container before what is inside it."""
        self.ran = tuple(dict.fromkeys(step.layer.name for step in self.course))
        """The layers in that order."""
        self._inside: dict[Step | None, list[Step]] = {}
        for step in self.course:
            self._inside.setdefault(step.parent, []).append(step)
        by_call = {id(pair.actual): pair for pair in comparison.calls}
        self._pairs = {step: by_call[id(step.call)] for step in self.course if id(step.call) in by_call}
        self._steps = {id(pair): step for step, pair in self._pairs.items()}
        self.added = comparison.actual.layers.keys() - comparison.expected.layers.keys()
        self.gone = comparison.expected.layers.keys() - comparison.actual.layers.keys()
        """Layers that are no more, as `compare` names them in the expected."""
        self._course_then: Sequence[Step] = CallTree(comparison.expected).started
        self._callers = _callers(self._course_then) | _callers(self.course)

    # --- what differs ---------------------------------------------------------------------------------------------

    def differences(self, *kinds: DifferenceKind) -> Iterator[Difference]:
        """Yield the differences of these kinds."""
        return (d for d in self.comparison.found if d.kind in kinds)

    def has(self, layer: str, kind: DifferenceKind) -> bool:
        """Whether a layer has a difference of a kind."""
        return any(d.kind == kind for d in self.of_layer.get(layer, ()))

    def of_call(
        self, pair: CallPair, *kinds: DifferenceKind, side: Literal["input", "output"] | None = None
    ) -> list[Difference]:
        """Return the differences of a call of these kinds; those of its interface on one side, if given."""
        return [
            d
            for d in self._of_call.get((pair.layer, pair.actual.index), ())
            if d.kind in kinds and (side is None or d.kind != "interface" or _side(pair, d.what) == side)
        ]

    def moved(self, kinds: frozenset[DifferenceKind]) -> tuple[str, ...]:
        """Return the layers with a difference of these kinds, in order of execution."""
        return tuple(name for name in self.ran if any(d.kind in kinds for d in self.of_layer.get(name, ())))

    # --- who calls whom -------------------------------------------------------------------------------------------

    def caller(self, name: str) -> str:
        """Return the layer whose code calls another; of one that is never called, the one that holds it."""
        return self._callers.get(name) or parent(name)

    def inside(self, step: Step | None) -> Sequence[Step]:
        """Return the calls that a call makes itself."""
        return self._inside.get(step, ())

    def called(self, pair: CallPair, name: str) -> CallPair | None:
        """Return the call that another makes and knows as ``attn`` or ``attn (call 2)``; None: it is not in both."""
        child, _, number = name.partition(" (call ")
        made = self.inside(self._steps.get(id(pair)))
        calls = [step for step in made if step.layer.name == child_of(pair, child)]
        index = int(number.removesuffix(")")) - 1 if number else 0
        return self.pair(calls[index]) if index < len(calls) else None

    def gets_others(self, pair: CallPair) -> str | None:
        """Return what may be to blame instead of a layer's own code: its mode, something that it gets or does not."""
        if self.has(pair.layer, "mode"):
            return "its mode changed too"
        others = self.of_call(pair, "input added", "input removed", "argument")
        if others and not pair.outermost:
            came = others[0].kind == "input added" or others[0].expected is None
            return f"it {'gets' if came else 'does not get'} {others[0].what} now"
        return None

    def calls_nothing(self, pair: CallPair) -> bool:
        """Whether a call makes no other."""
        return not self._inside.get(self._steps.get(id(pair)))

    def pair(self, step: Step | None) -> CallPair | None:
        """Return a call with what it was then; None if it was not."""
        return None if step is None else self._pairs.get(step)

    # --- of one call ----------------------------------------------------------------------------------------------

    def inputs(self, pair: CallPair) -> Inputs:
        """Return how what came in compares with what came in then."""
        others = self.of_call(pair, "argument", "context", "interface", "input added", "input removed", side="input")
        if others or self._is_asked_otherwise(pair):
            return Inputs(match=False)
        a, e = pair.actual, pair.expected
        changes = [self.comparison.change(pair.layer, pair.key, "input", v.path) for v in a.inputs]
        drew_the_same = a.random == e.random or None in (a.random, e.random)
        return Inputs(
            match=drew_the_same and not any(change.differs for change in changes),
            known=a.inputs_known and e.inputs_known and all(change.known for change in changes),
            units=max((change.units for change in changes), default=0.0),
        )

    def change(self, pair: CallPair, side: Literal["input", "output"]) -> ValueChange | None:
        """Return the largest change among the values of a call, if there is one."""
        values = pair.actual.inputs if side == "input" else pair.actual.outputs
        found = [self.comparison.change(pair.layer, pair.key, side, v.path) for v in values]
        if self.of_call(pair, "interface", side=side):
            found.append(ValueChange(math.inf))
        return max((c for c in found if c.differs), key=lambda c: c.units, default=None)

    def change_of_state(self, pair: CallPair) -> ValueChange | None:
        """Return the largest change among the buffers that the run left behind, if there is one."""
        found = [d for d in self.of_layer.get(pair.layer, ()) if d.kind == "state"]
        changes = [self.comparison.change(pair.layer, None, "after", d.what) for d in found]
        return max(changes, key=lambda c: c.units, default=None)

    def same_structure(self, pair: CallPair) -> bool:
        """Whether a call got what it got and its layer holds what it held, whatever the numbers are."""
        got = self.of_call(pair, "argument", "context", "interface", "input added", "input removed", side="input")
        held = {"type", "attribute", "mode", *STRUCTURE}
        return not got and held.isdisjoint(d.kind for d in self.of_layer.get(pair.layer, ()))

    def same_layer(self, pair: CallPair) -> bool:
        """Whether the layer that is called has all that it had: attributes, weights, the number of its calls."""
        return _OWN.isdisjoint(d.kind for d in self.of_layer.get(pair.layer, ()))

    def answers(self, pair: CallPair) -> bool:
        """Whether the isolated responses of a call can be compared: to the same tensors, for the same question."""
        # What a child is said to give out depends on the path of the output.
        return self._is_asked_the_same(pair) and not any(self.has(name, "path") for name in self._called_alone(pair))

    def _is_asked_the_same(self, pair: CallPair) -> bool:
        given = self.of_call(pair, "argument", "context", "interface", side="input")
        # An argument that came or went may say what the code did anyhow; then its caller may be to blame.
        came_or_went = all(d.kind == "argument" and None in (d.actual, d.expected) for d in given)
        same = comparable(pair.actual.response, pair.expected.response)
        return came_or_went and same and not (self._is_asked_otherwise(pair) or self._has_other_names(pair))

    def _has_other_names(self, pair: CallPair) -> bool:
        """Whether parameters, or inputs, have other names: synthetic ones are drawn by them."""
        if self.has(pair.layer, "parameter added") and self.has(pair.layer, "parameter removed"):
            return True
        paths, before = ({value.path for value in call.inputs} for call in (pair.actual, pair.expected))
        return bool(paths - before) and bool(before - paths)  # by keyword now, by position then

    def _called_alone(self, pair: CallPair) -> list[str]:
        """Return the layers that a call, alone, hands something to: one for each value, in their order."""
        handed = pair.actual.response.handed if pair.actual.response is not None else ()
        return [child_of(pair, h.where.rpartition(" ")[0]) if " " in h.where else "" for h in handed]

    def tells_of(self, pair: CallPair, difference: Difference) -> bool:
        """Whether a difference between the isolated responses of a call tells of its own code.

        Of what it does after a child gave out something by another path nothing is known.
        """
        if not self._is_asked_the_same(pair) or self.calls_others(pair) or self._regrouped(pair):
            return False
        called = self._called_alone(pair)
        renamed = next((name for name in called if name and self.has(name, "path")), None)
        if renamed is None or pair.actual.response is None:
            return True
        first = called.index(renamed)
        last = next((i for i in range(first, len(called)) if called[i] != renamed), len(called))
        return difference.what in [handed.where for handed in pair.actual.response.handed[:last]]

    def _is_asked_otherwise(self, pair: CallPair) -> bool:
        """Whether the caller's response shows that the call gets False now or then, where that is not the default."""
        step = self._steps.get(id(pair))
        above = None if step is None else self.pair(step.parent)
        if above is None:
            return False
        return any(
            child_of(above, d.what.rpartition(" ")[0]) == pair.layer
            and any(str(side).endswith(NOT_DEFAULT) for side in (d.actual, d.expected))
            for d in self.of_call(above, "response")
        )

    def tells(self, pair: CallPair) -> bool:
        """Whether the isolated responses of a call, compared, tell of its own code."""
        return self.answers(pair) and not self.calls_others(pair) and not self._regrouped(pair)

    def _regrouped(self, pair: CallPair) -> bool:
        """Whether a call makes its calls by others: through a container, or without layers that only passed on.

        Each child that is called gives out synthetic tensors, so that the answer is another one.
        """
        mine, theirs = (
            set() if r is None else {child_of(pair, called) for called in children(r)}
            for r in (pair.actual.response, pair.expected.response)
        )
        came, went = mine - theirs, theirs - mine
        if any(f"{one}.".startswith(f"{other}.") for x, y in ((came, went), (went, came)) for one in x for other in y):
            return True
        gone = (f"{name} (removed)" for name in went)
        left = [*came & self.added, *self.gone.intersection(gone)]
        return any(self.passes_on(name) for name in left)

    def passes_on(self, name: str) -> bool:
        """Whether a layer that came or went gave out what it got, or what a layer called inside it gave out.

        What it does is then nothing, or what layers do that were there before and after, or came and went with it.
        """
        new = name in self.added
        layer = (self.comparison.actual if new else self.comparison.expected).layers[name]
        others = self.added if new else self.gone
        if not layer.calls:
            return not layer.parameters  # a list of layers; what code takes weights from, it may not call
        steps = self.course if new else self._course_then
        for call in layer.calls:
            known = [v.forward.fingerprint for v in call.inputs]
            for step in steps:
                inside = call.started < step.call.started and step.call.finished < call.finished
                if inside and step.call.root == call.root and step.layer.name not in others:
                    known += [v.forward.fingerprint for v in step.call.outputs]
            if any(v.forward.fingerprint is None or v.forward.fingerprint not in known for v in call.outputs):
                return False
        return True

    def is_as_it_was(self, pair: CallPair) -> bool:
        """Whether the run shows that a call gave out for the same what it gave out, and left the same behind."""
        inputs = self.inputs(pair)
        outputs = [self.comparison.change(pair.layer, pair.key, "output", v.path) for v in pair.actual.outputs]
        same = bool(outputs) and all(change.known and not change.differs for change in outputs)
        return inputs.match and inputs.known and same and self.change_of_state(pair) is None

    def calls_the_same(self, pair: CallPair) -> bool:
        """Whether a call makes the calls that it made: what others are said to give out is made up anew."""
        a, e = pair.actual.response, pair.expected.response
        return a is not None and e is not None and children(a) == children(e)

    def calls_others(self, pair: CallPair) -> bool:
        """Whether a container calls other children than it did, and gives out the same for the same: it was rewritten.

        Calling the blocks of a `Sequential` one by one is no other computation.
        """
        if None in (pair.actual.response, pair.expected.response) or self.calls_the_same(pair):
            return False
        return self.inputs(pair).match and self.change(pair, "output") is None and not self.of_call(pair, "path")

    @property
    def all_compared(self) -> bool:
        """Whether nothing was left out for being of another shape, or made after another recipe."""
        if any(self.differences("interface", "input added", "input removed", "path")):
            return False
        both = ((pair.actual.response, pair.expected.response) for pair in self.comparison.calls)
        return all(a is None or e is None or comparable(a, e) for a, e in both)

    def judged(self, layer: str) -> bool:
        """Whether either witness could speak of a layer."""
        pair = self.first.get(layer)
        return pair is None or self.answers(pair) or self.inputs(pair).match


def child_of(pair: CallPair, called: str) -> str:
    """Return the name of a child that a call knows as ``attn`` or ``attn (call 2)``."""
    return qualified(pair.layer, called.partition(" ")[0])


def _callers(course: Iterable[Step]) -> dict[str, str]:
    """Return of each layer the one whose code calls it, the first time."""
    found: dict[str, str] = {}
    for step in course:
        if step.parent is not None:
            found.setdefault(step.layer.name, step.parent.layer.name)
    return found


def _side(pair: CallPair, what: str) -> str:
    if what in ("input", "output"):
        return what
    return "input" if any(v.path == what for v in (*pair.actual.inputs, *pair.expected.inputs)) else "output"
