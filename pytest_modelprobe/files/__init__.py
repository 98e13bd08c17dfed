"""Records as two text files, and back: what a test recorded, kept in git."""

from __future__ import annotations

from .declaring import with_reason
from .decoding import Snapshot, architecture_digest, decode, decode_architecture
from .encoding import encode
from .layout import Texts
from .names import file_name, folded
from .storage import read, read_texts, write
from .updating import rewritten

__all__ = [
    "Snapshot",
    "Texts",
    "architecture_digest",
    "decode",
    "decode_architecture",
    "encode",
    "file_name",
    "folded",
    "read",
    "read_texts",
    "rewritten",
    "with_reason",
    "write",
]
