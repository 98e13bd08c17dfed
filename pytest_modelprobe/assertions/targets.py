"""Targets: no gradient may arrive at what a loss only compares with, such as a teacher or a target network.

A target that is not detached is trained toward the model that is compared with it. The loss still falls, even faster,
so the numbers of the training do not show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_modelprobe.exceptions import NothingObservedError
from pytest_modelprobe.record import Layer, Reading, Record, Selector, address, label_of, selected
from pytest_modelprobe.text import Cell, count, failed, out_of, printable

from .sources import LEAVE_OUT, Subject, backward_of, called, full_name, record_of

__tracebackhide__ = True  # a traceback ends at the line of the test


def assert_no_gradient(subject: Subject, layers: Selector) -> None:
    """Assert that no gradient arrives at the outputs and parameters of layers: a teacher, a target, a stop-gradient.

    A gradient of zeros is one too, since the next batch may make it another. Gradients that a forward computes itself,
    as of an energy, do not count. Layers whose parameters are frozen may still get a gradient at their outputs.

    Args:
        subject: A probe with one run or watch, a watch, or a record. The model and its target may be two models: watch
            them as one, ``modelprobe.watch(nn.ModuleDict({"online": model, "target": target}))``. In a watch on the
            target alone, the step of an optimizer that holds none of its parameters stands for the backward pass.
        layers: Which layers: ``"teacher.**"`` is the layer ``teacher`` with all that is inside it.

    Raises:
        AssertionError: A gradient arrived.
        NothingObservedError: No backward was seen, no selected layer was called, or what one returned cannot be looked
            at.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> both = nn.ModuleDict({"student": nn.Linear(4, 3), "teacher": nn.Linear(4, 3)})
    >>> with ModelProbe() as probe:
    ...     watch = probe.watch(both)
    ...     x = probe.randn(5, 4)
    ...     target = both["teacher"](x).detach()
    ...     nn.functional.mse_loss(both["student"](x), target).backward()
    ...     assert_no_gradient(watch, "teacher.**")
    """
    record = record_of(subject)
    if record.training is None or not record.training.others:
        backward_of(subject)
    chosen = selected(record, layers)
    found = sorted(_arrived(chosen), key=lambda one: (one.path == "", -one.finished))
    if found:
        raise _failure(record, found, chosen)
    for layer in called(record, layers):
        _check_seen(record, layer)


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A gradient that arrived at an output or a parameter."""

    layer: Layer
    where: str
    path: str
    """Empty for a parameter."""
    reading: Reading
    finished: int = -1
    """Position of the end of the call."""

    @property
    def norm(self) -> float | None:
        """The norm of the gradient."""
        return None if self.reading.statistics is None else self.reading.statistics.norm


def _arrived(layers: list[Layer]) -> Iterator[_Arrived]:
    for layer in layers:
        for call, value in layer.outputs:
            if value.backward is not None and value.backward.tensors:
                where = address(layer.name, call, value.path)
                yield _Arrived(layer, where, value.path, value.backward, call.finished)
        for p in layer.parameters:
            if p.gradient is not None and p.gradient.tensors:
                yield _Arrived(layer, full_name(layer, p.name), "", p.gradient)


def _failure(record: Record, found: list[_Arrived], chosen: list[Layer]) -> AssertionError:
    first = found[0]
    label = label_of(first.where, first.layer.type_name)
    reached = len({one.layer.name for one in found})
    rows: list[list[Cell]] = [
        [one.where, one.layer.type_name, "output" if one.path else "parameter", one.norm] for one in found
    ]
    if first.path:
        advice = f"The loss reaches {label}: detach it before it is compared with, or call {first.layer.label} under "
        advice += "torch.no_grad()."
    else:
        tied = next((p.tied_to for p in first.layer.parameters if p.tied_to is not None), None)
        advice = "Its outputs get none, so other code uses its parameters"
        advice += f": they are shared with {tied}; copy.deepcopy makes a copy." if tied else ": look for who shares it."
    return failed(
        f"{label} gets a gradient; {out_of(reached, len(chosen), 'layer')} in {count(record.backwards, 'backward')}",
        ["gradient of", "type", "kind", "norm"],
        rows,
        advice,
    )


def _check_seen(record: Record, layer: Layer) -> None:
    """Raise NothingObservedError if it is not known whether a gradient arrived at a layer."""
    for note in record.notes:
        if note.startswith(f"{layer.name}: output") and "cannot be looked into" in note:
            raise NothingObservedError(f"{printable(note)}, or leave {printable(layer.name)} out of layers=")
    readings = [(address(layer.name, call, v.path), v.backward) for call, v in layer.outputs]
    readings += [(full_name(layer, p.name), p.gradient) for p in layer.parameters]
    for where, reading in readings:
        if reading is not None:
            why = printable(reading.reason or "it was not recorded")
            raise NothingObservedError(f"whether {where} gets a gradient is not known: {why}; {LEAVE_OUT}")
    for call, value in layer.outputs:
        if value.overwritten and value.requires_grad:
            where = address(layer.label, call, value.path)
            raise NothingObservedError(
                f"whether {where} gets a gradient is not known: it is a view that was overwritten in place; {LEAVE_OUT}"
            )
