"""What one comparison with a snapshot found, and what the test learned of it.

A comparison may be made and its result never used, or it may be used in ``!=``. Both decide whether the test passes, so
an outcome also knows how it was asked. Reports get it in builtin types, because they may be made in another process.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any, Literal

import pytest

from pytest_modelprobe._pytest import caught_by
from pytest_modelprobe.assertions.findings import findings
from pytest_modelprobe.comparison import Cause, Diagnosis, Parts
from pytest_modelprobe.comparison import text as report
from pytest_modelprobe.record import LiveRun, Record
from pytest_modelprobe.text import json_number

from . import messages
from .extension import SnapshotFiles
from .naming import kind
from .source import source_of
from .summary import shown_path

UNEQUAL = ("changed", "new", "unreadable")
"""Verdicts of a record that differs from what is on disk."""


@dataclasses.dataclass(eq=False)
class Outcome:
    """One comparison and its result."""

    place: SnapshotFiles
    record: Record
    live_run: LiveRun | None
    caller: CodeType
    """The code that compared."""
    line: int
    """The line of its file in which it compared."""
    compare: Parts
    verdict: Literal["same", "changed", "new", "unreadable", "created", "updated", "not compared"] = "same"
    not_compared: str | None = None
    """The part that an option of the run excludes: ``architecture`` or ``behavior``."""
    compared: Parts = "all"
    """What the test compares in every run; it is written into the file of the numbers."""
    scope_message: str = ""
    """That the file was written to compare another part; empty if not."""
    values_not_compared: int = 0
    declared: bool = False
    """Whether the reason that was given is written into the file."""
    diagnosis: Diagnosis | None = None
    notes: Sequence[Cause] = ()
    """Calls that are written otherwise, where every value is the same."""
    given: Record = dataclasses.field(init=False)
    """The record as the test gave it."""
    expected: Record | None = None
    """The record in the snapshot, with the current names of layers."""
    text: str = ""
    was_read: bool = False
    """Whether the test used the result, by `assert` or otherwise."""
    asked_unequal: bool = False
    """Whether the test compared by ``!=``."""
    raises: Sequence[pytest.ExceptionInfo[BaseException]] = ()
    """What the blocks of `pytest.raises` around the comparison catch."""

    def __post_init__(self) -> None:
        self.given = self.record

    @property
    def is_expected(self) -> bool:
        """Whether the test says that the record differs: by ``!=``, or by `pytest.raises` around the assertion."""
        return self.asked_unequal or any(map(self._raised, filter(None, map(caught_by, self.raises))))

    def _raised(self, error: BaseException) -> bool:
        frames = traceback.walk_tb(error.__traceback__)
        return isinstance(error, AssertionError) and any(frame.f_code is self.caller for frame, _ in frames)

    @property
    def passed(self) -> bool:
        """Whether the record equals what is on disk, or has just been written."""
        return self.verdict not in UNEQUAL

    def to_dict(self, item: pytest.Item) -> dict[str, Any]:
        """Return the result in builtin types, for the reports of pytest and ``--modelprobe-json``."""
        diagnosis = self.diagnosis
        root = item.config.rootpath

        def told(causes: Iterable[Cause]) -> list[dict[str, Any]]:
            return [
                {**_cause_dict(*pair), "source": source_of(self.record, pair[0].layer, root)}
                for pair in report.grouped(causes)
            ]

        return {
            "test": item.nodeid,
            "snapshot": shown_path(self.place.arch, item.config),
            "device": kind(self.record.device),
            "verdict": self.verdict,
            "expected": self.is_expected,
            "not_compared": self.not_compared,
            "values_not_compared": self.values_not_compared,
            "declared": self.declared,
            "model": self.record.model,
            "layers": len(self.record.layers),
            "findings": findings(self.record) if self.verdict in ("new", "created") else [],
            "first_line": self.text.partition("\n")[0],
            "causes": told(diagnosis.causes) if diagnosis else [],
            "possible": told(diagnosis.possible) if diagnosis else [],
            "notes": told(self.notes),
            "moved": len(diagnosis.moved) if diagnosis else 0,
            "text": self.text,
            "key": str(self.place.probe),
            "arch": str(self.place.arch),
            "probe": "" if self.compare == "architecture" else str(self.place.probe),
        }


class Unequal:
    """False that records whether it was evaluated: a comparison without `assert` is never evaluated."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def __bool__(self) -> bool:
        self._outcome.was_read = True
        return False

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))


def _cause_dict(cause: Cause, layers: int) -> dict[str, Any]:
    return {
        "kind": cause.kind,
        "layer": cause.layer,
        "layers": layers,
        "what": cause.what,
        **{name: json_number(getattr(cause, name)) for name in ("actual", "expected", "change", "noise")},
        "evidence": cause.evidence,
        "hints": list(cause.hints),
        "said": report.cause_text(cause),
        "key": messages.key(cause),
    }
