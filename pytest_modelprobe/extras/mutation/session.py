"""The plugin of a run with mutants: all tests run as they are, then again, each time with one fault planted."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_modelprobe import child
from pytest_modelprobe._pytest import is_of_subtest

from .known import Keys, Known, modules_of
from .plan import BaselineTest, Place, Planned, Results, planned
from .planting import Observer, without_warning_of_hooks
from .report import lines
from .runner import key_of, wide_fixtures
from .seen import Seen
from .worker import Told
from .workers import NoWorker, TimeIsOver, Workers

_FOUND = "modelprobe_mutation"
"""The key of what a worker of xdist sends."""


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    most: int | None = None
    """How many mutants are tried, or `None` for all."""
    least_score: float | None = None
    """The score in percent below which the run fails."""
    seconds: float = 300.0
    """How long the runs with faults may take."""
    operators: Collection[str] | None = None
    """The names of the faults that are planted, or `None` for all."""


class MutationSession:
    """A plugin that is registered if mutants are asked for.

    Args:
        config: The configuration of the run.
        options: What was asked for.
        tell: A function that is called with what is being done, in words, and with an empty text at the end.
    """

    def __init__(self, config: pytest.Config, options: Options, tell: Callable[[str], None]) -> None:
        self._config, self._options, self._tell = config, options, tell
        self._workers = 0
        """The number of workers of xdist."""
        self._observer = Observer()
        self._test = ""
        self._outcomes: dict[str, str] = {}
        self._seconds: dict[str, float] = defaultdict(float)
        self._seen: dict[str, Seen] = defaultdict(Seen)
        """Node id of a test, or key of a fixture of wider scope → what it did. The seconds have the same keys."""
        self._modules: set[str] = set()
        self._results = Results()

    # --- workers of xdist ---------------------------------------------------------------------------------------------

    @property
    def _is_worker(self) -> bool:
        return hasattr(self._config, "workerinput")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Note how many workers there are."""
        self._workers = node.workerinput["workercount"]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker found. A worker that died found nothing."""
        found = getattr(node, "workeroutput", {}).get(_FOUND)
        if found:
            self._note(*pickle.loads(found))

    def _note(self, tests: Collection[BaselineTest], modules: Collection[str]) -> None:
        self._results.tests += tests
        self._modules |= set(modules)

    # --- the run without faults ---------------------------------------------------------------------------------------

    @property
    def _runs_no_test(self) -> bool:
        option = self._config.option
        return any(getattr(option, name, False) for name in ("collectonly", "setuponly", "setupplan"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Note which test runs which layers; then plant faults."""
        if self._runs_no_test:
            return (yield)
        started = time.monotonic()
        try:
            with self._observer.installed():
                result = yield
        except BaseException as error:
            self._results.stopped = str(error) or "the run was interrupted"
            raise
        found = list(self._tests_of(session)), modules_of(self._config.rootpath)
        if self._is_worker:
            # As bytes: xdist sends builtin types alone.
            self._config.workeroutput[_FOUND] = pickle.dumps(found)  # type: ignore[attr-defined]
        else:
            self._note(*found)
            self._try_mutants(time.monotonic() - started)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note what a test does."""
        self._test = item.nodeid
        with self._observer.observing(self._seen[item.nodeid]):
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Let compiled models run with hooks."""
        without_warning_of_hooks()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Note what a fixture of wider scope does by itself: it belongs to every test that uses it."""
        if fixturedef.scope == "function" or not self._observer.is_observing:
            return (yield)
        key = key_of(fixturedef)
        started = time.monotonic()
        try:
            with self._observer.writing_to(self._seen[key]):
                return (yield)
        finally:
            seconds = time.monotonic() - started
            self._seconds[key] = max(seconds, self._seconds[key])
            self._seconds[self._test] -= seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test ended. A subtest that was skipped does not count: the other parts of the test decide."""
        if is_of_subtest(report) and not report.failed:
            return
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        if outcome != "passed" or report.nodeid not in self._outcomes:
            self._outcomes[report.nodeid] = outcome
        self._seconds[report.nodeid] += report.duration

    def _tests_of(self, session: pytest.Session) -> Iterator[BaselineTest]:
        """Yield the tests that ran in this process."""
        for item in getattr(session, "items", ()):  # There are none in the process that hands tests to xdist.
            outcome = self._outcomes.get(item.nodeid)
            if outcome is None:
                continue
            shared = [key for key in wide_fixtures(item) if key in self._seen]
            places: dict[Place, set[str]] = defaultdict(set)
            for key in (item.nodeid, *shared):
                for place, operators in self._seen[key].places.items():
                    places[place] |= operators
            # Only a test that trains has a training program: others make models and compute losses too.
            if any(self._seen[key].steps for key in (item.nodeid, *shared)):
                for key in (item.nodeid, *shared):
                    for place, faults in self._seen[key].of_training.items():
                        if faults:
                            places[place] |= faults
            seconds = self._seconds[item.nodeid]
            seconds += sum(self._seconds[key] for key in shared if self._seen[key].has_models)
            yield BaselineTest(
                id=item.nodeid,
                file=item.nodeid.partition("::")[0],
                outcome=outcome,
                seconds=seconds,
                places=dict(places),
                sources=sorted(set().union(*(self._observer.sources[place.model] for place in places))),
                path=str(item.path),
            )

    # --- the runs with faults -----------------------------------------------------------------------------------------

    def _try_mutants(self, seconds: float) -> None:
        """Try mutants on the tests, which took so long without faults."""
        results, known, started = self._results, self._known.read(), time.monotonic()
        plan = planned(results.tests, self._options.most, self._options.operators)
        keys = Keys({test.id: test for test in results.tests}, self._modules)
        by_key = {keys.of(one): one for one in plan}
        results.total = len(plan)
        results.verdicts = {one.mutant: known[key] for key, one in by_key.items() if key in known}
        results.known = len(results.verdicts)
        until = started + self._options.seconds
        with tempfile.TemporaryDirectory(prefix="modelprobe-mutation-", ignore_cleanup_errors=True) as folder:
            told = functools.partial(self._told, Path(folder))
            workers = Workers(max(self._workers, 1), told, seconds=seconds, until=until)
            try:
                self._take_verdicts(workers, {key: one for key, one in by_key.items() if key not in known}, until)
            except TimeIsOver:
                results.stopped = f"the {self._options.seconds:g} s of --modelprobe-mutate-time were over"
            except NoWorker as error:
                results.stopped = str(error)
            finally:
                self._tell("")
                results.left_out, results.runs = workers.left_out, workers.runs
                results.seconds = time.monotonic() - started

    def _take_verdicts(self, workers: Workers, mutants: Mapping[str, Planned], until: float) -> None:
        results = self._results
        # The generator is closed, so that its processes end after Ctrl-C too.
        with contextlib.closing(workers.verdicts(mutants)) as verdicts:
            for key, verdict in verdicts:
                self._known.add(key, verdict)
                results.verdicts[mutants[key].mutant] = verdict
                tried, left = len(results.verdicts), max(until - time.monotonic(), 0)
                self._tell(f"fault {tried:,} of {results.total:,}, at most {left:.0f} s left")

    def _told(self, folder: Path, number: int, left_out: Collection[str]) -> Told:
        """Return what a process is told that plants faults."""
        own = folder / f"faults{number}"
        own.mkdir()
        config = self._config
        return Told(
            folder=own,
            directory=str(config.invocation_params.dir),
            # Nodes have the same ids only below the same root.
            options=child.options_of(
                config, rootdir=str(config.rootpath), inifilename=config.inipath and str(config.inipath)
            ),
            plugins=child.plugins_of(config),
            arguments=tuple(config.args),
            environment=dict(os.environ),
            left_out=left_out,
        )

    @functools.cached_property
    def _known(self) -> Known:
        """Opened after the tests: each worker of xdist obeys ``--cache-clear``."""
        return Known(getattr(self._config, "cache", None))  # There is none with ``-p no:cacheprovider``.

    # --- the end ------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Fail the run if too many faults survived."""
        if self._is_worker or self._runs_no_test:
            return (yield)
        least, score = self._options.least_score, self._results.score
        if least is not None and (score is None or score < least) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write the section."""
        if self._runs_no_test:
            return
        terminalreporter.write_sep("=", "modelprobe: planted faults")
        most = None if self._config.getoption("verbose") > 0 else 20
        for line in lines(self._results, self._options.least_score, most=most, goes_on=self._known.is_kept):
            terminalreporter.write_line(line)
