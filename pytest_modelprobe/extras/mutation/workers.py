"""Hands mutants to processes, and notes which of them end theirs or never end.

A fault may crash the interpreter or loop forever, which no hook can catch. So faults are planted in processes of their
own, and a process that is lost is replaced.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any

from pytest_modelprobe import child

from .plan import Planned, Verdict
from .worker import Told, main

_TIMES, _MORE_SECONDS = 10, 10.0
"""A test hangs if it takes ten times as long as without the fault, and ten seconds more."""

_FIRST_SECONDS = 120.0
"""The extra time of a test that runs without a fault: in a new process it may have to import and compile first."""

_PRELOADED = ["torch", "pytest", "pytest_modelprobe.extras.mutation.worker"]


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
            raise NoWorker(f"a process that plants faults ended: {_last_line(process)}")
        if process.test and process.has_fault:
            return Verdict(outcome, process.test)
        if process.test:
            self.left_out[process.test] = why
        self._waiting.appendleft(process.given)
        return None


def _last_line(process: _Process) -> str:
    lines = process.log.read_text("utf-8", "replace").split("\n") if process.log.exists() else []
    said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return f"exit code {process.process.exitcode}, {said.strip()}"
