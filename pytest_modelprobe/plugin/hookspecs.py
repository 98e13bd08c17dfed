"""Hooks of pytest that other plugins, and a ``conftest.py``, may implement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

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
