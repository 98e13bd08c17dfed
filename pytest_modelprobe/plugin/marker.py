"""``@pytest.mark.modelprobe(...)``: its arguments, checked, and the line of one that is wrong.

pytest takes any argument of a marker, and a misspelled one would silently do nothing.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Mapping
from typing import Any

import pytest

from .devices import INVALID, as_list, is_device

_KEYWORDS = ("devices", "seed", "tolerance", "compare", "world_size", "timeout")
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
    return _ranks_error(marker.kwargs)


def _ranks_error(arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    world_size, timeout = arguments.get("world_size", 1), arguments.get("timeout", 60)
    if type(world_size) is not int or world_size < 1:
        return "world_size", f"takes the number of ranks, from 1, as world_size=; got {world_size!r}"
    if type(timeout) not in (int, float) or not timeout > 0:
        return "timeout", f"takes seconds, more than 0, as timeout=; got {timeout!r}"
    if "timeout" in arguments and "world_size" not in arguments:
        return "timeout", "takes timeout= with world_size= only: it is the time that the ranks have"
    return None


def is_rank(config: pytest.Config) -> bool:
    """Whether this process is a rank of a test with ``world_size=``."""
    return config.pluginmanager.has_plugin("modelprobe-rank")


def marker_location(item: pytest.Item, argument: str) -> str:
    """Return file and line of an argument of a test's marker, or of what the marker is on if it is not found."""
    node, _ = next(item.iter_markers_with_node("modelprobe"))
    first = (node.reportinfo()[1] or 0) if hasattr(node, "reportinfo") and not isinstance(node, pytest.Module) else 0
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = node.path.read_text("utf-8").splitlines()[first:]
        wanted = re.compile(rf"\b{re.escape(argument)}\s*=" if argument else r"\bmark\.modelprobe\b")
        first += next((i for i, line in enumerate(lines) if wanted.search(line)), 0)
    return f"{os.path.relpath(node.path)}:{first + 1}"
