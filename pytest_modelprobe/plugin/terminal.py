"""What a run says: the section "modelprobe" of the terminal summary, progress, annotations.

It is quiet until there is something to say: a healthy model has no line, and the checks of all models have one. Only
the first use in a project shows a table, so that a new user sees what the probe records. Summaries come in builtin
types with the reports, as xdist needs it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .settings import SETTINGS, compares_sides

if TYPE_CHECKING:
    from pytest_modelprobe.probe import ModelProbe
    from pytest_modelprobe.record import NamedRecord
    from pytest_modelprobe.report.results import Base, Compared, PairResult, SnapshotResult


_FIRST_USE = "modelprobe/first_use"  # key in pytest's cache


def named_records(probe: ModelProbe) -> list[NamedRecord]:
    """Return each run and watch of a probe that was not reported before."""
    from pytest_modelprobe.exceptions import ModelProbeError
    from pytest_modelprobe.record import NamedRecord, Record

    found = []
    for name, source in probe.take_unreported():
        if isinstance(source, Record):
            found.append(NamedRecord(name, "run", source))
            continue
        try:
            counts = str(source.counts) if source.counts.steps else ""
            found.append(NamedRecord(name, "watch", source.record, steps=source.steps, forwards=counts))
        except ModelProbeError as error:
            found.append(NamedRecord(name, "watch", None, str(error)))
    return found


def summaries(observed: Iterable[NamedRecord], config: pytest.Config) -> list[dict[str, Any]]:
    """Return a summary of each run and watch, in builtin types."""
    from pytest_modelprobe.assertions.activations import find_dead
    from pytest_modelprobe.assertions.findings import findings, hints
    from pytest_modelprobe.models import RUN_EAGERLY
    from pytest_modelprobe.record import layer_table
    from pytest_modelprobe.text import MOST_ROWS

    with_table, most = (True, 200) if config.stash[SETTINGS].verbose else (_is_first_use(config), MOST_ROWS)
    found = []
    for name, _, record, error, _, forwards in observed:
        if record is None:
            found.append({"name": name, "layers": 0, "calls": 0, "dead": 0, "findings": [error], "table": []})
            continue
        dead = find_dead(record, record.layers)
        said = [*findings(record, dead), *(f"hint: {hint}" for hint in hints(record, dead))]
        found.append(
            {
                "name": name,
                "layers": len(record.layers),
                "calls": sum(len(layer.calls) for layer in record.layers.values()),
                "forwards": forwards or record.forwards,
                "findings": said,
                "eager": any(note.endswith(RUN_EAGERLY) for note in record.notes),
                "table": layer_table(record, most) if with_table and record.forwards else [],
            }
        )
    return found


def shows_first_use(config: pytest.Config) -> bool:
    """Whether this run shows the table of the first run that a test records. CI keeps no cache, and would always."""
    return not os.environ.get("CI") and _is_first_use(config) and not compares_sides(config)


def _is_first_use(config: pytest.Config) -> bool:
    """Whether no run of the project has shown a table yet."""
    cache = getattr(config, "cache", None)
    return cache is not None and cache.get(_FIRST_USE, None) is None


class Terminal:
    """Writes the section, or nothing if there is nothing to report.

    Args:
        config: The configuration of the run.
        snapshot_lines: Returns the lines on snapshots.
    """

    def __init__(self, config: pytest.Config, snapshot_lines: Callable[[], Iterator[str]]) -> None:
        self._config = config
        self._snapshot_lines = snapshot_lines
        self._summaries: list[tuple[str, dict[str, Any]]] = []
        self._checked: list[tuple[str, str, int, str]] = []
        """File, model, number of layers and verdict of each check."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the summaries of a test from its report, under xdist too."""
        self._summaries += [(report.nodeid, summary) for summary in getattr(report, "modelprobe", ())]
        file = report.nodeid.partition("::")[0]
        self._checked += [(file, *checked) for checked in getattr(report, "modelprobe_checked", ())]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write the section."""
        verbose = self._config.stash[SETTINGS].verbose
        first = self._first_use()
        shown = self._summaries if verbose else [pair for pair in self._summaries if pair[1]["findings"]]
        if first is not None and not verbose:
            shown = [first, *(pair for pair in shown if pair is not first)]
        if self._config.getoption("verbose") < 0 and not verbose:
            shown = []
        snapshot_lines = [*self._checks_lines(), *self._eager_lines(), *self._snapshot_lines()]
        if not shown and not snapshot_lines:
            return
        lines = [line for pair in shown for line in _lines(*pair, with_table=verbose or pair is first)]
        if first in shown and not verbose:
            lines.append("This table is shown once; --modelprobe-verbose shows it for every test.")
        terminalreporter.section("modelprobe")
        for line in (*lines, *snapshot_lines):
            terminalreporter.write_line(line)

    def _checks_lines(self) -> Iterator[str]:
        """Say in one line what the checks looked at: three dots would not."""
        if not self._checked or self._config.getoption("verbose") < 0:
            return
        from pytest_modelprobe.text import count

        models = Counter((file, model, layers) for file, model, layers, _ in self._checked)
        verdicts = Counter(verdict for *_, verdict in self._checked)
        of_each = set(models.values())
        is_each = len(of_each) == 1 < len(models)
        checks = f"{count(of_each.pop(), 'check')} each" if is_each else count(len(self._checked), "check")
        looked_at = f"{count(len(models), 'model')}, {count(sum(layers for *_, layers in models), 'layer')}, {checks}"
        said = ("holds", "hold"), ("broken", "broken"), ("hint", "hinted at"), ("not applicable", "not applicable")
        yield f"{looked_at}: {', '.join(f'{verdicts[verdict]} {word}' for verdict, word in said if verdicts[verdict])}"

    def _eager_lines(self) -> Iterator[str]:
        tests = {nodeid for nodeid, summary in self._summaries if summary.get("eager")}
        if tests:
            from pytest_modelprobe.text import count

            yield f"compiled models ran eagerly while they were watched, in {count(len(tests), 'test')}"

    def _first_use(self) -> tuple[str, dict[str, Any]] | None:
        """Return the summary whose table is shown on the first use in a project; ``None`` in CI."""
        if not shows_first_use(self._config):
            return None
        first = next((pair for pair in self._summaries if pair[1]["table"]), None)
        if first is not None and self._config.cache is not None:
            self._config.cache.set(_FIRST_USE, "seen")
        return first


def _lines(nodeid: str, summary: dict[str, Any], *, with_table: bool) -> Iterator[str]:
    from pytest_modelprobe.text import count, printable, wrapped

    calls = f"{count(summary['layers'], 'layer')}, {count(summary['calls'], 'call')}"
    forwards = summary.get("forwards", 1)
    if isinstance(forwards, str):
        times = f", {forwards}"
    else:
        times = f" in {count(forwards, 'forward')}" if forwards > 1 else ""
    yield wrapped(printable(f"{nodeid}: {summary['name']}, {calls}{times}"), 4)
    yield from (wrapped(f"  {printable(finding)}", 4) for finding in summary["findings"])
    if with_table:
        yield from (f"  {line}" for line in summary["table"])


# --- the line that shows the progress of long work --------------------------------------------------------------------

SHOWN_AFTER, REWRITTEN_EVERY = 3.0, 0.1
"""Seconds of work before a terminal shows its line, and between two changes of it."""

LOGGED_EVERY = 30.0
"""Seconds between the lines in CI, and where the output is no terminal."""


class ProgressLine:
    """Shows what takes long: in a terminal one line, which is erased at the end, and elsewhere a line now and then.

    Args:
        config: The configuration of the run.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.clock = time.monotonic
        self._terminal: Any = config.pluginmanager.getplugin("terminalreporter")
        self._capture: Any = config.pluginmanager.getplugin("capturemanager")
        self._width = config.get_terminal_writer().fullwidth - 1
        self._rewrites = bool(self._terminal.isatty) and not os.environ.get("CI")
        self._begun: float | None = None
        self._due = 0.0
        self._is_shown = False

    @staticmethod
    def is_wanted(config: pytest.Config) -> bool:
        """Whether a line may be written. It may not with ``-q``, in a worker of xdist, or between what tests print."""
        return (
            config.pluginmanager.hasplugin("terminalreporter")
            and not hasattr(config, "workerinput")
            and config.getoption("verbose") >= 0
            and config.getoption("capture", "no") in ("fd", "sys")
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """Listen to the work of a test."""
        from pytest_modelprobe.progress import listening

        with listening(self):
            return (yield)

    def __call__(self, what: str) -> None:
        """Show what is being done, if it takes long. An empty text ends the line."""
        if not what:
            self._end()
            return
        now = self.clock()
        if self._begun is None:
            self._begun, self._due = now, now + (SHOWN_AFTER if self._rewrites else LOGGED_EVERY)
        if now >= self._due:
            self._write(f"modelprobe: {what}, {now - self._begun:.0f} s")
            self._due = now + (REWRITTEN_EVERY if self._rewrites else LOGGED_EVERY)

    def _end(self) -> None:
        if self._is_shown:
            self._write("")
        self._begun, self._is_shown = None, False

    def _write(self, text: str) -> None:
        """Write to the terminal, past the capturing of output."""
        streams = sys.stdout, sys.stderr  # the test may have redirected them
        with self._capture.global_and_fixture_disabled():
            if not self._rewrites:
                self._terminal.write_line(text, flush=True)
            else:
                self._terminal.ensure_newline()
                self._terminal.rewrite(text[: self._width], erase=True)
                self._terminal.write("\r", flush=True)
                self._is_shown = True
        sys.stdout, sys.stderr = streams


# --- annotations in GitHub Actions ------------------------------------------------------------------------------------

BaseResults = Callable[[], "tuple[Base | None, dict[str, list[PairResult]]]"]


class Annotations:
    """A plugin that prints the annotations when all tests have run. Workers of xdist print none.

    Args:
        results: Returns the comparisons of all tests.
        base: Returns what was compared with another side, as `Sides.results`. None if there is no other side.
    """

    def __init__(self, results: Callable[[], list[SnapshotResult]], base: BaseResults | None = None) -> None:
        self._results = results
        self._base = base

    @staticmethod
    def is_wanted(config: pytest.Config) -> bool:
        """Whether this is a job of GitHub Actions."""
        return os.environ.get("GITHUB_ACTIONS") == "true" and not hasattr(config, "workerinput")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print an annotation for each model that differs, if the class of a cause is known, and write the summary."""
        whole, pairs = (None, {}) if self._base is None else self._base()
        found: list[tuple[str, Compared]] = [(one.test, one) for one in self._results()]
        found += [(test, pair) for test, of_test in pairs.items() for pair in of_test]
        located = [
            (test, one, source)
            for test, one in found
            if one.verdict == "changed"
            and (source := next(filter(None, (getattr(one, "source", None), *(c.source for c in one.causes))), None))
        ]
        if located:
            from pytest_modelprobe.report.ci import MOST_ANNOTATIONS, command

            for test, one, source in located[:MOST_ANNOTATIONS]:
                said, title = f"{test}: {one.first_line}", f"modelprobe: {one.model} changed"
                level = "error" if hasattr(one, "snapshot") else "warning"  # beside a commit, changes are reported
                text = command(level, said, file=source.file, line=source.line or 1, title=title)
                terminalreporter.write_line(text)
        path = os.environ.get("GITHUB_STEP_SUMMARY")
        if whole is not None and path:
            from pytest_modelprobe.report.ci import write_summary
            from pytest_modelprobe.report.markdown import beside

            write_summary(Path(path), beside(whole, pairs))
