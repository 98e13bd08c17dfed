"""The names of a test's files, made of its name and the ids of its parameters, and the files that no test uses.

A name has to stay the same if other tests or parameters are added, because the file would belong to another test
otherwise. So an id that pytest numbered is refused. The device is left out, for the architecture is the same on all.
The number of a repetition by pytest-repeat is left out, for all repetitions of a test have its one snapshot.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.files import ARCH, PROBE, file_name

from .options import DIRECTORY

DEVICES = ("cuda", "mps", "xpu")
"""Devices with a file of numbers of their own; the file of the CPU has no device in its name."""

_PARAMETER = "modelprobe_device"
_REPETITION = "__pytest_repeat_step_number"  # its values count from 0, and its ids are such as 1-3: the last of a test


def folder_of(module: Path) -> Path:
    """Return the directory of the snapshots of a module."""
    return module.parent / DIRECTORY / file_name(module.stem)


def stem_of(item: pytest.Item) -> str:
    """Return the common part of the names of a test's files: classes, function and ids, without device and repetition.

    Raises:
        UsageError: pytest made one of the ids from the position of the parameter.
    """
    __tracebackhide__ = True
    numbered = _numbered(item)
    if numbered:
        raise UsageError(
            f"{numbered} in {item.name} is an id that pytest numbered itself, so the snapshot would belong to another "
            "test after a parameter is added before it: give each parameter an id, with ids=[...], ids=str or "
            'pytest.param(..., id="...")'
        )
    own, device = item.name, _parameters(item).get(_PARAMETER)
    if _REPETITION in _parameters(item):
        own = re.sub(r"(?:-|(\[))\d+-\d+\]$", lambda found: "" if found[1] else "]", own)
    if device is not None:
        own = without_id(own, str(device))
    return file_name(".".join([*_classes(item), own]))


def function_of(item: pytest.Item) -> str:
    """Return the common part of the names of the files of a test's function, with any parameters."""
    function = getattr(item, "originalname", None) or item.name.partition("[")[0]
    return file_name(".".join([*_classes(item), function]))


def device_of(item: pytest.Item) -> str | None:
    """Return the device that a test is parametrized with; ``None`` if it runs on the device of the run."""
    device = _parameters(item).get(_PARAMETER)
    return None if device is None else kind(str(device))


def kind(device: str) -> str:
    """Return the kind of a device.

    >>> kind("cuda:1")
    'cuda'
    """
    return device.partition(":")[0]


def belongs(stem: str, test: str) -> bool:
    """Whether a snapshot can belong to a test: to its first comparison, to a later or named one, or to an id of it.

    >>> belongs("test_a", "test_a"), belongs("test_a.2", "test_a"), belongs("test_a[x]", "test_a")
    (True, True, True)
    >>> belongs("test_ab", "test_a")
    False
    """
    return stem == test or stem.startswith((f"{test}.", f"{test}["))


def without_id(name: str, wanted: str) -> str:
    """Return a test's name without one of its ids.

    >>> without_id("test_x[cpu]", "cpu"), without_id("test_x[cpu-big]", "cpu"), without_id("test_x[a-cpu]", "cpu")
    ('test_x', 'test_x[big]', 'test_x[a]')
    """
    function, bracket, rest = name.partition("[")
    kept, found = re.subn(rf"(?:(?<=-)|^){re.escape(wanted)}(?:-|$)", "", rest.removesuffix("]"), count=1)
    if not bracket or not found:
        return name
    return f"{function}[{kept.removesuffix('-')}]" if kept else function


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _classes(item: pytest.Item) -> Iterable[str]:
    return (node.name for node in item.listchain() if isinstance(node, pytest.Class))


def _numbered(item: pytest.Item) -> str | None:
    """Return an id such as ``config0``, which pytest gives to a value that it cannot write as text."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return None
    ids = str(callspec.id).split("-")
    for name, value in callspec.params.items():
        made_up = f"{name}{callspec.indices.get(name)}"
        if name != _PARAMETER and made_up in ids and not _has_text(value):
            return made_up
    return None


def _has_text(value: Any) -> bool:
    """Whether pytest makes an id of the value itself."""
    plain = str, bytes, int, float, complex, bool, type(None), re.Pattern, enum.Enum
    return isinstance(value, plain) or isinstance(getattr(value, "__name__", None), str)


# --- the files that no test uses --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Test:
    """A collected test of the module."""

    __test__ = False

    stem: str
    """The common part of the names of its files."""
    device: str
    passed: bool
    """Whether it passed. A test that was skipped or failed may not have reached its comparisons."""


@dataclass(frozen=True)
class Module:
    """A test module and the directory of its snapshots."""

    folder: Path
    gone: bool
    """Whether the module does not exist any more."""
    tests: Collection[Test] = ()
    """All tests of the module."""


@dataclass
class _Snapshot:
    arch: Path | None = None
    probes: dict[str, Path] = field(default_factory=dict)
    """The files of numbers by device."""


def unused_files(module: Module, used: Collection[Path], ran: Collection[str]) -> Iterator[tuple[Path, str | None]]:
    """Yield each file that no test uses, with the reason not to delete it, if there is one.

    Args:
        module: The module: collected completely, or deleted.
        used: Files that a record was compared with.
        ran: Devices on which tests ran.
    """
    for stem, snapshot in sorted(_snapshots(module.folder).items()):
        tests = [] if module.gone else [test for test in module.tests if belongs(stem, test.stem)]
        waiting = {test.device for test in tests if not test.passed}
        found = []
        for device, path in snapshot.probes.items():
            elsewhere = not module.gone and device not in ran
            if path in used or device in waiting or (elsewhere and (tests or snapshot.arch in used)):
                continue
            found.append((path, f"{device} did not run" if elsewhere else None))
        yield from found
        arch = snapshot.arch
        if arch is not None and arch not in used and len(found) == len(snapshot.probes) and not waiting:
            yield arch, next((why for _, why in found if why), None)


def _snapshots(folder: Path) -> dict[str, _Snapshot]:
    """Return the snapshots in a directory by the common part of their names; other files are ignored."""
    paths = sorted(folder.glob("[!.]*.json"))
    found = {path.name.removesuffix(ARCH): _Snapshot(path) for path in paths if path.name.endswith(ARCH)}
    for path in paths:
        if not path.name.endswith(PROBE):
            continue
        name = path.name.removesuffix(PROBE)
        stem, _, device = name.rpartition(".")
        if name in found or device not in DEVICES:
            stem, device = name, "cpu"
        found.setdefault(stem, _Snapshot()).probes[device] = path
    return found
