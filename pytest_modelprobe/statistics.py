"""Statistics of tensors: reduced where the tensor lives, read when the record is made.

`reduce` is what a hook calls. On the CPU it returns plain numbers at once. On another device it returns a small tensor
that stays there: no element is read, so nothing waits for the device. `merge` joins two reductions in the same manner,
and `collect` reads any number of them with one transfer per device.

Moments are accurate to 1e-6 of the root mean square. That takes care: a float32 `dot` over 256 k elements of one
magnitude is wrong by 5e-5, so squares are added 1,024 at a time; and where the mean is most of what the squares are
of, they are taken again of the differences from it.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils import _python_dispatch

from pytest_modelprobe.fingerprint import project, project_on_device, read
from pytest_modelprobe.record import Reading, Statistics, Units

Array = npt.NDArray[Any]

_SMALL = 1 << 13  # elements up to which numpy in float64 is cheaper than calls of torch
_ROW = 1 << 10  # elements whose squares are added in float32
_BLOCK = 1 << 20  # elements of a partial sum in float32: four megabytes, in the cache for all passes
_LEAST = 1e-15  # magnitudes from here to its inverse have squares that float32 can add up
_CHUNK = 1 << 23  # elements a device converts to float64 at a time; float32 holds counts up to here

_WITH_FLOAT64 = {"cuda", "cpu", "meta"}

_FLOATS = {torch.float32, torch.float64}
_NARROW = {torch.float16, torch.bfloat16} | {
    value for name, value in vars(torch).items() if name.startswith("float8_") and isinstance(value, torch.dtype)
}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_INTEGERS = {torch.bool, torch.int8, torch.int16, torch.int32, torch.int64} | {
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}
_READABLE = _FLOATS | _NARROW | _COMPLEX | _INTEGERS


Row = tuple[float, ...]
"""Finite elements, NaN, +infinity, -infinity, zeros; the first forward with each of the three that are not finite;
smallest, largest, mean, and sum of (x - mean)². Infinite where there is none; a `Statistics` takes longer to make."""

_NO_ELEMENT: Row = (0, 0, 0, 0, 0, math.inf, math.inf, math.inf, math.inf, -math.inf, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class Reduced:
    """What is kept of one tensor, or of several merged, until it is collected."""

    tensors: int = 1
    row: Row | None = None
    """Of what was reduced on the CPU."""
    rows: Tensor | None = None
    """Of what was reduced elsewhere: shape (k, 12), columns as in `Row`, still on the device."""
    low: Array | Tensor | None = None
    """Smallest element of each unit."""
    high: Array | Tensor | None = None
    axis: int | None = None
    """Axis of the units, counted from the end."""
    fingerprint: Array | None = None
    """Of what was reduced on the CPU, as `fingerprint.project` returns it."""
    remote_fingerprint: Tensor | None = None
    """Of what was reduced elsewhere, still on the device."""
    reason: str | None = None
    """Why there are no statistics, or no units any more."""


def reduce(tensor: Tensor, *, axis: int | None = None, index: int = 0, fingerprint: bool = True) -> Reduced:
    """Return what is to be kept of a tensor; of one that cannot be read, the reason.

    Of a `DTensor` it is the local shard. Complex elements count by their magnitude.

    Args:
        tensor: Any tensor; it and every global state stay as they are.
        axis: Axis of the units, counted from the end (-1 is the last); None for no units.
        index: Number of the forward, from 0, for `Statistics.first_nan` and the like.
        fingerprint: Whether to take the fingerprint too.

    >>> (reading,) = collect([reduce(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), axis=-1)])
    >>> reading.statistics.mean, reading.statistics.zeros, reading.units.dead
    (1.0, 2, 1)
    >>> reduce(torch.empty(3, device="meta")).reason
    'meta tensor'
    """
    with plainly():
        plain, reason = opened(tensor)
        if reason is not None:
            return Reduced(reason=reason)
        if not plain.is_cpu:
            return _on_device(plain, axis, index, fingerprint)
        reduced = _on_cpu(plain, axis, index)
        if fingerprint:
            reduced.fingerprint = project(plain, index)
        return reduced


def reduce_on_device(tensor: Tensor, *, axis: int | None = None, index: int = 0, fingerprint: bool = True) -> Reduced:
    """Return what is to be kept of a tensor without reading an element of it.

    This is what `reduce` does where the tensor is not on the CPU. It runs on any device, also ``meta`` and fake ones,
    which have nothing to read.

    >>> reduce_on_device(torch.empty(8, 3, device="meta"), axis=-1).low.shape
    torch.Size([3])
    """
    with plainly():
        return _on_device(tensor.detach(), axis, index, fingerprint)


def merge(a: Reduced, b: Reduced) -> Reduced:
    """Return the reduction of both sets of elements together; nothing is read from a device.

    >>> (both,) = collect([merge(reduce(torch.zeros(2)), reduce(torch.ones(2)))])
    >>> both.tensors, both.statistics.mean, both.statistics.std
    (2, 0.5, 0.5)
    """
    merged = Reduced(tensors=a.tensors + b.tensors, reason=a.reason or b.reason)
    if not (_has_numbers(a) and _has_numbers(b)):
        return merged
    merged.row = a.row or b.row
    if a.row is not None and b.row is not None:
        merged.row = _joined(a.row, b.row)
    device = a.rows if a.rows is not None else b.rows
    with plainly() if device is not None else _NOTHING:
        merged.rows = device
        if a.rows is not None and b.rows is not None:
            rows = torch.cat([a.rows, b.rows.to(a.rows.device, non_blocking=True)])
            # Without float64 the rows wait for the CPU: in float32 the sums would lose digits at each step.
            merged.rows = _combined(rows) if rows.dtype == torch.float64 else rows
        _merge_units(merged, a, b)
        _merge_fingerprints(merged, a, b)
    return merged


def collect(reduced: Sequence[Reduced]) -> list[Reading]:
    """Return the readings of reductions in plain numbers, with one transfer for each device.

    >>> ones, zeros = collect([reduce(torch.ones(2)), reduce(torch.zeros(2))])
    >>> ones.statistics.max, zeros.statistics.max
    (1.0, 0.0)
    """
    remote = [t for r in reduced for t in (r.rows, r.low, r.high, r.remote_fingerprint) if isinstance(t, Tensor)]
    with plainly():
        numbers = _fetch(remote)

    def plain(value: Array | Tensor) -> Array:
        return numbers[id(value)] if isinstance(value, Tensor) else value

    readings = []
    for one in reduced:
        row = one.row
        for part in () if one.rows is None else map(tuple, plain(one.rows).reshape(-1, 12).tolist()):
            row = part if row is None else _joined(row, part)
        statistics = None if row is None else _statistics(row)
        units = None
        if statistics and one.axis is not None and one.low is not None and one.high is not None:
            low, high = (tuple(map(float, plain(v).tolist())) for v in (one.low, one.high))
            units = Units(axis=one.axis, low=low, high=high) if statistics.count else None
        fingerprint, digest = None, None
        parts = [plain(part) for part in (one.fingerprint, one.remote_fingerprint) if part is not None]
        if parts:
            fingerprint, digest = read(sum(parts[1:], start=parts[0]))
        readings.append(
            Reading(
                tensors=one.tensors,
                statistics=statistics,
                units=units,
                fingerprint=fingerprint,
                digest=digest,
                reason=one.reason,
            )
        )
    return readings


# --- contexts of the model that must not reach our own arithmetic -------------------------------------------------

_NOTHING = contextlib.nullcontext()


def plainly() -> AbstractContextManager[object]:
    """Return a context in which torch computes as if no other context were active.

    It leaves autocast, inference mode, functorch, and the stacks of function and dispatch modes (a default device is
    one), and comes back to them. Where none is active it costs half a microsecond. Of gradients one has to detach.

    >>> with torch.autocast("cpu", torch.bfloat16), plainly():
    ...     (torch.eye(2) @ torch.eye(2)).dtype
    torch.float32
    """
    needed: list[AbstractContextManager[object]] = []
    if torch._C._len_torch_function_stack():
        needed.append(torch._C.DisableTorchFunction())
    if torch._C._len_torch_dispatch_stack():
        needed.append(_python_dispatch._disable_current_modes())
    if torch._C._is_any_autocast_enabled():
        needed.append(torch._C._DisableAutocast())
    if torch.is_inference_mode_enabled():
        needed.append(torch.inference_mode(False))
    if torch._C._functorch.peek_interpreter_stack() is not None:
        needed.append(torch._C._DisableFuncTorch())
    if len(needed) > 1:
        return _all_of(needed)
    return needed[0] if needed else _NOTHING


@contextlib.contextmanager
def _all_of(contexts: Sequence[AbstractContextManager[object]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


# --- what can be read ---------------------------------------------------------------------------------------------


def opened(tensor: Tensor) -> tuple[Tensor, str | None]:
    """Return a plain detached tensor, and None; or as it is, and the reason why its elements cannot be read.

    >>> opened(torch.ones(2, device="meta"))[1]
    'meta tensor'
    """
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        tensor, reason = _without_subclass(tensor)
        if reason is not None:
            return tensor, reason
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor, "tensor of a torch.func transform"
    if tensor.is_nested:
        return tensor, "nested tensor"
    if tensor.is_quantized:
        return tensor, "quantised tensor"
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").lstrip("_")
        return tensor, "sparse tensor" if layout.startswith("sparse") else f"{layout} tensor"
    if tensor.is_meta:
        return tensor, "meta tensor"
    if tensor.dtype not in _READABLE:
        return tensor, f"{str(tensor.dtype).removeprefix('torch.')} tensor"
    if tensor.is_cpu and not tensor.data_ptr() and tensor.numel():
        return tensor, "tensor without storage"  # FSDP frees it in place; reading would crash
    return tensor.detach(), None


def _without_subclass(tensor: Tensor) -> tuple[Tensor, str | None]:
    with torch._C.DisableTorchFunctionSubclass():
        distributed = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and isinstance(tensor, distributed.DTensor):
            with torch.no_grad():  # the local tensor itself, not the output of an autograd function
                return opened(cast(Any, tensor).to_local())
        if is_lazy(tensor):
            return tensor, "uninitialised parameter"
        if tensor.layout is torch.jagged:
            return tensor, "nested tensor"
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            name = type(tensor).__name__
            return tensor, "fake tensor" if name == "FakeTensor" else f"{name} tensor"
        return tensor.as_subclass(Tensor), None


def _real(x: Tensor) -> Tensor:
    """Return the elements in a dtype that numpy and every kernel know."""
    if x.dtype in _FLOATS:
        return x.resolve_neg()
    if x.dtype in _NARROW:
        return x.float()
    if x.dtype in _COMPLEX:
        return (x.to(torch.complex64) if x.dtype == torch.complex32 else x).abs()
    return x.view(torch.uint8) if x.dtype == torch.bool else x


# --- order of elements --------------------------------------------------------------------------------------------


def _arranged(x: Tensor, axis: int | None) -> tuple[Tensor, int, int]:
    """Return the elements as (outer, units, inner), how often each stands there, and the number of units.

    Order does not matter to statistics, so it is that of the memory, and what is broadcast is read once.
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
    return x.reshape(shape), copies, units  # a view, but for slices along several axes


def _blocks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield pieces of at most `_BLOCK` elements and the units they hold."""
    _, units, inner = x.shape
    if units * inner <= _BLOCK:
        for part in x.split(_BLOCK // (units * inner)):
            yield slice(None), part
        return
    step = max(1, _BLOCK // inner)
    for row in x.split(1):
        for start in range(0, units, step):
            for part in row[:, start : start + step].split(_BLOCK, dim=2):
                yield slice(start, start + step), part


# --- on the CPU ---------------------------------------------------------------------------------------------------


def _on_cpu(tensor: Tensor, axis: int | None, index: int) -> Reduced:
    if tensor.numel() <= _SMALL and tensor.dtype in _FLOATS and tensor.is_contiguous() and not tensor.is_neg():
        reduced = _small(tensor.numpy(), axis)
        if reduced is not None:
            return reduced
    x, copies, units = _arranged(tensor, axis)
    axis = axis if units else None
    if not x.numel():
        low = np.full(units, math.inf)  # the least of nothing: merging it changes nothing
        return Reduced(1, _NO_ELEMENT, low=low, high=-low, axis=axis)
    if x.numel() <= _BLOCK:
        row, low, high = _block(_real(x.contiguous()), index)
    else:
        row = _NO_ELEMENT
        low = np.full(x.shape[1], math.inf)
        high = -low
        for place, piece in _blocks(x):
            part, bottom, top = _block(_real(piece.contiguous()), index)
            row = _joined(row, part)
            np.minimum(low[place], bottom, out=low[place])
            np.maximum(high[place], top, out=high[place])
    if copies > 1:
        row = _times(row, copies)
    if axis is None:
        return Reduced(1, row)
    if len(low) < units:  # the unit axis itself was broadcast
        low, high = low.repeat(units), high.repeat(units)
    return Reduced(1, row, None, low, high, axis)


def _small(x: Array, axis: int | None) -> Reduced | None:
    """Return what `_block` would, in fewer calls; None for no elements, and where one is not finite or too large."""
    flat = x.reshape(-1)
    if not flat.size:
        return None
    low: Array | None = None
    high: Array | None = None
    if axis is None or -axis > x.ndim:
        axis = None
        bottom, top = np.minimum.reduce(flat).item(), np.maximum.reduce(flat).item()
        finite = math.isfinite(top - bottom)
    else:
        low, high = _ranges(x.reshape(math.prod(x.shape[:axis]), x.shape[axis], -1))
        lows, highs = low.tolist(), high.tolist()
        bottom, top = min(lows), max(highs)
        finite = math.isfinite(sum(highs) - sum(lows))  # a NaN may hide from min and max
    if not finite or max(-bottom, top) > 1e150:
        return None
    zeros = flat.size - int(np.count_nonzero(flat)) if bottom <= 0 <= top else 0
    mean = np.add.reduce(flat, dtype=np.float64).item() / flat.size if bottom < top else float(bottom)
    flat = flat - np.float64(mean)
    deviations = np.dot(flat, flat).item()
    return Reduced(1, _of_finite(flat.size, zeros, bottom, top, mean, deviations), None, low, high, axis)


def _block(x: Tensor, index: int) -> tuple[Row, Array, Array]:
    """Return the numbers and the range of each unit of (outer, units, inner)."""
    by_torch = x.numel() > _SMALL and x.dtype in _FLOATS
    low, high = _ranges_by_torch(x) if by_torch else _ranges(x.numpy())
    if len(low) == 1:
        bottom, top = low.item(), high.item()
    else:
        bottom, top = np.minimum.reduce(low).item(), np.maximum.reduce(high).item()
    if bottom == top and math.isfinite(bottom):
        return _of_finite(x.numel(), 0 if bottom else x.numel(), bottom, top, float(bottom), 0.0), low, high
    quick = _quickly(x.view(-1), bottom, top) if by_torch else None
    return quick or _carefully(x.numpy(), bottom, top, index), low, high


def _of_finite(count: int, zeros: int, bottom: float, top: float, mean: float, deviations: float) -> Row:
    return count, 0, 0, 0, zeros, math.inf, math.inf, math.inf, bottom, top, mean, deviations


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
        return low.view(1).numpy(), high.view(1).numpy()
    # The outer axis first: in one call over both, rows of 49 elements take four times as long.
    low, high = (x.amin(0), x.amax(0)) if outer > 1 else (x[0], x[0])
    if inner > 1:
        low, high = low.amin(1), high.amax(1)
    return low.view(units).numpy(), high.view(units).numpy()


def _quickly(x: Tensor, bottom: float, top: float) -> Row | None:
    """Return the numbers by the arithmetic of the dtype itself, or None where it does not suffice."""
    largest = max(-bottom, top)
    if not (math.isfinite(bottom) and math.isfinite(top) and _LEAST < largest < 1 / _LEAST):
        return None  # not finite, or squares may over- or underflow
    count = x.numel()
    total = x.sum().item()
    mean = total / count
    squares = _sum_of_squares(x)
    deviations = squares - total * mean
    if deviations < squares / 2:  # digits were lost: subtract the mean first; reduction 0 is "none"
        scratch = _scratch(count, x.dtype)
        deviations = torch.ops.aten.mse_loss.out(x, torch.tensor(mean, dtype=x.dtype), 0, out=scratch).sum().item()
    if deviations < count * _LEAST**2:
        return None
    zeros = 0
    if bottom <= 0 <= top:
        nonzero = _scratch(count, torch.bool).copy_(x)  # to count zeros at once takes four times as long
        zeros = 0 if nonzero.view(torch.uint8).amin().item() else count - int(np.count_nonzero(nonzero.numpy()))
    return _of_finite(count, zeros, bottom, top, mean, deviations)


def _sum_of_squares(x: Tensor) -> float:
    """Return the sum of squares: of rows of 1,024 in the arithmetic of the dtype, of these in float64."""
    rest = x.numel() % _ROW
    norms = torch.linalg.vector_norm(x[: x.numel() - rest].view(-1, _ROW), dim=1).double().numpy()
    squares: float = np.dot(norms, norms).item()
    if rest:
        last = x[x.numel() - rest :].numpy()
        squares += np.dot(last, last).item()
    return squares


class _Scratch(threading.local):
    """Memory that is used again and again, by dtype: to get it anew takes longer than to fill it."""

    def __init__(self) -> None:
        self.blocks: dict[torch.dtype, Tensor] = {}


_SCRATCH = _Scratch()


def _scratch(count: int, dtype: torch.dtype) -> Tensor:
    if dtype not in _SCRATCH.blocks:
        _SCRATCH.blocks[dtype] = torch.empty(_BLOCK, dtype=dtype, device="cpu")
    return _SCRATCH.blocks[dtype][:count]


def _carefully(x: Array, bottom: float, top: float, index: int) -> Row:
    """Return the numbers in float64, of the finite elements."""
    x = x.reshape(-1)
    others: Row = (0, 0, 0)
    if not (math.isfinite(bottom) and math.isfinite(top)):
        others = tuple(int(np.count_nonzero(test(x))) for test in (np.isnan, np.isposinf, np.isneginf))
        x = x[np.isfinite(x)]
        if x.size:
            bottom, top = np.minimum.reduce(x).item(), np.maximum.reduce(x).item()
    first = (index if count else math.inf for count in others)
    if not x.size:
        return 0, *others, 0, *first, *_NO_ELEMENT[8:]
    values = x.astype(np.float64)  # only now: numpy warns of a signalling NaN
    zeros = values.size - int(np.count_nonzero(values)) if bottom <= 0 <= top else 0
    scale = 1.0
    if max(-bottom, top) > 1e150:  # float64 only: its squares, or the sum itself, overflow
        scale = 2.0**-600
        values *= scale
    mean = np.add.reduce(values).item() / values.size
    values -= mean
    if values.size <= _SMALL:
        squares = np.dot(values, values).item()
    else:  # the threads of a large np.dot and those of torch get in each other's way
        squares = np.add.reduce(np.square(values, out=values)).item()
    return x.size, *others, zeros, *first, bottom, top, mean / scale, squares / scale / scale


def _times(row: Row, copies: int) -> Row:
    return *(count * copies for count in row[:5]), *row[5:11], row[11] * copies


def _joined(a: Row, b: Row) -> Row:
    """Return the numbers of both sets of elements together: the formula of `Statistics.merge`."""
    n, nan, posinf, neginf, zeros, first_nan, first_posinf, first_neginf, low, high, mean, deviations = a
    m, *others = b
    if n and m:
        delta = others[9] - mean
        mean += delta * (m / (n + m))
        deviations += delta * delta * (n * m / (n + m))
    elif m:
        mean = others[9]
    return (
        n + m,
        nan + others[0],
        posinf + others[1],
        neginf + others[2],
        zeros + others[3],
        min(first_nan, others[4]),
        min(first_posinf, others[5]),
        min(first_neginf, others[6]),
        min(low, others[7]),
        max(high, others[8]),
        mean,
        deviations + others[10],
    )


# --- on another device --------------------------------------------------------------------------------------------


def _on_device(tensor: Tensor, axis: int | None, index: int, fingerprint: bool = True) -> Reduced:
    x, copies, units = _arranged(tensor, axis)
    axis = axis if units else None
    wide = torch.float64 if x.device.type in _WITH_FLOAT64 else torch.float32
    try:
        # split() makes one empty part of an empty tensor
        parts = [_row(_real(part), copies, index, wide) for part in x.reshape(-1).split(_CHUNK)]
        rows = torch.stack(parts)
        reduced = Reduced(1, rows=_combined(rows) if len(parts) > 1 and wide.itemsize == 8 else rows)
        if axis is not None:
            reduced.axis = axis
            reduced.low, reduced.high = _ranges_on_device(x, units, wide)
        if fingerprint:
            largest = torch.maximum(-rows[:, 8].amin(), rows[:, 9].amax())
            reduced.remote_fingerprint = project_on_device(tensor, largest, index)
        return reduced
    except NotImplementedError:
        return Reduced(reason=f"{str(x.dtype).removeprefix('torch.')} on {x.device.type}")


def _row(x: Tensor, copies: int, index: int, wide: torch.dtype) -> Tensor:
    """Return the columns of a `Row`."""
    x = x.to(wide)
    finite = (x - x) == 0  # a third of the kernels of isfinite
    counts = torch.stack([finite, x != x, x == math.inf, x == -math.inf, x == 0]).sum(1) * copies
    some = counts[0] > 0
    mean = torch.where(finite, x, 0).sum() * copies / counts[0].clamp(min=1)
    x = torch.where(finite, x, mean)  # changes neither range nor mean, and deviates by 0
    low, high = (x.amin(), x.amax()) if x.numel() else (mean, mean)
    low, high = torch.where(some, low, math.inf), torch.where(some, high, -math.inf)
    x = x - mean
    never = torch.full((3,), math.inf, dtype=wide, device=x.device)
    first = torch.where(counts[1:4] > 0, index, never)
    moments = torch.stack([low, high, mean, torch.dot(x, x) * copies])
    return torch.cat([counts.to(wide), first, moments])


def _combined(rows: Tensor) -> Tensor:
    """Return one row for all: the formula of `Statistics.merge`, for any number of parts."""
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
    x = _real(x)
    if not x.is_floating_point():
        x = x.to(wide)  # uint16 and its like have no kernel
    low, high = x.amin((0, 2)), x.amax((0, 2))
    return low.expand(units), high.expand(units)


def _statistics(row: Sequence[float]) -> Statistics:
    finite, nan, posinf, neginf, zeros = map(int, row[:5])
    first = [None if math.isinf(index) else int(index) for index in row[5:8]]
    low, high, mean, deviations = row[8:] if finite else (None, None, None, 0.0)
    return Statistics(
        count=finite + nan + posinf + neginf,
        nan=nan,
        posinf=posinf,
        neginf=neginf,
        zeros=zeros,
        min=low,
        max=high,
        mean=mean,
        deviations=deviations,
        first_nan=first[0],
        first_posinf=first[1],
        first_neginf=first[2],
    )


def _fetch(tensors: Sequence[Tensor]) -> dict[int, Array]:
    """Return the numbers of each tensor by its identity."""
    numbers: dict[int, Array] = {}
    for device in {tensor.device for tensor in tensors}:
        here = [tensor for tensor in tensors if tensor.device == device]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # they may come from several streams
        wide = torch.float64 if device.type in _WITH_FLOAT64 else torch.float32
        joined = torch.cat([tensor.reshape(-1).to(wide) for tensor in here]).cpu().numpy()
        ends = np.cumsum([tensor.numel() for tensor in here])[:-1]
        numbers.update(zip(map(id, here), np.split(joined, ends), strict=True))
    return numbers


# --- merging ------------------------------------------------------------------------------------------------------


def _has_numbers(reduced: Reduced) -> bool:
    return reduced.row is not None or reduced.rows is not None


def _merge_fingerprints(merged: Reduced, a: Reduced, b: Reduced) -> None:
    size = _size_of_fingerprint(a)
    if size is None or size != _size_of_fingerprint(b):
        return  # one has none, or one is of integers and the other is not
    if a.fingerprint is not None and b.fingerprint is not None:
        merged.fingerprint = a.fingerprint + b.fingerprint
    else:
        merged.fingerprint = a.fingerprint if b.fingerprint is None else b.fingerprint
    remote = [one.remote_fingerprint for one in (a, b) if one.remote_fingerprint is not None]
    if remote:
        first, *others = remote
        merged.remote_fingerprint = sum((o.to(first.device, non_blocking=True) for o in others), start=first)


def _size_of_fingerprint(reduced: Reduced) -> int | None:
    either = reduced.fingerprint if reduced.remote_fingerprint is None else reduced.remote_fingerprint
    return None if either is None else len(either)


def _merge_units(merged: Reduced, a: Reduced, b: Reduced) -> None:
    if a.axis is None and b.axis is None:
        return
    lows: Any = (a.low, b.low)
    highs: Any = (a.high, b.high)
    if a.axis != b.axis or len(lows[0]) != len(lows[1]):
        merged.reason = merged.reason or "number of units varies"
    elif isinstance(a.low, np.ndarray) and isinstance(b.low, np.ndarray):
        merged.axis, merged.low, merged.high = a.axis, np.minimum(*lows), np.maximum(*highs)
    elif all(isinstance(low, Tensor) and low.device == lows[0].device for low in lows):
        merged.axis, merged.low, merged.high = a.axis, torch.minimum(*lows), torch.maximum(*highs)
    else:
        merged.reason = merged.reason or "units on several devices"
