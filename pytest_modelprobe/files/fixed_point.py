"""Fingerprints as short text: fixed-point numbers with one exponent for all."""

from __future__ import annotations

import binascii
import math
from functools import lru_cache

from .specs import FormatError

FINGERPRINT_SIZE = 16
"""Numbers of a fingerprint."""

_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_DIGITS = {sign: i for i, sign in enumerate(_ALPHABET)}
_LOWEST = -1074
"""Smallest exponent: that of the smallest float."""
_BIAS = 2048


BITS = range(14, 33)
"""Of each number, sign included: what a fingerprint takes, by how precisely it has to be known."""


def bits_for(precision: float) -> int:
    """Return the least number of bits that keep a fingerprint's error to a precision, relative to the norm.

    The error is that of a typical fingerprint; three times as much is rare.

    >>> bits_for(2.5e-7), bits_for(1e-4)
    (23, 15)
    """
    return min(max(2 - math.frexp(precision)[1], BITS[0]), BITS[-1])


@lru_cache(maxsize=8192)  # layers that are alike respond alike
def packed(numbers: tuple[float, ...], bits: int) -> str:
    """Return the text of a fingerprint; nothing for zeros.

    >>> unpacked(packed((0.5, -1.25) * 8, 16))[:2]
    (0.5, -1.25)
    """
    top = max(map(abs, numbers))
    if top == 0:
        return ""
    most = (1 << (bits - 1)) - 1
    exponent = max(math.frexp(top)[1] - bits + 1, _LOWEST)
    if round(math.ldexp(top, -exponent)) > most:
        exponent += 1
    whole = 0
    for number in numbers:
        whole = whole << bits | round(math.ldexp(number, -exponent)) + most
    exponent += _BIAS
    text = binascii.b2a_base64(whole.to_bytes(2 * bits, "big"), newline=False).decode()
    return _ALPHABET[exponent >> 6] + _ALPHABET[exponent & 63] + text.rstrip("=")


@lru_cache(maxsize=8192)  # of two versions of a snapshot most is the same
def unpacked(text: str) -> tuple[float, ...]:
    """Return the fingerprint that `packed` wrote.

    Raises:
        FormatError: It is none.
    """
    if not text:
        return _ZEROS
    bits = _BITS_OF.get(len(text))
    if bits is None:
        raise FormatError(f"{text[:80]!r} is no fingerprint")
    try:
        exponent = (_DIGITS[text[0]] << 6 | _DIGITS[text[1]]) - _BIAS
        whole = int.from_bytes(binascii.a2b_base64(text[2:] + "==", strict_mode=False), "big")
        if not _LOWEST <= exponent <= 1024:
            raise FormatError
        scale = math.ldexp(1.0, exponent)
        most = (1 << (bits - 1)) - 1
        mask = (1 << bits) - 1
        return tuple(
            [((whole >> shift & mask) - most) * scale for shift in range((FINGERPRINT_SIZE - 1) * bits, -1, -bits)]
        )
    except (KeyError, ValueError):
        raise FormatError(f"{text[:80]!r} is no fingerprint") from None


_ZEROS = (0.0,) * FINGERPRINT_SIZE
_BITS_OF = {2 + -(-FINGERPRINT_SIZE * bits // 6): bits for bits in BITS}
