"""Fingerprints of tensors: 16 signed random projections, from which the distance of two tensors is estimated.

Moments cannot tell permuted heads, a view in place of a transpose, or swapped queries and keys from what they should
be. Projections can, and the 16 numbers are small enough to store in a text file.

A tensor is n samples, or one. The elements of a sample are taken in logical (row-major) order, in rows of 256, the last
of which may be shorter. The hash of the sample and the number of the row give 64 bits, and these give each row one of 8
masks, one of 256 orders and 16 signs. Projection k adds the element of column c with the sign

    sign[n, r, t] * mask[n, r, c] * column[c, t]    where t = order[n, r, k]

and is divided by 4, so that the sum of the squares of the 16 projections is on average the squared norm.
The hash comes from what the model was given for the sample (see `samples`), so that the fingerprints of the parts of a
batch add up to that of the batch.

The projections are as good as independent, whatever the tensor is. Of a million random fingerprints about four are
below a third of the norm, as chance has it with 16 independent sums, also where samples are equal, constant or one-hot.
The standard error of `estimated_change` is 18 %. A constant shift over any number of elements of the first forward is
estimated at 0.7 to 1.35 times its size. A difference is missed only if it is constructed for that.

Integers are hashed, each with its position in the sample and the hash of the sample. All hashes together are the
digest, which is exact. In the fingerprint, each integer counts as a number drawn from its hash with mean 0 and variance
1, from which the share of elements that differ is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe.models import as_array, kept_on_devices, sent

from .samples import (
    COLUMNS,
    GAMMA,
    HASHED,
    MASKS,
    ORDER_BITS,
    ORDERS,
    SIGN_BITS,
    WHOLE,
    Array,
    K,
    Samples,
    columns,
    masks,
    mix,
    orders,
    shifted,
    signed,
    turn,
    weights_of_places,
)

_BYTES = 8  # bytes of a digest
_SCALE = K**-0.5
PIECE = 1 << 18  # elements handled at a time on the CPU: two megabytes in float64, which stay in the cache
_CHUNK = 1 << 23  # elements handled at a time on a device; both are whole rows
_MEAN, _SPREAD = (2**24 - 1) / 2, math.sqrt(12) / 2**24  # these normalize the 24 bits that stand for an integer
_INFINITE, _NAN = 2.0, 4.0  # these stand for elements that are not finite, in units of the largest finite magnitude


# --- elements in logical order ------------------------------------------------------------------------------------


def _real(x: Tensor) -> Tensor:
    """Return the elements as numbers: complex ones as pairs, and none of them lazily negated or conjugated."""
    if x.is_complex():
        x = torch.view_as_real((x.to(torch.complex64) if x.dtype == torch.complex32 else x).resolve_conj())
    return x.view(torch.uint8) if x.dtype == torch.bool else x.resolve_neg()


def _parts(x: Tensor, samples: int, size: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield elements of whole samples, shape (samples, elements), and samples larger than ``size`` in several parts.

    Each part comes with the number of its first sample, and of its first element within the sample.
    """
    length = x.numel() // samples
    if not length:
        return
    if length <= size:
        together = size // length
        for number, piece in enumerate(x.reshape(-1).split(together * length)):
            yield number * together, 0, piece.view(-1, length)
    else:
        for sample in range(samples):
            for number, piece in enumerate((x if samples == 1 else x[sample]).reshape(-1).split(size)):
                yield sample, number * size, piece.view(1, -1)


# --- one tensor ---------------------------------------------------------------------------------------------------


def project(tensor: Tensor, samples: Samples = WHOLE) -> Array:
    """Return the fingerprint of a plain tensor on the CPU, and after it the bytes of the digest of integers.

    Args:
        tensor: A strided tensor without gradient. It stays as it is.
        samples: The samples of the forward.

    >>> project(torch.tensor([3.0]))[:4] * 4
    array([ 3.,  3.,  3., -3.])
    >>> project(torch.tensor([3])).shape
    (24,)
    """
    # The largest magnitude scales all sums. It is looked for first, which costs a second read of the tensor.
    largest = torch.zeros((), dtype=torch.float64)
    x = _real(tensor)
    for piece in x.reshape(-1).split(PIECE) if x.is_floating_point() and x.numel() else ():
        wide = piece.double().abs()
        largest = torch.maximum(largest, torch.where(wide < math.inf, wide, 0).amax())
    return as_array(project_on_device(tensor, largest, samples))


def project_on_device(tensor: Tensor, largest: Tensor, samples: Samples = WHOLE) -> Tensor:
    """Return what `project` returns, as a tensor on the device of ``tensor``. Nothing waits for the device.

    The numbers are in the dtype of ``largest``: float64 if the device has it.

    Args:
        tensor: A strided tensor without gradient. It stays as it is.
        largest: The largest finite magnitude in it, without dimensions. 0 or an infinity if there is none.
        samples: The samples of the forward.

    >>> x = torch.randn(1000)
    >>> numbers = project_on_device(x, x.abs().max().double())
    >>> bool(np.allclose(numbers, project(x), atol=1e-4))
    True
    """
    x = _real(tensor)
    wide = largest.dtype
    hashes = samples.hashes_on(x.device, tensor.shape)
    tables = _tables(x.device, wide)
    total = largest.new_zeros(K)
    floating = x.is_floating_point()
    # Elements are divided by the largest, as sums of huge ones would overflow. Those that are not finite have to count
    # as something in these units.
    scale = torch.where((largest > 0) & (largest < math.inf), largest, 1) if floating else None
    digest = hashes.new_zeros(())
    for sample, first, part in _parts(x, len(hashes), PIECE if x.is_cpu else _CHUNK):
        of_samples = hashes[sample : sample + len(part), None]
        if scale is not None:
            values = torch.nan_to_num(part.to(wide) / scale, nan=_NAN, posinf=_INFINITE, neginf=-_INFINITE)
        else:
            of_integers, of_places = _hashed(part, of_samples, first)
            digest = digest + (of_integers * of_places).sum()
            values = (shifted(of_integers, 40).to(wide) - _MEAN) * _SPREAD
        total = total + _signed_sums(values, of_samples, first, tables)
    numbers: Tensor = total * _SCALE
    if scale is not None:
        return (numbers * scale).clamp(-torch.finfo(wide).max, torch.finfo(wide).max)
    return torch.cat([numbers, digest.view(1).view(torch.uint8).to(wide)])


_FEW = 1 << 18
"""Up to so many elements are multiplied with all columns at once, in 32 MB: on a device each kernel takes as long."""


@kept_on_devices
def _tables(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.from_numpy(masks()).to(dtype), torch.from_numpy(columns()).to(dtype), torch.from_numpy(orders())


def _signed_sums(part: Tensor, hashes: Tensor, first: int, tables: tuple[Tensor, ...]) -> Tensor:
    """Return the 16 signed sums of some samples. The first element begins a row."""
    of_masks, of_columns, of_orders = tables
    width = min(part.shape[1], COLUMNS)
    part = torch.nn.functional.pad(part, (0, -part.shape[1] % width))
    numbers = torch.arange(1, part.shape[1] // width + 1, device=part.device) + first // COLUMNS
    bits = mix(hashes + numbers * signed(GAMMA)).view(-1, 1)
    masked = part.reshape(-1, width) * of_masks[bits[:, 0] & MASKS - 1, :width]
    if part.is_cpu and part.dtype == torch.float64:
        values = masked @ of_columns[:width]
    # A matrix product may be computed in TF32, and it raises where the user wants algorithms to be deterministic.
    elif masked.numel() <= _FEW:
        values = (masked[:, None] * of_columns.T[:, :width]).sum(2)
    else:
        values = torch.stack([(masked * column[:width]).sum(1) for column in of_columns.T], 1)
    minus = bits >> torch.arange(SIGN_BITS, SIGN_BITS + K, device=part.device) & 1
    values = torch.where(minus == 1, -values, values)
    return values.gather(1, of_orders[bits[:, 0] >> ORDER_BITS & ORDERS - 1]).sum(0)


def _hashed(part: Tensor, of_samples: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return the hashes of integers in int64, which wraps as uint64 does, and the weight of each place."""
    numbers = torch.arange(part.shape[1], device=part.device)
    hashes = mix(part.to(torch.int64) + (numbers % HASHED + 1) * signed(GAMMA) + of_samples)
    of_places = torch.from_numpy(weights_of_places(first + part.shape[1])[first // HASHED :].view(np.int64))
    return hashes, sent(of_places, part.device)[numbers // HASHED]


# --- several ------------------------------------------------------------------------------------------------------


def turned(numbers: Array, number: int) -> Array:
    """Return a fingerprint, and the bytes of a digest, with other signs, which the number chooses.

    Sums over forwards need it. With the same signs, a value that is equal in all forwards would add up with its full
    size, and one that has another sign in every second forward would cancel.

    >>> turned(project(torch.tensor([3.0])), 1)[:4] * 4
    array([3., 3., 3., 3.])
    """
    signs, order, factor = turn(number)
    found: Array = numbers[order] * signs
    if len(numbers) == K:
        return found
    digest = np.array([_digest(numbers) * factor % 2**64], np.uint64)
    return np.concatenate([found, digest.view(np.uint8)])


def turned_on_device(numbers: Tensor, number: int) -> Tensor:
    """Return the same on the device of ``numbers``. Nothing waits for the device."""
    signs, order, factor = turn(number)
    places = sent(torch.from_numpy(order), numbers.device)
    found: Tensor = numbers[places] * sent(torch.from_numpy(signs).to(numbers.dtype), numbers.device)
    if len(numbers) == K:
        return found
    shifts = torch.arange(0, 8 * _BYTES, 8, device=numbers.device)
    digest = (numbers[K:].to(torch.int64) << shifts).sum() * signed(factor)
    return torch.cat([found, digest.view(1).view(torch.uint8).to(numbers.dtype)])


def _digest(numbers: Array) -> int:
    return sum(int(byte) << 8 * place for place, byte in enumerate(numbers[K:].tolist())) % 2**64


def read(numbers: Array) -> tuple[tuple[float, ...], str | None]:
    """Return the fingerprint and the digest (`None` unless of integers) from what `project` returned, or a sum of such.

    >>> fingerprint, digest = read(project(torch.tensor([3, 1, 2])))
    >>> len(fingerprint), digest
    (16, '871b2d45ffdae62f')
    """
    fingerprint = tuple(numbers[:K].tolist())
    if len(numbers) == K:
        return fingerprint, None
    return fingerprint, f"{_digest(numbers):016x}"
