"""What is told of a record without an assertion: findings, which are wrong, and hints, which may be meant.

The terminal and the reports show them for every test with a probe. A finding has to be right for any healthy model;
what a healthy model may do is a hint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pytest_modelprobe.comparison import is_rounding, largest_gradient
from pytest_modelprobe.record import CallTree, Layer, Record, Step, Value, label_of
from pytest_modelprobe.text import count, listed

from .activations import Dead, find_dead, find_dead_units, find_nonfinite
from .gradients import find_lost_calls
from .sources import find_unreached, full_name, has_zero_parameters, numbers, returns_drawn_zeros
from .structure import of_unknown_use, uncalled, weights_in_use

# --- outputs that are the same for every row --------------------------------------------------------------------------


def find_constant(record: Record) -> tuple[Step, Step] | None:
    """Return a forward whose outputs are the same for all rows, and the call after the last output that varies.

    Outputs of a model with a layer of zeros are left out, as a head that begins with zeros gives them; so are those of
    inputs that are one number, or integers, of whose rows nothing is known.

    >>> find_constant(Record(model="Net")) is None
    True
    """
    if any(layer.calls and has_zero_parameters(layer) for layer in record.layers.values()):
        return None
    tree = CallTree(record)
    for forward in (step for step in tree.returned if step.outermost):
        given = [numbers(value) for value in forward.call.inputs if _has_rows(value)]
        if _is_constant(forward) and any(one is not None and one.min != one.max for one in given):
            steps = [one for one in tree.returned if one.place[:2] == forward.place[:2] and one.layer.leaf]
            varies = [any(_has_rows(v) and _ranges(v) == "wide" for v in one.call.outputs) for one in steps]
            last = max((i for i, one in enumerate(varies) if one), default=-1)
            if last >= 0:
                return forward, next((one for one in steps[last + 1 :] if _is_constant(one)), forward)
    return None


def _is_constant(step: Step) -> bool:
    """Whether no output of a call with an axis of rows varies."""
    rows = [value for value in step.call.outputs if _has_rows(value)]
    return bool(rows) and all(_ranges(value) == "equal" for value in rows)


def _has_rows(value: Value) -> bool:
    size = value.shape[0] if len(value.shape) > 1 else 0
    return value.is_floating and (size if isinstance(size, int) else size[0]) > 1


def _ranges(value: Value) -> str:
    units = value.forward.units
    if units is None or not len(units):
        return "not known"
    return "equal" if units.low == units.high else "wide"


def findings(record: Record, dead: Sequence[Dead] | None = None) -> list[str]:
    """Return one line for each kind of finding; empty if there are none.

    Args:
        record: The record.
        dead: What `find_dead` returned for all of its layers, if it is known.

    >>> findings(Record(model="Net"))
    []
    """
    if not record.forwards:
        return []
    found = []
    dead = find_dead(record, record.layers) if dead is None else dead
    dead = [d for d in dead if not returns_drawn_zeros(d.step.call)]
    if dead:
        found.append(f"dead: {listed([d.label for d in dead])}")
    origin = find_nonfinite(record, record.layers)
    if origin is not None:
        found.append(f"not finite: {origin.step.label} {origin.value.path}, {origin.counts}")
    in_use, unknown = weights_in_use(record), of_unknown_use(record)
    unused = {layer.name: layer.label for layer in uncalled(record) if layer.parameters and layer.name not in in_use}
    if certain := [label for name, label in unused.items() if name not in unknown]:
        found.append(f"never called: {listed(certain)}")
    without = [
        full_name(layer, p.name)
        for layer in record.layers.values()
        for p in layer.parameters
        if record.backwards and p.requires_grad and p.gradient is None and layer.name not in unused
    ]
    if without:
        found.append(f"no gradient: {count(len(without), 'parameter')}, {listed(without)}")
    found += [f"experts without a gradient: {one}" for one in find_unreached(record.layers.values()) if one.is_certain]
    if record.noise == "measured":
        largest = largest_gradient(record)
        for step in reversed(CallTree(record).returned):  # the first layer on the way back whose gradients cancel
            readings = ((v.backward, v.forward) for v in step.call.outputs)
            if any(backward and is_rounding(backward, partial(largest.beside, v)) for backward, v in readings):
                found.append(
                    f"rounding: gradients cancel from {step.label} back, and are not compared there: use "
                    'loss="random", or a loss that does not cancel'
                )
                break
    return found


def hints(record: Record, dead: Sequence[Dead] | None = None) -> list[str]:
    """Return one line for each thing that is often wrong and may be meant; empty if there are none.

    Args:
        record: The record.
        dead: What `find_dead` returned for all of its layers, if it is known.

    >>> hints(Record(model="Net"))
    []
    """
    if not record.forwards:
        return []
    dead = find_dead(record, record.layers) if dead is None else dead
    chance = [d.label for d in dead if returns_drawn_zeros(d.step.call)]
    found = [f"dead, perhaps by chance: {listed(chance)}"] if chance else []
    unreached = (one for one in find_unreached(record.layers.values()) if not one.is_certain)
    found += [f"experts without a gradient: {one}" for one in unreached]
    units = [
        f"{label_of(one.where, one.layer.type_name)} {one.dead:,} of {one.units:,}"
        for one in find_dead_units(record, record.layers)
        if one.units * _MANY <= one.dead < one.units and one.elements >= _ELEMENTS
    ]
    if units:
        found.append(f"dead units: {listed(units)}")
    uniform: dict[str, None] = {}
    for layer, call in record.calls:
        attention = (one.entropy for one in call.attention if one.kind == "attention")
        if min((share for heads in attention for share in heads if share is not None), default=0.0) > 0.999:
            uniform[layer.label] = None
    if uniform:
        found.append(f"attention close to uniform: {listed([*uniform])}")
    lost = [step.label for step in find_lost_calls(record)]
    if lost:
        found.append(f"no gradient at the output of {count(len(lost), 'call')}: {listed(lost)}, but at other calls")
    if unknown := [record.layers[name].label for name in of_unknown_use(record)]:
        found.append(f"never called, and no gradient can tell whether its weights are used: {listed(unknown)}")
    constant = find_constant(record)
    if constant is not None:
        forward, since = constant
        found.append(f"output the same for every row: {forward.label}, from {since.label} on")
    moving = [layer.label for layer in record.layers.values() if record.backwards and _moves_though_frozen(layer)]
    if moving:
        found.append(
            f"frozen, but running statistics move: {count(len(moving), 'norm')}, {listed(moving)}; eval() stops them"
        )
    return found


_MANY = 0.25
"""A layer is worth a look from this share of dead units on."""
_ELEMENTS = 32
"""So many zeros of a unit are no chance: an element behind a ReLU is zero half of the time."""


def _moves_though_frozen(layer: Layer) -> bool:
    """Whether no parameter of a norm is trained, but its running statistics are, in forwards that train others.

    Forwards without gradients are left out: those of a teacher may be meant to keep its own statistics.
    """
    frozen = layer.parameters and not any(parameter.requires_grad for parameter in layer.parameters)
    averages = any(buffer.name == "running_mean" for buffer in layer.buffers) and layer.attributes.get("momentum") != 0
    return bool(frozen and averages and any(c.training and c.root_training and c.grad_enabled for c in layer.calls))
