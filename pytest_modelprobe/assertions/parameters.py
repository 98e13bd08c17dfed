"""What a model has and costs: the number and ties of its parameters, operations and memory.

All of it is the same in every run on one device. Time is not, so there is no assertion on time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import (
    Profile,
    Record,
    Selector,
    containers,
    nearest,
    parent,
    selected,
)
from pytest_modelprobe.text import Cell, count, failed, listed

from .sources import (
    Subject,
    bounds,
    called,
    deviation,
    full_name,
    record_of,
    source_of,
)

__tracebackhide__ = True  # a traceback ends at the line of the test


def assert_param_count(
    subject: Subject | Any, expected: int | tuple[int, int], *, trainable: bool | None = None, layers: Selector = "**"
) -> None:
    """Assert the number of elements of the parameters; tied parameters count once.

    Args:
        subject: A probe with one run or watch, a watch, a record, or a module.
        expected: The number, or a tuple (minimum, maximum).
        trainable: With True, only parameters that require a gradient count; with False, only the others. By default
            all count.
        layers: Layers whose own parameters are counted; with a module, all are counted.

    Raises:
        AssertionError: The number differs.
        UsageError: ``expected`` is neither a number nor a range; ``layers`` is given with a module.

    >>> from torch import nn
    >>> assert_param_count(nn.Linear(3, 2), 8)
    """
    low, high = bounds(expected, "elements")
    counted: set[object] = set()
    by_layer: Counter[str] = Counter()
    for name, elements, requires_grad, same in _parameters(subject, layers):
        if same not in counted and trainable in (None, requires_grad):
            counted.add(same)
            by_layer[parent(name)] += elements
    total = by_layer.total()
    if not low <= total <= high:
        kind = "" if trainable is None else "trainable " if trainable else "frozen "
        owner = "the model has" if layers == "**" else "the selected layers have"
        first = f"{owner} {count(total, f'{kind}parameter')}, {deviation(total, low, high)}"
        raise failed(first, ["layer", "parameters"], by_layer.most_common())


def assert_tied(subject: Subject | Any, *names: str) -> None:
    """Assert that parameters are tied: the same `Parameter` under several names.

    Args:
        subject: A probe with one run or watch, a watch, a record, or a module.
        *names: Full names of two or more parameters: ``"embed.weight", "head.weight"``.

    Raises:
        AssertionError: One of them is a different parameter.
        UsageError: There is no such parameter, or fewer than two names.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight = model[0].weight
    >>> assert_tied(model, "0.weight", "1.weight")
    """
    if len(set(names)) < max(2, len(names)):
        raise UsageError(f"assert_tied takes the names of two or more parameters, each once; got {listed(names)}")
    known = {name: (elements, same) for name, elements, _, same in _parameters(subject, "**")}
    for name in names:
        if name not in known:
            near = nearest(name, known)
            raise UsageError(f"there is no parameter {name!r}{f'; nearest: {listed(near)}' if near else ''}")
    first = names[0]
    untied = [name for name in names if known[name][1] != known[first][1]]
    if untied:
        rows: list[list[Cell]] = [[name, known[name][0], "no" if name in untied else "yes"] for name in names]
        raise failed(
            f"{untied[0]} is not tied to {first}: they are two parameters",
            ["parameter", "elements", f"tied to {first}"],
            rows,
            "A copy, .to() on one of them, or a load that replaces parameters unties them: tie them again.",
        )


def _parameters(subject: Subject | Any, layers: Selector) -> Iterator[tuple[str, int, bool, object]]:
    """Yield name, elements and ``requires_grad`` of each parameter, and what is equal for tied ones."""
    if hasattr(subject, "named_parameters"):
        if layers != "**":
            raise UsageError("layers= goes with a record; of a module all parameters are looked at")
        for name, p in subject.named_parameters(remove_duplicate=False):
            if type(p).__name__ == "UninitializedParameter":
                raise UsageError(f"{name} has no shape yet: run the model once, then count")
            yield name, p.numel(), p.requires_grad, id(p)
        return
    source = source_of(subject)
    record = source if isinstance(source, Record) else source.record
    for layer in selected(record, layers):
        for own in layer.parameters:
            name = full_name(layer, own.name)
            yield name, math.prod(own.shape), own.requires_grad, own.tied_to or name


# --- operations and memory --------------------------------------------------------------------------------------------


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
