"""What a model has and costs: the number, devices, ties and zeros of its parameters, operations and memory.

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
    address,
    containers,
    label_of,
    nearest,
    parent,
    selected,
)
from pytest_modelprobe.text import Cell, count, failed, listed, out_of, printable

from .sources import (
    LEAVE_OUT,
    Subject,
    bounds,
    by_selector,
    called,
    deviation,
    full_name,
    is_watch,
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


def assert_devices(subject: Subject, devices: str | Mapping[str, str], *, layers: Selector = "**") -> None:
    """Assert the devices of layers' outputs, parameters and buffers.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        devices: One device (``"cuda"`` means any CUDA device), or a dict of glob of layers → device.
        layers: Which layers to look at, if one device is given.

    Raises:
        AssertionError: A tensor is on another device.
        NothingObservedError: The layers were not called, or returned no tensor.
        UsageError: ``layers`` is given with a dict.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> assert_devices(ModelProbe().run(nn.Linear(2, 3), torch.ones(4, 2)), "cpu")
    """
    record = record_of(subject)
    rows: list[list[str]] = []
    looked_at = 0
    for selector, device in by_selector(devices, layers, "device"):
        for layer in reversed(called(record, selector)):  # children before their parent
            own = ((full_name(layer, one.name), one.device) for one in (*layer.parameters, *layer.buffers))
            outputs = ((address(layer.name, call, value.path), value.device) for call, value in layer.outputs)
            for where, actual in (*own, *outputs):
                looked_at += 1
                if str(device) not in (actual, actual.partition(":")[0]) and (actual, str(device)) != ("cpu", "cpu:0"):
                    rows.append([where, layer.type_name, actual, str(device)])
    if not looked_at:
        raise NothingObservedError("the selected layers returned no tensor: nothing was looked at")
    if rows:
        where, kind, actual, expected = rows[0]
        raise failed(
            f"{label_of(where, kind)} is on {actual}, not on {expected}; {out_of(len(rows), looked_at, 'tensor')}",
            ["tensor", "type", "actual", "expected"],
            rows,
            "Move the model with .to(), and create tensors in a forward with device=x.device.",
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


# --- pruned weights ---------------------------------------------------------------------------------------------------


def assert_sparsity(subject: Subject, least: float, *, layers: Selector = "**") -> None:
    """Assert that enough elements of each weight are zero, as after pruning; biases are left out.

    With a watch, the weights are read as they are now: after steps of an optimizer this holds only if the masks stay.
    A weight under ``torch.nn.utils.prune`` is read through its mask.

    Args:
        subject: A watch, a record, or a probe with one run or watch.
        least: The least share of zeros in each weight, from 0 to 1.
        layers: Layers whose own weights are looked at; name those that are pruned.

    Raises:
        AssertionError: A weight has fewer zeros.
        NothingObservedError: The layers have no weights with numbers.
        UsageError: ``least`` is not from 0 to 1.

    >>> import torch
    >>> from torch.nn.utils import prune
    >>> from pytest_modelprobe import ModelProbe
    >>> model = torch.nn.Linear(4, 2)
    >>> _ = prune.l1_unstructured(model, "weight", amount=0.5)
    >>> assert_sparsity(ModelProbe().run(model, torch.ones(1, 4)), 0.5)
    """
    if not 0 <= least <= 1:
        raise UsageError(f"least is a share of the elements, from 0 to 1; got {least!r}")
    source: Any = source_of(subject)
    if is_watch(source):
        source.reread()
    record: Record = source if isinstance(source, Record) else source.record
    found: list[tuple[float, str, int, int]] = []
    unknown = ""
    for layer in selected(record, layers):
        masks = {buffer.name: buffer for buffer in layer.buffers}
        for parameter in layer.parameters:
            own = parameter.name.removesuffix("_orig")
            reading = (masks.get(f"{own}_mask", parameter) if own != parameter.name else parameter).reading
            statistics = reading.statistics
            if "bias" in own:
                continue
            if statistics is not None and statistics.count:
                zeros, n = statistics.zeros, statistics.count
                found.append((zeros / n, full_name(layer, own), zeros, n))
            elif reading.reason:
                unknown = unknown or f"{full_name(layer, own)}: {printable(reading.reason)}"
    if not found:
        raise NothingObservedError("the selected layers have no weights with numbers: select layers that have")
    short = sorted(one for one in found if one[0] < least)
    if short:
        raise failed(
            f"{short[0][1]} is {short[0][0]:.1%} zeros, not {least:.1%} or more; "
            f"{out_of(len(short), len(found), 'weight')}",
            ["weight", "zeros", "elements", "share"],
            [[name, zeros, n, f"{share:.1%}"] for share, name, zeros, n in short],
            "A step of an optimizer fills what was set to zero: multiply by the mask after each step, or use "
            "torch.nn.utils.prune, which does it in each forward.",
        )
    if unknown:
        raise NothingObservedError(f"no number is known of {unknown}; {LEAVE_OUT}")
