"""The plugin of a run with mutants: all tests run as they are, then again, each time with one fault planted."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_modelprobe._pytest import is_of_subtest

from .folder import Folder
from .plan import BaselineTest, Place, Results, planned
from .planting import Observer, Seen
from .report import lines
from .trial import TimeIsOver, Trial, key_of, wide_fixtures

_CACHE = "modelprobe/mutation"  # key in pytest's cache
_MOST_KNOWN = 20_000  # verdicts that are kept
_WAITS = 3600.0  # seconds for workers of xdist that have not ended their tests


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    most: int | None = None
    """Mutants; None: all."""
    least_score: float | None = None
    """Percent; less fails the run."""
    seconds: float = 300.0
    """Of the runs with faults."""


class MutationSession:
    """A plugin that is registered if mutants are asked for.

    Args:
        config: The configuration of the run.
        options: What was asked for.
        unreported: Returns a context in which no report, snapshot or count of the run is changed.
        tell: Takes what is being done, in words; empty: nothing any more.
    """

    def __init__(
        self,
        config: pytest.Config,
        options: Options,
        unreported: Callable[[], AbstractContextManager[object]],
        tell: Callable[[str], None],
    ) -> None:
        self._config, self._options, self._unreported, self._tell = config, options, unreported, tell
        worker: dict[str, Any] = getattr(config, "workerinput", {})
        self._process = worker.get("workerid", "main")
        self._workers = worker.get("workercount", 1)
        path = worker.get("modelprobe_mutation") or tempfile.mkdtemp(prefix="modelprobe-mutation-")
        self._folder = Folder(Path(path), self._process)
        self._has_workers = False
        self._observer = Observer()
        self._trial: Trial | None = None
        self._test = ""
        self._outcomes: dict[str, str] = {}
        self._seconds: dict[str, float] = defaultdict(float)
        self._seen: dict[str, Seen] = defaultdict(Seen)
        """By node id of a test, or key of a fixture of wider scope; so are the seconds."""
        self._results = Results()

    # --- workers of xdist ---------------------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Name the folder of the run to a worker."""
        self._has_workers = True
        node.workerinput["modelprobe_mutation"] = str(self._folder.path)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Let the other workers not wait for one that died."""
        if error and not self._folder.has_tests(node.gateway.id):
            self._folder.write_tests([], node.gateway.id)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell how far the workers are."""
        ended = threading.Event()

        def tell() -> None:
            while not ended.wait(1.0):
                tried, total = self._folder.tried()
                if total:
                    self._tell(f"fault {tried:,} of {total:,}")

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()
            self._tell("")

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
        if self._has_workers:
            with self._telling():
                return (yield)
        with self._observer.installed():
            try:
                result = yield
            except BaseException as error:
                self._folder.append(stopped=str(error) or "the run was interrupted")
                raise
            self._folder.write_tests(list(self._tests_of(session)))
            if session.shouldfail or session.shouldstop:  # a worker of xdist does not raise
                self._folder.append(stopped=f"{session.shouldfail or session.shouldstop}")
            else:
                self._try_mutants(session)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note what a test does."""
        self._test = item.nodeid
        with self._observer.observing(self._seen[item.nodeid]):
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Let a compiled model run without torch's warning that it does not see our hooks: it is not mutated inside."""
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Note what a fixture of wider scope does by itself: it belongs to every test that uses it."""
        if fixturedef.scope == "function" or not self._observer.is_observing:
            return (yield)
        key = key_of(fixturedef)
        if self._trial is not None:
            return (yield from self._trial.set_up(key))
        started = time.monotonic()
        try:
            with self._observer.writing_to(self._seen[key]):
                return (yield)
        finally:
            seconds = time.monotonic() - started
            self._seconds[key] = max(seconds, self._seconds[key])
            self._seconds[self._test] -= seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test ended: one with a subtest that was skipped is judged by its other parts."""
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
        for item in session.items:
            outcome = self._outcomes.get(item.nodeid)
            if outcome is None:
                continue
            shared = [key for key in wide_fixtures(item) if key in self._seen]
            places: dict[Place, set[str]] = defaultdict(set)
            for key in (item.nodeid, *shared):
                for place, operators in self._seen[key].places.items():
                    places[place] |= operators
            seconds = self._seconds[item.nodeid]
            seconds += sum(self._seconds[key] for key in shared if self._seen[key].has_models)
            yield BaselineTest(
                id=item.nodeid,
                file=item.nodeid.partition("::")[0],
                outcome=outcome,
                seconds=seconds,
                places=dict(places),
                sources=sorted(set().union(*(self._observer.sources[place.model] for place in places))),
            )

    # --- the runs with faults -----------------------------------------------------------------------------------------

    def _try_mutants(self, session: pytest.Session) -> None:
        """Try this process's part of the mutants."""
        tests = {test.id: test for test in self._tests_of_all()}
        plan = planned(tests.values(), self._options.most)
        self._folder.append(total=len(plan))
        items = {item.nodeid: item for item in session.items}
        share = range(int(self._process.removeprefix("gw")) if self._workers > 1 else 0, len(plan), self._workers)
        known, started = self._known(), time.monotonic()
        trial = self._trial = Trial(self._observer, items, tests, started + self._options.seconds)
        stopped = ""
        try:
            with self._unreported():
                for number in share:
                    left = self._options.seconds - (time.monotonic() - started)
                    self._tell(f"fault {number + 1:,} of {len(plan):,}, at most {max(left, 0):.0f} s left")
                    one = plan[number]
                    key = trial.key(one)
                    if key in known:
                        self._folder.append(mutant=one.mutant, verdict=known[key], key=key, known=True)
                    elif not stopped:
                        try:
                            verdict = trial.verdict(one)
                        except TimeIsOver:
                            stopped = f"the {self._options.seconds:g} s of --modelprobe-mutate-time were over"
                            continue
                        self._folder.append(mutant=one.mutant, verdict=verdict, key=key, known=False)
        except KeyboardInterrupt:
            stopped = "the run was interrupted"
            raise
        finally:
            self._trial = None
            self._tell("")
            seconds, left_out = time.monotonic() - started, trial.take_left_out()
            self._folder.append(stopped=stopped, left_out=left_out, runs=trial.runs, seconds=seconds)

    def _tests_of_all(self) -> list[BaselineTest]:
        """Return the tests of all processes, once all have run them."""
        until = time.monotonic() + _WAITS
        others = [f"gw{i}" for i in range(self._workers)] if self._workers > 1 else []
        while time.monotonic() < until and not all(map(self._folder.has_tests, others)):
            time.sleep(0.05)
        return self._folder.read_tests()

    def _known(self) -> dict[str, list[str]]:
        """Return the verdicts of earlier runs."""
        found = {} if self._cache is None else self._cache.get(_CACHE, {})
        return found if isinstance(found, dict) else {}

    @property
    def _cache(self) -> Any:
        """Pytest's cache; None with ``-p no:cacheprovider``."""
        return getattr(self._config, "cache", None)

    # --- the end ------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Read what was found, keep it for the next run, and fail the run if too many faults survived."""
        if self._process != "main" or self._runs_no_test:
            return (yield)
        self._results, keys = self._folder.results()
        if self._cache is not None and keys:
            known = self._known() | keys
            self._cache.set(_CACHE, dict(list(known.items())[-_MOST_KNOWN:]))
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
        goes_on = self._cache is not None
        for line in lines(self._results, self._options.least_score, most=most, goes_on=goes_on):
            terminalreporter.write_line(line)

    def pytest_unconfigure(self) -> None:
        """Remove the folder of the run."""
        if self._process == "main":
            shutil.rmtree(self._folder.path, ignore_errors=True)
