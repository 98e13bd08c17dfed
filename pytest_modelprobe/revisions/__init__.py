"""The same tests on another side: under another commit, another interpreter, or both.

Both sides are at hand, so nothing is stored: the other side runs in a process of its own, and the records of both are
compared. They are made by one machine with the same number of threads, so a comparison allows for the noise of a repeat
alone.
"""

from .dependencies import TestFiles as TestFiles
from .dependencies import differing_of as differing_of
from .dependencies import files_of as files_of
from .dependencies import imported_files as imported_files
from .dependencies import is_affected as is_affected
from .dependencies import package_of as package_of
from .pairs import VERDICTS as VERDICTS
from .pairs import Pair as Pair
from .pairs import Written as Written
from .pairs import changed_lines as changed_lines
from .pairs import compare_records as compare_records
from .pairs import first_difference as first_difference
from .pairs import judged as judged
from .pairs import pair_text as pair_text
from .pairs import read_written as read_written
from .pairs import summary as summary
from .recorder import Recorder as Recorder
from .recorder import read_reasons as read_reasons
from .side import Job as Job
from .side import Ran as Ran
from .side import Running as Running
from .side import Side as Side
from .side import SideBySide as SideBySide
from .side import SideError as SideError
from .side import TestsOn as TestsOn
from .side import options_for as options_for
from .side import side_by_side as side_by_side
from .worktree import Worktree as Worktree
from .worktree import import_roots as import_roots
