"""Activations: dead layers and dead units, and values that are NaN or infinite.

The layer that a failure names has to be the one where it began: zeros and NaN are passed on by all layers after it.
So this module follows the calls in order of execution, and asks of each whether it made the zeros or the NaN, or was
given them. The findings of a run without assertions are found by the same functions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import (
    GIVEN,
    Call,
    CallScope,
    CallTree,
    Layer,
    Record,
    Selector,
    Statistics,
    Step,
    Units,
    Value,
    forward_of,
    has_nonfinite,
    label_of,
)
from pytest_modelprobe.text import Cell, count, failed, failure, listed, number, out_of

from .sources import (
    BY_CHANCE,
    Subject,
    excuse_gradients,
    fail_or_hint,
    full_name,
    gradient_of,
    has_zero_parameters,
    is_zero,
    newest_of,
    numbers,
    record_of,
    reject_unread,
    returns_drawn_zeros,
    second_look,
    starts_from_zero,
    with_numbers,
)
from .structure import forwards_of

__tracebackhide__ = True  # a traceback ends at the line of the test

# --- dead ---------------------------------------------------------------------------------------------------------


def assert_no_dead_layers(subject: Subject, *, layers: Selector = "**", max_dead_units: float | None = None) -> None:
    """Assert that no layer is dead: all of its outputs, or all elements of their gradient, are zero.

    A layer is dead if every output of one of its calls is zero, in all forwards or in the newest one. The output of a
    functional activation is checked as the input of the next layer. If no output is zero throughout, gradients are
    checked. These layers are not reported: those that receive only zeros or padding; those initialized to zero (all of
    their own parameters are zero, or were and have a gradient); those before a layer initialized to zero, for their
    gradient. Exclude layers that are meant to return zeros with ``layers=["**", "!name"]``.

    Zeros are looked at twice: a run is repeated with other random numbers in training, and with small ones in the
    place of parameters that are all zero. What is only zero because of such parameters is a `HintWarning`; so is, in
    a watch of one step, what they or a drop path may have made zero.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        layers: Which layers to look at.
        max_dead_units: How many dead units (channels or features that are always zero) a layer may have: their number
            if an int, their share of the layer's units if a float from 0 to 1. ``None`` does not check units. A layer
            without parameters has the units of the layer before it, so its calls after different layers are checked
            one by one.

    Raises:
        AssertionError: A layer is dead, or has more dead units than allowed.
        NothingObservedError: No selected layer was called or returned floating-point values, or no units are known.
        UsageError: ``max_dead_units`` is neither an int of 0 or more nor a float from 0 to 1.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> _ = nn.init.ones_(model[0].bias)
    >>> assert_no_dead_layers(ModelProbe().run(model, torch.tensor([[1.0, -1.0], [-1.0, 1.0]])))
    """
    most = 1 if isinstance(max_dead_units, float) else math.inf
    if max_dead_units is not None and not 0 <= max_dead_units <= most:
        raise UsageError(
            f"max_dead_units is a number of units (an int) or a share (a float from 0 to 1); got {max_dead_units!r}"
        )
    record, newest = record_of(subject), newest_of(subject)
    looked_at = with_numbers(record, layers)
    names = {layer.name for layer in looked_at}
    dead, why = second_look(record, lambda one: find_dead(one, names), lambda found: found.where, _excuse_dead)
    if newest is not record:
        known = {d.where for d in dead}
        late = [d for d in find_dead(newest, names) if not {d.where, d.step.layer.name} & known]
        dead += [d for d in late if record.forwards == 1 or not returns_drawn_zeros(d.step.call)]
        why = _excuse_dead(dead)
    if dead:
        fail_or_hint(_dead_text(dead, record, looked_at), why)
    without_gradient, why = second_look(
        record,
        lambda one: [] if dead else find_zero_gradients(one, names),
        lambda found: found[0].name,
        lambda _: excuse_gradients(subject),
    )
    if without_gradient:
        fail_or_hint(_zero_gradient_text(without_gradient, record, looked_at), why)
    if max_dead_units is not None:
        _check_units(record, looked_at, max_dead_units)
    reject_unread(record, layers)


def _excuse_dead(dead: list[Dead]) -> str:
    return BY_CHANCE if dead and all(returns_drawn_zeros(d.step.call) for d in dead) else ""


@dataclass(frozen=True)
class Dead:
    """A layer, or one of its calls, whose outputs are all zero, or whose input is, as the code before it made it."""

    where: str
    """The layer, or the call if another call is alive."""
    step: Step
    """The call, or the first one of the layer."""
    value: Value
    record: Record
    received: bool
    """Whether it is the input that is zero: code between layers made it."""
    calls: Sequence[Call]
    """The calls that are dead."""

    @property
    def label(self) -> str:
        """Its name in a sentence."""
        return label_of(self.where, self.step.layer.type_name)

    @property
    def zeros(self) -> int:
        """How many elements are zero."""
        values = (v for call in self.calls for v in (call.inputs if self.received else call.outputs))
        known = (numbers(v) for v in values if not self.received or v.path == self.value.path)
        return sum(s.count for s in known if s is not None)


def find_dead(record: Record, names: Iterable[str]) -> list[Dead]:
    """Return the dead calls among those of ``names``, in order of execution; a layer is one if none of its calls lives.

    A module may be called at several places, as the only ReLU of a network is. One place that is alive says nothing
    of another.
    """
    names, tree = set(names), CallTree(record)
    alive = {s.layer.name for s in tree.returned if any(numbers(v) and not is_zero(v) for v in s.call.outputs)}
    with_live_input = {s.layer.name for s in tree.returned if any(not is_zero(v) for v in tree.untracked_inputs(s))}
    found: dict[str, Dead] = {}

    def add(step: Step, value: Value, *, received: bool) -> None:
        name = step.layer.name
        alone = name in (with_live_input if received else alive)
        where = (f"{name} (call {step.call.index + 1})" if alone else name) + (" input" if received else "")
        if name in names:
            calls = [step.call] if alone else step.layer.calls
            found.setdefault(where, Dead(where, step, value, record, received, calls))

    zero_places: set[CallScope] = set()  # where zeros were made: code there may return them
    learning_places: set[CallScope] = set()  # where something was made that requires a gradient
    for step in tree.returned:
        for value in filter(is_zero, tree.untracked_inputs(step) if step.previous is not None else ()):
            constant = step.call.grad_enabled and not value.requires_grad and step.place in learning_places
            state = step.call.index == 0 and step.layer.name in with_live_input  # a recurrent one begins with zeros
            around = () if step.parent is None else step.parent.call.inputs  # which its code may pass on
            if not (constant or state or step.place in zero_places or any(map(is_zero, around))):
                add(step, value, received=True)
        passed_on = _was_given_nothing(step) or step.inside in zero_places or starts_from_zero(step.layer)
        for value in filter(is_zero, step.call.outputs):
            if not passed_on and all(map(is_zero, filter(numbers, step.call.outputs))):
                add(step, value, received=False)
            zero_places.add(step.place)
        if any(value.requires_grad for value in step.call.outputs):
            learning_places.add(step.place)
    return list(found.values())


def find_zero_gradients(record: Record, names: Iterable[str]) -> list[tuple[Step, Value]]:
    """Return the calls whose outputs all have a zero gradient, the one nearest to the loss first.

    Left out are layers followed only by a zero-initialized layer, which get a gradient after its first step, and layers
    with parameters that learn by another call.
    """
    tree = CallTree(record)
    learn = {s.layer.name for s in tree.returned if s.layer.parameters and any(map(_has_gradient, s.call.outputs))}
    names = set(names) - learn
    found: dict[int, tuple[Step, Value]] = {}  # by tensor: a container returns that of its child
    zero_layer_follows = False
    for step in reversed(tree.returned):
        values = [v for v in step.call.outputs if v.requires_grad and gradient_of(v) is not None]
        if starts_from_zero(step.layer) or (has_zero_parameters(step.layer) and not step.layer.leaf):
            zero_layer_follows = True  # a leaf, or a container that scales what is inside it
        elif any(map(_has_gradient, values)):
            zero_layer_follows = False
        elif values and step.layer.name in names and not zero_layer_follows:
            found[values[0].tensor] = step, values[0]
    return list(found.values())


def _has_gradient(value: Value) -> bool:
    gradient = gradient_of(value)
    return gradient is not None and not gradient.all_zero


def _was_given_nothing(step: Step) -> bool:
    """Whether all inputs of a call were zero, or all were the index of an embedding that stands for padding."""
    entered = [value for value in step.call.inputs if value.is_floating]
    if entered:
        return all(map(is_zero, entered))
    padding = step.layer.attributes.get("padding_idx")
    indices = [value.forward.statistics for value in step.call.inputs]
    return padding is not None and bool(indices) and all(s and s.min == s.max == padding for s in indices)


def _dead_text(dead: list[Dead], record: Record, looked_at: list[Layer]) -> str:
    first = dead[0]
    if first.record is not record and record.forwards > 1:
        forwards = f"in the newest of {count(record.forwards, 'forward')}"
    else:
        forwards = f"in {count(sum(forwards_of(first.calls).values()), 'forward')}"
    zeros = f"{count(first.zeros, 'value')} it receives" if first.received else count(first.zeros, "output")
    share = out_of(len({d.step.layer.name for d in dead}), len(looked_at), "layer")
    rows: list[list[Cell]] = []
    for d in dead:
        units, entered = d.value.forward.units, None if d.received else _first_numbers(d.step.call.inputs)
        extent = (None, None) if entered is None else (entered.min, entered.max)
        dead_units = "-" if units is None else f"{units.dead:,}/{len(units):,}"
        rows.append([d.where, d.step.layer.type_name, d.zeros, dead_units, *extent])
    return failure(
        f"{first.label} is dead: all {zeros} are 0 {forwards}; {share}",
        ["layer", "type", "outputs", "dead units", "input min", "input max"],
        rows,
        _dead_hint(first),
    )


def _first_numbers(values: Iterable[Value]) -> Statistics | None:
    return next((s for s in map(numbers, values) if s is not None), None)


def _dead_hint(dead: Dead) -> str:
    label = label_of(dead.where.removesuffix(" input"), dead.step.layer.type_name)
    intended = f'If this is intended: layers=["**", "!{dead.step.layer.name}"].'
    if dead.received:
        return f"The zeros are produced {dead.step.between()}: look at the function called there. {intended}"
    layer, last = dead.step.layer, dead.step.last_child
    if last is not None and not layer.leaf and not layer.parameters:
        return f"The zeros are produced in {label}'s own code, after {last.label}: look at that code. {intended}"
    entered = _first_numbers(dead.step.call.inputs)
    feeder = next((v.source.rpartition(" ")[0] for v in dead.step.call.inputs if v.source and v.is_floating), None)
    if entered is not None and entered.max is not None and entered.max < 0 and feeder:
        fed_by = dead.record.layers.get(feeder.partition(" ")[0])
        feeder = label_of(feeder, "" if fed_by is None else fed_by.type_name)
        return f"Every input of {label} is negative: look at the bias or the scale of {feeder}, which feeds it."
    return f"Look at the parameters of {label} and at what multiplies its output. {intended}"


def _zero_gradient_text(without_gradient: list[tuple[Step, Value]], record: Record, looked_at: list[Layer]) -> str:
    rows: list[list[Cell]] = []
    for step, value in without_gradient:
        s, gradient = numbers(value), gradient_of(value)
        extent = "-" if s is None or s.min is None else f"{number(s.min)} to {number(s.max)}"
        rows.append([step.name, step.layer.type_name, value.path, 0 if gradient is None else gradient.count, extent])
    step, elements = without_gradient[0][0], int(rows[0][3] or 0)
    return failure(
        f"{step.label} has a zero gradient: all {count(elements, 'element')} of its output's gradient "
        f"are 0 in {count(record.backwards, 'backward')}; "
        f"{out_of(len({step.layer.name for step, _ in without_gradient}), len(looked_at), 'layer')}",
        ["layer", "type", "value", "elements", "range of values"],
        rows,
        f"The layers after {step.label} do not depend on its output, or have a zero derivative there: dead, saturated, "
        f'multiplied by zero, a loss at its minimum. If this is intended: layers=["**", "!{step.layer.name}"].',
    )


@dataclass(frozen=True)
class DeadUnits:
    """The dead units of the calls of a layer."""

    layer: Layer
    where: str
    dead: int
    units: int
    elements: int
    """Elements that were seen of each unit."""


def find_dead_units(record: Record, names: Collection[str]) -> Iterator[DeadUnits]:
    """Yield the calls whose units are known, with how many of them are dead.

    Units that were dead in the input already do not count: another layer made them so.
    """
    seen: set[tuple[int, ...]] = set()  # a container returns the tensors of its children, which come first
    for layer, where, calls in _calls_with_units(record):
        values = [call.outputs[0] for call in calls]
        tensors = tuple(value.tensor for value in values)
        if layer.name not in names or tensors in seen or len({len(_units(v)) for v in values}) != 1:
            continue
        seen.add(tensors)
        units = len(_units(values[0]))
        bounds = [bound for value in values for bound in (_units(value).low, _units(value).high)]
        dead = sum(not any(unit) for unit in zip(*bounds, strict=True))  # NaN is true
        entered = [v.forward.units for call in calls for v in call.inputs if v.forward.units is not None]
        dead_before = max((e.dead for e in entered if len(e) == units), default=0)
        is_own = dead > dead_before and not starts_from_zero(layer)
        seen_of_each = sum(s.count for s in map(numbers, values) if s is not None) // max(units, 1)
        yield DeadUnits(layer, where, dead if is_own else 0, units, seen_of_each)


def _check_units(record: Record, looked_at: list[Layer], allowed: float) -> None:
    known = list(find_dead_units(record, {layer.name for layer in looked_at}))
    if not known:
        raise NothingObservedError(
            f"the units of none of the {count(len(looked_at), 'layer')} looked at are known: select layers with "
            "channels or features (conv, linear, norm, and activations after them)"
        )
    found = [c for c in known if c.dead > (allowed * c.units if isinstance(allowed, float) else allowed)]
    if found:
        found.sort(key=lambda c: -c.dead / c.units)
        label = label_of(found[0].where, found[0].layer.type_name)
        limit = f"{100 * allowed:g}%" if isinstance(allowed, float) else f"{allowed:,}"
        raise failed(
            f"{label} has {count(found[0].dead, 'dead unit')} of {found[0].units:,}, {limit} allowed; "
            f"{out_of(len(found), len(looked_at), 'layer')}",
            ["layer", "type", "dead units", "share"],
            [[c.where, c.layer.type_name, f"{c.dead:,}/{c.units:,}", f"{c.dead / c.units:.0%}"] for c in found],
            "A dead unit is zero for every input of the test: use more inputs, or look at the bias and the learning "
            f"rate of what feeds {label}.",
        )


def _calls_with_units(record: Record) -> Iterator[tuple[Layer, str, list[Call]]]:
    """Yield the calls whose first outputs have the same units, with their layer and their name in messages.

    The parameters of a layer make its units. A layer without any has those of the layer before it: the calls of the
    only ReLU of a network belong to several. Layers that draw random numbers are left out, because in a small batch
    dropout zeroes some units by chance.
    """
    found: dict[tuple[str, str], list[Call]] = {}
    for step in CallTree(record).returned:
        layer, call = step.layer, step.call
        if not call.outputs or any(other.random for other in layer.calls):
            continue
        if not call.outputs[0].is_floating or call.outputs[0].forward.units is None:
            continue
        source = next((v.source for v in call.inputs if v.source), None)
        maker = layer.name if layer.parameters else source.partition(" ")[0] if source else step.name
        found.setdefault((layer.name, maker), []).append(call)
    shared = Counter(name for name, _ in found)
    for (name, _), calls in found.items():
        yield record.layers[name], name if shared[name] == 1 else f"{name} (call {calls[0].index + 1})", calls


def _units(value: Value) -> Units:
    assert value.forward.units is not None
    return value.forward.units


# --- finite -------------------------------------------------------------------------------------------------------


def assert_finite(subject: Subject, *, layers: Selector = "**") -> None:
    """Assert that no output of a layer is NaN or infinite; the failure names where that began.

    The origin is the first value, in order of execution, with NaN, inf or -inf that its inputs do not have. A mask of
    ``-inf`` that does not reach an output is not an origin. Infinities in the outputs of a `run` are meant if no
    operation made one: if they are constants, as in ``masked_fill(mask, -inf)``, or in a buffer or an input. A watch
    does not know this: exclude layers that are meant to return them.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        layers: Which layers to look at: ``["**", "!mask"]`` for all but one.

    Raises:
        AssertionError: An output is not finite.
        NothingObservedError: No selected layer was called or returned floating-point values.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> assert_finite(ModelProbe().run(nn.Linear(2, 3), torch.ones(4, 2)))
    """
    record = record_of(subject)
    looked_at = with_numbers(record, layers)
    origin = find_nonfinite(record, {layer.name for layer in looked_at})
    if origin is not None:
        what, why, hint = _finite_sentence(origin)
        bad = sum(any(_kinds([value]) for _, value in layer.outputs) for layer in looked_at)
        raise failed(
            f"{what} is not finite{from_forward(record, origin.since)}: {why}; {out_of(bad, len(looked_at), 'layer')}",
            ["layer", "type", "input min", "input max", "output min", "output max", "not finite"],
            _finite_rows(record, origin),
            f"It began in {record.origin}." if record.origin not in (None, GIVEN) else "",
            hint,
        )
    reject_unread(record, layers)


@dataclass(frozen=True)
class NonfiniteOrigin:
    """The first value that is NaN or infinite."""

    since: int
    """Index of the forward in which it was first seen."""
    position: int
    """When it was seen, in order of execution: at the start of the call for what it was given, else at its end."""
    step: Step
    value: Value
    kind: str
    """``given``: an input of the model; ``input``: made by code between layers; ``output``: made by the layer."""

    @property
    def counts(self) -> str:
        """The counts of NaN, inf and -inf in the value."""
        statistics = numbers(self.value)
        return "" if statistics is None else nonfinite_counts(statistics)


def find_nonfinite(record: Record, names: Iterable[str]) -> NonfiniteOrigin | None:
    """Return the first value that is not finite, if an output of the layers ``names`` is not; else None.

    Infinities that the model was given, and that it did not compute, are meant.
    """
    tree, names = CallTree(record), set(names)
    kinds = _kinds(v for step in tree.returned if step.layer.name in names for v in step.call.outputs)
    given = record.origin == GIVEN and not any(has_nonfinite(p.reading) for p in record.parameters)
    if not kinds or (given and "nan" not in kinds):
        return None
    # -inf that no layer returns is a mask, not the origin of NaN.
    origins = [origin for origin, kind in _not_finite(tree) if kind != "-inf" or kind in kinds]
    return min(origins, key=lambda origin: (origin.since, origin.position))


def _not_finite(tree: CallTree) -> Iterator[tuple[NonfiniteOrigin, str]]:
    """Yield each value made outside the layers or by one, once for each of NaN, inf and -inf that it has."""
    for step in tree.started:
        for value in step.call.inputs:
            if step.outermost or tree.producer(step, value) is None:
                where = "given" if step.outermost else "input"
                for kind, since in _kinds([value]).items():
                    yield NonfiniteOrigin(since, step.call.started, step, value, where), kind
    for step in tree.returned:
        for value in step.call.outputs:
            for kind, since in _kinds([value]).items():
                yield NonfiniteOrigin(since, step.call.finished, step, value, "output"), kind


def _kinds(values: Iterable[Value]) -> dict[str, int]:
    """Return which of nan, inf and -inf are among the values, each with the index of the first forward."""
    kinds: dict[str, int] = {}
    for s in filter(None, map(numbers, values)):
        for kind, n, first in (
            ("nan", s.nan, s.first_nan),
            ("inf", s.posinf, s.first_posinf),
            ("-inf", s.neginf, s.first_neginf),
        ):
            if n:
                kinds[kind] = min(kinds.get(kind, first or 0), first or 0)
    return kinds


def nonfinite_counts(s: Statistics) -> str:
    """Return ``12 NaN and 3 inf of 512 elements``."""
    parts = [f"{n:,} {kind}" for kind, n in (("NaN", s.nan), ("inf", s.posinf), ("-inf", s.neginf)) if n]
    return f"{listed(parts)} of {count(s.count, 'element')}"


def from_forward(record: Record, since: float) -> str:
    """Return `` from forward 2 of 5 on``.

    It is empty if there was one forward. It is empty too if the record has only some of the forwards: the index counts
    all of them.
    """
    known = record.step is None and since < record.forwards
    return f" from forward {since + 1:,.0f} of {record.forwards:,} on" if known and record.forwards > 1 else ""


def _finite_sentence(origin: NonfiniteOrigin) -> tuple[str, str, str]:
    """Return the name of the value, the counts and their cause, and the next step."""
    step, layer, counts = origin.step, origin.step.layer, origin.counts
    where = f"{step.label} {origin.value.path}"
    if origin.kind == "given":
        return "model input", f"{where} has {counts}", "Look at the data that the model is called with."
    if origin.kind == "input":
        return where, f"{counts}, made {step.between()}", f"Look at the code {step.between()}."
    held = next((p.name for p in (*layer.parameters, *layer.buffers) if has_nonfinite(p.reading)), None)
    if held is not None:
        hint = "Look at what wrote it: loading, the learning rate, its gradient (assert_grad_finite)."
        return full_name(layer, held), f"the output of {step.label} has {counts}", hint
    entered = _first_numbers(step.call.inputs)
    because, hint = "its input is not a floating-point tensor", ""
    if entered is not None:
        because = f"its input is finite from {number(entered.min)} to {number(entered.max)}"
    if entered is not None and entered.nonfinite:
        because = f"its input has {nonfinite_counts(entered)}"
        hint = "Softmax over a row of -inf gives NaN, as do inf - inf and 0 * inf."
    if step.last_child is not None:
        because += f", the output of {step.last_child.label} is finite"
        hint = f"Look at the code after {step.last_child.label}{forward_of(step) or ' in the forward'}."
    return step.label, f"its output has {counts}, {because}", hint


def _finite_rows(record: Record, origin: NonfiniteOrigin) -> Iterator[list[Cell]]:
    """Yield the rows of up to five leaf calls that returned before the origin, and of the origin."""
    before = [
        step
        for step in CallTree(record).returned
        if step.place[:2] == origin.step.place[:2] and step.call.finished < origin.position and step.layer.leaf
    ]
    for step in [*before[-5:], origin.step]:
        entered, left = _first_numbers(step.call.inputs), _first_numbers(step.call.outputs)
        bounds: list[Cell] = [getattr(s, bound, None) for s in (entered, left) for bound in ("min", "max")]
        bad = nonfinite_counts(left) if left is not None and left.nonfinite else "-"
        yield [step.name, step.layer.type_name, *bounds, bad]
