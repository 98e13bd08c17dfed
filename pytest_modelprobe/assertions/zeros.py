"""Zeros that a healthy model may have.

Some layers are initialized to zero on purpose, so that a block begins as the identity; a drop path returns zeros by
chance while a model is trained. Dead layers look the same in one run. So the run is repeated with other numbers, and
where it cannot be, what is found is a hint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pytest_modelprobe.record import Call, Layer, Record
from pytest_modelprobe.text import listed

from .sources import is_zero, numbers

T = TypeVar("T")


def starts_from_zero(layer: Layer) -> bool:
    """Whether the outputs of a layer are zero because its parameters are, or were before they were trained."""
    outputs = [s for s in (numbers(value) for _, value in layer.outputs) if s is not None]
    return all(s.all_zero for s in outputs) and (has_zero_parameters(layer) or _learns(layer))


def has_zero_parameters(layer: Layer) -> bool:
    """Whether a layer has parameters of its own and all of them are zero."""
    readings = [parameter.reading.statistics for parameter in layer.parameters]
    return bool(readings) and all(s is not None and s.all_zero for s in readings)


def _learns(layer: Layer) -> bool:
    """Whether a parameter of a layer has a gradient that is not zero."""
    gradients = [p.gradient.statistics for p in layer.parameters if p.gradient is not None]
    return any(s is not None and s.rms for s in gradients)


def second_look(
    record: Record, find: Callable[[Record], list[T]], name: Callable[[T], str], excuse: Callable[[list[T]], str]
) -> tuple[list[T], str]:
    """Return what is found in a record, and why a healthy model may have it; an empty text: nothing known explains it.

    A run is repeated with other random numbers, and with small ones in the place of parameters that are all zero: what
    it still has is the model's. A watch cannot be repeated.

    Args:
        record: The record.
        find: Returns what is wrong with a record.
        name: Returns the name of what was found, by which it is found again.
        excuse: Explains what is found in a watch.
    """
    found = find(record)
    other = _again(record) if found else None
    if other is None:
        return found, excuse(found) if found else ""
    names = set(map(name, find(other)))
    left = [one for one in found if name(one) in names]
    if left or not _zero_initialized(record):
        return left, ""
    return found, _said(_zero_initialized(record))


def excuse_gradients(record: Record) -> str:
    """Return why gradients of a step may be zero in a healthy model; an empty text: nothing known explains them."""
    zero = [layer for layer in _zero_initialized(record) if _learns(layer)]
    if zero:
        return _said(zero)
    return BY_CHANCE if any(returns_drawn_zeros(call) for _, call in record.calls) else ""


BY_CHANCE = "A hint: a layer that draws random numbers returned only zeros, as a drop path does. Watch several steps."


def returns_drawn_zeros(call: Call) -> bool:
    """Whether a call in training drew random numbers and returned zeros, as a drop path does."""
    outputs = [value for value in call.outputs if numbers(value)]
    return call.random is not None and call.training and bool(outputs) and all(map(is_zero, outputs))


def _zero_initialized(record: Record) -> list[Layer]:
    called = (layer for layer in record.layers.values() if layer.calls and layer.parameters)
    return [layer for layer in called if has_zero_parameters(layer) or starts_from_zero(layer)]


def _said(zero: list[Layer]) -> str:
    names = listed([layer.label for layer in zero])
    return f"A hint, because of what is zero-initialized: {names}. Other layers get a gradient after its first step."


def _again(record: Record) -> Record | None:
    """Return the record of a run again, if that may have other zeros."""
    drew = any(call.random is not None and call.root_training for _, call in record.calls)
    return (
        record.live_run.varied(record) if record.live_run is not None and (drew or _zero_initialized(record)) else None
    )
