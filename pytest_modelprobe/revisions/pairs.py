"""Records of the two sides: written to files, read, compared, and the result in words."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pytest_modelprobe.comparison import Comparison, Diagnosis, Parts, Precision, compare, diagnose, explained
from pytest_modelprobe.comparison import text as comparison_text
from pytest_modelprobe.gate import Hunk, changed_methods, source_lines
from pytest_modelprobe.record import Record, has_numbers, is_narrow
from pytest_modelprobe.text import count, listed, pattern, printable

# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a record in a file before it is decoded."""

    model: str
    device: str
    has_run: bool
    """Whether there was a forward."""
    layers: int
    names: str
    """The same for records with the same names of layers."""
    digest: str
    """The same for records that are equal."""


class Written:
    """A record that a test made, as it was written. One that was read is decoded when it is asked for.

    Args:
        test: The node id.
        key: Which record of the test: ``run 1``, ``architecture 2``, ``watch 1``, or class and number of a model.
        record: The record, or the file that holds it.
        sources: The modules of Python that the classes of the model are from → their files.
        evidence: Whether the record has what a diagnosis needs, as one that differs from that of the other side has.
        only: The layers that alone have it; empty: all.
        head: What is known of a record in a file.
        own_paths: Folders that this side alone has. They are not written.
        explained: What extras say of the record.
    """

    def __init__(
        self,
        test: str,
        key: str,
        record: Record | Path,
        sources: Mapping[str, str] = MappingProxyType({}),
        evidence: bool = False,
        *,
        only: Sequence[str] = (),
        head: Head | None = None,
        own_paths: Sequence[str] = (),
        explained: Sequence[str] = (),
    ) -> None:
        self.test, self.key, self.sources, self.evidence = test, key, sources, evidence
        self.only, self.explained = only, explained
        self._record, self._head, self._own_paths = record, head, own_paths

    @functools.cached_property
    def record(self) -> Record:
        """The record."""
        if isinstance(self._record, Record):
            return self._record
        return Record.from_dict(json.loads(self._record.read_text("ascii").partition("\n")[2]))

    @functools.cached_property
    def text(self) -> str:
        """The record as JSON."""
        text = json.dumps(self.record.to_dict(), allow_nan=False)
        for path in self._own_paths:
            text = re.sub(re.escape(json.dumps(path)[1:-1]) + r'(?=[/\\"])', "...", text)
        return text

    @functools.cached_property
    def head(self) -> Head:
        """What is known of the record before it is decoded."""
        if self._head is not None:
            return self._head
        record = self.record
        return Head(
            model=record.model,
            device=record.device,
            has_run=record.forwards > 0,
            layers=len(record.layers),
            names=_digest("\n".join(record.layers)),
            digest=_digest(self.text),
        )

    def source(self, module: str) -> str | None:
        """Return the source of a module, or `None` if its file is not there."""
        path = Path(self.sources.get(module, ""))
        return path.read_text("utf-8", "replace") if path.is_file() else None

    def replaced(
        self,
        record: Record,
        *,
        evidence: bool | None = None,
        only: Sequence[str] = (),
        explained: Sequence[str] | None = None,
    ) -> Written:
        """Return the same with another record."""
        evidence = self.evidence if evidence is None else evidence
        explained = self.explained if explained is None else explained
        own = self._own_paths
        return Written(
            self.test, self.key, record, self.sources, evidence, only=only, own_paths=own, explained=explained
        )

    def write(self, folder: Path, *, equal: Path | None = None) -> None:
        """Write the record into a folder of records.

        Args:
            folder: The folder.
            equal: A folder that has an equal record of the same test and key, which then is not written again.
        """
        path = path_of(folder, self.test, self.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {
            "test": self.test,
            "key": self.key,
            "sources": dict(self.sources),
            "evidence": self.evidence,
            "only": [*self.only],
            "explained": [*self.explained],
            "head": dataclasses.asdict(self.head),
            "record": str(path if equal is None else path_of(equal, self.test, self.key)),
        }
        path.write_text(f"{json.dumps(head)}\n{self.text if equal is None else ''}", "ascii")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def path_of(folder: Path, test: str, key: str) -> Path:
    """Return the file of a record in a folder of records."""
    return folder_of(folder, test) / f"{key.replace(' ', '-')}.record"


def folder_of(folder: Path, test: str) -> Path:
    """Return where in a folder of records those of a test are."""
    return folder / hashlib.sha256(test.encode()).hexdigest()[:20]


def read_written(folder: Path, test: str | None = None) -> dict[tuple[str, str], Written]:
    """Return the records in a folder, or those of a test, by test and key, in the order in which tests made them."""
    where = folder.glob("*/*.record") if test is None else folder_of(folder, test).glob("*.record")
    paths = sorted(where, key=lambda path: path.stat().st_mtime_ns)
    return {(one.test, one.key): one for one in map(_read, paths)}


def read_one(folder: Path, test: str, key: str) -> Written | None:
    """Return one of the records in a folder, or `None` if it is not there."""
    path = path_of(folder, test, key)
    return _read(path) if path.is_file() else None


def _read(path: Path) -> Written:
    with path.open(encoding="ascii") as file:
        told = json.loads(file.readline())
    return Written(**{**told, "record": Path(told["record"]), "head": Head(**told["head"])})


Verdict = Literal["unchanged", "rewritten", "rounding", "changed", "not repeatable", "not run"]

VERDICTS: Mapping[Verdict, str] = {
    "changed": "changed",
    "rounding": "the same but for rounding",
    "rewritten": "the same, written otherwise",
    "unchanged": "the same",
    "not repeatable": "not repeatable",
    "not run": "never ran",
}
"""The verdicts in words."""


@dataclass(frozen=True, slots=True)
class Place:
    """A value of a layer: the first that differs."""

    layer: str
    change: float | None
    """Relative to the norm of the value there."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A record and that of the other side."""

    here: Written
    there: Written
    verdict: Verdict
    diagnosis: Diagnosis
    first: Place | None = None
    """The first layer whose output differs, whatever the tolerance."""
    source: tuple[Hunk, ...] = ()
    """What differs in the source of the causes."""

    @property
    def unrepeatable(self) -> list[Written]:
        """The records of the pair whose run gave other numbers when it was repeated."""
        return [one for one in (self.here, self.there) if one.record.noise == "not repeatable"]

    def where_unrepeatable(self, there: str) -> str:
        """Return on which sides these are, in words; ``there`` is the name of the other side."""
        return " and ".join("here" if one is self.here else f"at {there}" for one in self.unrepeatable)


def compare_records(actual: Record, expected: Record, precision: Precision = "exact") -> Comparison:
    """Return what differs between the records of two sides, to the bit, or beyond measured noise.

    With the same versions both sides compute the same bits. Other versions of torch have other kernels, which round
    otherwise: then the tolerance is that of a snapshot.
    """
    same = actual.versions == expected.versions
    parts: Parts = "all" if has_numbers(actual) and has_numbers(expected) else "architecture"
    return compare(actual, expected, parts=parts, precision=precision if same else None)


def judged(here: Written, there: Written) -> Pair:
    """Return the verdict on two records.

    Args:
        here: The record of this side, with evidence if the two differ.
        there: The same of the other side.
    """
    if here.head.digest == there.head.digest and not (here.evidence or there.evidence):
        return Pair(here, there, "unchanged" if here.head.has_run else "not run", _no_difference())
    # The noise of a watch is not measured; most rounding is smaller than what a file can hold.
    exact = there.record.noise and not is_narrow(there.record)  # where float32 is narrow no more, its noise is 0
    found = compare_records(here.record, there.record, "exact" if exact else "measured")
    pair = Pair(here, there, "unchanged", diagnose(found), first_difference(found))
    source: list[Hunk] = []
    if pair.unrepeatable:
        verdict: Verdict = "not repeatable"
    elif not pair.diagnosis.same:
        verdict, source = "changed", changed_methods(pair.diagnosis, here.sources, there.source)
    elif not (here.head.has_run or there.head.has_run):
        verdict = "not run"  # a watch that saw no forward
    elif pair.first is not None:
        verdict = "rounding"
    else:
        verdict = "rewritten" if pair.diagnosis.notes else "unchanged"
    return dataclasses.replace(pair, verdict=verdict, source=tuple(source))


@functools.cache
def _no_difference() -> Diagnosis:
    return diagnose(compare(Record(model=""), Record(model="")))


def first_difference(comparison: Comparison) -> Place | None:
    """Return the output that differs first, of the call that ended first: a layer before the one that it is part of."""
    for pair in sorted(comparison.calls, key=lambda pair: pair.actual.finished):
        for value in pair.actual.outputs:
            change = comparison.change(pair.layer, pair.key, "output", value.path)
            if change.change:
                return Place(pair.layer, change.change)
    return None


# --- in words --------------------------------------------------------------------------------------------------------

_MOST_TEXTS = 5
"""How many changes are told in full."""

_MOST_LINES = 20
"""How many more have a line."""


def summary(pairs: Sequence[Pair]) -> str:
    """Return how many models are as they were.

    >>> summary([])
    '0 tests ran 0 models of 0 classes'
    """
    counts = Counter(pair.verdict for pair in pairs)
    told = [f"{counts[verdict]} {words}" for verdict, words in VERDICTS.items() if counts[verdict]]
    tests, models = {pair.here.test for pair in pairs}, {pair.here.head.model for pair in pairs}
    of = f"{count(len(pairs), 'model')} of {count(len(models), 'class')}"
    return f"{count(len(tests), 'test')} ran {of}" + (f": {', '.join(told)}" if told else "")


def pair_text(pair: Pair) -> str:
    """Return the causes of a pair, with the source that differs below the first line."""
    steps = explained("pair of records", pair.diagnosis, pair.here.explained, pair.there.explained)
    opening, *table = comparison_text.text(pair.diagnosis, steps).splitlines()
    return "\n".join([opening, *map(printable, source_lines(pair.source)), *table])


def changed_lines(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield the models that changed. Those with the same causes are told once, most models first."""
    alike: dict[Hashable, list[Pair]] = {}
    for pair in pairs:
        if pair.verdict == "changed":
            causes = (*pair.diagnosis.causes, *pair.diagnosis.possible)
            found = {(one.kind, pattern(one.layer), one.what, str(one.actual), str(one.expected)) for one in causes}
            alike.setdefault((frozenset(found) or (pair.here.test, pair.here.key)), []).append(pair)
    groups = sorted(alike.values(), key=len, reverse=True)
    for first, *others in groups[:_MOST_TEXTS]:
        yield from ("", f"{_where(first)}:", *pair_text(first).splitlines())
        if others:
            models = Counter(pair.here.test for pair in (first, *others))
            names = [p.here.test if models[p.here.test] == 1 else f"{p.here.test} ({p.here.key})" for p in others]
            yield from ("", printable(f"{count(len(others), 'other model')} changed alike: {listed(names)}."))
    rest = groups[_MOST_TEXTS:]
    if rest:
        yield ""
    for first, *others in rest[:_MOST_LINES]:
        more = f", and {count(len(others), 'other model')} alike" if others else ""
        yield f"{_where(first)}{more}: {comparison_text.text(first.diagnosis).partition(chr(10))[0]}"
    if len(rest) > _MOST_LINES:
        yield f"... {count(sum(map(len, rest[_MOST_LINES:])), 'more model')} changed"
    if len(groups) < sum(map(len, groups)) or rest:
        yield from ("", "The text of each model is in the page of --modelprobe-html=PATH.")


def _where(pair: Pair) -> str:
    return printable(f"{pair.here.test}, {pair.here.key}")
