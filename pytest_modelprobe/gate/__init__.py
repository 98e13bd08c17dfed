"""The gate: what changed between the snapshots of two revisions, of which class it is, and whether it was declared.

It reads files and asks git, and neither imports the code of a repository nor runs a model: the author of a pull
request writes both. So it needs no torch, and gives the same verdict on every machine. The way leads from
`snapshot_sources` (which files) over `verdict` (what changed, by `classes`) to `text` (in words).
"""

from __future__ import annotations

from .classes import CLASSES, DEFAULTS, LEVELS, MEANING, Class, Level, class_of, needs_reason
from .git import GitError, Repository, base_of_event, run_git
from .snapshot_sources import (
    SnapshotSource,
    SourceError,
    declared_removals,
    in_revision,
    in_working_tree,
    on_disk,
    refuse_links,
    removal_path,
    scope_in,
    without_ending,
)
from .verdict import Finding, SnapshotChange, SnapshotVersion, Verdict, has_words, judge, superseded

__all__ = [
    "CLASSES",
    "SnapshotChange",
    "Class",
    "DEFAULTS",
    "Finding",
    "GitError",
    "LEVELS",
    "Level",
    "MEANING",
    "Repository",
    "SnapshotVersion",
    "SnapshotSource",
    "SourceError",
    "Verdict",
    "base_of_event",
    "class_of",
    "declared_removals",
    "in_revision",
    "in_working_tree",
    "has_words",
    "judge",
    "needs_reason",
    "on_disk",
    "refuse_links",
    "removal_path",
    "run_git",
    "scope_in",
    "superseded",
    "without_ending",
]
