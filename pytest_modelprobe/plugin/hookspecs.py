"""Hooks of pytest that other plugins, and a ``conftest.py``, may implement, and the call of one of them.

A mistake of another plugin is an error that names the hook, because its traceback would end in this package.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_modelprobe.record import Record


def pytest_modelprobe_record(record: Record, item: pytest.Item) -> None:
    """Called with the record of each run and watch of a test, when the test is over.

    Args:
        record: The record; of a watch, of all its forwards.
        item: The test. In a worker of pytest-xdist the hook is called there.
    """


def pytest_modelprobe_checks(config: pytest.Config) -> Mapping[str, Callable[..., Any]] | None:
    """Return functions by name that become standard checks of this run.

    Each is called with a probe, a model and its inputs, and raises ``AssertionError`` if the property is broken, or
    ``checks.NotApplicableError`` if it means nothing for this model. What it returns, if it is text, is shown where the
    property holds. The model is restored afterwards.

    Args:
        config: The configuration of the run.
    """


# --- the call of a hook -----------------------------------------------------------------------------------------------


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
