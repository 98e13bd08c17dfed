"""What one test recorded and compared, as plain data for its report.

A comparison belongs to the run whose record it has, so that a report can show both at one place. A record that cannot
be shown becomes an entry with its error: a report must not end the run of pytest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from pytest_modelprobe.comparison import Diagnosis
from pytest_modelprobe.record import Record

from .run import Kind, failed_run, run_data
from .values import builtin

_HIDDEN = ("key", "arch", "probe")  # absolute paths


@dataclasses.dataclass(frozen=True, slots=True)
class Observed:
    """A run or watch of a test."""

    name: str
    kind: Kind
    record: Record | None
    """The record, or `None` if it could not be made."""
    error: str = ""
    """Why the record could not be made."""
    steps: Sequence[Record] = ()
    """The records of the steps of training, if it is a watch that keeps several."""
    findings: Sequence[str] = ()
    """The findings of other plugins."""


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """A comparison of a record with a snapshot."""

    record: Record
    """The record, as the test gave it."""
    diagnosis: Diagnosis | None
    """The causes, or `None` if nothing differs or there was no snapshot."""
    expected: Record | None
    """The record in the snapshot, with the current names of layers."""


def observed_data(
    observed: Iterable[Observed],
    compared: Sequence[Compared],
    results: Iterable[dict[str, Any]],
    figures: Sequence[dict[str, str]] = (),
) -> dict[str, Any]:
    """Return the runs, snapshots and figures of a test in builtin types.

    A record that was compared and is that of no run, such as the first forward of a watch, is a run of its own.

    Args:
        observed: Runs and watches.
        compared: Comparisons.
        results: What `Outcome.to_dict` returned for each, followed by those of other processes.
        figures: What `ModelProbe.take_figures` returned.
    """
    sources = list(observed)
    places = []
    for one in compared:
        place = next((i for i, source in enumerate(sources) if source.record is one.record), None)
        if place is None:
            place = len(sources)
            sources.append(Observed(one.record.model, "run", one.record))
        places.append(place)
    runs = []
    for i, source in enumerate(sources):
        if source.record is None:
            runs.append(failed_run(source.name, source.kind, source.error))
            continue
        mine = [one for one, place in zip(compared, places, strict=True) if place == i]
        # The first that differs; else the first.
        one = min(mine, key=lambda one: one.diagnosis is None, default=Compared(source.record, None, None))
        try:
            runs.append(
                run_data(
                    source.record,
                    name=source.name,
                    kind=source.kind,
                    diagnosis=one.diagnosis,
                    expected=one.expected,
                    steps=source.steps,
                    others=source.findings,
                )
            )
        except Exception as error:  # noqa: BLE001 - a record that cannot be shown must not end the run of pytest
            runs.append(failed_run(source.name, source.kind, f"{type(error).__name__}: {error}"))
    snapshots = [{**builtin({k: v for k, v in result.items() if k not in _HIDDEN}), "run": None} for result in results]
    for snapshot, place in zip(snapshots, places, strict=False):  # others have no record here
        snapshot["run"] = place
    return {"runs": runs, "snapshots": snapshots, "figures": [builtin(one) for one in figures]}
