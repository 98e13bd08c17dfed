"""The HTML report: pure functions from the results of a run of pytest to one page.

The page needs no network and, without its script, loses only sorting, filtering and search. Its content security
policy allows its own style sheet and script, by their digests, and images in it; nothing else is loaded or run.
`Record.to_html` and `Record.show` find this module by its name.
"""

from __future__ import annotations

from .page import display, record_page, render, render_run

__all__ = ["display", "record_page", "render", "render_run"]
