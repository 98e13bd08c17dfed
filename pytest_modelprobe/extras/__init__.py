"""Extras: what many tests do not need. Each folder can be deleted, and all else goes on as before.

The core knows none of them. `EXTRAS` is the one table by which they reach users.
"""

from __future__ import annotations

from pytest_modelprobe.extension import Extra

EXTRAS = {
    "mutation": Extra(plugin="plugin"),
}
"""Folder → what it brings."""
