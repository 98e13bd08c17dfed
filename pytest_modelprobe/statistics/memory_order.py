"""Elements of a tensor in the order of the memory, with units apart.

Statistics do not depend on the order of elements. In the order of the memory a transposed tensor is a view, and is read
as quickly as a contiguous one. A fingerprint depends on the order, so `fingerprint` does not use this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

BLOCK = 1 << 20  # elements read at a time: four megabytes in float32, which the last cache holds for all passes


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


def blocks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield pieces of at most `BLOCK` elements, each after the slice of units that it holds."""
    _, units, inner = x.shape
    if units * inner <= BLOCK:
        for part in x.split(BLOCK // (units * inner)):
            yield slice(None), part
        return
    step = max(1, BLOCK // inner)
    for row in x.split(1):
        for start in range(0, units, step):
            for part in row[:, start : start + step].split(BLOCK, dim=2):
                yield slice(start, start + step), part
