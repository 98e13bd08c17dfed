"""The layers of a record as plain data, in order of execution.

Of a layer that is called several times, the first call is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pytest_modelprobe.assertions.activations import Dead
from pytest_modelprobe.assertions.ranges import MIN_SLOPE
from pytest_modelprobe.comparison import Diagnosis
from pytest_modelprobe.record import Call, CallTree, Layer, LayerProfile, Profile, Record, elements

from .status import statuses
from .values import number, plain, rms_of, tensor_data, text

_BENT = {"Tanh": (-math.sqrt(1 - MIN_SLOPE), math.sqrt(1 - MIN_SLOPE)),
         "Sigmoid": ((1 - math.sqrt(1 - MIN_SLOPE)) / 2, (1 + math.sqrt(1 - MIN_SLOPE)) / 2)}  # fmt: skip
"""Type of an activation → the outputs between which its slope is at least `MIN_SLOPE` of the maximum.

The slope of tanh is 1 - y², and that of a sigmoid y (1 - y): this solves them for the output y.
"""


def layers_data(
    record: Record,
    tree: CallTree,
    dead: Sequence[Dead],
    diagnosis: Diagnosis | None = None,
    expected: Record | None = None,
) -> list[dict[str, Any]]:
    """Return the layers: those that were called in order of execution, then the others.

    Args:
        record: The record.
        tree: Its calls.
        dead: What `find_dead` returned for all of its layers.
        diagnosis: Of its comparison with a snapshot, if they differ.
        expected: The record in that snapshot, with the current names of layers.
    """
    found = statuses(record, dead, diagnosis)
    first = {step.layer.name: step for step in reversed(tree.started)}
    ended = sorted(first.values(), key=lambda step: step.call.finished if step.call.finished >= 0 else math.inf)
    names = [*(step.layer.name for step in ended), *(name for name in record.layers if name not in first)]
    before = {} if expected is None else expected.layers
    profiles = {} if record.profile is None else record.profile.layers

    def layer_data(layer: Layer) -> dict[str, Any]:
        module, _, kind = layer.type.rpartition(".")
        step, profile = first.get(layer.name), profiles.get(layer.name)
        not_called = Call(root=layer.name, root_training=False, index=0, training=layer.training)
        call = not_called if step is None else step.call
        return {
            "name": text(layer.name),
            "type": text(kind),
            "module": text(module),
            "leaf": layer.leaf,
            "functional": layer.functional,
            "training": call.training,
            "calls": len(layer.calls),
            "parameters": elements(layer.parameters),
            "trainable": elements(p for p in layer.parameters if p.requires_grad),
            "attributes": {text(name): plain(value) for name, value in layer.attributes.items()},
            "inputs": [tensor_data(value) for value in call.inputs],
            "outputs": [tensor_data(value) for value in call.outputs],
            "status": found.get(layer.name, []),
            "weights": _weights(layer),
            "dead_units": _dead_units(call),
            "saturated_units": _saturated_units(layer, call),
            "attention": _attention(call),
            "profile": None if profile is None else costs(profile),
            "before": _before(before.get(layer.name)),
        }

    return [layer_data(record.layers[name]) for name in names]


def costs(profile: Profile | LayerProfile) -> dict[str, Any]:
    """Return time in seconds, operations and bytes."""
    return {name: getattr(profile, name) for name in ("wall_time", "flops", "activation_bytes")}


def _weights(layer: Layer) -> dict[str, Any] | None:
    if not layer.parameters:
        return None
    return {
        "rms": rms_of(p.reading for p in layer.parameters),
        "gradient_rms": rms_of(p.gradient for p in layer.parameters),
    }


def _dead_units(call: Call) -> list[int] | None:
    units = call.outputs[0].forward.units if call.outputs else None
    if units is None or call.random:  # Dropout zeroes units by chance.
        return None
    return [units.dead, len(units)]


def _saturated_units(layer: Layer, call: Call) -> list[int] | None:
    """Return how many units never leave one flat end of a tanh or sigmoid, and how many there are."""
    units = call.outputs[0].forward.units if call.outputs else None
    if units is None or layer.type_name not in _BENT:
        return None
    low, high = _BENT[layer.type_name]
    flat = sum(least > high or most < low for least, most in zip(units.low, units.high, strict=True))
    return [flat, len(units)]


def _attention(call: Call) -> list[Any] | None:
    entropies = [weights.entropy for weights in call.attention if weights.kind == "attention"]
    return [number(entropy) for entropy in entropies[0]] if entropies else None


def _before(layer: Layer | None) -> dict[str, Any] | None:
    value = next((value for _, value in layer.outputs), None) if layer is not None else None
    s = None if value is None else value.forward.statistics
    return None if s is None else {name: number(getattr(s, name)) for name in ("mean", "std", "min", "max")}
