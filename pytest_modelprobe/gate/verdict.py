"""Snapshots of two revisions → what changed, of which class, and whether the change was declared. No text, no git."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pytest_modelprobe.comparison import Cause, Comparison, Diagnosis, Difference, Parts, compare, diagnose
from pytest_modelprobe.record import Record

from .checkpoints import Effect, effect_on_checkpoints
from .classes import (
    CLASSES,
    DEFAULTS,
    LEVELS,
    Class,
    Level,
    causes_of,
    differences_by_class,
)
from .declarations import has_words, words
from .file_differences import (
    architecture_differences,
    noise_differences,
    run_differences,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotVersion:
    """One snapshot as it is in one revision."""

    path: str
    """Of its ``.arch.json``, as messages show it."""
    numbers: str | None = None
    """Path of its ``.probe.json``; None: a record of structure alone."""
    record: Record
    architecture: str
    """Digest of the exact part, its declaration left out."""
    content: str
    """Digest of all that it says."""
    reason: str | None = None
    """Why the architecture is another than before, as its author declared."""
    supersedes: tuple[str, ...] = ()
    """Digests of the architectures that this one came after."""
    compared: Parts = "all"
    """What of it its test compares."""
    text: str = field(default="", repr=False)
    """The ``.arch.json``, for the lines of annotations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """All that is of one class in the change of one snapshot."""

    kind: Class
    level: Level
    differences: tuple[Difference, ...] = ()
    causes: tuple[Cause, ...] = ()
    """What explains them, as a failure of the test says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChange:
    """What became of one snapshot."""

    before: SnapshotVersion | None
    now: SnapshotVersion | None
    findings: tuple[Finding, ...]
    """The gravest first."""
    comparison: Comparison | None = None
    """None where one of the two is missing."""
    diagnosis: Diagnosis | None = None
    """Why they differ; None where they do not, or one is missing."""
    effect: Effect = field(default_factory=Effect)
    removal: str | None = None
    """The reason declared for the deletion of exactly this snapshot."""

    @property
    def path(self) -> str:
        """The path now; of what is gone, the path that it had."""
        return self.either.path

    @property
    def model(self) -> str:
        """Class name of the model."""
        return self.either.record.model

    @property
    def either(self) -> SnapshotVersion:
        """The snapshot now; of what is gone, as it was."""
        snapshot = self.now or self.before
        assert snapshot is not None
        return snapshot

    @property
    def level(self) -> Level:
        """The gravest level among the findings."""
        return min((finding.level for finding in self.findings), key=LEVELS.index)

    @property
    def reason(self) -> str | None:
        """The reason declared for exactly this change: in the snapshot, or of a deleted one in a file beside it."""
        if self.now is None:
            return self.removal if has_words(self.removal) else None
        if not has_words(self.now.reason):
            return None
        if self.before is None:
            return self.now.reason
        # A reason that was there before was given for an earlier change, whatever it says to supersede by now.
        given_before = words(self.before.reason or "") == words(self.now.reason or "")
        follows = self.before.architecture in (self.now.architecture, *self.now.supersedes)
        return self.now.reason if follows and not given_before else None

    @property
    def denied(self) -> tuple[Finding, ...]:
        """Findings that need a declaration and have none."""
        return () if self.reason else tuple(finding for finding in self.findings if finding.level == "deny")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is to be said of a change from one revision to another."""

    changes: tuple[SnapshotChange, ...] = ()
    """The gravest first."""
    unchanged: int = 0
    """Snapshots that say what they said."""
    base: str = ""
    """The commit that it changed from, where it is one."""

    @property
    def denied(self) -> tuple[SnapshotChange, ...]:
        """Changes that no reason was given for."""
        return tuple(change for change in self.changes if change.denied)


def judge(
    before: Mapping[str, SnapshotVersion],
    now: Mapping[str, SnapshotVersion],
    *,
    levels: Mapping[Class, Level] = DEFAULTS,
    unchanged: int = 0,
    removals: Mapping[tuple[str, str], str] | None = None,
) -> Verdict:
    """Return what changed between the snapshots of two revisions, and what of it is denied.

    Args:
        before: name → snapshot, as it was.
        now: name → snapshot, as it is.
        levels: what is done about each class.
        unchanged: snapshots known to be the same, which are not among the two.
        removals: (path, content) of deleted snapshots → declared reason, see `declared_removals`.

    >>> net = SnapshotVersion(path="net", record=Record(model="Net"), architecture="a", content="a")
    >>> verdict = judge({"net": net}, {})
    >>> [(change.path, change.level) for change in verdict.denied]
    [('net', 'deny')]
    >>> judge({"net": net}, {}, removals={("net", "a"): "the net is not used any more"}).denied
    ()
    """
    changes, same = [], unchanged
    told: set[str] = set()
    for old, new, renamed in _pairs(before, now):
        if old and new and not renamed and (old.content, old.text) == (new.content, new.text):
            same += 1
            continue
        # Several devices have one architecture: what changed of it is said of the first.
        architecture = new is None or new.path not in told
        if old and new:
            told.add(new.path)
        change = _change(old, new, levels, renamed=renamed, architecture=architecture)
        if old and new is None:
            change = dataclasses.replace(change, removal=(removals or {}).get((old.path, old.content)))
        changes.append(change)
    changes.sort(key=_gravity)
    return Verdict(changes=tuple(changes), unchanged=same)


def _gravity(change: SnapshotChange) -> tuple[bool, int, int, str]:
    first = change.findings[0]
    return not change.denied, LEVELS.index(change.level), CLASSES.index(first.kind), change.path


def _pairs(
    before: Mapping[str, SnapshotVersion], now: Mapping[str, SnapshotVersion]
) -> Iterator[tuple[SnapshotVersion | None, SnapshotVersion | None, bool]]:
    """Yield what belongs together, nothing twice, and whether it has another name.

    Each file belongs to its own past; of what is left, that which says the same does.
    """
    gone, found = dict(before), {}
    for name, new in now.items():
        if name in before and _file(name, before[name]) == _file(name, new):
            found[name] = gone.pop(name)
    told = {_file(name, now[name]) for name in found}
    for name, new in now.items():  # the numbers are of another device, the architecture is the same file
        file = _file(name, new)
        past = next((other for other, old in gone.items() if _file(other, old) == file), None)
        if name not in found and file not in told and past is not None:
            found[name] = gone.pop(past)
            told.add(file)
    for name, new in now.items():
        if name in found:
            yield found[name], new, False
        else:
            old = _take(gone, new)
            yield old, new, old is not None
    for old in gone.values():
        yield old, None, False


def _file(name: str, snapshot: SnapshotVersion) -> str:
    """Return the name of the architecture file of a snapshot: its own, or the one without its device."""
    return name if snapshot.path.removesuffix(".arch.json").endswith(name) else name.rpartition(".")[0]


def _take(gone: dict[str, SnapshotVersion], new: SnapshotVersion) -> SnapshotVersion | None:
    """Return, and take away, the snapshot that is gone under its old name."""
    for agree in ("content", "architecture"):
        for name, old in gone.items():
            if getattr(old, agree) == getattr(new, agree) and old.record.device == new.record.device:
                return gone.pop(name)
    return None


def _change(
    old: SnapshotVersion | None,
    new: SnapshotVersion | None,
    levels: Mapping[Class, Level],
    *,
    renamed: bool,
    architecture: bool,
) -> SnapshotChange:
    if old is None or new is None:
        kind: Class = "new" if old is None else "removed"
        return SnapshotChange(before=old, now=new, findings=(Finding(kind=kind, level=levels[kind]),))
    # Of another device, or of structure alone, the numbers are not those of before.
    gone = old.numbers is not None and (new.numbers is None or new.record.device != old.record.device)
    parts: Parts = "architecture" if gone else "all" if architecture else "behavior"
    comparison = compare(new.record, old.record, parts=parts)
    effect = effect_on_checkpoints(comparison) if architecture else Effect()
    diagnosis = diagnose(comparison)
    by_class = differences_by_class(diagnosis, effect)
    for difference in noise_differences(comparison):
        by_class.setdefault("behavior", []).append(difference)
    if not comparison.differences:
        for difference in run_differences(comparison):
            by_class.setdefault("behavior", []).append(difference)
    if architecture and "structure" not in by_class:
        for difference in architecture_differences(comparison):
            by_class.setdefault("structure", []).append(difference)
    if gone or not_compared(new, old):
        by_class["removed"] = []
    elif old.numbers is None and new.numbers is not None:
        by_class["new"] = []
    if renamed:
        by_class["renamed"] = []
    if not by_class:
        by_class["format"] = []
    findings = [
        Finding(
            kind=kind, level=levels[kind], differences=tuple(by_class[kind]), causes=tuple(causes_of(kind, diagnosis))
        )
        for kind in CLASSES
        if kind in by_class
    ]
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return SnapshotChange(
        before=old,
        now=new,
        findings=tuple(findings),
        comparison=comparison,
        diagnosis=None if comparison.same else diagnosis,
        effect=effect,
    )


def not_compared(now: SnapshotVersion, before: SnapshotVersion) -> str | None:
    """Return what of a snapshot its test compares no more; None where it compares what it did."""
    lost = now.compared not in ("all", before.compared)
    return ("architecture" if now.compared == "behavior" else "behavior") if lost else None
