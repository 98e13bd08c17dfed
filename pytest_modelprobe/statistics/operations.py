"""The reduction of a tensor by operations of torch, on any device. The results are tensors that stay there.

Every read of a number would make the host wait for the device, and the model would run much slower. So nothing here
looks at a number: each case is computed, and chosen by `torch.where`.

Statistics do not depend on the order of elements. In the order of the memory a transposed tensor is a view, and is read
as quickly as a contiguous one. A fingerprint depends on the order, so `fingerprint` does not use it.

Histograms have fixed exponential bins, two to an octave, for both signs. They are the same for every tensor, so that
histograms of forwards, workers and runs merge by adding. The bin of an element is found from its bits, without a
logarithm and without comparisons with edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe.models import as_array, kept_on_devices, wait_for, widest
from pytest_modelprobe.record import Histogram

from .fingerprint import project_on_device
from .readable import real
from .reduced import Array, Reduced
from .samples import WHOLE, Samples

_CHUNK = 1 << 23  # elements that are converted to float64 at a time; float32 holds counts up to here exactly
_BLOCK = 1 << 18  # the same on the CPU: two megabytes in float64, which stay in the cache for all operations


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
