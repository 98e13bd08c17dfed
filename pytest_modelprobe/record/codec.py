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
from collections.abc import Collection, Mapping
from typing import Any, cast


def encode(value: Any) -> Any:
    """Return plain dicts, lists, numbers and strings for strict JSON. Fields at their default are left out."""
    if value is None or type(value) in (str, int, bool):
        return value
    if dataclasses.is_dataclass(value):
        return encode_fields(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}  # strict JSON has no NaN; a dict cannot be taken for a string
    if isinstance(value, tuple):
        return [encode(v) for v in value]
    if isinstance(value, Mapping):
        return {k: encode(v) for k, v in value.items()}
    return value


def encode_fields(value: Any, names: Collection[str] | None = None, usual: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return the fields of a dataclass as plain data, without those that have their usual value.

    Args:
        value: The dataclass.
        names: Which fields to return. By default these are all.
        usual: Usual values of fields. That of any other field is its default.
    """
    found = {}
    for name, default in _defaults(value.__class__):
        if names is None or name in names:
            part = getattr(value, name)
            if part != usual.get(name, default):
                found[name] = encode(part)
    return found


@functools.cache
def _defaults(cls: type) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass with their defaults, none of which changes."""
    made = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return [(f.name, f.default if f.default_factory is made else f.default_factory()) for f in fields]


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def decode_fields(cls: type, data: Any, names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the fields of a dataclass from which `encode_fields` made ``data``, by name.

    Raises:
        ValueError: It is no object, has another field, or a field is of another type.
    """
    hints = _hints(cls)
    if type(data) is not dict:
        raise ValueError(f"{data!r} stands where {cls.__name__} is expected")
    unknown = data.keys() - (hints.keys() if names is None else names)
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {min(unknown)!r}")
    return {k: decode(hints[k], v) for k, v in data.items()}


def decode(hint: Any, data: Any) -> Any:
    """Return the value of type ``hint`` from which `encode` made ``data``.

    The data may come from a file that somebody edited, so that each type is checked.

    Raises:
        ValueError: The data is of another type.
    """
    if type(data) is hint:
        return data
    origin, args = _outer(hint)
    if dataclasses.is_dataclass(hint):
        return cast(Any, hint)(**decode_fields(cast(type, hint), data))
    if origin in (types.UnionType, typing.Union):
        fitting = next((arg for arg in args if _fits(arg, data)), args[0])
        return decode(fitting, data)
    if hint is Any:
        return data
    if not _fits(hint, data):
        raise ValueError(f"{data!r} stands where {getattr(hint, '__name__', hint)} is expected")
    if origin is tuple:
        return tuple(decode(args[0], v) for v in data)
    if origin is Mapping:
        return {k: decode(args[1], v) for k, v in data.items()}
    return float(data["float"]) if isinstance(data, dict) else data


@functools.cache
def _outer(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def _fits(hint: Any, data: Any) -> bool:
    """Whether plain data is of the outer kind that a hint encodes to. What is inside is checked when it is decoded."""
    origin, _ = _outer(hint)
    if origin is tuple:
        return isinstance(data, list)
    if isinstance(data, dict):
        encoded_float = data.keys() == {"float"} and isinstance(data["float"], str)
        return encoded_float if hint is float else dataclasses.is_dataclass(hint) or origin is Mapping
    if hint is float:  # JSON does not tell 1.0 from 1
        return type(data) in (int, float)
    # By the exact type: a bool is an instance of int.
    return type(data) is (type(None) if hint is None else hint)
