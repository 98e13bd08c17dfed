"""Gathers what the tests recorded, and writes the files of `--modelprobe-json` and `--modelprobe-html`.

The files say how the run ended, and a run may end in many ways: so it is counted how many tests were selected and how
many ended. An error while a file is written becomes a line, because the results of the tests stand without it.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .settings import SETTINGS
from .terminal import BaseResults

_MOST = 20_000
"""Characters of the text of a failure: a traceback of a recursion may have megabytes."""


class ResultsWriter:
    """A plugin that is registered if a report is asked for. A worker of xdist only says how many tests it selected.

    Args:
        config: The configuration of the run.
        unused: Returns the unused files of snapshots, once they are known.
        base: Returns what was compared with another side, as `Sides.results`. None if there is no other side.
    """

    def __init__(self, config: pytest.Config, unused: Callable[[], Any], base: BaseResults | None = None) -> None:
        self._config = config
        self._unused = unused
        self._base = base
        self._tests: dict[str, dict[str, Any]] = {}
        self._ended: set[str] = set()
        self._selected: int | None = None
        self._lost = False
        self._interrupted: str | None = None
        self._unwritten: list[str] = []
        self._hints: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """The hints by test, without duplicates, for a test that runs again gives them again."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests that are to run."""
        self._selected = len({item.nodeid for item in session.items})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Receive how many tests a worker of xdist selected, and whether it died."""
        self._lost |= bool(error)
        self._selected = getattr(node, "workeroutput", {}).get("modelprobe_selected", self._selected)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect outcome, failure and what was recorded. If a test runs again, its last attempt counts."""
        if report.when == "setup" or report.nodeid not in self._tests:
            self._ended.discard(report.nodeid)
            self._tests[report.nodeid] = _new(report)
        test = self._tests[report.nodeid]
        test["duration"] += report.duration
        outcome = _outcome(report, test["outcome"])
        if outcome != test["outcome"]:
            test.update(outcome=outcome, message=_message(report), failure=_failure(report))
        if report.when not in ("setup", "call", "teardown"):  # xdist made it: a worker died in the test
            test.update(runs=[], snapshots=[], figures=[])
        if report.when == "teardown":
            self._ended.add(report.nodeid)
            test.update(json.loads(getattr(report, "modelprobe_results", "{}")))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, nodeid: str) -> None:
        """Collect the hints."""
        from pytest_modelprobe.exceptions import HintWarning

        if issubclass(warning_message.category, HintWarning):
            self._hints[nodeid][str(warning_message.message)] = None

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Learn why the run ends early: pytest-xdist interrupts it after the failures that -x allows."""
        self._interrupted = str(excinfo.value) or "the run was interrupted"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the files, after the unused files of snapshots were found."""
        if hasattr(self._config, "workerinput"):
            self._config.workeroutput["modelprobe_selected"] = self._selected  # type: ignore[attr-defined]
            return
        option = self._config.option
        if any(getattr(option, name, False) for name in ("collectonly", "setuponly", "setupplan")):
            return
        from pytest_modelprobe.record import codec
        from pytest_modelprobe.report.html import render
        from pytest_modelprobe.report.results import CaseResult, Results

        settings = self._config.stash[SETTINGS]
        whole, pairs = (None, {}) if self._base is None else self._base()
        tests: list[CaseResult] = [
            codec.decode(
                CaseResult,
                {
                    "runs": [],
                    "snapshots": [],
                    "figures": [],
                    **test,
                    "hints": list(self._hints[name]),
                    "base": codec.encode(tuple(pairs.get(name, ()))),
                },
            )
            for name, test in self._tests.items()
            if "runs" in test or name in pairs
        ]
        unused = self._unused()
        torch = next((found for test in tests for run in test.runs if (found := run.record.versions.get("torch"))), "")
        results = Results(
            tests=tuple(tests),
            stopped=self._stopped(session),
            exit_status=int(session.exitstatus),
            versions={**_versions(), **({"torch": torch} if torch else {})},
            commit=_commit(self._config.rootpath),
            root=self._config.rootpath.name,
            seed=settings.seed,
            devices=tuple(settings.devices),
            base=whole,
            unused=tuple(unused.unused),
            deleted=tuple(unused.deleted),
            kept={why: tuple(paths) for why, paths in unused.kept.items()},
        )
        if settings.json is not None:
            self._write(settings.json, results.to_json)
        if settings.html is not None:
            self._write(settings.html, lambda: render(results))

    def _write(self, path: Path, make: Callable[[], str]) -> None:
        from pytest_modelprobe.report.results import write_text

        try:
            write_text(path, make())
        except Exception as error:  # noqa: BLE001 - the run of the tests stands without its report
            self._unwritten.append(f"{path} is not written: {type(error).__name__}: {error}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say which files are not written."""
        from pytest_modelprobe.text import printable

        for said in self._unwritten:
            terminalreporter.write_line(f"modelprobe: {printable(said)}", red=True)

    def _stopped(self, session: pytest.Session) -> str | None:
        """Return why not every selected test ran to its end; ``None`` if each did."""
        if self._interrupted is not None:
            return self._interrupted
        if session.shouldfail:  # pytest's words for -x and --maxfail
            return str(session.shouldfail)
        if session.exitstatus == pytest.ExitCode.INTERNAL_ERROR:
            return "an internal error of pytest"
        if self._lost:
            return "a worker of pytest-xdist died"
        ended = self._selected is not None and len(self._ended) >= self._selected
        return None if ended and session.exitstatus != pytest.ExitCode.INTERRUPTED else "the run was interrupted"


def _new(report: pytest.TestReport) -> dict[str, Any]:
    path, line, _ = report.location
    return {
        "id": report.nodeid,
        "outcome": "passed",
        "duration": 0.0,
        "file": path.replace("\\", "/"),
        "line": None if line is None else line + 1,
        "message": "",
        "failure": "",
    }


def _outcome(report: pytest.TestReport, before: str) -> str:
    """Return the outcome of a test after another phase, in the words of pytest's summary."""
    if before == "failed":
        return before
    if report.failed:
        return "error" if report.when in ("setup", "teardown") else "failed"
    expected = hasattr(report, "wasxfail")
    if report.skipped:
        return "xfailed" if expected else "skipped"
    return "xpassed" if expected and report.when == "call" else before


def _message(report: pytest.TestReport) -> str:
    """Return the first line of a failure, or the reason of a skip."""
    said = getattr(report, "wasxfail", "")
    if not said and isinstance(report.longrepr, tuple):
        said = report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    said = said or (report.longreprtext if crash is None else crash.message)
    return next(iter(said.strip().splitlines()), "")


def _failure(report: pytest.TestReport) -> str:
    """Return the text of a failure. Of a long text only the end is kept, where the error stands."""
    text = report.longreprtext if report.failed else ""
    more = len(text) - _MOST
    return text if more <= 0 else f"... {more:,} characters before this are left out\n{text[-_MOST:]}"


def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("pytest-modelprobe", "pytest")}
    return {**packages, "python": platform.python_version()}


def _commit(root: Path) -> str | None:
    """Return the hash of the commit that is checked out, or `None` if git knows none."""
    from pytest_modelprobe.gate import GitError, Repository

    try:
        return Repository(root).commit("HEAD")
    except GitError:
        return None
