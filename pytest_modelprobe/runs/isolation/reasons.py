"""Reasons why a call cannot be isolated, in one line."""

from __future__ import annotations

_LONGEST = 200


class CannotTellError(Exception):
    """A call that cannot be isolated; the text is the reason."""


def reason_of(error: Exception) -> str:
    """Return the message of an error, with its type unless it is a `CannotTellError`."""
    return line(str(error) if isinstance(error, CannotTellError) else f"{type(error).__name__}: {error}")


def line(text: str) -> str:
    """Return the first line of a text, printable and not too long."""
    first = text.strip().partition("\n")[0]
    shown = "".join(c if c.isprintable() else "?" for c in first)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 3] + "..."
