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
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pytest_modelprobe.text import count, printable

Section = dict[str, str]

PACKAGE = "pytest-modelprobe"


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


def report() -> dict[str, Section]:
    """Return what is installed, available and switched off: section → name → text.

    What cannot be determined is described by its error: nothing is raised.
    """
    virtual = "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    of_torch = {} if _torch_problem() else {"cpu": _cpu, "cuda": _cuda, "mps": _mps}
    devices = {**of_torch, "kernel": _kernel}
    project = _project()
    addopts = project.get("addopts", "")
    found = {
        "versions": {
            PACKAGE: _version(PACKAGE),
            "python": f"{platform.python_version()} ({platform.python_implementation()}, {virtual})",
            "os": _attempt(platform.platform),
            **{name: _version(name) for name in ("torch", "numpy", "pytest", "syrupy")},
            "git": _attempt(_git),
        },
        "devices": {name: _attempt(read) for name, read in devices.items()},
        "pytest plugins": {"pytest11": _attempt(_plugins)},
        "project": project,
        "switched off": dict(_switched_off(addopts)),
    }
    return {title: {name: _plain(text) for name, text in section.items()} for title, section in found.items()}


def as_text(found: dict[str, Section]) -> str:
    """Return a report as aligned text.

    >>> print(as_text({"versions": {"torch": "2.13.0", "os": "Linux"}, "switched off": {}}))
    versions
      torch  2.13.0
      os     Linux
    <BLANKLINE>
    switched off
      nothing
    """
    parts = []
    for title, section in found.items():
        width = max(map(len, section), default=0)
        lines = [f"{name:<{width}}  {text}" for name, text in section.items()] or ["nothing"]
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


def _version(name: str) -> str:
    found = _attempt(lambda: metadata.version(name))
    return "not installed" if found.startswith("PackageNotFoundError") else found


def _git() -> str:
    done = subprocess.run(["git", "--version"], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.removeprefix("git version ")


def _plugins() -> str:
    found = {f"{one.dist.name} {one.dist.version}" for one in metadata.entry_points(group="pytest11") if one.dist}
    return ", ".join(sorted(found, key=str.lower))


@functools.cache
def _torch_problem() -> str:
    """Return why torch cannot be used; empty if it can."""

    def use() -> str:
        import torch

        torch.ones(1)
        return ""

    return _attempt(use).partition(";")[0]


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
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return f"{names} ({build}, cuDNN {torch.backends.cudnn.version()})"


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
    own = {key: f"{value}" for key, value in settings.items() if key.startswith("modelprobe_") or key == "addopts"}
    return {"pytest configuration": file, **own}


def _switched_off(addopts: str) -> Iterator[tuple[str, str]]:
    if problem := _torch_problem():
        yield "running models", f"torch cannot be imported: {problem}"
    elif missing := _attempt(_missing_of_torch):
        yield "private names of torch", missing
    if reasons := _attempt(lambda: "; ".join(_reasons_without_plugin(addopts))):
        yield "the plugin", reasons
    if os.environ.get("CI"):
        yield "--snapshot-update of model snapshots", "CI is set; --modelprobe-allow-update-in-ci permits it"
    if shutil.which("git") is None:
        yield "modelprobe check, declare and REF:PATH", "git is not on PATH"


def _reasons_without_plugin(addopts: str) -> Iterator[str]:
    """Yield why pytest does not load the plugin."""
    if not metadata.entry_points(group="pytest11", name="modelprobe"):
        yield f"no entry point is installed; install {PACKAGE} where pytest runs"
    if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        yield "PYTEST_DISABLE_PLUGIN_AUTOLOAD is set; -p pytest_modelprobe.plugin loads it"
    for where, text in (("addopts", addopts), ("PYTEST_ADDOPTS", os.environ.get("PYTEST_ADDOPTS", ""))):
        if "no:modelprobe" in text:
            yield f"{where} has -p no:modelprobe"


def _missing_of_torch() -> str:
    """Return what cannot be done, or is done in another way, because this torch lacks a private name."""
    from pytest_modelprobe import _torch

    refused = dict(value.args for value in vars(_torch).values() if isinstance(value, functools.partial))
    missing = []
    for path in _torch.PATHS:
        try:
            pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            missing.append(f"no {path}: {refused.get(path, 'another way is used where there is one')}")
    return "; ".join(missing)
