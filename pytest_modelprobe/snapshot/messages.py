"""The messages of a comparison that failed, each with its next step.

A test that failed is the place where somebody learns how snapshots work. So a message says what changed, gives the
whole command to run next, and says what to do first if an update was refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_modelprobe.assertions.findings import findings
from pytest_modelprobe.comparison import Diagnosis
from pytest_modelprobe.comparison import text as comparison_text
from pytest_modelprobe.gate import needs_reason
from pytest_modelprobe.record import Record, infer_rename, layer_table, renamed
from pytest_modelprobe.text import count, printable

from .options import Policy


def changed(diagnosis: Diagnosis, command: str, next_step: str = "") -> str:
    """Return the message for a record that differs from its snapshot.

    Args:
        diagnosis: The causes.
        command: The shell command that runs the test.
        next_step: What to do before an update that was refused; empty if none was.
    """
    reason = ' --modelprobe-reason="..."' if needs_reason(diagnosis) else ""
    steps = [next_step or f"Intended? {command} --snapshot-update{reason}", f"Since when? git bisect run {command}"]
    if rename := _rename_argument(diagnosis):
        steps.insert(0, f"Only other names? {rename}")
    layer = next((cause.layer for cause in diagnosis.causes if cause.layer in diagnosis.comparison.actual.layers), None)
    if layer is not None:
        steps.append(f"To see its tensors: modelprobe.run(..., keep={layer!r}), then modelprobe.kept[{layer!r}]")
    return "\n\n".join([comparison_text.text(diagnosis), "\n".join(printable(step) for step in steps)])


def one_rank(test: str, rank: int, world_size: int) -> str:
    """Return the message for a record of one rank, given to be compared with a snapshot.

    >>> print(one_rank("test_step", 1, 2))
    test_step: a snapshot holds what all 2 ranks do, and the record is of rank 1 alone
    <BLANKLINE>
    Compare one record of all, in every rank: assert modelprobe.merged(watch) == modelprobe_snapshot
    """
    return (
        f"{test}: a snapshot holds what all {world_size} ranks do, and the record is of rank {rank} alone\n\n"
        "Compare one record of all, in every rank: assert modelprobe.merged(watch) == modelprobe_snapshot"
    )


def _rename_argument(diagnosis: Diagnosis) -> str:
    """Return the ``rename=`` that makes the test pass; empty if no layer was renamed or no globs describe the names."""
    comparison = diagnosis.comparison
    names = {str(d.expected): d.layer for d in comparison.differences if d.kind == "layer renamed"}
    if not names:
        return ""
    found = infer_rename(comparison.actual, renamed(comparison.expected, comparison.names_before.layers), names)
    return f"modelprobe_snapshot(rename={found!r}), and modelprobe.build(..., rename=...) the same" if found else ""


def new(record: Record, name: str, command: str, moves: Sequence[str] = (), next_step: str = "") -> str:
    """Return the message for a record without a snapshot: what was recorded, and how to write it.

    Args:
        record: The record.
        name: The snapshot's name.
        command: The shell command that runs the test.
        moves: Shell commands that rename a snapshot which no test uses and which holds the same record.
        next_step: What to do before an update that was refused; empty if none was.

    >>> print(new(Record(model="Net", forwards=1), "test_x", "pytest t.py::test_x"))
    no snapshot yet for test_x: 0 layers recorded, nothing dead, all finite
    <BLANKLINE>
    no layer was recorded
    <BLANKLINE>
    Right? pytest t.py::test_x --snapshot-update, and commit what it writes.
    """
    no_findings = "nothing dead, all finite" if record.forwards else "structure alone"
    seen = "; ".join(findings(record)) or no_findings
    parts = [
        printable(f"no snapshot yet for {name}: {count(len(record.layers), 'layer')} recorded, {seen}"),
        "\n".join(layer_table(record, most=40)),
    ]
    if moves:
        parts.append("A snapshot that no test uses holds the same record. If the test was renamed, move it:")
        parts[-1] += "".join(f"\n{printable(line)}" for line in moves)
    parts.append(printable(next_step or f"Right? {command} --snapshot-update, and commit what it writes."))
    return "\n\n".join(parts)


def scope_changed(test: str, stored: str, compared: str, policy: Policy) -> str:
    """Return that a snapshot was written to compare another part of the record.

    >>> scope_changed("test_x", "all", "behavior", Policy())
    'test_x compares only the behavior, but its snapshot was written to compare all'
    """
    why = f" ({policy.compare_from})" if policy.compare != "all" and not policy.for_this_run else ""
    now, then = (part if part == "all" else f"only the {part}" for part in (compared, stored))
    return printable(f"{test} compares {now}{why}, but its snapshot was written to compare {then}")


def scope_not_stored(scope_message: str, command: str, next_step: str = "") -> str:
    """Return the message for a comparison of another part than the snapshot was written for."""
    step = next_step or f'Intended? {command} --snapshot-update --modelprobe-reason="..." writes it into the file.'
    return f"{scope_message}\n\nA reviewer has to see in the file what is no longer compared.\n\n{printable(step)}"


def nothing_compared(asked: str, policy: Policy) -> str:
    """Return that the test and an option of the run exclude each other's part.

    >>> print(nothing_compared("behavior", Policy(compare_from="modelprobe_compare = architecture")))
    nothing is compared: the test compares only the behavior, and modelprobe_compare = architecture; remove one
    """
    return f"nothing is compared: the test compares only the {asked}, and {policy.compare_from}; remove one"
