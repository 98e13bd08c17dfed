"""Records as two text files, and back: what a test recorded, kept in git."""

from __future__ import annotations

from .declaring import Removal, removal_from, removal_text, with_reason
from .decoding import StoredSnapshot, architecture_digest, decode, decode_architecture
from .encoding import encode
from .file_names import case_folded, file_name
from .layout import Texts
from .parsing import MOST_BYTES, RESTORE, parsed, text_of, too_large
from .storage import ARCH, DIRECTORY, PROBE, REMOVED, read, read_texts, write
from .updating import rewritten

__all__ = [
    "ARCH",
    "DIRECTORY",
    "PROBE",
    "REMOVED",
    "Removal",
    "removal_from",
    "removal_text",
    "read_texts",
    "write",
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
