"""What is told of a record without an assertion: findings, which are wrong, and hints, which may be meant.

The terminal and the reports show them for every test with a probe. A finding has to be right for any healthy model;
what a healthy model may do is a hint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from pytest_modelprobe.comparison import is_rounding, largest_gradient
from pytest_modelprobe.record import CallTree, Record, label_of
from pytest_modelprobe.text import count, listed

from .activations import Dead, find_dead, find_dead_units, find_nonfinite
from .sources import find_unreached, full_name, returns_drawn_zeros
from .structure import of_unknown_use, uncalled, weights_in_use
from .training import find_changes_in_steps, find_frozen_in_training


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
    found += [f"experts without a gradient: {one}" for one in find_unreached(record.layers.values())]
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
    units = [
        f"{label_of(one.where, one.layer.type_name)} {one.dead:,} of {one.units:,}"
        for one in find_dead_units(record, record.layers)
        if one.units * _MANY <= one.dead < one.units and one.elements >= _ELEMENTS
    ]
    if units:
        found.append(f"dead units: {listed(units)}")
    if unknown := [record.layers[name].label for name in of_unknown_use(record)]:
        found.append(f"never called, and no gradient can tell whether its weights are used: {listed(unknown)}")
    clamped = [
        f"{full_name(layer, own.name)} {own.clamped:,} of {math.prod(own.shape):,}"
        for layer in record.layers.values()
        for own in layer.parameters
        if own.clamped >= max(_ELEMENTS, _CLAMPED * math.prod(own.shape))
    ]
    if clamped:
        found.append(
            f"clamped, largest or smallest elements without a gradient in any pass after the first: {listed(clamped)}"
        )
    if frozen := find_frozen_in_training(record):
        parts = [
            f"{label_of(part)} ({listed(list(dict.fromkeys(layer.type_name for layer in layers)))})"
            for part, layers in frozen.items()
        ]
        found.append(f"frozen, and called in training mode: {listed(parts)}")
    if record.training is not None:
        changes = find_changes_in_steps(record.training).items()
        found += [f"{what}: {times:,} of {count(record.training.steps, 'step')}" for what, times in changes]
    return found


_MANY = 0.25
"""A layer is worth a look from this share of dead units on."""
_CLAMPED = 0.05
"""A weight is worth a look from this share of elements on that a clamp leaves out."""
_ELEMENTS = 32
"""So many zeros of a unit are no chance: an element behind a ReLU is zero half of the time."""
