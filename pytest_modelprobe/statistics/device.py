"""Reductions on another device, by operations of torch. The results are tensors that stay there.

Every read of a number would make the host wait for the device, and the model would run much slower. So nothing here
looks at a number: each case is computed, and chosen by `torch.where`. On CUDA the kernels of `cuda` come first, as
these operations take some thirty kernels and convert to float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe.models import as_array, wait_for, widest

from .cuda import by_kernels
from .fingerprint import project_on_device
from .histogram import count
from .memory_order import in_memory_order
from .readable import is_expanded, real
from .reduced import Array, Reduced
from .samples import WHOLE, Samples

_CHUNK = 1 << 23  # elements that are converted to float64 at a time; float32 holds counts up to here exactly


def on_device(
    tensor: Tensor,
    axis: int | None,
    index: int,
    samples: Samples = WHOLE,
    fingerprint: bool = True,
    histogram: bool = False,
) -> Reduced:
    """Return the reduction of a plain tensor, on its device."""
    if tensor.is_cuda and not is_expanded(tensor):
        quick = by_kernels(tensor, axis, index, samples if fingerprint else None)
        if quick is not None:
            quick.histogram = count(tensor, torch.float64, _CHUNK) if histogram else None
            return quick
    x, copies, units = in_memory_order(tensor, axis)
    axis = axis if units else None
    wide = widest(x.device)
    try:
        # An empty tensor has one part too, an empty one.
        parts = [_row(real(part), copies, index, wide) for part in x.reshape(-1).split(_CHUNK)]
        rows = torch.stack(parts)
        reduced = Reduced(1, rows=merged_rows(rows) if len(parts) > 1 and wide.itemsize == 8 else rows)
        if axis is not None:
            reduced.axis = axis
            reduced.low, reduced.high = _ranges_on_device(x, units, wide)
        if fingerprint:
            largest = torch.maximum(-rows[:, 8].amin(), rows[:, 9].amax())
            reduced.remote_fingerprint = project_on_device(tensor, largest, samples)
        if histogram:
            reduced.histogram = count(tensor, wide, _CHUNK)
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


def _ranges_on_device(x: Tensor, units: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    if not x.numel():
        low = torch.full((units,), math.inf, dtype=wide, device=x.device)
        return low, -low
    x = real(x)
    if not x.is_floating_point():
        x = x.to(wide)  # torch has no kernel for uint16 and its like
    low, high = x.amin((0, 2)), x.amax((0, 2))
    return low.expand(units), high.expand(units)


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
