"""What the fixture gives: an object that a record is compared with, and the comparisons of one test."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, cast, get_args

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_modelprobe.assertions.findings import findings
from pytest_modelprobe.comparison import (
    Cause,
    Comparison,
    Diagnosis,
    Parts,
    Tolerance,
    changes_code,
    compare,
    diagnose,
    layers_behind_zeros,
)
from pytest_modelprobe.exceptions import SelectionError, SnapshotError, UsageError
from pytest_modelprobe.files import (
    ARCH,
    PROBE,
    Texts,
    architecture_digest,
    decode,
    encode,
    file_name,
    parsed,
    read,
    read_texts,
    rewritten,
    write,
)
from pytest_modelprobe.gate import superseded
from pytest_modelprobe.record import Glob, Layer, Record, Rerun, applicable_rename, has_numbers, nearest
from pytest_modelprobe.report import comparison as report
from pytest_modelprobe.report.text import count, listed, printable

from . import messages as words
from .extension import ModelProbeExtension, SnapshotFiles, tell
from .forked import Children
from .naming import DEVICES, folder_of, kind, stem_of
from .preconditions import active_dropout, is_training, nondeterministic, nonfinite, structure_of
from .session import SnapshotSession
from .summary import shown_path

Allowed = Literal["dropout", "nonfinite", "nondeterministic"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What one comparison is asked for."""

    name: str | None = None
    tolerance: Tolerance = None
    compare: Parts = "all"
    allow: tuple[Allowed, ...] = ()
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)


class ModelProbeSnapshot:
    """What a record is compared with: ``assert modelprobe.run(model, x) == modelprobe_snapshot``.

    The fixture ``modelprobe_snapshot`` is one. Its files lie beside the test, in ``__modelprobe__``;
    ``pytest --snapshot-update`` writes them. Called, it returns one with other options.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, comparer: Comparer, options: Options) -> None:
        self._comparer = comparer
        self._options = options

    def __call__(
        self,
        name: str | None = None,
        tolerance: Tolerance = None,
        compare: Parts | None = None,
        allow: Allowed | Iterable[Allowed] = (),
        rename: Mapping[str, str] | None = None,
    ) -> ModelProbeSnapshot:
        """Return a snapshot with other options.

        Args:
            name: What tells it from the other snapshots of the test, instead of its number.
            tolerance: Multiplies the change that still counts as the same: a number, or glob of layers → number.
            compare: ``architecture`` (what is exact), ``behavior`` (the numbers), or ``all``.
            allow: What may be recorded although it does not last: ``dropout`` that is active, ``nonfinite`` values, or
                what is ``nondeterministic`` from one run to the next; such values are then not compared.

            rename: Glob of layers → glob of the names that the snapshot has for them; what is inside goes along. Once
                an update has written the new names it says nothing any more.

        Raises:
            UsageError: An option is none of these.
            SelectionError: What ``tolerance`` has is no glob.
        """
        __tracebackhide__ = True
        allowed = (allow,) if isinstance(allow, str) else tuple(allow)
        given = {"name": name, "tolerance": tolerance, "compare": compare, "allow": allowed or None, "rename": rename}
        options = {key: value for key, value in given.items() if value is not None}
        _check(name, compare, allowed)
        _check_tolerance(tolerance)
        _check_rename(rename)
        return ModelProbeSnapshot(self._comparer, dataclasses.replace(self._options, **cast(Any, options)))

    def __eq__(self, other: object) -> bool:
        """Whether a record is as the one on disk; an update makes it so."""
        __tracebackhide__ = True
        outcome = self._comparer.compare(_record(other), self._options, asked_by=sys._getframe(1))
        return outcome.good or cast(bool, _Unequal(outcome))

    def __repr__(self) -> str:
        return f"<modelprobe_snapshot of {self._comparer.name}>"

    @property
    def failure(self) -> str | None:
        """The text of the newest comparison of the test, if it did not turn out equal."""
        return self._comparer.read_failure()


def _check(name: object, compare: object, allow: Iterable[object]) -> None:
    __tracebackhide__ = True
    if name is not None and (not isinstance(name, str) or not 0 < len(name) <= 60):
        raise UsageError(f"name= is a text of 1 to 60 characters; got {name!r}")
    if isinstance(name, str) and (name.isdigit() or name in ("cpu", *DEVICES)):
        raise UsageError(f"name={name!r} is what the snapshots of {name} themselves end in: give another")
    if compare is not None and compare not in get_args(Parts):
        raise UsageError(f"compare= is 'all', 'architecture' or 'behavior'; got {compare!r}")
    unknown = [one for one in allow if one not in get_args(Allowed)]
    if unknown:
        raise UsageError(f"allow= takes {listed([repr(one) for one in get_args(Allowed)])}; got {unknown[0]!r}")


def _check_tolerance(tolerance: Any) -> None:
    """Complain of what is no tolerance in any run, also in one that compares nothing."""
    __tracebackhide__ = True
    each = tolerance.values() if isinstance(tolerance, Mapping) else () if tolerance is None else (tolerance,)
    for times in each:
        if type(times) not in (int, float) or not 0 < times < math.inf:
            raise UsageError(f"tolerance= is a positive number, or one for each glob of layers; got {times!r}")
    for glob in tolerance if isinstance(tolerance, Mapping) else ():
        if not isinstance(glob, str):
            raise UsageError(
                f"tolerance= is a positive number, or one for each glob of layers; got {glob!r} for a glob"
            )
        Glob(glob)


def _check_rename(rename: Any) -> None:
    __tracebackhide__ = True
    texts = isinstance(rename, Mapping) and all(isinstance(t, str) for pair in rename.items() for t in pair)
    if rename is not None and not texts:
        raise UsageError(f"rename= is glob of the layers now → glob of their names in the snapshot; got {rename!r}")


def _check_globs(tolerance: Tolerance, record: Record) -> None:
    """Complain of globs that mean no layer, also where there is nothing yet to compare with."""
    __tracebackhide__ = True
    for glob in tolerance if isinstance(tolerance, Mapping) else ():
        if not any(map(Glob(glob).matches, record.layers)):
            near = nearest(glob, record.layers)
            hint = f"; nearest: {', '.join(map(repr, near))}" if near else ""
            raise SelectionError(f"tolerance: {glob!r} matches none of {count(len(record.layers), 'layer')}{hint}")


def _record(other: object) -> Record:
    """Return the record that is compared; TypeError where it is something else."""
    __tracebackhide__ = True
    if not isinstance(other, Record):
        name = type(other).__name__
        advice = {
            "Watch": "say which forwards: watch.first == modelprobe_snapshot, or watch.record for all of them",
            "ModelProbe": "write modelprobe.record == modelprobe_snapshot",
        }
        how = advice.get(name, "write modelprobe.run(model, ...) == modelprobe_snapshot")
        raise TypeError(f"modelprobe_snapshot compares records, and this is a {name}: {how}")
    if is_training(other):
        raise UsageError(
            f"a record of {other.forwards} forwards and {other.backwards} backwards is not the same elsewhere: where "
            "parameters change in between, one thread more moves the twentieth step by a thousandth. Compare "
            "watch.first"
        )
    return other


_UNEQUAL = ("changed", "new", "unreadable")
"""Verdicts of a record that is not what is on disk."""


@dataclasses.dataclass(eq=False)
class _Outcome:
    """One comparison, and what came of it."""

    place: SnapshotFiles
    record: Record
    rerun: Rerun | None
    asked_by: CodeType
    """The code that compared."""
    line: int
    """The line of its file in which it compared."""
    compare: Parts
    verdict: Literal["same", "changed", "new", "unreadable", "created", "updated", "not compared"] = "same"
    not_compared: str | None = None
    """What the run as a whole leaves out: ``architecture`` or ``behavior``."""
    compared: Parts = "all"
    """What the test compares in every run: what the numbers say of themselves."""
    narrowed: str = ""
    """That the file says something else of what is compared."""
    unknown: int = 0
    """Values that could not be compared."""
    declared: bool = False
    """Whether the reason that was given went into the file."""
    diagnosis: Diagnosis | None = None
    text: str = ""
    looked_at: bool = False
    """Whether the test asked what came of it, by `assert` or otherwise."""

    @property
    def good(self) -> bool:
        """Whether the record is what is on disk, or is there now."""
        return self.verdict not in _UNEQUAL

    def plain(self, item: pytest.Item) -> dict[str, Any]:
        """Return what the reports take along, in builtin types."""
        diagnosis = self.diagnosis
        return {
            "test": item.nodeid,
            "snapshot": shown_path(self.place.arch, item.config),
            "device": kind(self.record.device),
            "verdict": self.verdict,
            "not_compared": self.not_compared,
            "values_not_compared": self.unknown,
            "declared": self.declared,
            "model": self.record.model,
            "layers": len(self.record.layers),
            "findings": findings(self.record) if self.verdict in ("new", "created") else [],
            "first_line": self.text.partition("\n")[0],
            "causes": [_cause_data(*pair) for pair in report.grouped(diagnosis.causes)] if diagnosis else [],
            "possible": [_cause_data(*pair) for pair in report.grouped(diagnosis.possible)] if diagnosis else [],
            "moved": len(diagnosis.moved) if diagnosis else 0,
            "text": self.text,
            "key": str(self.place.probe),
            "arch": str(self.place.arch),
            "probe": "" if self.compare == "architecture" else str(self.place.probe),
        }


class _Unequal:
    """False, and knows whether anybody asked: a comparison that stands alone, without `assert`, asks nobody."""

    def __init__(self, outcome: _Outcome) -> None:
        self._outcome = outcome

    def __bool__(self) -> bool:
        self._outcome.looked_at = True
        return False

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))


def _cause_data(cause: Cause, layers: int) -> dict[str, Any]:
    values = {name: getattr(cause, name) for name in ("actual", "expected", "change", "noise")}
    finite = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return {
        "kind": cause.kind,
        "layer": cause.layer,
        "layers": layers,
        "what": cause.what,
        **finite,
        "evidence": cause.evidence,
        "hints": list(cause.hints),
        "said": report.cause_text(cause),
        "key": words.key(cause),
    }


class Comparer:
    """Compares the records of one test with its files.

    Args:
        request: Of a fixture of function scope.
        session: The snapshots of the whole run.
    """

    def __init__(self, request: pytest.FixtureRequest, session: SnapshotSession) -> None:
        __tracebackhide__ = True
        self._item: pytest.Item = request.node
        self._session, self._policy = session, session.policy
        self._syrupy = _assertion(request)
        self._updates = self._syrupy.update_snapshots
        self._updates_new = self._syrupy.update_new_snapshots_only
        self._outcomes: list[_Outcome] = []
        self._children, self._heard = Children(), 0
        self._unnamed = 0

    @property
    def name(self) -> str:
        """The test's name, to be shown."""
        return printable(self._item.name)

    def failure(self, code: CodeType | None = None) -> str | None:
        """Return the text of the newest comparison, or the newest made by a function, if it was not equal."""
        outcomes = (o for o in reversed(self._outcomes) if code in (None, o.asked_by))
        outcome = next(outcomes, None)
        return None if outcome is None or outcome.good else outcome.text

    def read_failure(self) -> str | None:
        """Return what `failure` does, to a test that so learns of it."""
        for outcome in self._outcomes[-1:]:
            outcome.looked_at = True
        return self.failure()

    def unasserted(self) -> str | None:
        """Return, once, the text of the comparisons that did not turn out equal and whose result nobody asked."""
        unasked = [outcome for outcome in self._outcomes if not (outcome.good or outcome.looked_at)]
        if not unasked:
            return self._unequal_in_children()
        for outcome in unasked:
            outcome.looked_at = True
        lines = listed(list(dict.fromkeys(f"line {outcome.line}" for outcome in unasked)))
        said = f"compared in {lines} but not asserted: write assert ... == modelprobe_snapshot"
        return "\n\n".join([said, *(outcome.text for outcome in unasked)])

    def _unequal_in_children(self) -> str | None:
        """Return, once, what forked processes found: whatever they raised, this one did not hear of it."""
        news = self._children.told[self._heard :]
        self._heard += len(news)
        texts = list(dict.fromkeys(result["text"] for result in news if result["verdict"] in _UNEQUAL))
        return "\n\n".join(["compared in a forked process, and not equal:", *texts]) if texts else None

    def explain(self, call: pytest.CallInfo[None]) -> None:
        """Put the whole text on an assertion's error, whoever rewrites, truncates or bypasses `assert`."""
        if call.excinfo is None or not isinstance(call.excinfo.value, AssertionError):
            return
        error = call.excinfo.value
        text = self.failure(call.excinfo.traceback[-1].frame.code.raw)
        if text is None:
            return
        own, found, _ = str(error).partition(f"assert {text.splitlines()[0]}")
        if found or not str(error):
            error.args = (own + text,)
            call.excinfo = pytest.ExceptionInfo.from_exception(error)  # the old one remembers how the text began

    def results(self) -> list[dict[str, Any]]:
        """Return every comparison in builtin types, those of forked processes too."""
        return [*(outcome.plain(self._item) for outcome in self._outcomes), *self._children.told]

    # --- one comparison -------------------------------------------------------------------------------------------

    def compare(self, record: Record, options: Options, *, asked_by: FrameType) -> _Outcome:
        """Return whether a record is as its snapshot, or was written to it, and all else that came of it."""
        __tracebackhide__ = True
        _check_globs(options.tolerance, record)
        code, line = asked_by.f_code, asked_by.f_lineno
        outcome = _Outcome(self._place(record, options), record, record.rerun, code, line, options.compare)
        parts, outcome.not_compared = _both(options.compare, self._policy.compare)
        always = options.compare if self._policy.for_this_run else parts
        if always is None:
            outcome.verdict, outcome.text = "unreadable", words.nothing_left(options.compare, self._policy)
        elif parts is None:
            outcome.verdict = "not compared"
        else:
            try:
                outcome.compared = always
                self._judge(outcome, options, parts)
            except SnapshotError as error:
                outcome.verdict, outcome.text = "unreadable", printable(str(error))
        self._outcomes.append(outcome)
        self._children.tell(outcome.plain(self._item))
        return outcome

    def _judge(self, outcome: _Outcome, options: Options, parts: Parts) -> None:
        __tracebackhide__ = True
        old, expected, complete = self._expected(outcome, parts)
        if expected is not None:
            known = parts if complete else "architecture"
            diagnosis = _diagnosis(outcome.record, expected, known, options)
            outcome.unknown = diagnosis.comparison.unknown
            if not diagnosis.comparison.same or self._brings_up_to_date(outcome, options, diagnosis):
                outcome.diagnosis = diagnosis
        outcome.narrowed = self._narrowed(outcome, old)
        if old is not None and complete and outcome.diagnosis is None and not outcome.narrowed:
            self._tell_syrupy(outcome, old)
            return
        if outcome.diagnosis:
            outcome.record = outcome.diagnosis.comparison.actual
        is_known = bool(outcome.diagnosis or outcome.narrowed)
        outcome.verdict = "changed" if is_known else "new"
        updating = self._updates or (self._updates_new and outcome.verdict == "new")
        refusal = self._refusal(outcome, options) if updating else None
        new = Texts("", None)
        if updating and refusal is None:
            record = self._measured(outcome, expected)
            refusal = _nondeterministic(record, options)
        if updating and refusal is None:
            new = self._texts(outcome, record, old)
            outcome.verdict = "updated" if is_known else "created"
            outcome.declared = bool(self._policy.reason) and old is not None
        elif self._policy.output:
            folder, root = self._policy.output, self._item.config.rootpath
            there = SnapshotFiles(*(folder / _below(path, root) for path in outcome.place))
            write(there.arch, self._texts(outcome, self._measured(outcome, expected), old), there.probe)
        outcome.text = self._text(outcome, refusal)
        self._tell_syrupy(outcome, new)

    def _brings_up_to_date(self, outcome: _Outcome, options: Options, same: Diagnosis) -> bool:
        """Whether an update has to write attributes that came or went, or names that a test says."""
        other = same.comparison.notes or same.comparison.renamed
        return bool(other) and self._updates and self._refusal(outcome, options) is None

    def _narrowed(self, outcome: _Outcome, old: Texts | None) -> str:
        """Return that the file says that more is compared than is; to an update, that it says something else."""
        if old is None or old.numbers is None or (outcome.compared == "all" and not self._updates):
            return ""
        told = parsed(old.numbers, str(outcome.place.probe)).get("compared", "all")
        return "" if told == outcome.compared else words.narrowed(self.name, told, outcome.compared, self._policy)

    def _expected(self, outcome: _Outcome, parts: Parts) -> tuple[Texts | None, Record | None, bool]:
        """Return the texts of the snapshot, its record, and whether it has all that is to be compared.

        Numbers may be missing, or be those of an older architecture after an update on another device: then there is
        the structure alone.
        """
        arch, probe = outcome.place
        texts = read_texts(arch, probe)
        if texts is None:
            return None, None, False
        data = parsed(texts.architecture, str(arch))
        if parts == "architecture":
            return texts, _structure(data, arch), True
        told = data.get("numbers") is not False
        if not has_numbers(outcome.record):
            if told:
                raise SnapshotError(
                    f"{shown_path(arch, self._item.config)} has numbers, and the record is of the structure alone: "
                    'compare it with modelprobe_snapshot(compare="architecture"), or run the model'
                )
            return texts, _structure(data, arch), True
        old = parsed(texts.numbers, str(probe)).get("architecture") if texts.numbers is not None else None
        fits = old == architecture_digest(texts.architecture)
        if not told or texts.numbers is None or (self._updates and not fits):
            return Texts(texts.architecture, None), _structure(data, arch), False
        return texts, decode(*texts, where=str(arch), numbers_at=str(probe)).record, True

    def _place(self, record: Record, options: Options) -> SnapshotFiles:
        __tracebackhide__ = True
        stem = stem_of(self._item)
        if options.name is not None:
            stem += f".{file_name(options.name)}"
        else:
            self._unnamed += 1
            stem += f".{self._unnamed}" if self._unnamed > 1 else ""
        folder, device = folder_of(self._item.path), kind(record.device)
        place = SnapshotFiles(
            folder / (stem + ARCH), folder / (stem + (f".{device}" if device in DEVICES else "") + PROBE)
        )
        other = self._session.owner(place.arch, self._item)
        if other is not None:
            raise UsageError(
                f"{self._item.nodeid} and {other} would share {place.arch.name} where a file system ignores case: "
                "rename one of the two"
            )
        return place

    def _refusal(self, outcome: _Outcome, options: Options) -> words.Refusal | None:
        """Return why nothing is written although an update was asked for."""
        if not self._policy.writes:
            return words.Refusal(
                "not written, for CI is set: update where you develop and commit the files, or give "
                "--modelprobe-allow-update-in-ci",
                "Update where you develop and commit the files, or give --modelprobe-allow-update-in-ci.",
            )
        if any(other.place == outcome.place and other.verdict in ("created", "updated") for other in self._outcomes):
            return words.Refusal(
                "not written again: the test compares two different records under one name=; give each its own",
                "Give each record its own name=, and run the update again.",
            )
        where = None if "nonfinite" in options.allow else nonfinite(outcome.record)
        if where:
            return words.Refusal(
                f'not written, for {where}; mend it, or say modelprobe_snapshot(allow="nonfinite")',
                'Mend it, or say modelprobe_snapshot(allow="nonfinite"), and run the update again.',
            )
        dropped = None if "dropout" in options.allow else active_dropout(outcome.record)
        if dropped and options.compare != "architecture" and has_numbers(outcome.record):
            return words.Refusal(
                f"not written, for dropout was active: {dropped}; other platforms drop other values. Run in eval mode, "
                'set p to 0, or say modelprobe_snapshot(allow="dropout")',
                'Run in eval mode, set p to 0, or say modelprobe_snapshot(allow="dropout"), and run the update again.',
            )
        return (
            words.not_accepted(outcome.diagnosis, self._policy) if outcome.diagnosis and self._policy.accept else None
        )

    def _measured(self, outcome: _Outcome, expected: Record | None) -> Record:
        """Return what the files should hold: measured, each layer called alone."""
        record = outcome.record
        if outcome.compare == "architecture":
            return structure_of(record)
        if (rerun := outcome.rerun) is None:
            return record
        if not any(call.response for _, call in record.calls):
            record = rerun.isolated(record, like=expected)
        return rerun.measured(record)

    def _texts(self, outcome: _Outcome, record: Record, old: Texts | None) -> Texts:
        """Return the files that hold a record: lines of what changed are new."""
        new = encode(record, compared=outcome.compared)
        if old is None:
            return new
        if self._policy.reason:
            chain = parsed(old.architecture, str(outcome.place.arch)).get("supersedes")
            before, now = architecture_digest(old.architecture), architecture_digest(new.architecture)
            new = encode(
                record, reason=self._policy.reason, supersedes=superseded(chain, before, now), compared=outcome.compared
            )
        found = None if outcome.diagnosis is None else outcome.diagnosis.comparison
        changed = () if found is None else (*(d.layer for d in (*found.differences, *found.notes)), *found.names_before)
        return rewritten(new, old, set(changed))

    def _text(self, outcome: _Outcome, refusal: words.Refusal | None) -> str:
        way_out = refusal.way_out if refusal else ""
        path = os.path.relpath(self._item.path, self._item.config.invocation_params.dir)
        command = "pytest " + shlex.quote(f"{path}::{self._item.nodeid.partition('::')[2]}")
        if outcome.verdict == "created":
            return ""
        if outcome.narrowed and outcome.diagnosis is None:
            text = (
                outcome.narrowed
                if outcome.verdict == "updated"
                else words.to_be_seen(outcome.narrowed, command, way_out)
            )
        elif outcome.diagnosis is None:
            place = outcome.place
            name = self._item.name + place.arch.name.removesuffix(ARCH).removeprefix(stem_of(self._item))
            device = kind(outcome.record.device)
            name += "" if device == "cpu" else f" on {device}"
            text = words.new(outcome.record, name, command, self._moves(outcome), way_out)
        elif outcome.verdict == "updated":
            text = report.text(outcome.diagnosis)
        else:
            text = words.changed(outcome.diagnosis, command, way_out)
            text += f"\n\n{outcome.narrowed}" if outcome.narrowed else ""
        return f"{printable(refusal.said)}\n\n{text}" if refusal else text

    def _moves(self, outcome: _Outcome) -> list[str]:
        """Return how to take along a snapshot without a test that holds just what was recorded, if there is one."""
        place = outcome.place
        for arch in sorted(place.arch.parent.parent.glob(f"*/*{ARCH}")):
            if arch == place.arch or self._session.is_claimed(arch, self._item):
                continue
            old = SnapshotFiles(arch, arch.with_name(arch.name.removesuffix(ARCH) + place.ending))
            try:
                same = compare(outcome.record, read(*old).record, parts=outcome.compare).same
            except SnapshotError:
                continue
            if same:
                folder, pairs = place.arch.parent, zip(old, place, strict=True)
                made = [] if folder.is_dir() else [f"mkdir {self._quoted(folder)}"]
                return made + [f"git mv {self._quoted(a)} {self._quoted(b)}" for a, b in pairs if a.is_file()]
        return []

    def _quoted(self, path: Path) -> str:
        return shlex.quote(shown_path(path, self._item.config))

    def _tell_syrupy(self, outcome: _Outcome, texts: Texts) -> None:
        """Have syrupy write what is to be written, and count."""
        __tracebackhide__ = True
        writing = outcome.verdict in ("created", "updated")
        equal, error = tell(self._syrupy, outcome.place, texts, write=writing)
        if writing and not equal:  # syrupy keeps exceptions to itself
            raise error or SnapshotError(f"{outcome.place.arch} was not written")


def _nondeterministic(record: Record, options: Options) -> words.Refusal | None:
    """Return why a record of a run that did not repeat is not written, unless that is allowed."""
    where = None if "nondeterministic" in options.allow else nondeterministic(record)
    if where is None:
        return None
    return words.Refusal(
        f"not written, for the run is not repeatable: {where} is another when it runs again from the same seed. Draw "
        "random numbers from the global generators of torch, numpy or random, which are seeded, or say "
        'modelprobe_snapshot(allow="nondeterministic")',
        'Draw random numbers from the global generators, or say modelprobe_snapshot(allow="nondeterministic"), and run '
        "the update again.",
    )


def _diagnosis(actual: Record, expected: Record, parts: Parts, options: Options) -> Diagnosis:
    """Return why a record is not as expected, if it is not.

    Only then is each layer called alone, and where it is, those whose code the run may not show.
    """
    __tracebackhide__ = True
    asked = functools.partial(
        compare,
        rename=applicable_rename(options.rename, expected),
        tolerance=options.tolerance,
        parts=parts,
        nondeterministic="nondeterministic" in options.allow,
    )
    found = asked(actual, expected)
    rerun = None if parts == "architecture" else actual.rerun
    if rerun is None:
        return diagnose(found)

    def alone(only: list[str] | None = None) -> Comparison:
        isolated = rerun.isolated(actual, like=found.expected, names=found.names_before, only=only)
        return asked(isolated, expected)

    if found.same:
        behind_zeros = [name for name in layers_behind_zeros(actual) if _has_responses(found.expected.layers[name])]
        if not (behind_zeros and changes_code(diagnose(alone(behind_zeros)))):
            return diagnose(found)
    return diagnose(alone())


def _has_responses(layer: Layer) -> bool:
    return any(call.response is not None for call in layer.calls)


def _structure(data: Mapping[str, Any], arch: Path) -> Record:
    """Return the record of an architecture without its numbers."""
    return decode(json.dumps({**data, "numbers": False}), None, where=str(arch)).record


def _both(asked: Parts, policy: Parts) -> tuple[Parts | None, str | None]:
    """Return what the test and the run as a whole both compare, and what only the test would.

    >>> _both("all", "architecture"), _both("behavior", "architecture"), _both("architecture", "all")
    (('architecture', 'behavior'), (None, 'behavior'), ('architecture', None))
    """
    if asked == policy or policy == "all":
        return asked, None
    if asked == "all":
        return policy, "behavior" if policy == "architecture" else "architecture"
    return None, asked


def _below(path: Path, root: Path) -> Path:
    return path.relative_to(root) if path.is_relative_to(root) else Path(*path.parts[1:])


def _assertion(request: pytest.FixtureRequest) -> SnapshotAssertion:
    """Return syrupy's assertion with our extension."""
    __tracebackhide__ = True
    try:
        found = request.getfixturevalue("snapshot")
    except pytest.FixtureLookupError:
        raise UsageError("modelprobe_snapshot needs the plugin syrupy: run without -p no:syrupy") from None
    if not isinstance(found, SnapshotAssertion):
        owner = type(found).__module__.partition(".")[0]
        raise UsageError(
            f"modelprobe_snapshot needs syrupy's fixture snapshot, and here snapshot is one of {owner}'s: rename that "
            "one, or leave its plugin out with -p no:..."
        )
    return found.use_extension(ModelProbeExtension)
