"""The reason for a change: in an architecture file, or, for a deleted snapshot, in a file of its own.

`modelprobe declare` writes a reason after the fact, without running the test. So it edits the lines of the file and
makes sure that nothing but the declaration changed.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from pytest_modelprobe.exceptions import SnapshotError

from .decoding import architecture_digest
from .layout import DECLARATION, SCHEMA
from .parsing import parsed

_LAYERS = '"layers": {'
_REMOVED = "removed"


def with_reason(text: str, reason: str, supersedes: str | None) -> str:
    r"""Return the text of an architecture file with another declaration, and no other change.

    Args:
        text: The file, as `encode` wrote it.
        reason: Why the architecture changed.
        supersedes: The digests of earlier architectures, as `gate.superseded` returns them.

    Raises:
        SnapshotError: The file is not laid out as `encode` writes it.

    >>> print(with_reason('{\n"modelprobe": 5,\n"reason": "old",\n"layers": {\n}\n}', "wider", "a b"))
    {
    "modelprobe": 5,
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


class Removal(NamedTuple):
    """Why snapshots were deleted."""

    contents: frozenset[str]
    """Digests of what the snapshots held, one for each device."""
    reason: str


def removal_text(removal: Removal) -> str:
    r"""Return the text of a file that declares a deletion.

    >>> text = removal_text(Removal(frozenset({"a"}), "not used any more"))
    >>> text
    '{\n "modelprobe": 5,\n "reason": "not used any more",\n "removed": {\n  "a": true\n }\n}\n'
    >>> removal_from(text, "test_a.removed.json").reason
    'not used any more'
    """
    removed = dict.fromkeys(sorted(removal.contents), True)
    return json.dumps({"modelprobe": SCHEMA, "reason": removal.reason, _REMOVED: removed}, indent=1) + "\n"


def removal_from(text: str, where: str) -> Removal:
    """Return what `removal_text` wrote. ``where`` is the path of the file, for messages.

    Raises:
        SnapshotError: The text is damaged or was written by a newer version.
    """
    data = parsed(text, where, section=_REMOVED)
    reason = data.get("reason")
    if type(reason) is not str:
        raise SnapshotError(f"{where} gives no reason: write it again with `modelprobe declare`")
    return Removal(frozenset(data[_REMOVED]), reason)
