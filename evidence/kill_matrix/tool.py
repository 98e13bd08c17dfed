"""The tool as a test uses it: a record measured, isolated and stored as text; later another judged against it."""

from __future__ import annotations

import fnmatch
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from faults import Answer, Cause, Trial
from torch import nn

from pytest_modelprobe import ModelProbe, files
from pytest_modelprobe.comparison import Diagnosis, diagnose, diagnosis
from pytest_modelprobe.comparison.compare import compare
from pytest_modelprobe.record import Record

_PROBES: WeakKeyDictionary[nn.Module, list[ModelProbe]] = WeakKeyDictionary()


def record(trial: Trial, loss: Any = "own") -> Record:
    """Run the model as a test does."""
    # The probe keeps what a run needs to be repeated, and is kept as long as the model.
    probe = ModelProbe(seed=trial.seed)
    _PROBES.setdefault(trial.model, []).append(probe)
    return probe.run(trial.model, *trial.inputs, loss=trial.loss if loss == "own" else loss)


def snapshot(record: Record) -> Record:
    """Return what a later test finds in the files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot.arch.json")
        write(path, record)
        return read(path)


def write(path: Path, record: Record) -> None:
    """Write the two files, as an update does."""
    assert record.live_run is not None
    files.write(path, files.encode(record.live_run.measured(record, record)))


def read(path: Path) -> Record:
    """Return the record in the two files."""
    return files.read(path).record


def judge(actual: Record, expected: Record, rename: Mapping[str, str] | None = None) -> Diagnosis:
    """Return what a failing test says. Only where the run differs is each layer called alone."""
    found = compare(actual, expected, rename=rename)
    if not found.same:
        assert actual.live_run is not None
        actual = actual.live_run.isolated(actual, like=found.expected, names=found.names_before)
        found = compare(actual, expected, rename=rename)
    return diagnose(found)


# --- is it right? -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """A diagnosis, held against what was planted."""

    detected: bool
    exact: bool
    """Every planted fault is named, and nothing else."""
    named: tuple[bool, ...]
    """For each planted fault, whether it is named."""
    invented: tuple[str, ...]
    """Causes that no planted fault explains."""
    witnesses: tuple[str, ...]
    place: bool | None
    """Whether the place in the code is right too; None: none is expected or said."""
    said: tuple[str, ...]
    possible: tuple[str, ...]


def means(said: diagnosis.Cause, cause: Cause) -> bool:
    """Whether a cause that was said is one that is true."""
    pairs = ((said.kind, cause.kind), (said.layer, cause.layer), (said.what, cause.what))
    return all(fnmatch.fnmatchcase(a, b) for a, b in pairs)


def told(cause: diagnosis.Cause | Cause) -> str:
    return f"{cause.kind} {cause.layer} {cause.what}".strip()


def verdict(diagnosis: Diagnosis, answers: list[Answer], background: tuple[Cause, ...] = ()) -> Verdict:
    """Hold a diagnosis against the answers of what was planted; ``background`` is true besides."""
    named, witnesses, places = [], [], []
    for answer in answers:
        saying = [said for said in diagnosis.causes if any(means(said, cause) for cause in answer.says)]
        named.append(bool(saying))
        witnesses += [said.evidence for said in saying[:1]]
        if answer.place is not None and saying and saying[0].kind == "computation" and saying[0].what:
            places.append(saying[0].what == between(*answer.place))
    true = [cause for answer in answers for cause in (*answer.says, *answer.also)] + list(background)
    invented = [told(said) for said in diagnosis.causes if not any(means(said, cause) for cause in true)]
    return Verdict(
        detected=not diagnosis.same,
        exact=all(named) and not invented,
        named=tuple(named),
        invented=tuple(invented),
        witnesses=tuple(witnesses),
        place=all(places) if places else None,
        said=tuple(told(said) for said in diagnosis.causes),
        possible=tuple(told(said) for said in diagnosis.possible),
    )


def between(before: str, after: str) -> str:
    """Return how a place in the code is said."""
    if not before or not after:
        return f"after {before}" if before else f"before {after}"
    return f"between {before} and {after}"
