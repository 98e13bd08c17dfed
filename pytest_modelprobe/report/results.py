"""The results of a run of pytest, from which every report is made, and their file.

They are dataclasses of numbers and texts, with the records that the tests made. What they hold crosses the processes of
pytest-xdist, and is written by ``--modelprobe-json``, by the codec of records: a field at its default is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_modelprobe.record import Plain, Record, Statistics, codec
from pytest_modelprobe.text import count

SCHEMA = 5

FAILED = ("failed", "error")
"""The outcomes of a test that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A line of a file."""

    file: str
    """The path, relative to pytest's root directory."""
    line: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCause:
    """A cause in the words of a report. Equal causes of several layers are one."""

    kind: str
    layer: str
    said: str
    layers: int = 1
    """How many layers have it."""
    what: str = ""
    """The attribute, the parameter, or where in the code."""
    actual: Plain = None
    expected: Plain = None
    change: float | None = None
    """The relative change that it made."""
    noise: float | None = None
    evidence: str | None = None
    hints: tuple[str, ...] = ()
    source: Source | None = None
    """Where the layer's class is written, if that is a file of the project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A model that was compared, and why it differs."""

    verdict: str
    device: str = ""
    model: str = ""
    layers: int = 0
    """How many layers the model has."""
    first_line: str = ""
    text: str = ""
    """What a terminal shows."""
    causes: tuple[ShownCause, ...] = ()
    possible: tuple[ShownCause, ...] = ()
    """Causes that are not certain."""
    notes: tuple[ShownCause, ...] = ()
    """What is written otherwise, which fails no test by itself."""
    moved: int = 0
    """How many layers have other values because of a layer before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotResult(Compared):
    """A comparison with a snapshot: same, changed, new, unreadable, created, updated or not compared."""

    snapshot: str
    """The architecture file."""
    test: str = ""
    expected: bool = False
    """Whether the test asks for a difference."""
    not_compared: str | None = None
    """The part that an option of the run excludes."""
    values_not_compared: int = 0
    declared: bool = False
    """Whether the reason that was given is written into the file."""
    findings: tuple[str, ...] = ()
    """Of a new snapshot."""
    files: tuple[str, ...] = ()
    """The absolute paths of the files, which are in no report."""
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult(Compared):
    """A record beside that of the other side: unchanged, rounding, changed, not repeatable or not run."""

    record: str
    """Which record of the test, such as ``run 1``."""
    first: str | None = None
    """The layer whose output differs first, however little."""
    source: Source | None = None
    """The first line that differs in the source of a cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What was compared with another side as a whole."""

    ref: str | None
    """The commit as it was named."""
    commit: str | None
    python: str | None
    """The interpreter of the other side, if it was given."""
    said: str
    stopped: str | None = None
    """Why nothing was compared."""
    verdicts: Mapping[str, int] = field(default_factory=dict)
    """How many records have which verdict."""
    unpaired: int = 0
    """Records of one side alone."""
    only_here: tuple[str, ...] = ()
    only_there: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    """Test → why it did not run there."""
    versions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Package → the versions here and there, where they differ."""

    @property
    def name(self) -> str:
        """The other side in words.

        >>> Base(ref="main", commit="0123456789abcdef", python=None, said="").name
        'main (0123456789)'
        """
        commit = f"{self.ref} ({self.commit[:10]})" if self.commit else ""
        return " under ".join(filter(None, (commit, self.python)))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCounts:
    """The units of the first output of a layer."""

    count: int
    dead: int | None = None
    """Those that are always zero; not known where units are zero by chance."""
    saturated: int | None = None
    """Those that never leave a flat end of a tanh or sigmoid; not known of another layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A step of training."""

    step: int | None
    update_ratios: Mapping[str, float]
    """Layer → ‖w' − w‖ / ‖w‖."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run or a watch of a test."""

    name: str
    record: Record
    """Layers are in order of execution. It has the values of the first call of each, without fingerprints and units."""
    kind: str = "run"
    """``run`` or ``watch``."""
    error: str | None = None
    """Why there is no record."""
    findings: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    status: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Layer → what is wrong with it, worst first."""
    units: Mapping[str, UnitCounts] = field(default_factory=dict)
    before: Mapping[str, Statistics] = field(default_factory=dict)
    """Layer → the statistics of its output in the snapshot."""
    steps: tuple[StepResult, ...] = ()
    """Of a watch that keeps several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A picture that a test added."""

    title: str
    media: str
    data: str
    """In base64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """A test with a probe or a snapshot. If it was run again, this is the last attempt."""

    id: str
    outcome: str
    file: str
    line: int | None = None
    duration: float = 0.0
    message: str = ""
    """The first line of a failure, or the reason of a skip."""
    failure: str = ""
    """The text of a failure."""
    hints: tuple[str, ...] = ()
    runs: tuple[Run, ...] = ()
    snapshots: tuple[SnapshotResult, ...] = ()
    base: tuple[PairResult, ...] = ()
    figures: tuple[Figure, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it failed, or what it needs did."""
        return self.outcome in FAILED

    @property
    def changed(self) -> list[PairResult]:
        """The models that differ from those of the other side. The test passes nevertheless."""
        return [pair for pair in self.base if pair.verdict == "changed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A run of pytest."""

    tests: tuple[CaseResult, ...]
    stopped: str | None = None
    """Why not every selected test ran to its end."""
    exit_status: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    """The commit that is checked out."""
    root: str = ""
    """The name of pytest's root directory."""
    seed: int | None = None
    devices: tuple[str, ...] = ()
    base: Base | None = None
    unused: tuple[str, ...] = ()
    """Files of snapshots that no test uses."""
    deleted: tuple[str, ...] = ()
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Why unused files were kept → their paths."""

    def to_json(self) -> str:
        """Return strict JSON, in ASCII."""
        data = {"schema": SCHEMA, "complete": self.stopped is None, **codec.encode(self)}
        return json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Results:
        """Return the results in a file.

        Raises:
            ValueError: They are no results.
            TypeError: A field is missing.
        """
        found: Results = codec.decode(
            cls, {name: part for name, part in data.items() if name not in ("schema", "complete")}
        )
        return found


def verdict(results: Results, causes: int = 0) -> str:
    """Return how a run ended, what is wrong first. Tests pass on both sides although a model changed.

    Args:
        results: The results of the run.
        causes: The number of causes, if it is to be said.

    >>> tests = (CaseResult(id="a", outcome="passed", file="a.py"),)
    >>> verdict(Results(tests=tests))
    'No test failed: 1 test.'
    >>> base = Base(ref="main", commit=None, python=None, said="", verdicts={"unchanged": 10, "changed": 2})
    >>> verdict(Results(tests=tests, base=base), causes=1)
    '2 of 12 models changed beside main, for 1 cause. No test failed: 1 test.'
    """
    tests, base = results.tests, results.base
    failed = sum(test.failed for test in tests)
    compared = "" if base is None else _compared(base)
    is_changed = base is not None and base.verdicts.get("changed", 0) > 0
    wrong = [f"{failed} of {count(len(tests), 'test')} failed"] if failed else []
    wrong += [compared] if is_changed else []
    said = [", and ".join(wrong) + (f", for {count(causes, 'cause')}" if causes else "")] if wrong else []
    said += [compared] if compared and not is_changed else []
    if not failed:
        said.append(f"No test failed: {count(len(tests), 'test')}" if tests else "No test used a probe")
    return " ".join(f"{one}." for one in said)


def _compared(base: Base) -> str:
    side = base.ref or base.python
    compared = sum(base.verdicts.get(one, 0) for one in ("unchanged", "rounding", "changed"))
    if base.stopped or not compared:
        return f"No model was compared with {side}"
    return f"{base.verdicts.get('changed', 0)} of {count(compared, 'model')} changed beside {side}"


def write_text(path: Path, content: str) -> None:
    """Write a file in one step; into a terminal or a pipe, such as /dev/stdout, as it is."""
    if path.exists() and not path.is_file():
        path.write_text(content, "utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    codec.write_atomically(path, content.encode())
