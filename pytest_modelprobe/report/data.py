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
    changes = []
    for change in verdict.changes:
        causes: list[dict[str, str]] = []
        notes: list[dict[str, str]] = []
        diagnosis = change.diagnosis
        if diagnosis is not None:
            for cause in (*diagnosis.causes, *diagnosis.possible):
                said = {"kind": cause.kind, "class": class_of(cause, diagnosis), "layer": cause.layer}
                causes.append({**said, "said": cause_text(cause)})
            for possible in causes[len(diagnosis.causes) :]:
                possible["sure"] = "no"
            notes += ({"kind": note.kind, "layer": note.layer, "said": cause_text(note)} for note in diagnosis.notes)
        changes.append(
            {
                "snapshot": change.path,
                "before": None if change.before is None else change.before.path,
                "model": change.model,
                "device": change.either.record.device,
                "reason": change.reason,
                "not_compared": values_not_compared(change),
                "findings": [_finding_data(finding, change) for finding in change.findings],
                "causes": causes,
                "notes": notes,
            }
        )
    denied = [change.path for change in verdict.denied]
    return {"denied": denied, "unchanged": verdict.unchanged, "changes": changes}


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
