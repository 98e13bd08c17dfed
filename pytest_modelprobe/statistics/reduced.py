"""The reduction of a tensor: plain numbers on the CPU, small tensors on another device.

A reduction is what is kept of a tensor until a record is made. There are as many of them as hooked values, so they are
made to be cheap: numbers are a plain tuple, and the numbers of the compiled kernel stay packed in `bytes`.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Parameter

from pytest_modelprobe import kernel
from pytest_modelprobe._torch import is_wrapped, openmp_team
from pytest_modelprobe.models import holds_elements
from pytest_modelprobe.record import merge_moments

from .fingerprint import project
from .readable import ambient_modes_disabled, is_expanded
from .samples import Samples, columns, masks, orders

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

    def computed(self) -> Reduced:
        """Return this reduction. That of the compiled kernel unpacks its numbers here."""
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


# --- the compiled kernel ----------------------------------------------------------------------------------------------
#
# It takes an address, sizes and strides, knows nothing of torch, and needs one read. No operation of torch computes
# several numbers in one pass.

_KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


def by_kernel(
    x: Tensor, axis: int | None, index: int, samples: Samples | None, histogram: bool = False
) -> Reduction | None:
    """Return the reduction of a CPU tensor, or None if torch has to compute it.

    Torch computes if there is no compiled kernel, if the dtype is not one of the four, if the tensor is a subclass or
    belongs to a transform, if it has no elements or is expanded to very many, and if an element is above 1e150. No
    operation of torch is called here, so a dispatch mode may be active, but no function mode.

    Args:
        x: The tensor; it may require a gradient, and modes may be active.
        axis: Axis of the units, counted from the end.
        index: Number of the forward.
        samples: The samples of the forward, or `None` if no fingerprint is asked for.
        histogram: Whether to count the elements in bins too.
    """
    if kernel.active is None or (type(x) is not Tensor and type(x) is not Parameter) or not x.is_cpu:
        return None
    kind = _KINDS.get(x.dtype)
    if kind is None or is_wrapped(x) or x.layout is not torch.strided or x.is_nested or x.is_neg():
        return None
    # The kernel reads any address that it is given, so the storage is asked first whether it holds the elements. A
    # tensor without elements has no address.
    if not holds_elements(x) or not (address := x.data_ptr()) or is_expanded(x):
        return None
    prepare()
    shape, hashes = x.shape, None
    if axis is not None and -axis > len(shape):
        axis = None
    if samples is not None:
        hashes = samples.hashes(shape)
    threads = torch.get_num_threads()
    numbers = kernel.active.reduce(address, kind, shape, x.stride(), axis, index, hashes, threads, histogram)
    if numbers is None:
        return None
    packed = PackedReduction(1, axis, numbers)
    if samples is None or packed.has_fingerprint:
        return packed
    # An element is not finite. Torch computes the fingerprint, where other numbers stand for such elements.
    reduced = packed.computed()
    with ambient_modes_disabled():
        reduced.fingerprint = project(x.detach(), samples)
    return reduced


def by_kernel_merged(a: Reduction, b: Reduction) -> PackedReduction | None:
    """Return two reductions together, or `None` if they are not both of the kernel, or differ in kind."""
    if type(a) is not PackedReduction or type(b) is not PackedReduction or a.axis != b.axis or kernel.active is None:
        return None
    numbers = kernel.active.merge(a.numbers, b.numbers)
    return None if numbers is None else PackedReduction(a.tensors + b.tensors, a.axis, numbers)


@functools.cache
def prepare() -> None:
    """Hand the tables of signs and orders to the kernel, and the team of threads."""
    assert kernel.active is not None
    tables = masks().astype(np.int8), columns()[:16].T.astype(np.int8), orders().astype(np.uint8)
    kernel.active.set_tables(*(table.tobytes() for table in tables))
    kernel.active.set_team(openmp_team())
    if hasattr(os, "register_at_fork"):  # the threads of a team stay with the parent, and a child would wait for them
        os.register_at_fork(after_in_child=functools.partial(kernel.active.set_team, 0))
