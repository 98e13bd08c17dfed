"""Counts of elements in fixed exponential bins, two to an octave, for both signs: they merge by adding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe.record import Histogram

from .memory_order import in_memory_order
from .readable import real
from .reduced import Array

LIMIT = 80
"""Bin k holds magnitudes from 2**(k/2) to 2**((k+1)/2), for k from -80 to 80; the outermost hold the rest."""

_SIGN = 2 * LIMIT + 1  # bins of one sign
_ZERO = _SIGN  # index of the count of zeros: negative numbers lie before it, the largest first
BINS = 2 * _SIGN + 1
_LARGEST = 2.0**45  # above all bins; its square is far from overflow
_PIECE = 1 << 15  # elements that stay in the cache for all passes


def count_rows(x: Tensor) -> Tensor:
    """Return the counts of each row of a matrix of float64 or float32, shape (rows, BINS); no element is read.

    Elements that are not finite are left out. The bin of an element is the binary exponent of its square: rounding the
    square does not cross a power of two, since neither neighbor of the root of two is that close to it. Squares that
    underflow are counted as zeros: of elements below 1e-154, in float32 below 1e-19.

    >>> count_rows(torch.tensor([[1.0, 1.5, -2.0, 0.0, torch.nan]]))[0].nonzero().flatten().tolist()
    [78, 161, 242, 243]
    """
    integer, digits = (torch.int64, 52) if x.dtype == torch.float64 else (torch.int32, 23)
    squares = x.clamp(-_LARGEST, _LARGEST)
    # + (x - x): NaN where x is not finite, and 0 for -0
    squares = squares.mul_(squares.abs()).add_(x - x)
    table = _table(digits, x.device)
    places = table[(squares.view(integer) >> digits).add_(len(table) // 2).long()]
    rows = places.shape[0]
    if rows > 1:
        places += torch.arange(rows, device=x.device).mul_(BINS + 1).unsqueeze(1)
    size, places = rows * (BINS + 1), places.reshape(-1)
    if x.is_cpu:
        counts = torch.bincount(places, minlength=size)
    else:  # bincount reads the largest element
        ones = torch.ones((), dtype=torch.int64, device=x.device).expand(len(places))
        counts = torch.zeros(size, dtype=torch.int64, device=x.device).index_add_(0, places, ones)
    return counts.view(rows, BINS + 1)[:, :BINS]


def _table(digits: int, device: torch.device) -> Tensor:
    """Return the place of each sign and exponent, negative numbers first; BINS where they are not finite."""
    key = digits, device
    table = _TABLES.get(key)
    if table is None:  # on the device throughout: a copy to it would be waited for
        top = 1 << (10 if digits == 52 else 7)
        exponents = torch.arange(2 * top, device=device)
        bins = (exponents - (top - 1)).clamp_(-LIMIT, LIMIT) + (LIMIT + 1)
        bins = torch.where(exponents > 0, bins, 0)
        table = torch.cat([_ZERO - bins, _ZERO + bins])
        table[2 * top - 1 :: 2 * top] = BINS
        if type(table) is Tensor:
            _TABLES[key] = table
    return table


_TABLES: dict[tuple[int, torch.device], Tensor] = {}


def count(tensor: Tensor, wide: torch.dtype, most: int = _PIECE) -> Tensor:
    """Return the counts of a plain tensor, shape (BINS,), on its device.

    Args:
        tensor: The tensor.
        wide: The dtype in which elements are squared.
        most: Elements counted at a time.
    """
    x, copies, _ = in_memory_order(tensor, None)
    counts = torch.zeros(BINS, dtype=torch.int64, device=tensor.device)
    if x.numel():
        for part in x.reshape(-1).split(most):
            counts += count_rows(real(part).to(wide).unsqueeze(0))[0]
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
