"""Reductions on the CPU by torch and numpy, for tensors that the compiled kernel does not read.

Each number needs a pass over the elements. They are taken one block at a time, so that a block stays in the cache for
all passes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe.models import as_array

from .memory_order import BLOCK, blocks, in_memory_order
from .readable import FLOATS, real
from .reduced import NO_ELEMENT, Array, Reduced, Row, merged_row, repeated, row_of_finite

_SMALL = 1 << 13  # up to so many elements, numpy in float64 is cheaper than calls of torch
_ROW = 1 << 10  # so many squares are added in float32: over 256 k equal elements the sum would be off by 5e-5
_LEAST = 1e-15  # magnitudes between this and its inverse have squares that float32 can add up


def on_cpu(tensor: Tensor, axis: int | None, index: int) -> Reduced:
    """Return the reduction of a plain CPU tensor, without the fingerprint."""
    x, copies, units = in_memory_order(tensor, axis)
    axis = axis if units else None
    if not x.numel():
        low = np.full(units, math.inf)  # neutral, so that merging it changes nothing
        return Reduced(1, NO_ELEMENT, low=low, high=-low, axis=axis)
    if x.numel() <= BLOCK:
        row, low, high = _block(real(x.contiguous()), index)
    else:
        row = NO_ELEMENT
        low = np.full(x.shape[1], math.inf)
        high = -low
        for place, piece in blocks(x):
            part, bottom, top = _block(real(piece.contiguous()), index)
            row = merged_row(row, part)
            np.minimum(low[place], bottom, out=low[place])
            np.maximum(high[place], top, out=high[place])
    if copies > 1:
        row = repeated(row, copies)
    if axis is None:
        return Reduced(1, row)
    if len(low) < units:  # the unit axis itself was broadcast
        low, high = low.repeat(units), high.repeat(units)
    return Reduced(1, row, None, low, high, axis)


def _block(x: Tensor, index: int) -> tuple[Row, Array, Array]:
    """Return the numbers and the range of each unit of a block of shape (outer, units, inner)."""
    by_torch = x.numel() > _SMALL and x.dtype in FLOATS
    low, high = _ranges_by_torch(x) if by_torch else _ranges(as_array(x))
    if len(low) == 1:
        bottom, top = low.item(), high.item()
    else:
        bottom, top = np.minimum.reduce(low).item(), np.maximum.reduce(high).item()
    if bottom == top and math.isfinite(bottom):
        return row_of_finite(x.numel(), 0 if bottom else x.numel(), bottom, top, float(bottom), 0.0), low, high
    quick = _moments_in_dtype(x.view(-1), bottom, top) if by_torch else None
    return quick or _moments_in_float64(as_array(x), bottom, top, index), low, high


def _ranges(x: Array) -> tuple[Array, Array]:
    if x.shape[1] == 1:
        x = x.reshape(-1)
        return np.minimum.reduce(x, keepdims=True), np.maximum.reduce(x, keepdims=True)
    low, high = np.minimum.reduce(x, axis=0), np.maximum.reduce(x, axis=0)
    if x.shape[2] == 1:
        return low[:, 0], high[:, 0]
    return np.minimum.reduce(low, axis=1), np.maximum.reduce(high, axis=1)


def _ranges_by_torch(x: Tensor) -> tuple[Array, Array]:
    outer, units, inner = x.shape
    if units == 1:
        low, high = x.view(-1).aminmax()
        return as_array(low.view(1)), as_array(high.view(1))
    # The outer axis comes first. In one call over both axes, rows of 49 elements take four times as long.
    low, high = (x[0], x[0]) if outer == 1 < inner else (x.amin(0), x.amax(0))
    if inner > 1:
        low, high = low.amin(1), high.amax(1)
    return as_array(low.view(units)), as_array(high.view(units))


def _moments_in_dtype(x: Tensor, bottom: float, top: float) -> Row | None:
    """Return the numbers, computed in the dtype of the tensor, or `None` if its accuracy does not suffice."""
    largest = max(-bottom, top)
    if not (math.isfinite(bottom) and math.isfinite(top) and _LEAST < largest < 1 / _LEAST):
        return None  # an element is not finite, or squares may overflow or underflow
    count = x.numel()
    total = x.sum().item()
    mean = total / count
    squares = _sum_of_squares(x)
    deviations = squares - total * mean
    if deviations < squares / 2:  # digits were lost in the difference, so the mean is subtracted first
        deviations = x.sub(mean).square_().sum().item()
    if deviations < count * _LEAST**2:
        return None
    zeros = 0
    if bottom <= 0 <= top:
        zeros = int(np.count_nonzero(as_array(x) == 0))  # counting the floats themselves takes four times as long
    return row_of_finite(count, zeros, bottom, top, mean, deviations)


def _sum_of_squares(x: Tensor) -> float:
    """Return the sum of squares. Rows of 1,024 are added in the dtype, and their sums in float64."""
    rest = x.numel() % _ROW
    norms = as_array(torch.linalg.vector_norm(x[: x.numel() - rest].view(-1, _ROW), dim=1).double())
    squares: float = np.dot(norms, norms).item()
    if rest:
        last = as_array(x[x.numel() - rest :])
        squares += np.dot(last, last).item()
    return squares


def _moments_in_float64(x: Array, bottom: float, top: float, index: int) -> Row:
    """Return the numbers of the finite elements, computed in float64."""
    x = x.reshape(-1)
    others: Row = (0, 0, 0)
    if not (math.isfinite(bottom) and math.isfinite(top)):
        others = tuple(int(np.count_nonzero(test(x))) for test in (np.isnan, np.isposinf, np.isneginf))
        x = x[np.isfinite(x)]
        if x.size:
            bottom, top = np.minimum.reduce(x).item(), np.maximum.reduce(x).item()
    first = (index if count else math.inf for count in others)
    if not x.size:
        return 0, *others, 0, *first, *NO_ELEMENT[8:]
    values = x.astype(np.float64)  # after NaNs are left out, because numpy warns of a signaling NaN
    zeros = values.size - int(np.count_nonzero(values)) if bottom <= 0 <= top else 0
    scale = 1.0
    if max(-bottom, top) > 1e150:  # only float64 has such elements: their squares, or the sum itself, overflow
        scale = 2.0**-600
        values *= scale
    mean = np.add.reduce(values).item() / values.size
    values -= mean
    if values.size <= _SMALL:
        squares = np.dot(values, values).item()
    else:  # not `np.dot`, whose threads and those of torch get in each other's way
        squares = np.add.reduce(np.square(values, out=values)).item()
    return x.size, *others, zeros, *first, bottom, top, mean / scale, squares / scale / scale
