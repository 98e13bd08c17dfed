"""What runs in a rank: one test, with its fixtures, in a process group of all ranks."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from pytest_modelprobe import child
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
