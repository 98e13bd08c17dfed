"""Find the files of snapshots that no test uses; a file that may be in use is not among them.

A file that is called unused is deleted by an update. So a file counts as used unless all tests that could use it ran
to their end on its device, or are gone with their module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pytest_modelprobe.files import ARCH, PROBE

from .naming import DEVICES, belongs


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
