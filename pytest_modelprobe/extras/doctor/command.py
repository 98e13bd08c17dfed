"""The command `modelprobe doctor`: versions, devices and what is switched off, as a bug report needs them.

It is run where something is broken, so it works without torch or pytest, and an error becomes a line of the report.
Reports are posted in public: no value of an environment variable is printed, paths are relative to the project, and
the home directory is ``~``.
"""

from __future__ import annotations

import argparse
import configparser
import functools
import json
import os
import pkgutil
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pytest_modelprobe.files import ARCH, DIRECTORY
from pytest_modelprobe.text import count, listed, printable

Section = dict[str, str]

PACKAGE = "pytest-modelprobe"
PLUGINS = (
    "flaky",
    "hypothesis",
    "inline-snapshot",
    "pytest-cov",
    "pytest-forked",
    "pytest-random-order",
    "pytest-randomly",
    "pytest-repeat",
    "pytest-rerunfailures",
    "pytest-run-parallel",
    "pytest-snapshot",
    "pytest-timeout",
    "pytest-torch",
    "pytest-xdist",
)
"""Plugins that reorder, repeat, reseed or distribute tests, or have snapshots of their own."""

_INI_FILES = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
_CI_VARIABLES = ("CI", "GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "CIRCLECI", "JENKINS_URL", "TF_BUILD")
_MOST_FOLDERS = 5_000  # so that the report comes soon
_NOT_INSTALLED = "not installed"


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of `modelprobe`."""
    doctor = commands.add_parser("doctor", help="print versions, devices and what is switched off, for a bug report")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")
    doctor.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Print the report, as text or with ``--json`` as JSON; return the exit code, 0."""
    found = report()
    print(json.dumps(found, indent=1) if options.json else as_text(found))
    return 0


def report() -> dict[str, Section | list[str]]:
    """Return what is installed, available and switched off, by section.

    Each section maps a name to a text; ``switched off`` is a list of texts. What cannot be determined is described by
    its error: nothing is raised.
    """
    folder, ini, settings = _project()
    found: dict[str, Section | list[str]] = {
        "versions": _versions(),
        "devices": _devices(),
        "pytest plugins": {name: version for name in PLUGINS if (version := _version(name)) != _NOT_INSTALLED},
        "project": _snapshots_and_ini(folder, ini, settings),
        "switched off": list(_switched_off(settings)),
    }
    return {
        title: [_plain(line) for line in section]
        if isinstance(section, list)
        else {name: _plain(text) for name, text in section.items()}
        for title, section in found.items()
    }


def as_text(found: dict[str, Section | list[str]]) -> str:
    """Return a report as aligned text.

    >>> print(as_text({"versions": {"torch": "2.13.0", "os": "Linux"}, "switched off": []}))
    versions
      torch  2.13.0
      os     Linux
    <BLANKLINE>
    switched off
      nothing
    """
    parts = []
    for title, section in found.items():
        if isinstance(section, list):
            lines = section or ["nothing"]
        else:
            width = max(map(len, section), default=0)
            lines = [f"{name:<{width}}  {text}" for name, text in section.items()] or ["none"]
        parts.append("\n".join([title, *(f"  {line}" for line in lines)]))
    return "\n\n".join(parts)


def _plain(text: str) -> str:
    """Return a text on one line, without the places where the user's files are."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none
    for path, short in ((sys.prefix, "<environment>"), (str(Path.cwd()), "."), (home, "~")):
        if len(path) > 1:
            text = text.replace(path, short)
    return printable(" ".join(text.split()))


def _attempt(read: Callable[[], str]) -> str:
    """Return what a function returns, or its error in a line, then the warnings that it gave."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            text = read()
        except Exception as error:  # noqa: BLE001 - a broken installation raises anything, and has to be reported
            text = _line(error)
    return "; ".join([text, *dict.fromkeys(_line(warning.message) for warning in given)])


def _error_of(action: Callable[[], object]) -> str:
    """Return the error of a function in a line; empty if it raises nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            action()
        except Exception as error:  # noqa: BLE001 - as in `_attempt`
            return _line(error)
    return ""


def _line(error: object) -> str:
    first = str(error).strip().partition("\n")[0][:300]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


# --- versions and devices ---------------------------------------------------------------------------------------------


def _versions() -> Section:
    virtual = "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    return {
        PACKAGE: _version(PACKAGE),
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {virtual})",
        "os": _attempt(platform.platform),
        **{name: _version(name) for name in ("torch", "numpy", "pytest", "syrupy")},
        "git": _attempt(_git),
    }


def _version(name: str) -> str:
    found = _attempt(lambda: metadata.version(name) or "unknown")
    return _NOT_INSTALLED if found.startswith("PackageNotFoundError") else found


def _git() -> str:
    if shutil.which("git") is None:
        return _NOT_INSTALLED
    done = subprocess.run(["git", "--version"], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.removeprefix("git version ")


@functools.cache
def _torch_problem() -> str:
    """Return why torch cannot be used; empty if it can."""

    def use() -> None:
        import torch

        torch.ones(1)

    error = _error_of(use)
    if error.startswith("ModuleNotFoundError: No module named 'torch'"):
        return "torch is not installed"
    return f"torch cannot be imported: {error}" if error else ""


def _devices() -> Section:
    if _torch_problem():
        found = {"cpu": platform.machine(), "cuda": "unknown without torch", "mps": "unknown without torch"}
    else:
        found = {"cpu": _attempt(_cpu), "cuda": _attempt(_cuda), "mps": _attempt(_mps)}
    return {**found, "kernel": _attempt(_kernel)}


def _cpu() -> str:
    import torch

    return f"{platform.machine()}, {count(torch.get_num_threads(), 'thread')}"


def _kernel() -> str:
    from pytest_modelprobe import kernel

    return kernel.description()


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        hidden = "; CUDA_VISIBLE_DEVICES is set" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        built = torch.version.cuda or torch.version.hip
        return f"not available: {'torch finds no device' if built else 'this torch is built without CUDA'}{hidden}"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    devices = f"{', '.join(names)} ({build}, cuDNN {torch.backends.cudnn.version()})"
    return f"{devices}, statistics by {_attempt(_cuda_statistics)}"


def _cuda_statistics() -> str:
    from pytest_modelprobe.statistics import cuda

    return cuda.description()


def _mps() -> str:
    import torch

    return "available" if torch.backends.mps.is_available() else "not available"


# --- the project ------------------------------------------------------------------------------------------------------


def _project() -> tuple[Path, Path | None, dict[str, Any]]:
    """Return the folder of pytest's configuration, its file and settings; the current folder if there is none."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        for path in (folder / name for name in _INI_FILES):
            settings = _settings(path) if path.is_file() else None
            if settings is not None:
                return folder, path, settings
    return here, None, {}


def _settings(path: Path) -> dict[str, Any] | None:
    """Return the settings of pytest in a file; ``None`` if it has none, or cannot be read."""
    own = path.stem.endswith("pytest")
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".toml":
            data = tomllib.loads(text)
            pytest = data.get("pytest", {}) if own else data.get("tool", {}).get("pytest")
            return None if pytest is None else pytest.get("ini_options", pytest)
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(text)
        section = "tool:pytest" if path.suffix == ".cfg" else "pytest"
        return dict(parser[section]) if section in parser else {} if own else None
    except (OSError, ValueError, AttributeError, configparser.Error):
        return None


def _snapshots_and_ini(folder: Path, ini: Path | None, settings: dict[str, Any]) -> Section:
    own = {name: f"{value}" for name, value in settings.items() if name.startswith("modelprobe_")}
    set_here = [name for name in _CI_VARIABLES if os.environ.get(name)]
    return {
        "pytest configuration": ini.name if ini else "none found",
        **own,
        "snapshots": _attempt(lambda: _snapshots(folder)),
        "CI": f"detected: {listed(set_here, len(set_here))}" if set_here else "not detected",
        "before an upgrade": "pytest --modelprobe-base-python=PATH, the interpreter of another environment",
    }


def _snapshots(folder: Path) -> str:
    found: dict[str, int] = {}
    for seen, (place, folders, files) in enumerate(os.walk(folder)):
        if seen == _MOST_FOLDERS:
            return f"{_in_words(found)}; looked at {_MOST_FOLDERS:,} folders, there are more"
        if "pyvenv.cfg" in files:
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".") and name != "node_modules"]
        parts = Path(place).relative_to(folder).parts
        if DIRECTORY in parts:
            top = "/".join(parts[: parts.index(DIRECTORY) + 1])
            found[top] = found.get(top, 0) + sum(name.endswith(ARCH) for name in files)
    return _in_words(found)


def _in_words(found: dict[str, int]) -> str:
    return f"{sum(found.values())} in {listed(sorted(found))}" if found else f"none (no folder {DIRECTORY})"


# --- what is switched off ---------------------------------------------------------------------------------------------


def _switched_off(settings: dict[str, Any]) -> Iterator[str]:
    problem = _torch_problem()
    if problem:
        yield f"running models: {problem}"
    yield from _guarded(_unmet_requirements())
    yield from _guarded(_reasons_without_plugin(settings))
    if not problem:
        missing = [name for name, why in (("cuda", _cuda), ("mps", _mps)) if _attempt(why).startswith("not available")]
        if missing:
            yield f"devices {' and '.join(missing)}: not available here; tests that ask for them are skipped"
        yield from _guarded(_missing_of_torch(), f"running models: {PACKAGE} does not work with this torch")
        yield from _without_compile()
    if os.environ.get("CI"):
        yield "--snapshot-update of model snapshots: CI is set; --modelprobe-allow-update-in-ci permits it"
    if shutil.which("git") is None:
        yield "modelprobe check, declare and REF:PATH: git is not on PATH"


def _guarded(lines: Iterable[str], broken: str = "unknown") -> Iterator[str]:
    """Yield lines. If looking for them raises, yield what is ``broken`` with the error."""
    found: list[str] = []
    error = _error_of(lambda: found.extend(lines))
    yield from found
    if error:
        yield f"{broken}: {error}"


def _unmet_requirements() -> Iterator[str]:
    """Yield what is installed in a version that the package does not support."""
    try:
        from packaging.requirements import Requirement

        required = [Requirement(text) for text in metadata.requires(PACKAGE) or ()]
    except (ImportError, ValueError):  # without the package's metadata, or pytest: the versions say so
        return
    for one in required:
        version = _version(one.name)
        if version == _NOT_INSTALLED:
            extra = re.search(r'extra == "(.+?)"', str(one.marker))
            if extra:
                yield f"{one.name}: not installed; pip install '{PACKAGE}[{extra[1]}]' brings it"
            elif one.name != "torch":
                yield f"{one.name}: not installed; {PACKAGE} needs {one}"
        elif not one.specifier.contains(version, prereleases=True):
            yield f"{one.name} {version}: {PACKAGE} needs {one}"


def _reasons_without_plugin(settings: dict[str, Any]) -> Iterator[str]:
    """Yield why pytest does not load the plugin."""
    if not metadata.entry_points(group="pytest11", name="modelprobe"):
        yield f"the plugin: no entry point is installed; install {PACKAGE} where pytest runs"
    if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        yield "the plugin: PYTEST_DISABLE_PLUGIN_AUTOLOAD is set; -p pytest_modelprobe.plugin loads it"
    for where, text in (("addopts", settings.get("addopts", "")), ("PYTEST_ADDOPTS", os.environ.get("PYTEST_ADDOPTS"))):
        if "no:modelprobe" in str(text):
            yield f"the plugin: {where} has -p no:modelprobe"


def _missing_of_torch() -> Iterator[str]:
    """Yield what cannot be done, or is done in another way, because this torch lacks a private name."""
    from pytest_modelprobe import _torch

    refused = dict(value.args for value in vars(_torch).values() if isinstance(value, functools.partial))
    for path in _torch.PATHS:
        try:
            pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            yield f"this torch has no {path}: {refused.get(path, 'another way is used where there is one')}"


def _without_compile() -> Iterator[str]:
    def compile_nothing() -> None:
        import torch

        # Without a model it returns a decorator, after it has asked whether this version of Python is supported.
        torch.compile(backend="aot_eager")

    error = _error_of(compile_nothing)
    if error:
        yield f"checks.compile_parity: torch.compile does not work here: {error}"
