"""Equality of frozen dataclasses that hold floats: a NaN equals a NaN."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, cast


class NanEqual:
    """Base of dataclasses that are equal where all fields are equal, a NaN to a NaN."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        values = _values_of(cast(Any, type(self)))
        return bool(values(self) == values(other)) or _fields(self) == _fields(other)

    def __hash__(self) -> int:
        return hash(_fields(self))


def _fields(numbers: Any) -> tuple[Any, ...]:
    return tuple(_with_one_nan(getattr(numbers, f.name)) for f in dataclasses.fields(numbers) if f.compare)


@functools.cache
def _values_of(kind: type[Any]) -> Callable[[object], object]:
    return operator.attrgetter(*(field.name for field in dataclasses.fields(kind) if field.compare))


def _with_one_nan(value: Any) -> Any:
    """Return the value with `math.nan` for every NaN: tuples and mappings take the same object for equal."""
    if isinstance(value, tuple):
        return tuple(map(_with_one_nan, value))
    if isinstance(value, Mapping):
        return {key: _with_one_nan(part) for key, part in value.items()}
    return math.nan if isinstance(value, float) and math.isnan(value) else value
