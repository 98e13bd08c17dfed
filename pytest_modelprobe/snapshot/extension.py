"""The two files of a snapshot, and the extension with which syrupy writes and counts them.

Syrupy has the options and the counts in the terminal, so a user of its snapshots learns nothing new. It compares texts,
and records are compared with tolerances. So `comparer` compares first, and syrupy gets the text on disk if the record
is the same, and another text if it is not. Private names of syrupy are used in this module alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from syrupy.assertion import SnapshotAssertion
from syrupy.data import SnapshotCollections
from syrupy.extensions.single_file import SingleFileSnapshotExtension

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.files import ARCH, PROBE, Texts, read_texts, write

_SEPARATOR = "\f"  # never occurs in JSON


class SnapshotFiles(NamedTuple):
    """The paths of a snapshot's two files."""

    arch: Path
    """The exact part, which is the same on all devices."""
    probe: Path
    """The numbers, which each device has its own of."""


def joined(texts: Texts) -> str:
    """Return both texts as one string."""
    return _SEPARATOR.join((texts.architecture, texts.numbers or ""))


class ModelProbeExtension(SingleFileSnapshotExtension):
    """A syrupy extension that stores a snapshot in two files.

    What syrupy calls the index is `SnapshotFiles`, and its data is both texts, joined. The extension reports no unused
    snapshots. `session` does, because it knows of devices and of failed runs.
    """

    file_extension = ARCH.removeprefix(".")

    def serialize(self, data: Any, **_: Any) -> str:
        """Return the text unchanged."""
        return str(data)

    @classmethod
    def get_location(cls, *, test_location: Any, index: Any) -> str:
        """Return the path of the architecture."""
        return str(index.arch)

    @classmethod
    def get_snapshot_name(cls, *, test_location: Any, index: Any = 0) -> str:
        """Return the name of the file of numbers, which differs by device."""
        return str(index.probe.name.removesuffix(PROBE))

    def discover_snapshots(self, **_: Any) -> SnapshotCollections:
        """Return nothing: `session` finds the unused files."""
        return SnapshotCollections()

    def read_snapshot_data_from_location(
        self, *, snapshot_location: str, snapshot_name: str, session_id: str
    ) -> str | None:
        """Return both texts, or ``None`` if there is no architecture."""
        arch = Path(snapshot_location)
        texts = read_texts(arch, arch.with_name(snapshot_name + PROBE))
        return None if texts is None else joined(texts)

    @classmethod
    def write_snapshot(cls, *, snapshot_location: str, snapshots: Any, **_: Any) -> None:
        """Write both files. Syrupy's own method would warn that our names do not begin with the name of the test."""
        for data, _location, place in snapshots:
            architecture, _separator, numbers = data.partition(_SEPARATOR)
            write(place.arch, Texts(architecture, numbers or None), place.probe)


def syrupy_assertion(request: pytest.FixtureRequest) -> SnapshotAssertion:
    """Return syrupy's assertion with our extension.

    Raises:
        UsageError: The plugin syrupy is not loaded, or another plugin has a fixture of the name ``snapshot``.
    """
    __tracebackhide__ = True
    try:
        found = request.getfixturevalue("snapshot")
    except pytest.FixtureLookupError:
        raise UsageError("modelprobe_snapshot needs the plugin syrupy: run without -p no:syrupy") from None
    if not isinstance(found, SnapshotAssertion):
        owner = type(found).__module__.partition(".")[0]
        raise UsageError(
            f"modelprobe_snapshot needs syrupy's fixture snapshot, but the fixture snapshot is one of {owner}'s: "
            "rename it, or disable its plugin with -p no:..."
        )
    return found.use_extension(ModelProbeExtension)


@contextlib.contextmanager
def assertions_forgotten(config: pytest.Config) -> Iterator[None]:
    """Let syrupy forget at the end of the block which snapshots were compared in it."""
    made: list[Any] | None = getattr(getattr(config, "_syrupy", None), "_assertions", None)
    before = 0 if made is None else len(made)
    try:
        yield
    finally:
        if made is not None:
            del made[before:]


def compare_and_count(
    assertion: SnapshotAssertion, place: SnapshotFiles, texts: Texts, *, write: bool
) -> tuple[bool, Exception | None]:
    """Let syrupy count a comparison, and write if asked; return whether it was equal, and what syrupy raised."""
    assertion.update_snapshots, assertion.update_new_snapshots_only = write, False
    equal = bool(assertion(name=cast(Any, place)) == joined(texts))
    results: dict[int, Any] = getattr(assertion, "executions", {})
    newest = next(reversed(results.values()), None)
    for data in ("asserted_data", "recalled_data"):  # else syrupy keeps the texts until the end of the run
        if hasattr(newest, data):
            setattr(newest, data, None)
    return equal, getattr(newest, "exception", None)
