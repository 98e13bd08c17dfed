"""Start the ranks of one test from a fork server, receive what they send, and leave no process behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from pytest_modelprobe import child
from pytest_modelprobe.exceptions import UsageError

from .process import Assignment, main

GRACE = 3.0
"""Seconds that the other ranks have to come to an end by themselves, after one has failed."""

_IMPORTS = 300.0
"""Seconds that the ranks have to import what they need, before the time of the test begins."""

_PRELOADED = ["torch.distributed", "pytest", "pytest_modelprobe.extras.ranks.process"]  # torch is imported once


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
