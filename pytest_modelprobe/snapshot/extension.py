"""Where a snapshot lies, and syrupy's part in it: it writes two files as one, and counts.

What syrupy documents for none but itself is used here alone, so that a later syrupy may be without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

from syrupy.assertion import SnapshotAssertion
from syrupy.data import SnapshotCollections
from syrupy.extensions.single_file import SingleFileSnapshotExtension

from pytest_modelprobe.files import ARCH, PROBE, Texts, read_texts, write

_BETWEEN = "\f"  # what no JSON has in it


class SnapshotFiles(NamedTuple):
    """Where a snapshot lies: two files."""

    arch: Path
    """What is exact, the same for all devices."""
    probe: Path
    """The numbers of one device."""

    @property
    def ending(self) -> str:
        """What the numbers' name has after what both names begin with: ``.cuda.probe.json``."""
        return self.probe.name.removeprefix(self.arch.name.removesuffix(ARCH))


def joined(texts: Texts) -> str:
    """Return both texts as the one that syrupy knows."""
    return _BETWEEN.join((texts.architecture, texts.numbers or ""))


class ModelProbeExtension(SingleFileSnapshotExtension):
    """Keeps two files for syrupy, which knows of one: where they lie is its index, and its data both texts in a row.

    What no test uses any more is found by `session`, which knows of devices and of failed runs; to syrupy nothing
    here is ever unused.
    """

    file_extension = ARCH.removeprefix(".")

    def serialize(self, data: Any, **_: Any) -> str:
        """Return the text as it is."""
        return str(data)

    @classmethod
    def get_location(cls, *, test_location: Any, index: Any) -> str:
        """Return the path of the architecture."""
        return str(index.arch)

    @classmethod
    def get_snapshot_name(cls, *, test_location: Any, index: Any = 0) -> str:
        """Return the name of the numbers, which is each device's own."""
        return str(index.probe.name.removesuffix(PROBE))

    def discover_snapshots(self, **_: Any) -> SnapshotCollections:
        """Return nothing, wherever `--snapshot-dirname` points: see the class."""
        return SnapshotCollections()

    def read_snapshot_data_from_location(
        self, *, snapshot_location: str, snapshot_name: str, session_id: str
    ) -> str | None:
        """Return both texts, or None if there is no architecture."""
        arch = Path(snapshot_location)
        texts = read_texts(arch, arch.with_name(snapshot_name + PROBE))
        return None if texts is None else joined(texts)

    @classmethod
    def write_snapshot(cls, *, snapshot_location: str, snapshots: Any, **_: Any) -> None:
        """Write both files; syrupy's own would warn that it cannot relate our names to the test."""
        for data, _location, place in snapshots:
            architecture, _between, numbers = data.partition(_BETWEEN)
            write(place.arch, Texts(architecture, numbers or None), place.probe)


def tell(
    assertion: SnapshotAssertion, place: SnapshotFiles, texts: Texts, *, write: bool
) -> tuple[bool, Exception | None]:
    """Have syrupy count a comparison, and write if asked; return whether it was equal, and what syrupy raised."""
    assertion.update_snapshots, assertion.update_new_snapshots_only = write, False
    equal = bool(assertion(name=cast(Any, place)) == joined(texts))
    results: dict[int, Any] = getattr(assertion, "executions", {})
    newest = next(reversed(results.values()), None)
    for data in ("asserted_data", "recalled_data"):  # kept until the end of the run otherwise
        if hasattr(newest, data):
            setattr(newest, data, None)
    return equal, getattr(newest, "exception", None)
