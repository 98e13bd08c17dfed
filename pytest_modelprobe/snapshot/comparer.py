"""`Comparer`: the comparisons of one test with its snapshots, and what an update writes.

A comparison returns an `Outcome` and raises nothing if the record differs: the test decides with `assert`. So the
comparer keeps every outcome, to explain the assertion, to fail a test that asserts nothing, and to report. All that is
written is read back first: a file that the next run would refuse is never written.

The files on disk may lack numbers, or hold those of another device or of an older architecture. Then the structure
alone is compared, and an update writes the rest.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import pytest

from pytest_modelprobe._pytest import open_raises
from pytest_modelprobe.assertions.findings import findings
from pytest_modelprobe.comparison import (
    Comparison,
    Diagnosis,
    Parts,
    changes_code,
    compare,
    diagnose,
    layers_behind_zeros,
    tolerance_factor,
)
from pytest_modelprobe.comparison import text as comparison_text
from pytest_modelprobe.comparison.text import rows
from pytest_modelprobe.exceptions import NothingObservedError, SnapshotError
from pytest_modelprobe.files import (
    ARCH,
    PROBE,
    RESTORE,
    Texts,
    architecture_digest,
    decode,
    decode_architecture,
    encode,
    file_name,
    is_older,
    parsed,
    read_texts,
    rewritten,
    write,
)
from pytest_modelprobe.gate import needs_reason, source_since, superseded
from pytest_modelprobe.record import (
    CallTree,
    Record,
    applicable_rename,
    has_numbers,
    infer_rename,
    is_narrow,
    layer_table,
    renamed,
    this_rank,
    writing_rank,
)
from pytest_modelprobe.report.results import SnapshotResult
from pytest_modelprobe.text import count, listed, printable

from . import preconditions
from .extension import SnapshotFiles, compare_and_count, syrupy_assertion
from .naming import DEVICES, folder_of, kind, stem_of
from .options import shown_path
from .outcome import Outcome, sources_of
from .preconditions import Refusal
from .session import SnapshotSession
from .snapshot import Arguments

# --- the files: what is read, and what an update writes ---------------------------------------------------------------


class Stored(NamedTuple):
    """A snapshot as it is on disk."""

    texts: Texts | None
    """``None`` if there is no snapshot."""
    record: Record | None
    complete: bool
    """Whether the record has all that is to be compared. If not, it has the structure alone."""


def read_stored(place: SnapshotFiles, record: Record, parts: Parts, *, updating: bool, config: pytest.Config) -> Stored:
    """Return the snapshot that ``record`` is compared with.

    Its numbers may be missing, or belong to an older architecture after an update on another device.
    """
    texts = read_texts(*place)
    if texts is None or (updating and is_older(texts.architecture)):
        return Stored(None, None, complete=False)
    where = str(place.arch)
    stores_numbers = parsed(texts.architecture, where).get("numbers") is not False
    if parts != "architecture" and stores_numbers and not has_numbers(record):
        raise SnapshotError(
            f"{shown_path(place.arch, config)} has numbers, and the record is of the structure alone: compare it "
            'with modelprobe_snapshot(compare="architecture"), or run the model'
        )
    if parts == "architecture" or not has_numbers(record):
        return Stored(texts, decode_architecture(texts.architecture, where=where).record, complete=True)
    if not stores_numbers or texts.numbers is None or (updating and not _fits(texts, place)):
        alone = decode_architecture(texts.architecture, where=where).record
        return Stored(Texts(texts.architecture, None), alone, complete=False)
    decoded = decode(*texts, where=where, numbers_at=str(place.probe))
    return Stored(texts, decoded.record, complete=True)


def _fits(texts: Texts, place: SnapshotFiles) -> bool:
    """Whether the numbers were written with this architecture."""
    if texts.numbers is None or is_older(texts.numbers):
        return False
    old = parsed(texts.numbers, str(place.probe)).get("architecture")
    return bool(old == architecture_digest(texts.architecture))


def texts_to_write(outcome: Outcome, record: Record, old: Texts | None, reason: str | None) -> Texts:
    """Return the texts of a record. What did not change keeps its lines of the old texts."""
    new = encode(record, compared=outcome.compared)
    if old is None:
        return new
    if reason:
        chain = parsed(old.architecture, str(outcome.place.arch)).get("supersedes")
        before, now = architecture_digest(old.architecture), architecture_digest(new.architecture)
        chain = superseded(chain, before, now)
        new = encode(record, reason=reason, supersedes=chain, compared=outcome.compared)
    changed = set() if outcome.diagnosis is None else _changed_layers(outcome.diagnosis.comparison)
    return rewritten(new, old, changed)


def _changed_layers(found: Comparison) -> set[str]:
    """Return the layers whose lines are written anew.

    Layers that call one which has another name, or whose arguments have, are among them: their responses name these.
    """
    names = found.names_before
    renamed = {*names.paths, *names.layers}
    calling = (step.parent for step in CallTree(found.actual).started if step.layer.name in renamed)
    return {
        *(difference.layer for difference in (*found.differences, *found.notes)),
        *names.layers,
        *(step.layer.name for step in calling if step is not None),
    }


def structure_of(record: Record) -> Record:
    """Return a record without its numbers.

    >>> structure_of(Record(model="Net"))
    <Record of Net: 0 layers, 0 forwards, 0 backwards>
    """
    alone = decode_architecture(encode(record).architecture, where="the structure").record
    return dataclasses.replace(alone, notes=record.notes)


# --- the messages of a comparison that failed -------------------------------------------------------------------------


def changed(diagnosis: Diagnosis, command: str, next_step: str = "", source: Sequence[str] = ()) -> str:
    """Return the message for a record that differs from its snapshot.

    Args:
        diagnosis: The causes.
        command: The shell command that runs the test.
        next_step: What to do before an update that was refused; empty if none was.
        source: Lines on what changed in the source of the causes.
    """
    reason = ' --modelprobe-reason="..."' if needs_reason(diagnosis) else ""
    steps = [next_step or f"Intended? {command} --snapshot-update{reason}", f"Since when? git bisect run {command}"]
    if rename := _rename_argument(diagnosis):
        steps.insert(0, f"Only other names? {rename}")
    layer = next((cause.layer for cause in diagnosis.causes if cause.layer in diagnosis.comparison.actual.layers), None)
    if layer is not None:
        steps.append(f"To see its tensors: modelprobe.run(..., keep={layer!r}), then modelprobe.kept[{layer!r}]")
    parts = (comparison_text.text(diagnosis), *(["\n".join(map(printable, source))] if source else []))
    return "\n\n".join([*parts, "\n".join(printable(step) for step in steps)])


def _rename_argument(diagnosis: Diagnosis) -> str:
    """Return the ``rename=`` that makes the test pass; empty if no layer was renamed or no globs describe the names."""
    comparison = diagnosis.comparison
    names = {str(d.expected): d.layer for d in comparison.differences if d.kind == "layer renamed"}
    if not names:
        return ""
    found = infer_rename(comparison.actual, renamed(comparison.expected, comparison.names_before.layers), names)
    return f"modelprobe_snapshot(rename={found!r}), and modelprobe.build(..., rename=...) the same" if found else ""


def new(record: Record, name: str, command: str, next_step: str = "") -> str:
    """Return the message for a record without a snapshot: what was recorded, and how to write it.

    Args:
        record: The record.
        name: The snapshot's name.
        command: The shell command that runs the test.
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
        printable(next_step or f"Right? {command} --snapshot-update, and commit what it writes."),
    ]
    return "\n\n".join(parts)


class Comparer:
    """Compares the records of one test with its files.

    Args:
        request: The request of a fixture of function scope.
        session: The snapshots of the whole run.
    """

    def __init__(self, request: pytest.FixtureRequest, session: SnapshotSession) -> None:
        __tracebackhide__ = True
        self._item: pytest.Item = request.node
        self._session, self._policy = session, session.policy
        self._syrupy = syrupy_assertion(request)
        self._updates = self._syrupy.update_snapshots
        self._updates_new = self._syrupy.update_new_snapshots_only
        self.outcomes: list[Outcome] = []
        """Every comparison of the test."""
        self._unnamed = 0

    # --- the results of the test ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The test's name, printable."""
        return printable(self._item.name)

    def failure(self, code: CodeType | None = None) -> str | None:
        """Return the message of the newest comparison; ``None`` if it was equal.

        Args:
            code: Only comparisons that this function made count.
        """
        outcome = next((o for o in reversed(self.outcomes) if code in (None, o.caller)), None)
        return None if outcome is None or outcome.passed else outcome.text

    def read_failure(self) -> str | None:
        """Return `failure`, and mark the newest comparison as read by the test."""
        for outcome in self.outcomes[-1:]:
            outcome.was_read = True
        return self.failure()

    def unasserted(self) -> str | None:
        """Return the messages of comparisons that were not equal and whose result the test did not use; each once."""
        unread = [outcome for outcome in self.outcomes if not (outcome.passed or outcome.was_read)]
        if not unread:
            return None
        for outcome in unread:
            outcome.was_read = True
        lines = listed(list(dict.fromkeys(f"line {outcome.line}" for outcome in unread)))
        first = f"compared in {lines} but not asserted: write assert ... == modelprobe_snapshot"
        return "\n\n".join([first, *(outcome.text for outcome in unread)])

    def explain(self, call: pytest.CallInfo[None]) -> None:
        """Put the whole message on an `AssertionError` of a comparison.

        pytest truncates the text of an `assert`, and it does not rewrite an `assert` at all with ``--assert=plain`` or
        in a module that was imported before.
        """
        if call.excinfo is None or not isinstance(call.excinfo.value, AssertionError):
            return
        error = call.excinfo.value
        text = self.failure(call.excinfo.traceback[-1].frame.code.raw)  # else the error is of another assertion
        if text is None:
            return
        shown = re.finditer(r"^assert (.*?)(\.\.\.)?$", str(error), re.MULTILINE)
        at = next((line.start() for line in shown if text.startswith(line[1])), None if str(error) else 0)
        if at is not None:
            error.args = (str(error)[:at] + text,)
            call.excinfo = pytest.ExceptionInfo.from_exception(error)  # the old one has cached how the text began

    def results(self) -> list[SnapshotResult]:
        """Return every comparison as reports have it."""
        return [outcome.result(self._item) for outcome in self.outcomes]

    # --- one comparison -------------------------------------------------------------------------------------------

    def compare(self, record: Record, arguments: Arguments, *, caller: FrameType) -> Outcome:
        """Compare a record with its snapshot and return the result. An update writes the record if it differs."""
        __tracebackhide__ = True
        tolerance_factor(arguments.tolerance, record)  # a wrong one is an error also where there is no snapshot yet
        place = self._place(record, arguments)
        outcome = Outcome(place, record, record.live_run, caller.f_code, caller.f_lineno, arguments.compare)
        mine = this_rank()
        # The record is the same in every rank, and the file too: each compares, and the first alone writes.
        is_written_elsewhere = mine.rank and (self._updates or self._updates_new) and not self._why_not_written
        parts, outcome.not_compared = _compared_parts(arguments.compare, self._policy.compare)
        # What the file says that its test compares: an option for one run is no property of the test.
        always = arguments.compare if self._policy.for_this_run else parts
        if always is None:
            outcome.verdict = "unreadable"
            asked = f"the test compares only the {arguments.compare}, and {self._policy.compare_from}"
            outcome.text = f"nothing is compared: {asked}; remove one"
        elif mine.world_size > 1 and record.ranks is None:
            outcome.verdict = "unreadable"
            outcome.text = (
                f"{self.name}: a snapshot holds what all {mine.world_size} ranks do, and the record is of rank "
                f"{mine.rank} alone\n\nCompare one record of all, in every rank: "
                "assert modelprobe.merged(watch) == modelprobe_snapshot"
            )
        elif parts is None or is_written_elsewhere:
            outcome.verdict = "not compared"
        else:
            try:
                outcome.compared = always
                self._judge(outcome, arguments, parts)
            except SnapshotError as error:
                outcome.verdict, outcome.text = "unreadable", printable(str(error))
            except NothingObservedError as error:
                why = "" if self._policy.compare == "all" else f" ({self._policy.compare_from})"
                outcome.verdict, outcome.text = "unreadable", f"{error}{why}"
        if not outcome.passed:
            outcome.raises = open_raises()
        self.outcomes.append(outcome)
        return outcome

    @property
    def _why_not_written(self) -> Refusal | None:
        """Why an update must not write in this process, whatever the record; ``None`` if it may."""
        if not self._policy.may_write:
            return preconditions.UPDATE_IN_CI
        processes = writing_rank().world_size
        if processes > this_rank().world_size:
            return preconditions.without_process_group(processes)
        return None

    def _place(self, record: Record, arguments: Arguments) -> SnapshotFiles:
        __tracebackhide__ = True
        stem = stem_of(self._item)
        if arguments.name is not None:
            stem += f".{file_name(arguments.name)}"
        else:
            self._unnamed += 1
            stem += f".{self._unnamed}" if self._unnamed > 1 else ""
        folder, device = folder_of(self._item.path), kind(record.device)
        suffix = f".{device}" if device in DEVICES else ""
        return SnapshotFiles(folder / f"{stem}{ARCH}", folder / f"{stem}{suffix}{PROBE}")

    def _judge(self, outcome: Outcome, arguments: Arguments, parts: Parts) -> None:
        __tracebackhide__ = True
        config = self._item.config
        updating = self._updates and self._policy.may_write
        stored = read_stored(outcome.place, outcome.record, parts, updating=updating, config=config)
        if stored.record is not None:
            known = parts if stored.complete else "architecture"
            # Without numbers nobody knows whether every value is the same.
            known_by_numbers = known != "architecture" and has_numbers(outcome.record)
            strict = arguments.strict or self._policy.strict or not known_by_numbers
            diagnosis = _diagnosis(outcome.record, stored.record, known, arguments, strict=strict)
            outcome.values_not_compared = diagnosis.comparison.unknown
            outcome.expected = diagnosis.comparison.expected
            outcome.notes = diagnosis.notes
            stale_fails = bool(diagnosis.notes) and self._policy.stale_fails and not self._updates
            if not diagnosis.same or stale_fails or self._updates_notes(outcome, arguments, diagnosis):
                outcome.diagnosis = diagnosis
        outcome.scope_message = self._scope_message(outcome, stored.texts)
        if stored.texts is not None and stored.complete and outcome.diagnosis is None and not outcome.scope_message:
            self._count(outcome, stored.texts)
            return
        if outcome.diagnosis:
            outcome.record = outcome.diagnosis.comparison.actual
        self._handle_difference(outcome, arguments, stored)

    def _updates_notes(self, outcome: Outcome, arguments: Arguments, same: Diagnosis) -> bool:
        """Whether an update has to write a record that is the same: it has notes, or other names by ``rename=``."""
        other = same.comparison.notes or same.notes or same.comparison.renamed
        return bool(other) and self._updates and self._refusal(outcome, arguments) is None

    def _scope_message(self, outcome: Outcome, old: Texts | None) -> str:
        """Return a message if the file was written to compare another part; empty if it was not.

        To compare all of a file that was written for a part fails no test; only an update says so and writes it.
        """
        if old is None or old.numbers is None or (outcome.compared == "all" and not self._updates):
            return ""
        stored = parsed(old.numbers, str(outcome.place.probe)).get("compared", "all")
        if stored == outcome.compared:
            return ""
        policy = self._policy
        why = f" ({policy.compare_from})" if policy.compare != "all" and not policy.for_this_run else ""
        now, then = (part if part == "all" else f"only the {part}" for part in (outcome.compared, stored))
        return printable(f"{self.name} compares {now}{why}, but its snapshot was written to compare {then}")

    def _handle_difference(self, outcome: Outcome, arguments: Arguments, stored: Stored) -> None:
        """Write the record if an update may, or else into ``--modelprobe-output``; set verdict and message."""
        __tracebackhide__ = True
        is_known = bool(outcome.diagnosis or outcome.scope_message)
        outcome.verdict = "changed" if is_known else "new"
        updating = self._updates or (self._updates_new and outcome.verdict == "new")
        refusal = self._refusal(outcome, arguments) if updating else None
        new = Texts("", None)
        if updating and refusal is None:
            record = _record_to_write(outcome, stored.record)
            refusal = preconditions.refuse_nondeterministic(record, arguments)
        if updating and refusal is None:
            new = self._texts_read_back(outcome, arguments, record, stored)
            outcome.verdict = "updated" if is_known else "created"
            outcome.declared = bool(self._policy.reason) and stored.texts is not None
        elif self._policy.output and not writing_rank().rank:
            self._write_output(outcome, arguments, stored, self._policy.output)
        outcome.text = self._text(outcome, refusal)
        self._count(outcome, new)

    def _refusal(self, outcome: Outcome, arguments: Arguments) -> Refusal | None:
        """Return why an update must not write the record; ``None`` if it may."""
        if (refusal := self._why_not_written) is not None:
            return refusal
        if any(other.place == outcome.place and other.verdict in ("created", "updated") for other in self.outcomes):
            return preconditions.WRITTEN_TWICE
        refusal = preconditions.refuse_record(outcome.record, arguments)
        if refusal is None and outcome.diagnosis is not None and self._policy.accept < math.inf:
            refusal = preconditions.refuse_causes(outcome.diagnosis, self._policy.accept)
        return refusal

    def _write_output(self, outcome: Outcome, arguments: Arguments, stored: Stored, folder: Path) -> None:
        root = self._item.config.rootpath
        target = SnapshotFiles(*(folder / _relative(path, root) for path in outcome.place))
        record = _record_to_write(outcome, stored.record)
        write(target.arch, self._texts_read_back(outcome, arguments, record, stored), target.probe)

    def _texts_read_back(self, outcome: Outcome, arguments: Arguments, record: Record, stored: Stored) -> Texts:
        """Return the texts of a record, after they were read back and compared with it.

        Raises:
            SnapshotError: The next run would refuse them. No file was touched.
        """
        texts = texts_to_write(outcome, record, stored.texts, self._policy.reason)
        try:
            back = decode(*texts, where=outcome.place.arch.name, numbers_at=outcome.place.probe.name).record
            found = _comparison(record, back, outcome.compared, arguments, strict=True)
        except (SnapshotError, NothingObservedError) as error:
            why = str(error).removesuffix(f": {RESTORE}")
        else:
            if found.same:
                return texts
            row = rows(found.differences, record, back)[0]
            why = " ".join(("as it would be read again,", row.layer, row.what, row.now or "differs"))
        raise SnapshotError(f"{outcome.place.arch} is not written, for the next run would refuse it: {why}")

    def _count(self, outcome: Outcome, texts: Texts) -> None:
        """Let syrupy count the comparison; in an update, syrupy writes the files."""
        __tracebackhide__ = True
        writing = outcome.verdict in ("created", "updated")
        equal, error = compare_and_count(self._syrupy, outcome.place, texts, write=writing)
        if writing and not equal:  # syrupy keeps exceptions to itself
            raise error or SnapshotError(f"{outcome.place.arch} was not written")

    # --- its message ----------------------------------------------------------------------------------------------

    def _text(self, outcome: Outcome, refusal: Refusal | None) -> str:
        if outcome.verdict == "created":
            return ""
        if outcome.verdict == "updated":
            return comparison_text.text(outcome.diagnosis) if outcome.diagnosis else outcome.scope_message
        text = self._failure_text(outcome, refusal.next_step if refusal else "")
        return f"{printable(refusal.message)}\n\n{text}" if refusal else text

    def _failure_text(self, outcome: Outcome, next_step: str) -> str:
        path = os.path.relpath(self._item.path, self._item.config.invocation_params.dir)
        command = "pytest " + shlex.quote(f"{path}::{self._item.nodeid.partition('::')[2]}")
        if outcome.diagnosis is not None:
            source = source_since(outcome.diagnosis, sources_of(outcome.record), outcome.place.arch)
            text = changed(outcome.diagnosis, command, next_step, source)
            return f"{text}\n\n{outcome.scope_message}" if outcome.scope_message else text
        if outcome.scope_message:
            update = f'{command} --snapshot-update --modelprobe-reason="..."'
            step = next_step or f"Intended? {update} writes it into the file."
            return (
                f"{outcome.scope_message}\n\nA reviewer has to see in the file what is no longer compared.\n\n"
                f"{printable(step)}"
            )
        name = self._item.name + outcome.place.arch.name.removesuffix(ARCH).removeprefix(stem_of(self._item))
        device = kind(outcome.record.device)
        name += "" if device == "cpu" else f" on {device}"
        return new(outcome.record, name, command, next_step)


def _diagnosis(actual: Record, expected: Record, parts: Parts, arguments: Arguments, *, strict: bool) -> Diagnosis:
    """Return why a record differs from the expected one, if it does.

    Modules are called in isolation only if the record differs, or if zeros may hide a change of code: behind a factor
    of zero every output is the same, and half precision rounds away what code alone shows. Another run whose record is
    the same is not slowed down.
    """
    __tracebackhide__ = True
    found = _comparison(actual, expected, parts, arguments, strict=strict)
    live_run = None if parts == "architecture" else actual.live_run
    if live_run is None:
        return diagnose(found)

    def isolated(only: list[str] | None = None) -> Comparison:
        record = live_run.isolated(actual, like=found.expected, names=found.names_before, only=only)
        return _comparison(record, expected, parts, arguments, strict=strict)

    if found.same and not is_narrow(actual):
        layers = found.expected.layers
        behind_zeros = [n for n in layers_behind_zeros(actual) if any(c.response is not None for c in layers[n].calls)]
        if not (behind_zeros and changes_code(diagnose(isolated(behind_zeros)))):
            return diagnose(found)
    return diagnose(isolated())


def _comparison(actual: Record, expected: Record, parts: Parts, arguments: Arguments, *, strict: bool) -> Comparison:
    __tracebackhide__ = True
    return compare(
        actual,
        expected,
        rename=applicable_rename(arguments.rename, expected),
        tolerance=arguments.tolerance,
        parts=parts,
        nondeterministic="nondeterministic" in arguments.allow,
        strict=strict,
    )


def _record_to_write(outcome: Outcome, expected: Record | None) -> Record:
    """Return the record that is written: with its noise measured, and with the response of each layer in isolation.

    Without a live run there is nothing to measure. A test that compares the architecture gets the structure alone.
    """
    record = outcome.record
    if outcome.compare == "architecture":
        return structure_of(record)
    if (live_run := outcome.live_run) is None:
        return record
    # Responses made for a diagnosis are to the arguments of the expected calls, by their names.
    return live_run.measured(record, expected or record)


def _compared_parts(asked: Parts, policy: Parts) -> tuple[Parts | None, str | None]:
    """Return the part that the test and the run both compare, and the part that the run leaves out.

    >>> _compared_parts("all", "architecture"), _compared_parts("behavior", "architecture")
    (('architecture', 'behavior'), (None, 'behavior'))
    >>> _compared_parts("architecture", "all")
    ('architecture', None)
    """
    if asked == policy or policy == "all":
        return asked, None
    if asked == "all":
        return policy, "behavior" if policy == "architecture" else "architecture"
    return None, asked


def _relative(path: Path, root: Path) -> Path:
    return path.relative_to(root) if path.is_relative_to(root) else Path(*path.parts[1:])
