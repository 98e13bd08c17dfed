"""Records to plain dicts and back, and to files: one codec that follows the fields of the dataclasses.

A new field needs no code here, because its type says how it is read. Fields at their default are left out, so that a
record with few statistics is short, and a record that was written before a field existed can still be read.

A file is written beside its place, read back, and then renamed: a run that is killed, or a full disk, leaves the old
file and never half of the new one.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import gzip
import json
import math
import os
import secrets
import types
import typing
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from pytest_modelprobe.exceptions import UsageError

_PLAIN = {str, int, bool, type(None)}


def encode(value: Any) -> Any:
    """Return plain dicts, lists, numbers and strings for strict JSON. Fields at their default are left out."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        # Strict JSON has no NaN; a dict cannot be taken for a string.
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, tuple):
        kinds = {*map(type, value)}  # most tuples are of numbers alone
        if kinds <= _PLAIN or (kinds == {float} and math.isfinite(sum(value))):
            return list(value)
        return [encode(v) for v in value]
    if dataclasses.is_dataclass(value):
        return encode_fields(value)
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


# --- files ------------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file in one step, so that a reader sees either the old content or the new.

    Raises:
        OSError: The file cannot be written, or is not what was written when it is read back.
    """
    temporary = path.with_name(f".modelprobe-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if temporary.read_bytes() != content:
            raise OSError(errno.EIO, "the disk returns other bytes than it was given")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, data: dict[str, Any]) -> None:
    """Write plain data as strict JSON; compressed if the name ends in ``.gz``.

    Raises:
        UsageError: The file cannot be written.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    # Without the time of writing, equal records make equal files.
    content = gzip.compress(text, mtime=0) if path.suffix == ".gz" else text
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): save the record at a path that is writable and has space"
        ) from None


def read(path: Path) -> Any:
    """Return the plain data in a file.

    Raises:
        UsageError: There is no such file, it cannot be read, or it is cut short or no JSON.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"there is no record {path}: write it with record.save(path)") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): give a file that record.save wrote") from None
    try:
        text = gzip.decompress(content) if path.suffix == ".gz" else content
        return json.loads(text, parse_constant=_not_strict)
    except (ValueError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error):
        raise UsageError(
            f"{path} is no record, or is cut short ({len(content):,} bytes): copy it again, or save the record again"
        ) from None


def _not_strict(name: str) -> NoReturn:
    raise ValueError(f"{name} is not of strict JSON")
