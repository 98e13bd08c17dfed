"""The formats of `modelprobe report`: each is a module of this folder with a function `render`.

A module is imported when its format is asked for, because the plugin offers reports in every run and most runs write
none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

ENDINGS = {"html": ".html", "markdown": ".md", "sarif": ".sarif", "gitlab": ".gitlab.json"}
"""Each format, and how the name of its file ends where none is given."""

FORMATS = tuple(ENDINGS)


def renderer(name: str) -> Callable[[Mapping[str, Any]], str]:
    r"""Return the function that turns the results of a run into the text of a report in one of `FORMATS`.

    >>> renderer("gitlab")({"tests": []})
    '[]\n'
    """
    render: Callable[[Mapping[str, Any]], str] = importlib.import_module(f"{__package__}.{name}").render
    return render
