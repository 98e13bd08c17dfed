"""Counts of elements in fixed exponential bins, two to an octave, for both signs.

The bins are the same for every tensor, so that histograms of forwards, workers and runs merge by adding. The bin of an
element is found from its bits, without a logarithm and without comparisons with edges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe.models import kept_on_devices
from pytest_modelprobe.record import Histogram

from .memory_order import in_memory_order
from .readable import real
from .reduced import Array

LIMIT = 80
"""Bin k holds magnitudes from 2**(k/2) to 2**((k+1)/2), for k from -80 to 80. The outermost bins hold the rest."""

_SIGN = 2 * LIMIT + 1  # bins of one sign
_ZERO = _SIGN  # index of the count of zeros; negative numbers lie before it, the largest magnitude first
BINS = 2 * _SIGN + 1
_PIECE = 1 << 15  # elements that stay in the cache for all passes


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


def count_rows(x: Tensor) -> Tensor:
    """Return the counts of each row of a matrix of float64 or float32, shape (rows, BINS). Nothing waits for a device.

    Elements that are not finite are left out.

    >>> count_rows(torch.tensor([[1.0, 1.5, -2.0, 0.0, torch.nan]]))[0].nonzero().flatten().tolist()
    [78, 161, 242, 243]
    """
    form, rows = _FORMATS[x.dtype], x.shape[0]
    bits = x.view(form.integer)
    magnitude = (bits & torch.iinfo(form.integer).max).clamp_(max=form.infinity)  # NaN counts as infinity
    # The exponent counts twice: as it is, and with the mantissa counted from the root of two. That is twice the
    # logarithm to base 2, rounded down. Zero alone has the code 0.
    codes = (magnitude >> form.digits).add_((magnitude + ((1 << form.digits) - form.root)) >> form.digits)
    codes.add_(magnitude > 0)
    (table,) = _table(x.device, form)
    codes.add_((bits < 0).to(form.integer), alpha=len(table) // 2)
    if rows == 1:  # codes are few, so they are counted first, and the counts then put into bins
        found = _counted(codes.view(-1), len(table))
        return torch.zeros(BINS + 1, dtype=torch.int64, device=x.device).index_add_(0, table, found)[:BINS].unsqueeze(0)
    places = table[codes] + torch.arange(rows, device=x.device).mul_(BINS + 1).unsqueeze(1)
    return _counted(places.view(-1), rows * (BINS + 1)).view(rows, BINS + 1)[:, :BINS]


def _counted(places: Tensor, size: int) -> Tensor:
    if places.is_cpu:
        return torch.bincount(places, minlength=size)
    # `bincount` would read the largest place, and so wait for the device.
    ones = torch.ones((), dtype=torch.int64, device=places.device).expand(len(places))
    return torch.zeros(size, dtype=torch.int64, device=places.device).index_add_(0, places, ones)


@kept_on_devices
def _table(form: _Format) -> tuple[Tensor, ...]:
    """Return the bin of each code, positive numbers first. The bin of what is not finite is BINS, which is cut off."""
    codes = torch.arange(4 * form.bias + 4, device="cpu")
    bins = (codes - (2 * form.bias + 1)).clamp_(-LIMIT, LIMIT) + (LIMIT + 1)
    bins = torch.where(codes > 0, bins, 0)
    table = torch.cat([_ZERO + bins, _ZERO - bins])
    table[4 * form.bias + 3 :: 4 * form.bias + 4] = BINS
    return (table,)


def count(tensor: Tensor, wide: torch.dtype, most: int = _PIECE) -> Tensor:
    """Return the counts of a plain tensor, shape (BINS,), on its device.

    Args:
        tensor: The tensor.
        wide: The dtype in which integers are counted.
        most: Elements counted at a time.
    """
    x, copies, _ = in_memory_order(tensor, None)
    counts = torch.zeros(BINS, dtype=torch.int64, device=tensor.device)
    if x.numel():
        for part in x.reshape(-1).split(most):
            elements = real(part)
            elements = elements if elements.is_floating_point() else elements.to(wide)
            counts += count_rows(elements.unsqueeze(0))[0]
    return counts * copies


def from_counts(counts: Array) -> Histogram:
    """Return the histogram of counts, without the empty bins at its ends.

    >>> from_counts(count_rows(torch.tensor([[1.0, 1.5, -2.0, 0.0]]))[0].numpy())
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
