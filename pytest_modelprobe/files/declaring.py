"""A reason written into an architecture file that is there already, which changes nothing else of it."""

from __future__ import annotations

import json

from pytest_modelprobe.exceptions import SnapshotError

from .decoding import architecture_digest
from .layout import DECLARATION

_LAYERS = '"layers": {'


def with_reason(text: str, reason: str, supersedes: str | None) -> str:
    r"""Return the text of an architecture file with another declaration.

    Args:
        text: The file, as `encode` wrote it.
        reason: Why the architecture is another one than before.
        supersedes: The digests of what it was before, as `gate.superseded` returns them.

    Raises:
        SnapshotError: The file is laid out in another way.

    >>> print(with_reason('{\n"modelprobe": 1,\n"reason": "old",\n"layers": {\n}\n}', "wider", "a b"))
    {
    "modelprobe": 1,
    "reason": "wider",
    "supersedes": "a b",
    "layers": {
    }
    }
    """
    lines = text.split("\n")
    start = next((i for i, line in enumerate(lines) if line.startswith(_LAYERS)), None)
    declaration = {"reason": reason, "supersedes": supersedes}
    new = [f'"{key}": {json.dumps(declaration[key])},' for key in DECLARATION if declaration[key]]
    header = lines[:start]
    kept = [line for line in header if not line.startswith(tuple(f'"{key}":' for key in DECLARATION))]
    found = "\n".join([*kept, *new, *lines[start:]]) if start is not None else ""
    if not found or architecture_digest(found) != architecture_digest(text):
        raise SnapshotError("its lines are not as they were written: run its test with --snapshot-update once")
    return found
