"""The file of a test with the invariants of a healthy training, beside its snapshots.

A test has one, ``<test>.training.json``. It holds no numbers of a device, so all devices share it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from pytest_modelprobe.exceptions import SnapshotError
from pytest_modelprobe.files import read_text, write_text

from .preconditions import Refusal

TRAINING = ".training.json"


class Stored(Protocol):
    """What a file holds."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return what `as_json` wrote; ValueError if it is something else."""

    def as_json(self) -> str:
        """Return it as text."""


T = TypeVar("T", bound=Stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFile:
    """The file, and what this run may do with it."""

    path: Path
    shown: str
    """The path in messages."""
    test: str
    """Name of the test, printable."""
    updates: bool
    """Whether an update writes them also if there are others."""
    creates: bool
    """Whether an update writes them if there is no file."""
    writes: bool
    """Whether this process writes: of several ranks the first does."""
    why_not_written: Refusal | None
    """Why an update must not write here."""

    def read_or_written(self, kind: type[T], learn: Callable[[], T], fits: Callable[[T], bool]) -> T:
        """Return the invariants with which to judge this run. An update writes what it learns if they do not fit.

        Args:
            kind: The class of invariants.
            learn: Returns those of this run.
            fits: Whether this run keeps those in the file.

        Raises:
            AssertionError: There is no file, and this run does not write one.
            SnapshotError: The file cannot be read or written.
        """
        __tracebackhide__ = True
        stored = self._read(kind)
        if stored is not None and (not self.updates or fits(stored)):
            return stored
        if not (self.updates or self.creates):
            raise AssertionError(
                f"{self.test} has no invariants of a healthy training yet: `pytest --snapshot-update` learns them from "
                f"this one, and writes {self.shown}"
            )
        if self.why_not_written is not None:
            raise SnapshotError(f"{self.shown} is {self.why_not_written.message}")
        found = learn()
        if self.writes:
            write_text(self.path, found.as_json())
        return found

    def _read(self, kind: type[T]) -> T | None:
        text = read_text(self.path)
        try:
            return None if text is None else kind.from_dict(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise SnapshotError(
                f"{self.shown} has no invariants ({error}): restore it, or remove it and run `pytest --snapshot-update`"
            ) from None
