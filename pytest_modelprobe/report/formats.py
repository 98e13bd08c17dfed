"""The formats of `modelprobe report`: a function for each, which turns the results of a run into text.

Its module is imported when the format is asked for, because the plugin offers reports in every run and most runs write
none.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .results import Results

ENDINGS = {"html": ".html", "markdown": ".md", "sarif": ".sarif", "gitlab": ".gitlab.json"}
"""Each format, and how the name of its file ends where none is given."""

FORMATS = tuple(ENDINGS)

_RENDERERS = {"html": "html:render", "markdown": "markdown:render", "sarif": "issues:sarif", "gitlab": "issues:gitlab"}


def renderer(name: str) -> Callable[[Results], str]:
    """Return the function that turns the results of a run into the text of a report in one of `FORMATS`."""
    render: Callable[[Results], str] = pkgutil.resolve_name(f"{__package__}.{_RENDERERS[name]}")
    return render
