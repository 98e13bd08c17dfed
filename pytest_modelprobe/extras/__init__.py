"""Extras: what many tests do not need. Each folder can be deleted, and all else goes on as before.

The core knows none of them. `EXTRAS` is the one table by which they reach users.
"""

from __future__ import annotations

from pytest_modelprobe.extension import Extra

EXTRAS = {
    "doctor": Extra(commands={"doctor": "command"}),
    "mutation": Extra(plugin="plugin"),
    "ports": Extra(needs=("scan",), commands={"compare": "command"}),
    "scan": Extra(plugin="plugin", commands={"scan": "command"}),
}
"""Folder → what it brings."""
