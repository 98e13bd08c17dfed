"""Snapshots as two text files: what a test recorded, kept in git.

`encode` writes a record as the texts of an architecture file and a numbers file, and `decode` reads them back. The
architecture is exact and the same on all devices; the numbers are rounded, and each device has its own. The files are
made for review: a layer is one line, defaults are left out, and an update touches as few lines as possible. A file may
come from anybody who opens a pull request, so nothing in it is trusted: it is read with limits, and what is wrong is
said in one sentence with the path and the way out.
"""

from __future__ import annotations

from .architecture import SCHEMA as SCHEMA
from .storage import ARCH as ARCH
from .storage import DIRECTORY as DIRECTORY
from .storage import PROBE as PROBE
from .storage import REMOVED as REMOVED
from .storage import file_name as file_name
from .storage import read as read
from .storage import read_texts as read_texts
from .storage import write as write
from .texts import MOST_BYTES as MOST_BYTES
from .texts import RESTORE as RESTORE
from .texts import Removal as Removal
from .texts import StoredSnapshot as StoredSnapshot
from .texts import Texts as Texts
from .texts import architecture_digest as architecture_digest
from .texts import decode as decode
from .texts import decode_architecture as decode_architecture
from .texts import encode as encode
from .texts import is_older as is_older
from .texts import parsed as parsed
from .texts import removal_from as removal_from
from .texts import removal_text as removal_text
from .texts import rewritten as rewritten
from .texts import text_of as text_of
from .texts import too_large as too_large
from .texts import with_reason as with_reason
