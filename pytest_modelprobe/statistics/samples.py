"""The samples of a batch, each with a hash of its own, so that the fingerprints of the parts of a batch add up.

A sample is known by what the model was given for it, and that is its part of the first input. So it has the same hash
at any world size, in any order and in any microbatch, and another mask leaves it as it is. Each input has besides
hashes of its own, with which it alone is read: so a change of one is no change of another.

A hash takes integers as they are. Of floating elements it takes what rounding hardly ever changes: the exponent of
their norm, and four coarse projections. So another machine, a perturbation or a narrower dtype leaves the hash as it
is. Where samples have the same first input, the others tell them apart. Samples that are equal in every bit are
numbered, and those of earlier microbatches count too.

What is computed by torch here is also computed by numpy for the CPU, with the same results, because a hook on the model
runs for each forward and numpy's calls take a fraction of the time for so few numbers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe.models import as_array, as_real, kept_on_devices, sent, together, widest
from pytest_modelprobe.record import batch_sizes

from .readable import ambient_modes_disabled, as_plain_tensor, is_expanded
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
        sizes: Sizes of dimension 0 of the values that have the batch there. With one sample all values are of it.
        keys: One int64 key per input and sample. Equal samples have equal keys. A NumPy array, or a tensor if the
            samples are on another device.
        inputs: For each tensor that the model was given, the samples with hashes of that tensor alone, or `None` if
            these hashes are its own.
    """

    def __init__(
        self,
        hashes: Tensor | None = None,
        sizes: Collection[int] = (),
        keys: Array | Tensor | None = None,
        inputs: Sequence[Samples | None] = (),
    ) -> None:
        self.keys = keys
        self.inputs = inputs
        self._hashes = hashes
        self._sizes = frozenset(sizes)
        self._is_one = hashes is not None and len(hashes) == 1
        self._here: Array | None = None

    def hashes(self, shape: Sequence[int]) -> Array:
        """Return the hashes of the samples of a value, shape (n,), uint64.

        If dimension 0 of the value is the batch, there is one for each sample. Else there is one for the whole value.
        """
        if self._hashes is None or not self.has_batch(shape):
            return _NO_BATCH
        if self._here is None:
            with ambient_modes_disabled():
                self._here = as_array(self._hashes.cpu()).view(np.uint64)
        return self._here

    def hashes_on(self, device: torch.device, shape: Sequence[int]) -> Tensor:
        """Return what `hashes` returns, as int64 on a device. Nothing waits for the device."""
        if self._hashes is None or not self.has_batch(shape):
            return torch.zeros(1, dtype=torch.int64, device=device)
        return sent(self._hashes, device)

    def has_batch(self, shape: Sequence[int]) -> bool:
        """Return whether dimension 0 of a value is the batch, or the value is of the only sample."""
        return self._is_one or (bool(shape) and shape[0] in self._sizes)

    def sum(self) -> Tensor | None:
        """Return the sum of the hashes, which wraps as uint64 does, or `None` without a batch."""
        with ambient_modes_disabled():
            return None if self._hashes is None else self._hashes.sum()


WHOLE = Samples()
"""The samples of a tensor without a batch."""


def sum_of_hashes(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of what `Samples.sum` returned for two forwards. Nothing waits for a device.

    >>> sum_of_hashes(torch.tensor(2), None), sum_of_hashes(torch.tensor(2), torch.tensor(3))
    (tensor(2), tensor(5))
    """
    if a is None or b is None:
        return b if a is None else a
    with ambient_modes_disabled():
        return torch.add(*together(a, b))


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
                self._elsewhere = torch.cat([*known, _with_all(keys)])[-_MOST:]
        elif keys is not None:
            for key in _with_all(keys).tolist():
                self._times[key] = self._times.pop(key, 0) + 1
            for oldest in list(self._times)[:-_MOST] if len(self._times) > _MOST else ():
                del self._times[oldest]

    def times(self, keys: Array | Tensor) -> Array | Tensor | None:
        """Return how often each of all keys was counted, see `_with_all`, in int64, or `None` if none was."""
        if isinstance(keys, Tensor):
            if self._elsewhere is None or self._elsewhere.device != keys.device:
                return None
            earlier, those = self._elsewhere.sort().values, _with_all(keys)
            return torch.searchsorted(earlier, those, right=True) - torch.searchsorted(earlier, those)
        times = [self._times.get(key, 0) for key in _with_all(keys).tolist()] if self._times else ()
        return np.array(times) if any(times) else None


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
        given = [None if reason or is_expanded(x) else x for x, reason in map(as_plain_tensor, inputs)]
        first = next((x for x in given if x is not None and x.dim() and x.numel()), None)
        if first is None:
            return WHOLE
        size, *inner = first.shape
        places = [i for i, x in enumerate(given) if x is not None and _is_of_batch(x, first)]
        places.sort(key=lambda i: given[i] is not first)
        batch = [x if x.shape[:1] == (size,) else x[None] for i in places if (x := given[i]) is not None]
        try:
            hashes, alone, keys = _hashes(batch, seen)
        except NotImplementedError:  # the device lacks an operation, so its values count as wholes
            return WHOLE
        own = {place: Samples(found, [size]) for place, found in zip(places, alone, strict=True) if found is not hashes}
        return Samples(hashes, batch_sizes(size, inner), keys, [own.get(i) for i in range(len(given))])


def _is_of_batch(x: Tensor, first: Tensor) -> bool:
    """Whether an input has a part for each sample: all that is given for one sample has."""
    alike = first.shape[0] == 1 or x.shape[:1] == first.shape[:1]
    return alike and x.numel() > 0 and x.device == first.device


def _hashes(batch: Sequence[Tensor], seen: SeenSamples | None) -> tuple[Tensor, Sequence[Tensor], Array | Tensor]:
    """Return a hash of each sample, in int64, those of each input alone, and keys that only equal samples share.

    The hash gives the signs. It may be the same for samples that differ, since it is coarse. The key tells which
    samples are equal in every bit, and have to be numbered.
    """
    keys: Array | Tensor
    alone: Any
    exact: Any
    times: Any
    by_numpy = _hashes_by_numpy(batch) if batch[0].is_cpu else None
    if by_numpy is None:
        read = [_elements_read(tensor) for tensor in batch]
        alone = _row_hashes([_summaries(x) if x.is_floating_point() else x for x in read])
        exact = _row_hashes([_bits(x) for x in read])
        keys = as_array(exact).copy() if exact.is_cpu else exact
        times = None if seen is None else seen.times(keys)
        times = None if times is None else torch.as_tensor(times)
        return *_numbered(alone, exact, times, _is_constant(read[0])), keys
    arrays, hashes, keys = by_numpy
    times = None if seen is None else seen.times(keys)
    equal = [i for i, of_input in enumerate(keys.tolist()) if len(set(of_input)) < len(of_input)]
    exact = keys.copy() if equal else keys
    for i in equal:
        if arrays[i].dtype.kind == "f":  # the keys are sums, which samples that differ hardly ever share
            exact[i] = _row_hashes_by_numpy([arrays[i].view(np.int64)])[0].view(np.int64)
    is_constant = len(arrays) > 1 and (arrays[0][:, 0] == arrays[0][:, -1]).any() and _is_constant(arrays[0])
    if times is None and 0 not in equal and not np.any(is_constant):  # nearly always the first tells samples apart
        for i in equal:
            hashes[i] ^= mix(_occurrences(exact[i])[0] * signed(GAMMA))
        alone = torch.from_numpy(hashes).unbind()
        return alone[0], alone, keys
    found, own = _numbered(hashes, exact, times, is_constant)
    alone = [torch.from_numpy(one) for one in own]
    return alone[0] if found is own[0] else torch.from_numpy(found), alone, keys


def _numbered(alone: Any, exact: Any, times: Any, is_constant: Any) -> tuple[Any, Sequence[Any]]:
    """Return hashes of samples, and of each input alone, with a number for each that is equal to another.

    The first input may not tell samples apart: where another sample has the same, or all of its elements are equal, as
    in labels and in zeros. Then the other inputs do. All are arrays, or all are tensors.

    Args:
        alone: Hashes of each input, shape (inputs, samples).
        exact: Keys of each input that only those share that are equal in every bit.
        times: What `SeenSamples.times` returns.
        is_constant: Of each sample, whether all elements of the first input are equal.
    """
    before, repeated = _occurrences(_with_all(exact))
    if times is not None:
        before, repeated = before + times, repeated | (times > 0)
    numbers = mix(before * signed(GAMMA)).reshape(-1, alone.shape[1])  # number 0 leaves the hash as it is
    own = list(alone ^ numbers[: len(alone)])
    if len(own) == 1:
        return own[0], own
    of_all = alone[0] ^ _together(alone[1:]) ^ numbers[-1]
    where = np.where if isinstance(of_all, np.ndarray) else torch.where
    return where(repeated[: alone.shape[1]] | is_constant, of_all, alone[0]), own


def _is_constant(x: Any) -> Any:
    """Return for each sample of several whether all elements are equal."""
    return (x == x[:, :1]).all(1) & (len(x) > 1)  # one sample, as a token of a loop, has no other to be told from


def _together(rows: Any) -> Any:
    """Return one hash of those of several inputs, shape (inputs, samples)."""
    return mix(sum(row * (2 * i + 1) for i, row in enumerate(rows)))


def _with_all(keys: Any) -> Any:
    """Return keys of each input and then those of all inputs together, flat; no two of them share a key."""
    if keys.ndim == 1 or len(keys) == 1:
        return keys.reshape(-1)
    concatenate = np.concatenate if isinstance(keys, np.ndarray) else torch.cat
    return concatenate([*(key + i for i, key in enumerate(keys)), _together(keys)])


def _occurrences(keys: Any) -> tuple[Any, Any]:
    """Return for each key how many equal ones come before it, and whether there is another."""
    if isinstance(keys, np.ndarray):
        counts: Counter[int] = Counter()
        before = []
        for key in keys.tolist():
            before.append(counts[key])
            counts[key] += 1
        return np.array(before), np.array([counts[key] > 1 for key in keys.tolist()])
    ordered, order = keys.sort(stable=True)
    numbers = torch.arange(len(keys), device=keys.device)
    ends = torch.cat([ordered[1:] != ordered[:-1], ordered[:1] == ordered[:1]])  # the last of equal ones
    new = ends.roll(1)
    first = torch.where(new, numbers, 0).cummax(0).values
    number = torch.empty_like(numbers).scatter_(0, order, numbers - first)
    return number, torch.empty_like(new).scatter_(0, order, ~(new & ends))


def _hashes_by_numpy(batch: Sequence[Tensor]) -> tuple[Sequence[Array], Array, Array] | None:
    """Return elements, hashes and keys of each input in a tenth of the time, or `None` if some are not finite."""
    arrays = [_read_by_numpy(tensor) for tensor in batch]
    with np.errstate(all="ignore"):
        norms = [np.sqrt(np.einsum("nm,nm->n", x, x)) if x.dtype.kind == "f" else None for x in arrays]
        sums = [None if x.dtype.kind != "f" else np.einsum("nm,m->n", x, _weights()[: x.shape[1]]) for x in arrays]
        if not all(some is None or np.isfinite(np.add.reduce(some)) for some in (*norms, *sums)):
            return None
        parts = [x if norm is None else _summaries_by_numpy(x, norm) for x, norm in zip(arrays, norms, strict=True)]
        hashes = _row_hashes_by_numpy(parts).view(np.int64)
        keys = hashes.copy()  # that of integers is of all that are looked at
        for key, of_floats in zip(keys, sums, strict=True):
            if of_floats is not None:
                key[:] = of_floats.view(np.int64)
    return arrays, hashes, keys


def _read_by_numpy(tensor: Tensor) -> Array:
    """Return what `_elements_read` returns, in a fraction of the time.

    Each row lies in one piece, because how a sum rounds depends on it.
    """
    if tensor.dtype not in _OF_NUMPY:
        return np.ascontiguousarray(as_array(_elements_read(tensor)))
    x = as_array(tensor)
    x = x.reshape(len(x), -1)
    return x[:, :: x.shape[1] // _READ | 1].astype(np.float64 if x.dtype.kind == "f" else np.int64, order="C")


@functools.cache
def _weights() -> Array:
    """Return weights of elements, with which samples that differ have different sums."""
    return hashes(_SALT + 1, 2 * _READ).astype(np.float64) / 2.0**64 + 0.5


def _summaries_by_numpy(x: Array, norm: Array) -> Array:
    shares = x.dot(_patterns_by_numpy()[: x.shape[1]]) / np.maximum(norm, _TINY)[:, None]
    summaries = np.empty((len(x), 1 + _PROJECTIONS), np.int64)
    summaries[:, 0] = np.frexp(1.1 * norm)[1]
    summaries[:, 1:] = np.floor(2 * shares + 0.3)
    return summaries


def _row_hashes_by_numpy(parts: Sequence[Array]) -> Array:
    """Return what `_row_hashes` returns, as uint64."""
    of_places, starts = _places_of(tuple(part.shape[1] for part in parts))
    numbers = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    hashed = mixed(numbers.view(np.uint64) + of_places)
    return mixed(np.add.reduceat(hashed, starts, axis=1).T.copy())


@functools.lru_cache(64)
def _places_of(widths: tuple[int, ...]) -> tuple[Array, Array]:
    """Return what is added to integers by their place in each part, and where each part begins."""
    return np.concatenate([places()[:width] for width in widths]), np.cumsum([0, *widths[:-1]])


def _elements_read(tensor: Tensor) -> Tensor:
    """Return elements of each sample, float64 where the device has it, or int64."""
    x = as_real(tensor)
    x = x.reshape(len(x), -1)
    x = x[:, :: x.shape[1] // _READ | 1]
    if not x.is_floating_point():
        return x.to(torch.int64)
    return x.to(widest(x.device))


def _bits(x: Tensor) -> Tensor:
    """Return numbers as integers with the same bits."""
    if not x.is_floating_point():
        return x
    return x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32).long()


def _summaries(x: Tensor) -> Tensor:
    """Return five integers for each sample that rounding hardly ever changes."""
    x = torch.nan_to_num(x, 0.0, 0.0, 0.0)
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    (patterns,) = _patterns(x.device, x.dtype)
    shares = (x[:, :, None] * patterns[: x.shape[1]]).sum(1) / norm.clamp(min=_TINY)
    # The factor 1.1 and the term 0.3 keep steps away from common values, where rounding would choose: a one-hot sample
    # has the norm 1 and the shares +-1, and a sample that cancels has the share 0.
    return torch.cat([torch.frexp(1.1 * norm).exponent, (2 * shares + 0.3).floor()], 1).to(torch.int64)


@kept_on_devices
def _patterns(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.from_numpy(_patterns_by_numpy()).to(dtype),)


@functools.cache
def _patterns_by_numpy() -> Array:
    return highest_bits(hashes(_SALT, 2 * _READ), _PROJECTIONS)


def _row_hashes(parts: Sequence[Tensor]) -> Tensor:
    """Return a hash of each row of each part, shape (parts, rows)."""
    numbers = torch.cat(list(parts), 1) if len(parts) > 1 else parts[0]
    of_places = torch.from_numpy(_places_of(tuple(part.shape[1] for part in parts))[0].view(np.int64))
    hashed = mix(numbers + sent(of_places, numbers.device))
    return mix(torch.stack([part.sum(1) for part in hashed.split([part.shape[1] for part in parts], 1)]))


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
