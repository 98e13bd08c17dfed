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
from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.progress import progress

from .pairs import Pair, Written, compare_records, judged, read_written
from .recorder import Recorder, is_probed

_PACKAGES = ("pytest-modelprobe", "torch", "pytest")


ANSWER, BEGUN = "ran.json", "begun"
"""What a process writes: the answer, and the tests that it has begun, a line each."""

_TIMES = 10
"""How many times as long as here the tests may take on the other side, and a minute more."""


_POLLED_EVERY = 0.5
"""Seconds between two looks at how far the other side is."""


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
    evidence: bool = False
    beside: str | None = None
    like: str | None = None
    """As in `Recorder`."""
    observe: bool = False
    """Whether models of tests without a probe are watched too."""


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
        "basetemp": None,
        "confcutdir": None,
        "markexpr": config.option.markexpr,
        "keyword": config.option.keyword,
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
    """

    def __init__(
        self, python: str, directory: Path, imports: Iterable[Path] = (), *, without: Path | None = None
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

    def run(self, jobs: Sequence[Job], log: Path, *, seconds: float | None = None) -> Ran:
        """Run jobs at the same time, each in a process of its own, and return what became of all of them.

        Args:
            jobs: The jobs.
            log: A folder for what the processes print.
            seconds: How long they may take.

        Raises:
            SideError: A process ended without an answer, or did not end.
        """
        total = sum(len(job.tests or ()) for job in jobs[:1])  # each is told all of them
        with contextlib.ExitStack() as stack, progress("test on the other side", total or None) as each:
            processes = [self._started(stack, job, log / str(number)) for number, job in enumerate(jobs)]
            deque(each(_begun_by(processes, seconds)), maxlen=0)
            return functools.reduce(Ran.with_, (one.ran for one in processes if one.ran is not None), Ran())

    def _started(self, stack: contextlib.ExitStack, job: Job, folder: Path) -> _Process:
        folder.mkdir(parents=True, exist_ok=True)
        told, answer, log = folder / "job.json", folder / ANSWER, folder / "log"
        for left in (answer, folder / BEGUN):
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
        return _Process(process, folder)


@dataclass(slots=True, eq=False)
class _Process:
    """A process of the other side, and the folder of its files."""

    process: subprocess.Popen[bytes]
    folder: Path
    ran: Ran | None = None
    """What became of its tests, once it has ended."""

    @property
    def begun(self) -> list[str]:
        """The tests that it has begun."""
        file = self.folder / BEGUN
        return file.read_text("utf-8", "replace").splitlines() if file.is_file() else []

    def look(self) -> None:
        """Read the answer if the process has ended. One that ended without an answer is an error."""
        if self.ran is None and self.process.poll() is not None:
            answer = self.folder / ANSWER
            if not answer.is_file():
                said = _last_line((self.folder / "log").read_text("utf-8", "replace"))
                code = self.process.returncode
                raise SideError(f"the other side ended without an answer, with exit code {code}: {said}")
            self.ran = Ran(**json.loads(answer.read_text("ascii")))


def _begun_by(processes: Sequence[_Process], seconds: float | None) -> Iterator[None]:
    """Yield once for each test that begins, until all processes have ended."""
    seen, until = 0, math.inf if seconds is None else time.monotonic() + seconds
    while True:
        for one in processes:
            one.look()
        running = [one for one in processes if one.ran is None]
        begun = [one.begun for one in processes]
        yield from [None] * (sum(map(len, begun)) - seen)
        seen = sum(map(len, begun))
        if not running:
            return
        if time.monotonic() > until:
            last = next((tests[-1] for one in running if (tests := one.begun)), "no test yet")
            raise SideError(
                f"the other side did not end within {seconds:.0f} s, {_TIMES} times as long as the tests took here: it "
                f"ran {last}. Leave that test out with --deselect"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].process.wait(_POLLED_EVERY)


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

    def run(self, tests: Collection[str], records: Path, **more: Any) -> Ran:
        """Run tests of files that are there, and write their records."""
        files = sorted({str(self.root / test.partition("::")[0]) for test in tests})
        files = [file for file in files if Path(file).is_file()]
        job = functools.partial(
            Job, tests=tests, options=self.options, plugins=self.plugins, records=str(records), observe=True, **more
        )
        parts = (files[number :: self.processes] for number in range(self.processes))
        seconds = None if math.isinf(self.took) else 60 + _TIMES * self.took
        return self.side.run([job(files=part) for part in parts if part], self.logs / records.name, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """What the two sides have in common, and what not."""

    tests: Set[str] = frozenset()
    """Tests that made records here."""
    pairs: Sequence[Pair] = ()
    ran: Ran = dataclasses.field(default_factory=Ran)
    """What became of the tests on the other side."""
    only_here: Collection[str] = ()
    """Tests that the other side does not have."""
    unpaired: int = 0
    """Records of tests of both sides that only one side made."""


def side_by_side(
    here: Records,
    ours: TestsOn,
    theirs: TestsOn,
    *,
    folder: Path,
    check: Callable[[Records], None],
    own_tests: Callable[[], None] | None = None,
) -> SideBySide:
    """Run the tests of the records on the other side, and compare.

    Args:
        here: The records of this side.
        ours: Where the tests ran.
        theirs: Where they run again.
        folder: A folder for records, with those of this side in ``here``.
        check: Raises `SideError` if the records of the other side are not of its own code.
        own_tests: Puts the tests of the other side itself in the place of those of this side, for tests that ask for
            what is not there.

    Raises:
        SideError: The other side cannot run.
    """
    tests = {test for test, _ in here}
    beside = str(folder / "here")
    ran = theirs.run(tests, folder / "there", beside=beside)
    if own_tests is not None and (left := {test for test in tests if ran.fails(test)}):
        own_tests()
        ran = ran.without(left).with_(theirs.run(left, folder / "there", beside=beside))
    there = read_written(folder / "there")
    check(there)
    only_here = tests - set(ran.collected)
    both = [key for key in here if key in there]
    unpaired = sum(test not in only_here for test, _ in here.keys() ^ there.keys())
    now = dict(here)
    if differing := {test for test, key in both if there[test, key].evidence}:
        again = ours.run(differing, folder / "again", like=str(folder / "there"))
        found = read_written(folder / "again")
        for key in (key for key in both if there[key].evidence):
            now[key] = found.get(key, here[key])
            if not now[key].evidence:
                now[key] = _without_evidence(here[key], again.failed.get(key[0], "it made other records"))
            elif now[key].record.noise is None and not compare_records(now[key].record, here[key].record).same:
                # The same code ran twice.
                now[key] = now[key].replaced(dataclasses.replace(now[key].record, noise="not repeatable"))
    pairs = [judged(now[key], there[key]) for key in both]
    return SideBySide(tests=tests, pairs=pairs, ran=ran, only_here=sorted(only_here), unpaired=unpaired)


def _without_evidence(one: Written, why: str) -> Written:
    """Return a record with the note why there is nothing to tell a cause from what follows it."""
    note = f"no layer was called alone: the test did not run again as it had run ({why})"
    return one.replaced(dataclasses.replace(one.record, notes=(*one.record.notes, note)))


# --- on the other side ------------------------------------------------------------------------------------------------


class _Tests:
    """Runs the tests of a job, and notes what became of them."""

    def __init__(self, job: Job, begun: Path) -> None:
        self._job, self._begun = job, begun
        self._collected: list[str] = []
        self._with_probe: list[str] = []
        self._failed: dict[str, str] = {}
        self._unread: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, Any, Any]:
        """Leave the tests that were asked for."""
        result = yield
        self._collected = [item.nodeid for item in items]
        self._with_probe = [item.nodeid for item in items if is_probed(item)]
        if self._job.tests is not None:
            asked = (
                {test.removeprefix(f"{items[0].config.rootpath.as_posix()}/") for test in self._job.tests}
                if items
                else {}
            )
            items[:] = [item for item in items if not _beginnings(item.nodeid).isdisjoint(asked)]
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Write which test begins."""
        with self._begun.open("a", encoding="utf-8") as file:
            file.write(f"{item.nodeid}\n")

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
    config = child.configured(job.options, (*job.plugins, "no:cacheprovider"), job.files)
    beside, like = (None if f is None else Path(f) for f in (job.beside, job.like))
    recorder = Recorder(Path(job.records), evidence=job.evidence, beside=beside, like=like)
    config.pluginmanager.register(recorder, "modelprobe-recorder")
    if job.observe:
        from .observer import ModelObserver

        config.pluginmanager.register(ModelObserver(recorder, reruns=False), "modelprobe-observer")
    tests = _Tests(job, Path(answer).with_name(BEGUN))
    config.pluginmanager.register(tests, "modelprobe-side")
    child.run_as_worker(config, {"workerid": "base", "workercount": 1})
    Path(answer).write_text(json.dumps(dataclasses.asdict(tests.ran())), "ascii")
