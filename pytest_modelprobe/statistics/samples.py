"""The samples of a batch, each with a hash of its own, so that the fingerprints of the parts of a batch add up.

A sample is known by what the model was given for it. So it has the same hash at any world size, in any order and in any
microbatch. The hash takes integers as they are. Of floating elements it takes what rounding hardly ever changes: the
exponent of their norm, and four coarse projections. So another machine, a perturbation or a narrower dtype leaves the
hash as it is. Samples that are equal in every bit are numbered, and those of earlier microbatches count too.

What is computed by torch here is also computed by numpy for the CPU, with the same results, because a hook on the model
runs for each forward and numpy's calls take a fraction of the time for so few numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe.models import as_array, as_real
from pytest_modelprobe.record import batch_sizes

from .readable import ambient_modes_disabled, as_plain_tensor
from .signs import GAMMA, STEPS, Array, hashes, highest_bits, mixed, places

_MOST = 1 << 12  # samples that are remembered: a limit, because without optimizer steps memory would grow for ever
_READ = 256  # elements of a sample that are looked at, evenly spaced: at least so many, and up to twice as many
_PROJECTIONS = 4
_SALT = 7  # chooses the signs of these projections among the outputs of splitmix64
_TINY = 1e-30  # the least norm to divide by, for samples of zeros
_NO_BATCH = np.zeros(1, np.uint64)
_OF_NUMPY = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}


class Samples:
    """The samples of a forward, each with a hash from which its signs are drawn.

    Args:
        hashes: One int64 hash per sample, or `None` if there is no batch.
        sizes: Sizes of dimension 0 of the values that have the batch there.
        keys: One int64 key per sample. Equal samples have equal keys. A NumPy array, or a tensor if the samples are on
            another device.
    """

    def __init__(
        self,
        hashes: Tensor | None = None,
        sizes: Collection[int] = (),
        keys: Array | Tensor | None = None,
    ) -> None:
        self.keys = keys
        self._hashes = hashes
        self._sizes = frozenset(sizes)
        self._here: Array | None = None

    def hashes(self, shape: Sequence[int]) -> Array:
        """Return the hashes of the samples of a value, shape (n,), uint64.

        If dimension 0 of the value is the batch, there is one for each sample. Else there is one for the whole value.
        """
        if self._hashes is None or not shape or shape[0] not in self._sizes:  # `has_batch`, without the call
            return _NO_BATCH
        if self._here is None:
            with ambient_modes_disabled():
                self._here = as_array(self._hashes.cpu()).view(np.uint64)
        return self._here

    def hashes_on(self, device: torch.device, shape: Sequence[int]) -> Tensor:
        """Return what `hashes` returns, as int64 on a device. Nothing waits for the device."""
        if self._hashes is None or not self.has_batch(shape):
            return torch.zeros(1, dtype=torch.int64, device=device)
        return self._hashes.to(device, non_blocking=True)

    def has_batch(self, shape: Sequence[int]) -> bool:
        """Return whether dimension 0 of a value is the batch."""
        return self._hashes is not None and bool(shape) and shape[0] in self._sizes


WHOLE = Samples()
"""The samples of a tensor without a batch."""


class SeenSamples:
    """Counts the samples of the microbatches of a batch, so that equal ones are told apart.

    >>> seen, x = SeenSamples(), torch.ones(1, 3)
    >>> first = samples_of([x], seen=seen)
    >>> seen.add(first)
    >>> bool((first.hashes((1, 3)) == samples_of([x], seen=seen).hashes((1, 3))).all())
    False
    """

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        self._elsewhere: Tensor | None = None
        """Keys on another device. They are counted there, so that nothing waits for them."""

    def add(self, samples: Samples) -> None:
        """Count the samples of a microbatch."""
        keys = samples.keys
        if isinstance(keys, Tensor):
            before = self._elsewhere
            with ambient_modes_disabled():
                known = [] if before is None or before.device != keys.device else [before]
                self._elsewhere = torch.cat([*known, keys])[-_MOST:]
        elif keys is not None:
            for key in keys.tolist():
                self._times[key] = self._times.pop(key, 0) + 1
            for oldest in list(self._times)[:-_MOST] if len(self._times) > _MOST else ():
                del self._times[oldest]

    def times(self, keys: Array | Tensor) -> Tensor | None:
        """Return how often each key was counted, in int64, or `None` if none was."""
        if isinstance(keys, Tensor):
            if self._elsewhere is None or self._elsewhere.device != keys.device:
                return None
            earlier = self._elsewhere.sort().values
            return torch.searchsorted(earlier, keys, right=True) - torch.searchsorted(earlier, keys)
        times = [self._times.get(key, 0) for key in keys.tolist()]
        return torch.tensor(times, dtype=torch.int64) if any(times) else None


def samples_of(inputs: Iterable[Tensor], seen: SeenSamples | None = None) -> Samples:
    """Return the samples of a forward, given its arguments. Nothing waits for another device.

    The batch is dimension 0 of the first tensor that has one. See `batch_sizes` for the values that have it.

    Args:
        inputs: The arguments.
        seen: The samples of earlier microbatches of the same batch.

    >>> x = torch.randn(3, 5)
    >>> hashes, reordered = samples_of([x]).hashes((3, 7)), samples_of([x.flip(0)]).hashes((3, 7))
    >>> hashes.shape, bool((hashes[::-1] == reordered).all())
    ((3,), True)
    """
    with ambient_modes_disabled():
        batch: list[Tensor] = []
        for tensor in inputs:
            plain, reason = as_plain_tensor(tensor)
            if reason is None and plain.dim() and plain.numel():
                first = batch[0] if batch else plain
                if len(plain) == len(first) and plain.device == first.device:
                    batch.append(plain)
        if not batch:
            return WHOLE
        size, *inner = batch[0].shape
        try:
            hashes, keys = _hashes(batch, seen)
            return Samples(hashes, batch_sizes(size, inner), keys)
        except NotImplementedError:  # the device lacks an operation, so its values count as wholes
            return WHOLE


def _hashes(batch: Sequence[Tensor], seen: SeenSamples | None) -> tuple[Tensor, Array | Tensor]:
    """Return a hash of each sample, in int64, and a key that only equal samples share.

    The hash gives the signs. It may be the same for samples that differ, since it is coarse. The key tells which
    samples are equal in every bit, and have to be numbered.
    """
    keys: Array | Tensor | None = None
    if batch[0].is_cpu:
        arrays = [_read_by_numpy(tensor) for tensor in batch]
        with np.errstate(all="ignore"):
            keys = _keys_by_numpy(arrays)
            found = None if keys is None else _hashes_by_numpy(arrays)
            if keys is not None and found is not None:
                times = None if seen is None else seen.times(keys)
                if times is not None:
                    found ^= mixed(as_array(times).view(np.uint64) * np.uint64(GAMMA))
                return torch.from_numpy(found.view(np.int64)), keys
    read = [_elements_read(tensor) for tensor in batch]
    exact = _row_hashes([_bits(x) for x in read])
    numbers = _occurrences(exact)
    if keys is None:
        keys = as_array(exact).copy() if exact.is_cpu else exact
    if seen is not None and (times := seen.times(keys)) is not None:
        numbers = numbers + times
    hashes = _row_hashes([_summaries(x) if x.is_floating_point() else x for x in read])
    return hashes ^ mix(numbers * signed(GAMMA)), keys  # number 0 leaves the hash as it is


def _read_by_numpy(tensor: Tensor) -> Array:
    """Return what `_elements_read` returns, in a fraction of the time.

    Each row lies in one piece, because how a sum rounds depends on it.
    """
    if tensor.dtype not in _OF_NUMPY:
        return np.ascontiguousarray(as_array(_elements_read(tensor)))
    x = as_array(tensor)
    x = x.reshape(len(x), -1)
    return x[:, :: x.shape[1] // _READ | 1].astype(np.float64 if x.dtype.kind == "f" else np.int64, order="C")


def _keys_by_numpy(batch: Sequence[Array]) -> Array | None:
    """Return the keys in int64, in a fraction of the time of a hash of all bits.

    Returns `None` if samples are not finite.
    """
    keys: Array | None = None
    for x in batch:
        if x.dtype.kind == "f":
            sums = np.einsum("nm,m->n", x, _weights()[: x.shape[1]])
            if not np.isfinite(np.add.reduce(sums)):
                return None
            found = sums.view(np.uint64)
        else:
            found = _row_hashes_by_numpy([x])
        keys = found if keys is None else mixed(keys) + found
    return None if keys is None else keys.view(np.int64)


@functools.cache
def _weights() -> Array:
    """Return weights of elements, with which samples that differ have different sums."""
    return hashes(_SALT + 1, 2 * _READ).astype(np.float64) / 2.0**64 + 0.5


def _hashes_by_numpy(batch: Sequence[Array]) -> Array | None:
    """Return the hashes in a tenth of the time, or `None` if samples are equal or not finite."""
    norms = [np.sqrt(np.einsum("nm,nm->n", x, x)) if x.dtype.kind == "f" else None for x in batch]
    if not all(norm is None or np.isfinite(np.add.reduce(norm)) for norm in norms):
        return None
    parts = [x if norm is None else _summaries_by_numpy(x, norm) for x, norm in zip(batch, norms, strict=True)]
    found = _row_hashes_by_numpy(parts)
    known = [some.tolist() for some in (*norms, found) if some is not None]
    # Samples that are equal have equal norms, so that different norms are enough.
    return found if any(len(set(some)) == len(some) for some in known) else None


def _summaries_by_numpy(x: Array, norm: Array) -> Array:
    shares = x.dot(_patterns_by_numpy()[: x.shape[1]]) / np.maximum(norm, _TINY)[:, None]
    summaries = np.empty((len(x), 1 + _PROJECTIONS), np.int64)
    summaries[:, 0] = np.frexp(1.1 * norm)[1]
    summaries[:, 1:] = np.floor(2 * shares + 0.3)
    return summaries


def _row_hashes_by_numpy(parts: Sequence[Array]) -> Array:
    numbers = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    hashed = mixed(numbers.view(np.uint64) + places()[: numbers.shape[1]])
    return mixed(np.add.reduce(hashed, axis=1))


def _elements_read(tensor: Tensor) -> Tensor:
    """Return elements of each sample, float64 where the device has it, or int64."""
    x = as_real(tensor)
    x = x.reshape(len(x), -1)
    x = x[:, :: x.shape[1] // _READ | 1]
    if not x.is_floating_point():
        return x.to(torch.int64)
    return x.to(torch.float64 if x.device.type in ("cpu", "cuda", "meta") else torch.float32)


def _bits(x: Tensor) -> Tensor:
    """Return numbers as integers with the same bits."""
    if not x.is_floating_point():
        return x
    return x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32).long()


def _summaries(x: Tensor) -> Tensor:
    """Return five integers for each sample that rounding hardly ever changes."""
    x = torch.nan_to_num(x, 0.0, 0.0, 0.0)
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    patterns = _patterns(x.device, x.dtype)[: x.shape[1]]
    shares = (x @ patterns if x.dtype == torch.float64 else (x[:, :, None] * patterns).sum(1)) / norm.clamp(min=_TINY)
    # The factor 1.1 and the term 0.3 keep steps away from common values, where rounding would choose: a one-hot sample
    # has the norm 1 and the shares +-1, and a sample that cancels has the share 0.
    return torch.cat([torch.frexp(1.1 * norm).exponent, (2 * shares + 0.3).floor()], 1).to(torch.int64)


@functools.cache
def _patterns(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(_patterns_by_numpy()).to(dtype).to(device, non_blocking=True)


@functools.cache
def _patterns_by_numpy() -> Array:
    return highest_bits(hashes(_SALT, 2 * _READ), _PROJECTIONS)


def _row_hashes(parts: Sequence[Tensor]) -> Tensor:
    numbers = torch.cat(list(parts), 1) if len(parts) > 1 else parts[0]
    of_places = torch.arange(1, numbers.shape[1] + 1, device=numbers.device) * signed(GAMMA)
    return mix(mix(numbers + of_places).sum(1))


def _occurrences(found: Tensor) -> Tensor:
    """Return for each hash how many equal ones come before it."""
    ordered, order = found.sort(stable=True)
    numbers = torch.arange(len(found), device=found.device)
    new = torch.cat([ordered[:1] == ordered[:1], ordered[1:] != ordered[:-1]])
    first = torch.where(new, numbers, 0).cummax(0).values
    return torch.empty_like(numbers).scatter_(0, order, numbers - first)


def mix(z: Tensor) -> Tensor:
    """Return the output function of splitmix64. It is computed in int64, which wraps as uint64 does."""
    for shift, factor in STEPS:
        z = (z ^ shifted(z, shift)) * signed(factor)
    return z


def shifted(z: Tensor, shift: int) -> Tensor:
    """Return int64 shifted right as uint64 is."""
    return (z >> shift) & ((1 << (64 - shift)) - 1)


def signed(number: int) -> int:
    """Return a number below 2**64 as the int64 with its bits."""
    return number - (1 << 64) if number >= 1 << 63 else number
