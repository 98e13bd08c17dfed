"""Values that are compared, and their error: the signal-to-quantization-noise ratio and the cosine.

Errors are sums over elements, so that those of several tensors and calls add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_modelprobe.models import flatten

Outputs = dict[str, Tensor]
"""Floating-point tensors by path."""


@dataclass(frozen=True, slots=True)
class Error:
    """Sums over elements, from which the error of a value follows. Values add up."""

    signal: float = 0.0
    """Squares of what is expected."""
    noise: float = 0.0
    """Squares of the error."""
    power: float = 0.0
    """Squares of what is there."""
    product: float = 0.0
    """What is there times what is expected."""

    def __add__(self, other: Error) -> Error:
        return Error(
            self.signal + other.signal,
            self.noise + other.noise,
            self.power + other.power,
            self.product + other.product,
        )

    @property
    def sqnr(self) -> float:
        """The signal-to-quantization-noise ratio in dB; minus infinity if the error is not finite.

        >>> Error(signal=100.0, noise=1.0).sqnr, Error(signal=100.0).sqnr
        (20.0, inf)
        """
        if not math.isfinite(self.noise):
            return -math.inf
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between what is there and what is expected, or `None` if one of the two is zero."""
        norms = math.sqrt(self.signal) * math.sqrt(self.power)
        return self.product / norms if norms and math.isfinite(norms) else None


def error_of(actual: Outputs, expected: Outputs, *, against: Outputs | None = None) -> Error:
    """Return the error of values; with ``against``, how far they are from these, relative to what is expected."""
    found = Error()
    for path, tensor in expected.items():
        a, e = _double(actual[path]), _double(tensor)
        b = e if against is None else _double(against[path])
        same = (a == b) | (a.isnan() & b.isnan())  # a mask has infinities, and their difference is NaN
        error = torch.where(same, 0.0, a - b)
        finite = e.isfinite()
        a, e = a[finite], e[finite]
        signal, noise, power = (float(x.square().sum()) for x in (e, error, a))
        found += Error(signal, noise, power, float((a * e).sum()))
    return found


def _double(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.cpu().double()  # not every device has float64


def tensors_of(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of an output that are compared. Those in a cache are not."""
    return [
        (path, tensor)
        for path, tensor in flatten("output", value, objects=False).tensors
        if (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)
        and tensor.layout == torch.strided
        and not tensor.is_nested
    ]


def outputs_of(value: Any, *, copied: bool = True) -> Outputs:
    """Return the tensors of an output that are compared, dequantized."""
    found = {path: tensor.dequantize() if tensor.is_quantized else tensor for path, tensor in tensors_of(value)}
    return {path: tensor.detach().clone() for path, tensor in found.items()} if copied else found


def unlike(actual: Outputs, expected: Outputs) -> str | None:
    """Return why outputs cannot be compared, or `None` if they can."""
    now, then = ({path: tuple(tensor.shape) for path, tensor in one.items()} for one in (actual, expected))
    if now == then:
        return None
    shown = (", ".join(f"{path} {shape}" for path, shape in one.items()) or "no tensors" for one in (now, then))
    return "its outputs are {}, those of the reference {}".format(*shown)
