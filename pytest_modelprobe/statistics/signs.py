"""The signs and hashes that fingerprints are made with. They come from splitmix64 and stay the same for ever.

Fingerprints stand in files, so another version, machine or library must draw the same signs. A fixed integer hash does
that. The random generators of torch and numpy do not promise it.

Each row of 256 elements of a sample has 64 bits of its own: output number ``row + 1`` of splitmix64 that starts at the
hash of the sample. They choose one of 8 masks, one of 256 orders and 16 signs. So two samples with the same elements
have projections that are as good as independent, and their sum does not cancel.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

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
STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_STEPS = tuple((np.uint64(shift), np.uint64(factor)) for shift, factor in STEPS)


def mixed(z: Array, scratch: Array | None = None) -> Array:
    """Return the output function of splitmix64 (Steele, Lea and Flood 2014), in place."""
    for shift, factor in _STEPS:
        scratch = np.right_shift(z, shift, out=scratch)
        z ^= scratch
        if factor != 1:
            z *= factor
    return z


def hashes(salt: int, count: int, first: int = 0) -> Array:
    """Return ``count`` outputs of splitmix64, from number ``salt * 2**32 + first`` on.

    >>> hex(hashes(0, 1)[0])
    '0xe220a8397b1dcdaf'
    """
    start = (salt << 32) + 1 + first
    return mixed(np.arange(start, start + count, dtype=np.uint64) * np.uint64(GAMMA))


def highest_bits(z: Array, width: int) -> Array:
    """Return the highest bits of each hash as signs, shape (hashes, width), from the lowest of them on."""
    places = np.arange(64 - width, 64, dtype=np.uint64)
    return np.where((z[:, None] >> places) & np.uint64(1), 1.0, -1.0)


def bits_of_rows(hashes: Array, count: int) -> Array:
    """Return the bits of the first rows of samples, shape (samples, count), uint64.

    Args:
        hashes: Hashes of the samples, shape (samples,), uint64.
        count: How many rows of each sample.
    """
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA)
    return mixed(hashes[..., None] + numbers)


def projected(values: Array, bits: Array) -> Array:
    """Return the 16 signed sums of each of some rows, before they are divided by 4, shape (..., 16).

    Args:
        values: The product of the rows, after their masks were applied, and `columns`, shape (..., 16).
        bits: Bits of the rows, shape (...), uint64.
    """
    minus = bits[..., None] >> np.arange(SIGN_BITS, SIGN_BITS + K, dtype=np.uint64) & np.uint64(1)
    order = orders()[bits >> np.uint64(ORDER_BITS) & np.uint64(ORDERS - 1)]
    return np.take_along_axis(np.where(minus, -values, values), order, -1)


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
