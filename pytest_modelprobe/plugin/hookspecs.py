"""Hooks of pytest that other plugins, and a ``conftest.py``, may implement, and the calls of these hooks.

A mistake of another plugin is an error that names the hook, because its traceback would end in this package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from .terminal import NamedRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_modelprobe.record import Record


def pytest_modelprobe_record(record: Record, item: pytest.Item) -> None:
    """Called with the record of each run and watch of a test, when the test is over.

    Args:
        record: The record; of a watch, of all its forwards.
        item: The test. In a worker of pytest-xdist the hook is called there.
    """


def pytest_modelprobe_findings(record: Record, item: pytest.Item) -> Iterable[str] | None:
    """Return findings of a record, a line each. They stand beside those of the probe, in the terminal and in reports.

    Args:
        record: The record of a run or a watch of a test.
        item: The test.
    """


def pytest_modelprobe_checks(config: pytest.Config) -> Mapping[str, Callable[..., Any]] | None:
    """Return functions by name that become standard checks of this run.

    Each is called with a probe, a model and its inputs, and raises ``AssertionError`` if the property is broken, or
    ``checks.NotApplicableError`` if it means nothing for this model. What it returns, if it is text, is shown where the
    property holds. The model is restored afterwards.

    Args:
        config: The configuration of the run.
    """


# --- the calls of these hooks -----------------------------------------------------------------------------------------


def told_to_plugins(one: NamedRecord, item: pytest.Item) -> NamedRecord:
    """Give the record of a run or watch to other plugins; return it with their findings."""
    if one.record is None:
        return one
    item.ihook.pytest_modelprobe_record(record=one.record, item=item)
    found = item.ihook.pytest_modelprobe_findings(record=one.record, item=item)
    return one._replace(findings=tuple(line for lines in found for line in _lines(lines)))


def _lines(found: Iterable[str]) -> list[str]:
    lines = [found] if isinstance(found, str) else list(found)
    wrong = next((line for line in lines if not isinstance(line, str)), None)
    if wrong is not None:
        raise pytest.UsageError(f"pytest_modelprobe_findings returns text, a line each; got {type(wrong).__name__}")
    return lines


def add_checks(config: pytest.Config) -> None:
    """Add the checks of other plugins to the standard ones until the run ends.

    If no plugin has any, nothing is imported, unless a run around this one, as of pytester, may have added checks.
    """
    is_loaded = "pytest_modelprobe.checks" in sys.modules
    if not (is_loaded or config.hook.pytest_modelprobe_checks.get_hookimpls()):
        return
    from pytest_modelprobe.checks import battery
    from pytest_modelprobe.exceptions import UsageError

    config.add_cleanup(battery.start_run())
    for checks in config.hook.pytest_modelprobe_checks(config=config):
        try:
            config.add_cleanup(battery.add_standard(checks))
        except UsageError as error:
            raise pytest.UsageError(f"pytest_modelprobe_checks: {error}") from None
