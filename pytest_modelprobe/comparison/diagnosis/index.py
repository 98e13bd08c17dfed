"""A comparison by layer and by call: what differs there, and whether its inputs match."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_modelprobe.comparison.differences import CallPair, Comparison, Difference, DifferenceKind
from pytest_modelprobe.comparison.pairing import children, comparable, is_drawn_otherwise
from pytest_modelprobe.comparison.tolerance import ValueChange
from pytest_modelprobe.record import (
    NOT_DEFAULT,
    ROOT,
    Call,
    CallTree,
    IsolatedResponse,
    Layer,
    Parameter,
    Record,
    Step,
    parent,
    qualified,
)

from .same_elements import has_same_elements

STRUCTURE: frozenset[DifferenceKind] = frozenset({
    "parameter added", "parameter removed", "parameter shape", "parameter dtype", "parameter trainable",
    "parameter tied", "buffer added", "buffer removed", "buffer shape", "buffer dtype", "buffer tied",
    "buffer persistent",
})  # fmt: skip
"""Parameters and buffers of a layer, without their values."""

_OWN: frozenset[DifferenceKind] = STRUCTURE | {"type", "attribute", "mode", "weights", "buffer", "calls"}


@dataclass(frozen=True, slots=True)
class InputComparison:
    """The inputs of a call compared with those of the expected record."""

    match: bool
    """Whether no known input differs."""
    known: bool = False
    """Whether all inputs are known."""
    units: float = 0.0
    """The largest change, in units of its limit."""


@dataclass(frozen=True, slots=True)
class CallsComparison:
    """Some calls compared with those of the expected record."""

    same_shapes: bool = True
    """Whether all are in both, with inputs and outputs of the same paths, shapes and dtypes."""
    same_values: bool = True
    """Whether no output differs either."""


class ComparisonIndex:
    """The differences of a comparison by layer, by call, and in the order of execution."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.of_layer: dict[str, list[Difference]] = {}
        """The differences of each layer that has any."""
        self._of_call: dict[tuple[str, int], list[Difference]] = {}
        for difference in comparison.found:
            self.of_layer.setdefault(difference.layer, []).append(difference)
            self._of_call.setdefault((difference.layer, difference.call), []).append(difference)
        self.first_calls = {pair.layer: pair for pair in reversed(comparison.calls)}
        """The first call of each layer."""
        self.steps: Sequence[Step] = CallTree(comparison.actual).started
        """The calls of the actual record, a container before its children."""
        self.executed_layers = tuple(dict.fromkeys(step.layer.name for step in self.steps))
        """Their layers, each once."""
        self._child_steps: dict[Step | None, list[Step]] = {}
        for step in self.steps:
            self._child_steps.setdefault(step.parent, []).append(step)
        by_call = {id(pair.actual): pair for pair in comparison.calls}
        self._pair_of_step = {step: by_call[id(step.call)] for step in self.steps if id(step.call) in by_call}
        self._step_of_pair = {id(pair): step for step, pair in self._pair_of_step.items()}
        self.added = comparison.actual.layers.keys() - comparison.expected.layers.keys()
        self.removed = comparison.expected.layers.keys() - comparison.actual.layers.keys()
        """Layers of the expected record alone, as `compare` names them."""
        self._steps_before: Sequence[Step] = CallTree(comparison.expected).started
        self._callers = _callers(self._steps_before) | _callers(self.steps)

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

    def layers_with(self, kinds: frozenset[DifferenceKind]) -> tuple[str, ...]:
        """Return the layers with a difference of these kinds, in order of execution."""
        return tuple(name for name in self.executed_layers if any(d.kind in kinds for d in self.of_layer.get(name, ())))

    # --- who calls whom -------------------------------------------------------------------------------------------

    def caller(self, name: str) -> str:
        """Return the layer whose code calls another; of one that is never called, the layer that contains it."""
        return self._callers.get(name) or parent(name)

    def child_steps(self, step: Step | None) -> Sequence[Step]:
        """Return the calls that a call makes directly."""
        return self._child_steps.get(step, ())

    @functools.cached_property
    def earlier_siblings(self) -> dict[Step, CallsComparison]:
        """Step → the calls that its caller made before it."""
        found = {}
        for siblings in self._child_steps.values():
            compared = CallsComparison()
            for step in siblings:
                found[step] = compared
                compared = self._and_call(compared, step)
        return found

    def compare_children(self, step: Step | None) -> CallsComparison:
        """Return how the calls that a call makes directly compare with the expected ones."""
        return functools.reduce(self._and_call, self.child_steps(step), CallsComparison())

    def _and_call(self, compared: CallsComparison, step: Step) -> CallsComparison:
        pair = self.pair_of(step)
        if pair is None or not compared.same_shapes or self.of_call(pair, "interface", "path", "context"):
            return CallsComparison(same_shapes=False, same_values=False)
        return CallsComparison(same_values=compared.same_values and self.largest_change(pair, "output") is None)

    @functools.cached_property
    def _child_steps_by_layer(self) -> dict[Step | None, dict[str, list[Step]]]:
        found: dict[Step | None, dict[str, list[Step]]] = {}
        for step in self.steps:
            found.setdefault(step.parent, {}).setdefault(step.layer.name, []).append(step)
        return found

    def child_steps_by_layer(self, step: Step | None) -> Mapping[str, Sequence[Step]]:
        """Return layer → its calls, of those that a call makes directly."""
        return self._child_steps_by_layer.get(step, {})

    def child_calls(self, pair: CallPair) -> Iterator[CallPair]:
        """Yield the calls that a call makes directly, of those that are in both records."""
        found = map(self.pair_of, self.child_steps(self._step_of_pair.get(id(pair))))
        return (child for child in found if child is not None)

    def child_call(self, pair: CallPair, name: str) -> CallPair | None:
        """Return the call of a child, given as ``attn`` or ``attn (call 2)``; None if it is not in both records."""
        child, _, number = name.partition(" (call ")
        calls = self.child_steps_by_layer(self._step_of_pair.get(id(pair))).get(child_of(pair, child), ())
        index = int(number.removesuffix(")")) - 1 if number else 0
        return self.pair_of(calls[index]) if index < len(calls) else None

    def other_explanation(self, pair: CallPair) -> str | None:
        """Return what else may explain a layer's response than its own code: its mode, or inputs that came or went."""
        if self.has(pair.layer, "mode"):
            return "its mode changed too"
        others = [] if _is_asked_alike(pair) else self.of_call(pair, "input added", "input removed", "argument")
        if others and not pair.outermost:
            came = others[0].kind == "input added" or others[0].expected is None
            return f"it {'gets' if came else 'does not get'} {others[0].what} now"
        return None

    def is_indifferent(self, call: CallPair | None) -> bool:
        """Whether the code of a call answers the same, alone, to the plain arguments of either record."""
        return call is not None and _is_same_for_arguments(call)

    def change_by_call(self, pair: CallPair) -> ValueChange | None:
        """Return the largest change among the outputs of a call that gets other arguments, and else the same values."""
        if self.is_indifferent(pair) or not self.has_same_layer(pair):
            return None
        known = {value.path for value in pair.expected.inputs}
        changes = [
            self.comparison.change(pair.layer, pair.key, "input", v.path) for v in pair.actual.inputs if v.path in known
        ]
        same = not self.of_call(pair, "interface", side="input") and not any(change.differs for change in changes)
        return self.largest_change(pair, "output") if same else None

    def uses_changed_input(self, pair: CallPair) -> bool:
        """Whether a floating-point tensor came or went that the code of the call uses, or used.

        In the isolated response a gradient reaches what is used; without a backward, everything counts as used. Of
        integers, such as positions, this is not known.
        """
        sides: tuple[tuple[DifferenceKind, Call], ...] = (
            ("input added", pair.actual),
            ("input removed", pair.expected),
        )
        for kind, call in sides:
            unused = () if call.response is None else call.response.without_gradient
            floating = {value.path for value in call.inputs if value.dtype.startswith(("float", "bfloat"))}
            if any(d.what in floating and d.what not in unused for d in self.of_call(pair, kind)):
                return True
        return False

    def has_no_child_calls(self, pair: CallPair) -> bool:
        """Whether a call calls no other layer."""
        return not self._child_steps.get(self._step_of_pair.get(id(pair)))

    def pair_of(self, step: Step | None) -> CallPair | None:
        """Return a call with the expected one; None if there is none."""
        return None if step is None else self._pair_of_step.get(step)

    def pair_at(self, difference: Difference) -> CallPair | None:
        """Return the call that a difference is of; None if there is none."""
        return self._pair_at.get((difference.layer, difference.call))

    @functools.cached_property
    def _pair_at(self) -> Mapping[tuple[str, int], CallPair]:
        return {(pair.layer, pair.actual.index): pair for pair in reversed(self.comparison.calls)}

    def caller_of(self, pair: CallPair) -> Step | None:
        """Return the call that makes a call; None if the test does."""
        step = self.step_of(pair)
        return None if step is None else step.parent

    def step_of(self, pair: CallPair) -> Step | None:
        """Return a call of the actual record in the tree of calls."""
        return self._step_of_pair.get(id(pair))

    # --- of one call ----------------------------------------------------------------------------------------------

    def compare_inputs(self, pair: CallPair) -> InputComparison:
        """Return how the inputs of a call compare with the expected ones."""
        others = self.of_call(pair, "argument", "context", "interface", "input added", "input removed", side="input")
        if _is_same_for_arguments(pair):
            others = [d for d in others if d.kind != "argument"]
        elif self._gets_non_default_false(pair):
            return InputComparison(match=False)
        reshaped = self._reshaped_inputs(pair)
        if any(d.kind != "interface" or d.what not in reshaped for d in others):
            return InputComparison(match=False)
        a, e = pair.actual, pair.expected
        known = [v for v in a.inputs if v.path not in reshaped]
        changes = [self.comparison.change(pair.layer, pair.key, "input", v.path) for v in known]
        drew_the_same = a.random == e.random or None in (a.random, e.random)
        return InputComparison(
            match=drew_the_same and not any(change.differs for change in changes),
            known=a.inputs_known and e.inputs_known and all(change.known for change in changes),
            units=max((change.units for change in changes), default=0.0),
        )

    def _reshaped_inputs(self, pair: CallPair) -> set[str]:
        """Return the inputs of a call that have the same elements in another shape."""
        found = [d for d in self.of_call(pair, "interface", side="input") if _has_as_many(d)]
        return {d.what for d in found if has_same_elements(self, pair, d)}

    def reshaped_outputs(self, pair: CallPair) -> list[Difference]:
        """Return the outputs of another shape or dtype, without those of a call whose inputs were reshaped alike."""
        found = self.of_call(pair, "interface", side="output")
        return [d for d in found if not _has_as_many(d)] if found and self._reshaped_inputs(pair) else found

    def largest_change(self, pair: CallPair, side: Literal["input", "output"]) -> ValueChange | None:
        """Return the largest change among the values of a call, if there is one."""
        values = pair.actual.inputs if side == "input" else pair.actual.outputs
        found = [self.comparison.change(pair.layer, pair.key, side, v.path) for v in values]
        reshaped = self.of_call(pair, "interface", side="input") if side == "input" else self.reshaped_outputs(pair)
        if reshaped:
            found.insert(0, ValueChange(math.inf))  # the first of those without a tolerance is taken
        return max((c for c in found if c.differs), key=lambda c: c.units, default=None)

    def largest_buffer_change(self, pair: CallPair) -> ValueChange | None:
        """Return the largest change among the buffers after the run, if there is one."""
        found = [d for d in self.of_layer.get(pair.layer, ()) if d.kind == "state"]
        changes = [self.comparison.change(pair.layer, None, "after", d.what) for d in found]
        return max(changes, key=lambda c: c.units, default=None)

    def has_same_structure(self, pair: CallPair) -> bool:
        """Whether arguments, shapes, attributes and the structure of parameters are the same, whatever their values."""
        got = self.of_call(pair, "context", "interface", "input added", "input removed", side="input")
        got += [] if _is_same_for_arguments(pair) else self.of_call(pair, "argument")
        held = {"type", "attribute", "mode", *STRUCTURE}
        return not got and held.isdisjoint(d.kind for d in self.of_layer.get(pair.layer, ()))

    def has_same_layer(self, pair: CallPair) -> bool:
        """Whether the layer has the same attributes, weights, its own and tied ones, and number of calls."""
        same = _OWN.isdisjoint(d.kind for d in self.of_layer.get(pair.layer, ()))
        layer = self.comparison.actual.layers[pair.layer]
        return same and not any(map(self._has_changed_owner, (*layer.parameters, *layer.buffers)))

    def _has_changed_owner(self, parameter: Parameter) -> bool:
        """Whether a parameter is tied to one that changed, which `compare` tells of its owner alone."""
        owner, _, name = (parameter.tied_to or "").rpartition(".")
        return any(d.what == name and d.kind in ("weights", "buffer") for d in self.of_layer.get(owner or ROOT, ()))

    def has_comparable_responses(self, pair: CallPair) -> bool:
        """Whether the isolated responses of a call were made from the same synthetic tensors and arguments."""
        asked = _is_asked_alike(pair)
        given = self.of_call(pair, "context", "interface", *(() if asked else ("argument",)), side="input")
        # An argument that came or went may be the default; then it is a matter of the caller.
        # A synthetic mask leaves the same entries in any form.
        given = [d for d in given if d.kind != "interface" or not has_same_elements(self, pair, d, expanded=False)]
        came_or_went = all(d.kind == "argument" and None in (d.actual, d.expected) for d in given)
        same = comparable(pair.actual.response, pair.expected.response)
        other_false = not asked and self._gets_non_default_false(pair)
        drawn_otherwise = is_drawn_otherwise(pair.layer, pair.actual.response, self.comparison.names_before)
        return came_or_went and same and not (other_false or drawn_otherwise)

    def is_difference_conclusive(self, pair: CallPair, difference: Difference) -> bool:
        """Whether a difference between the isolated responses of a call shows a change of its own code."""
        if not self.has_comparable_responses(pair) or self.is_rewritten(pair) or self._is_regrouped(pair):
            return False
        before = self._before_pass_through(pair)
        return before is None or difference.what in before

    def _gets_non_default_false(self, pair: CallPair) -> bool:
        """Whether the caller's response shows that the call gets a False in one record that is not the default."""
        step = self._step_of_pair.get(id(pair))
        above = None if step is None else self.pair_of(step.parent)
        if above is None:
            return False
        return any(
            child_of(above, d.what.rpartition(" ")[0]) == pair.layer
            and any(str(side).endswith(NOT_DEFAULT) for side in (d.actual, d.expected))
            for d in self.of_call(above, "response")
        )

    def is_response_conclusive(self, pair: CallPair) -> bool:
        """Whether differences between the isolated responses of a call show a change of its own code."""
        return (
            self.has_comparable_responses(pair)
            and not self.is_rewritten(pair)
            and not self._is_regrouped(pair)
            and self._before_pass_through(pair) is None
        )

    def _is_regrouped(self, pair: CallPair) -> bool:
        """Whether the same layers are called through another container, or without layers that passed values through.

        Each direct child returns synthetic tensors, so the response differs although the computation does not.
        """
        mine, theirs = (
            set() if r is None else {child_of(pair, called) for called in children(r)}
            for r in (pair.actual.response, pair.expected.response)
        )
        came, went = mine - theirs, theirs - mine
        if any(f"{one}.".startswith(f"{other}.") for x, y in ((came, went), (went, came)) for one in x for other in y):
            return True
        gone = (f"{name} (removed)" for name in went)
        left = [*came & self.added, *self.removed.intersection(gone)]
        return any(self.is_pass_through(name) for name in left)

    def _before_pass_through(self, pair: CallPair) -> Collection[str] | None:
        """Return what a call emits before a child that passes on its input and is called less or more often now.

        In the isolated response this child returns a synthetic tensor, so all that follows differs. Of one that is only
        called elsewhere, nothing is returned if all else gets what it got. None if there is no such child; added and
        removed layers are left to `_is_regrouped`.
        """
        a, e = pair.actual.response, pair.expected.response
        if a is None or e is None:
            return None
        if self.has_same_children(pair):
            return () if self._passes_on_the_same(pair, a, e) else None
        for response, other, record in ((a, e, self.comparison.actual), (e, a, self.comparison.expected)):
            more = {child_of(pair, called) for called in children(response).keys() - children(other).keys()}
            called = _receivers(pair, response)
            both = self.comparison.actual.layers.keys() & self.comparison.expected.layers.keys() & more
            passing = [called.index(name) for name in both if name in called and _returns_its_input(record, name)]
            if passing:
                return [handed.where for handed in response.handed[: min(passing)]]
        return None

    def _passes_on_the_same(self, pair: CallPair, a: IsolatedResponse, e: IsolatedResponse) -> bool:
        """Whether responses differ, and not if children that return their input are left out."""
        differing = {d.what for d in self.of_call(pair, "response")}
        computed = [{h.where for h in response.handed if h.passed is None} for response in (a, e)]
        if not differing or differing & computed[0] & computed[1]:
            return False
        now, then = (
            _handed_on(pair, response, record)
            for response, record in ((a, self.comparison.actual), (e, self.comparison.expected))
        )
        return now == then

    def is_pass_through(self, name: str) -> bool:
        """Whether an added or removed layer only passes on values: its inputs, or outputs of layers called inside it.

        Then it computes nothing besides the layers that are in both records.
        """
        new = name in self.added
        layer = (self.comparison.actual if new else self.comparison.expected).layers[name]
        if not layer.calls:
            return not layer.parameters  # a list of layers; one with parameters may be used without a call
        return _passes_on(layer, self._kept_steps_now if new else self._kept_steps_before)

    @functools.cached_property
    def _kept_steps_now(self) -> Mapping[str, Sequence[Step]]:
        return _by_root(step for step in self.steps if step.layer.name not in self.added)

    @functools.cached_property
    def _kept_steps_before(self) -> Mapping[str, Sequence[Step]]:
        return _by_root(step for step in self._steps_before if step.layer.name not in self.removed)

    def is_unchanged_in_run(self, pair: CallPair) -> bool:
        """Whether the run shows the same outputs and buffers for the same inputs."""
        inputs = self.compare_inputs(pair)
        outputs = [self.comparison.change(pair.layer, pair.key, "output", v.path) for v in pair.actual.outputs]
        same = bool(outputs) and all(change.known and not change.differs for change in outputs)
        return inputs.match and inputs.known and same and self.largest_buffer_change(pair) is None

    def has_same_children(self, pair: CallPair) -> bool:
        """Whether the isolated responses call the same children."""
        a, e = pair.actual.response, pair.expected.response
        return a is not None and e is not None and children(a) == children(e)

    def is_rewritten(self, pair: CallPair) -> bool:
        """Whether a container calls other children and has the same outputs for the same inputs.

        As where the blocks of a `Sequential` are called one by one.
        """
        if None in (pair.actual.response, pair.expected.response) or self.has_same_children(pair):
            return False
        return (
            self.compare_inputs(pair).match
            and self.largest_change(pair, "output") is None
            and not self.of_call(pair, "path")
        )

    @property
    def is_all_comparable(self) -> bool:
        """Whether all shapes are the same and all code was compared, alone, on the same synthetic inputs."""
        if any(self.differences("interface", "input added", "input removed", "path")):
            return False
        return all(map(self.is_response_conclusive, self.first_calls.values()))

    def can_be_judged(self, layer: str) -> bool:
        """Whether isolated or propagation evidence is available for a layer."""
        pair = self.first_calls.get(layer)
        return pair is None or self.has_comparable_responses(pair) or self.compare_inputs(pair).match


def _has_as_many(interface: Difference) -> bool:
    """Whether a value has as many elements of the same dtype as before."""
    sides = [
        str(side).replace("(", "").replace(")", "").replace(",", "").split()
        for side in (interface.actual, interface.expected)
    ]
    counts = {(math.prod(map(int, sizes)), dtype) for *sizes, dtype in sides if all(map(str.isdigit, sizes))}
    return len(counts) == 1


def child_of(pair: CallPair, called: str) -> str:
    """Return the full name of a child given as ``attn`` or ``attn (call 2)``."""
    return qualified(pair.layer, called.partition(" ")[0])


def _is_asked_alike(pair: CallPair) -> bool:
    """Whether the isolated response is one to the plain arguments of the expected call."""
    return pair.actual.response is not None and pair.actual.response.arguments_matter is not None


def _is_same_for_arguments(pair: CallPair) -> bool:
    """Whether the code answers the same, alone, to the plain arguments of either call."""
    return pair.actual.response is not None and pair.actual.response.arguments_matter is False


def _callers(course: Iterable[Step]) -> dict[str, str]:
    """Return layer → the layer whose code calls it first."""
    found: dict[str, str] = {}
    for step in course:
        if step.parent is not None:
            found.setdefault(step.layer.name, step.parent.layer.name)
    return found


def _side(pair: CallPair, what: str) -> str:
    if what in ("input", "output"):
        return what
    return "input" if any(v.path == what for v in (*pair.actual.inputs, *pair.expected.inputs)) else "output"


def _receivers(pair: CallPair, response: IsolatedResponse | None) -> list[str]:
    handed = response.handed if response is not None else ()
    return [child_of(pair, h.where.rpartition(" ")[0]) if " " in h.where else "" for h in handed]


def _handed_on(pair: CallPair, response: IsolatedResponse, record: Record) -> dict[str, str | None]:
    """Return which synthetic tensor goes where, of children that return their input the one that they got.

    None: a tensor that was computed.
    """
    names = {called: child_of(pair, called) for called in children(response) if called}
    passing = {called for called, name in names.items() if name in record.layers and _returns_its_input(record, name)}
    given = {
        f"{called} output": h.passed for called in passing for h in response.handed if h.where == f"{called} input"
    }

    def source(passed: str | None) -> str | None:
        while passed in given:
            passed = given[passed]
        return passed

    return {h.where: source(h.passed) for h in response.handed if h.where.rpartition(" ")[0] not in passing}


def _returns_its_input(record: Record, name: str) -> bool:
    """Whether a layer without parameters, itself or inside it, returned its inputs in the run."""
    if not returns_its_input(record.layers[name]):
        return False
    inside = [layer for other, layer in record.layers.items() if f"{other}.".startswith(f"{name}.")]
    return not any(layer.parameters for layer in inside)


def _by_root(steps: Iterable[Step]) -> dict[str, list[Step]]:
    """Return root → its calls, in the order in which they started."""
    found: dict[str, list[Step]] = {}
    for step in sorted(steps, key=_started):
        found.setdefault(step.call.root, []).append(step)
    return found


def _started(step: Step) -> int:
    return step.call.started


def returns_its_input(layer: Layer) -> bool:
    """Whether each output of a layer is one of its inputs."""
    return _passes_on(layer, {})


def _passes_on(layer: Layer, steps: Mapping[str, Sequence[Step]]) -> bool:
    """Whether each output of a layer is one of its inputs, or an output of one of these calls inside it.

    Args:
        layer: The layer.
        steps: As `_by_root` returns them.
    """
    for call in layer.calls:
        known = {v.forward.fingerprint for v in call.inputs}
        others = steps.get(call.root, ())
        start = bisect.bisect_right(others, call.started, key=_started)
        for step in others[start : bisect.bisect_left(others, call.finished, start, key=_started)]:
            if step.call.finished < call.finished:
                known.update(v.forward.fingerprint for v in step.call.outputs)
        if any(v.forward.fingerprint is None or v.forward.fingerprint not in known for v in call.outputs):
            return False
    return True
