"""A verdict of the gate as plain data: the JSON of `modelprobe check` and `modelprobe diff`.

A finding or a cause has the same words here as in the other formats, so that a script and a reader see the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pytest_modelprobe.comparison.text import cause_text
from pytest_modelprobe.gate import Finding, SnapshotChange, Verdict, class_of
from pytest_modelprobe.gate.text import finding_text, status, values_not_compared
from pytest_modelprobe.text import json_number


def as_data(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain dicts, lists, numbers and strings that strict JSON can hold."""
    return {
        "denied": [change.path for change in verdict.denied],
        "unchanged": verdict.unchanged,
        "changes": [
            {
                "snapshot": change.path,
                "before": None if change.before is None else change.before.path,
                "model": change.model,
                "device": change.either.record.device,
                "reason": change.reason,
                "not_compared": values_not_compared(change),
                "findings": [_finding_data(finding, change) for finding in change.findings],
                "causes": _causes(change),
                "notes": _notes(change),
            }
            for change in verdict.changes
        ],
    }


def _finding_data(finding: Finding, change: SnapshotChange) -> dict[str, Any]:
    differences = map(dataclasses.asdict, finding.differences)
    return {
        "class": finding.kind,
        "verdict": status(finding, change),
        "said": finding_text(finding, change),
        "differences": [
            {key: json_number(value) for key, value in fields.items() if value not in (None, "")}
            for fields in differences
        ],
    }


def _causes(change: SnapshotChange) -> list[dict[str, str]]:
    diagnosis = change.diagnosis
    if diagnosis is None:
        return []
    found = [
        {"kind": cause.kind, "class": class_of(cause, diagnosis), "layer": cause.layer, "said": cause_text(cause)}
        for cause in (*diagnosis.causes, *diagnosis.possible)
    ]
    for cause in found[len(diagnosis.causes) :]:
        cause["sure"] = "no"
    return found


def _notes(change: SnapshotChange) -> list[dict[str, str]]:
    """Return what is written otherwise."""
    notes = () if change.diagnosis is None else change.diagnosis.notes
    return [{"kind": note.kind, "layer": note.layer, "said": cause_text(note)} for note in notes]
