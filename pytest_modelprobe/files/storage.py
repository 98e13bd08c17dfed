"""The two files on disk: their names, read with a limit of size, and written so that no crash leaves half a file.

The id of a test may have any character, and its files have to be checked out on every system. So what some file system
forbids is encoded, and no two tests share a name.

Each file is written beside its place, flushed to disk and then renamed, because a run may be killed at any time. A path
that leads out of the tests by a symbolic link is refused: a pull request could bring such a link, and an update would
write through it. Whatever the system refuses becomes an error with the next step.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import stat
import time
from pathlib import Path

from pytest_modelprobe.exceptions import SnapshotError
from pytest_modelprobe.interrupts import held
from pytest_modelprobe.record import codec

from .texts import MOST_BYTES, StoredSnapshot, Texts, decode, text_of, too_large

ARCH, PROBE = ".arch.json", ".probe.json"
REMOVED = ".removed.json"
"""The ending of a file that declares why a snapshot was deleted."""
DIRECTORY = "__modelprobe__"

_OLD = 3600.0
"""Seconds after which a temporary file is removed."""


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
    architecture = read_text(path)
    return None if architecture is None else Texts(architecture, read_text(_numbers_path(path, numbers)))


def write(path: Path, texts: Texts, numbers: Path | None = None) -> None:
    """Write both files, each atomically, and create their directory.

    A process that is killed in between leaves the old files, or numbers whose digest does not fit the architecture. Its
    temporary files are removed by a later write to the directory.

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


def read_text(path: Path) -> str | None:
    """Return the contents of a file; ``None`` if there is none.

    Raises:
        SnapshotError: The file cannot be read.
    """
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
    with contextlib.suppress(OSError):
        for left in path.glob(".modelprobe-*.tmp"):  # by a run that was killed
            if time.time() - left.stat().st_mtime > _OLD:
                left.unlink()


def _write(path: Path, text: str) -> None:
    """Write the text, unless it is there."""
    target, data = _inside(path), text.encode("utf-8")
    try:
        if not (target.is_file() and target.stat().st_size == len(data) and target.read_bytes() == data):
            codec.write_atomically(target, data)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be written ({error.strerror}): {_way_out(error, path)}") from None


def _way_out(error: OSError, path: Path) -> str:
    """Return the advice for a file that cannot be written."""
    if error.errno == errno.ENOSPC:
        return f"free space for {path.parent}, and run the update again"
    return f"make {path} writable, or leave out `--snapshot-update`"


# --- names --------------------------------------------------------------------------------------------------------

LONGEST = 120
"""Bytes of a name, its endings not counted: file systems allow 255, and temporary files are longer."""

# What some file system forbids or reads as more than a character: separators, wildcards, what Windows drops at the end.
_UNSAFE = re.compile(r'[/\\:*?"<>|%\x00-\x1f\x7f-\x9f\ud800-\udfff]|^\.|\.(?=\.)|[. ]$')
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$)\s*(\.|$)", re.IGNORECASE)


def file_name(name: str) -> str:
    """Return a name for a file that holds what belongs to ``name``: readable, safe on every system, one for each name.

    What is unsafe is percent-encoded, so that two names never share a file; a long name ends in its hash instead.

    Args:
        name: The name of a test with its ids, or of a module.

    >>> file_name("test_net[a:b]"), file_name("test_net[ab].2")
    ('test_net[a%3Ab]', 'test_net[ab].2')
    >>> file_name("../../etc/passwd"), file_name("con")
    ('%2E.%2F%2E.%2Fetc%2Fpasswd', '%63on')
    """
    safe = _UNSAFE.sub(lambda found: _encoded(found[0]), name)
    if _RESERVED.match(safe):
        safe = _encoded(safe[0]) + safe[1:]
    if len(safe.encode()) > LONGEST:
        ending = "-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        safe = safe.encode()[: LONGEST - len(ending)].decode("utf-8", "ignore") + ending
    return safe or "%"


def _encoded(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))
