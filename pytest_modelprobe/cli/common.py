"""What the subcommands share: exit codes, what an argument names, and JSON output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pytest_modelprobe.gate import Repository, SnapshotSource, in_revision, on_disk, scope_in, without_ending

SAME, DIFFERENT, INCOMPLETE = 0, 1, 2
"""Exit codes: success; differences, or denied changes; could not complete."""


def resolve_source(argument: str) -> tuple[SnapshotSource, str]:
    """Return the snapshots of an argument, ``PATH`` or ``REF:PATH``, and the prefix of their names."""
    ref, colon, path = argument.partition(":")
    if colon and ref and not Path(argument).exists():
        repository = Repository(Path.cwd())
        # As for git: from the root, but ./ from here.
        scope = scope_in(repository, path) if path.startswith("./") else path.strip("/")
        return in_revision(repository, ref).only(scope), without_ending(scope)
    start = without_ending(Path(argument).as_posix())
    return on_disk(argument), "" if start == "." else start


def as_json(data: Any) -> str:
    """Return strict JSON without commands to GitHub Actions."""
    return json.dumps(data, indent=1, ensure_ascii=True, allow_nan=False).replace("##[", r"##\u005b")
