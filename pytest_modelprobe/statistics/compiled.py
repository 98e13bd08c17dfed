"""Reductions on the CPU by the compiled kernel, in one read."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe import kernel

from .fingerprint import project
from .readable import ambient_modes_disabled
from .reduced import Array, Reduced
from .samples import Samples
from .signs import columns, periods, row_signs, row_structure

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


def by_kernel(x: Tensor, axis: int | None, index: int, samples: Samples | None) -> Reduced | None:
    """Return the reduction of a plain CPU tensor, or None: it is for torch to compute.

    That is where there is no compiled kernel, of other dtypes, of no elements, and of elements above 1e150.

    Args:
        x: The tensor; it may require a gradient, and modes may be active.
        axis: Axis of the units, counted from the end.
        index: Number of the forward.
        samples: Those of the forward; None: no fingerprint.
    """
    kind = _KINDS.get(x.dtype)
    if kernel.active is None or kind is None or x.is_neg():
        return None
    address = x.data_ptr()
    if not address:  # no elements, or FSDP freed the storage
        return None
    shape, signs = x.shape, None
    if axis is not None and -axis > len(shape):
        axis = None
    if samples is not None:
        set_tables()
        signs = samples.packed(shape)
    found = kernel.active.reduce(address, kind, shape, x.stride(), axis, index, signs)
    if found is None:
        return None
    row, ranges, numbers = found
    reduced = Reduced(1, row)
    if ranges is not None:
        dtype, half = _FLOAT64 if kind == 1 else _FLOAT32, len(ranges) // 2
        units = half // dtype.itemsize
        # By far quicker than to reshape and unpack.
        reduced.axis = axis
        reduced.low, reduced.high = np.ndarray(units, dtype, ranges), np.ndarray(units, dtype, ranges, half)
    if samples is not None:
        reduced.fingerprint = _projected(x, samples) if numbers is None else np.frombuffer(numbers)
    return reduced


def _projected(x: Tensor, samples: Samples) -> Array:
    with ambient_modes_disabled():
        return project(x.detach(), samples)


@functools.cache
def set_tables() -> None:
    """Hand the signs of rows and columns to the kernel."""
    assert kernel.active is not None
    groups, flips = row_structure()
    first = row_signs()[:8] * flips[0]  # of the group with the number 0: without its flips, and in the order of sums
    rows = np.empty_like(first)
    rows[:, np.arange(8) ^ groups[0]] = first
    tables = (flips, periods(), rows, columns())
    kernel.active.set_tables(groups.astype(np.uint8).tobytes(), *(table.astype(np.int8).tobytes() for table in tables))
