"""Shared by all tests. The plugin's own tests run pytest within pytest."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import inspect
import os
import random
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from _pytest import fixtures, pytester

if not torch.cuda.is_available():
    # Without a GPU the kernels in Triton run in its interpreter, which has to be asked for before Triton is imported,
    # as torch._dynamo does.
    os.environ["TRITON_INTERPRET"] = "1"

import torch._dynamo

from pytest_modelprobe.revisions import side

pytest_plugins = ["pytester"]

# Where a shell started this in the background, Ctrl-C is ignored, and tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _Modules(pytester.SysModulesSnapshot):
    """Forgets, after a run of pytest inside a test, the modules of its folder alone.

    Pytester forgets every module that was first imported in it. Torch cannot be imported twice, and of others there
    would be two: classes that are not equal, caches that are not shared.
    """

    def __init__(self, preserve: Callable[[str], bool] | None = None) -> None:
        super().__init__(preserve)
        self._before = dict(sys.modules)

    def restore(self) -> None:
        here = str(Path.cwd())
        after = dict(sys.modules)
        for name in after.keys() - self._before.keys():
            top = after.get(name.partition(".")[0])
            files = [getattr(top, "__file__", None) or "", *getattr(top, "__path__", ())]
            if any(file.startswith(here) for file in files):
                del sys.modules[name]
        sys.modules.update(self._before)


pytester.SysModulesSnapshot = _Modules  # type: ignore[misc]


# --- what every run of pytest inside a test would read again ------------------------------------------------------


class _Installed:
    """An installed package, each of whose files is read once."""

    def __init__(self, package: importlib.metadata.Distribution) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        self.__dict__[name] = value = getattr(self._package, name)
        return value


@functools.cache
def _installed_in(folder: str) -> tuple[Any, ...]:
    return tuple(map(_Installed, _distributions(path=[folder])))


def _all_installed(**context: Any) -> Iterator[Any]:
    for folder in [] if context else sys.path:
        yield from _installed_in(folder) if "site-packages" in folder else _distributions(path=[folder])
    if context:
        yield from _distributions(**context)


_distributions = importlib.metadata.distributions
importlib.metadata.distributions = _all_installed


@functools.cache
def _has_fixtures(plugin: object) -> bool:
    marks = ("_fixture_function_marker", "_pytestfixturefunction")
    return any(hasattr(getattr(plugin, name, None), mark) for name in dir(plugin) for mark in marks)


def _parse_fixtures(self: fixtures.FixtureManager, *args: Any, **options: Any) -> None:
    holder = options.get("holder", args[0] if args else None)
    plugin = holder if inspect.ismodule(holder) else type(holder)
    module = plugin.__name__ if plugin is holder else plugin.__module__
    is_known = module.startswith(("_pytest.", "pytest_modelprobe.")) and not isinstance(holder, pytest.Collector)
    if not is_known or _has_fixtures(plugin):
        _parsefactories(self, *args, **options)


_parsefactories = fixtures.FixtureManager.parsefactories
fixtures.FixtureManager.parsefactories = _parse_fixtures  # type: ignore[method-assign]


OF_THE_OUTER_RUN = (
    "BUILD_NUMBER",
    "CI",
    "COLUMNS",
    "GITHUB_",
    "GITLAB_",
    "PYTEST_ADDOPTS",
    "PYTEST_XDIST_",
    "TRITON_INTERPRET",
)


@pytest.fixture(autouse=True)
def _run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of pytest inside a test is not in CI and no worker's, though the tests themselves may be both."""
    for name in [name for name in os.environ if name.startswith(OF_THE_OUTER_RUN)]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test see the bytecode of what a file held before: it goes by the second and the size of the file."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


@pytest.fixture
def _plugin_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load this plugin alone in a run of pytest inside a test, not every plugin that is installed: it is quicker."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_modelprobe.plugin")


@pytest.fixture
def _installed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load every installed plugin in a run of pytest inside a test, as a user's run does."""
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", raising=False)
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)


# --- processes that import torch no second time ---------------------------------------------------------------------


class _Forked:
    """Stands in for the `subprocess.Popen` of another side: a copy of this process, without the user's modules."""

    def __init__(self, job: str, answer: str, *, cwd: Path, env: dict[str, str], stdout: IO[bytes]) -> None:
        theirs, ours = os.pipe()
        self.stdin = os.fdopen(ours, "wb")
        self.pid = os.fork()
        self.returncode: int | None = None
        if not self.pid:
            self._run(job, answer, theirs, cwd, env, stdout)
        os.close(theirs)

    def _run(self, job: str, answer: str, stdin: int, cwd: Path, env: dict[str, str], stdout: IO[bytes]) -> None:
        code = 1
        try:
            os.setsid()
            os.close(self.stdin.fileno())
            for number, descriptor in enumerate((stdin, stdout.fileno(), stdout.fileno())):
                os.dup2(descriptor, number)
            here = str(Path.cwd())
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(env)
            for name, module in [*sys.modules.items()]:
                if (getattr(module, "__file__", None) or "").startswith(here):
                    del sys.modules[name]
            imports = env["PYTHONPATH"].split(os.pathsep)
            sys.path[:] = [str(cwd), *imports, *(path for path in sys.path if not path.startswith(here))]
            side.main(job, answer)
            code = 0
        finally:
            if code:
                os.write(2, traceback.format_exc().encode())
            os._exit(code)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


@pytest.fixture
def _forked_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of another side: to start one anew imports torch, 2 seconds each time."""
    popen = subprocess.Popen

    def start(command: Sequence[str], **how: Any) -> Any:
        if command[:3] != [sys.executable, "-m", "pytest_modelprobe.revisions"]:
            return popen(command, **how)
        return _Forked(*command[3:], **{name: how[name] for name in ("cwd", "env", "stdout")})

    monkeypatch.setattr(subprocess, "Popen", start)


@pytest.fixture
def nothing_waits() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which torch raises if something waits for a CUDA device."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context


@pytest.fixture
def _fsdp2() -> None:
    """Skip a test of ``fully_shard`` in a torch where it does not run on the CPU."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("fully_shard needs Stream.record_event, which this torch lacks on the CPU")


def pytest_configure(config: pytest.Config) -> None:
    """Leave pytest-randomly the order of the tests, and no more."""
    config.option.randomly_reset_seed = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the rest of long matrices to `tox -e long`."""
    if "MODELPROBE_LONG" not in os.environ:
        left = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left)


GLOBAL_HOOKS = [
    table
    for name, table in vars(torch.nn.modules.module).items()
    if name.startswith(("_global_forward_", "_global_backward_"))
]


def pytest_collection_finish() -> None:
    """Exempt from garbage collection what lives as long as the process: modules, above all those of torch."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter collect it at its end: extensions print each object that is left."""
    gc.unfreeze()


def pytest_runtest_setup() -> None:
    """Set a test up with the same random numbers, in a torch that compiles, whatever ran before it."""
    assert not torch._C._len_torch_function_stack(), "a test that ran before this one left a function mode on"
    assert not torch._C._len_torch_dispatch_stack(), "a test that ran before this one left a dispatch mode on"
    assert not any(GLOBAL_HOOKS), "a test that ran before this one left a global hook"
    _seed(0)
    assert _stance() == "default", "a test that ran before this one left torch.compile switched off"


def pytest_runtest_call() -> None:
    """Run a test with the same random numbers, whatever it was the first to set up."""
    _seed(1)


def _stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the generator that libraries draw from
    # Not torch.manual_seed: without a device it formats the stack for each kind of device, 1 ms for each test.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
