"""Names of layers, and of places in the code between the calls of them."""

from __future__ import annotations

from pytest_modelprobe.record import ROOT, label_of


def relative_name(name: str, container: str) -> str:
    """Return a name relative to a container."""
    return name if container == ROOT else name.removeprefix(f"{container}.")


def between(before: str | None, after: str | None) -> str:
    """Return where in the code of a container something is, by the calls before and after it.

    >>> between("norm1", "attn"), between(None, "norm1"), between("mlp", None), between(None, None)
    ('between norm1 and attn', 'before norm1', 'after mlp', '')
    >>> between("0", "2")
    "between layer '0' and layer '2'"
    """
    before, after = before and label_of(before), after and label_of(after)
    if before is None:
        return "" if after is None else f"before {after}"
    return f"after {before}" if after is None else f"between {before} and {after}"
