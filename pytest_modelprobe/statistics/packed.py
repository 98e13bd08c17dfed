"""The numbers of a tensor as the compiled kernel returns them, in one `bytes` object.

To unpack them takes longer than to compute those of a small tensor, so they are unpacked when a record is made.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

Units = npt.NDArray[np.floating]

_HEADER = struct.Struct("@2B6x6q7d")
_NUMBERS = 16
_RANGES = _HEADER.size + 8 * _NUMBERS
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)  # numpy makes one of a class at each call


def has_fingerprint(packed: bytes) -> bool:
    """Whether there is one: it was asked for, and all elements are finite."""
    return packed[0] != 0


def unpack(packed: bytes) -> tuple[tuple[float, ...], Units | None, Units | None, Units | None]:
    """Return the row, the smallest and the largest element of each unit, and the fingerprint."""
    folded, wide, units, *row = _HEADER.unpack_from(packed)
    low = high = None
    if units:
        dtype = _FLOAT64 if wide else _FLOAT32
        # By far quicker than to split an array of both.
        low = np.ndarray(units, dtype, packed, _RANGES)
        high = np.ndarray(units, dtype, packed, _RANGES + units * dtype.itemsize)
    return tuple(row), low, high, np.frombuffer(packed, _FLOAT64, _NUMBERS, _HEADER.size) if folded else None
