"""Fingerprints as short text: sixteen whole numbers of equal width, and one exponent of two for all.

A file holds a fingerprint for nearly every value, so each takes only the bits that its tolerance needs. The text is
the base64 of 12 bits of exponent and then the numbers, most significant bits first. Its length tells how many bits each
number has. A fingerprint of zeros has no largest number, and its text is empty.
"""

from __future__ import annotations

import binascii
import math
from functools import lru_cache

from .specs import FormatError

FINGERPRINT_SIZE = 16
"""The count of numbers in a fingerprint."""

_EXPONENTS = range(-1074, 1024)
"""The first is the exponent of the smallest float. A larger exponent than the last would make an infinite power."""
_BIAS = 2048
"""Added to the exponent, so that it is positive in its 12 bits."""

BITS = range(14, 33)
"""Bits of a number with its sign. The more precisely a value is known, the more bits it has."""


def bits_for(precision: float) -> int:
    """Return the least number of bits that keep a fingerprint's error to a precision, relative to the norm.

    The error is that of a typical fingerprint; three times as much is rare.

    >>> bits_for(2.5e-7), bits_for(1e-4)
    (23, 15)
    """
    return min(max(2 - math.frexp(precision)[1], BITS[0]), BITS[-1])


@lru_cache(maxsize=8192)  # layers that are alike respond alike
def packed(numbers: tuple[float, ...], bits: int) -> str:
    """Return the text of a fingerprint. It is empty if all numbers are zero.

    >>> unpacked(packed((0.5, -1.25) * 8, 16))[:2]
    (0.5, -1.25)
    """
    top = max(map(abs, numbers))
    if top == 0:
        return ""
    most = (1 << (bits - 1)) - 1
    exponent = max(math.frexp(top)[1] - bits + 1, _EXPONENTS[0])
    if round(math.ldexp(top, -exponent)) > most:
        exponent += 1
    whole = exponent + _BIAS
    for number in numbers:
        whole = whole << bits | round(math.ldexp(number, -exponent)) + most
    data = (whole << 4).to_bytes(2 * bits + 2, "big")  # four more bits make whole bytes
    return binascii.b2a_base64(data).decode()[: _length(bits)]


@lru_cache(maxsize=8192)  # of two versions of a snapshot most is the same
def unpacked(text: str) -> tuple[float, ...]:
    """Return the fingerprint that `packed` wrote.

    Raises:
        FormatError: The text is no fingerprint.
    """
    if not text:
        return (0.0,) * FINGERPRINT_SIZE
    try:
        bits = _BITS_OF[len(text)]
        data = binascii.a2b_base64(text + "A" * (-len(text) % 4), strict_mode=True)
        whole = int.from_bytes(data[: 2 * bits + 2], "big") >> 4
        exponent = (whole >> FINGERPRINT_SIZE * bits) - _BIAS
        if exponent not in _EXPONENTS:
            raise ValueError
    except (KeyError, ValueError):
        raise FormatError(f"{text[:80]!r} is no fingerprint") from None
    scale = math.ldexp(1.0, exponent)
    most, mask = (1 << (bits - 1)) - 1, (1 << bits) - 1
    shifts = range((FINGERPRINT_SIZE - 1) * bits, -1, -bits)
    return tuple([((whole >> shift & mask) - most) * scale for shift in shifts])


def _length(bits: int) -> int:
    """Return the length of a text whose numbers have so many bits: six bits are one character."""
    return -(-(12 + FINGERPRINT_SIZE * bits) // 6)


_BITS_OF = {_length(bits): bits for bits in BITS}
