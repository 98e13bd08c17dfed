"""The formats of `modelprobe report` and the functions that render them, imported when one is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

FORMATS: Mapping[str, str] = {
    "html": "pytest_modelprobe.report.html:render",
    "sarif": "pytest_modelprobe.report.sarif:render",
    "gitlab": "pytest_modelprobe.report.gitlab:render",
}
"""Name → module and function, which takes the results of a run and returns the text of the report."""


def renderer(name: str) -> Callable[[Mapping[str, Any]], str]:
    r"""Return the function that renders a format of `FORMATS`.

    >>> renderer("gitlab")({"tests": []})
    '[]\n'
    """
    module, _, function = FORMATS[name].partition(":")
    return cast(Callable[[Mapping[str, Any]], str], getattr(importlib.import_module(module), function))
