"""The two files on disk: read with a limit of size, and written so that no crash leaves half a file.

Each file is written beside its place, flushed to disk and then renamed, because a run may be killed at any time. A path
that leads out of the tests by a symbolic link is refused: a pull request could bring such a link, and an update would
write through it. Whatever the system refuses becomes an error with the next step.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from pathlib import Path

from pytest_modelprobe.exceptions import SnapshotError
from pytest_modelprobe.interrupts import held

from .decoding import StoredSnapshot, decode
from .layout import Texts
from .parsing import MOST_BYTES, text_of, too_large

ARCH, PROBE = ".arch.json", ".probe.json"
REMOVED = ".removed.json"
"""The ending of a file that declares why a snapshot was deleted."""
DIRECTORY = "__modelprobe__"

_TEMPORARY = re.compile(r"\.modelprobe-(\d{1,10})-[0-9a-f]{8}\.tmp")
_OLD = 3600.0  # seconds after which a temporary file is removed, also if its process runs on another machine
_MOST_TRIES = 3


def read(path: Path, numbers: Path | None = None) -> StoredSnapshot:
    """Return the snapshot in the two files.

    Args:
        path: The architecture file, ``….arch.json``.
        numbers: The numbers file. By default it has the same name.

    Raises:
        SnapshotError: There is no snapshot, or it cannot be read. The message is one sentence, with the next step.
    """
    texts = read_texts(path, numbers)
    if texts is None:
        raise SnapshotError(f"there is no snapshot {path}: record it with `pytest --snapshot-update`")
    return decode(*texts, where=str(path), numbers_at=str(_numbers_path(path, numbers)))


def read_texts(path: Path, numbers: Path | None = None) -> Texts | None:
    """Return the contents of the two files; ``None`` if there is no architecture file.

    Raises:
        SnapshotError: A file cannot be read.
    """
    architecture = _read(path)
    return None if architecture is None else Texts(architecture, _read(_numbers_path(path, numbers)))


def read_text(path: Path) -> str | None:
    """Return the contents of another file beside snapshots; ``None`` if there is none.

    Raises:
        SnapshotError: The file cannot be read.
    """
    return _read(path)


def write_text(path: Path, text: str) -> None:
    """Write another file beside snapshots, atomically, and create its directory.

    Raises:
        SnapshotError: The file cannot be written.
    """
    _make_directory(path.parent)
    with held():
        _write(path, text)


def write(path: Path, texts: Texts, numbers: Path | None = None) -> None:
    """Write both files, each atomically, and create their directory.

    A process that is killed in between leaves the old files, or numbers whose digest does not fit the architecture. Its
    temporary files are removed by the next write to the directory.

    Args:
        path: The architecture file.
        texts: What `encode` or `rewritten` returned. Without numbers, an old numbers file is removed.
        numbers: The numbers file. By default it has the same name.

    Raises:
        SnapshotError: The files cannot be written.
    """
    probe = _numbers_path(path, numbers)
    _make_directory(path.parent)
    with held():
        # Numbers first: an interrupted first update leaves no snapshot, a later one the reviewed architecture.
        if texts.numbers is not None:
            _write(probe, texts.numbers)
        _write(path, texts.architecture)
        if texts.numbers is None:
            _inside(probe)
            probe.unlink(missing_ok=True)


def _numbers_path(path: Path, numbers: Path | None) -> Path:
    return path.with_name(path.name.removesuffix(ARCH) + PROBE) if numbers is None else numbers


# --- reading ------------------------------------------------------------------------------------------------------


def _read(path: Path) -> str | None:
    target = _inside(path)
    try:
        status = target.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise SnapshotError(f"{path} is {kind}: move it out of the way, it stands where a snapshot belongs")
        if status.st_size > MOST_BYTES:
            too_large(str(path), status.st_size)
        data = target.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read ({error.strerror}): give yourself the right to read it") from None
    return text_of(data, str(path))


def _inside(path: Path) -> Path:
    """Resolve a path; raise `SnapshotError` if a symbolic link leads it out of the directory of the tests."""
    parts = path.absolute().parts
    at = parts.index(DIRECTORY) if DIRECTORY in parts else len(parts) - 1
    root = Path(*parts[:at])
    try:
        target, tests = path.resolve(), root.resolve()
    except (OSError, RuntimeError):  # a loop of links
        raise SnapshotError(f"{path} is a symbolic link in a circle: remove it") from None
    if not target.is_relative_to(tests):
        raise SnapshotError(
            f"{path} leads out of {root} by a symbolic link, to {target}: replace the link by the files"
        )
    return target


# --- writing ------------------------------------------------------------------------------------------------------


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be made ({error.strerror}): {_way_out(error, path)}") from None
    _remove_stale(path)


def _write(path: Path, text: str) -> None:
    target = _inside(path)
    data = text.encode("utf-8")
    try:
        if target.is_file() and target.stat().st_size == len(data) and target.read_bytes() == data:
            return
        if not _replaced(target, data):
            raise SnapshotError(f"{path} cannot be written, for its temporary files vanish: run it again")
        _flush_directory(target.parent)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be written ({error.strerror}): {_way_out(error, path)}") from None


def _replaced(target: Path, data: bytes) -> bool:
    """Write the data to a hidden file beside the target, flush it to disk, and rename it; return whether that worked.

    It may fail because another machine, on a shared disk, took the hidden file for one that a killed run had left.
    """
    for _ in range(_MOST_TRIES):
        temporary = target.with_name(f".modelprobe-{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                temporary.replace(target)
                return True
        finally:
            temporary.unlink(missing_ok=True)
    return False


def _flush_directory(directory: Path) -> None:
    """Flush the entries of a directory to disk, where the system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _way_out(error: OSError, path: Path) -> str:
    """Return the advice for a file that cannot be written."""
    if error.errno in _FULL:
        return f"free space for {path.parent}, and run the update again"
    return f"make {path} writable, or leave out `--snapshot-update`"


def _remove_stale(directory: Path) -> None:
    """Remove temporary files of ours that are old, or whose process does not run."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):  # noqa: PTH208 - names are enough, and there may be many
            found, temporary = _TEMPORARY.fullmatch(name), directory / name
            with contextlib.suppress(OSError):
                if found and (time.time() - temporary.stat().st_mtime > _OLD or not _runs(int(found[1]))):
                    temporary.unlink()


def _runs(pid: int) -> bool:
    """Whether a process runs; True if nobody knows."""
    if os.name != "posix":
        return True  # on Windows, os.kill ends the process that it is asked about
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # the process of another user
        pass
    return True
