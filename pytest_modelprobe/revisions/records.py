"""Records as files: a side writes them, and the other side and this process read them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_modelprobe.record import Record


@dataclass(frozen=True, slots=True)
class Written:
    """A record that a test made, as it was written."""

    test: str
    """The node id."""
    key: str
    """Which record of the test: ``run 1``, ``architecture 2``, ``watch 1``."""
    record: Record
    sources: Mapping[str, str] = field(default_factory=dict)
    """The modules of Python that the classes of the model are from → their files."""
    evidence: bool = False
    """Whether the record has what a diagnosis needs, as one that differs from that of the other side has."""

    def write(self, folder: Path) -> None:
        """Write the record into a folder of records."""
        path = path_of(folder, self.test, self.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "test": self.test,
            "key": self.key,
            "record": self.record.to_dict(),
            "sources": dict(self.sources),
            "evidence": self.evidence,
        }
        path.write_text(json.dumps(data, allow_nan=False), "ascii")


def path_of(folder: Path, test: str, key: str) -> Path:
    """Return the file of a record in a folder of records."""
    return folder_of(folder, test) / f"{key.replace(' ', '-')}.json"


def folder_of(folder: Path, test: str) -> Path:
    """Return where in a folder of records those of a test are."""
    return folder / hashlib.sha256(test.encode()).hexdigest()[:20]


def read_written(folder: Path) -> dict[tuple[str, str], Written]:
    """Return the records in a folder by test and key, in the order in which the tests made them."""
    paths = sorted(folder.glob("*/*.json"), key=lambda path: path.stat().st_mtime_ns)
    return {(one.test, one.key): one for one in map(_read, paths)}


def read_one(folder: Path, test: str, key: str) -> Written | None:
    """Return one of the records in a folder, or `None` if it is not there."""
    path = path_of(folder, test, key)
    return _read(path) if path.is_file() else None


def _read(path: Path) -> Written:
    data = json.loads(path.read_text("ascii"))
    record = Record.from_dict(data["record"])
    return Written(data["test"], data["key"], record, data["sources"], data["evidence"])
