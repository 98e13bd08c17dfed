"""Snapshots of two revisions → what changed, of which class, and whether the change was declared. No text, no git."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from pytest_modelprobe.comparison import BEHAVIOR, Cause, Comparison, Diagnosis, Difference, Parts, compare, diagnose
from pytest_modelprobe.record import ROOT, Call, IsolatedResponse, Layer, Parameter, Record, Value, qualified

from .declarations import is_said, words

Class = Literal[
    "checkpoint", "removed", "structure", "interface", "trainable", "behavior", "weights", "renamed", "new", "format"
]  # fmt: skip
"""What kind of change it is, the gravest first."""

Level = Literal["deny", "warn", "allow"]

CLASSES: tuple[Class, ...] = get_args(Class)
LEVELS: tuple[Level, ...] = get_args(Level)

DEFAULTS: Mapping[Class, Level] = {
    "checkpoint": "deny",
    "removed": "deny",
    "structure": "deny",
    "interface": "deny",
    "trainable": "warn",
    "behavior": "warn",
    "weights": "warn",
    "renamed": "warn",
    "new": "warn",
    "format": "allow",
}

MEANING: Mapping[Class, str] = {
    "checkpoint": "keys, shapes, dtypes or ties of the state_dict changed: old checkpoints do not fit",
    "removed": "a snapshot or its numbers are gone, or a part of it is not compared any more",
    "structure": "layers, types, attributes or dataflow changed",
    "interface": "shapes, dtypes or names of what a layer takes or gives changed",
    "trainable": "parameters were frozen or unfrozen",
    "behavior": "the model computes something else, its numbers moved for what cannot be told, or a tolerance grew",
    "weights": "weights or buffers have other values, and all else agrees",
    "renamed": "a snapshot, or layers that are made as before, have another name",
    "new": "a snapshot is new",
    "format": "the text changed, not what it says",
}


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
class Effect:
    """What a change does to checkpoints: keys of the state_dict, by what became of them."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    """Keys of another dtype: they load, and are converted."""
    tied: tuple[str, ...] = ()
    """Keys that share their storage with others than before."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Old key → new key, where a layer has another name."""
    parameters: int = 0
    """Elements of all parameters now, each counted once."""
    parameters_before: int = 0

    @property
    def none(self) -> bool:
        """Whether old checkpoints load as before."""
        return not (self.added or self.removed or self.reshaped or self.cast or self.tied or self.renamed)

    @property
    def loads(self) -> bool:
        """Whether an old checkpoint loads, if not with the same numbers."""
        return not (self.added or self.removed or self.reshaped or self.renamed)


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
            return self.removal if is_said(self.removal) else None
        if not is_said(self.now.reason):
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
    by_class = _by_class(diagnosis, effect)
    for difference in _looser(comparison):
        by_class.setdefault("behavior", []).append(difference)
    if not comparison.differences:
        for difference in _evidence(comparison):
            by_class.setdefault("behavior", []).append(difference)
    if architecture and "structure" not in by_class:
        for difference in _besides(comparison):
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
            kind=kind, level=levels[kind], differences=tuple(by_class[kind]), causes=tuple(_causes_of(kind, diagnosis))
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


def _by_class(diagnosis: Diagnosis, effect: Effect) -> dict[Class, list[Difference]]:
    of_numbers = _class_of_numbers(diagnosis)
    found: dict[Class, list[Difference]] = {}
    for difference in diagnosis.comparison.differences:
        kind = _class(difference, diagnosis.comparison)
        found.setdefault(of_numbers if kind == "behavior" else kind, []).append(difference)
    if not effect.none:  # as of a layer added, whose parameters are not told one by one
        found.setdefault("checkpoint", [])
    return found


def needs_reason(diagnosis: Diagnosis) -> bool:
    """Whether the gate, as it is by default, denies the change without a reason."""
    found = _by_class(diagnosis, effect_on_checkpoints(diagnosis.comparison))
    return any(DEFAULTS[kind] == "deny" for kind in found)


def class_of(cause: Cause, diagnosis: Diagnosis) -> Class:
    """Return of which class a cause is; what no number shows is structure where the output is what it was."""
    if cause.kind in ("weights", "buffers"):
        return "weights"
    if cause.kind == "attribute":
        return "structure"
    if cause.kind == "architecture":
        return _class(cause.differences[0], diagnosis.comparison) if cause.differences else "structure"
    return "structure" if diagnosis.unchanged and cause.change is None else "behavior"


def _causes_of(kind: Class, diagnosis: Diagnosis) -> Iterator[Cause]:
    """Yield the causes of a class; behavior has those of any other too that are known to change a number."""
    for cause in (*diagnosis.causes, *diagnosis.possible):
        own = class_of(cause, diagnosis)
        if own == kind or (kind == "behavior" and own not in ("weights", "renamed") and cause.change is not None):
            yield cause


def _class_of_numbers(diagnosis: Diagnosis) -> Class:
    """Return of which class numbers are that are no weights: nothing but weights and names excuses those that moved."""
    told = {class_of(cause, diagnosis) for cause in (*diagnosis.causes, *diagnosis.possible)}
    sized = (c for c in (*diagnosis.causes, *diagnosis.possible) if c.change is not None)
    if diagnosis.unchanged and told and all(class_of(cause, diagnosis) == "weights" for cause in sized):
        return min(told, key=CLASSES.index)  # what a layer alone answers, where the run answers as before
    if diagnosis.possible or diagnosis.not_judged:
        return "behavior"
    if "weights" in told and told <= {"weights", "renamed"}:
        return "weights"
    # Of a layer with another name the weights are drawn by that name.
    drawn = any(d.kind == "weights" for d in diagnosis.comparison.found)
    return "renamed" if told == {"renamed"} and drawn else "behavior"


def _looser(comparison: Comparison) -> Iterator[Difference]:
    """Yield where the noise in a file would from now on pass what did not pass before."""
    now, before = comparison.actual.noise, comparison.expected.noise
    if before == "measured" != now:
        yield Difference(layer=ROOT, kind="noise", what="noise", actual=now, expected=before)
    yield from comparison.looser


def _besides(comparison: Comparison) -> Iterator[Difference]:
    """Yield what an architecture says of a model besides what a comparison of two runs is about."""
    now, before = comparison.actual, comparison.expected
    if now.model != before.model:
        yield Difference(layer=ROOT, kind="type", what="of the model", actual=now.model, expected=before.model)
    for name, layer in now.layers.items():
        if (was := before.layers.get(name)) is not None:
            yield from _fields(layer, was, functools.partial(Difference, layer=name, kind="type"))
            for call, other in zip(layer.calls, was.calls, strict=False):
                yield from _in_call(call, other, functools.partial(Difference, layer=name, call=call.index))
    for x, y in zip(_order(now), _order(before), strict=False):
        if x != y:
            yield Difference(layer=x[0], kind="calls", what="order", call=x[1], actual=x[0], expected=y[0])
            return


_Told = Callable[..., Difference]


def _in_call(call: Call, other: Call, told: _Told) -> Iterator[Difference]:
    yield from _fields(call, other, functools.partial(told, kind="calls"))
    for value, was in _by_path((*call.inputs, *call.outputs), other):
        yield from _fields(value, was, functools.partial(told, kind="calls"), f"{value.path} ")


def _by_path(values: Iterable[Value], other: Call) -> Iterator[tuple[Value, Value]]:
    """Yield the values that another call has too."""
    known = {value.path: value for value in (*other.inputs, *other.outputs)}
    return ((value, known[value.path]) for value in values if value.path in known)


# Of a layer, a call and a value: what no comparison looks at.
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


def _fields(now: object, before: object, told: _Told, of: str = "") -> Iterator[Difference]:
    for what in _UNSEEN:
        x, y = getattr(now, what, None), getattr(before, what, None)
        if x != y:
            shown = (str(side) if isinstance(side, tuple) else side for side in (x, y))
            yield told(what=of + what, **dict(zip(("actual", "expected"), shown, strict=True)))


def _evidence(comparison: Comparison) -> Iterator[Difference]:
    """Yield what one of two files tells of a run, and the other does not, where their numbers say the same."""
    now, before = comparison.actual, comparison.expected
    for what in ("notes", "origin", "gradient_origin"):
        x, y = getattr(now, what), getattr(before, what)
        if x != y:
            yield Difference(layer=ROOT, kind="run", what=what, actual=str(x or None), expected=str(y or None))
    for (layer, _, side, path), moved in comparison.changes.items():
        if moved.differs:  # as of an input, which is told of the output that it is
            yield Difference(layer=layer, kind="run", what=f"{side} {path}", change=moved.change)
    for pair in comparison.calls:
        told = functools.partial(Difference, layer=pair.layer, call=pair.actual.index)
        if pair.actual.random != pair.expected.random:
            yield told(kind="run", what="random state", actual=pair.actual.random, expected=pair.expected.random)
        for value, other in _by_path((*pair.actual.inputs, *pair.actual.outputs), pair.expected):
            now_dead, then_dead = (0 if v.forward.units is None else v.forward.units.dead for v in (value, other))
            if now_dead != then_dead:
                yield told(kind="run", what=f"dead units of {value.path}", actual=now_dead, expected=then_dead)
        x, y = _answer(pair.actual.response), _answer(pair.expected.response)
        if x != y:
            yield told(kind="response", what="of the layer alone", actual=_kept(x, y), expected=_kept(y, x))


def _answer(response: IsolatedResponse | None) -> tuple[object, ...] | None:
    """Return which questions a layer alone was asked, and which it answered; None where it answered none."""
    if response is None or response.reason is not None:
        return None
    answered = tuple((h.where, h.passed, h.reading is not None) for h in response.handed)
    return dict(response.recipes), answered, response.gradient is not None, response.without_gradient


def _kept(answer: tuple[object, ...] | None, other: tuple[object, ...] | None) -> str | None:
    return None if answer is None else "kept" if other is None else "to other questions"


def _order(record: Record) -> list[tuple[str, int]]:
    """Return the layers as they are called, and which call of theirs it is."""
    calls = sorted(record.calls, key=lambda pair: (pair[1].root, pair[1].root_training, pair[1].started))
    return [(layer.name, call.index) for layer, call in calls]


def _class(difference: Difference, comparison: Comparison) -> Class:
    if difference.kind in ("weights", "buffer"):
        return "renamed" if difference.layer in comparison.names_before else "weights"
    if difference.kind in BEHAVIOR:
        return "behavior"
    if difference.kind == "layer renamed":
        return "renamed"
    if difference.kind in ("interface", "path"):
        return "interface"
    if difference.kind == "parameter trainable":
        return "trainable"
    if difference.kind.startswith("buffer"):
        own = (layers.get(difference.layer) for layers in (comparison.actual.layers, comparison.expected.layers))
        found = (b for layer in own if layer is not None for b in layer.buffers if b.name == difference.what)
        return "checkpoint" if any(buffer.persistent for buffer in found) else "structure"
    return "checkpoint" if difference.kind.startswith("parameter") else "structure"


def effect_on_checkpoints(comparison: Comparison) -> Effect:
    """Return which keys of the state_dict became what."""
    now, before = _keys(comparison.actual, comparison.expected), _keys(comparison.expected, comparison.actual)
    original = {new: old for old, new in comparison.renamed.items()}
    both = [key for key in now if key in before]

    def as_it_was(key: str) -> str:
        layer, own = before[key]
        return qualified(original.get(layer, layer.removesuffix(" (removed)")), own.name)

    def other(aspect: Callable[[Parameter], object]) -> tuple[str, ...]:
        return tuple(key for key in both if aspect(now[key][1]) != aspect(before[key][1]))

    return Effect(
        added=tuple(key for key in now if key not in before),
        removed=tuple(as_it_was(key) for key in before if key not in now),
        reshaped=other(lambda own: own.shape),
        cast=other(lambda own: own.dtype),
        tied=other(lambda own: own.tied_to),
        renamed={as_it_was(key): key for key in both if as_it_was(key) != key},
        parameters=parameters(comparison.actual),
        parameters_before=parameters(comparison.expected),
    )


def _keys(record: Record, other: Record) -> dict[str, tuple[str, Parameter]]:
    """Return key → layer and what it holds; of a buffer that is not said to be persistent, ``other`` may tell."""
    told = {(layer.name, own.name): own.persistent for layer in other.layers.values() for own in layer.buffers}

    def stored(layer: Layer) -> Iterator[Parameter]:
        yield from layer.parameters
        for own in layer.buffers:
            if told.get((layer.name, own.name)) if own.persistent is None else own.persistent:
                yield own

    return {
        qualified(name, own.name): (name, own)
        for layer in record.layers.values()
        # A module that stands at two places is stored twice.
        for name in (layer.name, *layer.aliases)
        for own in stored(layer)
    }


def parameters(record: Record) -> int:
    """Return how many elements all parameters have, shared ones counted once."""
    own = (parameter for layer in record.layers.values() for parameter in layer.parameters)
    return sum(math.prod(parameter.shape) for parameter in own if parameter.tied_to is None)
