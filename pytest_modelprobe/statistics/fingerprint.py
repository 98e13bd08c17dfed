"""Fingerprints of tensors: 16 signed random projections, from which the distance of two tensors is estimated.

The elements of a tensor are taken in logical (row-major) order, in rows of 256. Projection k adds each element with the
sign ``row[r, k // 2] * column[c, k]``, so that the mean of its square is the tensor's squared norm, and so that most of
the work is one thin product: 8 signed sums of the rows. The signs come from splitmix64 and never change.

The standard error of `estimated_change` is 18 % for a generic difference, and 25 % where the difference is in one
column or the same everywhere. A constant shift over any number of elements is estimated at 0.6 to 1.5 times its size.
A difference is missed only if it is constructed for that.

Integers are hashed with their position: all hashes together are the digest, which is exact, and each counts in the
fingerprint as a number drawn from its hash with mean 0 and variance 1, from which the share of elements that differ
is estimated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_modelprobe.models import as_array
from pytest_modelprobe.record import estimated_change

__all__ = ["K", "estimated_change", "project", "project_on_device", "project_rows", "read"]

Array = npt.NDArray[Any]

K = 16
_COLUMNS = 256
_SUMS = 8  # signed sums of the rows, each of which serves two projections
_BYTES = 8  # of a digest

_SCALE = K**-0.5

_DIRECT = 512  # elements up to which there is a matrix of signs: above, OpenBLAS starts threads for it
_ROWS = 128  # of one product: (8, 128) @ (128, 256) is the largest for which OpenBLAS starts no threads
_PERIOD = 4096  # rows after which the table of their signs is used again, with other signs
PIECE = 1 << 20  # elements handled at a time on the CPU: four megabytes, in the cache
_CHUNK = 1 << 23  # elements handled at a time on a device
_HASHED = 1 << 14  # integers hashed at a time: all steps in the cache

_FLOATS = (torch.float32, torch.float64)

_MEAN, _SPREAD = (2**24 - 1) / 2, math.sqrt(12) / 2**24  # of the 24 bits of a hash that stand for an integer
_INFINITE, _NAN = 2.0, 4.0  # values that stand for non-finite elements, in units of the largest finite magnitude

# Chosen for the best estimates of constant shifts over every number of elements, and for distinct first forwards.
_COLUMN_SALT, _ROW_SALT, _PERIOD_SALT, _FORWARD_SALT, _PLACE_SALT = 2292, 995, 455, 3028, 1


# --- signs --------------------------------------------------------------------------------------------------------

_GAMMA = 0x9E3779B97F4A7C15
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def _mixed(z: Array, scratch: Array | None = None) -> Array:
    """Return the output function of splitmix64 (Steele, Lea and Flood 2014), in place."""
    for shift, factor in _STEPS:
        scratch = np.right_shift(z, np.uint64(shift), out=scratch)
        z ^= scratch
        if factor != 1:
            z *= np.uint64(factor)
    return z


def _hashes(salt: int, count: int, first: int = 0) -> Array:
    """Return ``count`` outputs of splitmix64, from number ``salt * 2**32 + first`` on.

    >>> hex(_hashes(0, 1)[0])
    '0xe220a8397b1dcdaf'
    """
    start = (salt << 32) + 1 + first
    return _mixed(np.arange(start, start + count, dtype=np.uint64) * np.uint64(_GAMMA))


def _bits(salt: int, count: int, width: int) -> Array:
    """Return signs of shape (count, width) from the highest bits of one hash for each row."""
    places = np.arange(64 - width, 64, dtype=np.uint64)
    return np.where((_hashes(salt, count)[:, None] >> places) & np.uint64(1), 1.0, -1.0)


@functools.cache
def _columns() -> Array:
    """Return the signs of columns, shape (16, 256), in float64.

    Each row has 136 pluses and 120 minuses: with a sum of 16, the root of 256, a constant has its true norm.
    """
    ranks = _hashes(_COLUMN_SALT, K * _COLUMNS).reshape(K, _COLUMNS).argsort(1, kind="stable").argsort(1)
    return np.where(ranks < (_COLUMNS - 16) // 2, -1.0, 1.0)


@functools.cache
def _rows(dtype: np.dtype[Any]) -> Array:
    """Return the signs of rows within a period in blocks, shape (32, 8, 128)."""
    rows = _bits(_ROW_SALT, _PERIOD, _SUMS).reshape(-1, _ROWS, _SUMS)
    return np.ascontiguousarray(rows.transpose(0, 2, 1), dtype=dtype)


@functools.cache
def _periods() -> Array:
    """Return the signs by which the periods of rows differ, shape (4096, 8); in the first all are +1."""
    signs = _bits(_PERIOD_SALT, 4096, _SUMS)
    signs[0] = 1
    return signs


@functools.cache
def _direct(dtype: np.dtype[Any]) -> Array:
    """Return the signs of the first 512 elements, shape (16, 512), times the scale, which is a power of 2."""
    rows = _rows(dtype)[0, :, : _DIRECT // _COLUMNS].repeat(K // _SUMS, axis=0)
    signs = (rows[:, :, None] * _columns()[:, None]).reshape(K, -1)
    scaled: Array = np.ascontiguousarray(signs * _SCALE, dtype=dtype)
    return scaled


@functools.cache
def _forwards() -> Array:
    """Return the signs of forwards, shape (1024, 16): those of the first are all +1."""
    signs = _bits(_FORWARD_SALT, 1024, K)
    signs[0] = 1
    return signs


def _weight(index: int) -> int:
    """Return the odd number by which the digest of a forward is multiplied: 1 for the first."""
    return int(_hashes(_FORWARD_SALT, 1, index)[0]) | 1 if index else 1


# --- elements in logical order ------------------------------------------------------------------------------------


def pieces(x: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the elements in logical order, flat and contiguous, ``size`` at a time.

    A piece may be overwritten when the next one is asked for.

    >>> [piece.tolist() for piece in pieces(torch.arange(6).view(2, 3).t(), 4)]
    [[0, 3, 1, 4], [2, 5]]
    """
    count = x.numel()
    if count <= size:
        yield x.reshape(-1)
        return
    if x.is_contiguous():
        yield from x.view(-1).split(size)
        return
    buffer = torch.empty(size, dtype=x.dtype, device=x.device)
    for start in range(0, count, size):
        stop = min(start + size, count)
        _copy(x, start, stop, buffer[: stop - start])
        yield buffer[: stop - start]


def _copy(x: Tensor, start: int, stop: int, out: Tensor) -> None:
    """Copy the elements from ``start`` to ``stop``, in logical order."""
    if stop - start == x.numel():
        _copy_whole(x, out.view(x.shape))
        return
    inner = x.numel() // len(x)
    first, last = -(-start // inner), stop // inner  # those that are whole
    if first > last:
        _copy(x[last], start - last * inner, stop - last * inner, out)
        return
    head, tail = first * inner - start, stop - last * inner
    if head:
        _copy(x[first - 1], inner - head, inner, out[:head])
    if first < last:
        _copy_whole(x[first:last], out[head : len(out) - tail].view(last - first, *x.shape[1:]))
    if tail:
        _copy(x[last], 0, tail, out[len(out) - tail :])


def _copy_whole(x: Tensor, out: Tensor) -> None:
    if x.dim() and x.shape[-1] > 512 and x.stride(-1) != 1 and x.is_cpu:
        # More would miss the cache of page addresses: it takes four times as long.
        for to, part in zip(out.split(512, -1), x.split(512, -1), strict=True):
            to.copy_(part)
    else:
        out.copy_(x)


def _real(x: Tensor) -> Tensor:
    """Return a complex tensor as pairs of numbers, and nothing lazily negated or conjugated."""
    if x.is_complex():
        x = torch.view_as_real((x.to(torch.complex64) if x.dtype == torch.complex32 else x).resolve_conj())
    return x.view(torch.uint8) if x.dtype == torch.bool else x.resolve_neg()


def _wide(x: Tensor) -> Tensor:
    """Return a piece of floating elements in float32, or float64 if it is in that."""
    return x if x.dtype in _FLOATS else x.float()


# --- on the CPU ---------------------------------------------------------------------------------------------------


def project(tensor: Tensor, index: int = 0) -> Array:
    """Return the fingerprint of a plain tensor on the CPU, and after it the bytes of the digest of integers.

    Args:
        tensor: A strided tensor without gradient; it stays as it is.
        index: Number of the forward, from 0: each has its own signs, so that their order matters.

    >>> project(torch.tensor([3.0]))[:4] * 4
    array([-3., -3.,  3.,  3.])
    >>> project(torch.tensor([3])).shape
    (24,)
    """
    with np.errstate(all="ignore"):  # an overflow is found in the result
        x = _real(tensor)
        if not x.is_floating_point():
            numbers, digest = _integers(x, index)
            numbers = _of_forward(numbers, index)
            return np.concatenate([numbers, np.frombuffer(digest.to_bytes(_BYTES, "little"), np.uint8)])
        numbers = _projected(_wide(piece) for piece in pieces(x, PIECE))
        if not math.isfinite(np.add.reduce(numbers)):
            numbers = _projected_in_float64(x)
        return _of_forward(numbers, index)


def project_rows(x: Array, indices: Sequence[int]) -> Array:
    """Return what `project` does of each row, shape (rows, 16), the index of a forward for each.

    Args:
        x: Finite numbers in float64, not near overflow; at most 32,768 in a row.
        indices: Numbers of the forwards, from 0.

    >>> project_rows(np.array([[3.0], [6.0]]), [0, 0])[:, :2] * 4
    array([[-3., -3.],
           [-6., -6.]])
    """
    count = x.shape[1]
    if count <= _DIRECT:
        # A product for each row: in one for all, the last bits of a row would depend on how many there are.
        numbers = np.matmul(_direct(x.dtype)[:, :count], x[:, :, None])[:, :, 0]
    else:
        rest = -count % _COLUMNS
        rows = (np.pad(x, ((0, 0), (0, rest))) if rest else x).reshape(len(x), -1, _COLUMNS)
        sums = np.matmul(_rows(x.dtype)[0, :, : rows.shape[1]], rows)
        numbers = np.einsum("sjc,ksc->ksj", _columns().reshape(_SUMS, -1, _COLUMNS), sums).reshape(-1, K) * _SCALE
    signed: Array = numbers * _forwards()[np.asarray(indices) % 1024]
    return signed


def _of_forward(numbers: Array, index: int) -> Array:
    return numbers * _forwards()[index % 1024] if index else numbers


def _projected(parts: Iterator[Tensor]) -> Array:
    """Return the projections of flat pieces of `PIECE` elements each, but the last."""
    part = next(parts)
    if part.numel() <= _DIRECT:
        return _projected_directly(as_array(part))
    sums = _folded(part, 0)
    for number, part in enumerate(parts, 1):
        sums += _folded(part, number * (PIECE // _COLUMNS))
    numbers: Array = np.einsum("sjc,sc->sj", _columns().reshape(_SUMS, -1, _COLUMNS), sums).reshape(K)
    numbers *= _SCALE
    return numbers


def _projected_directly(part: Array) -> Array:
    """Return the projections of at most `_DIRECT` elements."""
    numbers: Array = np.dot(_direct(part.dtype)[:, : part.size], part).astype(np.float64)
    return numbers


def _folded(piece: Tensor, row: int) -> Array:
    """Return the 8 signed sums of the rows of a piece, of which the first has the number ``row``."""
    part = as_array(piece)
    signs = _rows(part.dtype)
    period, block = divmod(row // _ROWS, len(signs))
    count, rest = divmod(part.size, _ROWS * _COLUMNS)
    rows, left = divmod(rest, _COLUMNS)
    sums = np.zeros((_SUMS, _COLUMNS))
    if count:
        whole = piece[: part.size - rest].view(count, _ROWS, _COLUMNS)
        sums += _sum_of_products(signs[block : block + count], whole)
    if rows:
        sums += np.dot(signs[block + count, :, :rows], part[part.size - rest : part.size - left].reshape(rows, -1))
    if left:
        sums[:, :left] += signs[block + count, :, rows, None] * part[part.size - left :]
    return sums * _periods()[period % 4096, :, None] if period else sums


def _sum_of_products(a: Array, b: Tensor) -> Array:
    """Return the sum of the products of two stacks of matrices."""
    if not _torch_is_exact():
        return np.add.reduce(np.matmul(a, as_array(b)), axis=0)  # type: ignore[no-any-return]
    return as_array(torch.bmm(torch.from_numpy(a), b).sum(0))  # on all threads


def _torch_is_exact() -> bool:
    """Whether torch multiplies float32 matrices on the CPU in float32: settings may allow less precision.

    Without MKL there are more such settings than can be read.
    """
    if not torch.backends.mkl.is_available():
        return False
    settings = getattr(torch.backends.mkldnn, "matmul", None)
    if settings is None:  # before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    return settings.fp32_precision in ("none", "ieee")


def _projected_in_float64(x: Tensor) -> Array:
    """Return the projection where elements are not finite or their sums overflow."""
    scale = 0.0
    for piece in pieces(x, PIECE):
        part = as_array(_wide(piece))
        scale = max(scale, np.abs(part[np.isfinite(part)]).max(initial=0).item())
    scale = scale or 1.0
    scaled = (np.divide(as_array(_wide(piece)), scale, dtype=np.float64) for piece in pieces(x, PIECE))
    values = (np.nan_to_num(part, nan=_NAN, posinf=_INFINITE, neginf=-_INFINITE) for part in scaled)
    return _limited(_projected(map(torch.from_numpy, values)), scale)


def _limited(numbers: Array, scale: float) -> Array:
    largest = np.finfo(np.float64).max
    limited: Array = np.clip(numbers * scale, -largest, largest)
    return limited


def _integers(x: Tensor, index: int) -> tuple[Array, int]:
    """Return the projections of the numbers drawn from the hashes, and the digest."""
    weights = _weights(x.numel())
    total = np.uint64(0)

    def drawn() -> Iterator[Tensor]:
        nonlocal total
        scratch = np.empty(min(_HASHED, x.numel()), np.uint64)
        for number, piece in enumerate(pieces(x, PIECE)):
            part = as_array(piece)
            values = np.empty(part.size, np.float32)
            for place, start in enumerate(range(0, part.size, _HASHED), number * (PIECE // _HASHED)):
                hashes = _hashed(part[start : start + _HASHED], scratch)
                total += np.add.reduce(hashes) * weights[place]
                values[start : start + _HASHED] = np.right_shift(hashes, np.uint64(40), out=hashes)
            values -= np.float32(_MEAN)
            values *= np.float32(_SPREAD)
            yield torch.from_numpy(values)

    numbers = _projected(drawn())
    return numbers, int(total * np.uint64(_weight(index)))


def _hashed(part: Array, scratch: Array) -> Array:
    """Return the hash of each integer with its place."""
    places = _places()[: part.size]
    hashes = places + part.view(np.uint64) if part.dtype.itemsize == 8 else places + part.astype(np.uint64)
    return _mixed(hashes, scratch[: part.size])


@functools.cache
def _places() -> Array:
    return np.arange(1, _HASHED + 1, dtype=np.uint64) * np.uint64(_GAMMA)


def _weights(count: int) -> Array:
    """Return an odd number for each 2**14 elements, by which the sum of their hashes is multiplied."""
    return _hashes(_PLACE_SALT, -(-count // _HASHED)) | np.uint64(1)


# --- on another device --------------------------------------------------------------------------------------------


def project_on_device(tensor: Tensor, largest: Tensor, index: int = 0) -> Tensor:
    """Return what `project` returns, as a tensor on the device of ``tensor``; nothing waits for the device.

    The numbers are in the dtype of ``largest``: float64 where the device has it.

    Args:
        tensor: A strided tensor without gradient; it stays as it is.
        largest: The largest finite magnitude in it, no dimension; 0 or an infinity where there is none.
        index: Number of the forward, from 0.

    >>> x = torch.randn(1000)
    >>> numbers = project_on_device(x, x.abs().max().double())
    >>> bool(np.allclose(numbers, project(x), atol=1e-4))
    True
    """
    x = _real(tensor)
    wide = largest.dtype
    tables = _tables(x.device, wide) if type(x) is Tensor else _make_tables(x.device, wide)
    total = largest.new_zeros(_SUMS, _COLUMNS)
    floating = x.is_floating_point()
    scale = torch.where((largest > 0) & (largest < math.inf), largest, 1) if floating else None
    digest: Tensor | None = None
    start = 0
    for piece in pieces(x, _CHUNK):
        if scale is not None:
            part = torch.nan_to_num(piece.to(wide) / scale, nan=_NAN, posinf=_INFINITE, neginf=-_INFINITE)
        else:
            hashes, part_digest = _hashed_on_device(piece, start)
            digest = part_digest if digest is None else digest + part_digest
            part = (_shifted(hashes, 40).to(wide) - _MEAN) * _SPREAD
        total = total + _folded_on_device(part, start // _COLUMNS, tables)
        start += piece.numel()
    numbers: Tensor = (tables[2].view(_SUMS, -1, _COLUMNS) * total.unsqueeze(1)).sum(2).view(K) * _SCALE
    if scale is not None:
        numbers = (numbers * scale).clamp(-torch.finfo(wide).max, torch.finfo(wide).max)
    if index:
        numbers = numbers * tables[3][index % 1024]
    if floating:
        return numbers
    assert digest is not None
    digest = digest * _signed(_weight(index))
    return torch.cat([numbers, digest.view(1).view(torch.uint8).to(wide)])


def _make_tables(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    rows = _rows(np.dtype(np.float64)).transpose(1, 0, 2).reshape(_SUMS, _PERIOD)
    arrays = rows, _periods(), _columns(), _forwards()
    tables = (torch.from_numpy(np.ascontiguousarray(array)).to(dtype) for array in arrays)
    return tuple(table.to(device, non_blocking=True) for table in tables)


_tables = functools.cache(_make_tables)


def _folded_on_device(part: Tensor, row: int, tables: tuple[Tensor, ...]) -> Tensor:
    """Return the 8 signed sums of the rows of a chunk, of which the first, number ``row``, begins a period."""
    signs, periods = tables[:2]
    if part.numel() % _COLUMNS:
        part = torch.nn.functional.pad(part, (0, -part.numel() % _COLUMNS))
    rows = part.view(-1, _COLUMNS)
    total: Tensor | None = None
    for period, one in enumerate(rows.split(_PERIOD), row // _PERIOD):
        if part.dtype == torch.float64:
            sums = signs[:, : len(one)] @ one
        else:  # a product in float32 may be one in TF32
            sums = torch.stack([(s[: len(one), None] * one).sum(0) for s in signs])
        if period:
            sums = sums * periods[period % 4096, :, None]
        total = sums if total is None else total + sums
    assert total is not None
    return total


def _hashed_on_device(piece: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return the hashes of integers as int64, which wraps as uint64 does, and the digest."""
    count = piece.numel()
    places = (torch.arange(count, device=piece.device) % _HASHED + 1) * _signed(_GAMMA)
    hashes = _mixed_on_device(piece.to(torch.int64) + places)
    numbers = torch.arange(-(-count // _HASHED), device=piece.device) + ((_PLACE_SALT << 32) + 1 + start // _HASHED)
    weights = _mixed_on_device(numbers * _signed(_GAMMA)) | 1
    sums = torch.nn.functional.pad(hashes, (0, -count % _HASHED)).view(-1, _HASHED).sum(1)
    return hashes, (sums * weights).sum()


def _mixed_on_device(z: Tensor) -> Tensor:
    for shift, factor in _STEPS:
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return z


def _shifted(z: Tensor, shift: int) -> Tensor:
    """Return int64 shifted right as uint64 is."""
    return (z >> shift) & ((1 << (64 - shift)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


# --- several ------------------------------------------------------------------------------------------------------


def read(numbers: Array) -> tuple[tuple[float, ...], str | None]:
    """Return the fingerprint and, of integers, the digest, from what `project` returned, or a sum of such.

    >>> fingerprint, digest = read(project(torch.tensor([3, 1, 2])))
    >>> len(fingerprint), digest
    (16, '871b2d45ffdae62f')
    """
    fingerprint = tuple(numbers[:K].tolist())
    if len(numbers) == K:
        return fingerprint, None
    digest = sum(int(byte) << 8 * place for place, byte in enumerate(numbers[K:].tolist())) % 2**64
    return fingerprint, f"{digest:016x}"
