"""From the text of a file to checked JSON, or to an error of one sentence that says what to do.

The usual ways to damage a file in git have a sentence of their own: conflict markers, a file that is cut off, one of
another version. JSON is read strictly: a name that stands twice, NaN or a number with thousands of digits is refused,
because another reader could see something else in it. The second half of the module checks names and types of fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, NoReturn

from pytest_modelprobe.exceptions import SnapshotError

from .layout import LAYERS, SCHEMA
from .specs import FormatError

MOST_BYTES = 64 << 20
"""The size of the largest file that is read. No snapshot is larger."""

_MOST_DIGITS = 300
"""Digits of the longest integer that is read. No attribute has more, and a float holds every number of so many."""

RESTORE = "restore it from version control, or delete it and record it anew with `pytest --snapshot-update`"

_OURS = re.compile(r"<<<<<<<(?<=^.{7}) ?(.*)$", re.MULTILINE)  # the search for a literal skips most lines
_THEIRS = re.compile(r">>>>>>>(?<=^.{7}) ?(.*)$", re.MULTILINE)


def parsed(text: str, where: str, *, section: str = LAYERS) -> dict[str, Any]:
    """Return what a file of our schema holds, or of the one before.

    Args:
        text: The text of the file.
        where: Its path, for messages.
        section: The name of the object that every file of this kind has.

    Raises:
        SnapshotError: It is another file, damaged, or of another version.
    """
    if not text.strip():
        raise SnapshotError(f"{where} is empty: {RESTORE}")
    if text.startswith("\ufeff"):
        raise SnapshotError(
            f"{where} starts with a byte order mark, which strict JSON has not: save it as UTF-8 without one"
        )
    ours, theirs = _OURS.search(text), _THEIRS.search(text)
    if ours or theirs:
        sides = f" of {excerpt(ours[1])} and {excerpt(theirs[1])}" if ours and theirs else ""
        raise SnapshotError(
            f"{where} holds the conflict markers of a merge{sides}: check out one side "
            "(`git checkout --ours` or `--theirs`) of both its files and run `pytest --snapshot-update`"
        )
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant, parse_int=_integer)
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()):
            raise SnapshotError(f"{where} is cut off in line {error.lineno}: {RESTORE}") from None
        raise SnapshotError(
            f"{where} is no JSON in line {error.lineno}, column {error.colno} ({error.msg}): {RESTORE}"
        ) from None
    except RecursionError:
        raise SnapshotError(f"{where} is nested too deeply to be a snapshot: {RESTORE}") from None
    except ValueError as error:  # ours, and that of an integer with thousands of digits
        first_line = str(error).partition("\n")[0]
        raise SnapshotError(f"{where} is no strict JSON, {first_line}: {RESTORE}") from None
    if type(data) is not dict or type(data.get(section)) is not dict:
        raise SnapshotError(f"{where} is no file of pytest-modelprobe: {RESTORE}")
    schema = data.get("modelprobe")
    if type(schema) is not int or schema < 1:
        raise SnapshotError(f"{where} is no file of pytest-modelprobe, for its schema is {excerpt(schema)}: {RESTORE}")
    if schema > SCHEMA:
        raise SnapshotError(
            f"{where} was written by a newer pytest-modelprobe (schema {excerpt(schema)}; this one reads {SCHEMA}): "
            "upgrade pytest-modelprobe"
        )
    if schema < SCHEMA - 1:
        raise SnapshotError(
            f"{where} was written by an older pytest-modelprobe (schema {schema}; this one reads {SCHEMA}): delete "
            "it and the file beside it, and record the snapshot again with --snapshot-update"
        )
    return data


def too_large(where: str, size: int) -> NoReturn:
    """Raise the error of a file that is too large to read."""
    raise SnapshotError(
        f"{where} has {size >> 20:,} MB, more than a snapshot ever has ({MOST_BYTES >> 20} MB): {RESTORE}"
    )


def text_of(data: bytes, where: str) -> str:
    """Return the text of a file; raise `SnapshotError` if it is not UTF-8."""
    try:
        return data.decode("utf-8").replace("\r\n", "\n")  # as a checkout on Windows may have it
    except UnicodeDecodeError as error:
        raise SnapshotError(f"{where} is no UTF-8 text at byte {error.start}: {RESTORE}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FormatError(f"{excerpt(twice)} stands twice in one object")
    return found


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise FormatError(f"a number of {len(text):,} digits stands in it")
    return int(text)


def _constant(name: str) -> NoReturn:
    raise FormatError(f"{name} is no number there")


def excerpt(value: object) -> str:
    """Return untrusted text for a message: one short line without control characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- types --------------------------------------------------------------------------------------------------------


def check_fields(data: Mapping[str, Any], fields: Mapping[str, type | UnionType]) -> None:
    """Raise `FormatError` unless each entry has a name and a type of ``fields``."""
    for name, value in data.items():
        wanted = fields.get(name)
        if wanted is None:
            raise FormatError(f"it has an unknown field {excerpt(name)}")
        if type(value) is not wanted and not (isinstance(wanted, UnionType) and type(value) in wanted.__args__):
            raise FormatError(f"{excerpt(name)} is {excerpt(value)}, which is of the wrong type")


def string_dict(data: Any, what: str) -> dict[str, str]:
    """Return an object whose values are all texts; raise `FormatError` for anything else."""
    if type(data) is not dict or not all(type(value) is str for value in data.values()):
        raise FormatError(f"{what} is {excerpt(data)}, no object of texts")
    return data


def string_tuple(data: Any, what: str) -> tuple[str, ...]:
    """Return a list of texts as a tuple; raise `FormatError` for anything else."""
    if type(data) is not list or not all(type(value) is str for value in data):
        raise FormatError(f"{what} is {excerpt(data)}, no list of texts")
    return tuple(data)


def text_or_none(data: Any, what: str) -> str | None:
    """Return a text, or None; raise `FormatError` for anything else."""
    if type(data) not in (str, type(None)):
        raise FormatError(f"{what} is {excerpt(data)}, no text")
    return data  # type: ignore[no-any-return]
