"""The reduction of a tensor: plain numbers on the CPU, small tensors on another device.

A reduction is what is kept of a tensor until a record is made. There are as many of them as hooked values, so they are
made to be cheap: numbers are a plain tuple, and the numbers of the compiled kernel stay packed in `bytes`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_modelprobe.record import merge_moments

from .readable import ambient_modes_disabled

Array = npt.NDArray[Any]

Row = tuple[float, ...]
"""The counts of finite elements, NaN, +infinity, -infinity and zeros; the first forward with each of the three that are
not finite; the smallest and largest element, the mean, and the sum of (x - mean)². A number that does not exist is
infinite. This is a tuple because a `Statistics` takes longer to make."""

_HEADER = struct.Struct("@3B5x6q7d")
"""How the kernel's numbers begin, as `Packed` in ``kernel.c``: whether there is a fingerprint, whether units are
float64, whether there is a histogram; the number of units; the columns of a `Row`."""
_NUMBERS = 16
"""Numbers of a fingerprint, which follow the header."""
_REST = _HEADER.size + 8 * _NUMBERS
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)  # given a class, numpy makes a dtype at each call

NO_ELEMENT: Row = (0, 0, 0, 0, 0, math.inf, math.inf, math.inf, math.inf, -math.inf, 0.0, 0.0)
"""The row of no elements, which is neutral: merging it changes nothing."""


class Batch(Protocol):
    """Tensors that are reduced together, later."""

    def flush(self) -> None:
        """Reduce them now."""


@dataclass(slots=True, eq=False)
class Reduced:
    """The reduction of one tensor, or of several merged, until `collect`."""

    tensors: int = 1
    row: Row | None = None
    """Numbers of the tensors reduced on the CPU."""
    rows: Tensor | None = None
    """Numbers of the tensors reduced on another device, where they still are. Shape (k, columns of `Row`)."""
    low: Array | Tensor | None = None
    """Smallest element of each unit."""
    high: Array | Tensor | None = None
    axis: int | None = None
    """Axis of the units, counted from the end."""
    fingerprint: Array | None = None
    """Fingerprint of the tensors reduced on the CPU, as `fingerprint.project` returns it."""
    remote_fingerprint: Tensor | None = None
    """Fingerprint of the tensors reduced on another device, where it still is."""
    histogram: Tensor | None = None
    """Counts of the elements in bins, on the device of the tensors."""
    reason: str | None = None
    """Why there are no statistics, or no units any more."""
    pending: Batch | None = None
    """The batch that has yet to compute everything but the axis, or `None` if that is done."""

    def computed(self) -> Reduced:
        """Return this reduction with its numbers computed."""
        pending = self.pending  # read once, as another thread may flush it meanwhile
        if pending is not None:
            pending.flush()
        return self


class PackedReduction:
    """The reduction of one tensor, or of several merged, as the compiled kernel returned it: in one `bytes` object.

    It takes longer to make an object of many fields than to compute the numbers of a small tensor. So the numbers are
    unpacked when a record is made.
    """

    __slots__ = ("axis", "numbers", "tensors")
    reason = None
    """The kernel always has numbers, so there is never a reason why not."""

    def __init__(self, tensors: int, axis: int | None, numbers: bytes) -> None:
        self.tensors = tensors
        self.axis = axis
        self.numbers = numbers

    @property
    def has_fingerprint(self) -> bool:
        """Whether there is a fingerprint. There is if it was asked for and all elements are finite."""
        return self.numbers[0] != 0

    @property
    def fingerprint(self) -> Array:
        """The fingerprint, without the other numbers being unpacked."""
        return np.frombuffer(self.numbers, _FLOAT64, _NUMBERS, _HEADER.size)

    def with_fingerprint(self, fingerprint: Array) -> PackedReduction:
        """Return the same numbers with another fingerprint."""
        numbers = self.numbers[: _HEADER.size] + fingerprint.tobytes() + self.numbers[_REST:]
        return PackedReduction(self.tensors, self.axis, numbers)

    def computed(self) -> Reduced:
        """Return the same numbers, unpacked."""
        packed = self.numbers
        folded, wide, binned, units, *row = _HEADER.unpack_from(packed)
        dtype = _FLOAT64 if wide else _FLOAT32
        size = units * dtype.itemsize
        start = len(packed) - 2 * size
        low = high = histogram = None
        if units:  # two arrays on the memory are made far quicker than an array of both is split
            low, high = (np.ndarray(units, dtype, packed, where) for where in (start, start + size))
        fingerprint = self.fingerprint if folded else None
        if binned:
            with ambient_modes_disabled():
                histogram = torch.from_numpy(np.frombuffer(packed[_REST:start], np.int64).copy())
        return Reduced(self.tensors, tuple(row), None, low, high, self.axis, fingerprint, None, histogram)


Reduction = Reduced | PackedReduction


def row_of_finite(count: int, zeros: int, bottom: float, top: float, mean: float, deviations: float) -> Row:
    """Return the numbers of elements that are all finite."""
    return count, 0, 0, 0, zeros, math.inf, math.inf, math.inf, bottom, top, mean, deviations


def repeated(row: Row, copies: int) -> Row:
    """Return the numbers of the elements repeated."""
    return *(count * copies for count in row[:5]), *row[5:11], row[11] * copies


def merged_row(a: Row, b: Row) -> Row:
    """Return the numbers of both sets of elements together."""
    n, nan, posinf, neginf, zeros, first_nan, first_posinf, first_neginf, low, high, mean, deviations = a
    m, b_nan, b_posinf, b_neginf, b_zeros, b_first_nan, b_first_posinf, b_first_neginf, b_low, b_high, b_mean, other = b
    mean, deviations = merge_moments(n, mean, deviations, m, b_mean, other)
    if b_nan or b_posinf or b_neginf:
        first_nan = min(first_nan, b_first_nan)
        first_posinf = min(first_posinf, b_first_posinf)
        first_neginf = min(first_neginf, b_first_neginf)
    return (
        n + m,
        nan + b_nan,
        posinf + b_posinf,
        neginf + b_neginf,
        zeros + b_zeros,
        first_nan,
        first_posinf,
        first_neginf,
        min(b_low, low),
        max(b_high, high),
        mean,
        deviations,
    )
