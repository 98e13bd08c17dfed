"""What runs in a rank: one test, with its fixtures, in a process group of all ranks."""

from __future__ import annotations

import datetime
import faulthandler
import os
import signal
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from pytest_modelprobe import child


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
