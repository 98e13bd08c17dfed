"""Names of snapshot files, made from names of tests.

The id of a test may have any character, and its files have to be checked out on every system. So what some file system
forbids is encoded, and no two tests share a name.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata

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


def case_folded(name: str) -> str:
    """Return what a file system that ignores case, or how accents are composed, takes a name for.

    >>> case_folded("test_Net") == case_folded("test_net")
    True
    """
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())


def _encoded(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))
