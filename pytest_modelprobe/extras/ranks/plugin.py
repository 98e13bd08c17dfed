"""``@pytest.mark.modelprobe(world_size=...)``: a test runs in that many processes, its reports as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pytest_modelprobe.plugin import marker_arguments, marker_error


def pytest_configure(config: pytest.Config) -> None:
    """Say what the marker takes."""
    config.addinivalue_line(
        "markers",
        "modelprobe(world_size=..., timeout=...): number of processes that run the test, the ranks, and their seconds",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test with ``world_size=`` in that many processes."""
    marked = marker_arguments(item)
    only_set_up = item.config.getoption("setuponly", False) or item.config.getoption("setupplan", False)
    is_rank = item.config.pluginmanager.has_plugin("modelprobe-rank")
    if "world_size" not in marked or is_rank or marker_error(item) or only_set_up:
        return None
    from .processes import run_in_ranks

    run_in_ranks(item, nextitem, world_size=marked["world_size"], timeout=marked.get("timeout", 60))
    return True


def error_of_marker(arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the arguments of a marker."""
    world_size, timeout = arguments.get("world_size", 1), arguments.get("timeout", 60)
    if type(world_size) is not int or world_size < 1:
        return f"takes the number of ranks, from 1, as world_size=; got {world_size!r}"
    if type(timeout) not in (int, float) or not timeout > 0:
        return f"takes seconds, more than 0, as timeout=; got {timeout!r}"
    if "timeout" in arguments and "world_size" not in arguments:
        return "takes timeout= with world_size= only: it is the time that the ranks have"
    return None
