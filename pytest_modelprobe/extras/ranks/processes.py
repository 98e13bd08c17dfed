"""A test in ranks: what runs in each, one test in a process group of all; and the reports of all as one."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import linecache
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import distributed

from pytest_modelprobe import child
from pytest_modelprobe._pytest import picklable, tear_down_before
from pytest_modelprobe.exceptions import UsageError

# --- in a rank --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a rank is told by the process that starts it."""

    rank: int
    world_size: int
    folder: str
    """Where the ranks keep what is theirs: the store, logs, temporary folders."""
    test: str
    """Path of the module and the rest of the node id."""
    options: Mapping[str, Any]
    """The options of the run."""
    plugins: tuple[str, ...]
    """The values of ``-p``."""
    input: Mapping[str, Any]
    """What xdist gave the process as ``config.workerinput``."""
    environment: Mapping[str, str]
    timeout: float

    def path(self, name: str) -> Path:
        """Return a file or folder of this rank."""
        return Path(self.folder, f"{self.rank}.{name}")


def main(assignment: Assignment, connection: Connection) -> None:
    """Run the test, and send its reports and warnings as they come. The target of the process."""
    child.begin(assignment.path("log"), assignment.environment)
    # Open as long as the process lives.
    faulthandler.register(signal.SIGUSR1, assignment.path("stack").open("w"), all_threads=False)
    for name in ("", "LOCAL_"):
        os.environ[f"{name}RANK"] = str(assignment.rank)
        os.environ[f"{name}WORLD_SIZE"] = str(assignment.world_size)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun does: the ranks share the cores
    options = {**assignment.options, "basetemp": str(assignment.path("tmp"))}
    config = child.configured(options, assignment.plugins, [assignment.test])
    config.pluginmanager.register(RankPlugin(config, assignment, connection), "modelprobe-rank")
    mine = {"workerid": f"rank{assignment.rank}", "workercount": assignment.world_size}
    connection.send(("ended", child.run_as_worker(config, {**mine, **assignment.input})))


class RankPlugin:
    """Puts the test into a process group, and sends what it reports."""

    def __init__(self, config: pytest.Config, assignment: Assignment, connection: Connection) -> None:
        self._config = config
        self._assignment = assignment
        self._connection = connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Join the process group: before any fixture."""
        self._connection.send(("began", None))
        mine = self._assignment
        on_gpus = torch.cuda.device_count() >= mine.world_size
        if on_gpus:
            torch.cuda.set_device(mine.rank)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            store=distributed.FileStore(str(Path(mine.folder, "store")), mine.world_size),  # type: ignore[attr-defined]
            rank=mine.rank,
            world_size=mine.world_size,
            # The parent tells a hang by its own clock, and where each rank stands: it comes first.
            timeout=datetime.timedelta(seconds=2 * mine.timeout + 60),
        )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        """Leave the process group, after every fixture."""
        try:
            return (yield)
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send the report of a phase at once: what follows may hang, and some plugins log reports later."""
        report = yield
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Send why the test was not found."""
        if report.failed:
            self._connection.send(("broken off", report.longreprtext))

    def pytest_internalerror(self, excrepr: object) -> None:
        """Send an error of pytest or a plugin."""
        self._connection.send(("broken off", str(excrepr)))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Send what ended the run of pytest: KeyboardInterrupt or `pytest.exit`, of which there is no report."""
        self._connection.send(("broken off", excinfo.exconly()))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Send a warning of the test."""
        if when == "runtest":
            shown = warning_message
            self._connection.send(("warning", (str(shown.message), shown.category, shown.filename, shown.lineno)))


# --- in the process that starts the ranks -----------------------------------------------------------------------------

GRACE = 3.0
"""Seconds that the other ranks have to come to an end by themselves, after one has failed."""

_IMPORTS = 300.0
"""Seconds that the ranks have to import what they need, before the time of the test begins."""

_PRELOADED = ["torch.distributed", "pytest", "pytest_modelprobe.extras.ranks.processes"]  # torch is imported once


class Rank:
    """One process, and what it sent."""

    def __init__(self, assignment: Assignment) -> None:
        self.number = assignment.rank
        self.assignment = assignment
        self.process, self.connection = child.start(main, assignment, _PRELOADED)
        self.has_begun = False
        """Whether it came to the test."""
        self.is_done = False
        """Whether it said that it came to its end."""
        self.is_over = False
        """Whether the process is gone."""
        self.stack = ""
        """Where it stood when it was asked."""

    @property
    def exit_code(self) -> int | None:
        """Exit code of a process that died; None where it runs, came to its end, or was ended from here."""
        return None if self.is_done or not self.is_over else self.process.exitcode

    @property
    def log(self) -> str:
        """What it wrote to stdout and stderr past pytest's capture."""
        return _text(self.assignment.path("log"))

    def received(self) -> Iterable[tuple[str, Any]]:
        """Yield what it has sent since."""
        with contextlib.suppress(EOFError, OSError):  # it died
            while self.connection.poll():
                yield self.connection.recv()

    def ask_stack(self) -> None:
        """Let it write where it stands."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)

    def read_stack(self) -> None:
        """Read where it stands, as soon as it has written it."""
        for _ in range(100):
            self.stack = _text(self.assignment.path("stack"))
            if self.stack or not self.process.is_alive():
                return
            time.sleep(0.01)

    def end(self) -> None:
        """End the process and whatever it started, also where it came to its end by itself."""
        child.end(self.process)
        self.connection.close()


class Ranks:
    """The processes of one test, from `start` to `end`.

    Args:
        assignments: What each is told.
        on_message: Called with each thing that a rank sent; returns whether the verdict is known by it.
    """

    def __init__(self, assignments: Iterable[Assignment], on_message: Callable[[Rank, str, Any], bool]) -> None:
        if "forkserver" not in multiprocessing.get_all_start_methods():
            raise UsageError(f"world_size= starts processes from a fork server, which {sys.platform} does not have")
        self._assignments = list(assignments)
        self._on_message = on_message
        self.all: list[Rank] = []
        self.is_late = False
        """Whether the time was up."""
        self.limit = _IMPORTS + self._assignments[0].timeout
        """How many seconds they have: until all have come to the test, or from then on."""

    def run(self) -> None:
        """Run all to their end, or to the end of one that fails and `GRACE`."""
        try:
            self.all += map(Rank, self._assignments)
            self._watch()
            self._ask_stacks()
        finally:
            for rank in self.all:
                rank.end()

    def _watch(self) -> None:
        end = time.monotonic() + self.limit
        decided = have_begun = False
        while running := [rank for rank in self.all if not rank.is_over]:
            by_handle: dict[Any, Rank] = {rank.process.sentinel: rank for rank in running}
            by_handle |= {rank.connection: rank for rank in running if not rank.is_done}
            ready = wait(list(by_handle), max(0.0, end - time.monotonic()))
            if not ready:
                self.is_late = not decided
                return
            for rank in {by_handle[handle].number: by_handle[handle] for handle in ready}.values():
                failed = self._receive(rank, is_over=rank.process.sentinel in ready)
                if failed and not decided:
                    decided, end = True, min(end, time.monotonic() + GRACE)
            if not have_begun and all(rank.has_begun for rank in self.all):
                have_begun, self.limit = True, self._assignments[0].timeout
                end = min(end, time.monotonic() + self.limit)

    def _receive(self, rank: Rank, *, is_over: bool) -> bool:
        """Take what a rank sent; return whether the verdict is known by it."""
        decided = False
        for kind, data in rank.received():
            rank.is_done |= kind == "ended"
            rank.has_begun |= kind == "began"
            decided |= self._on_message(rank, kind, data)
        if is_over:
            rank.process.join()
            rank.is_over = True
            decided |= not rank.is_done
        return decided

    def _ask_stacks(self) -> None:
        standing = [rank for rank in self.all if not rank.is_over]
        for rank in standing:
            rank.ask_stack()
        for rank in standing:
            rank.read_stack()


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.exists() else ""


# --- the reports of all ranks as one ----------------------------------------------------------------------------------

When = Literal["setup", "call", "teardown"]

_WHENS: tuple[When, ...] = ("setup", "call", "teardown")

_LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe")
"""What gloo raises in a rank where another is gone."""

_HANG = (
    "A collective that not every rank calls waits for ever, and so does a thread that is not joined. If the ranks are "
    "only slow, give @pytest.mark.modelprobe(timeout=) more seconds."
)

_FOREIGN = re.compile(
    r'  File ".*/(_pytest|pluggy|multiprocessing|pytest_modelprobe/(extras/ranks|plugin))/'
    r'|  File "<string>"|Extension modules:'
)


def run_in_ranks(item: pytest.Item, nextitem: pytest.Item | None, *, world_size: int, timeout: float) -> None:
    """Run a test once in each of several processes, and report the outcome of all.

    Args:
        item: The test. Its fixtures are set up in the ranks alone.
        nextitem: The test that follows.
        world_size: How many ranks.
        timeout: Seconds until ranks that have not ended are taken to hang.
    """
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    outcome = _Outcome(item)
    with tempfile.TemporaryDirectory(prefix="modelprobe-ranks-", ignore_cleanup_errors=True) as folder:
        ranks = Ranks(_assignments(item, folder, world_size, timeout), outcome.receive)
        outcome.begin(ranks)
        ranks.run()
        reports = list(outcome.reports())
    for warning in dict.fromkeys(outcome.warnings):  # of several ranks, once
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": warnings.WarningMessage(*warning),
                "when": "runtest",
                "nodeid": item.nodeid,
                "location": None,
            }
        )
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    tear_down_before(item, nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _assignments(item: pytest.Item, folder: str, world_size: int, timeout: float) -> Iterator[Assignment]:
    options = child.options_of(item.config)
    for rank in range(world_size):
        yield Assignment(
            rank=rank,
            world_size=world_size,
            folder=folder,
            test="::".join([str(item.path), *item.nodeid.split("::")[1:]]),
            options=options,
            plugins=child.plugins_of(item.config),
            input=picklable(getattr(item.config, "workerinput", {})),
            environment=dict(os.environ),
            timeout=timeout,
        )


class _Outcome:
    """What the ranks sent, and what it comes to."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._ranks: Ranks
        self._begun = time.time()
        self._received: list[tuple[Rank, pytest.TestReport]] = []
        """In the order in which they came: the first that failed is the one to read."""
        self._broken_off: dict[int, str] = {}
        """Why ranks did not come to the test, or to its end, though they came to theirs."""
        self.warnings: list[tuple[str, type[Warning], str, int]] = []

    def begin(self, ranks: Ranks) -> None:
        """Take the ranks of which messages will come."""
        self._ranks = ranks

    def receive(self, rank: Rank, kind: str, data: Any) -> bool:
        """Take a message; return whether the verdict is known by it: the rank did not pass."""
        if kind == "warning":
            self.warnings.append(data)
            return False
        if kind == "began":
            return False
        if kind == "broken off":
            self._broken_off.setdefault(rank.number, data)
            return True
        if kind == "ended":
            if not any(sender is rank and report.when == "teardown" for sender, report in self._received):
                self._broken_off.setdefault(rank.number, f"pytest ended with exit code {data}")
            return rank.number in self._broken_off
        config = self._item.config
        report = config.hook.pytest_report_from_serializable(config=config, data=data)
        self._received.append((rank, report))
        return not report.passed

    def reports(self) -> Iterator[pytest.TestReport]:
        """Yield the report of each phase."""
        broken = self._broken()
        lost = {id(report) for _, report in self._received if report.failed and _LOST.search(report.longreprtext)}
        has_cause = broken is not None or any(r.failed and id(r) not in lost for _, r in self._received)
        passed = True
        for when in _WHENS:
            found = [(rank, report) for rank, report in self._received if report.when == when]
            if has_cause:  # the connections were lost for it
                found = [(rank, report) for rank, report in found if id(report) not in lost]
            if broken is not None and broken.when == when:
                yield broken
                passed = False
            elif found and (passed or when == "teardown"):
                found.sort(key=lambda pair: pair[1].passed and pair[0].number)  # rank 0 knows what was written
                rank, report = max(found, key=lambda pair: _weight(pair[1]))  # the first of the worst
                passed = report.passed
                yield self._named(rank, report)

    def _broken(self) -> pytest.TestReport | None:
        """Return the report of a rank that sent none of its own: it hangs, died, or did not find the test."""
        for number, text in self._broken_off.items():
            began = any(sender.number == number for sender, _ in self._received)
            what = "broke the test off" if began else "did not come to the test"
            apart = "\n\n" if "\n" in text else " "
            return self._report(self._ranks.all[number], f"[rank {number}] {what}:{apart}{text}")
        failed = [report for _, report in self._received if report.failed]
        if failed and not _LOST.search(failed[0].longreprtext):
            return None
        dead = next((rank for rank in self._ranks.all if rank.exit_code is not None), None)
        if dead is not None:
            return self._report(dead, f"[rank {dead.number}] {_death(dead.exit_code or 0)}")
        standing = next((rank for rank in self._ranks.all if rank.stack), None)
        if not self._ranks.is_late or standing is None:
            return None
        return self._report(
            standing, "\n".join([f"timed out after {self._ranks.limit:g} s", *self._states(), "", _HANG])
        )

    def _report(self, rank: Rank, text: str) -> pytest.TestReport:
        item = self._item
        stack = [(f"[rank {rank.number}] stack", _own_frames(rank.stack)) for rank in self._ranks.all if rank.stack]
        log = [(f"[rank {rank.number}] stderr", _own_frames(rank.log))] if rank.log else []
        return pytest.TestReport(
            item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", text, self._phase(rank),
            sections=[*stack, *log], start=self._begun, stop=time.time(), duration=time.time() - self._begun,
        )  # fmt: skip

    def _phase(self, rank: Rank) -> When:
        """Return the phase in which a rank was when it ended."""
        reported = {report.when for sender, report in self._received if sender is rank}
        return next((when for when in _WHENS if when not in reported), "teardown")

    def _named(self, rank: Rank, report: pytest.TestReport) -> pytest.TestReport:
        """Return the report with the rank in it."""
        prefix = f"[rank {rank.number}] "
        report.sections = [(prefix + name, text) for name, text in report.sections]
        if report.failed:
            path, line, domain = report.location
            report.location = path, line, f"{domain} [rank {rank.number}]"  # the headline of the failure
            crash = getattr(report.longrepr, "reprcrash", None)
            if crash is not None:
                crash.message = prefix + crash.message
            elif isinstance(report.longrepr, str):
                report.longrepr = prefix + report.longrepr
            report.sections.append(("ranks", "\n".join(self._states(rank))))
        elif isinstance(report.longrepr, tuple):
            path, line, reason = report.longrepr
            report.longrepr = path, line, reason.replace("Skipped: ", f"Skipped: {prefix}", 1)
        return report

    def _states(self, first: Rank | None = None) -> Iterator[str]:
        for rank in self._ranks.all:
            yield f"[rank {rank.number}] {'failed first' if rank is first else self._state(rank)}"

    def _state(self, rank: Rank) -> str:
        worst = max((report for sender, report in self._received if sender is rank), key=_weight, default=None)
        if worst is not None and not worst.passed:
            if _LOST.search(worst.longreprtext):
                return "lost the connection to a rank that was gone"
            return "failed too" if worst.failed else str(worst.outcome)
        if rank.stack:
            return f"stands at {_place(rank.stack, self._item)}"
        return "passed" if rank.is_done else _death(rank.exit_code or 0)


def _weight(report: pytest.TestReport) -> int:
    """Return how bad an outcome is: the worst of all ranks is that of the test."""
    if hasattr(report, "wasxfail") and report.skipped:
        return 3  # a test that is expected to fail fails where any rank does
    if report.failed:
        return 2 if str(report.longrepr).startswith("[XPASS(strict)]") else 4
    return int(report.skipped)


def _death(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"died with exit code {code}"


def _own_frames(stack: str) -> str:
    """Return a text without the frames of pytest and multiprocessing, which are the same in every test."""
    return "".join(line for line in stack.splitlines(keepends=True) if not _FOREIGN.match(line))


def _place(stack: str, item: pytest.Item) -> str:
    """Return the innermost line of a stack that is the project's own, else the innermost."""
    frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', stack, re.MULTILINE)
    if not frames:
        return "a place that it could not tell"
    root = item.config.rootpath
    own = (f for f in frames if Path(f[0]).is_relative_to(root) and "site-packages" not in f[0])
    path, line, function = next(own, frames[0])
    source = linecache.getline(path, int(line)).strip() or "(no source)"
    return f"{os.path.relpath(path, item.config.invocation_params.dir)}:{line} in {function}: {source}"
