"""The gate: snapshots of two revisions to classes of change, and whether they were declared."""

from __future__ import annotations

from .classes import CLASSES, DEFAULTS, LEVELS, MEANING, Class, Level, class_of, needs_reason
from .declarations import has_words, superseded
from .git import Commit, GitError, Repository
from .removals import declared_removals, removal_path
from .snapshot_sources import (
    ENDINGS,
    SnapshotSource,
    SourceError,
    in_revision,
    in_working_tree,
    on_disk,
    refuse_directory,
    refuse_links,
    scope_in,
    without_ending,
)
from .verdict import Finding, SnapshotChange, SnapshotVersion, Verdict, judge

__all__ = [
    "CLASSES",
    "SnapshotChange",
    "Class",
    "Commit",
    "DEFAULTS",
    "ENDINGS",
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
    "class_of",
    "declared_removals",
    "in_revision",
    "in_working_tree",
    "has_words",
    "judge",
    "needs_reason",
    "on_disk",
    "refuse_directory",
    "refuse_links",
    "removal_path",
    "scope_in",
    "superseded",
    "without_ending",
]
