"""Records of the two sides: written to files, read, compared, and the result in words."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pytest_modelprobe.comparison import Comparison, Diagnosis, Parts, Precision, compare, diagnose
from pytest_modelprobe.comparison import text as comparison_text
from pytest_modelprobe.record import Record, has_numbers, is_narrow
from pytest_modelprobe.text import count, listed, pattern, printable

# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """A record that a test made, as it was written."""

    test: str
    """The node id."""
    key: str
    """Which record of the test: ``run 1``, ``architecture 2``, ``watch 1``."""
    record: Record
    sources: Mapping[str, str] = field(default_factory=dict)
    """The modules of Python that the classes of the model are from → their files."""
    evidence: bool = False
    """Whether the record has what a diagnosis needs, as one that differs from that of the other side has."""

    def write(self, folder: Path) -> None:
        """Write the record into a folder of records."""
        path = path_of(folder, self.test, self.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "test": self.test,
            "key": self.key,
            "record": self.record.to_dict(),
            "sources": dict(self.sources),
            "evidence": self.evidence,
        }
        path.write_text(json.dumps(data, allow_nan=False), "ascii")


def path_of(folder: Path, test: str, key: str) -> Path:
    """Return the file of a record in a folder of records."""
    return folder_of(folder, test) / f"{key.replace(' ', '-')}.json"


def folder_of(folder: Path, test: str) -> Path:
    """Return where in a folder of records those of a test are."""
    return folder / hashlib.sha256(test.encode()).hexdigest()[:20]


def read_written(folder: Path) -> dict[tuple[str, str], Written]:
    """Return the records in a folder by test and key, in the order in which the tests made them."""
    paths = sorted(folder.glob("*/*.json"), key=lambda path: path.stat().st_mtime_ns)
    return {(one.test, one.key): one for one in map(_read, paths)}


def read_one(folder: Path, test: str, key: str) -> Written | None:
    """Return one of the records in a folder, or `None` if it is not there."""
    path = path_of(folder, test, key)
    return _read(path) if path.is_file() else None


def _read(path: Path) -> Written:
    data = json.loads(path.read_text("ascii"))
    record = Record.from_dict(data["record"])
    return Written(data["test"], data["key"], record, data["sources"], data["evidence"])


Verdict = Literal["unchanged", "rounding", "changed", "not repeatable", "not run"]


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

    @property
    def unrepeatable(self) -> list[Written]:
        """The records of the pair whose run gave other numbers when it was repeated."""
        return [one for one in (self.here, self.there) if one.record.noise == "not repeatable"]


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
    # The noise of a watch is not measured; most rounding is smaller than what a file can hold.
    exact = there.record.noise and not is_narrow(there.record)  # where float32 is narrow no more, its noise is 0
    found = compare_records(here.record, there.record, "exact" if exact else "measured")
    pair = Pair(here, there, "unchanged", diagnose(found), first_difference(found))
    if pair.unrepeatable:
        verdict: Verdict = "not repeatable"
    elif not pair.diagnosis.same:
        verdict = "changed"
    elif not (here.record.forwards or there.record.forwards):
        verdict = "not run"  # a watch that saw no forward
    else:
        verdict = "unchanged" if pair.first is None else "rounding"
    return dataclasses.replace(pair, verdict=verdict)


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

_WORDS: dict[Verdict, str] = {
    "unchanged": "unchanged",
    "rounding": "the same but for rounding",
    "changed": "changed",
    "not repeatable": "not repeatable",
    "not run": "never ran",
}


def summary(pairs: Sequence[Pair]) -> str:
    """Return how many models are as they were.

    >>> summary([])
    '0 models'
    """
    counts = Counter(pair.verdict for pair in pairs)
    told = [f"{counts[verdict]} {words}" for verdict, words in _WORDS.items() if counts[verdict]]
    return count(len(pairs), "model") + (f": {', '.join(told)}" if told else "")


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
        yield from ("", f"{_where(first)}:", *comparison_text.text(first.diagnosis).splitlines())
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
