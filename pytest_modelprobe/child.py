"""Processes that run pytest with the options of this run: the ranks of a test, and those that plant faults.

A rank needs a process of its own, and a fault may end or hang the process that it is planted in. A child runs the same
tests with the same plugins, but it must print nothing, write nothing and leave nothing running.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import pytest

from ._pytest import explain_without_terminal, picklable

# A child writes no report and stops nowhere; the process that starts it does.
_OWN_OPTIONS: dict[str, Any] = {
    "capture": "fd",
    "cov_source": None,
    "deselect": None,
    "dist": "no",
    "failedfirst": False,
    "keyword": "",
    "lf": False,
    "log_file": None,
    "loadgroup": False,
    "looponfail": False,
    "markexpr": "",
    "maxfail": 0,
    "maxprocesses": None,
    "modelprobe_base": None,
    "modelprobe_base_python": None,
    "newfirst": False,
    "numprocesses": None,
    "plugins": [],
    "reruns": None,
    "stepwise": False,
    "trace": False,
    "tx": [],
    "usepdb": False,
    "xmlpath": None,
}


# --- in the process that starts it ------------------------------------------------------------------------------------


def options_of(config: pytest.Config, **own: Any) -> dict[str, Any]:
    """Return the options of a child: those of this run, except for those given as ``own``."""
    options = picklable(vars(config.option))
    own = {name: value for name, value in {**_OWN_OPTIONS, **own}.items() if name in options}
    # In a child this package is loaded before pytest can rewrite it; a child has nothing of it to rewrite.
    own["pythonwarnings"] = [*(options.get("pythonwarnings") or ()), "ignore:Module already imported so cannot be"]
    return {**options, **own}


def plugins_of(config: pytest.Config) -> tuple[str, ...]:
    """Return the values of ``-p``, the last one for each plugin. A child would not find one that the first forbids."""
    return tuple({name.removeprefix("no:"): name for name in getattr(config.option, "plugins", ())}.values())


def start(
    main: Callable[..., None], told: object, preloaded: Iterable[str]
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """Start a child that calls ``main(told, connection)``, and return it with the other end of the connection.

    It comes from a fork server, where there is one, which imports the preloaded modules once.
    """
    context: Any = multiprocessing.get_context("spawn")
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preloaded))
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(told, theirs), daemon=False)  # it may have children of its own
    process.start()
    theirs.close()
    return process, ours


def end(process: multiprocessing.process.BaseProcess) -> None:
    """End a child and whatever it started, also if the child has ended by itself."""
    if hasattr(os, "killpg") and process.pid is not None:  # it was started
        for number, seconds in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            process.join(seconds)
            if not process.is_alive():
                break
    process.kill()  # it may not yet have a group of its own
    process.join()


# --- in the child -----------------------------------------------------------------------------------------------------


def begin(log: os.PathLike[str], environment: Mapping[str, str]) -> None:
    """Prepare this process: it ends with its parent, and what pytest does not capture is written to a file."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # whatever it starts can be ended with it, and Ctrl-C is for the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)  # with whatever it started
        os._exit(1)


def configured(options: Mapping[str, Any], plugins: Iterable[str], arguments: Iterable[str]) -> pytest.Config:
    """Return the configuration of a child."""
    given = [*(f"-p{name}" for name in (*plugins, "no:terminal")), *arguments]
    # An option of the terminal, which pytest 8 asks for where a file cannot be imported.
    config = pytest.Config.fromdictargs({"verbose": 0, **options}, given)
    explain_without_terminal(config)
    return config


def run_as_worker(config: pytest.Config, worker: Mapping[str, Any]) -> int:
    """Run pytest. Plugins take it for a worker of xdist, so they leave it to another process to print and to write."""
    config.pluginmanager.register(_Worker(worker), "modelprobe-child")
    return int(config.hook.pytest_cmdline_main(config=config))


class _Worker:
    def __init__(self, worker: Mapping[str, Any]) -> None:
        self._worker = worker

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Tell the other plugins. It is done last, because some ask xdist for more while they are configured."""
        config.workerinput = {"testrunuid": "", **self._worker}  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
