"""The process in which faults are planted. It takes one after another, and any of them may crash or hang it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from pytest_modelprobe import child

from .planting import Observer, without_warning_of_hooks
from .runner import MutantRunner, key_of


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
