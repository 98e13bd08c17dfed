"""Budgets: what a model may cost in operations and in memory.

Both numbers are the same in every run on one device. Time is not, so there is no assertion on time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pytest_modelprobe.exceptions import NothingObservedError
from pytest_modelprobe.record import Profile, Record, Selector, containers
from pytest_modelprobe.text import Cell, count, failed

from .sources import Subject, bounds, called, deviation, record_of

__tracebackhide__ = True  # a traceback ends at the line of the test


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
    low, high = bounds(expected, "operations")
    _, profile, names = _profiled(subject, layers)
    total = profile.flops if layers == "**" else sum(profile.layers[name].flops for name in names)
    if not low <= total <= high:
        who = "the model takes" if layers == "**" else "the selected layers take"
        first = f"{who} {count(total, 'FLOP')} in {count(profile.forwards, 'forward')}, {deviation(total, low, high)}"
        rows = _rows(profile, names, {name: layer.own_flops for name, layer in profile.layers.items()})
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
    low, high = bounds(expected, "bytes")
    record, profile, names = _profiled(subject, layers)
    whole = layers == "**"
    total = profile.activation_bytes if whole else sum(profile.layers[name].activation_bytes for name in names)
    if not low <= total <= high:
        whose = "the model's activations" if whole else "the activations of the selected layers"
        first = f"{whose} take {count(total, 'byte')}, {deviation(total, low, high)}"
        sizes = {name: layer.activation_bytes for name, layer in profile.layers.items() if record[name].leaf}
        hint = "They grow with the batch: give the assertion the batch that it is for."
        raise failed(first, ["layer", "type", "calls", "bytes"], _rows(profile, names, sizes), hint)


def _profiled(subject: Subject, layers: Selector) -> tuple[Record, Profile, list[str]]:
    """Return the record and its profile, and the names of the selected layers that are inside no other."""
    record = record_of(subject)
    if record.profile is None:
        raise NothingObservedError(
            f"{record.model} was not profiled: pass profile=True to modelprobe.run or modelprobe.watch"
        )
    names = {layer.name for layer in called(record, layers)}
    outermost = [name for name in record.layers if name in names and names.isdisjoint(containers(name))]
    return record, record.profile, outermost


def _rows(profile: Profile, names: Iterable[str], numbers: Mapping[str, int]) -> list[list[Cell]]:
    """Return the layers inside those named whose number is not 0, the largest first."""
    inside = set(names)
    found = [(name, n) for name, n in numbers.items() if n and not inside.isdisjoint((name, *containers(name)))]
    found.sort(key=lambda pair: -pair[1])
    return [[name, profile.layers[name].type, profile.layers[name].calls, n] for name, n in found]
