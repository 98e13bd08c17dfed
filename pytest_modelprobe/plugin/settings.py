"""The settings of a run: options of the command line and of the ini file.

They are checked before the first test runs, because a run that cannot write its report should not take an hour to say
so. An option of the command line wins over the ini file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import revisions
from .devices import INVALID, available, is_device

if TYPE_CHECKING:
    from pytest_modelprobe.probe import ModelProbe


@dataclasses.dataclass
class Settings:
    """The settings of the probe, and what the plugin keeps during a run."""

    devices: list[str]
    devices_from: str | None
    """``command line`` or ``ini``; ``None`` if it is the default."""
    seed: int
    verbose: bool
    json: Path | None = None
    """Where the results of the run are written."""
    html: Path | None = None
    """Where the report of the run is written."""
    unreported: bool = False
    """Whether tests run again now, with faults planted in their models. Nothing of that may reach a report."""
    seeded_fixtures: set[Any] = dataclasses.field(default_factory=set)
    """Fixtures on which tests with a probe depend, as `fixtures_of` returns them."""
    shared_probes: list[ModelProbe] = dataclasses.field(default_factory=list)
    """Probes that outlive a test. Each of their runs is reported with the test in which it was recorded."""

    has_records: bool = False
    """Whether a test has recorded something."""

    @property
    def reports(self) -> bool:
        """Whether the results of the run are asked for."""
        return self.json is not None or self.html is not None

    def options_of_probe(self, device: Any) -> dict[str, bool]:
        """Return the options of a probe on a device."""
        # A model on another device is an error if the device was given by option and is not the CPU.
        required = self.devices_from == "command line" and device.type != "cpu"
        return {"device_required": required, "histograms": self.reports}


SETTINGS = pytest.StashKey[Settings]()


def add_options(parser: pytest.Parser, group: pytest.OptionGroup) -> None:
    """Add the options of the probe and their ini settings."""
    group.addoption(
        "--modelprobe-device",
        action="append",
        metavar="DEVICE",
        help="device of the probe: cpu, cuda, cuda:N, mps, xpu or auto; may be repeated: each test runs on each",
    )
    group.addoption(
        "--modelprobe-strict",
        action="store_true",
        default=None,
        help="hints, which also healthy models may give, fail tests",
    )
    group.addoption("--modelprobe-seed", type=int, metavar="N", help="seed of all random numbers (0)")
    group.addoption(
        "--modelprobe-verbose", action="store_true", default=None, help="show the layers that each test recorded"
    )
    group.addoption("--modelprobe-json", metavar="PATH", help="write what every probe recorded and compared as JSON")
    group.addoption("--modelprobe-html", metavar="PATH", help="write a report, a page of its own")
    revisions.add_options(group)
    parser.addini("modelprobe_devices", "devices of the probe; those that are missing skip", type="args", default=[])
    parser.addini("modelprobe_seed", "seed of all random numbers", default="0")
    parser.addini("modelprobe_strict", "hints fail tests", type="bool", default=False)
    parser.addini("modelprobe_verbose", "show the layers that each test recorded", type="bool", default=False)


def add_filter(config: pytest.Config) -> None:
    """Make hints errors if that was asked for, and else warnings, whatever the ini file says of other warnings."""
    option = config.getoption("--modelprobe-strict")
    strict = config.getini("modelprobe_strict") if option is None else option
    config.addinivalue_line("filterwarnings", f"{'error' if strict else 'always'}::pytest_modelprobe.HintWarning")


def settings_of(config: pytest.Config) -> Settings:
    """Return the settings; raise `pytest.UsageError` for an invalid value, or a missing device of the command line."""
    asked = config.getoption("--modelprobe-device")
    devices = asked or config.getini("modelprobe_devices")
    for name in devices:
        if not is_device(name):
            source = f"--modelprobe-device={name}" if asked else f"modelprobe_devices in the ini file has {name!r}"
            raise pytest.UsageError(f"{source}: {INVALID}")
    json, html = _path(config, "--modelprobe-json"), _path(config, "--modelprobe-html")
    if json is not None and html is not None and json.resolve() == html.resolve():
        raise pytest.UsageError(f"--modelprobe-json and --modelprobe-html both write {html}: name two files")
    verbose = config.getoption("--modelprobe-verbose")
    return Settings(
        devices=available(asked) if asked else list(dict.fromkeys(devices)) or ["cpu"],
        devices_from="command line" if asked else "ini" if devices else None,
        seed=_seed(config),
        verbose=config.getini("modelprobe_verbose") if verbose is None else verbose,
        json=json,
        html=html,
    )


def _path(config: pytest.Config, option: str) -> Path | None:
    """Return the file of a report; raise `pytest.UsageError` if it cannot be written."""
    given = config.getoption(option)
    if given is None:
        return None
    path = Path(config.invocation_params.dir, given)
    why = None if hasattr(config, "workerinput") else _why_unwritable(path)
    if why is not None:
        raise pytest.UsageError(f"{option}={given}: {why}")
    return path


def _why_unwritable(path: Path) -> str | None:
    """Return why no file can be written at a path; ``None`` if one can. Missing folders are made later."""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # From Python 3.14 on is_dir() and exists() are False of a name that is too long.
        if path.is_dir():
            return "it is a directory; name a file"
        folder = next(parent for parent in path.parents if parent.exists())
    except OSError as error:
        return str(error)
    if not folder.is_dir():
        return f"{folder} is no directory"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"


def _seed(config: pytest.Config) -> int:
    option = config.getoption("--modelprobe-seed")
    if option is not None:
        return int(option)
    text = config.getini("modelprobe_seed")
    try:
        return int(text)
    except ValueError:
        raise pytest.UsageError(f"modelprobe_seed is an integer; the ini file has {text!r}") from None
