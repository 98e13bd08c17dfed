"""Magnitudes: saturated functions, ranges and scales of activations, the range of a dtype.

All of it is computed from the minimum, the maximum, the mean and the root mean square of each output. That is enough
to tell the mean slope of a sigmoid or a softmax without its elements.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import Call, Layer, Selector, Statistics, Value, address, call_name, label_of
from pytest_modelprobe.text import Cell, count, failed, number, out_of

from .activations import find_dead
from .sources import Subject, full_name, gradient_of, numbers, record_of, reject_unread, with_numbers

__tracebackhide__ = True  # a traceback ends at the line of the test

# --- saturated ----------------------------------------------------------------------------------------------------

_AT_BOUNDS = {"Hardtanh": (-1.0, 1.0), "hardtanh": (-1.0, 1.0), "Hardsigmoid": (0.0, 1.0), "hardsigmoid": (0.0, 1.0),
              "ReLU6": (0.0, 6.0), "relu6": (0.0, 6.0)}  # fmt: skip
"""Type name of functions that are constant outside an interval → the bounds of their output."""


def assert_not_saturated(subject: Subject, *, layers: Selector = "**", min_slope: float = 0.05) -> None:
    """Assert that no sigmoid, tanh or softmax is saturated: where its slope is near zero, no gradient passes.

    The slope is averaged over the outputs y of each call, as a share of the maximum slope of the function: for sigmoid
    ``4 mean(y - y²)``, for tanh ``mean(1 - y²)``, for a softmax over n classes ``(1 - sum(y²)) / (1 - 1/n)``, which is
    0 if every row is one-hot. For hardtanh, hardsigmoid and ReLU6 with bounds a and b, that of a sigmoid with these
    bounds is used, ``4 mean((y - a)(b - y)) / (b - a)²``. Functional calls are recorded with ``functionals=True``.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        layers: Which layers to look at; other functions than these are left out.
        min_slope: The minimum share, from 0 to 1.

    Raises:
        AssertionError: A layer is saturated.
        NothingObservedError: No selected layer is such a function.
        UsageError: ``min_slope`` is not from 0 to 1.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    >>> assert_not_saturated(ModelProbe().run(model, torch.ones(4, 2)))
    """
    if not 0 <= min_slope <= 1:
        raise UsageError(f"min_slope is a share of the maximum slope, from 0 to 1; got {min_slope!r}")
    record = record_of(subject)
    slopes = list(_slopes(with_numbers(record, layers)))
    if not slopes:
        raise NothingObservedError(
            "none of the selected layers is a sigmoid, tanh or softmax: nothing was looked at (functional calls "
            "are recorded with functionals=True)"
        )
    bad = sorted((one for one in slopes if one[1] < min_slope), key=lambda one: one[1])
    if bad:
        names = [call_name(one.layer.name, one.call) for one, _ in bad]
        label = label_of(names[0], bad[0][0].layer.type_name)
        those, every = ({one.layer.name for one, _ in some} for some in (bad, slopes))
        rows: list[list[Cell]] = []
        for name, (one, share) in zip(names, bad, strict=True):
            s = one.numbers
            rows.append([name, one.layer.type_name, f"{share:.2%}", s.count, s.mean, s.min, s.max])
        raise failed(
            f"{label} is saturated: its slope is {bad[0][1]:.2%} of the maximum; "
            f"{out_of(len(those), len(every), 'layer')}",
            ["layer", "type", "slope", "outputs", "mean", "min", "max"],
            rows,
            f"The input of {label} is too large: look at the scale of the layer before it, "
            "a missing norm, or a missing 1/sqrt(d).",
        )
    reject_unread(record, layers)


MIN_SLOPE: float = inspect.signature(assert_not_saturated).parameters["min_slope"].default
"""The default of `assert_not_saturated`, which shows the number in its signature."""


def find_saturated(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers among ``layers`` that `assert_not_saturated` would report."""
    return list({one.layer.name: one.layer for one, share in _slopes(layers) if share < MIN_SLOPE}.values())


def _slopes(layers: Iterable[Layer]) -> Iterator[tuple[_Output, float]]:
    """Yield each output of a layer that is one of the functions, with the mean slope as a share of the maximum."""
    for one in _outputs(layers):
        share = _share(one)
        if share is not None:
            yield one, max(0.0, share)


def _share(output: _Output) -> float | None:
    layer, mean, rms = output.layer, output.numbers.mean, output.numbers.rms
    kind = layer.type_name.lower()
    if mean is None or rms is None:
        return None
    if kind == "sigmoid":
        return 4 * (mean - rms**2)
    if kind == "tanh":
        return 1 - rms**2
    if kind == "softmax":
        shape, arguments = output.value.shape, output.call.arguments
        axis = layer.attributes.get("dim", arguments.get("dim", arguments.get("input[1]")))
        classes = shape[axis] if type(axis) is int and -len(shape) <= axis < len(shape) else None
        return (1 - classes * rms**2) / (1 - 1 / classes) if isinstance(classes, int) and classes > 1 else None
    if layer.type_name in _AT_BOUNDS:
        names = ("min_val", "max_val")
        pairs = zip(map(layer.attributes.get, names), _AT_BOUNDS[layer.type_name], strict=True)
        low, high = (float(own) if isinstance(own, (int, float)) else usual for own, usual in pairs)
        return 4 * ((low + high) * mean - rms**2 - low * high) / (high - low) ** 2
    return None


# --- range and scale ----------------------------------------------------------------------------------------------


def assert_activation_range(subject: Subject, low: float, high: float, *, layers: Selector = "**") -> None:
    """Assert that every element of the layers' outputs is from ``low`` to ``high``.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        low: The minimum.
        high: The maximum.
        layers: Which layers to look at.

    Raises:
        AssertionError: An element is out of range, NaN or infinite.
        NothingObservedError: No selected layer was called or returned floating-point values.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid())
    >>> assert_activation_range(ModelProbe().run(model, torch.ones(4, 2)), 0, 1, layers="1")
    """
    record = record_of(subject)
    looked_at = with_numbers(record, layers)
    bad = [
        one
        for one in _outputs(looked_at)
        if (s := one.numbers).nonfinite or s.min is None or s.max is None or not low <= s.min <= s.max <= high
    ]
    if bad:
        s = bad[0].numbers
        others = f", {count(s.nonfinite, 'element')} not finite" if s.nonfinite else ""
        extent = f"it ranges from {number(s.min)} to {number(s.max)}{others}" if s.finite else "no element is finite"
        raise failed(
            f"{bad[0].label} is outside [{number(low)}, {number(high)}]: {extent}; {_layers_of(bad, looked_at)}",
            ["value", "type", "min", "max", "mean", "not finite"],
            [one.row("min", "max", "mean", "nonfinite") for one in bad],
            "Look at the input of the first of them, or widen the range if this is intended.",
        )
    reject_unread(record, layers)


def assert_activation_scale(
    subject: Subject, *, low: float = 1e-12, high: float = 1e3, layers: Selector = "**"
) -> None:
    """Assert that the root mean square (rms) of every layer's outputs is from ``low`` to ``high``.

    Initialization and norms should keep the scale from growing or shrinking from block to block. Outputs that are all
    zero are too small if the layer is dead, and are left out if it is not: see `assert_no_dead_layers`.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        low: The minimum. The default is below scales that models use on purpose, such as a branch that is initially
            scaled by 1e-6.
        high: The maximum.
        layers: Which layers to look at.

    Raises:
        AssertionError: The rms of an output is out of range, or it is not finite.
        NothingObservedError: No selected layer was called or returned floating-point values, or all of them are zero.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> assert_activation_scale(ModelProbe().run(nn.LayerNorm(8), torch.randn(4, 8)), low=0.5, high=2)
    """
    record = record_of(subject)
    looked_at = with_numbers(record, layers)
    outputs = list(_outputs(looked_at))
    if all(one.numbers.all_zero for one in outputs):
        raise NothingObservedError(
            f"every output of the {count(len(looked_at), 'layer')} looked at is zero, {looked_at[0].name} among them: "
            "use assert_no_dead_layers"
        )
    dead = {id(call) for found in find_dead(record, {layer.name for layer in looked_at}) for call in found.calls}
    bad = [
        one
        for one in outputs
        if one.numbers.nonfinite
        or not (low <= (one.numbers.rms or 0.0) <= high or (one.numbers.all_zero and id(one.call) not in dead))
    ]
    if bad:
        first, s = bad[0], bad[0].numbers
        size = "too large" if (s.rms or 0.0) > high else "too small"
        finding = f"is {size}: its rms is {number(s.rms)}, not from {number(low)} to {number(high)}"
        if s.nonfinite:
            finding = f"has no scale: {count(s.nonfinite, 'element')} of {s.count:,} not finite"
        before = [one for one in outputs if one.call.finished < first.call.started]
        previous = f"; {before[-1].label} had {number(before[-1].numbers.rms)}" if before else ""
        raise failed(
            f"{first.label} {finding}{previous}; {_layers_of(bad, looked_at)}",
            ["value", "type", "rms", "mean", "min", "max"],
            [one.row("rms", "mean", "min", "max") for one in bad],
            "Look at the initialization of the first of them, and at a norm or a residual that is missing.",
        )
    reject_unread(record, layers)


@dataclass(frozen=True, slots=True)
class _Output:
    """A floating-point output of a call."""

    layer: Layer
    call: Call
    value: Value
    numbers: Statistics

    @property
    def label(self) -> str:
        """Its name in a sentence."""
        return address(self.layer.label, self.call, self.value.path)

    def row(self, *names: str) -> list[Cell]:
        """Return its address, the type of its layer, and those of its numbers."""
        where = address(self.layer.name, self.call, self.value.path)
        return [where, self.layer.type_name, *(getattr(self.numbers, name) for name in names)]


def _outputs(layers: Iterable[Layer]) -> Iterator[_Output]:
    """Yield the floating-point outputs in order of execution."""
    found = [(layer, call, value) for layer in layers for call, value in layer.outputs]
    for layer, call, value in sorted(found, key=lambda x: x[1].finished):
        statistics = numbers(value)
        if statistics is not None:
            yield _Output(layer, call, value, statistics)


def _layers_of(bad: Iterable[_Output], looked_at: Sequence[Layer]) -> str:
    return out_of(len({one.layer.name for one in bad}), len(looked_at), "layer")


# --- dtypes -------------------------------------------------------------------------------------------------------

_LIMITS = {
    "float32": (3.4028e38, 1.1755e-38), "float16": (65504.0, 6.1035e-5), "bfloat16": (3.3895e38, 1.1755e-38),
    "float8_e4m3fn": (448.0, 0.015625), "float8_e5m2": (57344.0, 6.1035e-5),
    "float8_e4m3fnuz": (240.0, 0.0078125), "float8_e5m2fnuz": (57344.0, 3.0518e-5),
}  # fmt: skip
"""Dtype → its largest and its smallest normal number: ``max`` and ``smallest_normal`` of `torch.finfo`."""


def assert_fits_dtype(
    subject: Subject, dtype: Any = "float16", *, headroom: float = 2.0, layers: Selector = "**"
) -> None:
    """Assert that outputs, gradients and parameters fit the range of another dtype, with headroom.

    A run in float32 shows what would overflow or underflow in a narrower dtype.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        dtype: ``torch.float16``, ``"bfloat16"``, ``"float8_e4m3fn"``, ...
        headroom: Factor by which the values may grow before they overflow.
        layers: Which layers to look at.

    Raises:
        AssertionError: The largest absolute value times ``headroom`` overflows, or the root mean square is below the
            smallest normal number of the dtype.
        NothingObservedError: No selected layer was called or returned floating-point values.
        UsageError: The dtype is unknown.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> assert_fits_dtype(ModelProbe().run(nn.Linear(4, 4), torch.randn(4, 4), loss="random"), torch.bfloat16)
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _LIMITS:
        raise UsageError(f"the limits of {dtype!r} are not known: give one of {', '.join(_LIMITS)}")
    most, least = _LIMITS[name]
    record = record_of(subject)
    looked_at = with_numbers(record, layers)
    found: list[tuple[str, str, str, float, float | None, str]] = []
    seen = list(_all_statistics(looked_at))
    for where, kind, s in seen:
        largest = max(abs(s.min or 0.0), abs(s.max or 0.0))
        if s.nonfinite or not largest * headroom <= most:
            factor = most / largest if largest else math.inf
            found.append((where, kind, "overflows", largest, s.rms, "none" if s.nonfinite else f"{factor:.3g} x"))
        elif s.rms and s.rms < least:
            found.append((where, kind, "underflows", largest, s.rms, f"{s.rms / least:.2g} of the smallest"))
    if found:
        where, kind, what, largest, rms, _ = found[0]
        limits = f"up to {number(largest)}, and the largest {name} is {number(most)}"
        if what != "overflows":
            limits = f"rms {number(rms)}, and the smallest normal {name} is {number(least)}"
        raise failed(
            f"{where} {what} in {name}: its {kind} is {limits}; {out_of(len(found), len(seen), 'value')}",
            ["value", "what", "in the dtype", "largest", "rms", "headroom"],
            found,
            "Look at the scale before it: gradients need loss scaling, outputs a norm or a wider dtype.",
        )
    reject_unread(record, layers)


def _all_statistics(layers: list[Layer]) -> Iterator[tuple[str, str, Statistics]]:
    for one in _outputs(layers):
        yield one.label, "output", one.numbers
        gradient = gradient_of(one.value)
        if gradient is not None and gradient.count:
            yield one.label, "gradient", gradient
    for layer in layers:
        for parameter in layer.parameters:
            if parameter.dtype.startswith(("float", "bfloat")):
                for kind, reading in (("parameter", parameter.reading), ("gradient", parameter.gradient)):
                    if reading is not None and reading.statistics is not None and reading.statistics.count:
                        yield full_name(layer, parameter.name), kind, reading.statistics
