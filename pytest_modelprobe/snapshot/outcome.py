"""What one comparison with a snapshot found, and what the test learned of it.

A comparison may be made and its result never used, or it may be used in ``!=``. Both decide whether the test passes, so
an outcome also knows how it was asked. Reports get it in builtin types, because they may be made in another process.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Sequence
from types import CodeType
from typing import Literal

import pytest

from pytest_modelprobe._pytest import caught_by
from pytest_modelprobe.assertions.findings import findings
from pytest_modelprobe.comparison import Cause, Diagnosis, Parts
from pytest_modelprobe.record import LiveRun, Record
from pytest_modelprobe.report.results import SnapshotResult

from .extension import SnapshotFiles
from .naming import kind
from .options import shown_path
from .source import shown_causes

UNEQUAL = ("changed", "new", "unreadable")
"""Verdicts of a record that differs from what is on disk."""


@dataclasses.dataclass(eq=False)
class Outcome:
    """One comparison and its result."""

    place: SnapshotFiles
    record: Record
    live_run: LiveRun | None
    caller: CodeType
    """The code of the function that compared."""
    line: int
    """The line in which it compared."""
    compare: Parts
    verdict: Literal["same", "changed", "new", "unreadable", "created", "updated", "not compared"] = "same"
    not_compared: str | None = None
    """The part that an option of the run excludes: ``architecture`` or ``behavior``."""
    compared: Parts = "all"
    """The part that the test compares in every run. It is written into the file of the numbers."""
    scope_message: str = ""
    """Says that the file was written to compare another part; empty if it was not."""
    values_not_compared: int = 0
    declared: bool = False
    """Whether the reason that was given is written into the file."""
    diagnosis: Diagnosis | None = None
    """Why the record differs; ``None`` if it does not, or if there is no snapshot."""
    notes: Sequence[Cause] = ()
    """What is written otherwise although every value is the same. The file is *stale*."""
    given: Record = dataclasses.field(init=False)
    """The record as the test gave it."""
    expected: Record | None = None
    """The record in the snapshot, with the current names of layers."""
    text: str = ""
    was_read: bool = False
    """Whether the test used the result, with `assert` or in another way."""
    asked_unequal: bool = False
    """Whether the test compared with ``!=``."""
    raises: Sequence[pytest.ExceptionInfo[BaseException]] = ()
    """One for each block of `pytest.raises` around the comparison: what the block catches stands there later."""

    def __post_init__(self) -> None:
        self.given = self.record

    @property
    def is_expected(self) -> bool:
        """Whether the test expects a difference: it used ``!=``, or `pytest.raises` caught the assertion."""
        return self.asked_unequal or any(map(self._raised, filter(None, map(caught_by, self.raises))))

    def _raised(self, error: BaseException) -> bool:
        frames = traceback.walk_tb(error.__traceback__)
        return isinstance(error, AssertionError) and any(frame.f_code is self.caller for frame, _ in frames)

    @property
    def passed(self) -> bool:
        """Whether the record equals what is on disk, or has just been written."""
        return self.verdict not in UNEQUAL

    def result(self, item: pytest.Item) -> SnapshotResult:
        """Return the result as reports have it, which may be made in another process."""
        diagnosis, root = self.diagnosis, item.config.rootpath
        files = (self.place.arch, *(() if self.compare == "architecture" else (self.place.probe,)))
        return SnapshotResult(
            test=item.nodeid,
            snapshot=shown_path(self.place.arch, item.config),
            device=kind(self.record.device),
            verdict=self.verdict,
            expected=self.is_expected,
            not_compared=self.not_compared,
            values_not_compared=self.values_not_compared,
            declared=self.declared,
            model=self.record.model,
            layers=len(self.record.layers),
            findings=tuple(findings(self.record)) if self.verdict in ("new", "created") else (),
            first_line=self.text.partition("\n")[0],
            causes=shown_causes(diagnosis.causes, self.record, root) if diagnosis else (),
            possible=shown_causes(diagnosis.possible, self.record, root) if diagnosis else (),
            notes=shown_causes(self.notes, self.record, root),
            moved=len(diagnosis.moved) if diagnosis else 0,
            text=self.text,
            key=str(self.place.probe),
            files=tuple(map(str, files)),
        )


class Answer:
    """The value of ``==`` or ``!=`` where a record differs. It notes whether it was evaluated.

    `bool` has no subclasses, so it is an object of its own. Nobody evaluates a comparison that stands without `assert`,
    and a test that only looks like one has to fail.
    """

    def __init__(self, outcome: Outcome, *, unequal: bool) -> None:
        self._outcome = outcome
        self._unequal = unequal

    def __bool__(self) -> bool:
        self._outcome.was_read = True
        self._outcome.asked_unequal |= self._unequal
        return self._unequal

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))
