"""Fingerprints of tensors: 16 signed random projections, from which the distance of two tensors is estimated.

Moments cannot tell permuted heads, a view in place of a transpose, or swapped queries and keys from what they should
be. Projections can, and the 16 numbers are small enough to store in a text file.

A tensor is n samples, or one. The elements of a sample are taken in logical (row-major) order, in rows of 256, the last
of which may be shorter. The hash of the sample and the number of the row give 64 bits, and these give each row one of 8
masks, one of 256 orders and 16 signs. Projection k adds the element of column c with the sign

    sign[n, r, t] * mask[n, r, c] * column[c, t]    where t = order[n, r, k]

and is divided by 4, so that the sum of the squares of the 16 projections is on average the squared norm.
The hash comes from what the model was given for the sample (see below), so that the fingerprints of the parts of a
batch add up to that of the batch.

The projections are as good as independent, whatever the tensor is. Of a million random fingerprints about four are
below a third of the norm, as chance has it with 16 independent sums, also where samples are equal, constant or one-hot.
The standard error of `estimated_change` is 18 %. A constant shift over any number of elements of the first forward is
estimated at 0.7 to 1.35 times its size. A difference is missed only if it is constructed for that.

Integers are hashed, each with its position in the sample and the hash of the sample. All hashes together are the
digest, which is exact. In the fingerprint, each integer counts as a number drawn from its hash with mean 0 and variance
1, from which the share of elements that differ is estimated.

The samples of a batch have a hash each. A sample is known by what the model was given for it, and that is its part of
the first input. So it has the same hash at any world size, in any order and in any microbatch, and another mask leaves
it as it is. Each input has besides hashes of its own, with which it alone is read: so a change of one is no change of
another.

A hash takes integers as they are. Of floating elements it takes what rounding hardly ever changes: the exponent of
their norm, and four coarse projections. So another machine, a perturbation or a narrower dtype leaves the hash as it
is. Where samples have the same first input, the others tell them apart. Samples that are equal in every bit are
numbered, and those of earlier microbatches count too.

On the CPU numpy computes, with the same results: a hook on the model runs for each forward, and numpy's calls take a
fraction of the time for so few numbers.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_modelprobe.models import as_array, as_real, kept_on_devices, sent, together, widest
from pytest_modelprobe.record import batch_sizes

from .readable import ambient_modes_disabled, as_plain_tensor, is_expanded

# --- samples ----------------------------------------------------------------------------------------------------------

Array = npt.NDArray[Any]

K = 16  # projections of a fingerprint
COLUMNS = 256  # elements of a row
MASKS, ORDERS = 8, 256
ORDER_BITS, SIGN_BITS = 3, 48  # the lowest bits of the order and of the signs; the mask begins at bit 0
HASHED = 1 << 14  # so many integers of a sample have hashes with one weight
_TURNS = 64  # so many turns are drawn together

# The salts were chosen for the best estimates of constant shifts over every number of elements up to 2**26. That of
# turns was chosen for the best estimates of constant values that are equal in two of the first 32 forwards.
_PLACE_SALT, _MASK_SALT, _ORDER_SALT, _TURN_SALT = 1, 10, 106, 848

GAMMA = 0x9E3779B97F4A7C15
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))

_MOST = 1 << 12  # samples that are remembered: a limit, because without optimizer steps memory would grow for ever
_READ = 256  # elements of a sample that are looked at, evenly spaced: at least so many, and up to twice as many
_PROJECTIONS = 4
_SALT = 7  # chooses the signs of these projections among the outputs of splitmix64
_TINY = 1e-30  # the least norm to divide by, for samples of zeros
_NO_BATCH = np.zeros(1, np.uint64)


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

    def rows(self, tensor: Tensor) -> Tensor:
        """Return what is read of a tensor."""
        return tensor

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
        # All that is given for one sample has a part for it.
        here = ((i, x) for i, x in enumerate(given) if x is not None and x.numel() and x.device == first.device)
        places = [i for i, x in here if size == 1 or x.shape[:1] == (size,)]
        places.sort(key=lambda i: given[i] is not first)
        batch = [x if x.shape[:1] == (size,) else x[None] for i in places if (x := given[i]) is not None]
        try:
            hashes, alone, keys = _hashes(batch, seen)
        except NotImplementedError:  # the device lacks an operation, so its values count as wholes
            return WHOLE
        own = {place: Samples(found, [size]) for place, found in zip(places, alone, strict=True) if found is not hashes}
        return Samples(hashes, batch_sizes(size, inner), keys, [own.get(i) for i in range(len(given))])


def _hashes(batch: Sequence[Tensor], seen: SeenSamples | None) -> tuple[Tensor, Sequence[Tensor], Array | Tensor]:
    """Return a hash of each sample, in int64, those of each input alone, and keys that only equal samples share.

    The hash gives the signs. It may be the same for samples that differ, since it is coarse. The key tells which
    samples are equal in every bit, and have to be numbered.
    """
    read = [_elements_read(tensor) for tensor in batch]
    alone = _row_hashes([_summaries(x) if _is_floating(x) else x for x in read])
    keys = _row_hashes([_bits(x) for x in read])
    times: Any = None if seen is None else seen.times(keys)
    x = read[0]
    is_constant = (x == x[:, :1]).all(1) & (len(x) > 1)  # a single sample has no other to be told from
    found, own = _numbered(alone, keys, times, is_constant)
    if isinstance(keys, Tensor):
        return found, own, keys
    inputs = [torch.from_numpy(one) for one in own]
    return inputs[0] if found is own[0] else torch.from_numpy(found), inputs, keys


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
    xp = np if isinstance(alone, np.ndarray) else torch
    unclear = repeated[: alone.shape[1]] | is_constant
    if len(own) == 1 or (xp is np and not unclear.any()):  # nearly always the first tells samples apart
        return own[0], own
    of_all = alone[0] ^ _together(alone[1:]) ^ numbers[-1]
    return xp.where(unclear, of_all, alone[0]), own


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


# --- the same for arrays of numpy, on the CPU, and for tensors on other devices ---------------------------------------


def _elements_read(tensor: Tensor) -> Any:
    """Return elements of each sample, float64 where the device has it, or int64: an array, or a tensor elsewhere."""
    x = as_real(tensor)
    x = x.reshape(len(x), -1)
    x = x[:, :: x.shape[1] // _READ | 1]
    x = x.to(widest(x.device) if x.is_floating_point() else torch.int64)
    # Each row lies in one piece, because how a sum rounds depends on it. `as_array` may share memory with the tensor.
    return np.array(as_array(x), order="C") if x.is_cpu else x


def _is_floating(x: Any) -> bool:
    return x.dtype.kind == "f" if isinstance(x, np.ndarray) else torch.is_floating_point(x)


def _bits(x: Any) -> Any:
    """Return numbers as integers with the same bits."""
    if isinstance(x, np.ndarray):
        return x.view(np.int64)
    if not x.is_floating_point():
        return x
    return x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32).long()


def _summaries(x: Any) -> Any:
    """Return five integers for each sample that rounding hardly ever changes."""
    xp, patterns = (np, _patterns()) if isinstance(x, np.ndarray) else (torch, _patterns_on(x.device, x.dtype)[0])
    x = xp.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
    patterns = patterns[: x.shape[1]]
    norm = xp.sqrt((x * x).sum(1))[:, None]
    # On a device no product is used: see `fingerprint`.
    sums = x.dot(patterns) if xp is np else (x[:, :, None] * patterns).sum(1)
    # The factor 1.1 and the term 0.3 keep steps away from common values, where rounding would choose: a one-hot sample
    # has the norm 1 and the shares +-1, and a sample that cancels has the share 0.
    found = xp.concatenate([xp.frexp(1.1 * norm)[1], xp.floor(2 * sums / xp.clip(norm, _TINY, None) + 0.3)], 1)
    return found.astype(np.int64) if xp is np else found.to(torch.int64)


@functools.cache
def _patterns() -> Array:
    return highest_bits(hashes(_SALT, 2 * _READ), _PROJECTIONS)


@kept_on_devices
def _patterns_on(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.from_numpy(_patterns()).to(dtype),)


def _row_hashes(parts: Sequence[Any]) -> Any:
    """Return a hash of each row of each part, shape (parts, rows)."""
    found = []
    for part in parts:
        of_places: Any = places()[: part.shape[1]].view(np.int64)
        if isinstance(part, Tensor):
            of_places = sent(torch.from_numpy(of_places), part.device)
        found.append(mix(part + of_places).sum(1))
    return mix(torch.stack(found) if isinstance(found[0], Tensor) else np.stack(found))


def mix(z: Any) -> Any:
    """Return the output function of splitmix64. It is computed in int64, which wraps as uint64 does."""
    for shift, factor in _STEPS:
        z = (z ^ shifted(z, shift)) * signed(factor)
    return z


def shifted(z: Any, shift: int) -> Any:
    """Return int64 shifted right as uint64 is."""
    return (z >> shift) & ((1 << (64 - shift)) - 1)


def signed(number: int) -> int:
    """Return a number below 2**64 as the int64 with its bits."""
    return number - (1 << 64) if number >= 1 << 63 else number


# --- signs ------------------------------------------------------------------------------------------------------------
#
# They come from splitmix64 and stay the same for ever: fingerprints stand in files, so another version, machine or
# library must draw the same ones. The random generators of torch and numpy do not promise it.
#
# Each row of 256 elements of a sample has 64 bits of its own: output number ``row + 1`` of splitmix64 that starts at
# the hash of the sample. They choose one of 8 masks, one of 256 orders and 16 signs. So two samples with the same
# elements have projections that are as good as independent, and their sum does not cancel.


def hashes(salt: int, count: int, first: int = 0) -> Array:
    """Return ``count`` outputs of splitmix64, from number ``salt * 2**32 + first`` on.

    >>> hex(hashes(0, 1)[0])
    '0xe220a8397b1dcdaf'
    """
    start = (salt << 32) + 1 + first
    numbers = np.arange(start, start + count, dtype=np.uint64) * np.uint64(GAMMA)
    found: Array = mix(numbers.view(np.int64)).view(np.uint64)
    return found


def highest_bits(z: Array, width: int) -> Array:
    """Return the highest bits of each hash as signs, shape (hashes, width), from the lowest of them on."""
    places = np.arange(64 - width, 64, dtype=np.uint64)
    return np.where((z[:, None] >> places) & np.uint64(1), 1.0, -1.0)


@functools.cache
def columns() -> Array:
    """Return the signs of columns in each of 16 sums, shape (256, 16).

    Sum t adds column ``16 * b + l`` with the sign -1 if ``(b ^ l) & t`` has an odd number of bits. For the 16 blocks of
    16 columns that is a Walsh-Hadamard transform, and then one more set of signs in each of its 16 sums. So the
    compiled kernel gets all 16 sums with few additions, in the same read as the statistics.
    """
    b, lane, t = np.ix_(range(16), range(16), range(16))
    return np.where(_odd((b ^ lane) & t), -1.0, 1.0).reshape(COLUMNS, K)


@functools.cache
def masks() -> Array:
    """Return the masks, shape (8, 256): each column is multiplied by +1 or -1 before `columns` adds them up.

    Each is a bent function (Maiorana and McFarland): column ``16 * b + l`` has the sign -1 if ``b & p[l]`` has an odd
    number of bits, and besides the sign of a bit of lane l, where p is a permutation. So a row that is constant, or a
    Walsh function, has the same magnitude in all sums. Otherwise all of it would be in one sum, where two samples could
    cancel.
    """
    drawn = hashes(_MASK_SALT, 16 * MASKS).reshape(MASKS, 1, 16)
    odd = _odd(np.arange(16)[:, None] & drawn.argsort(-1, kind="stable"))
    return np.where(odd ^ (drawn >> np.uint64(63)).astype(bool), -1.0, 1.0).reshape(MASKS, COLUMNS)


@functools.cache
def orders() -> Array:
    """Return the orders, shape (256, 16). Projection k gets the sum of columns with the number ``orders()[o, k]``."""
    return hashes(_ORDER_SALT, K * ORDERS).reshape(ORDERS, K).argsort(1, kind="stable")


def turn(number: int) -> tuple[Array, Array, int]:
    """Return the signs and the order of the 16 projections of a turned fingerprint, and the factor of its digest."""
    signs, order, factors = _turns(number // _TURNS)
    i = number % _TURNS
    return signs[i], order[i], factors[i]


@functools.lru_cache(8)
def _turns(block: int) -> tuple[Array, Array, list[int]]:
    """Return what `turn` returns for each number of a block: a watch asks for one after the other."""
    bits = hashes(_TURN_SALT, _TURNS, block * _TURNS)
    return highest_bits(bits, K), orders()[bits & np.uint64(ORDERS - 1)], (bits | np.uint64(1)).tolist()


@functools.cache
def places() -> Array:
    """Return what is added to integers by their place, shape (16384,)."""
    return np.arange(1, HASHED + 1, dtype=np.uint64) * np.uint64(GAMMA)


def weights_of_places(count: int) -> Array:
    """Return an odd number for each 2**14 elements, by which the sum of their hashes is multiplied."""
    return hashes(_PLACE_SALT, -(-count // HASHED)) | np.uint64(1)


def _odd(numbers: Array) -> Array:
    """Return whether each number below 16 has an odd number of bits."""
    return (0x6996 >> numbers & 1).astype(bool)


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
