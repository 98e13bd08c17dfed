"""Fingerprints of tensors: 16 signed random projections, from which the distance of two tensors is estimated.

A tensor is n samples, or one. The elements of a sample are taken in logical (row-major) order, in rows of 256, the last
of which may be shorter. Projection k adds each element with the sign
``sample[k // 2, n] * row[r, k // 2] * column[k, c]``, so that the mean of its square is the tensor's squared norm, and
so that most of the work is one thin product: 8 signed sums of the rows. The signs of rows and columns never change.
Those of a sample come from what the model was given for it (see `samples`), so that the fingerprints of the parts of a
batch add up to that of the batch.

The standard error of `estimated_change` is 18 % for a generic difference, and 25 % where the difference is in one
column or the same everywhere. A constant shift over any number of elements of one sample is estimated at 0.6 to 1.5
times its size. A difference is missed only if it is constructed for that.

Integers are hashed with their position in the sample and the hash of that: all hashes together are the digest, which is
exact, and each counts in the fingerprint as a number drawn from its hash with mean 0 and variance 1, from which the
share of elements that differ is estimated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe.models import as_array
from pytest_modelprobe.record import estimated_change

from .samples import WHOLE, Samples, mix, shifted, signed
from .signs import (
    COLUMNS,
    GAMMA,
    HASHED,
    PERIOD,
    PIECE,
    SUMS,
    Array,
    K,
    columns,
    mixed,
    periods,
    places,
    rows,
    weights_of_places,
)

__all__ = ["K", "estimated_change", "project", "project_on_device", "project_rows", "read"]

_BYTES = 8  # of a digest
_SCALE = K**-0.5
_ROWS = 128  # of one product: (8, 128) @ (128, 256) is the largest for which OpenBLAS starts no threads
_CHUNK = 1 << 23  # elements handled at a time on a device; whole periods

_FLOATS = (torch.float32, torch.float64)

_MEAN, _SPREAD = (2**24 - 1) / 2, math.sqrt(12) / 2**24  # of the 24 bits of a hash that stand for an integer
_INFINITE, _NAN = 2.0, 4.0  # values that stand for non-finite elements, in units of the largest finite magnitude


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


def _parts(x: Tensor, samples: int, size: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield elements of whole samples, shape (samples, elements); those of a sample above ``size`` in several parts.

    Each comes with the number of its first sample, and that of its first element within the sample.
    """
    length = x.numel() // samples
    if not length:
        return
    if length <= size:
        together = size // length
        for number, piece in enumerate(pieces(x, together * length)):
            yield number * together, 0, piece.view(-1, length)
    else:
        for sample in range(samples):
            for number, piece in enumerate(pieces(x if samples == 1 else x[sample], size)):
                yield sample, number * size, piece.view(1, -1)


# --- on the CPU ---------------------------------------------------------------------------------------------------


def project(tensor: Tensor, samples: Samples = WHOLE) -> Array:
    """Return the fingerprint of a plain tensor on the CPU, and after it the bytes of the digest of integers.

    Args:
        tensor: A strided tensor without gradient; it stays as it is.
        samples: Those of the forward.

    >>> project(torch.tensor([3.0]))[:4] * 4
    array([-3., -3.,  3.,  3.])
    >>> project(torch.tensor([3])).shape
    (24,)
    """
    signs = samples.signs(tensor.shape)
    with np.errstate(all="ignore"):  # an overflow is found in the result
        x = _real(tensor)
        if not x.is_floating_point():
            numbers, digest = _integers(x, signs, samples.hashes(tensor.shape))
            return np.concatenate([numbers, np.frombuffer(digest.to_bytes(_BYTES, "little"), np.uint8)])
        numbers = _projected(x, signs, _wide)
        if not math.isfinite(np.add.reduce(numbers)):
            numbers = _projected_in_float64(x, signs)
        return numbers


def project_rows(x: Array, signs: Array) -> Array:
    """Return what `project` does of each row, shape (rows, 16).

    Args:
        x: Finite numbers in float64, not near overflow; at most 32,768 in a row.
        signs: Of the samples of each row, shape (rows, 8, samples).

    >>> project_rows(np.array([[3.0], [6.0]]), np.ones((2, 8, 1)))[:, :2] * 4
    array([[-3., -3.],
           [-6., -6.]])
    """
    count, _, samples = signs.shape
    length = x.shape[1] // samples
    several = -(-length // COLUMNS)
    table = rows(x.dtype)[:, :several]
    if several > 1:
        x = x.reshape(count, samples, length)
        x = np.pad(x, ((0, 0), (0, 0), (0, -length % COLUMNS))) if length % COLUMNS else x
        x, length = x.reshape(count, samples * several, COLUMNS), COLUMNS
    else:
        x = x.reshape(count, samples, length)
    # A product for each row: in one for all, the last bits of a row would depend on how many there are.
    sums = np.matmul((signs[..., None] * table[:, None]).reshape(count, SUMS, -1), x)
    halves = columns().reshape(SUMS, -1, COLUMNS)[:, :, :length]
    numbers: Array = np.matmul(halves, sums[..., None]).reshape(count, K) * _SCALE
    return numbers


def _projected(x: Tensor, signs: Array, convert: Callable[[Tensor], Tensor]) -> Array:
    """Return the projections of the elements as ``convert`` returns them, one part at a time."""
    sums = np.zeros((SUMS, COLUMNS))
    for sample, first, part in _parts(x, signs.shape[1], PIECE):
        _add(sums, convert(part), signs[:, sample : sample + len(part)], first)
    return _of_sums(sums)


def _of_sums(sums: Array) -> Array:
    """Return the projections from the 8 signed sums of the rows, shape (8, 256)."""
    return np.einsum("sjc,sc->sj", columns().reshape(SUMS, -1, COLUMNS), sums).reshape(K) * _SCALE  # type: ignore[no-any-return]


def _add(sums: Array, part: Tensor, signs: Array, first: int) -> None:
    """Add the signed rows of some samples, shape (samples, elements), of which the first element begins a period."""
    length = part.shape[1]
    whole, rest = divmod(length, COLUMNS)
    table = rows(np.dtype(str(part.dtype).removeprefix("torch.")))
    if first:
        signs = signs * periods()[first // PIECE % len(periods()), :, None]
    signs = signs.astype(table.dtype)
    if whole:
        of_rows = (signs[:, :, None] * table[:, None, :whole]).reshape(SUMS, -1)
        sums += _product(of_rows, part[:, : length - rest].reshape(-1, COLUMNS))
    if rest:
        sums[:, :rest] += _product(signs * table[:, whole, None], part[:, length - rest :])


def _product(a: Array, b: Tensor) -> Array:
    """Return the product of 8 rows of signs and many rows of elements."""
    count, rest = divmod(len(b), _ROWS)
    if not count or (count == 1 and not rest):
        return np.dot(a, as_array(b))  # type: ignore[no-any-return]
    end = count * _ROWS
    left = a[:, :end].reshape(SUMS, count, _ROWS).transpose(1, 0, 2)
    right = b[:end].unflatten(0, (count, _ROWS))
    if _torch_is_exact():
        total = as_array(torch.bmm(torch.from_numpy(left), right).sum(0))  # on all threads
    else:
        total = np.add.reduce(np.matmul(left, as_array(right)), axis=0)
    return total + np.dot(a[:, end:], as_array(b[end:])) if rest else total


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


def _projected_in_float64(x: Tensor, signs: Array) -> Array:
    """Return the projection where elements are not finite or their sums overflow."""
    scale = 0.0
    for piece in pieces(x, PIECE):
        part = as_array(_wide(piece))
        scale = max(scale, np.abs(part[np.isfinite(part)]).max(initial=0).item())
    scale = scale or 1.0

    def scaled(part: Tensor) -> Tensor:
        divided = np.divide(as_array(_wide(part)), scale, dtype=np.float64)
        return torch.from_numpy(np.nan_to_num(divided, nan=_NAN, posinf=_INFINITE, neginf=-_INFINITE))

    largest = np.finfo(np.float64).max
    limited: Array = np.clip(_projected(x, signs, scaled) * scale, -largest, largest)
    return limited


def _integers(x: Tensor, signs: Array, hashes: Array) -> tuple[Array, int]:
    """Return the projections of the numbers drawn from the hashes, and the digest."""
    samples = len(hashes)
    of_places = weights_of_places(x.numel() // samples)
    sums = np.zeros((SUMS, COLUMNS))
    total = np.uint64(0)
    scratch = np.empty(HASHED, np.uint64)
    for sample, first, part in _parts(x, samples, PIECE):
        values, drawn = as_array(part), np.empty(part.shape, np.float32)
        together = max(HASHED // part.shape[1], 1) if part.numel() else 1
        for a in range(0, len(values), together):
            for b in range(0, part.shape[1], HASHED):
                block = values[a : a + together, b : b + HASHED]
                of_samples = hashes[sample + a : sample + a + len(block), None]
                found = _hashed(block, of_samples, scratch[: block.size].reshape(block.shape))
                total += np.add.reduce(found, axis=None) * of_places[(first + b) // HASHED]
                drawn[a : a + together, b : b + HASHED] = np.right_shift(found, np.uint64(40), out=found)
        drawn -= np.float32(_MEAN)
        drawn *= np.float32(_SPREAD)
        _add(sums, torch.from_numpy(drawn), signs[:, sample : sample + len(part)], first)
    return _of_sums(sums), int(total)


def _hashed(block: Array, of_samples: Array, scratch: Array) -> Array:
    """Return the hash of each integer with its place and its sample."""
    wide = block.view(np.uint64) if block.dtype.itemsize == 8 else block.astype(np.uint64)
    return mixed(of_samples + places()[: block.shape[1]] + wide, scratch)


# --- on another device --------------------------------------------------------------------------------------------


def project_on_device(tensor: Tensor, largest: Tensor, samples: Samples = WHOLE) -> Tensor:
    """Return what `project` returns, as a tensor on the device of ``tensor``; nothing waits for the device.

    The numbers are in the dtype of ``largest``: float64 where the device has it.

    Args:
        tensor: A strided tensor without gradient; it stays as it is.
        largest: The largest finite magnitude in it, no dimension; 0 or an infinity where there is none.
        samples: Those of the forward.

    >>> x = torch.randn(1000)
    >>> numbers = project_on_device(x, x.abs().max().double())
    >>> bool(np.allclose(numbers, project(x), atol=1e-4))
    True
    """
    x = _real(tensor)
    wide = largest.dtype
    signs, of_samples = samples.signs_on(x.device, tensor.shape, wide)
    tables = _tables(x.device, wide) if type(x) is Tensor else _make_tables(x.device, wide)
    total = largest.new_zeros(SUMS, COLUMNS)
    floating = x.is_floating_point()
    scale = torch.where((largest > 0) & (largest < math.inf), largest, 1) if floating else None
    digest = of_samples.new_zeros(())
    for sample, first, part in _parts(x, len(of_samples), _CHUNK):
        if scale is not None:
            values = torch.nan_to_num(part.to(wide) / scale, nan=_NAN, posinf=_INFINITE, neginf=-_INFINITE)
        else:
            hashes, of_places = _hashed_on_device(part, of_samples[sample : sample + len(part), None], first)
            digest = digest + (hashes * of_places).sum()
            values = (shifted(hashes, 40).to(wide) - _MEAN) * _SPREAD
        total = total + _summed_on_device(values, first, signs[:, sample : sample + len(part)], tables)
    numbers: Tensor = (tables[2].view(SUMS, -1, COLUMNS) * total.unsqueeze(1)).sum(2).view(K) * _SCALE
    if scale is not None:
        return (numbers * scale).clamp(-torch.finfo(wide).max, torch.finfo(wide).max)
    return torch.cat([numbers, digest.view(1).view(torch.uint8).to(wide)])


def _make_tables(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    arrays = rows(np.dtype(np.float64)), np.ascontiguousarray(periods().T), columns()
    tables = (torch.from_numpy(array).to(dtype) for array in arrays)
    return tuple(table.to(device, non_blocking=True) for table in tables)


_tables = functools.cache(_make_tables)


def _summed_on_device(part: Tensor, first: int, signs: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    """Return the 8 signed sums of the rows of some samples, of which the first begins a period."""
    part = torch.nn.functional.pad(part, (0, -part.shape[1] % COLUMNS))
    numbers = torch.arange(part.shape[1] // COLUMNS, device=part.device) + first // COLUMNS
    of_rows = tables[0][:, numbers % PERIOD] * tables[1][:, numbers // PERIOD % tables[1].shape[1]]
    of_rows = (signs[:, :, None] * of_rows[:, None]).reshape(SUMS, -1)
    elements = part.view(-1, COLUMNS)
    if part.dtype == torch.float64:
        return of_rows @ elements
    return torch.stack([(s[:, None] * elements).sum(0) for s in of_rows])  # a product may be one in TF32


def _hashed_on_device(part: Tensor, of_samples: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return the hashes of integers as int64, which wraps as uint64 does, and the weight of each place."""
    numbers = torch.arange(part.shape[1], device=part.device)
    hashes = mix(part.to(torch.int64) + (numbers % HASHED + 1) * signed(GAMMA) + of_samples)
    of_places = torch.from_numpy(weights_of_places(first + part.shape[1])[first // HASHED :].view(np.int64))
    return hashes, of_places.to(part.device, non_blocking=True)[numbers // HASHED]


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
