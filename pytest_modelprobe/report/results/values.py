"""Tensors and numbers as plain data.

Strict JSON has no NaN, no infinity and no lone surrogate, and a record may have subclasses such as `numpy.float64`. All
of that becomes builtin types here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pytest_modelprobe.record import Histogram, Reading, Statistics, Value


def number(value: float | None) -> float | str | None:
    """Return a number of a builtin type. A number that is not finite becomes text, because strict JSON has no NaN.

    >>> number(0.5), number(-math.inf), number(None)
    (0.5, '-inf', None)
    """
    if value is None or type(value) is int:
        return value
    return float(value) if math.isfinite(value) else str(float(value))


def text(value: str) -> str:
    r"""Return text that UTF-8 can encode: a lone surrogate, as in names of files, is written as its escape.

    >>> text("fc1"), text("fc" + chr(0xD800))
    ('fc1', 'fc\\ud800')
    """
    return value.encode("utf-8", "backslashreplace").decode() if not value.isascii() else str(value)


def plain(value: Any) -> Any:
    """Return an argument or an attribute in a builtin type, of subclasses such as `numpy.float64` too.

    >>> plain(True), plain(3), plain(math.nan), plain("same")
    (True, 3, 'nan', 'same')
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
    return int(value) if isinstance(value, int) else number(value)


def builtin(value: Any) -> Any:
    """Return dicts, lists and tuples with all that is in them in builtin types.

    >>> builtin({"a": (math.inf, 1)})
    {'a': ['inf', 1]}
    """
    if isinstance(value, dict):
        return {text(name): builtin(part) for name, part in value.items()}
    return [builtin(part) for part in value] if isinstance(value, (list, tuple)) else plain(value)


def tensor_data(value: Value) -> dict[str, Any]:
    """Return one tensor of a call; a dimension that varied between forwards is ``[least, most]``."""
    backward = value.backward
    return {
        "path": text(value.path),
        "shape": [size if isinstance(size, int) else list(size) for size in value.shape],
        "dtype": value.dtype,
        "statistics": statistics_data(value.forward.statistics),
        "reason": None if value.forward.statistics is not None else text(value.forward.reason or "not recorded"),
        "histogram": histogram_data(value.forward.histogram),
        "gradient": None if backward is None else statistics_data(backward.statistics),
        "gradient_histogram": None if backward is None else histogram_data(backward.histogram),
    }


def statistics_data(s: Statistics | None) -> dict[str, Any] | None:
    """Return the numbers of a tensor."""
    return None if s is None else {name: number(getattr(s, name)) for name in _NUMBERS}


_NUMBERS = ("count", "nan", "posinf", "neginf", "zeros", "min", "max", "mean", "std", "rms")


def histogram_data(histogram: Histogram | None) -> dict[str, Any] | None:
    """Return the counts of a tensor in the bins from the first to the last of ``exponents``."""
    if histogram is None:
        return None
    return {
        "exponents": [histogram.first, histogram.first + max(len(histogram.positive) - 1, 0)],
        "negative": list(histogram.negative or (0,)),
        "zero": histogram.zero,
        "positive": list(histogram.positive or (0,)),
        "per_octave": 2,
    }


def rms_of(readings: Iterable[Reading | None]) -> float | str | None:
    """Return the root mean square of the elements of several tensors together, or `None` if no tensor has numbers."""
    merged: Statistics | None = None
    for reading in readings:
        if reading is not None and reading.statistics is not None:
            merged = reading.statistics if merged is None else merged.merge(reading.statistics)
    return None if merged is None else number(merged.rms)
