"""The settings of a run and of a test: options of the command line and of the ini file, devices, and the marker.

They are checked before the first test runs. An option of the command line wins over the ini file.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelprobe import extension

if TYPE_CHECKING:
    from pytest_modelprobe.probe import ModelProbe


# --- devices ----------------------------------------------------------------------------------------------------------

INVALID = "not a device of the probe; give cpu, cuda, cuda:N, mps, xpu or auto"
_KNOWN = ("cpu", "cuda", "mps", "xpu")


def is_device(name: Any) -> bool:
    """Whether ``name`` is that of a device, on any machine, or of another accelerator that torch finds on this one.

    >>> is_device("cuda:1"), is_device("gpu")
    (True, False)
    """
    found = re.fullmatch(r"([a-z]\w*)(:\d+)?", name) if isinstance(name, str) else None
    return name == "auto" or (found is not None and (found[1] in _KNOWN or found[1] == _accelerator()))


def as_list(devices: Any) -> Iterable[Any]:
    """Return one device or several as an iterable."""
    return devices if isinstance(devices, (list, tuple)) else [devices]


def available(names: Iterable[str]) -> list[str]:
    """Return the devices of ``--modelprobe-device`` without duplicates; raise `pytest.UsageError` if one is missing."""
    found = []
    for name in names:
        device, problem = resolve(name)
        if problem:
            raise pytest.UsageError(f"--modelprobe-device={name}: {problem}")
        found.append(device)
    return list(dict.fromkeys(found))


def resolve(name: str) -> tuple[str, str | None]:
    """Return the device of a name, and why it is not available, if it is not. ``auto`` is the best device there is."""
    if name == "cpu":
        return name, None
    import torch

    best = _accelerator()
    if name == "auto":
        return best or "cpu", None
    device = torch.device(name)
    if device.type == "cpu":
        return name, None
    if device.type != best:
        return name, f"torch finds no {device.type} device (torch {torch.__version__})"
    if device.index is not None and device.index >= torch.accelerator.device_count():
        return name, f"torch finds {torch.accelerator.device_count()} {best} device(s), numbered from 0"
    return name, None


def _accelerator() -> str | None:
    """Return the type of the accelerator that torch finds on this machine, or `None` if there is none."""
    import torch

    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, where there is none
        return None
    return found.type if found is not None and torch.accelerator.is_available() else None


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
    group.addoption(
        "--modelprobe-base",
        metavar="REF",
        help="after the tests, run them with this code and with that of the merge base of HEAD and REF, and compare "
        "their models",
    )
    group.addoption(
        "--modelprobe-base-python",
        metavar="PATH",
        help="the interpreter of that second run: of an environment with other versions of torch or of a library",
    )
    group.addoption(
        "--modelprobe-base-all",
        action="store_true",
        help="compare the models of all tests, also of those that use nothing that differs",
    )
    group.addoption(
        "--modelprobe-base-fail-on",
        choices=("never", "changed", "undeclared"),
        default="never",
        help="fail the run if a model changed, or only if no label or line of the pull request declares it; by default "
        "changes are reported alone",
    )
    parser.addini("modelprobe_devices", "devices of the probe; those that are missing skip", type="args", default=[])
    parser.addini("modelprobe_seed", "seed of all random numbers", default="0")
    parser.addini("modelprobe_strict", "hints fail tests", type="bool", default=False)
    parser.addini("modelprobe_verbose", "show the layers that each test recorded", type="bool", default=False)


def compares_sides(config: pytest.Config) -> bool:
    """Whether the tests are to run on another side too."""
    option = config.option
    return option.modelprobe_base is not None or option.modelprobe_base_python is not None


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
    """Return the file of a report; raise `pytest.UsageError` if it is a directory."""
    given = config.getoption(option)
    if given is None:
        return None
    path = Path(config.invocation_params.dir, given)
    if path.is_dir():
        raise pytest.UsageError(f"{option}={given}: it is a directory; name a file")
    return path


def _seed(config: pytest.Config) -> int:
    option = config.getoption("--modelprobe-seed")
    if option is not None:
        return int(option)
    text = config.getini("modelprobe_seed")
    try:
        return int(text)
    except ValueError:
        raise pytest.UsageError(f"modelprobe_seed is an integer; the ini file has {text!r}") from None


# --- the marker -------------------------------------------------------------------------------------------------------

_KEYWORDS = ("devices", "seed", "tolerance", "compare", *extension.modules("marker"))
_ALL_KEYWORDS = f"{', '.join(f'{name}=' for name in _KEYWORDS[:-1])} and {_KEYWORDS[-1]}="


def marker_arguments(node: pytest.Item) -> dict[str, Any]:
    """Return the keyword arguments of the closest marker of a test; empty if it has no marker."""
    marker = node.get_closest_marker("modelprobe")
    return dict(marker.kwargs) if marker else {}


def marker_error(node: pytest.Item) -> str | None:
    """Return what is wrong with a test's marker; ``None`` if it is valid."""
    marker = node.get_closest_marker("modelprobe")
    if marker is None:
        return None
    if marker.args:
        return f"takes keywords only: {_ALL_KEYWORDS}"
    unknown = min(marker.kwargs.keys() - set(_KEYWORDS), default=None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, _KEYWORDS, n=1)
        hint = f"is {near[0]}= meant? " if near else ""
        return f"takes no {unknown}=: {hint}It takes {_ALL_KEYWORDS}"
    for name in as_list(marker.kwargs.get("devices") or []):
        if not is_device(name):
            return f"has {name!r} in devices=: {INVALID}"
    seed = marker.kwargs.get("seed", 0)
    if not hasattr(seed, "__index__"):
        return f"takes an integer as seed=; got {seed!r}"
    errors = dict.fromkeys(extension.imported(place, "") for place in extension.modules("marker").values())
    return next(filter(None, (error_of(marker.kwargs) for error_of in errors)), None)
