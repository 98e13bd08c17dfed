"""The plugin of a run with mutants: all tests run as they are, then again, each time with one fault planted."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from pytest_modelprobe import child
from pytest_modelprobe._pytest import is_of_subtest

from .planting import MutantRunner, Observer, key_of, wide_keys, without_warning_of_hooks
from .results import BaselineTest, Known, Place, Planned, Results, Seen, Verdict, keys_of, lines, modules_of, planned

# --- the process in which faults are planted --------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What a worker is told by the process that starts it."""

    folder: Path
    """The folder for its log and its temporary files."""
    directory: str
    """The directory in which the run was started."""
    options: Mapping[str, Any]
    plugins: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    left_out: Collection[str]
    """Tests that cannot be used."""


WORKER = pytest.StashKey[tuple[Told, Connection]]()
"""Only the configuration of a worker has this key."""


def main(told: Told, connection: Connection) -> None:
    """Collect the tests, and try the mutants that come. The target of the process."""
    child.begin(told.folder / "log", told.environment)
    os.chdir(told.directory)
    options = {**told.options, "basetemp": str(told.folder / "tmp")}
    config = child.configured(options, told.plugins, told.arguments)
    config.stash[WORKER] = told, connection
    child.run_as_worker(config, {"workerid": told.folder.name, "workercount": 1})


class Worker:
    """A plugin that tries mutants in place of the tests.

    It sends ``("runs", (test, seconds))`` before each run of a test, ``("left out", (test, why))`` for a test that
    cannot be used, and ``("verdict", verdict)`` for each mutant. The seconds are those of the test without a fault, or
    `None` if there is no fault in this run.

    Args:
        told: What it is told.
        connection: To the process that started it.
        unreported: Returns a context in which snapshots are not written.
    """

    def __init__(
        self, told: Told, connection: Connection, unreported: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._told, self._connection, self._unreported = told, connection, unreported
        self._observer = Observer()
        self._trial: MutantRunner

    def _tell(self, kind: str, what: object) -> None:
        self._connection.send((kind, what))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try mutants until no more come."""
        items = {item.nodeid: item for item in session.items}
        self._trial = MutantRunner(self._observer, items, self._told.left_out, self._tell)
        with self._observer.installed(), self._unreported(), contextlib.suppress(EOFError):
            while True:
                self._tell("verdict", self._trial.verdict(self._connection.recv()))
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Let compiled models run with hooks."""
        without_warning_of_hooks()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Note what a fixture of wider scope does by itself: it belongs to every test that uses it."""
        if fixturedef.scope == "function" or not self._observer.is_observing:
            return (yield)
        return (yield from self._trial.set_up(key_of(fixturedef)))


# --- processes that take mutants --------------------------------------------------------------------------------------

_TIMES, _MORE_SECONDS = 10, 10.0
"""A test hangs if it takes ten times as long as without the fault, and ten seconds more."""

_FIRST_SECONDS = 120.0
"""The extra time of a test that runs without a fault: in a new process it may have to import and compile first."""

_PRELOADED = ["torch", "pytest", "pytest_modelprobe.extras.mutation.session"]


class TimeIsOver(Exception):
    """No time is left for another run."""


class NoWorker(Exception):
    """A process ended before it ran a test; the message says how."""


class _Process:
    """A process, and what it does."""

    def __init__(self, told: Told) -> None:
        self.log = told.folder / "log"
        self.process, self.connection = child.start(main, told, _PRELOADED)
        self.given: tuple[str, Planned] | None = None
        """The mutant that it tries, after its key."""
        self.test = ""
        """The test that it runs."""
        self.has_fault = False
        """Whether the test runs with the fault."""
        self.has_run = False
        """Whether it has run a test."""
        self.deadline: float | None = None
        """Of the test."""

    def give(self, given: tuple[str, Planned]) -> None:
        """Let it try a mutant."""
        self.given, self.test, self.deadline = given, "", None
        with contextlib.suppress(OSError):  # The process is gone, which is seen later.
            self.connection.send(given[1])

    def runs(self, test: str, deadline: float, *, has_fault: bool) -> None:
        """Note that a test begins."""
        self.test, self.deadline, self.has_fault, self.has_run = test, deadline, has_fault, True

    def received(self) -> Iterator[tuple[str, Any]]:
        """Yield what it has sent since."""
        with contextlib.suppress(EOFError, OSError):  # The process is gone.
            while self.connection.poll():
                yield self.connection.recv()

    def end(self) -> None:
        """End the process, whatever it does. If it does nothing, it may tear its fixtures down first."""
        self.connection.close()
        if self.given is None:
            self.process.join(_MORE_SECONDS)
        child.end(self.process)


class Workers:
    """Processes that try mutants, each started when it is needed.

    Args:
        most: How many there are at once.
        told: Returns what a process is told; takes its number, and the tests that are left out.
        seconds: What all tests took without a fault: none takes longer when it is run again.
        until: Time at which no more runs begin, of `time.monotonic`.
    """

    def __init__(
        self, most: int, told: Callable[[int, Collection[str]], Told], *, seconds: float, until: float
    ) -> None:
        self._most, self._told, self._seconds, self._until = most, told, seconds, until
        self._waiting = deque[tuple[str, Planned]]()
        self._processes: list[_Process] = []
        self._started = 0
        self.left_out: dict[str, str] = {}
        """Test that cannot be used → why."""
        self.runs = 0
        """How many times a test ran with a fault."""

    def verdicts(self, mutants: Mapping[str, Planned]) -> Generator[tuple[str, Verdict], None, None]:
        """Yield the key of each mutant with what became of it, as soon as that is known.

        Raises:
            TimeIsOver: The rest was not tried.
            NoWorker: The rest cannot be tried.
        """
        self._waiting.extend(mutants.items())
        try:
            while self._give():
                self._wait()
                for process in self._processes[:]:
                    given, verdict = process.given, self._verdict(process)
                    if given is not None and verdict is not None:
                        process.given = None
                        yield given[0], verdict
        finally:
            for process in self._processes:
                process.end()

    def _give(self) -> bool:
        """Give mutants to the processes that have none, and return whether any mutant is being tried."""
        while self._waiting and (process := self._idle()) is not None:
            process.give(self._waiting.popleft())
        return any(process.given for process in self._processes)

    def _idle(self) -> _Process | None:
        """Return a process that does nothing: a new one, if there may be more."""
        if time.monotonic() > self._until:
            raise TimeIsOver
        found = next((process for process in self._processes if process.given is None), None)
        if found is None and len(self._processes) < self._most:
            self._started += 1
            found = _Process(self._told(self._started, list(self.left_out)))
            self._processes.append(found)
        return found

    def _wait(self) -> None:
        """Wait until a process has sent something, is gone, or has no more time."""
        handles = [handle for p in self._processes for handle in (p.process.sentinel, p.connection)]
        first = min(self._until if p.deadline is None else p.deadline for p in self._processes if p.given)
        wait(handles, max(0.0, first - time.monotonic()))

    def _verdict(self, process: _Process) -> Verdict | None:
        """Return what a process has found, or how it ended, or `None` if it goes on."""
        # This is asked before what the process sent is read: once it has ended, nothing can come later.
        is_over = not process.process.is_alive()
        for kind, what in process.received():
            if kind == "verdict":
                return Verdict(*what)
            self._note(process, kind, what)
        now = time.monotonic()
        if is_over:
            return self._lost(process, "crashed", "ended its process")
        if process.deadline is not None and now > process.deadline:
            return self._lost(process, "timed out", "did not come to an end")
        if process.given and process.deadline is None and now > self._until:
            raise TimeIsOver
        return None

    def _note(self, process: _Process, kind: str, what: Any) -> None:
        if kind == "left out":
            test, why = what
            self.left_out[test] = why
        else:
            test, seconds = what
            if time.monotonic() > self._until:
                raise TimeIsOver
            limit = _TIMES * seconds + _MORE_SECONDS if seconds is not None else _TIMES * self._seconds + _FIRST_SECONDS
            process.runs(test, time.monotonic() + limit, has_fault=seconds is not None)
            self.runs += process.has_fault

    def _lost(self, process: _Process, outcome: str, why: str) -> Verdict | None:
        """End a process that is lost, and return the verdict of its mutant, or `None` if there is none yet."""
        process.end()
        self._processes.remove(process)
        if process.given is None:
            return None
        if not process.has_run:
            lines = process.log.read_text("utf-8", "replace").split("\n") if process.log.exists() else []
            said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
            code = process.process.exitcode
            raise NoWorker(f"a process that plants faults ended: exit code {code}, {said}")
        if process.test and process.has_fault:
            return Verdict(outcome, process.test)
        if process.test:
            self.left_out[process.test] = why
        self._waiting.appendleft(process.given)
        return None


_FOUND = "modelprobe_mutation"
"""The key of what a worker of xdist sends."""


class MutationSession:
    """A plugin that is registered if mutants are asked for.

    Args:
        config: The configuration of the run.
        operators: The names of the faults that are planted, or `None` for all.
        tell: A function that is called with what is being done, in words, and with an empty text at the end.
    """

    def __init__(self, config: pytest.Config, operators: Collection[str] | None, tell: Callable[[str], None]) -> None:
        self._config, self._operators, self._tell = config, operators, tell
        option = config.option
        self._least: float | None = option.modelprobe_mutate_min
        """The score in percent below which the run fails."""
        self._limit: float = option.modelprobe_mutate_time
        """How many seconds the runs with faults may take."""
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
            shared = [key for key in wide_keys(item) if key in self._seen]
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
        plan = planned(results.tests, self._config.option.modelprobe_mutate, self._operators)
        by_key = keys_of(plan, results.tests, self._modules)
        results.total = len(plan)
        results.verdicts = {one.mutant: known[key] for key, one in by_key.items() if key in known}
        results.known = len(results.verdicts)
        until = started + self._limit
        with tempfile.TemporaryDirectory(prefix="modelprobe-mutation-", ignore_cleanup_errors=True) as folder:
            told = functools.partial(self._told, Path(folder))
            workers = Workers(max(self._workers, 1), told, seconds=seconds, until=until)
            try:
                self._take_verdicts(workers, {key: one for key, one in by_key.items() if key not in known}, until)
            except TimeIsOver:
                results.stopped = f"the {self._limit:g} s of --modelprobe-mutate-time were over"
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
        least, score = self._least, self._results.score
        if least is not None and (score is None or score < least) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write the section."""
        if self._runs_no_test:
            return
        terminalreporter.write_sep("=", "modelprobe: planted faults")
        most = None if self._config.getoption("verbose") > 0 else 20
        for line in lines(self._results, self._least, most=most, goes_on=self._known.is_kept):
            terminalreporter.write_line(line)
