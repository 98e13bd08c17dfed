"""Runs tests on another side, in a process of its own, and returns what became of them.

The process is told by a file of JSON and answers with another, because its Python may have other versions of pytest and
of everything else. It runs as a worker does: nothing is printed, and no other plugin writes. It ends with this process,
also if this one is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_modelprobe import child
from pytest_modelprobe._pytest import tear_down_before, wide_fixtures
from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.progress import progress

from .pairs import Pair, Written, compare_records, judged, read_written
from .recorder import Recorder, is_probed

_PACKAGES = ("pytest-modelprobe", "torch", "pytest")


ANSWER, BEGUN, ENDED = "ran.json", "begun", "ended"
"""What a process writes: the answer, and the tests that it has begun and ended, a line each."""

_TIMES = 10
"""How many times as long as by themselves the tests may take, and a minute more."""

_POLLED_EVERY = 0.2
"""Seconds between two looks at how far the processes are."""

_WAITED = 0.01
"""Seconds between two looks at whether the other side has ended a test."""


class SideError(ModelProbeError):
    """The other side cannot run, or does not run what it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the other side is told. All paths are those of the other side."""

    files: Sequence[str]
    """The files of the tests, and other arguments of pytest."""
    tests: Collection[str] | None = None
    """The node ids of the tests that run, or beginnings of them up to ``::`` or ``[``; the path of the file may be
    absolute. By default all run."""
    options: Mapping[str, Any]
    """The options of pytest."""
    plugins: Sequence[str] = ()
    """The values of ``-p``."""
    records: str = ""
    """The folder for the records."""
    own_paths: Sequence[str] = ()
    """As in `Recorder`."""
    evidence: bool = False
    beside: str | None = None
    like: str | None = None
    """As in `Recorder`."""
    observe: bool = False
    """Whether models of tests without a probe are watched too."""
    after: Sequence[str] = ()
    """The folders of the processes that run the tests on the side that runs first. A test runs here once it has ended
    there, and only if it made a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What became of the tests."""

    collected: Collection[str] = ()
    """The node ids of all tests in the files."""
    with_probe: Collection[str] = ()
    """Those of them that have a probe."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Test → the first line of its failure, or the reason why it was skipped."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """File → why its tests could not be collected."""

    def fails(self, test: str) -> bool:
        """Whether a test failed, or could not be read."""
        return test.partition("::")[0] in self.unread or self.failed.get(test, "skipped").startswith("failed")

    def without(self, tests: Collection[str]) -> Ran:
        """Return the same without some tests."""
        files = {test.partition("::")[0] for test in tests}
        return Ran(
            collected=set(self.collected) - set(tests),
            with_probe=self.with_probe,
            failed={test: why for test, why in self.failed.items() if test not in tests},
            unread={file: why for file, why in self.unread.items() if file not in files},
        )

    def with_(self, other: Ran) -> Ran:
        """Return what became of the tests of both."""
        return Ran(
            collected={*self.collected, *other.collected},
            with_probe={*self.with_probe, *other.with_probe},
            failed={**self.failed, **other.failed},
            unread={**self.unread, **other.unread},
        )


def options_for(config: pytest.Config, **own: Any) -> dict[str, Any]:
    """Return the options of this run for another side: those that JSON can hold, without what is written or updated."""
    silent = {
        "update_snapshots": False,
        "cacheclear": False,
        "modelprobe_output": None,
        "modelprobe_json": None,
        "modelprobe_html": None,
        "modelprobe_mutate": None,
        "modelprobe_save": None,
        "basetemp": None,
        "confcutdir": None,
        "markexpr": config.option.markexpr,
        "keyword": config.option.keyword,
        # Both sides draw the same examples.
        "hypothesis_seed": getattr(config.option, "hypothesis_seed", None) or "0",
    }
    options = child.options_of(config, **{**silent, **own})
    return {name: value for name, value in options.items() if _is_plain(value) and name != "file_or_dir"}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


# --- in the process that starts it ------------------------------------------------------------------------------------


class Side:
    """Where tests run a second time.

    Args:
        python: The interpreter.
        directory: The directory in which it starts.
        imports: The folders from which it imports first.
        without: A folder from which it does not import: the working tree, where it has a tree of its own.
        threads: How many threads a process has for an operation of torch, unless the environment says it.
    """

    def __init__(
        self,
        python: str,
        directory: Path,
        imports: Iterable[Path] = (),
        *,
        without: Path | None = None,
        threads: int | None = None,
    ) -> None:
        self._python, self._directory = python, directory
        given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        given = [entry for entry in given if without is None or not Path(entry).resolve().is_relative_to(without)]
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*map(str, imports), *given]),
            "PYTHONDONTWRITEBYTECODE": "1",
            # Sets of texts have one order on each side and in each run.
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        }
        if threads is not None:
            self._environment.setdefault("OMP_NUM_THREADS", str(threads))
        if self._python != sys.executable:
            self._environment.pop("PYTHONHOME", None)

    def versions(self) -> dict[str, str]:
        """Return the versions of Python and of the packages that matter there.

        Raises:
            SideError: The interpreter cannot be run, or it has no pytest-modelprobe that can answer.
        """
        code = f"""
import importlib.metadata as m, importlib.util, json, platform
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
side = importlib.util.find_spec("pytest_modelprobe") and importlib.util.find_spec("pytest_modelprobe.revisions")
print(json.dumps({{"python": platform.python_version(), "side": bool(side), **{{n: version(n) for n in {_PACKAGES}}}}}))
"""
        try:
            done = subprocess.run(
                [self._python, "-c", code],
                cwd=self._directory,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SideError(f"{self._python} cannot be run: {error}") from None
        if done.returncode or not done.stdout.strip():
            raise SideError(f"{self._python} is no Python that runs: {_last_line(done.stderr)}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        ours = importlib.metadata.version("pytest-modelprobe")
        if found["pytest-modelprobe"] is None and not found["side"]:
            raise SideError(f"{self._python} has no pytest-modelprobe: install {ours} there, as here")
        if not found.pop("side"):
            there = found["pytest-modelprobe"]
            raise SideError(f"the pytest-modelprobe {there} of {self._python} cannot answer: install {ours} there")
        return found

    def run(self, jobs: Sequence[Job], log: Path, *, seconds: float = math.inf) -> Ran:
        """Run jobs at the same time, each in a process of its own, and return what became of all of them.

        Args:
            jobs: The jobs.
            log: A folder for what the processes print.
            seconds: How long they may take.

        Raises:
            SideError: A process ended without an answer.
        """
        with contextlib.ExitStack() as stack:
            running = self.start(stack, jobs, log)
            finish(running, seconds=seconds)
            return running.ran

    def start(self, stack: contextlib.ExitStack, jobs: Sequence[Job], log: Path) -> Running:
        """Start jobs. They end with the block at the latest."""
        return Running([self._started(stack, job, log / str(number)) for number, job in enumerate(jobs)])

    def _started(self, stack: contextlib.ExitStack, job: Job, folder: Path) -> _Process:
        folder.mkdir(parents=True, exist_ok=True)
        told, answer, log = folder / "job.json", folder / ANSWER, folder / "log"
        for left in (answer, folder / BEGUN, folder / ENDED):
            left.unlink(missing_ok=True)
        tests = None if job.tests is None else sorted(job.tests)
        told.write_text(json.dumps({**dataclasses.asdict(job), "tests": tests}), "ascii")
        output = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            [self._python, "-m", "pytest_modelprobe.revisions", str(told), str(answer)],
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.PIPE,  # it ends when this closes
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(_end, process)
        return _Process(process, self._directory, folder, tests or ())


@dataclass(slots=True, eq=False)
class _Process:
    """A process of a side, where it runs, the folder of its files, and the tests that it was told to run."""

    process: subprocess.Popen[bytes]
    directory: Path
    folder: Path
    tests: Collection[str]
    ran: Ran | None = None
    """What became of its tests, once it has ended."""

    def look(self) -> None:
        """Read the answer if the process has ended. One that ended without an answer is an error."""
        if self.ran is None and self.process.poll() is not None:
            answer = self.folder / ANSWER
            if not answer.is_file():
                log = (self.folder / "log").read_text("utf-8", "replace")
                said = next(
                    (line for line in log.splitlines() if line.startswith("Fatal Python error")), _last_line(log)
                )
                last = next(reversed(_lines(self.folder / BEGUN)), None)
                raise SideError(
                    f"nothing was compared: a process that ran the tests in {self.directory} ended without an answer, "
                    f"with exit code {self.process.returncode}{'' if last is None else f', in {last}'}: {said}"
                )
            self.ran = Ran(**json.loads(answer.read_text("ascii")))

    def stop(self, seconds: float) -> None:
        """End the process, if it runs. What it has not ended is told."""
        if self.ran is None:
            _end(self.process)
            begun, ended = _lines(self.folder / BEGUN), {*_lines(self.folder / ENDED)}
            hung = next((test for test in reversed(begun) if test not in ended), None)
            why = f"{hung or 'the process'} did not end within {seconds:.0f} s, {_TIMES} times what all tests took"
            left = {*self.tests, *begun} - ended
            self.ran = Ran(collected=self.tests, failed=dict.fromkeys(sorted(left), f"stopped: {why}"))


@dataclass(frozen=True, slots=True)
class Running:
    """The processes that run tests on one side."""

    processes: Sequence[_Process]

    @property
    def folders(self) -> list[str]:
        """The folders of the files of each process."""
        return [str(one.folder) for one in self.processes]

    @property
    def ran(self) -> Ran:
        """What became of all tests, once all processes have ended."""
        return functools.reduce(Ran.with_, (one.ran for one in self.processes if one.ran is not None), Ran())


def finish(*sides: Running, seconds: float) -> None:
    """Wait until the processes have ended, and tell the progress. End those that take too long.

    Args:
        sides: The processes.
        seconds: How long they may take.

    Raises:
        SideError: A process ended without an answer.
    """
    processes = [one for side in sides for one in side.processes]
    total = sum(len(one.tests) for one in processes)
    with progress("test on both sides" if len(sides) > 1 else "test", total or None) as each:
        deque(each(_begun_by(processes, time.monotonic() + seconds)), maxlen=0)
    for one in processes:
        one.stop(seconds)


def _begun_by(processes: Sequence[_Process], until: float) -> Iterator[None]:
    """Yield once for each test that begins, until all processes have ended, or the time is over."""
    seen = 0
    while True:
        for one in processes:
            one.look()
        begun = sum(len(_lines(one.folder / BEGUN)) for one in processes)
        yield from [None] * (begun - seen)
        seen = begun
        running = [one for one in processes if one.ran is None]
        if not running or time.monotonic() > until:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].process.wait(_POLLED_EVERY)


def _lines(file: Path) -> list[str]:
    return file.read_text("utf-8", "replace").splitlines() if file.is_file() else []


def _end(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with whatever it started
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "it said nothing")


# --- the two sides compared ------------------------------------------------------------------------------------------

Records = Mapping[tuple[str, str], Written]
"""By test and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsOn:
    """Tests on a side.

    Args:
        side: The side.
        root: The root directory of pytest there, to which node ids are relative.
        options: The options of pytest there.
        plugins: The values of ``-p``.
        processes: How many processes run at the same time.
        logs: A folder for what the processes print.
        took: How many seconds the tests took on this side.
    """

    __test__ = False

    side: Side
    root: Path
    options: Mapping[str, Any]
    plugins: Sequence[str]
    processes: int
    logs: Path
    took: float = math.inf

    @property
    def seconds(self) -> float:
        """How long the tests may take."""
        return 60 + _TIMES * self.took

    def run(self, tests: Collection[str], records: Path, **more: Any) -> Ran:
        """Run tests, and write their records."""
        with contextlib.ExitStack() as stack:
            running = self.start(stack, tests, records, **more)
            finish(running, seconds=self.seconds)
            return running.ran

    def start(
        self, stack: contextlib.ExitStack, tests: Collection[str], records: Path, *, half: bool = False, **more: Any
    ) -> Running:
        """Start tests of files that are there. Half of the processes are left to the other side, if it is to run too.

        See `run`.
        """
        there = sorted(test for test in tests if (self.root / test.partition("::")[0]).is_file())
        number = max(1, self.processes // 2 if half else self.processes)
        logs, jobs = self.logs / records.name, []
        for part, some in enumerate(filter(None, (there[n::number] for n in range(number)))):
            temporary = str(logs / str(part) / "tmp")
            jobs.append(
                Job(
                    files=sorted({str(self.root / test.partition("::")[0]) for test in some}),
                    tests=some,
                    options={**self.options, "basetemp": temporary},
                    own_paths=(temporary, str(self.root)),
                    plugins=self.plugins,
                    records=str(records),
                    observe=True,
                    **more,
                )
            )
        return self.side.start(stack, jobs, logs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """What the two sides have in common, and what not."""

    tests: Set[str] = frozenset()
    """Tests that made records here."""
    pairs: Sequence[Pair] = ()
    here: Ran = dataclasses.field(default_factory=Ran)
    """What became of the tests on this side, while they were watched."""
    ran: Ran = dataclasses.field(default_factory=Ran)
    """What became of the tests on the other side."""
    only_here: Collection[str] = ()
    """Tests that the other side does not have."""
    unpaired: int = 0
    """Records of tests of both sides that only one side made."""


def side_by_side(
    tests: Collection[str],
    ours: TestsOn,
    theirs: TestsOn,
    *,
    folder: Path,
    check: Callable[[Records], None],
    own_tests: Callable[[], None] | None = None,
) -> SideBySide:
    """Run tests on both sides, and compare their records.

    The other side runs at the same time, a test behind. So it sees which of its records differ while the models are
    there.

    Args:
        tests: The tests.
        ours: Where the tests ran.
        theirs: Where they run too.
        folder: A folder for records.
        check: Raises `SideError` if the records of the other side are not of its own code.
        own_tests: Puts the tests of the other side itself in the place of those of this side, for tests that ask for
            what is not there.

    Raises:
        SideError: A side cannot run.
    """
    beside = str(folder / "here")
    with contextlib.ExitStack() as stack:
        first = ours.start(stack, tests, folder / "here", half=True)
        second = theirs.start(stack, tests, folder / "there", half=True, beside=beside, after=first.folders)
        finish(first, second, seconds=ours.seconds)
    here, ran = read_written(folder / "here"), second.ran
    asked, tests = tests, {test for test, _ in here}
    if own_tests is not None and (left := {test for test in tests if ran.fails(test)}):
        own_tests()
        left = {test for test in left if (theirs.root / test.partition("::")[0]).is_file()}
        ran = ran.without(left).with_(theirs.run(left, folder / "there", beside=beside))
    there = read_written(folder / "there")
    check(there)
    only_here = tests - set(ran.collected)
    both = [key for key in here if key in there]
    unpaired = sum(test not in only_here for test, _ in here.keys() ^ there.keys())
    differing = {key: there[key] for key in both if there[key].evidence}
    now = {**here, **_with_evidence(ours, asked, here, differing, folder)}
    pairs = [judged(now[key], there[key]) for key in both]
    return SideBySide(tests=tests, pairs=pairs, here=first.ran, ran=ran, only_here=sorted(only_here), unpaired=unpaired)


def _with_evidence(
    ours: TestsOn, asked: Collection[str], here: Records, there: Records, folder: Path
) -> dict[tuple[str, str], Written]:
    """Return records of this side with evidence, as some of the other side have it: their tests run once more."""
    found: dict[tuple[str, str], Written] = {}
    left, again, ran = {*there}, {test for test, _ in there}, Ran()
    for records in (folder / "again", folder / "once more"):
        if left:
            like = folder / f"as in {records.name}"
            for key in left:
                there[key].write(like, equal=folder / "there")
            ran = ours.run(again, records, like=str(like))
            found |= {key: one for key, one in read_written(records).items() if key in left}
        # Earlier tests of a file may have made what these use, as a function with a cache does.
        left = {key for key in there if not _is_again(found.get(key), here[key])}
        files = {test.partition("::")[0] for test, _ in left}
        again = {test for test in asked if test.partition("::")[0] in files}
    for key in there:
        one = found.get(key)
        if one is None or not one.evidence:
            found[key] = _without_evidence(here[key], ran.failed.get(key[0], "it made other records"))
        elif not _is_again(one, here[key]):
            found[key] = one.replaced(dataclasses.replace(one.record, noise="not repeatable"))
    return {key: found[key] for key in there}


def _is_again(one: Written | None, before: Written) -> bool:
    """Whether the same code gave the same record when it ran again."""
    if one is None or one.record.noise is not None:
        return one is not None and one.record.noise != "not repeatable"
    return compare_records(one.record, before.record).same


def _without_evidence(one: Written, why: str) -> Written:
    """Return a record with the note why there is nothing to tell a cause from what follows it."""
    note = f"no layer was called alone: the test did not run again as it had run ({why})"
    return one.replaced(dataclasses.replace(one.record, notes=(*one.record.notes, note)))


# --- on the other side ------------------------------------------------------------------------------------------------


class _Tests:
    """Runs the tests of a job, and notes what became of them."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._folder = job, folder
        self._collected: list[str] = []
        self._with_probe: list[str] = []
        self._failed: dict[str, str] = {}
        self._unread: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None, Any, Any]:
        """Leave the tests that were asked for."""
        result = yield
        self._collected = [item.nodeid for item in items]
        self._with_probe = [item.nodeid for item in items if is_probed(item)]
        if self._job.tests is not None:
            asked = {test.removeprefix(f"{config.rootpath.as_posix()}/") for test in self._job.tests}
            items[:] = [item for item in items if not _beginnings(item.nodeid).isdisjoint(asked)]
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Write which test begins. Leave it out if it made no record on the side that runs first.

        One with fixtures of wider scope runs in any case: it may change a model that others use.
        """
        self._write(BEGUN, item.nodeid)
        if not self._job.after or self._made_records(item.nodeid) or wide_fixtures(item):
            return None
        with contextlib.suppress(Exception):  # what a fixture raises fails a test that is left out
            tear_down_before(item, nextitem)
        self._write(ENDED, item.nodeid)
        return True

    def _made_records(self, test: str) -> bool:
        """Wait until a test has ended on the side that runs first, and return whether it made records there."""
        folders = [Path(folder) for folder in self._job.after]
        while not any((folder / ENDED).is_file() and test in _lines(folder / ENDED) for folder in folders):
            if all((folder / ANSWER).is_file() for folder in folders):
                break
            time.sleep(_WAITED)
        return self._job.beside is None or bool(read_written(Path(self._job.beside), test))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write which test has ended."""
        self._write(ENDED, nodeid)

    def _write(self, name: str, test: str) -> None:
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(f"{test}\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note files that could not be imported."""
        if report.failed:
            self._unread[report.nodeid] = _last_line(report.longreprtext).removeprefix("E").strip()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test failed, or why it was skipped."""
        if report.passed or report.nodeid in self._failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(crash, "message", "")
        self._failed[report.nodeid] = f"{report.outcome}: {(said or report.longreprtext).partition(chr(10))[0]}"

    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Go on after files that could not be collected."""
        session.testsfailed = 0

    def ran(self) -> Ran:
        """Return what became of the tests."""
        return Ran(collected=self._collected, with_probe=self._with_probe, failed=self._failed, unread=self._unread)


def _beginnings(nodeid: str) -> set[str]:
    """Return a node id, and those of what it is in.

    >>> sorted(_beginnings("t.py::TestNet::test_x[1]"))
    ['t.py', 't.py::TestNet', 't.py::TestNet::test_x', 't.py::TestNet::test_x[1]']
    """
    plain = nodeid.partition("[")[0].split("::")
    return {nodeid, *("::".join(plain[:n]) for n in range(1, len(plain) + 1))}


def _end_with_parent() -> None:
    descriptor = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)

    def wait() -> None:
        os.read(descriptor, 1)
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main(told: str, answer: str) -> None:
    """Run the tests of a job, and write what became of them."""
    _end_with_parent()
    data = json.loads(Path(told).read_text("ascii"))
    job = Job(**{**data, "tests": None if data["tests"] is None else frozenset(data["tests"])})
    try:
        config = child.configured(job.options, (*job.plugins, "no:cacheprovider"), job.files)
    except Exception as error:  # noqa: BLE001 - whatever a conftest.py raises
        files = job.files if job.tests is None else {test.partition("::")[0] for test in job.tests}
        ran = Ran(unread=dict.fromkeys(files, f"{type(error).__name__}: {error}".partition("\n")[0]))
        Path(answer).write_text(json.dumps(dataclasses.asdict(ran)), "ascii")
        return
    beside, like = (None if f is None else Path(f) for f in (job.beside, job.like))
    recorder = Recorder(Path(job.records), evidence=job.evidence, beside=beside, like=like, own_paths=job.own_paths)
    config.pluginmanager.register(recorder, "modelprobe-recorder")
    if job.observe:
        from .observer import ModelObserver

        config.pluginmanager.register(ModelObserver(recorder), "modelprobe-observer")
    tests = _Tests(job, Path(answer).parent)
    config.pluginmanager.register(tests, "modelprobe-side")
    child.run_as_worker(config, {"workerid": "base", "workercount": 1})
    Path(answer).write_text(json.dumps(dataclasses.asdict(tests.ran())), "ascii")
