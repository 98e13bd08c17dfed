"""Reductions on the CPU by the compiled kernel, in one read."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe import kernel

from .fingerprint import project
from .reduced import Reduced
from .samples import Samples
from .signs import columns, periods, row_signs, row_structure

_KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


def by_kernel(x: Tensor, axis: int | None, index: int, samples: Samples | None) -> Reduced | None:
    """Return the reduction of a plain CPU tensor, or None: it is for torch to compute.

    That is where there is no compiled kernel, of other dtypes, of no elements, and of elements above 1e150.

    Args:
        x: The tensor.
        axis: Axis of the units, counted from the end.
        index: Number of the forward.
        samples: Those of the forward; None: no fingerprint.
    """
    kind = _KINDS.get(x.dtype)
    if kernel.active is None or kind is None or not x.numel() or x.is_neg():
        return None
    shape, signs = x.shape, None
    if axis is not None and -axis > len(shape):
        axis = None
    if samples is not None:
        set_tables()
        signs = samples.packed(shape)
    found = kernel.active.reduce(x.data_ptr(), kind, shape, x.stride(), axis, index, signs)
    if found is None:
        return None
    row, ranges, numbers = found
    reduced = Reduced(1, row)
    if ranges is not None:
        low, high = np.frombuffer(ranges, np.float64 if kind == 1 else np.float32).reshape(2, -1)
        reduced.axis, reduced.low, reduced.high = axis, low, high
    if samples is not None:
        reduced.fingerprint = project(x, samples) if numbers is None else np.frombuffer(numbers)
    return reduced


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
