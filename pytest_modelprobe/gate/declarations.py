"""What makes a reason valid: it has a word that can be seen, and it follows from the base.

The author of a pull request writes both the reason and the digests beside it. So a reason of spaces or invisible
letters is none, the words of the last reason are not a new one, and a reason holds only if the base has an
architecture that it supersedes.
"""

from __future__ import annotations

import re
import unicodedata


def has_words(reason: str | None) -> bool:
    r"""Return whether a reason contains a letter or a digit, in any script.

    >>> has_words("wider"), has_words(" "), has_words("\u200b"), has_words("\u3164"), has_words("--"), has_words(None)
    (True, False, False, False, False, False)
    """
    return bool(words(reason or ""))


def words(reason: str) -> list[str]:
    """Return the words of a reason, without case, punctuation and invisible characters.

    Two reasons with the same words are the same reason.
    """
    plain = unicodedata.normalize("NFKC", reason).casefold()
    # Format characters have no look. Neither have the Hangul fillers, which Unicode counts as letters.
    seen = (sign for sign in plain if unicodedata.category(sign) != "Cf" and "FILLER" not in unicodedata.name(sign, ""))
    return re.findall(r"[^\W_]+", "".join(seen))


_MOST_DIGESTS = 64
"""How many superseded digests a file keeps, the newest, so that it does not grow without end."""


def superseded(chain: str | None, before: str, now: str) -> str | None:
    """Return the digests that an architecture supersedes: those of its earlier versions, the oldest first.

    All of them are kept, so that a reason that is given at the end of a branch holds for the whole branch, whatever
    the number of updates. They are part of the file, so a squash or a rebase keeps them.

    Args:
        chain: The digests that the snapshot had before this update.
        before: The digest of the architecture before this update.
        now: The digest of the architecture after it.

    >>> superseded(None, "a", "b"), superseded("a", "b", "c"), superseded("a b", "c", "b"), superseded("a", "b", "b")
    ('a', 'a b', 'a', 'a')
    """
    known = (chain or "").split()
    steps = [*known, before] if before != now else known
    if now in steps:  # It is what it was: a change that was taken back supersedes nothing.
        steps = steps[: steps.index(now)]
    return " ".join(steps[-_MOST_DIGESTS:]) or None
