"""The command `modelprobe doctor`: versions, devices and what is switched off, as a bug report needs them.

It is run where something is broken, so it works without torch or pytest, and an error becomes a line of the report.
Reports are posted in public: no value of an environment variable is printed, paths are relative to the project, and
the home directory is ``~``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pkgutil
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

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

_CI_VARIABLES = ("CI", "GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "CIRCLECI", "JENKINS_URL", "TF_BUILD")
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
    project = _project()
    addopts = project.pop("addopts", "")
    found: dict[str, Section | list[str]] = {
        "versions": _versions(),
        "devices": _devices(),
        "pytest plugins": {name: version for name in PLUGINS if (version := _version(name)) != _NOT_INSTALLED},
        "project": project,
        "switched off": list(_switched_off(addopts)),
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


def _line(error: object) -> str:
    first = str(error).strip().partition("\n")[0][:300]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


# --- versions, devices, project ---------------------------------------------------------------------------------------


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

    def use() -> str:
        import torch

        torch.ones(1)
        return ""

    error = _attempt(use).partition(";")[0]
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
    return f"{', '.join(names)} ({build}, cuDNN {torch.backends.cudnn.version()})"


def _mps() -> str:
    import torch

    return "available" if torch.backends.mps.is_available() else "not available"


def _project() -> Section:
    """Return what is about this plugin in the configuration that pytest finds, and its `addopts`."""
    settings: dict[str, Any] = {}

    def name() -> str:
        from pytest_modelprobe._pytest import configuration

        file, found = configuration(Path.cwd())
        settings.update(found)
        return file or "none found"

    file = _attempt(name)
    set_here = [name for name in _CI_VARIABLES if os.environ.get(name)]
    return {
        "pytest configuration": file,
        **{key: f"{value}" for key, value in settings.items() if key.startswith("modelprobe_") or key == "addopts"},
        "CI": f"detected: {listed(set_here, len(set_here))}" if set_here else "not detected",
        "before an upgrade": "pytest --modelprobe-base-python=PATH, the interpreter of another environment",
    }


# --- what is switched off ---------------------------------------------------------------------------------------------


def _switched_off(addopts: str) -> Iterator[str]:
    problem = _torch_problem()
    if problem:
        yield f"running models: {problem}"
    yield from _guarded(_unmet_requirements())
    yield from _guarded(_reasons_without_plugin(addopts))
    if not problem:
        missing = [name for name, why in (("cuda", _cuda), ("mps", _mps)) if _attempt(why).startswith("not available")]
        if missing:
            yield f"devices {' and '.join(missing)}: not available here; tests that ask for them are skipped"
        yield from _guarded(_missing_of_torch(), f"running models: {PACKAGE} does not work with this torch")
        yield from _guarded(_compiled(), "checks.compile_parity: torch.compile does not work here")
    if os.environ.get("CI"):
        yield "--snapshot-update of model snapshots: CI is set; --modelprobe-allow-update-in-ci permits it"
    if shutil.which("git") is None:
        yield "modelprobe check, declare and REF:PATH: git is not on PATH"


def _guarded(lines: Iterable[str], broken: str = "unknown") -> Iterator[str]:
    """Yield lines. If looking for them raises, yield what is ``broken`` with the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: list[str] = []
        try:
            found.extend(lines)
        except Exception as error:  # noqa: BLE001 - as in `_attempt`
            found.append(f"{broken}: {_line(error)}")
    yield from found


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


def _reasons_without_plugin(addopts: str) -> Iterator[str]:
    """Yield why pytest does not load the plugin."""
    if not metadata.entry_points(group="pytest11", name="modelprobe"):
        yield f"the plugin: no entry point is installed; install {PACKAGE} where pytest runs"
    if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        yield "the plugin: PYTEST_DISABLE_PLUGIN_AUTOLOAD is set; -p pytest_modelprobe.plugin loads it"
    for where, text in (("addopts", addopts), ("PYTEST_ADDOPTS", os.environ.get("PYTEST_ADDOPTS", ""))):
        if "no:modelprobe" in text:
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


def _compiled() -> Iterator[str]:
    import torch

    # Without a model it returns a decorator, after it has asked whether this version of Python is supported.
    torch.compile(backend="aot_eager")
    yield from ()
