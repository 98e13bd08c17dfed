"""Readings as short lists of numbers, and back.

A reading is what was measured of one tensor. A list has no names, because a file has thousands of lists; the header of
the file names the columns. Digits are rounded to what a comparison can tell apart, so that the noise of a machine does
not show up in a diff.

- Values, parameters, buffers: ``[mean, std, min, max, fingerprint, noise, zeros, {more}]``.
- Gradients: ``[rms, fingerprint, noise, zeros, {more}]``. Only their norm and fingerprint are compared.
- Where there are no statistics: ``[fingerprint, noise, {more}]``.

Missing columns at the end, and a zero count, are left out. The number of elements follows from the shape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pytest_modelprobe.record import Dimension, Reading, Statistics, Units

from . import fixed_point
from .parsing import excerpt, text_or_none
from .specs import FormatError, floating

Role = Literal["value", "gradient", "own", "own gradient", "response", "response gradient"]

_COMPACT = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode

FULL: tuple[Role, ...] = ("value", "own", "response")
"""Roles with all columns. Gradients have fewer, because only their norm and fingerprint are compared."""

_MOST_UNITS = 1 << 20
"""Units of a reading that are written and read. They become tuples, and a short text must not fill the memory."""


def number_text(value: float | None, digits: int = 6) -> str:
    """Return a number as short text that JSON reads; integers are exact, what is not finite is quoted.

    >>> (
    ...     number_text(0.00012345678),
    ...     number_text(-0.0),
    ...     number_text(1234567),
    ...     number_text(-math.inf),
    ...     number_text(2.34e-7, 2),
    ... )
    ('0.000123457', '0', '1234567', '"-inf"', '2.3e-7')
    """
    if value is None:
        return "null"
    if type(value) is int:
        return str(value)
    text = f"{value:.{digits}g}"
    if "e" in text:
        mantissa, _, exponent = text.partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f'"{text}"' if text[-1] in "fn" else "0" if text == "-0" else text


def precision(role: Role, dtype: str, noise: float | None) -> float:
    """Return how precisely a fingerprint is kept, relative to the norm.

    More noise needs fewer digits, and so does a narrow dtype. Integers and booleans have a digest, which is exact:
    their fingerprint only estimates how many elements changed.

    >>> precision("value", "float32", None), precision("gradient", "float32", 1e-4), precision("own", "bfloat16", None)
    (2.5e-07, 0.0001, 0.00048)
    """
    if not floating(dtype) and role not in ("response", "response gradient"):  # responses are floating numbers
        return _WITH_DIGEST
    return max(_PRECISION[role], _NARROW.get(dtype, 0.0), noise or 0.0)


_WITH_DIGEST = 1e-4
_PRECISION: dict[Role, float] = {
    "value": 2.5e-7, "response": 2.5e-7, "own": 7.5e-7,
    "gradient": 5e-7, "own gradient": 5e-7, "response gradient": 5e-7,
}  # fmt: skip
"""An eighth of the smallest tolerance of `comparison` for values, a quarter for gradients, parameters and buffers."""
_NARROW = {"float16": 6e-5, "bfloat16": 4.8e-4}
"""A sixteenth of the distance between 1 and the next number of the dtype."""


def reading_text(reading: Reading | None, shape: Sequence[Dimension] | None, dtype: str, role: Role) -> str:
    """Return the list of a reading. ``shape`` is the shape of its tensor, or ``None`` if it is not known."""
    if reading is None:
        return "null"
    numbers = reading.statistics
    columns = []
    if numbers is not None and role in FULL:
        std = numbers.std
        columns = [number_text(x) for x in (_mean(numbers.mean, std), std, numbers.min, numbers.max)]
    elif numbers is not None:
        columns = [number_text(numbers.rms)]
    least = len(columns)
    noise = None if reading.noise is None else float(f"{reading.noise:.2g}")
    if reading.fingerprint is not None:
        columns += [_fingerprint_text(reading.fingerprint, precision(role, dtype, noise)), number_text(noise, 2)]
    elif least:
        columns += ["null", number_text(noise, 2)]
    if numbers is not None and numbers.zeros:
        columns.append(str(numbers.zeros))
    while len(columns) > least and columns[-1] == "null":
        columns.pop()
    more = _more(reading, shape)
    if noise is not None and not columns:
        more["noise"] = noise if math.isfinite(noise) else str(noise)
    if more:
        columns.append(_COMPACT(more))
    return f"[{','.join(columns)}]"


def reading_from(data: Any, shape: Sequence[Dimension] | None, role: Role) -> Reading:
    """Return the reading that `reading_text` wrote.

    Only types are checked, and what would fill the memory: two files that are compared show each other's edits.

    Raises:
        FormatError: The data is no such list.
    """
    if type(data) is not list:
        raise FormatError(f"{excerpt(data)} is no list of numbers")
    if not data:
        return Reading()
    more: dict[str, Any] = {}
    if type(data[-1]) is dict:
        data, more = data[:-1], data[-1]
    first = data[0] if data else ""
    counted = type(first) is not list and (type(first) is not str or first in _NONFINITE)
    least = (4 if role in FULL else 1) if counted else 0
    if not least <= len(data) <= least + 2 + counted:
        raise FormatError(f"{len(data)} numbers are not as many as columns")
    fingerprint, noise, zeros = (*data[least:], None, None, None)[:3]
    noise = more.get("noise", noise)
    return Reading(
        statistics=_statistics(data[:least], zeros or 0, shape, more) if counted else None,
        fingerprint=None if fingerprint is None else _fingerprint_from(fingerprint),
        noise=None if noise is None else _float(noise),
        tensors=_whole(more.get("tensors", 1)),
        units=_units(more["dead"]) if "dead" in more else None,
        digest=text_or_none(more.get("digest"), "digest"),
        reason=text_or_none(more.get("reason"), "reason"),
    )


# --- what a reading has besides its columns -----------------------------------------------------------------------

_COUNTS = ("nan", "posinf", "neginf")
_FIRST = ("first_nan", "first_posinf", "first_neginf")


def _more(reading: Reading, shape: Sequence[Dimension] | None) -> dict[str, Any]:
    more: dict[str, Any] = {}
    numbers = reading.statistics
    if reading.tensors != 1:
        more["tensors"] = reading.tensors
    if numbers is not None:
        if numbers.count != _count(shape, reading.tensors):
            more["count"] = numbers.count
        if numbers.nonfinite:
            more |= {name: n for name in _COUNTS if (n := getattr(numbers, name))}
            more |= {name: n for name in _FIRST if (n := getattr(numbers, name)) is not None}
        units = reading.units
        if numbers.zeros and units is not None and len(units) <= _MOST_UNITS and units.dead:
            more["dead"] = [units.dead, len(units), units.axis]
    if reading.digest is not None:
        more["digest"] = reading.digest
    if reading.reason is not None:
        more["reason"] = reading.reason
    return more


def _count(shape: Sequence[Dimension] | None, tensors: int) -> int | None:
    """Return how many elements so many tensors of a shape have; ``None`` if it is not known or varies."""
    sizes = [size for size in shape or () if type(size) is int]
    return None if shape is None or len(sizes) < len(shape) else tensors * math.prod(sizes)


def _statistics(
    columns: list[Any], zeros: Any, shape: Sequence[Dimension] | None, more: Mapping[str, Any]
) -> Statistics:
    count = _whole(more["count"] if "count" in more else _count(shape, _whole(more.get("tensors", 1))))
    odd = {name: _whole(more[name]) for name in (*_COUNTS, *_FIRST) if name in more} if more else {}
    finite = count - (sum(odd.get(name, 0) for name in _COUNTS) if odd else 0)
    # Of a gradient only the root mean square is kept.
    mean, std, low, high = columns if len(columns) > 1 else (0, *columns, None, None)
    if finite <= 0 or mean is None:
        return Statistics(count=count, zeros=_whole(zeros), **odd)
    deviation = _float(std)
    ends: dict[str, Any] = {"min": _exact(low), "max": _exact(high)} if len(columns) > 1 else {}
    deviations = deviation * deviation * finite
    return Statistics(count=count, zeros=_whole(zeros), mean=_float(mean), deviations=deviations, **ends, **odd)


def _units(data: Any) -> Units:
    """Return units of which only the number of dead ones is known: first the dead ones, then NaN for the others."""
    dead, units, axis = data if type(data) is list and len(data) == 3 else (0, 0, 0)
    if type(axis) is not int or not 0 < _whole(dead) <= _whole(units) <= _MOST_UNITS:
        raise FormatError(f"{excerpt(data)} are no dead units")
    numbers = (0.0,) * dead + (math.nan,) * (units - dead)
    return Units(axis=axis, low=numbers, high=numbers)


# --- single numbers -----------------------------------------------------------------------------------------------


def _mean(mean: float | None, std: float | None) -> float | None:
    """Round a mean to the digits of the deviation. Smaller digits are noise, and would change with every update."""
    if not mean or not std or not math.isfinite(std) or not math.isfinite(mean):
        return mean
    return round(mean, 6 - math.floor(math.log10(float(f"{std:.6g}") or 1.0)))


def _fingerprint_text(fingerprint: Sequence[float], precision: float) -> str:
    if len(fingerprint) == fixed_point.FINGERPRINT_SIZE and all(map(math.isfinite, fingerprint)):
        return f'"{fixed_point.packed(tuple(fingerprint), fixed_point.bits_for(precision))}"'
    return f"[{','.join(number_text(x, 9) for x in fingerprint)}]"


def _fingerprint_from(data: Any) -> tuple[float, ...]:
    if type(data) is str:
        return fixed_point.unpacked(data)
    if type(data) is list and len(data) == fixed_point.FINGERPRINT_SIZE:
        return tuple(map(_float, data))
    raise FormatError(f"{str(data)[:80]!r} is no fingerprint")


_NONFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def _float(data: Any) -> float:
    if type(data) in (float, int):
        return float(data)  # `parsed` refuses an integer that no float holds
    if type(data) is str and data in _NONFINITE:
        return _NONFINITE[data]
    raise FormatError(f"{str(data)[:80]!r} is no number")


def _exact(data: Any) -> float:
    """Return a float, or an integer as it is, for the smallest and largest of integers are exact."""
    return data if type(data) is int and abs(data) < 1 << 64 else _float(data)


def _whole(data: Any) -> int:
    if type(data) is not int or not 0 <= data < 1 << 63:
        raise FormatError(f"{str(data)[:80]!r} is no whole number")
    return data
