"""Reductions on the CPU by the compiled kernel, in one read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe import kernel

from .reduced import Reduced

_KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


def by_kernel(x: Tensor, axis: int | None, index: int) -> Reduced | None:
    """Return the reduction of a plain CPU tensor, or None: it is for torch to compute.

    That is where there is no compiled kernel, of other dtypes, of no elements, and of elements above 1e150.
    """
    kind = _KINDS.get(x.dtype)
    if kernel.active is None or kind is None or not x.numel() or x.is_neg():
        return None
    shape = x.shape
    if axis is not None and -axis > len(shape):
        axis = None
    found = kernel.active.reduce(x.data_ptr(), kind, shape, x.stride(), axis, index, None)
    if found is None:
        return None
    row, ranges, _ = found
    if ranges is None:
        return Reduced(1, row)
    low, high = np.frombuffer(ranges, np.float64 if kind == 1 else np.float32).reshape(2, -1)
    return Reduced(1, row, None, low, high, axis)
