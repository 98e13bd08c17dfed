"""Records to plain dicts and back: one codec that follows the fields of the dataclasses.

A new field needs no code here, because its type says how it is read. Fields at their default are left out, so that a
record with few statistics is short, and a record that was written before a field existed can still be read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, cast


def encode(value: Any) -> Any:
    """Return plain dicts, lists, numbers and strings for strict JSON. Fields at their default are left out."""
    if dataclasses.is_dataclass(value):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: encode(v) for f, v in fields if v != _default(f)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}  # strict JSON has no NaN; a dict cannot be taken for a string
    if isinstance(value, tuple):
        return [encode(v) for v in value]
    if isinstance(value, Mapping):
        return {k: encode(v) for k, v in value.items()}
    return value


def _default(spec: dataclasses.Field[Any]) -> Any:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return spec.default


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def decode(hint: Any, data: Any) -> Any:
    """Return the value of type ``hint`` from which `encode` made ``data``.

    The data may come from a file that somebody edited, so that each type is checked.

    Raises:
        ValueError: The data is of another type.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(data, dict):
        hints = _hints(cast(type, hint))
        unknown = data.keys() - hints.keys()
        if unknown:
            raise ValueError(f"{cast(type, hint).__name__} has no field {min(unknown)!r}")
        return cast(Any, hint)(**{k: decode(hints[k], v) for k, v in data.items()})
    if origin in (types.UnionType, typing.Union):
        fitting = next((arg for arg in args if _fits(arg, data)), args[0])
        return decode(fitting, data)
    if not _fits(hint, data):
        raise ValueError(f"{data!r} stands where {getattr(hint, '__name__', hint)} is expected")
    if origin is tuple:
        return tuple(decode(args[0], v) for v in data)
    if origin is Mapping:
        return {k: decode(args[1], v) for k, v in data.items()}
    return float(data["float"]) if isinstance(data, dict) else data


def _fits(hint: Any, data: Any) -> bool:
    """Whether plain data is of the outer kind that a hint encodes to. What is inside is checked when it is decoded."""
    origin = typing.get_origin(hint)
    if origin is tuple:
        return isinstance(data, list)
    if isinstance(data, dict):
        encoded_float = data.keys() == {"float"} and isinstance(data["float"], str)
        return encoded_float if hint is float else dataclasses.is_dataclass(hint) or origin is Mapping
    if hint is float:  # JSON does not tell 1.0 from 1
        return type(data) in (int, float)
    # By the exact type: a bool is an instance of int.
    return type(data) is (type(None) if hint is None else hint)
