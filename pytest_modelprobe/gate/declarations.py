"""Reasons with a word in them, and the versions that an architecture supersedes."""

from __future__ import annotations

import re
import unicodedata


def has_words(reason: str | None) -> bool:
    r"""Whether a reason contains a letter or a digit, in any script.

    >>> has_words("wider"), has_words(" "), has_words("\u200b"), has_words("\u3164"), has_words("--"), has_words(None)
    (True, False, False, False, False, False)
    """
    return bool(words(reason or ""))


def words(reason: str) -> list[str]:
    """Return the words of a reason without case, punctuation and invisible characters."""
    plain = unicodedata.normalize("NFKC", reason).casefold()
    seen = (sign for sign in plain if unicodedata.category(sign) != "Cf" and "FILLER" not in unicodedata.name(sign, ""))
    return re.findall(r"[^\W_]+", "".join(seen))


def superseded(chain: str | None, before: str, now: str, most: int = 64) -> str | None:
    """Return the digests that an architecture supersedes: those of the earlier versions, the oldest first.

    With all of them a reason at the end of a branch holds for the whole branch, whatever the number of updates. They
    are part of the file, so a squash or a rebase keeps them.

    Args:
        chain: What the snapshot that is updated supersedes.
        before: Digest of its architecture.
        now: Digest of the architecture that takes its place.
        most: How many are kept, the newest.

    >>> superseded(None, "a", "b"), superseded("a", "b", "c"), superseded("a b", "c", "b"), superseded("a", "b", "b")
    ('a', 'a b', 'a', 'a')
    """
    known = (chain or "").split()
    steps = [*known, before] if before != now else known
    if now in steps:  # back to what it was: the way there and back is none
        steps = steps[: steps.index(now)]
    return " ".join(steps[-most:]) or None
