"""A verdict of the gate for other programs: annotations of GitHub Actions, the summary of a step, and JSON.

Actions reads commands from the log of a job, and the names of layers and tests in it are untrusted. So every name is
escaped in our own commands, and commands are switched off while other text is printed. A finding or a cause has the
same words here as in the other formats, so that a script and a reader see the same.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from pathlib import Path
from typing import Any

from pytest_modelprobe.comparison.text import cause_text
from pytest_modelprobe.gate import Finding, SnapshotChange, Verdict, class_of
from pytest_modelprobe.gate.text import finding_text, status, values_not_compared
from pytest_modelprobe.text import json_number, printable

# --- annotations and the summary of GitHub Actions --------------------------------------------------------------------

MOST_ANNOTATIONS = 9
"""How many annotations of one level name a change. GitHub drops those beyond ten; the tenth counts the rest."""


def command(name: str, message: str, **properties: str | int) -> str:
    r"""Return a workflow command.

    >>> command("error", "50 % moved\nsee below", file="a,b.json", line=3)
    '::error file=a%2Cb.json,line=3::50 %25 moved%0Asee below'
    """
    given = ",".join(f"{key}={_property(str(value))}" for key, value in properties.items() if value)
    return f"::{name}{' ' + given if given else ''}::{_data(message)}"


def _data(text: str) -> str:
    shown = "\n".join(printable(line) for line in text.split("\n"))
    return shown.replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return printable(text).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")


def annotation_commands(verdict: Verdict) -> list[str]:
    """Return the annotations: errors for denied changes, and warnings for those that are declared or only warn."""
    lines = []
    denied = verdict.denied
    # A change that was declared is a warning: a reviewer has to see it too.
    declared = [one for one in verdict.changes if one.level == "deny" and one not in denied]
    warned = [one for one in verdict.changes if one.level == "warn" or one in declared]
    for name, changes in (("error", denied), ("warning", warned)):
        lines += [_annotation(name, change) for change in changes[:MOST_ANNOTATIONS]]
        more = len(changes) - MOST_ANNOTATIONS
        if more > 0:
            lines.append(command(name, f"+{more} more: see the summary of this job", title="modelprobe"))
    return lines


def _annotation(name: str, change: SnapshotChange) -> str:
    first = change.findings[0]
    said = "\n".join(printable(f"{finding.kind}: {finding_text(finding, change)}") for finding in change.findings)
    reason = change.reason
    where: dict[str, str | int] = {}
    if change.now is not None:  # A deleted file has no line.
        layer = next((difference.layer for finding in change.findings for difference in finding.differences), None)
        line = 1 if layer is None else line_number_of(change.now.read_text(), layer)
        where = {"file": change.path, "line": line}
    title = printable(f"{change.model}: {first.kind}")
    return command(name, said + (f"\ndeclared: {printable(reason)}" if reason else ""), **where, title=title)


def line_number_of(text: str, layer: str) -> int:
    r"""Return the number of the line, from 1, where a layer stands in an ``.arch.json``; 1 if it does not.

    >>> line_number_of('{"layers": {\n"fc1": {},\n"fc2": {}}}', "fc2")
    3
    """
    # A file may be written with or without escapes for letters that are not ASCII.
    keys = [f"{json.dumps(layer, ensure_ascii=ascii_only)}:" for ascii_only in (True, False)]
    lines = enumerate(text.split("\n"), start=1)
    return next((n for n, line in lines if any(line.lstrip().startswith(key) for key in keys)), 1)


def without_commands(text: str) -> str:
    """Return text for the log of a job, between the commands that switch commands off and on again.

    The text cannot switch them on itself, because it would have to guess a random token.
    """
    token = secrets.token_hex(16)
    return f"::stop-commands::{token}\n{text}\n::{token}::"


def write_summary(path: Path, markdown: str) -> None:
    """Add Markdown to the summary of the step that is running."""
    with path.open("a", encoding="utf-8") as file:
        file.write(markdown + "\n")


# --- JSON -------------------------------------------------------------------------------------------------------------


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
