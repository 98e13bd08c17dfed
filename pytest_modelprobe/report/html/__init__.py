"""The HTML report: pure functions from the results of a run of pytest to one page.

The page needs no network and, without its script, loses only sorting, filtering and search. Its content security
policy allows its own style sheet and script, by their digests, and images in it; nothing else is loaded or run.
"""

from __future__ import annotations

from .notebook import display
from .page import render, render_run

__all__ = ["display", "render", "render_run"]
