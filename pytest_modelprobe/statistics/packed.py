"""The numbers of a tensor as the compiled kernel returns them, in one `bytes` object.

To unpack them takes longer than to compute those of a small tensor, so they are unpacked when a record is made.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]

_HEADER = struct.Struct("@3B5x6q7d")
_NUMBERS = 16
_REST = _HEADER.size + 8 * _NUMBERS
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)  # numpy makes one of a class at each call


def has_fingerprint(packed: bytes) -> bool:
    """Whether there is one: it was asked for, and all elements are finite."""
    return packed[0] != 0


def with_fingerprint(packed: bytes, fingerprint: Numbers) -> bytes:
    """Return the same numbers with another fingerprint."""
    return packed[: _HEADER.size] + fingerprint.tobytes() + packed[_REST:]


def fingerprint_of(packed: bytes) -> Numbers:
    """Return the fingerprint, without unpacking what else there is."""
    return np.frombuffer(packed, _FLOAT64, _NUMBERS, _HEADER.size)


def unpack(
    packed: bytes,
) -> tuple[tuple[float, ...], Numbers | None, Numbers | None, Numbers | None, Numbers | None]:
    """Return the row, the smallest and the largest element of each unit, the fingerprint, and the histogram."""
    folded, wide, binned, units, *row = _HEADER.unpack_from(packed)
    dtype = _FLOAT64 if wide else _FLOAT32
    size = units * dtype.itemsize
    start = len(packed) - 2 * size
    low = high = None
    if units:  # by far quicker than to split an array of both
        low, high = (np.ndarray(units, dtype, packed, where) for where in (start, start + size))
    fingerprint = fingerprint_of(packed) if folded else None
    return tuple(row), low, high, fingerprint, np.frombuffer(packed[_REST:start], np.int64) if binned else None
