"""Shared by all tests. The plugin's own tests run pytest within pytest."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import inspect
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from _pytest import fixtures, pytester
from _pytest.assertion import rewrite

from pytest_modelprobe import child

pytest_plugins = ["pytester"]

# After torch.compile the first backward starts threads, and a fork of a process with these has no backward.
torch.ones(1, requires_grad=True).backward()

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


def _descriptors() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


def _is_in(folder: str, path: str) -> bool:
    """Whether a path is in a folder, and not that of an installed package: an environment may stand in the folder."""
    return path.startswith(folder) and "site-packages" not in path


def _forget(folder: str) -> None:
    """Forget in a fork what was imported from a folder, and whose process this was."""
    for name, module in [*sys.modules.items()]:
        if _is_in(folder, getattr(module, "__file__", None) or ""):
            del sys.modules[name]
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, rewrite.AssertionRewritingHook)]
    sys.path[:] = [path for path in sys.path if not _is_in(folder, path)]
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "w" if n else "r", closefd=False) for n in range(3))
    warnings.resetwarnings()
    forkserver._forkserver.__init__()  # type: ignore[attr-defined, misc]


def _become(arguments: Sequence[str], environment: dict[str, str], here: str) -> None:
    """Do in a fork what a Python with these arguments does, without what was imported from a folder."""
    code: Any = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        _forget(here)
        first = str(Path.cwd() if arguments[0].startswith("-") else Path(arguments[0]).parent)
        imports = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [first, *imports, *sys.path]
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(arguments[1], {"__name__": "__main__"})
        elif arguments[0] == "-m":
            sys.argv = [*arguments[1:]]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*arguments]
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        if code == 1:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork what `subprocess` starts with this Python: a new one would import torch, 2 seconds of work each time."""
    popen, of_parent = subprocess.Popen, list[Any]()

    def start(command: Any, *args: Any, **how: Any) -> Any:
        words = [str(word) for word in command if word != "-u"]
        if words[0] == sys.executable and (words[1] in ("-c", "-m") or not words[1].startswith("-")):
            before, here = _descriptors(), str(Path.cwd())

            def instead() -> None:
                for descriptor in _descriptors() - before:  # the last tells the parent that the process runs
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
                _become(words[1:], dict(how.get("env") or os.environ), here)

            how["preexec_fn"] = instead
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks of a process with threads
            return popen(command, *args, **how)

    def start_child(main: Any, told: object, preloaded: object) -> Any:
        context, here = multiprocessing.get_context("fork"), str(Path.cwd())
        ours, theirs = context.Pipe()
        of_parent.append(ours)

        def run(*told: object) -> None:
            for connection in of_parent:
                connection.close()  # else it is never seen to be closed
            _forget(here)
            main(*told)

        process = context.Process(target=run, args=(told, theirs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks of a process with threads
            process.start()
        theirs.close()
        return process, ours

    # A fork of a process that uses CUDA cannot use it.
    if sys.platform == "linux" and not torch.cuda.is_available():
        monkeypatch.setattr(subprocess, "Popen", start)
        monkeypatch.setattr(child, "start", start_child)


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
    """Leave pytest-randomly the order of the tests, and no more, and let tests import each other."""
    config.option.randomly_reset_seed = False
    # Of pytest 8.2 the folder is no package.
    vars(sys.modules[__package__]).setdefault("__path__", [str(Path(__file__).parent)])


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
