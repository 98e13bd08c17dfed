"""Private names of pytest, each with a replacement for versions of pytest without it.

A new version of pytest may rename them without notice. They stand in one module, so one module is to be
repaired.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import pytest


def fixtures_of(item: pytest.Item) -> set[Any]:
    """Return the definitions of the fixtures that a test depends on, or their names if there are no definitions."""
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", None)
    if definitions is None:
        return set(getattr(item, "fixturenames", ()))
    return {definition for found in definitions.values() for definition in found}


def wide_fixtures(item: pytest.Item) -> list[Any]:
    """Return the definitions of the fixtures of wider scope than a test that it depends on."""
    return [one for one in fixtures_of(item) if getattr(one, "scope", "function") != "function"]


def configuration(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the name of the file of settings that pytest finds for a folder, and the settings; empty if none."""
    # pytest 8.2 takes these two arguments, and 9 wraps the settings and returns more.
    _, path, found, *_ = importlib.import_module("_pytest.config.findpaths").locate_config(folder, [folder])
    return path.name if path else "", {name: getattr(value, "value", value) for name, value in found.items()}


def tear_down_before(item: pytest.Item, nextitem: pytest.Item | pytest.Collector | None) -> None:
    """Tear down what earlier tests set up and the next one, or those of a module, do not need."""
    state = getattr(item.session, "_setupstate", None)
    if state is not None:
        state.teardown_exact(nextitem)


def picklable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options of a run that another process can be given. Plugins put objects of their own among them.

    >>> picklable({"verbose": 1, "reporter": lambda: None})
    {'verbose': 1}
    """
    return {name: value for name, value in values.items() if _is_picklable(value)}


def _is_picklable(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - an object may raise whatever it likes
        return False
    return True


def explain_without_terminal(config: pytest.Config) -> None:
    """Let failed assertions be explained in a run without a terminal: pytest 8.2 asks the terminal for highlighting."""
    with contextlib.suppress(AttributeError):
        create = importlib.import_module("_pytest.config").create_terminal_writer
        cast(Any, config).get_terminal_writer = functools.partial(create, config)


def run_again(item: pytest.Item) -> list[pytest.TestReport]:
    """Run a test once more, and return its reports and those of its subtests that failed. No plugin is told of them.

    What it shares with other tests, such as fixtures of wider scope, stays set up. Its warnings are filtered as usual,
    but not reported.
    """
    with _warnings_filtered(item):
        reports = run_once(item, item.parent)
    return [report for report in reports if report.failed or not is_of_subtest(report)]


def run_once(item: pytest.Item, nextitem: pytest.Item | pytest.Collector | None) -> list[pytest.TestReport]:
    """Run setup, call and teardown of a test, and return all reports, of which no plugin is told."""
    test: Any = item
    hook, properties = item.ihook, len(item.user_properties)
    if hasattr(test, "_initrequest"):
        test._initrequest()
    reports: list[pytest.TestReport] = []

    def phase(when: Literal["setup", "call", "teardown"], run: Callable[[], object]) -> bool:
        call = pytest.CallInfo.from_call(run, when=when, reraise=(KeyboardInterrupt, pytest.exit.Exception))
        report = hook.pytest_runtest_makereport(item=item, call=call)
        reports.append(report)
        return bool(report.passed)

    with _subtests_reported_to(reports, item):
        try:
            if phase("setup", lambda: hook.pytest_runtest_setup(item=item)):
                phase("call", lambda: hook.pytest_runtest_call(item=item))
        finally:
            phase("teardown", lambda: hook.pytest_runtest_teardown(item=item, nextitem=nextitem))
            if hasattr(test, "_request"):
                test._request = False
                test.funcargs = None
            getattr(test, "_report_sections", []).clear()
            del item.user_properties[properties:]
    return reports


def open_raises() -> list[pytest.ExceptionInfo[BaseException]]:
    """Return one object for each block of `pytest.raises` that is running now. What the block catches stands in it.

    >>> with pytest.raises(ZeroDivisionError) as caught:
    ...     inside = open_raises()
    ...     1 / 0
    >>> [one is caught for one in inside], open_raises()
    ([True], [])
    """
    kind = type(pytest.raises(AssertionError))
    # All objects at once would include tuples that other threads have not finished, and break these.
    given = [getattr(one, "excinfo", None) for one in gc.get_referrers(kind) if type(one) is kind]
    return [info for info in given if info is not None and caught_by(info) is None]


def caught_by(info: pytest.ExceptionInfo[BaseException]) -> BaseException | None:
    """Return what a block of `pytest.raises` has caught; ``None`` if it has caught nothing yet."""
    try:
        return info.value
    except AssertionError:
        return None


def is_of_subtest(report: pytest.TestReport) -> bool:
    """Return whether a report is that of a subtest."""
    return hasattr(report, "context")


@contextlib.contextmanager
def _subtests_reported_to(reports: list[pytest.TestReport], item: pytest.Item) -> Iterator[None]:
    """Keep the reports of subtests in the block. Subtests call the hooks themselves, and plugins would report them."""
    session: Any = item.session
    hooks_at = session.gethookproxy
    session.gethookproxy = lambda path: _Unreported(hooks_at(path), reports)
    try:
        yield
    finally:
        session.gethookproxy = hooks_at


class _Unreported:
    """Hooks of a test, except those that tell plugins of a report."""

    def __init__(self, hooks: Any, reports: list[pytest.TestReport]) -> None:
        self._hooks, self._reports = hooks, reports

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)

    def pytest_runtest_logreport(self, *, report: pytest.TestReport) -> None:
        """Keep the report of a subtest."""
        self._reports.append(report)

    def pytest_exception_interact(self, **_: object) -> None:
        """Do nothing."""


class _Nobody:
    """Is told of warnings in place of the hooks, and does nothing."""

    class pytest_warning_recorded:
        @staticmethod
        def call_historic(**_: object) -> None:
            """Do nothing."""


def _warnings_filtered(item: pytest.Item) -> contextlib.AbstractContextManager[object]:
    """Return a context in which warnings are filtered as in a run of the test."""
    if not item.config.pluginmanager.hasplugin("warnings"):
        return contextlib.nullcontext()
    try:
        caught: Any = importlib.import_module("_pytest.warnings").catch_warnings_for_item
    except (ImportError, AttributeError):
        return warnings.catch_warnings()
    context: contextlib.AbstractContextManager[object] = caught(item.config, _Nobody, "runtest", item)
    return context
