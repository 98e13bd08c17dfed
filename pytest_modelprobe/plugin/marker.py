"""``@pytest.mark.modelprobe(...)``: its arguments, checked, and the line of one that is wrong.

pytest takes any argument of a marker, and a misspelled one would silently do nothing.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from typing import Any

import pytest

from pytest_modelprobe import extension

from .devices import INVALID, as_list, is_device

_KEYWORDS = ("devices", "seed", "tolerance", "compare", *extension.modules("marker"))
_ALL_KEYWORDS = f"{', '.join(f'{name}=' for name in _KEYWORDS[:-1])} and {_KEYWORDS[-1]}="


def marker_arguments(node: pytest.Item) -> dict[str, Any]:
    """Return the keyword arguments of the closest marker of a test; empty if it has no marker."""
    marker = node.get_closest_marker("modelprobe")
    return dict(marker.kwargs) if marker else {}


def marker_error(node: pytest.Item) -> tuple[str, str] | None:
    """Return which argument of a test's marker is wrong, and why; ``None`` if the marker is valid."""
    marker = node.get_closest_marker("modelprobe")
    if marker is None:
        return None
    if marker.args:
        return "", f"takes keywords only: {_ALL_KEYWORDS}"
    unknown = min(marker.kwargs.keys() - set(_KEYWORDS), default=None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, _KEYWORDS, n=1)
        hint = f"is {near[0]}= meant? " if near else ""
        return unknown, f"takes no {unknown}=: {hint}It takes {_ALL_KEYWORDS}"
    for name in as_list(marker.kwargs.get("devices") or []):
        if not is_device(name):
            return "devices", f"has {name!r} in devices=: {INVALID}"
    seed = marker.kwargs.get("seed", 0)
    if not hasattr(seed, "__index__"):
        return "seed", f"takes an integer as seed=; got {seed!r}"
    errors = dict.fromkeys(extension.imported(place, "") for place in extension.modules("marker").values())
    return next(filter(None, (error_of(marker.kwargs) for error_of in errors)), None)


def marker_location(item: pytest.Item, argument: str) -> str:
    """Return file and line of an argument of a test's marker, or of what the marker is on if it is not found."""
    node, _ = next(item.iter_markers_with_node("modelprobe"))
    first = (node.reportinfo()[1] or 0) if hasattr(node, "reportinfo") and not isinstance(node, pytest.Module) else 0
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = node.path.read_text("utf-8").splitlines()[first:]
        wanted = re.compile(rf"\b{re.escape(argument)}\s*=" if argument else r"\bmark\.modelprobe\b")
        first += next((i for i, line in enumerate(lines) if wanted.search(line)), 0)
    return f"{os.path.relpath(node.path)}:{first + 1}"
