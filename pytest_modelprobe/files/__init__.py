"""Snapshots as two text files: what a test recorded, kept in git.

`encode` writes a record as the texts of an architecture file and a numbers file, and `decode` reads them back. The
architecture is exact and the same on all devices; the numbers are rounded, and each device has its own. The files are
made for review: a layer is one line, defaults are left out, and an update touches as few lines as possible. A file may
come from anybody who opens a pull request, so nothing in it is trusted: it is read with limits, and what is wrong is
said in one sentence with the path and the way out.
"""

from __future__ import annotations

from .architecture import SCHEMA
from .storage import (
    ARCH,
    DIRECTORY,
    PROBE,
    REMOVED,
    case_folded,
    file_name,
    read,
    read_text,
    read_texts,
    write,
    write_text,
)
from .texts import (
    MOST_BYTES,
    RESTORE,
    Removal,
    StoredSnapshot,
    Texts,
    architecture_digest,
    decode,
    decode_architecture,
    encode,
    is_older,
    parsed,
    removal_from,
    removal_text,
    rewritten,
    text_of,
    too_large,
    with_reason,
)

__all__ = [
    "ARCH",
    "DIRECTORY",
    "PROBE",
    "REMOVED",
    "SCHEMA",
    "Removal",
    "removal_from",
    "removal_text",
    "read_text",
    "read_texts",
    "write",
    "write_text",
    "MOST_BYTES",
    "RESTORE",
    "parsed",
    "text_of",
    "too_large",
    "StoredSnapshot",
    "Texts",
    "architecture_digest",
    "decode",
    "decode_architecture",
    "encode",
    "file_name",
    "case_folded",
    "is_older",
    "read",
    "rewritten",
    "with_reason",
]
