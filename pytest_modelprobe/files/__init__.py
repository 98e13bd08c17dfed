"""Snapshots as two text files: what a test recorded, kept in git.

`encode` writes a record as the texts of an architecture file and a numbers file, and `decode` reads them back. The
architecture is exact and the same on all devices; the numbers are rounded, and each device has its own. The files are
made for review: a layer is one line, defaults are left out, and an update touches as few lines as possible. A file may
come from anybody who opens a pull request, so nothing in it is trusted: it is read with limits, and what is wrong is
said in one sentence with the path and the way out.
"""

from __future__ import annotations

from .declaring import Removal, removal_from, removal_text, with_reason
from .decoding import StoredSnapshot, architecture_digest, decode, decode_architecture
from .encoding import encode
from .file_names import case_folded, file_name
from .layout import SCHEMA, Texts
from .parsing import MOST_BYTES, RESTORE, parsed, text_of, too_large
from .storage import ARCH, DIRECTORY, PROBE, REMOVED, read, read_text, read_texts, write, write_text
from .updating import rewritten

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
    "read",
    "rewritten",
    "with_reason",
]
