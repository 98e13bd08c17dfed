"""The results of a run of pytest as plain data, from which every report is made.

Reports never see a record: what they show crosses processes of pytest-xdist, is written by ``--modelprobe-json``, and
may be rendered later by another process. So everything here is in builtin types that strict JSON can hold.
"""

from __future__ import annotations

from .document import SCHEMA, as_json, document, write_text
from .observed import Compared, Observed, observed_data
from .run import run_data
from .status import STATUSES
from .values import builtin

__all__ = [
    "Compared",
    "Observed",
    "SCHEMA",
    "STATUSES",
    "as_json",
    "builtin",
    "document",
    "observed_data",
    "run_data",
    "write_text",
]
