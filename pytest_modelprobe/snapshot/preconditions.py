"""What speaks against keeping a record as a snapshot: it would not be the same elsewhere, or is no good already."""

from __future__ import annotations

import dataclasses
from itertools import chain

from pytest_modelprobe.assertions.activations import assert_finite
from pytest_modelprobe.assertions.gradients import assert_grad_finite
from pytest_modelprobe.comparison import LARGEST_TOLERANCE
from pytest_modelprobe.exceptions import NothingObservedError
from pytest_modelprobe.record import Call, Layer, Parameter, Reading, Record, Value, address
from pytest_modelprobe.report.text import listed


def nonfinite(record: Record) -> str | None:
    """Return where a value or gradient is NaN or infinite, in a sentence; None where all are finite.

    >>> nonfinite(Record(model="Net"))
    """
    for check in (assert_finite, assert_grad_finite):
        try:
            check(record)
        except NothingObservedError:
            continue
        except AssertionError as error:
            return str(error).partition("\n")[0].partition(";")[0]
    return None


def active_dropout(record: Record) -> str | None:
    """Return which layers dropped values at random, in a few words; None where none did.

    >>> from pytest_modelprobe.record import Call
    >>> call = Call(root="drop", root_training=True, index=0, training=True)
    >>> drop = Layer(name="drop", type="torch.nn.Dropout", attributes={"p": 0.1}, calls=(call,))
    >>> active_dropout(Record(model="Net", layers={"drop": drop}))
    'drop (Dropout, 0.1)'
    """
    found = [(layer, p) for layer in record.layers.values() if (p := _dropped(layer))]
    return listed([f"{layer.name} ({layer.type_name}, {p:g})" for layer, p in found]) if found else None


def nondeterministic(record: Record) -> str | None:
    """Return the first value that moved by more than noise may, when the run was repeated from the same seed.

    A rounding that differs, as sums in another order leave it, is none; None where nothing moved, or nothing was
    repeated.

    >>> nondeterministic(Record(model="Net", noise="not repeatable"))
    """
    if record.noise != "not repeatable":
        return None
    calls = sorted(record.calls, key=lambda pair: pair[1].finished)  # what a layer calls ends before it
    made = ((address(layer.name, call, value.path), call, value) for layer, call in calls for value in call.outputs)
    values = list(made)
    forward = (where for where, _, value in values if _moves(value.forward, LARGEST_TOLERANCE["forward"]))
    # What is next to nothing is all rounding, whoever adds it up.
    backward = (
        f"the gradient of {where}"
        for where, call, value in reversed(values)
        if _moves(value.backward, LARGEST_TOLERANCE["backward"]) and _is_of_size(value.backward, call)
    )
    return next(chain(forward, backward), None)


def _moves(reading: Reading | None, most: float) -> bool:
    return reading is not None and (reading.noise or 0.0) > most


def _is_of_size(reading: Reading | None, call: Call) -> bool:
    norms = [r.statistics.norm for v in (*call.inputs, *call.outputs) if (r := v.backward) and r.statistics]
    return reading is not None and reading.statistics is not None and reading.statistics.norm > 1e-3 * max(norms)


def _dropped(layer: Layer) -> float:
    """Return the share of values that a layer drops; 0 if it does not."""
    if layer.functional:
        called = [call for call in layer.calls if call.arguments.get("training", True)]
        share = next((call.arguments.get("p", 0.5) for call in called), 0.0) if "dropout" in layer.type_name else 0.0
    else:
        own = "Dropout" in layer.type_name
        inside = layer.type.startswith("torch.nn.") and "dropout" in layer.attributes  # attention, recurrent layers
        called = [call for call in layer.calls if call.training]
        share = layer.attributes.get("p" if own else "dropout", 0.0) if called and (own or inside) else 0.0
    return float(share) if isinstance(share, (int, float)) else 0.0


def is_training(record: Record) -> bool:
    """Whether a record is of several forwards with backwards between them, as a watch of a training loop is.

    One thread more moves the twentieth step by a thousandth: such numbers are no one's elsewhere.
    """
    return record.loss is None and record.forwards > 1 and record.backwards > 0


def structure_of(record: Record) -> Record:
    """Return a record without its numbers.

    >>> structure_of(Record(model="Net"))
    <Record of Net: 0 layers, 0 forwards, 0 backwards>
    """

    def value(value: Value) -> Value:
        return dataclasses.replace(value, forward=Reading(), backward=None, backward_inner=None)

    def call(call: Call) -> Call:
        inputs, outputs = tuple(map(value, call.inputs)), tuple(map(value, call.outputs))
        return dataclasses.replace(call, inputs=inputs, outputs=outputs, random=None, response=None)

    def own(own: Parameter) -> Parameter:
        return dataclasses.replace(own, reading=Reading(), after=None, gradient=None)

    def layer(layer: Layer) -> Layer:
        calls, parameters = tuple(map(call, layer.calls)), tuple(map(own, layer.parameters))
        return dataclasses.replace(layer, calls=calls, parameters=parameters, buffers=tuple(map(own, layer.buffers)))

    return dataclasses.replace(record, layers={name: layer(one) for name, one in record.layers.items()}, noise=None)
