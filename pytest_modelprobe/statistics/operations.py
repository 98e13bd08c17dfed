"""The reduction of a tensor: plain numbers on the CPU, small tensors that stay on another device.

There are as many reductions as hooked values, so they are made to be cheap: numbers are a plain tuple, and the numbers
of the compiled kernel stay packed in `bytes`. Where the kernel cannot compute them, operations of torch do. Every read
of a number would make the host wait for the device, and the model would run much slower. So nothing here looks at a
number: each case is computed, and chosen by `torch.where`.

Statistics do not depend on the order of elements. In the order of the memory a transposed tensor is a view, and is read
as quickly as a contiguous one. A fingerprint depends on the order, so `fingerprint` does not use it.

Histograms have fixed exponential bins, two to an octave, for both signs. They are the same for every tensor, so that
histograms of forwards, workers and runs merge by adding. The bin of an element is found from its bits, without a
logarithm and without comparisons with edges.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from pytest_modelprobe import kernel
from pytest_modelprobe._torch import is_wrapped, openmp_team
from pytest_modelprobe.models import as_array, holds_elements, kept_on_devices, wait_for, widest
from pytest_modelprobe.record import Histogram, merge_moments

from .fingerprint import WHOLE, Array, Samples, columns, masks, orders, project, project_on_device
from .readable import ambient_modes_disabled, is_expanded, real

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

    @property
    def zeros(self) -> float | None:
        """How many elements are zero, of tensors reduced on the CPU."""
        return None if self.row is None else self.row[4]

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


_CHUNK = 1 << 23  # elements that are converted to float64 at a time; float32 holds counts up to here exactly
_BLOCK = 1 << 18  # the same on the CPU: two megabytes in float64, which stay in the cache for all operations


# --- operations of torch ----------------------------------------------------------------------------------------------


def by_torch(
    tensor: Tensor,
    axis: int | None,
    index: int,
    samples: Samples = WHOLE,
    fingerprint: bool = True,
    histogram: bool = False,
) -> Reduced:
    """Return the reduction of a plain tensor, on its device."""
    x, copies, units = in_memory_order(tensor, axis)
    axis = axis if units else None
    wide = widest(x.device)
    try:
        # An empty tensor has one part too, an empty one.
        most = _BLOCK if x.is_cpu else _CHUNK
        parts = [_row(real(part), copies, index, wide) for part in x.reshape(-1).split(most)]
        rows = torch.stack(parts)
        reduced = Reduced(1, rows=merged_rows(rows) if len(parts) > 1 and wide.itemsize == 8 else rows)
        if axis is not None:
            reduced.axis = axis
            elements = real(x) if x.numel() else torch.full((1, units, 1), math.inf, dtype=wide, device=x.device)
            if not elements.is_floating_point():
                elements = elements.to(wide)  # torch has no kernel for uint16 and its like
            low, high = elements.amin((0, 2)).expand(units), elements.amax((0, 2)).expand(units)
            reduced.low, reduced.high = low, high if x.numel() else -high
        if fingerprint:
            largest = torch.maximum(-rows[:, 8].amin(), rows[:, 9].amax())
            reduced.remote_fingerprint = project_on_device(tensor, largest, samples)
        if histogram:
            reduced.histogram = count(tensor, wide, most)
        return reduced
    except NotImplementedError:  # the device lacks an operation for this dtype
        return Reduced(reason=f"{str(x.dtype).removeprefix('torch.')} on {x.device.type}")


def _row(x: Tensor, copies: int, index: int, wide: torch.dtype) -> Tensor:
    """Return the columns of a `Row`, in the dtype ``wide``."""
    x = x.to(wide)
    finite = (x - x) == 0  # this takes a third of the kernels that `isfinite` takes
    counts = torch.stack([finite, x != x, x == math.inf, x == -math.inf, x == 0]).sum(1) * copies
    some = counts[0] > 0
    mean = torch.where(finite, x, 0).sum() * copies / counts[0].clamp(min=1)
    x = torch.where(finite, x, mean)  # the mean changes neither range nor mean, and deviates by 0
    low, high = (x.amin(), x.amax()) if x.numel() else (mean, mean)
    low, high = torch.where(some, low, math.inf), torch.where(some, high, -math.inf)
    x = x - mean
    never = torch.full((3,), math.inf, dtype=wide, device=x.device)
    first = torch.where(counts[1:4] > 0, index, never)
    moments = torch.stack([low, high, mean, x.square().sum() * copies])
    return torch.cat([counts.to(wide), first, moments])


def merged_rows(rows: Tensor) -> Tensor:
    """Return one row for all, by the formula of `merge_moments` for any number of parts at once."""
    finite, mean = rows[:, 0], rows[:, 10]
    share = finite / finite.sum().clamp(min=1)
    center = (share * mean).sum()
    deviations = rows[:, 11].sum() + (finite * (mean - center).square()).sum()
    high = rows[:, 9].amax()
    moments = torch.stack([high, center, deviations])
    return torch.cat([rows[:, :5].sum(0), rows[:, 5:9].amin(0), moments]).unsqueeze(0)


def in_memory_order(x: Tensor, axis: int | None) -> tuple[Tensor, int, int]:
    """Return the elements as (outer, units, inner), how often each occurs, and the number of units.

    Broadcast elements are read once, and occur several times.
    """
    unit = None if axis is None or -axis > x.dim() else x.dim() + axis
    units = 0 if unit is None else x.shape[unit]
    if x.is_contiguous():
        copies = 1
    else:
        copies = math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride == 0)
        x = x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        x = x.permute(order)
        unit = None if unit is None else order.index(unit)
    if unit is not None:
        shape = (math.prod(x.shape[:unit]), x.shape[unit], math.prod(x.shape[unit + 1 :]))
    else:
        shape = (1, 1, x.numel()) if x.is_contiguous() else (math.prod(x.shape[:-1]), 1, x.shape[-1])
    return x.reshape(shape), copies, units  # this is a view, unless the tensor is a slice along several axes


def on_cpu(reduced: Reduced, tensor: Tensor) -> Reduced:
    """Return the reduction of a tensor on the CPU in plain numbers."""
    if reduced.rows is None:
        return reduced
    (numbers,) = reduced.rows.tolist()
    finite, (low, high, mean, deviations) = numbers[0], numbers[8:]
    if finite and low == high:
        mean, deviations = low, 0.0
    elif not math.isfinite(mean):  # the sum of elements near the largest float64
        mean, deviations = torch.where(tensor.isfinite(), tensor / finite, 0).sum().item(), math.inf
    if finite and not (tensor.is_floating_point() or tensor.is_complex()):
        low, high = int(low), int(high)
    reduced.row, reduced.rows = (*numbers[:8], low, high, mean, deviations), None
    if isinstance(reduced.low, Tensor) and isinstance(reduced.high, Tensor):
        reduced.low, reduced.high = as_array(reduced.low).copy(), as_array(reduced.high).copy()
    if reduced.remote_fingerprint is not None:
        reduced.fingerprint, reduced.remote_fingerprint = as_array(reduced.remote_fingerprint).copy(), None
    return reduced


def fetch(tensors: Sequence[Tensor]) -> dict[int, Array]:
    """Return the numbers of each tensor by its `id`, with one transfer per device."""
    numbers: dict[int, Array] = {}
    for device in {tensor.device for tensor in tensors}:
        here = [tensor for tensor in tensors if tensor.device == device]
        wait_for(device)  # the tensors may come from several streams
        joined = as_array(torch.cat([tensor.reshape(-1).to(widest(device)) for tensor in here]).cpu())
        ends = np.cumsum([tensor.numel() for tensor in here])[:-1]
        numbers.update(zip(map(id, here), np.split(joined, ends), strict=True))
    return numbers


# --- histograms -------------------------------------------------------------------------------------------------------

LIMIT = 80
"""Bin k holds magnitudes from 2**(k/2) to 2**((k+1)/2), for k from -80 to 80. The outermost bins hold the rest."""

_SIGN = 2 * LIMIT + 1  # bins of one sign
_ZERO = _SIGN  # index of the count of zeros; negative numbers lie before it, the largest magnitude first
BINS = 2 * _SIGN + 1


class _Format(NamedTuple):
    """How numbers of a dtype are stored."""

    integer: torch.dtype
    digits: int
    """Bits of the mantissa."""
    bias: int
    root: int
    """The least mantissa that is not below the mantissa of the root of two."""

    @property
    def infinity(self) -> int:
        return (2 * self.bias + 1) << self.digits


_FORMATS = {
    torch.float32: _Format(torch.int32, 23, 127, 0x3504F4),
    torch.float64: _Format(torch.int64, 52, 1023, 0x6A09E667F3BCD),
}


@kept_on_devices
def _table(form: _Format) -> tuple[Tensor, ...]:
    """Return the bin of each code, positive numbers first. The bin of what is not finite is BINS, which is cut off."""
    codes = torch.arange(4 * form.bias + 4, device="cpu")
    bins = (codes - (2 * form.bias + 1)).clamp_(-LIMIT, LIMIT) + (LIMIT + 1)
    bins = torch.where(codes > 0, bins, 0)
    table = torch.cat([_ZERO + bins, _ZERO - bins])
    table[4 * form.bias + 3 :: 4 * form.bias + 4] = BINS
    return (table,)


def count(tensor: Tensor, wide: torch.dtype, most: int = _BLOCK) -> Tensor:
    """Return the counts of a plain tensor, shape (BINS,), on its device. Elements that are not finite are left out.

    Args:
        tensor: The tensor.
        wide: The dtype in which integers are counted.
        most: Elements counted at a time.

    >>> count(torch.tensor([1.0, 1.5, -2.0, 0.0, torch.nan]), torch.float64).nonzero().flatten().tolist()
    [78, 161, 242, 243]
    """
    x, copies, _ = in_memory_order(tensor, None)
    counts = torch.zeros(BINS + 1, dtype=torch.int64, device=tensor.device)
    for part in x.reshape(-1).split(most) if x.numel() else ():
        elements = real(part)
        elements = elements if elements.is_floating_point() else elements.to(wide)
        form = _FORMATS[elements.dtype]
        bits = elements.view(form.integer)
        magnitude = (bits & torch.iinfo(form.integer).max).clamp_(max=form.infinity)  # NaN counts as infinity
        # The exponent counts twice: as it is, and with the mantissa counted from the root of two. That is twice the
        # logarithm to base 2, rounded down. Zero alone has the code 0.
        codes = (magnitude >> form.digits).add_((magnitude + ((1 << form.digits) - form.root)) >> form.digits)
        codes.add_(magnitude > 0)
        (table,) = _table(x.device, form)
        codes.add_((bits < 0).to(form.integer), alpha=len(table) // 2)
        # Codes are few, so they are counted first, and the counts then put into bins.
        if codes.is_cpu:
            found = torch.bincount(codes, minlength=len(table))
        else:  # `bincount` would read the largest code, and so wait for the device
            ones = torch.ones((), dtype=torch.int64, device=codes.device).expand(len(codes))
            found = torch.zeros(len(table), dtype=torch.int64, device=codes.device).index_add_(0, codes, ones)
        counts.index_add_(0, table, found)
    return counts[:BINS] * copies


def from_counts(counts: Array) -> Histogram:
    """Return the histogram of counts, without the empty bins at its ends.

    >>> from_counts(count(torch.tensor([1.0, 1.5, -2.0, 0.0]), torch.float64).numpy())
    Histogram(first=0, negative=(0, 0, 1), zero=1, positive=(1, 1, 0))
    """
    negative, positive = counts[_ZERO - 1 :: -1], counts[_ZERO + 1 :]
    used = np.flatnonzero(negative | positive)
    bins = slice(used[0], used[-1] + 1) if used.size else slice(LIMIT, LIMIT)
    return Histogram(
        first=int(bins.start) - LIMIT,
        negative=tuple(negative[bins].tolist()),
        zero=int(counts[_ZERO]),
        positive=tuple(positive[bins].tolist()),
    )
