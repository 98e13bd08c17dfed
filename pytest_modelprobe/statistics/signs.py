"""The signs and hashes that fingerprints are made with: from splitmix64, the same for ever."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

K = 16
COLUMNS = 256
SUMS = 8  # signed sums of the rows, each of which serves two projections
PERIOD = 4096  # rows after which the table of their signs is used again, with other signs
PIECE = PERIOD * COLUMNS  # elements in a period: four megabytes, in the cache
HASHED = 1 << 14  # integers of a sample whose hashes have one weight

# Chosen for the best estimates of constant shifts over every number of elements, and for distinct first forwards.
_COLUMN_SALT, _ROW_SALT, _PERIOD_SALT, _FORWARD_SALT, _PLACE_SALT = 2292, 56, 24, 508, 1

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


def highest_bits(z: Array, width: int = SUMS) -> Array:
    """Return the highest bits of each hash as signs, shape (hashes, width), from the lowest of them on."""
    places = np.arange(64 - width, 64, dtype=np.uint64)
    return np.where((z[:, None] >> places) & np.uint64(1), 1.0, -1.0)


@functools.cache
def columns() -> Array:
    """Return the signs of columns, shape (16, 256), in float64.

    Each row has 136 pluses and 120 minuses: with a sum of 16, the root of 256, a constant has its true norm.
    """
    ranks = hashes(_COLUMN_SALT, K * COLUMNS).reshape(K, COLUMNS).argsort(1, kind="stable").argsort(1)
    return np.where(ranks < (COLUMNS - 16) // 2, -1.0, 1.0)


def row_structure() -> tuple[Array, Array]:
    """Return what differs between the groups of 8 rows: j, shape (512,), from 0 to 7, and flip, shape (512, 8).

    The sign of row ``8 * g + i`` in sum s is ``d[i] * H[i, s ^ j[g]] * flip[g, s]``, where ``d[i]`` is -1 if the two
    lowest bits of i are set, and ``H[i, t]`` is -1 if ``i & t`` has an odd number of bits: the Hadamard matrix of
    Sylvester, so that a Walsh-Hadamard transform of 8 rows gives all 8 sums.
    """
    drawn = hashes(_ROW_SALT, PERIOD // 8)
    return (drawn >> np.uint64(53) & np.uint64(7)).astype(np.int64), highest_bits(drawn)


@functools.cache
def row_signs() -> Array:
    """Return the signs of the rows of a period, shape (4096, 8), in float64; see `row_structure`."""
    j, flip = row_structure()
    i, s = np.arange(8), np.arange(SUMS)
    odd = np.array([number.bit_count() % 2 for number in range(8)])
    negative = odd[i[:, None] & (s ^ j[:, None])[:, None, :]] ^ (i & i >> 1 & 1)[:, None]  # (512, 8, 8)
    return (np.where(negative, -1.0, 1.0) * flip[:, None]).reshape(PERIOD, SUMS)


@functools.cache
def rows(dtype: np.dtype[Any]) -> Array:
    """Return the signs of the rows of a period, shape (8, 4096)."""
    return np.ascontiguousarray(row_signs().T, dtype=dtype)


@functools.cache
def periods() -> Array:
    """Return the signs by which the periods of rows differ, shape (4096, 8); in the first all are +1."""
    signs = highest_bits(hashes(_PERIOD_SALT, 4096))
    signs[0] = 1
    return signs


@functools.cache
def forwards() -> Array:
    """Return the signs of forwards, shape (1024, 8): those of the first are all +1."""
    signs = highest_bits(hashes(_FORWARD_SALT, 1024))
    signs[0] = 1
    return signs


def hash_of_forward(turn: int) -> int:
    """Return what is added to the integers of a forward: 0 in the first."""
    return int(hashes(_FORWARD_SALT, 1, turn)[0]) if turn else 0


@functools.cache
def places() -> Array:
    """Return what is added to integers by their place, shape (16384,)."""
    return np.arange(1, HASHED + 1, dtype=np.uint64) * np.uint64(GAMMA)


def weights_of_places(count: int) -> Array:
    """Return an odd number for each 2**14 elements, by which the sum of their hashes is multiplied."""
    return hashes(_PLACE_SALT, -(-count // HASHED)) | np.uint64(1)
