"""The line in the terminal that shows the progress of long work in a test.

Checks and isolation may run a model hundreds of times in one test, and pytest shows nothing until the test ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest

SHOWN_AFTER, REWRITTEN_EVERY = 3.0, 0.1
"""Seconds of work before a terminal shows its line, and between two changes of it."""

LOGGED_EVERY = 30.0
"""Seconds between the lines in CI, and where the output is no terminal."""


class ProgressLine:
    """Shows what takes long: in a terminal one line, which is erased at the end, and elsewhere a line now and then.

    Args:
        config: The configuration of the run.
        clock: Returns the time in seconds.
    """

    def __init__(self, config: pytest.Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._terminal: Any = config.pluginmanager.getplugin("terminalreporter")
        self._capture: Any = config.pluginmanager.getplugin("capturemanager")
        self._width = config.get_terminal_writer().fullwidth - 1
        self._rewrites = bool(self._terminal.isatty) and not os.environ.get("CI")
        self._process = os.getpid()
        self._begun: float | None = None
        self._due = 0.0
        self._is_shown = self._in_debugger = False

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

    def pytest_enter_pdb(self) -> None:
        """Leave the terminal to the debugger."""
        self._end()
        self._in_debugger = True

    def pytest_leave_pdb(self) -> None:
        """Show the line again, if the work goes on."""
        self._in_debugger = False

    def __call__(self, what: str) -> None:
        """Show what is being done, if it takes long. An empty text ends the line."""
        if self._in_debugger or os.getpid() != self._process:
            return
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
