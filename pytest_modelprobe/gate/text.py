"""The changes between two revisions as text, for the terminal and for every other format.

A refactoring often changes all blocks of a model, or all models of a folder, in the same way. So equal changes of
repeated layers are one line, and equal findings of several snapshots are one row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from pytest_modelprobe.comparison import Cause
from pytest_modelprobe.comparison.text import (
    Row,
    cause_text,
    grouped,
    known_change,
    moved_by,
    percent,
    rows,
)
from pytest_modelprobe.comparison.text import by as changed_by
from pytest_modelprobe.comparison.text import text as diagnosis_text
from pytest_modelprobe.text import Cell, collapsed, count, failure, listed, printable, table

from .classes import DEFAULTS, Class, Effect, class_of
from .verdict import Finding, SnapshotChange, Verdict, part_not_compared


def effect_text(effect: Effect) -> str:
    """Return the effect on old checkpoints, and on the number of parameters.

    >>> effect_text(Effect(reshaped=("fc.weight", "fc.bias"), parameters=150, parameters_before=100))
    '2 keys reshaped: old checkpoints will not load; +50 parameters (+50 %)'
    >>> effect_text(Effect(renamed={"fc.weight": "head.weight"}, parameters=100, parameters_before=100))
    '1 key renamed, fc.weight is head.weight now: old checkpoints need a key mapping'
    """
    parts = []
    counts = {"reshaped": effect.reshaped, "new": effect.added, "gone": effect.removed}
    told = [f"{count(len(keys), 'key')} {how}" for how, keys in counts.items() if keys]
    fatal = bool(told)
    if effect.renamed:
        old, new = next(iter(effect.renamed.items()))
        told.append(f"{count(len(effect.renamed), 'key')} renamed, {old} is {new} now")
    if told:
        # The keys come first: a narrow table leaves out the middle.
        parts.append(f"{', '.join(told)}: old checkpoints {'will not load' if fatal else 'need a key mapping'}")
    if effect.cast:
        parts.append(f"{count(len(effect.cast), 'key')} cast{'' if told else ': old checkpoints load'}")
    if effect.tied:
        parts.append(f"{count(len(effect.tied), 'key')} tied to others than before")
    more = effect.parameters - effect.parameters_before
    if more:
        before = effect.parameters_before
        parts.append(
            "-+"[more > 0] + count(abs(more), "parameter") + (f" ({100 * more / before:+.3g} %)" if before else "")
        )
    return "; ".join(parts)


def finding_text(finding: Finding, change: SnapshotChange) -> str:
    """Return a finding in one line: the effect on checkpoints, or the changed layers."""
    if finding.kind == "new":
        return f"{count(len(change.either.record.layers), 'layer')} recorded"
    if finding.kind == "removed" and change.now is not None and change.before is not None:
        lost = part_not_compared(change.now, change.before)
        if lost and change.now.numbers is not None:
            return f"its {lost} is not compared any more"
        if finding.differences:
            return f"what layers do alone is not compared any more, in {_layers_text(finding)}"
        device = change.either.record.device if change.now.numbers is not None else ""
        now = f"there are those of {device}" if device else "there is the structure alone"
        return f"its numbers are gone: {now}"
    if finding.kind == "removed":
        return "the snapshot is deleted: nothing watches this model any more"
    if finding.kind == "renamed" and not finding.causes and change.before is not None:
        return f"was {change.before.path}"
    if finding.kind == "checkpoint":
        return effect_text(change.effect)
    if finding.kind == "calls":
        return _calls_text(finding, change)
    if change.comparison is None or finding.kind == "format":
        return f"the same architecture{', and numbers within tolerance' * bool(change.either.numbers)}"
    if finding.causes:
        return _causes_text(finding, change)
    if finding.differences and all(d.kind == "noise" for d in finding.differences):
        return f"the noise grew, so that more passes, in {_layers_text(finding)}"
    moved = [d for d in finding.differences if d.change is not None]
    if moved:
        return _layers_text(finding, f" {moved_by(moved, 'up to ')}")
    found = rows(finding.differences, change.comparison.actual, change.comparison.expected)
    return listed([_row_text(row) for row in found], most=2)


def _layers_text(finding: Finding, what: str = "") -> str:
    """Return ``2 layers: fc1 and fc2``, with ``what`` before the colon."""
    layers = list(dict.fromkeys(difference.layer for difference in finding.differences))
    return f"{count(len(layers), 'layer')}{what}: {listed(collapsed(layers))}"


def _calls_text(finding: Finding, change: SnapshotChange) -> str:
    """Return how calls are written now, and how many layers cannot be compared alone because of it."""
    told = [_repeated_cause_text(*pair) for pair in grouped(finding.causes)]
    if not told and change.comparison is not None:
        found = rows(finding.differences, change.comparison.actual, change.comparison.expected)
        told = [_row_text(row) for row in found]
    parts = [listed(told, most=2)]
    parts += ["every value is the same"] * (len(change.findings) == 1)
    alone = {difference.layer for difference in finding.not_comparable}
    parts += [f"{count(len(alone), 'layer')} cannot be compared alone"] * bool(alone)
    return "; ".join(parts)


def _causes_text(finding: Finding, change: SnapshotChange) -> str:
    """Return the causes of a finding, and the change of the output."""
    told = listed([_repeated_cause_text(*pair) for pair in grouped(finding.causes)], most=2)
    diagnosis = change.diagnosis
    if diagnosis is None:
        return told
    if set(finding.causes) <= set(diagnosis.possible):
        told = f"possibly {told}"
    same = diagnosis.unchanged and all(other.kind != "behavior" for other in change.findings)
    if same and finding.kind in ("structure", "renamed"):
        return f"{told}; behavior unchanged"
    by = diagnosis.output if finding.kind == "behavior" else None
    return told if by is None else f"{told}; the model's output changed{changed_by(by)}"


def _repeated_cause_text(cause: Cause, times: int) -> str:
    return cause_text(cause) + (f" x{times}" if times > 1 else "")


def _row_text(row: Row) -> str:
    """Return a row as text."""
    times = f" {row.times}" if row.times else ""
    if row.what in ("layer added", "layer removed"):
        return f"{row.layer} {row.what.removeprefix('layer ')}{times}"
    return f"{row.layer} {row.what} {row.was} → {row.now}{times}"


def status(finding: Finding, change: SnapshotChange) -> str:
    """Return what the gate makes of a finding: ``denied``, ``declared``, ``warning`` or ``allowed``."""
    if finding.level != "deny":
        return {"warn": "warning", "allow": "allowed"}[finding.level]
    return "declared" if change.reason else "denied"


def verdict_line(verdict: Verdict) -> str:
    """Return the verdict in one line.

    >>> verdict_line(Verdict(unchanged=12))
    'no model changed; 12 unchanged'
    """
    otherwise = [(f, change) for change in verdict.changes for f in change.findings if f.kind == "behavior"]
    changed = f"{count(len(verdict.changes), 'model')} changed{f', {len(otherwise)} in behavior' * bool(otherwise)}"
    changed += f", {verdict.unchanged:,} unchanged"
    unknown = sum(values_not_compared(change) for change in verdict.changes)
    changed += f", {count(unknown, 'value')} could not be compared" if unknown else ""
    if verdict.denied:
        worst = verdict.denied[0]
        more = f" ({len(verdict.denied) - 1} more below)" if len(verdict.denied) > 1 else ""
        kind = worst.denied[0].kind
        what = _OF_SNAPSHOTS.get(kind, f"{kind} change") if not worst.denied[0].causes else f"{kind} change"
        return f"{worst.model}: {what} is not declared{more}; {changed}"
    if not verdict.changes:
        return f"no model changed; {verdict.unchanged:,} unchanged"
    without_reason = sum(f.level == "warn" and not change.reason for f, change in otherwise)
    if without_reason:
        have = "has" if without_reason == 1 else "have"
        return f"nothing is denied, but {count(without_reason, 'behavior change')} {have} no reason: {changed}"
    return f"nothing to object: {changed}"


def values_not_compared(change: SnapshotChange) -> int:
    """Return how many values of a snapshot were not compared, because their numbers are not repeatable."""
    return 0 if change.comparison is None else change.comparison.unknown


_OF_SNAPSHOTS: dict[Class, str] = {
    "removed": "removal of its snapshot",
    "renamed": "renaming of its snapshot",
    "new": "new snapshot",
}
"""What the verdict calls changes of a snapshot that are no changes of its model."""


def verdict_rows(verdict: Verdict) -> list[list[Cell]]:
    """Return the cells of `VERDICT_COLUMNS`, the most severe first; equal findings of several models are one row."""
    alike: dict[tuple[str, str, str], list[tuple[Finding, SnapshotChange]]] = {}
    for change in verdict.changes:
        for finding in change.findings:
            key = finding.kind, status(finding, change), _unsized(finding) or finding_text(finding, change)
            alike.setdefault(key, []).append((finding, change))
    rows: list[list[Cell]] = []
    for (kind, judged, _), same in alike.items():
        worst = max(same, key=lambda pair: max((cause.change or 0.0 for cause in pair[0].causes), default=0.0))
        models = listed(list(dict.fromkeys(change.model for _, change in same)))
        rows.append([models, kind, judged, listed([change.path for _, change in same], most=2), finding_text(*worst)])
    return rows


def _unsized(finding: Finding) -> str:
    """Return one key for all findings that all weights changed, by however much; else an empty key."""
    return "all weights" if finding.kind == "weights" and finding.causes and finding.causes[0].is_retraining else ""


VERDICT_COLUMNS = ("model", "class", "verdict", "snapshot", "what changed")


def next_steps(verdict: Verdict) -> list[str]:
    """Return the command that declares the denied changes."""
    if not verdict.denied:
        return []
    stale = [change.path for change in verdict.denied if change.now is not None and change.now.reason]
    steps = [f"The reason in {listed(stale)} was given for another change than this one."] if stale else []
    base = f" --base {verdict.base[:12]}" if verdict.base else ""
    kinds = dict.fromkeys(f.kind for change in verdict.denied for f in change.denied if DEFAULTS[f.kind] != "deny")
    denied = "".join(f" --deny {kind}" for kind in kinds)
    said = "If it is meant, this writes the reason into files, which are to be committed:"
    return [*steps, f'{said}\n  modelprobe declare "..."{base}{denied}']


def reasons(verdict: Verdict) -> list[str]:
    """Return the declared reasons, each once, with their models."""
    given: dict[str, list[str]] = {}
    for change in verdict.changes:
        if change.reason:
            given.setdefault(change.reason, []).append(change.model)
    return [f"Declared for {listed(list(dict.fromkeys(models)))}: {reason}" for reason, models in given.items()]


def verdict_text(verdict: Verdict) -> str:
    """Return the verdict of the gate as plain text."""
    if not verdict.changes:
        return verdict_line(verdict)
    causes = shared_cause_rows(verdict)
    return "\n\n".join(
        [
            failure(verdict_line(verdict), VERDICT_COLUMNS, verdict_rows(verdict), widest=200),
            *(["\n".join(table(SHARED_CAUSE_COLUMNS, causes))] if causes else []),
            *map(printable, reasons(verdict)),
            *("\n".join(printable(line) for line in step.split("\n")) for step in next_steps(verdict)),
        ]
    )


SHARED_CAUSE_COLUMNS = ("cause", "class", "changed by", "models")


def shared_cause_rows(verdict: Verdict) -> list[list[Cell]]:
    """Return the cells of `SHARED_CAUSE_COLUMNS`: a row for each cause, whichever snapshots have it."""
    alike: dict[tuple[str, Class], dict[str, float | None]] = {}
    for sure in (True, False):
        for change in verdict.changes:
            diagnosis = change.diagnosis
            if diagnosis is None:
                continue
            for cause, times in grouped(diagnosis.causes if sure else diagnosis.possible):
                what = "all layers" if cause.is_retraining else cause.what
                said = _repeated_cause_text(dataclasses.replace(cause, change=None, what=what), times)
                said = said if sure else f"possibly {said}"
                models = alike.setdefault((said, class_of(cause, diagnosis)), {})
                models[change.model] = _largest([models.get(change.model), known_change(cause)])
    return [
        [said, kind, percent(_largest(models.values())), listed(list(models))] for (said, kind), models in alike.items()
    ]


def _largest(sizes: Iterable[float | None]) -> float | None:
    largest = max(sizes, key=lambda size: size or 0.0)
    return None if largest == math.inf else largest


NOTE_COLUMNS = ("written otherwise", "layers")


def note_rows(notes: Iterable[Cause]) -> list[list[Cell]]:
    """Return the cells of `NOTE_COLUMNS`. Equal notes of repeated layers are one row."""
    return [[cause_text(note), times] for note, times in grouped(notes)]


def _heading(same: Sequence[SnapshotChange]) -> str:
    models = listed(list(dict.fromkeys(change.model for change in same)))
    return printable(f"{models} ({listed([change.path for change in same], most=2)})")


def diff_parts(verdict: Verdict) -> list[str]:
    """Return the changes and their causes as plain text; those of snapshots that changed alike once."""
    alike: dict[tuple[str, ...], list[SnapshotChange]] = {}
    for change in verdict.changes:
        lines = [printable(f"{kind}: {said}") for kind, said in _whole(change)]
        if change.diagnosis is not None:
            lines.append(diagnosis_text(change.diagnosis))
            if change.diagnosis.notes:
                notes = note_rows(change.diagnosis.notes)
                lines += ["", *table(NOTE_COLUMNS, notes, most=len(notes))]
        alike.setdefault(tuple(lines), []).append(change)
    return ["\n".join([_heading(same), *lines]) for lines, same in alike.items()]


def diff_text(verdict: Verdict) -> str:
    """Return what `diff_parts` returns as one text, and how many snapshots did not change."""
    if not verdict.changes:
        return f"nothing changed in {count(verdict.unchanged, 'snapshot')}"
    unchanged = [f"{count(verdict.unchanged, 'snapshot')} unchanged"] if verdict.unchanged else []
    return "\n\n".join([*diff_parts(verdict), *unchanged])


def _whole(change: SnapshotChange) -> Iterator[tuple[str, str]]:
    """Yield class and text of the findings about a snapshot as a whole."""
    for finding in change.findings:
        if finding.kind in ("checkpoint", "new", "removed") or (finding.kind == "renamed" and not finding.causes):
            yield finding.kind, finding_text(finding, change)
