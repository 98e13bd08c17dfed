"""A comparison as the search for causes asks it: by layer, by call, and along the tree of calls.

`compare` returns one list of differences. Each step of a diagnosis asks the same few questions of it: what differs
here, whether what came in is the same, and whether the isolated responses of a call tell anything. They are answered
here, so that two steps never answer one of them in two ways.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_modelprobe.comparison.matching import (
    child_of,
    children,
    comparable,
    emitted,
    is_drawn_otherwise,
    is_same,
    split_place,
)
from pytest_modelprobe.comparison.tolerance import CallPair, Comparison, Difference, DifferenceKind, ValueChange
from pytest_modelprobe.record import (
    NOT_DEFAULT,
    ROOT,
    CallTree,
    IsolatedResponse,
    Layer,
    Parameter,
    Plain,
    Reading,
    Record,
    Step,
    Value,
    parent,
    relative_name,
)

# --- the same elements in another form: another shape, or a mask of another dtype -------------------------------------


def has_same_elements(index: ComparisonIndex, pair: CallPair, difference: Difference, *, expanded: bool = True) -> bool:
    """Whether a value has the same elements in another shape, or is a mask of the same entries in another form.

    Args:
        index: What differs.
        pair: The call that takes the value or gives it out.
        difference: Of its shape or dtype, or of its numbers.
        expanded: Whether a mask may be expanded too: then no more is known than what share of it is masked out.
    """
    a, e, path = pair.actual, pair.expected, difference.what
    taken = value_at(a.inputs, path), value_at(e.inputs, path)
    given = value_at(a.outputs, path), value_at(e.outputs, path)
    found = [(now, then) for now, then in (taken, given) if now is not None and then is not None]
    return bool(found) and all(
        _is_reshaped(now, then) or (now is taken[0] and _is_same_mask(index, pair, now, then, expanded=expanded))
        for now, then in found
    )


def value_at(values: Sequence[Value], path: str) -> Value | None:
    """Return the value at a path, or `None` if there is none."""
    return next((value for value in values if value.path == path), None)


def _is_reshaped(now: Value, then: Value) -> bool:
    if now.dtype != then.dtype:
        return False
    if is_same(now.forward, then.forward):
        return True
    a, e = now.forward.statistics, then.forward.statistics
    # In another order of axes; the fingerprint of one that is split into other samples is another one, too.
    return a is not None and e is not None and is_same(Reading(statistics=a), Reading(statistics=e))


def _is_same_mask(index: ComparisonIndex, pair: CallPair, now: Value, then: Value, *, expanded: bool) -> bool:
    """Whether an input that no layer gives out masks the same: in another dtype, by another number, or expanded."""
    if now.source or then.source or _hidden_shares(now).isdisjoint(_hidden_shares(then)):
        return False
    if now.shape != then.shape:
        return expanded
    step = index.step_of(pair)
    caller = index.pair_of(step.parent)
    if caller is None:
        return False
    where = f"{relative_name(step.name, caller.layer)} {now.path}"
    a, e = ({h.where: h for h in emitted(call.response)} for call in (caller.actual, caller.expected))
    if where not in a or where not in e or any(d.what == where for d in index.of_call(caller, "response")):
        return False
    # What the caller passes on is compared where it was made.
    return a[where].passed is not None or index.has_comparable_responses(caller)


def _hidden_shares(value: Value) -> set[float]:
    """Return the shares of its entries that a mask of any shape and dtype may hide; nothing if it is no mask.

    A bool may stand for what is masked, or for what is not. An additive mask hides what is not zero.
    """
    numbers = value.forward.statistics
    if numbers is None or not numbers.count:
        return set()
    additive = value.is_floating and (numbers.max or 0.0) <= 0 and not numbers.nan and not numbers.posinf
    hidden = [numbers.count - numbers.zeros] if additive or value.dtype == "bool" else []
    hidden += [numbers.zeros] if value.dtype == "bool" else []
    return {round(n / numbers.count, 6) for n in hidden}


# --- layers that only hand on what they get ---------------------------------------------------------------------------

StepsByRoot = Mapping[str, Sequence[Step]]
"""Root → its calls, in the order in which they started."""


def returns_its_input(layer: Layer) -> bool:
    """Whether each output of a layer is one of its inputs."""
    return passes_on(layer, {})


def returned_its_input(record: Record, name: str) -> bool:
    """Whether a layer without parameters, itself or inside it, returned its inputs in the run."""
    inside = (layer for other, layer in record.layers.items() if f"{other}.".startswith(f"{name}."))
    return returns_its_input(record.layers[name]) and not any(layer.parameters for layer in inside)


def passes_on(layer: Layer, steps: StepsByRoot) -> bool:
    """Whether each output of a layer is one of its inputs, or an output of one of these calls inside it."""
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


def by_root(steps: Iterable[Step]) -> StepsByRoot:
    """Return root → its calls."""
    found: dict[str, list[Step]] = {}
    for step in sorted(steps, key=_started):
        found.setdefault(step.call.root, []).append(step)
    return found


def handed_on(pair: CallPair, response: IsolatedResponse, record: Record) -> dict[str, str | None]:
    """Return which synthetic tensor goes where; of children that return their input it is the one that they got.

    None: a tensor that was computed.
    """
    names = {called: child_of(pair, called) for called in children(response) if called}
    passing = {called for called, name in names.items() if name in record.layers and returned_its_input(record, name)}
    given = {
        f"{called} output": h.passed for called in passing for h in response.handed if h.where == f"{called} input"
    }

    def source(passed: str | None) -> str | None:
        while passed in given:
            passed = given[passed]
        return passed

    return {h.where: source(h.passed) for h in response.handed if split_place(h.where)[0] not in passing}


def _started(step: Step) -> int:
    return step.call.started


STRUCTURE: frozenset[DifferenceKind] = frozenset({
    "parameter added", "parameter removed", "parameter shape", "parameter dtype", "parameter trainable",
    "parameter tied", "parameter order", "buffer added", "buffer removed", "buffer shape", "buffer dtype",
    "buffer tied", "buffer persistent",
})  # fmt: skip
"""Parameters and buffers of a layer, without their values."""

_OWN: frozenset[DifferenceKind] = STRUCTURE | {"type", "attribute", "mode", "weights", "buffer", "calls"}

Side = Literal["input", "output"]


@dataclass(frozen=True, slots=True)
class InputComparison:
    """The inputs of a call compared with those of the expected record."""

    match: bool
    """Whether no known input differs."""
    known: bool = False
    """Whether all inputs are known."""
    units: float = 0.0
    """The largest change, in units of its limit."""


class ComparisonIndex:
    """The differences of a comparison by layer, by call, and in the order of execution."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.now, self.then = comparison.actual.layers, comparison.expected.layers
        self.added = self.now.keys() - self.then.keys()
        self.removed = self.then.keys() - self.now.keys()
        """Layers of the expected record alone, as `compare` names them."""
        self.of_layer: dict[str, list[Difference]] = {}
        """The differences of each layer that has any."""
        self._of_call: dict[tuple[str, int], list[Difference]] = {}
        for difference in comparison.found:
            self.of_layer.setdefault(difference.layer, []).append(difference)
            self._of_call.setdefault((difference.layer, difference.call), []).append(difference)
        # Of the calls of two modes with one number the first counts.
        self.first_calls = {pair.layer: pair for pair in reversed(comparison.calls)}
        """The first call of each layer."""
        self._pair_at = {(pair.layer, pair.actual.index): pair for pair in reversed(comparison.calls)}
        self._pair_of_call = {id(pair.actual): pair for pair in comparison.calls}
        self.steps: Sequence[Step] = CallTree(comparison.actual).started
        """The calls of the actual record, a container before its children."""
        self.executed_layers = tuple(dict.fromkeys(step.layer.name for step in self.steps))
        """Their layers, each once."""
        self._step_of_call = {id(step.call): step for step in self.steps}
        self._child_steps: dict[Step | None, list[Step]] = {}
        for step in self.steps:
            self._child_steps.setdefault(step.parent, []).append(step)
        self._steps_before: Sequence[Step] = CallTree(comparison.expected).started
        self._callers = _callers(self._steps_before) | _callers(self.steps)

    # --- what differs ---------------------------------------------------------------------------------------------

    def differences(self, *kinds: DifferenceKind) -> Iterator[Difference]:
        """Yield the differences of these kinds."""
        return (d for d in self.comparison.found if d.kind in kinds)

    def has(self, layer: str, *kinds: DifferenceKind) -> bool:
        """Whether a layer has a difference of one of these kinds."""
        return any(d.kind in kinds for d in self.of_layer.get(layer, ()))

    def of_call(self, pair: CallPair, *kinds: DifferenceKind, side: Side | None = None) -> list[Difference]:
        """Return the differences of a call of these kinds; those of its interface on one side, if given."""
        return [
            d
            for d in self._of_call.get((pair.layer, pair.actual.index), ())
            if d.kind in kinds and (side is None or d.kind != "interface" or _side(pair, d.what) == side)
        ]

    def change(self, pair: CallPair, side: str, path: str) -> ValueChange:
        """Return the change of a value of a call."""
        return self.comparison.change(pair.layer, pair.key, side, path)

    def layers_with(self, kinds: Collection[DifferenceKind]) -> tuple[str, ...]:
        """Return the layers with a difference of these kinds, in order of execution."""
        return tuple(name for name in self.executed_layers if self.has(name, *kinds))

    # --- who calls whom -------------------------------------------------------------------------------------------

    def caller(self, name: str) -> str:
        """Return the layer whose code calls another; of one that is never called, the layer that contains it."""
        return self._callers.get(name) or parent(name)

    def pair_of(self, step: Step | None) -> CallPair | None:
        """Return a call with the expected one, or `None` if only one record has it."""
        return None if step is None else self._pair_of_call.get(id(step.call))

    def pair_at(self, difference: Difference) -> CallPair | None:
        """Return the call that a difference belongs to, or `None` if only one record has it."""
        return self._pair_at.get((difference.layer, difference.call))

    def step_of(self, pair: CallPair) -> Step:
        """Return a call in the tree of calls."""
        return self._step_of_call[id(pair.actual)]

    def child_steps(self, step: Step | None) -> Sequence[Step]:
        """Return the calls that a call makes directly."""
        return self._child_steps.get(step, ())

    def child_call(self, pair: CallPair, name: str) -> CallPair | None:
        """Return the call of a child, given as ``attn`` or ``attn (call 2)``; None if it is not in both records."""
        number = name.partition(" (call ")[2].removesuffix(")")
        child, index = child_of(pair, name), int(number) - 1 if number else 0
        calls = [step for step in self.child_steps(self.step_of(pair)) if step.layer.name == child]
        return self.pair_of(calls[index]) if index < len(calls) else None

    def child_calls(self, pair: CallPair) -> Iterator[CallPair]:
        """Yield the calls that a call makes directly, of those that are in both records."""
        found = map(self.pair_of, self.child_steps(self.step_of(pair)))
        return (child for child in found if child is not None)

    def have_same_shapes(self, steps: Iterable[Step]) -> bool:
        """Whether calls are in both records, with inputs and outputs of the same paths, shapes and dtypes."""
        pairs = map(self.pair_of, steps)
        return all(pair is not None and not self.of_call(pair, "interface", "path", "context") for pair in pairs)

    # --- one call in the run --------------------------------------------------------------------------------------

    def compare_inputs(self, pair: CallPair) -> InputComparison:
        """Return how the inputs of a call compare with the expected ones."""
        others = self.of_call(pair, "argument", "context", "interface", "input added", "input removed", side="input")
        if is_indifferent(pair):
            others = [d for d in others if d.kind != "argument"]
        elif self._gets_non_default_false(pair):
            return InputComparison(match=False)
        reshaped = self._reshaped_inputs(pair)
        if any(d.kind != "interface" or d.what not in reshaped for d in others):
            return InputComparison(match=False)
        a, e = pair.actual, pair.expected
        changes = [self.change(pair, "input", v.path) for v in a.inputs if v.path not in reshaped]
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

    def is_handed_on(self, pair: CallPair, difference: Difference) -> bool:
        """Whether an input of a forward is an output of an earlier one that differs too, as a state in a loop."""
        source = next((value.source for value in pair.actual.inputs if value.path == difference.what), None)
        made = (d for d in self.differences("output") if f"{d.layer} {d.what}" == source)
        return source is not None and any(made)

    def largest_change(self, pair: CallPair, side: Side) -> ValueChange | None:
        """Return the largest change among the values of a call, if there is one."""
        values = pair.actual.inputs if side == "input" else pair.actual.outputs
        found = [self.change(pair, side, v.path) for v in values]
        reshaped = self.of_call(pair, "interface", side="input") if side == "input" else self.reshaped_outputs(pair)
        if reshaped:
            found.insert(0, ValueChange(math.inf))  # the first of those without a tolerance is taken
        return max((c for c in found if c.differs), key=lambda c: c.units, default=None)

    def largest_buffer_change(self, pair: CallPair) -> ValueChange | None:
        """Return the largest change among the buffers after the run, if there is one."""
        found = [d for d in self.of_layer.get(pair.layer, ()) if d.kind == "state"]
        changes = [self.comparison.change(pair.layer, None, "after", d.what) for d in found]
        return max(changes, key=lambda c: c.units, default=None)

    def is_unchanged_in_run(self, pair: CallPair) -> bool:
        """Whether the run shows the same outputs and buffers for the same inputs."""
        inputs = self.compare_inputs(pair)
        outputs = [self.change(pair, "output", v.path) for v in pair.actual.outputs]
        same = bool(outputs) and all(change.same for change in outputs)
        return inputs.match and inputs.known and same and self.largest_buffer_change(pair) is None

    def change_by_call(self, pair: CallPair) -> ValueChange | None:
        """Return the largest change among the outputs of a call that gets other arguments, and else the same values."""
        if is_indifferent(pair) or not self.has_same_layer(pair):
            return None
        known = {value.path for value in pair.expected.inputs}
        moved = any(self.change(pair, "input", v.path).differs for v in pair.actual.inputs if v.path in known)
        return None if moved or self.of_call(pair, "interface", side="input") else self.largest_change(pair, "output")

    def has_same_structure(self, pair: CallPair) -> bool:
        """Whether arguments, shapes, attributes and the structure of parameters are the same, whatever their values."""
        got = self.of_call(pair, "context", "interface", "input added", "input removed", side="input")
        got += [] if is_indifferent(pair) else self.of_call(pair, "argument")
        return not got and not self.has(pair.layer, "type", "attribute", "mode", *STRUCTURE)

    def has_same_layer(self, pair: CallPair) -> bool:
        """Whether the layer has the same attributes, weights, its own and tied ones, and number of calls."""
        layer = self.now[pair.layer]
        own = (*layer.parameters, *layer.buffers)
        return not self.has(pair.layer, *_OWN) and not any(map(self._has_changed_owner, own))

    def _has_changed_owner(self, parameter: Parameter) -> bool:
        """Whether a parameter is tied to one that changed, which `compare` tells of its owner alone."""
        owner, _, name = (parameter.tied_to or "").rpartition(".")
        return any(d.what == name and d.kind in ("weights", "buffer") for d in self.of_layer.get(owner or ROOT, ()))

    def uses_changed_input(self, pair: CallPair) -> bool:
        """Whether a floating-point tensor came or went that the code of the call uses, or used.

        In the isolated response a gradient reaches what is used; without a backward, everything counts as used. Of
        integers, such as positions, this is not known.
        """
        for call, came_or_went in (
            (pair.actual, self.of_call(pair, "input added")),
            (pair.expected, self.of_call(pair, "input removed")),
        ):
            unused = () if call.response is None else call.response.without_gradient
            floating = {value.path for value in call.inputs if value.dtype.startswith(("float", "bfloat"))}
            if any(d.what in floating and d.what not in unused for d in came_or_went):
                return True
        return False

    # --- one call alone -------------------------------------------------------------------------------------------

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

    def is_response_conclusive(self, pair: CallPair, difference: Difference | None = None) -> bool:
        """Whether a difference between the isolated responses of a call shows a change of its own code.

        Args:
            pair: The call.
            difference: One difference of its responses, or `None` to ask whether any difference would show it.
        """
        if not self.has_comparable_responses(pair) or self._is_rewritten(pair) or self._is_regrouped(pair):
            return False
        before = self._before_pass_through(pair)
        return before is None or (difference is not None and difference.what in before)

    def other_explanation(self, pair: CallPair) -> str | None:
        """Return what else may explain a layer's response than its own code: its mode, or inputs that came or went."""
        if self.has(pair.layer, "mode"):
            return "its mode changed too"
        others = [] if _is_asked_alike(pair) else self.of_call(pair, "input added", "input removed", "argument")
        if others and not pair.outermost:
            came = others[0].kind == "input added" or others[0].expected is None
            return f"it {'gets' if came else 'does not get'} {others[0].what} now"
        return None

    def _gets_non_default_false(self, pair: CallPair) -> bool:
        """Whether the caller's response shows that the call gets a False in one record that is not the default."""
        above = self.pair_of(self.step_of(pair).parent)
        return above is not None and any(
            child_of(above, split_place(d.what)[0]) == pair.layer
            and any(str(side).endswith(NOT_DEFAULT) for side in (d.actual, d.expected))
            for d in self.of_call(above, "response")
        )

    def _is_rewritten(self, pair: CallPair) -> bool:
        """Whether a container calls other children and has the same outputs for the same inputs.

        As where the blocks of a `Sequential` are called one by one.
        """
        return (
            children(pair.actual.response) != children(pair.expected.response)
            and self.compare_inputs(pair).match
            and self.largest_change(pair, "output") is None
            and not self.of_call(pair, "path")
        )

    def _is_regrouped(self, pair: CallPair) -> bool:
        """Whether the same layers are called through another container, or without layers that passed values through.

        Each direct child returns synthetic tensors, so the response differs although the computation does not.
        """
        calls = (pair.actual, pair.expected)
        mine, theirs = ({child_of(pair, called) for called in children(call.response)} for call in calls)
        came, went = mine - theirs, theirs - mine
        if any(f"{one}.".startswith(f"{other}.") for x, y in ((came, went), (went, came)) for one in x for other in y):
            return True
        left = [*came & self.added, *self.removed.intersection(f"{name} (removed)" for name in went)]
        return any(map(self.is_pass_through, left))

    def _before_pass_through(self, pair: CallPair) -> Collection[str] | None:
        """Return what a call emits before a child that passes on its input and is called less or more often now.

        In the isolated response this child returns a synthetic tensor, so all that follows differs. Of one that is only
        called elsewhere, nothing is returned if all else gets what it got. None if there is no such child; added and
        removed layers are left to `_is_regrouped`.
        """
        a, e = pair.actual.response, pair.expected.response
        if a is None or e is None:
            return None
        actual, expected = self.comparison.actual, self.comparison.expected
        if children(a) == children(e):
            differing = {d.what for d in self.of_call(pair, "response")}
            computed = [{h.where for h in response.handed if h.passed is None} for response in (a, e)]
            if not differing or differing & computed[0] & computed[1]:
                return None
            return () if handed_on(pair, a, actual) == handed_on(pair, e, expected) else None
        for response, other, record in ((a, e, actual), (e, a, expected)):
            more = {child_of(pair, called) for called in children(response).keys() - children(other).keys()}
            places = [h.where for h in response.handed]
            called = [child_of(pair, split_place(place)[0]) for place in places]
            both = (name for name in more if name in called and name in self.now and name in self.then)
            passing = [called.index(name) for name in both if returned_its_input(record, name)]
            if passing:
                return places[: min(passing)]
        return None

    def is_pass_through(self, name: str) -> bool:
        """Whether an added or removed layer only passes on values: its inputs, or outputs of layers called inside it.

        Then it computes nothing besides the layers that are in both records.
        """
        new = name in self.added
        layer = (self.now if new else self.then)[name]
        if not layer.calls:
            return not layer.parameters  # a list of layers; one with parameters may be used without a call
        return passes_on(layer, self._kept_steps_now if new else self._kept_steps_before)

    @functools.cached_property
    def _kept_steps_now(self) -> StepsByRoot:
        return by_root(step for step in self.steps if step.layer.name not in self.added)

    @functools.cached_property
    def _kept_steps_before(self) -> StepsByRoot:
        return by_root(step for step in self._steps_before if step.layer.name not in self.removed)

    # --- what could be judged at all ------------------------------------------------------------------------------

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


def is_indifferent(pair: CallPair | None) -> bool:
    """Whether the code of a call answers the same, alone, to the plain arguments of either record."""
    return pair is not None and pair.actual.response is not None and pair.actual.response.arguments_matter is False


def sizes_and_dtype(described: Plain) -> list[str]:
    """Split a description of a tensor as differences have it.

    >>> sizes_and_dtype("(2, 12, 16) float32")
    ['2', '12', '16', 'float32']
    """
    return str(described).replace("(", "").replace(")", "").replace(",", "").split()


def _has_as_many(interface: Difference) -> bool:
    """Whether a value has as many elements of the same dtype as before."""
    sides = map(sizes_and_dtype, (interface.actual, interface.expected))
    counts = {(math.prod(map(int, sizes)), dtype) for *sizes, dtype in sides if all(map(str.isdigit, sizes))}
    return len(counts) == 1


def _is_asked_alike(pair: CallPair) -> bool:
    """Whether the isolated response is one to the plain arguments of the expected call."""
    return pair.actual.response is not None and pair.actual.response.arguments_matter is not None


def _callers(course: Iterable[Step]) -> dict[str, str]:
    """Return layer → the layer whose code calls it first."""
    found: dict[str, str] = {}
    for step in course:
        if step.parent is not None:
            found.setdefault(step.layer.name, step.parent.layer.name)
    return found


def _side(pair: CallPair, what: str) -> Side:
    # A keyword may be named `output`; what has this name is the output nevertheless.
    is_input = what != "output" and any(v.path == what for v in (*pair.actual.inputs, *pair.expected.inputs))
    return "input" if is_input else "output"
