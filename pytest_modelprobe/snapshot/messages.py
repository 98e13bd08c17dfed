"""What a comparison that did not turn out equal says: the text of the failure, the next steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pytest_modelprobe.assertions.findings import findings
from pytest_modelprobe.comparison import Cause, Diagnosis
from pytest_modelprobe.gate import needs_reason
from pytest_modelprobe.record import Record, infer_rename, renamed
from pytest_modelprobe.report import comparison as report
from pytest_modelprobe.report.text import count, layer_table, printable

from .options import Policy


class Refusal(NamedTuple):
    """Why an update wrote nothing."""

    said: str
    """One sentence, with the way out."""
    way_out: str = ""
    """What to do before the update is run again; empty: it is to be run with other options."""


def changed(diagnosis: Diagnosis, command: str, way_out: str = "") -> str:
    """Return the text of a record that is not as it was; ``command`` runs the test, its update was refused or not."""
    named = _other_names(diagnosis)
    reason = ' --modelprobe-reason="..."' if needs_reason(diagnosis) else ""
    steps = [way_out or f"Intended? {command} --snapshot-update{reason}", f"Since when? git bisect run {command}"]
    if named:
        steps.insert(0, f"Only other names? {named}")
    layer = next((cause.layer for cause in diagnosis.causes if cause.layer in diagnosis.comparison.actual.layers), None)
    if layer is not None:
        steps.append(f"To see its tensors: modelprobe.run(..., keep={layer!r}), then modelprobe.kept[{layer!r}]")
    return "\n\n".join([report.text(diagnosis), "\n".join(printable(step) for step in steps)])


def _other_names(diagnosis: Diagnosis) -> str:
    """Return how a test says that layers have other names alone; empty where none has, or no rule says it."""
    comparison = diagnosis.comparison
    names = {str(d.expected): d.layer for d in comparison.differences if d.kind == "layer renamed"}
    found = (
        infer_rename(comparison.actual, renamed(comparison.expected, comparison.names_before), names) if names else {}
    )
    return f"modelprobe_snapshot(rename={found!r}), and modelprobe.build(..., rename=...) the same" if found else ""


def new(record: Record, name: str, command: str, moves: Sequence[str] = (), way_out: str = "") -> str:
    """Return the text of a record that has no snapshot yet: what was recorded, and how to keep it.

    Where that was refused, the last line is the way out.

    >>> print(new(Record(model="Net", forwards=1), "test_x", "pytest t.py::test_x"))
    no snapshot yet for test_x: 0 layers recorded, nothing dead, all finite
    <BLANKLINE>
    no layer was recorded
    <BLANKLINE>
    Right? pytest t.py::test_x --snapshot-update, and commit what it writes.
    """
    all_well = "nothing dead, all finite" if record.forwards else "structure alone"
    seen = "; ".join(findings(record)) or all_well
    parts = [
        printable(f"no snapshot yet for {name}: {count(len(record.layers), 'layer')} recorded, {seen}"),
        "\n".join(layer_table(record, most=40)),
    ]
    if moves:
        parts.append("A snapshot without a test holds just this. Was the test renamed? Then take it along:")
        parts[-1] += "".join(f"\n{printable(line)}" for line in moves)
    parts.append(printable(way_out or f"Right? {command} --snapshot-update, and commit what it writes."))
    return "\n\n".join(parts)


def narrowed(test: str, told: str, compared: str, policy: Policy) -> str:
    """Return that a snapshot says that something else is compared than is.

    >>> narrowed("test_x", "all", "behavior", Policy())
    'test_x compares the behavior alone, and its snapshot says that it compares all'
    """
    why = f" ({policy.compare_from})" if policy.compare != "all" and not policy.for_this_run else ""
    now, then = (part if part == "all" else f"the {part} alone" for part in (compared, told))
    return printable(f"{test} compares {now}{why}, and its snapshot says that it compares {then}")


def to_be_seen(narrowed: str, command: str, way_out: str = "") -> str:
    """Return the text of a comparison of which the file says something else."""
    step = way_out or f'Intended? {command} --snapshot-update --modelprobe-reason="..." writes it into the file.'
    return f"{narrowed}\n\nWhoever reviews a change has to see what is not compared any more.\n\n{printable(step)}"


def nothing_left(asked: str, policy: Policy) -> str:
    """Return that test and ini file together compare nothing.

    >>> print(nothing_left("behavior", Policy(compare_from="modelprobe_compare = architecture")))
    nothing is compared: the test asks for the behavior alone, and modelprobe_compare = architecture; leave one out
    """
    return f"nothing is compared: the test asks for the {asked} alone, and {policy.compare_from}; leave one out"


def not_accepted(diagnosis: Diagnosis, policy: Policy) -> Refusal | None:
    """Return which causes are not among those that an update takes over; None if all are."""
    causes = [*diagnosis.causes, *diagnosis.possible]
    if diagnosis.comparison.same:  # attributes that came or went, and names that the test says
        return None
    if not causes:
        return Refusal(f"not written: the cause cannot be told, so {policy.accept_from} does not cover it")

    def covered(cause: Cause) -> bool:
        return any(a.covers(cause.kind, cause.change, unchanged=diagnosis.unchanged) for a in policy.accept)

    others = [cause for cause in causes if not covered(cause)]
    if not others:
        return None
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    first = f"{report.cause_text(others[0])} ({others[0].kind})"
    why = "" if diagnosis.output is None else f": the output changed by {report.percent(diagnosis.output)}"
    return Refusal(f"not written: {first}{more} is not covered by {policy.accept_from}{why}")


def key(cause: Cause) -> str:
    """Return what a cause has in common with the same cause in another test."""
    return "|".join(map(str, (cause.kind, cause.layer, cause.what, cause.actual, cause.expected)))
