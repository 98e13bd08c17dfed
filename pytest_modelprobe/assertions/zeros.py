"""Zeros that a healthy model may have.

Some layers are initialized to zero on purpose, so that a block begins as the identity; a drop path returns zeros by
chance while a model is trained. Dead layers look the same in one run. So the run is repeated with other numbers, and
where it cannot be, what is found is a hint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from pytest_modelprobe.record import Call, Layer, Parameter, Record
from pytest_modelprobe.text import listed

from .sources import Subject, is_zero, numbers, record_of, start_of

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
    return any(map(_learns_in, layer.parameters))


def _learns_in(own: Parameter) -> bool:
    statistics = None if own.gradient is None else own.gradient.statistics
    return statistics is not None and bool(statistics.rms)


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


def excuse_gradients(subject: Subject) -> str:
    """Return why gradients of a step may be zero in a healthy model; an empty text: nothing known explains them."""
    record = record_of(subject)
    zero = [layer for layer in _zero_initialized(record) if _learns(layer)]
    if not zero and record.training is not None:
        woken, sizes = _woken(subject)
        zero = woken if record.training.steps <= len(sizes) else []  # each step wakes those that had a gradient
    if zero:
        return _said(zero)
    return BY_CHANCE if any(returns_drawn_zeros(call) for _, call in record.calls) else ""


def excuse_small_gradients(subject: Subject, began: Iterable[Parameter], share: float) -> str:
    """Return why gradients may be small in a healthy model; an empty text: nothing known explains them.

    They pass through weights that were zero as training began, and are small as long as these are.

    Args:
        subject: What was looked at.
        began: Those with small gradients, as they were in the first step.
        share: By which factor the smallest is below what is allowed.
    """
    woken, sizes = _woken(subject)
    through = woken and not any(map(_learns_in, began)) and math.prod(sizes.values()) <= share
    return _said(woken) if through else ""


def _woken(subject: Subject) -> tuple[list[Layer], dict[bool, float]]:
    """Return the layers with weights that were zero as training began and are not any more, and how large these are.

    That is the rms of the smallest: of those that had a gradient in the first step, and of those that had none, as they
    are behind others.
    """
    layers: dict[str, Layer] = {}
    sizes: dict[bool, float] = {}
    now = record_of(subject).layers
    for layer in start_of(subject).layers.values():
        for own, later in zip(layer.parameters, now[layer.name].parameters, strict=False):
            was, size = own.reading.statistics, later.reading.statistics
            hides = not own.name.endswith("bias") or has_zero_parameters(layer)  # as `wake_zeros` has it
            if layer.calls and hides and was is not None and was.all_zero and size is not None and size.rms:
                layers[layer.name] = layer
                sizes[_learns_in(own)] = min(sizes.get(_learns_in(own), 1.0), size.rms)
    return [*layers.values()], sizes


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
