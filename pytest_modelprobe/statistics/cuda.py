"""Reductions on CUDA in one read, by kernels in Triton, if ``MODELPROBE_KERNEL=triton`` asks for them.

Plain torch needs some thirty kernels for the numbers of a tensor, and converts it to float64, which consumer cards
compute at 1/64 of the speed. Two kernels do it in one read, in float32, and only combine tiles in float64.

Nothing waits for the device: the kernels run on the current stream, and their memory is of torch's allocator. Without
Triton, which comes with torch's CUDA builds, and for tensors for which `by_triton` returns `None`, `device` computes
the same.

The kernels were compiled for GPUs, and run by Triton's interpreter against the reference. Neither shows how fast they
are: ``benchmarks/gpu.py`` measures that on a GPU. Until a watched step is 1.5 times as fast with them, torch's
operations are the default.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import textwrap
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe.kernel import VARIABLE
from pytest_modelprobe.models import kept_on_devices

from .readable import NO_CONTEXT
from .reduced import Reduced
from .samples import WHOLE, Samples
from .signs import COLUMNS, columns, masks, orders

_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_TILE, _SMALL_TILE = 1 << 12, 1 << 10  # elements of a tile: 16 for each of 256 or 64 threads
_DEEP = 4  # rows of a tile that a thread adds up
_MOST_RUNS = 8  # up to so many units of a row, one after another, the kernel looks for each
_BLOCK = 512  # tiles, or units, that a program of the second kernel looks at together
_ROW, _NUMBERS, _PARTS = 12, 16, 11  # columns of a `Row`; numbers of a fingerprint; other numbers of a tile


class _Kernels:
    """The module with the kernels, imported when it is first needed."""

    problem: str | None = None
    """Why torch computes instead, or `None`."""

    def __init__(self) -> None:
        self.failed: dict[Hashable, str] = {}
        """The error of each kind of tensor for which they failed: torch computes those."""

    @functools.cached_property
    def module(self) -> ModuleType | None:
        if os.environ.get(VARIABLE) != "triton":
            self.problem = f"{VARIABLE}=triton asks for kernels in Triton"
        elif torch.version.cuda is None:
            self.problem = "not CUDA"
        else:
            try:
                return importlib.import_module(".triton_kernels", __package__)
            except ImportError as error:
                self.problem = str(error)
            except Exception as error:  # noqa: BLE001 - Triton may be broken, or of another version
                self.problem = f"{type(error).__name__}: {error}"
        return None


KERNELS = _Kernels()


def by_kernels(x: Tensor, axis: int | None, index: int, samples: Samples | None) -> Reduced | None:
    """Return the reduction of a plain tensor on CUDA, or `None` if torch has to compute it; see `by_triton`."""
    module = KERNELS.module
    kind = x.dtype, axis is None, samples is None, x.is_contiguous()  # for each the kernels are compiled anew
    if module is None or KERNELS.problem is not None or kind in KERNELS.failed or type(x) is not Tensor:
        return None
    try:
        return by_triton(module, x, axis, index, samples)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - Triton compiles here, maybe without a C compiler or for a new device
        # Torch computes these from now on, so that the test does not pay for the error at each tensor.
        KERNELS.failed[kind] = f"{type(error).__name__}: {error}"
        return None


def description() -> str:
    """Return which code computes the numbers of tensors on CUDA, in words, once it was tried on a small tensor.

    >>> description().split()[0] in ("Triton", "torch")
    True
    """
    runs = KERNELS.module is not None and KERNELS.problem is None
    if runs and torch.cuda.is_available():
        runs = by_kernels(torch.zeros(2, device="cuda"), None, 0, WHOLE) is not None
    problem = next(iter(KERNELS.failed.values()), KERNELS.problem)
    if problem is None:
        return "Triton"
    found = textwrap.shorten(problem, 300)  # errors of Triton have many lines
    return f"Triton, and torch where it failed ({found})" if runs else f"torch ({found})"


def by_triton(kernels: ModuleType, x: Tensor, axis: int | None, index: int, samples: Samples | None) -> Reduced | None:
    """Return the reduction of a plain tensor, or `None` if torch has to compute it.

    Torch computes if the dtype is not one of `_DTYPES`, if there are no elements, and if the kernel has no order for
    the units.

    Args:
        kernels: The module `triton_kernels`.
        x: The tensor.
        axis: Axis of the units, counted from the end.
        index: Number of the forward.
        samples: The samples of the forward, or `None` if no fingerprint is asked for.
    """
    if x.dtype not in _DTYPES or not x.numel() or x.is_neg():
        return None
    place = None if axis is None or -axis > x.dim() else x.dim() + axis
    hashes = None if samples is None else samples.hashes_on(x.device, x.shape)
    if samples is None and not x.is_contiguous():  # without a fingerprint any order does, so that of the memory
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        x, place = x.permute(order), None if place is None else order.index(place)
    units, inner = (0, 1) if place is None else (x.shape[place], math.prod(x.shape[place + 1 :]))
    count = 1 if hashes is None else len(hashes)
    length = x.numel() // count

    width = next(n for n in (16, 64, COLUMNS) if length <= n or n == COLUMNS)
    row_count = -(-length // width)
    runs = _runs(units, inner, width, length)
    phases = 1
    if runs == 0:
        if length % (units * inner):
            return None
        phases = min(row_count, units * inner // math.gcd(units * inner, width))
    repeats = -(-row_count // phases)
    rows = (_TILE if count * repeats * width > _TILE // 4 else _SMALL_TILE) // width
    tiles = phases * -(-count * repeats // rows)

    x, strided, layout = _layout(x, count)
    wide = x.dtype == torch.float64
    dtype, integer = (torch.float64, torch.int64) if wide else (torch.float32, torch.int32)
    numbers = 0 if samples is None else _NUMBERS
    parts = torch.empty((_PARTS + 2 * numbers) * tiles, dtype=dtype, device=x.device)
    keys = torch.full((2 * units,), torch.iinfo(integer).max, dtype=integer, device=x.device) if units else parts
    out = torch.empty(_ROW + numbers, dtype=torch.float64, device=x.device)
    tables = _tables(x.device)[0] if numbers else out
    with _current(x.device):
        kernels.read[(tiles,)](
            x, parts, keys, tables, out if hashes is None else hashes,
            tiles, count, length, row_count, phases, repeats, units, inner, *layout,
            DEEP=_DEEP, ROWS=rows // _DEEP, COLUMNS=width, RUNS=runs, WIDE=wide,
            LONG=_extent(x) >= 1 << 30, STRIDED=strided, FINGERPRINT=numbers > 0,
            num_warps=8 if rows * width == _TILE else 2, maxnreg=128, enable_fp_fusion=True,
        )  # fmt: skip
        kernels.combine[(1 + numbers + -(-units // _BLOCK),)](
            parts, keys, out, tiles, index, units,
            BLOCK=_BLOCK, WIDE=wide, UNITS=units > 0, FINGERPRINT=numbers > 0, enable_fp_fusion=True,
        )  # fmt: skip
    reduced = Reduced(1, rows=out[:_ROW].view(1, _ROW))
    if units:
        reduced.axis = axis
        reduced.low, reduced.high = keys.view(dtype).split(units)
    if numbers:
        reduced.remote_fingerprint = out[_ROW:]
    return reduced


def _runs(units: int, inner: int, width: int, length: int) -> int:
    """Return the most units that a row has elements of, rounded up to a power of two.

    Returns 0 if they are too many, and -1 if there are no units.
    """
    if not units:
        return -1
    most = 1 if inner % width == 0 or inner == length else (min(width, length) - 2) // inner + 2
    return 0 if most > _MOST_RUNS else 1 << (most - 1).bit_length()


def _layout(x: Tensor, count: int) -> tuple[Tensor, bool, Sequence[int]]:
    """Return the tensor, whether its elements lie in another order, and three sizes and five strides; see `read`."""
    if count > 1:
        x = x.unflatten(0, (count, -1))
    first = 1 if count > 1 else 0
    joined: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[first:], x.stride()[first:], strict=True):
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            joined[-1] = joined[-1][0] * size, stride
        else:
            joined.append((size, stride))
    if x.is_contiguous():
        return x, False, (1,) * 3 + (0,) * 5
    if len(joined) > 4:  # the kernel knows four dimensions, besides that of the samples
        return x.contiguous(), False, (1,) * 3 + (0,) * 5
    joined = [(1, 0)] * (4 - len(joined)) + joined
    outer = x.stride(0) if count > 1 else 0
    return x, True, (*(size for size, _ in joined[1:]), outer, *(stride for _, stride in joined))


def _extent(x: Tensor) -> int:
    """Return how far the elements reach, in elements, or how many there are if that is more."""
    return max(x.numel(), sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)))


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else NO_CONTEXT


@kept_on_devices
def _tables() -> tuple[Tensor, ...]:
    """Return the tables of `read`."""
    signs = np.concatenate([columns().T, masks()])
    bits = ((signs < 0) << np.arange(len(signs))[:, None]).sum(0)
    return (torch.from_numpy(np.concatenate([bits, orders().argsort(1).reshape(-1)]).astype(np.int32)),)
