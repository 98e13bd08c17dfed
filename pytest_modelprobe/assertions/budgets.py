"""Budgets: what a model may cost in operations and memory; never in time, which no two runs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pytest_modelprobe.exceptions import NothingObservedError
from pytest_modelprobe.record import LayerProfile, Profile, Record, Selector, containers
from pytest_modelprobe.report.text import Cell, count, failed

from .sources import Subject, bounds, called, deviation, record_of


def assert_flops(subject: Subject, expected: int | tuple[int, int], *, layers: Selector = "**") -> None:
    """Assert the number of floating-point operations of the forwards, as `torch.utils.flop_counter` counts them.

    These are matrix products, convolutions and attention; a multiplication and an addition are two. A watch is
    counted over all of its forwards: ``watch.last`` is one.

    Args:
        subject: A probe with one run or watch, a watch, or a record, made with ``profile=True``.
        expected: The number, or a tuple (minimum, maximum).
        layers: Which layers to count, each with those inside it; all: the whole forward.

    Raises:
        AssertionError: The number differs.
        NothingObservedError: There is no profile, or the layers were not called.
        UsageError: ``expected`` is neither a number nor a range.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> assert_flops(ModelProbe().run(nn.Linear(2, 3), torch.ones(4, 2), profile=True), 2 * 4 * 2 * 3)
    """
    __tracebackhide__ = True
    low, high = bounds(expected, "operations")
    record, profile = _profiled(subject)
    names = _outermost(record, layers)
    total = profile.flops if layers == "**" else sum(profile.layers[name].flops for name in names)
    if not low <= total <= high:
        who = "the model takes" if layers == "**" else "the selected layers take"
        first = f"{who} {count(total, 'FLOP')} in {count(profile.forwards, 'forward')}, {deviation(total, low, high)}"
        rows = _rows(record, profile, names, lambda layer: layer.own_flops)
        raise failed(first, ["layer", "type", "calls", "FLOPs"], rows)


def assert_activation_memory(subject: Subject, expected: int | tuple[int, int], *, layers: Selector = "**") -> None:
    """Assert the bytes of the outputs of leaves in one forward, memory that several share counted once.

    It is what a backward pass may keep. What a layer computes in between, and what functions return that are not
    recorded, is not in it. A watch has the most of any forward.

    Args:
        subject: A probe with one run or watch, a watch, or a record, made with ``profile=True``.
        expected: The number of bytes, or a tuple (minimum, maximum).
        layers: Which layers to count, each with those inside it.

    Raises:
        AssertionError: The number differs.
        NothingObservedError: There is no profile, or the layers were not called.
        UsageError: ``expected`` is neither a number nor a range.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True))
    >>> assert_activation_memory(ModelProbe().run(model, torch.ones(4, 2), profile=True), (0, 64))
    """
    __tracebackhide__ = True
    low, high = bounds(expected, "bytes")
    record, profile = _profiled(subject)
    names = _outermost(record, layers)
    whole = layers == "**"
    total = profile.activation_bytes if whole else sum(profile.layers[name].activation_bytes for name in names)
    if not low <= total <= high:
        whose = "the model's activations" if whole else "the activations of the selected layers"
        first = f"{whose} take {count(total, 'byte')}, {deviation(total, low, high)}"
        leaves = {name for name, layer in record.layers.items() if layer.leaf}
        rows = _rows(record, profile, names, lambda layer: layer.activation_bytes, leaves)
        raise failed(
            first,
            ["layer", "type", "calls", "bytes"],
            rows,
            "They grow with the batch: give the assertion the batch that it is for.",
        )


def _profiled(subject: Subject) -> tuple[Record, Profile]:
    record = record_of(subject)
    if record.profile is None:
        raise NothingObservedError(
            f"{record.model} was not profiled: pass profile=True to modelprobe.run or modelprobe.watch"
        )
    return record, record.profile


def _outermost(record: Record, layers: Selector) -> list[str]:
    """Return the names of the selected layers that are inside no other."""
    names = {layer.name for layer in called(record, layers)}
    return [name for name in record.layers if name in names and not any(a in names for a in containers(name))]


def _rows(
    record: Record,
    profile: Profile,
    names: Iterable[str],
    number: Callable[[LayerProfile], int],
    among: Iterable[str] | None = None,
) -> list[list[Cell]]:
    """Return the layers inside those named that have a number, the largest first."""
    inside, among = set(names), set(record.layers if among is None else among)
    found = [
        (name, layer)
        for name, layer in profile.layers.items()
        if number(layer) and name in among and inside & {name, *containers(name)}
    ]
    found.sort(key=lambda item: -number(item[1]))
    return [[name, layer.type, layer.calls, number(layer)] for name, layer in found]
