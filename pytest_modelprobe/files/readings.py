"""Readings as short lists of numbers, and back.

A reading is what was measured of one tensor, and a file has thousands of them: ``[numbers, fingerprint, noise, zeros,
{more}]``, where what is missing at the end is left out. The numbers of a value are ``[mean, std, min, max]``, those of
a gradient the root mean square alone, for no more of it is compared; they are ``[]`` if no element is finite. Digits
are rounded to what a comparison can tell apart, so that the noise of a machine does not show up in a diff. A
fingerprint is the base64 of one exponent of two and sixteen whole numbers, each with the bits that its tolerance needs.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pytest_modelprobe.record import Dimension, Reading, Statistics, Units, codec

_REST = ("tensors", "digest", "reason")
_COUNTS = ("count", "nan", "posinf", "neginf", "first_nan", "first_posinf", "first_neginf")

MOST_UNITS = 1 << 20
"""Units of a reading that are written and read. They become tuples, and a short text must not fill the memory."""

_NARROW = {"float16": 6e-5, "bfloat16": 4.8e-4}
"""A sixteenth of the distance between 1 and the next number of the dtype."""
_PRECISION = 2.5e-7
"""An eighth of the smallest tolerance of `comparison` for values."""


def packed_reading(
    reading: Reading | None, shape: Sequence[Dimension] | None, dtype: str, *, gradient: bool = False
) -> list[Any] | None:
    """Return a reading as a list, or None if there is none.

    Args:
        reading: The reading.
        shape: The shape of its tensor, from which its elements can be counted, or None if a reader will not know it.
        dtype: The dtype of its tensor.
        gradient: Whether it is that of a gradient.

    >>> packed_reading(Reading(statistics=Statistics(count=4, mean=0.5, min=0, max=1, zeros=1)), (2, 2), "float32")
    [[0.5, 0, 0, 1], None, None, 1]
    """
    if reading is None:
        return None
    numbers, units = reading.statistics, reading.units
    more = codec.encode_fields(reading, _REST)
    columns: list[Any] = [None, None, _rounded(reading.noise, 2), None]
    if numbers is not None:
        more |= codec.encode_fields(numbers, _COUNTS, {"count": _count(shape, reading.tensors)})
        if numbers.mean is None:
            columns[0] = []
        elif gradient:
            columns[0] = _rounded(numbers.rms)
        else:
            columns[0] = [_rounded(x) for x in (_mean(numbers), numbers.std, numbers.min, numbers.max)]
        columns[3] = numbers.zeros or None
        if numbers.zeros and units is not None and units.dead and len(units) <= MOST_UNITS:
            more["dead"] = [units.dead, len(units), units.axis]
    if reading.fingerprint is not None:
        precision = max(_PRECISION, _NARROW.get(dtype, 0.0), float(f"{reading.noise or 0.0:.2g}"))
        columns[1] = _fingerprint(reading.fingerprint, bits_for(precision))
    while columns and columns[-1] is None:
        columns.pop()
    return [*columns, more] if more else columns


def unpacked_reading(data: Any, shape: Sequence[Dimension] | None) -> Reading:
    """Return the reading that `packed_reading` packed.

    Only types are checked, and what would fill the memory: two files that are compared show each other's edits.

    Raises:
        ValueError: The data is no such list.
    """
    columns = list(codec.decode(list, data))
    more: dict[str, Any] = columns.pop() if columns and type(columns[-1]) is dict and "float" not in columns[-1] else {}
    numbers, fingerprint, noise, zeros = columns + [None] * (4 - len(columns))
    dead = more.pop("dead", None) if more else None
    counts: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    if more:
        counts = codec.decode_fields(Statistics, {k: v for k, v in more.items() if k in _COUNTS})
        rest = codec.decode_fields(Reading, {k: v for k, v in more.items() if k not in _COUNTS}, _REST)
    if any(type(n) is int and n < 0 for n in (*more.values(), zeros)):
        raise ValueError(f"{more} counts nothing")
    statistics = None
    if numbers is not None:
        count = counts.pop("count", None)
        if count is None and (count := _count(shape, rest.get("tensors", 1))) is None:
            raise ValueError("its elements are not counted")
        statistics = _statistics(numbers, Statistics(count=count, zeros=codec.decode(int, zeros or 0), **counts))
    return Reading(
        statistics=statistics,
        fingerprint=None if fingerprint is None else _fingerprint_from(fingerprint),
        noise=None if noise is None else float(_number(noise)),
        units=None if dead is None else _units(*dead),
        **rest,
    )


def _statistics(numbers: Any, counts: Statistics) -> Statistics:
    if counts.finite <= 0 or numbers == []:
        return counts
    mean, std, low, high = numbers if type(numbers) is list else (0.0, numbers, None, None)
    deviation = float(_number(std))
    return Statistics(
        **{name: getattr(counts, name) for name in (*_COUNTS, "zeros")},
        mean=float(_number(mean)),
        deviations=deviation * deviation * counts.finite,
        **({"min": _number(low), "max": _number(high)} if type(numbers) is list else {}),
    )


def _units(dead: Any, units: Any, axis: Any) -> Units:
    """Return units of which only the number of dead ones is known: first the dead ones, then NaN for the others."""
    if not 0 < codec.decode(int, dead) <= codec.decode(int, units) <= MOST_UNITS:
        raise ValueError(f"{[dead, units]} are no dead units")
    numbers = (0.0,) * dead + (math.nan,) * (units - dead)
    return Units(axis=codec.decode(int, axis), low=numbers, high=numbers)


def _count(shape: Sequence[Dimension] | None, tensors: int) -> int | None:
    """Return how many elements so many tensors of a shape have; None if it is not known or varies."""
    sizes = [size for size in shape or () if type(size) is int]
    return None if shape is None or len(sizes) < len(shape) else tensors * math.prod(sizes)


def _mean(numbers: Statistics) -> float | None:
    """Return the mean with the digits of the deviation. Smaller digits are noise, which changes with every update."""
    mean, std = numbers.mean, numbers.std
    if not mean or not std or not math.isfinite(std) or not math.isfinite(mean):
        return mean
    return round(mean, 6 - math.floor(math.log10(float(f"{std:.6g}") or 1.0)))


def _rounded(value: float | None, digits: int = 6) -> Any:
    """Return a number with some digits as JSON has it; integers are exact.

    >>> _rounded(0.00012345678), _rounded(-0.0), _rounded(1234567), _rounded(-math.inf), _rounded(2.34e-7, 2)
    (0.000123457, 0, 1234567, {'float': '-inf'}, 2.3e-07)
    """
    if value is None or type(value) is int:
        return value
    short = float(f"{value:.{digits}g}")
    if not math.isfinite(short):
        return codec.encode(short)
    return int(short) if short.is_integer() and abs(short) < 1e6 else short


def _number(data: Any) -> Any:
    if type(data) is float or (
        type(data) is int and abs(data) < 1 << 64
    ):  # the smallest and largest of integers are exact
        return data
    return float(codec.decode(float, data))


# --- fingerprints -------------------------------------------------------------------------------------------------

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


def _fingerprint(numbers: tuple[float, ...], bits: int) -> Any:
    if len(numbers) == FINGERPRINT_SIZE and all(map(math.isfinite, numbers)):
        return packed(tuple(numbers), bits)
    return codec.encode(tuple(numbers))


def _fingerprint_from(data: Any) -> tuple[float, ...]:
    if type(data) is str:
        return unpacked(data)
    if type(data) is not list or len(data) != FINGERPRINT_SIZE:
        raise ValueError(f"{data!r} is no fingerprint")
    return tuple([float(_number(one)) for one in data])


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
        ValueError: The text is no fingerprint.
    """
    if not text:
        return (0.0,) * FINGERPRINT_SIZE
    bits = _BITS_OF.get(len(text))
    if bits is None:
        raise ValueError(f"{text[:40]!r} is no fingerprint")
    data = binascii.a2b_base64(text + "A" * (-len(text) % 4), strict_mode=True)
    whole = int.from_bytes(data[: 2 * bits + 2], "big") >> 4
    exponent = (whole >> FINGERPRINT_SIZE * bits) - _BIAS
    if exponent not in _EXPONENTS:
        raise ValueError(f"{text[:40]!r} is no fingerprint")
    scale = math.ldexp(1.0, exponent)
    most, mask = (1 << (bits - 1)) - 1, (1 << bits) - 1
    shifts = range((FINGERPRINT_SIZE - 1) * bits, -1, -bits)
    return tuple([((whole >> shift & mask) - most) * scale for shift in shifts])


def _length(bits: int) -> int:
    """Return the length of a text whose numbers have so many bits: six bits are one character."""
    return -(-(12 + FINGERPRINT_SIZE * bits) // 6)


_BITS_OF = {_length(bits): bits for bits in BITS}
