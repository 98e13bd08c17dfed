"""A record as a file, for another process or another machine, and the writer of every file that is kept.

A file is written beside its place, read back, and then renamed: a run that is killed, or a full disk, leaves the old
file and never half of the new one.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import secrets
import zlib
from pathlib import Path
from typing import Any, NoReturn

from pytest_modelprobe.exceptions import UsageError


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
