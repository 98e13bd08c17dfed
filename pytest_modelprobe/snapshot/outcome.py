"""What one comparison with a snapshot found, and what the test learned of it.

A comparison may be made and its result never used, or it may be used in ``!=``. Both decide whether the test passes, so
an outcome also knows how it was asked. Reports get it in builtin types, because they may be made in another process;
the place of each cause is read in the file of the layer's module, which another process may have imported.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Literal

import pytest

from pytest_modelprobe._pytest import caught_by
from pytest_modelprobe.assertions.findings import findings
from pytest_modelprobe.comparison import Cause, Diagnosis, Parts
from pytest_modelprobe.comparison import text as comparison_text
from pytest_modelprobe.record import ROOT, LiveRun, Record, parent
from pytest_modelprobe.report.results import ShownCause, SnapshotResult, Source

from .extension import SnapshotFiles
from .naming import kind
from .options import shown_path

# --- causes as reports show them --------------------------------------------------------------------------------------


def shown_causes(
    causes: Iterable[Cause], record: Record, root: Path, sources: Mapping[str, str] | None = None
) -> tuple[ShownCause, ...]:
    """Return causes for reports, equal ones of several layers once.

    Args:
        causes: The causes.
        record: The record that has the layers.
        root: The folder to which the files of classes are relative.
        sources: The modules of the classes → their files; by default those that this process imported.
    """
    return tuple(
        ShownCause(
            kind=cause.kind,
            layer=cause.layer,
            said=comparison_text.cause_text(cause),
            layers=layers,
            what=cause.what,
            actual=cause.actual,
            expected=cause.expected,
            change=cause.change,
            noise=cause.noise,
            evidence=cause.evidence,
            hints=tuple(cause.hints),
            source=source_of(record, cause.layer, root, sources),
        )
        for cause, layers in comparison_text.grouped(causes)
    )


def sources_of(record: Record) -> dict[str, str]:
    """Return the modules of Python that the classes of a record are from, as far as this process has them → files."""
    modules = {layer.type.rpartition(".")[0] for layer in record.layers.values() if not layer.functional}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return {name: str(Path(file).resolve()) for name, file in files.items() if isinstance(file, str)}


def source_of(record: Record, layer: str, root: Path, sources: Mapping[str, str] | None = None) -> Source | None:
    """Return file and line of the class of a layer, or of the nearest container whose file is in ``root``.

    The file is relative to ``root``. It is ``None`` for classes of installed packages, and for classes that are not
    written at the top of a module, such as one that a function made.

    Args:
        record: The record that has the layer.
        layer: The layer.
        root: The folder.
        sources: The modules of the classes → their files; by default those that this process imported.

    >>> source_of(Record(model="Net"), "fc", Path()) is None
    True
    """
    name = layer
    while True:
        found = record.layers.get(name)
        where = None if found is None or found.functional else _class_source(found.type, root, sources)
        if where is not None or name == ROOT:
            return where
        name = parent(name)


def _class_source(type_name: str, root: Path, sources: Mapping[str, str] | None) -> Source | None:
    module, _, name = type_name.rpartition(".")
    given = getattr(sys.modules.get(module), "__file__", None) if sources is None else sources.get(module)
    if not isinstance(given, str):
        return None
    file, root = Path(given).resolve(), root.resolve()
    if not file.is_relative_to(root) or "site-packages" in file.parts:
        return None
    line = _classes(file, file.stat().st_mtime_ns).get(name) if file.is_file() else None
    return None if line is None else Source(file=file.relative_to(root).as_posix(), line=line)


@functools.lru_cache(maxsize=32)
def _classes(file: Path, changed: int) -> dict[str, int]:
    """Return the classes of a module → the line of the first decorator, or of ``class``. Outer ones go first.

    A file that changed is read again.
    """
    lines: dict[str, int] = {}
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # it is compiled
        return lines
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            first = node.decorator_list[0] if node.decorator_list else node
            lines.setdefault(node.name, first.lineno)
    return lines


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
