"""The gate: what changed between the snapshots of two revisions, of which class it is, and whether it was declared.

It reads files and asks git, and neither imports the code of a repository nor runs a model: the author of a pull
request writes both. So it needs no torch, and gives the same verdict on every machine. The way leads from
`snapshot_sources` (which files) over `verdict` (what changed, by `classes`) to `text` (in words).
"""

from __future__ import annotations

from .classes import CLASSES as CLASSES
from .classes import DEFAULTS as DEFAULTS
from .classes import LEVELS as LEVELS
from .classes import MEANING as MEANING
from .classes import Class as Class
from .classes import Level as Level
from .classes import class_of as class_of
from .classes import needs_reason as needs_reason
from .git import GitError as GitError
from .git import Repository as Repository
from .git import base_of_event as base_of_event
from .git import declared_change as declared_change
from .git import run_git as run_git
from .snapshot_sources import SnapshotSource as SnapshotSource
from .snapshot_sources import SourceError as SourceError
from .snapshot_sources import declared_removals as declared_removals
from .snapshot_sources import in_revision as in_revision
from .snapshot_sources import in_working_tree as in_working_tree
from .snapshot_sources import on_disk as on_disk
from .snapshot_sources import refuse_links as refuse_links
from .snapshot_sources import removal_path as removal_path
from .snapshot_sources import scope_in as scope_in
from .snapshot_sources import without_ending as without_ending
from .source import Hunk as Hunk
from .source import changed_definitions as changed_definitions
from .source import changed_methods as changed_methods
from .source import source_lines as source_lines
from .source import source_since as source_since
from .verdict import Finding as Finding
from .verdict import SnapshotChange as SnapshotChange
from .verdict import SnapshotVersion as SnapshotVersion
from .verdict import Verdict as Verdict
from .verdict import has_words as has_words
from .verdict import judge as judge
from .verdict import superseded as superseded
