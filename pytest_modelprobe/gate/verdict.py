"""From the snapshots of two revisions to their changes, the class of each, and whether it was declared.

Nothing here knows git or words: it gets snapshots by name and returns plain values, so that every rule can be tested
with records written by hand. Snapshots are read one pair after the other, and of each only what is printed is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_modelprobe.comparison import (
    BEHAVIOR,
    CallPair,
    Cause,
    Comparison,
    Diagnosis,
    Difference,
    Parts,
    compare,
    diagnose,
    is_drawn_otherwise,
    layers_behind_zeros,
)
from pytest_modelprobe.record import (
    ROOT,
    Call,
    CallTree,
    IsolatedResponse,
    Layer,
    Parameter,
    Reading,
    Record,
    Value,
    has_numbers,
)

from .classes import (
    CLASSES,
    DEFAULTS,
    LEVELS,
    Class,
    Effect,
    Level,
    causes_of,
    differences_by_class,
    effect_on_checkpoints,
)

# --- what makes a reason valid ----------------------------------------------------------------------------------------


def has_words(reason: str | None) -> bool:
    r"""Return whether a reason contains a letter or a digit, in any script.

    >>> has_words("wider"), has_words(" "), has_words("\u200b"), has_words("\u3164"), has_words("--"), has_words(None)
    (True, False, False, False, False, False)
    """
    return bool(words(reason or ""))


def words(reason: str) -> list[str]:
    """Return the words of a reason, without case, punctuation and invisible characters.

    Two reasons with the same words are the same reason.
    """
    plain = unicodedata.normalize("NFKC", reason).casefold()
    # Format characters have no look. Neither have the Hangul fillers, which Unicode counts as letters.
    seen = (sign for sign in plain if unicodedata.category(sign) != "Cf" and "FILLER" not in unicodedata.name(sign, ""))
    return re.findall(r"[^\W_]+", "".join(seen))


_MOST_DIGESTS = 64
"""How many superseded digests a file keeps, the newest, so that it does not grow without end."""


def superseded(chain: str | None, before: str, now: str) -> str | None:
    """Return the digests that an architecture supersedes: those of its earlier versions, the oldest first.

    All of them are kept, so that a reason that is given at the end of a branch holds for the whole branch, whatever
    the number of updates. They are part of the file, so a squash or a rebase keeps them.

    Args:
        chain: The digests that the snapshot had before this update.
        before: The digest of the architecture before this update.
        now: The digest of the architecture after it.

    >>> superseded(None, "a", "b"), superseded("a", "b", "c"), superseded("a b", "c", "b"), superseded("a", "b", "b")
    ('a', 'a b', 'a', 'a')
    """
    known = (chain or "").split()
    steps = [*known, before] if before != now else known
    if now in steps:  # It is what it was: a change that was taken back supersedes nothing.
        steps = steps[: steps.index(now)]
    return " ".join(steps[-_MOST_DIGESTS:]) or None


# --- differences that a comparison of two runs does not report --------------------------------------------------------


def noise_differences(comparison: Comparison) -> Iterator[Difference]:
    """Yield the places where the noise in the file allows larger changes than before."""
    now, before = comparison.actual.noise, comparison.expected.noise
    if before == "measured" != now:
        yield Difference(layer=ROOT, kind="noise", what="noise", actual=now, expected=before)
    yield from comparison.looser


def architecture_differences(comparison: Comparison, other_calls: Collection[str] = ()) -> Iterator[Difference]:
    """Yield differences of the architecture files that no comparison of two records reports.

    Args:
        comparison: What the comparison reports.
        other_calls: Layers that are called more or less often, which changes no value: a layer without weights may be
            shared now, or no longer.
    """
    now, before = comparison.actual, comparison.expected
    if now.model != before.model:
        yield Difference(layer=ROOT, kind="type", what="of the model", actual=now.model, expected=before.model)
    for name, layer in now.layers.items():
        if (was := before.layers.get(name)) is not None:
            for difference in _fields(layer, was, functools.partial(Difference, layer=name, kind="type")):
                if not (difference.what == "aliases" and name in other_calls):
                    yield difference
            for call, other in zip(layer.calls, was.calls, strict=False):
                yield from _in_call(call, other, functools.partial(Difference, layer=name, call=call.index))
    order = ([step for step in _order(record) if step[0] not in other_calls] for record in (now, before))
    for x, y in zip(*order, strict=False):
        if x != y:
            yield Difference(layer=x[0], kind="calls", what="order", call=x[1], actual=x[0], expected=y[0])
            return


_MakeDifference = Callable[..., Difference]


def _in_call(call: Call, other: Call, make: _MakeDifference) -> Iterator[Difference]:
    yield from _fields(call, other, functools.partial(make, kind="calls"))
    for value, was in _by_path((*call.inputs, *call.outputs), other):
        yield from _fields(value, was, functools.partial(make, kind="calls"), f"{value.path} ")


def _by_path(values: Iterable[Value], other: Call) -> Iterator[tuple[Value, Value]]:
    """Yield the values that a different call has too, each with its counterpart."""
    known = {value.path: value for value in (*other.inputs, *other.outputs)}
    return ((value, known[value.path]) for value in values if value.path in known)


# Fields of layers, calls and values that a comparison of two records does not look at.
_UNSEEN = (
    "leaf",
    "functional",
    "aliases",
    "training",
    "forwards",
    "inputs_known",
    "recomputed",
    "requires_grad",
    "overwritten",
)


def _fields(now: object, before: object, make: _MakeDifference, of: str = "") -> Iterator[Difference]:
    for what in _UNSEEN:
        x, y = getattr(now, what, None), getattr(before, what, None)
        if x != y:
            actual, expected = (str(side) if isinstance(side, tuple) else side for side in (x, y))
            yield make(what=of + what, actual=actual, expected=expected)


def run_differences(comparison: Comparison) -> Iterator[Difference]:
    """Yield differences of the numbers files where every compared value is the same."""
    now, before = comparison.actual, comparison.expected
    for what in ("notes", "origin", "gradient_origin"):
        x, y = getattr(now, what), getattr(before, what)
        if x != y:
            yield Difference(layer=ROOT, kind="run", what=what, actual=str(x or None), expected=str(y or None))
    for name, layer in now.layers.items():
        gradients = {own.name: own.gradient for own in _parameters_and_buffers(before.layers.get(name))}
        for own in _parameters_and_buffers(layer):
            x, y = ("there" if g is not None else None for g in (own.gradient, gradients.get(own.name)))
            if x != y:  # The comparison looks at this only if something is trained.
                yield Difference(layer=name, kind="run", what=f"gradient of {own.name}", actual=x, expected=y)
    for (name, _, side, path), moved in comparison.changes.items():
        # An input that differs is reported where it comes from, and a response that differs is a difference itself.
        if moved.differs and not (side in _REPORTED and comparison.differences):
            yield Difference(layer=name, kind="run", what=f"{side} {path}", change=moved.change)
    for pair in comparison.calls:
        make = functools.partial(Difference, layer=pair.layer, call=pair.actual.index)
        if pair.actual.random != pair.expected.random:
            yield make(kind="run", what="random state", actual=pair.actual.random, expected=pair.expected.random)
        by_mode = [None if r is None else r.mode_matters for r in (pair.actual.response, pair.expected.response)]
        if None not in by_mode and by_mode[0] != by_mode[1]:
            yield make(kind="run", what="dependence on the mode, alone", actual=by_mode[0], expected=by_mode[1])
        for value, other in _by_path((*pair.actual.inputs, *pair.actual.outputs), pair.expected):
            now_dead, then_dead = (0 if v.forward.units is None else v.forward.units.dead for v in (value, other))
            if now_dead != then_dead:
                yield make(kind="run", what=f"dead units of {value.path}", actual=now_dead, expected=then_dead)


_REPORTED = ("input", "handed", "response gradient")


def responses_to_other_tensors(comparison: Comparison) -> Iterator[Difference]:
    """Yield the layers whose answers, each run alone, cannot be compared: for lack of one, or of the same tensors."""
    for pair in comparison.calls:
        x, y = _answered(pair.actual.response), _answered(pair.expected.response)
        drawn_otherwise = is_drawn_otherwise(pair.layer, pair.actual.response, comparison.names_before)
        if (x != y or drawn_otherwise) and not any(_lost(pair)):
            make = functools.partial(Difference, layer=pair.layer, kind="response", call=pair.actual.index)
            yield make(what="of the layer alone", actual=_kept(x, y), expected=_kept(y, x))


def lost_responses(comparison: Comparison) -> Iterator[Difference]:
    """Yield what the file no longer says of layers that ran alone. A test does not compare what only one side has."""
    for pair in comparison.calls:
        for what in _lost(pair):
            yield Difference(layer=pair.layer, kind="response", call=pair.actual.index, what=what, expected="kept")


def _lost(pair: CallPair) -> Iterator[str]:
    now, before = pair.actual.response, pair.expected.response
    if before is None or before.reason is not None:
        return
    if now is None or now.reason is not None or (before.handed and not now.handed):
        yield "of the layer alone"
        return
    handed = {one.where: one for one in now.handed}
    for one in before.handed:
        there = handed.get(one.where)
        if one.reading is not None and there is not None and there.reading is None and there.passed is None:
            yield f"{one.where} of the layer alone"
    if before.gradient is not None and now.gradient is None and now.without_gradient == before.without_gradient:
        yield "gradient of the layer alone"


def _parameters_and_buffers(layer: Layer | None) -> tuple[Parameter, ...]:
    return () if layer is None else (*layer.parameters, *layer.buffers)


def _answered(response: IsolatedResponse | None) -> tuple[object, ...] | None:
    """Return the synthetic inputs of an isolated response and which values it has; `None` if there is none."""
    if response is None or response.reason is not None:
        return None
    answered = tuple((h.where, h.passed, h.reading is not None) for h in response.handed)
    return dict(response.recipes), answered, response.gradient is not None, response.without_gradient


def _kept(answer: tuple[object, ...] | None, other: tuple[object, ...] | None) -> str | None:
    return None if answer is None else "kept" if other is None else "to other questions"


def _order(record: Record) -> list[tuple[str, int]]:
    """Return the calls in order: the name of the layer, and which of its calls it is."""
    calls = sorted(record.calls, key=lambda pair: (pair[1].root, pair[1].root_training, pair[1].started))
    return [(layer.name, call.index) for layer, call in calls]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotVersion:
    """One snapshot in one revision."""

    path: str
    """The path of its ``.arch.json``, as messages show it."""
    numbers: str | None = None
    """The path of its ``.probe.json``, or `None` if the record has the structure alone."""
    record: Record
    architecture: str
    """The digest of the architecture, without its declaration."""
    content: str
    """The digest of the architecture and the numbers."""
    reason: str | None = None
    """The declared reason for the change of the architecture."""
    supersedes: tuple[str, ...] = ()
    """The digests of the earlier architectures, see `superseded`."""
    compared: Parts = "all"
    """The part that its test compares."""
    read_text: Callable[[], str] = field(default=str, repr=False, compare=False)
    """Reads the ``.arch.json`` again: annotations need its lines, and a reason is written into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The differences of one class in one snapshot."""

    kind: Class
    level: Level
    differences: tuple[Difference, ...] = ()
    causes: tuple[Cause, ...] = ()
    """The causes of the differences, as the failure of the test names them."""

    @property
    def not_comparable(self) -> tuple[Difference, ...]:
        """The answers of layers, each run alone, that differ or are missing because calls are written differently."""
        found = (d for d in self.differences if self.kind == "calls" and d.kind == "response")
        return tuple(d for d in found if d.change is not None or d.what == "of the layer alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChange:
    """The change of one snapshot."""

    before: SnapshotVersion | None
    now: SnapshotVersion | None
    findings: tuple[Finding, ...]
    """The most severe first."""
    comparison: Comparison | None = None
    """`None` if one of the two snapshots is missing."""
    diagnosis: Diagnosis | None = None
    """The causes, or `None` if nothing differs or one of the two snapshots is missing."""
    effect: Effect = field(default_factory=Effect)
    removal: str | None = None
    """The reason declared for the deletion of exactly this snapshot."""

    @property
    def path(self) -> str:
        """The path now, or the former path of a deleted snapshot."""
        return self.either.path

    @property
    def model(self) -> str:
        """Class name of the model."""
        return self.either.record.model

    @property
    def either(self) -> SnapshotVersion:
        """The snapshot now, or a deleted one as it was."""
        snapshot = self.now or self.before
        assert snapshot is not None
        return snapshot

    @property
    def level(self) -> Level:
        """The most severe level of the findings."""
        return min((finding.level for finding in self.findings), key=LEVELS.index)

    @property
    def reason(self) -> str | None:
        """The reason declared for exactly this change: it stands in the snapshot, or in a file beside a deleted one."""
        if self.now is None:
            return self.removal if has_words(self.removal) else None
        if not has_words(self.now.reason):
            return None
        if self.before is None:
            return self.now.reason
        # A reason with the same words as before was given for an earlier change, whatever it supersedes.
        given_before = words(self.before.reason or "") == words(self.now.reason or "")
        follows = self.before.architecture in (self.now.architecture, *self.now.supersedes)
        return self.now.reason if follows and not given_before else None

    @property
    def denied(self) -> tuple[Finding, ...]:
        """Findings that need a declaration and have none."""
        return () if self.reason else tuple(finding for finding in self.findings if finding.level == "deny")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The changes between two revisions."""

    changes: tuple[SnapshotChange, ...] = ()
    """The most severe first."""
    unchanged: int = 0
    """The number of unchanged snapshots."""
    base: str = ""
    """The commit compared with; empty if there is none."""

    @property
    def denied(self) -> tuple[SnapshotChange, ...]:
        """Changes that need a reason and have none."""
        return tuple(change for change in self.changes if change.denied)


def judge(
    before: Mapping[str, SnapshotVersion],
    now: Mapping[str, SnapshotVersion],
    *,
    levels: Mapping[Class, Level] = DEFAULTS,
    unchanged: int = 0,
    removals: Mapping[tuple[str, str], str] | None = None,
) -> Verdict:
    """Return the changes between the snapshots of two revisions, and which are denied.

    Args:
        before: Name → snapshot in the base.
        now: Name → snapshot now.
        levels: Level of each class.
        unchanged: Number of equal snapshots that are not in the two mappings.
        removals: (path, content) of deleted snapshots → declared reason, see `declared_removals`.

    >>> net = SnapshotVersion(path="net", record=Record(model="Net"), architecture="a", content="a")
    >>> verdict = judge({"net": net}, {})
    >>> [(change.path, change.level) for change in verdict.denied]
    [('net', 'deny')]
    >>> judge({"net": net}, {}, removals={("net", "a"): "the net is not used any more"}).denied
    ()
    """
    changes: list[SnapshotChange] = []
    same = unchanged
    reported: set[str] = set()
    outlines = _Outlines()

    def add(old: SnapshotVersion | None, new: SnapshotVersion | None, *, renamed: bool = False) -> None:
        nonlocal same
        # The digests leave out the declaration, so the text is compared too.
        if old and new and not renamed and old.content == new.content and old.read_text() == new.read_text():
            same += 1
            return
        # Several devices share one architecture: its changes are reported for the first.
        architecture = new is None or new.path not in reported
        if old and new:
            reported.add(new.path)
        change = _change(old, new, levels, outlines, renamed=renamed, architecture=architecture)
        if old and new is None:
            change = dataclasses.replace(change, removal=(removals or {}).get((old.path, old.content)))
        changes.append(change)

    gone, came, paired = _by_name(before, now, add, outlines)
    past = _of_other_devices(gone, came, paired)
    for name, new in came.items():
        if name in past:
            add(before[past[name]], now[name])
        elif old_name := _same(gone, new):
            del gone[old_name]
            add(before[old_name], now[name], renamed=True)
        else:
            add(None, new)
    for old in gone.values():
        add(old, None)
    changes.sort(key=_severity)
    return Verdict(changes=tuple(changes), unchanged=same)


def _severity(change: SnapshotChange) -> tuple[bool, int, int, str]:
    first = change.findings[0]
    return not change.denied, LEVELS.index(change.level), CLASSES.index(first.kind), change.path


def _by_name(
    before: Mapping[str, SnapshotVersion],
    now: Mapping[str, SnapshotVersion],
    add: Callable[[SnapshotVersion, SnapshotVersion], None],
    outlines: _Outlines,
) -> tuple[dict[str, SnapshotVersion], dict[str, SnapshotVersion], set[str]]:
    """Add the pairs of the same path; return the other snapshots, outlined, and the files of the pairs.

    Each snapshot is read, and let go of, before the next one is: together they may not fit into memory.
    """
    came, names, paired = {}, set(), set()
    for name in now:
        old, new = before.get(name), now[name]
        file = _file(name, new)
        if old and _file(name, old) == file:
            names.add(name)
            paired.add(file)
            add(old, new)
        else:
            came[name] = outlines.of_snapshot(new)
        del old, new
    gone = {name: outlines.of_snapshot(old) for name in before if name not in names and (old := before.get(name))}
    return gone, came, paired


def _of_other_devices(
    gone: dict[str, SnapshotVersion], came: Mapping[str, SnapshotVersion], paired: set[str]
) -> dict[str, str]:
    """Return new name → old name if the numbers are of a different device now, and remove the old snapshots."""
    found = {}
    for name, new in came.items():
        file = _file(name, new)
        past = next((other for other, old in gone.items() if _file(other, old) == file), None)
        if file not in paired and past is not None:
            found[name] = past
            del gone[past]
            paired.add(file)
    return found


def _file(name: str, snapshot: SnapshotVersion) -> str:
    """Return the name of the architecture file of a snapshot, which has no device in it."""
    return name if snapshot.path.removesuffix(".arch.json").endswith(name) else name.rpartition(".")[0]


def _same(gone: Mapping[str, SnapshotVersion], new: SnapshotVersion) -> str | None:
    """Return the name of the deleted snapshot with the same content."""
    for agree in ("content", "architecture"):
        for name, old in gone.items():
            if getattr(old, agree) == getattr(new, agree) and old.record.device == new.record.device:
                return name
    return None


class _Outlines:
    """Keeps of the layers of snapshots what is printed: names, types and buffers.

    Equal layers are held once, because together the records of many snapshots may not fit into memory.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def of_snapshot(self, snapshot: SnapshotVersion) -> SnapshotVersion:
        return dataclasses.replace(snapshot, record=self.of_record(snapshot.record))

    def of_record(self, record: Record) -> Record:
        layers = {name: self._of_layer(layer) for name, layer in record.layers.items()}
        same = tuple((name, id(layer)) for name, layer in layers.items())
        return dataclasses.replace(record, layers=self._known.setdefault(same, layers))

    def _of_layer(self, layer: Layer) -> Layer:
        buffers = tuple(dataclasses.replace(own, reading=Reading(), after=None, gradient=None) for own in layer.buffers)
        outline = Layer(name=layer.name, type=layer.type, buffers=buffers)
        return self._known.setdefault((layer.name, layer.type, repr(buffers)), outline)  # type: ignore[no-any-return]


def _change(
    old: SnapshotVersion | None,
    new: SnapshotVersion | None,
    levels: Mapping[Class, Level],
    outlines: _Outlines,
    *,
    renamed: bool,
    architecture: bool,
) -> SnapshotChange:
    if old is None or new is None:
        kind: Class = "new" if old is None else "removed"
        return SnapshotChange(before=old, now=new, findings=(Finding(kind=kind, level=levels[kind]),))
    # Numbers of a different device cannot be compared with these, and without numbers there is nothing to compare.
    gone = old.numbers is not None and (new.numbers is None or new.record.device != old.record.device)
    # How calls are written is a note only if every value is known to be the same. Without numbers none is known.
    strict = gone or not (has_numbers(old.record) and has_numbers(new.record))
    comparison = compare(new.record, old.record, parts="architecture" if gone else "all", strict=strict)
    if not architecture:
        of_values = tuple(found for found in comparison.found if found.kind in BEHAVIOR)
        comparison = dataclasses.replace(comparison, found=of_values, notes=())
    old, new = outlines.of_snapshot(old), outlines.of_snapshot(new)
    effect = effect_on_checkpoints(comparison) if architecture else Effect()
    diagnosis = diagnose(comparison)
    by_class = _differences(diagnosis, effect, architecture=architecture)
    if gone or part_not_compared(new, old):
        by_class["removed"] = []
    elif lost := list(lost_responses(comparison)):
        by_class["removed"] = lost
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
    outlined = dataclasses.replace(
        comparison,
        actual=new.record,
        expected=outlines.of_record(comparison.expected),
        changes={place: change for place, change in comparison.changes.items() if not change.known},
        calls=(),
    )
    differs = bool(diagnosis.notes) or not comparison.same
    return SnapshotChange(
        before=old,
        now=new,
        findings=tuple(findings),
        comparison=outlined,
        diagnosis=dataclasses.replace(diagnosis, comparison=outlined) if differs else None,
        effect=effect,
    )


def _differences(diagnosis: Diagnosis, effect: Effect, *, architecture: bool) -> dict[Class, list[Difference]]:
    """Return the differences of each class, with those of the files that the comparison does not report."""
    comparison = diagnosis.comparison
    by_class = differences_by_class(diagnosis, effect)
    of_files: list[tuple[Class, Difference]] = [("behavior", found) for found in noise_differences(comparison)]
    if diagnosis.same:
        of_files += (("behavior", found) for found in run_differences(comparison))
        # If the arguments of a layer were renamed, it is run alone on different tensors, and the answers cannot be
        # compared. Then the values of the run show what its code does, unless zeros may hide it there.
        shown = _written_otherwise(comparison)
        shown -= {*layers_behind_zeros(comparison.actual), *layers_behind_zeros(comparison.expected)}
        for found in responses_to_other_tensors(comparison):
            of_files.append(("calls" if found.layer in shown else "behavior", found))
    if architecture and "structure" not in by_class:
        resting = {d.layer for d in comparison.differences if diagnosis.same and d.kind in _OF_RESTING_LAYERS}
        of_files += (("structure", found) for found in architecture_differences(comparison, resting))
    for kind, found in of_files:
        by_class.setdefault(kind, []).append(found)
    return by_class


_OF_RESTING_LAYERS = frozenset({"layer added", "layer removed", "calls"})
"""Where every value is the same, only layers that compute nothing, and shared ones without weights, differ so."""


def _written_otherwise(comparison: Comparison) -> set[str]:
    """Return the layers that are called with different arguments or names, and the layers that call them."""
    own = {*(difference.layer for difference in comparison.differences), *comparison.names_before.paths}
    callers = (step.parent for step in CallTree(comparison.actual).started if step.layer.name in own)
    return own | {step.layer.name for step in callers if step is not None}


def part_not_compared(now: SnapshotVersion, before: SnapshotVersion) -> str | None:
    """Return the part of a snapshot that its test no longer compares, or `None` if it compares all that it did."""
    lost = now.compared not in ("all", before.compared)
    return ("architecture" if now.compared == "behavior" else "behavior") if lost else None
