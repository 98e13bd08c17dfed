"""The same tests on another side: under another commit, another interpreter, or both.

Both sides are at hand, so nothing is stored: the other side runs in a process of its own, and the records of both are
compared. They are made by one machine with the same number of threads, so a comparison allows for the noise of a repeat
alone.
"""

from .recorder import Recorder
from .records import Written, read_written
from .side import Job, Ran, Side, SideError, options_for
from .side_by_side import (
    Pair,
    Records,
    SideBySide,
    TestsOn,
    changed_lines,
    compare_records,
    exact_difference,
    first_difference,
    judged,
    pair_text,
    side_by_side,
    summary,
    tensors_lines,
)
from .worktree import Bisected, Wanted, Worktree, bisect, import_roots

__all__ = [
    "Bisected",
    "Job",
    "Pair",
    "Ran",
    "Recorder",
    "Records",
    "Side",
    "SideBySide",
    "SideError",
    "TestsOn",
    "Wanted",
    "Worktree",
    "Written",
    "bisect",
    "changed_lines",
    "compare_records",
    "exact_difference",
    "first_difference",
    "import_roots",
    "judged",
    "options_for",
    "pair_text",
    "read_written",
    "side_by_side",
    "summary",
    "tensors_lines",
]
