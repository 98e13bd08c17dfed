"""Record × record → differences: what is not as expected, layer by layer; nothing of why."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pytest_modelprobe.exceptions import NothingObservedError, SelectionError, UsageError
from pytest_modelprobe.record import (
    ROOT,
    Call,
    Dimension,
    EmittedTensor,
    Glob,
    IsolatedResponse,
    Layer,
    Parameter,
    Plain,
    Reading,
    Record,
    Value,
    address,
    has_numbers,
    is_read,
    renamed,
    resolve_rename,
)

from . import tolerance as _tolerance
from .matching import match
from .tolerance import CAME, GONE, UNKNOWN, Change, Direction, allows_more

Kind = Literal[
    "layer added", "layer removed", "layer renamed", "type", "attribute", "mode",
    "parameter added", "parameter removed", "parameter shape", "parameter dtype", "parameter trainable",
    "parameter tied", "buffer added", "buffer removed", "buffer shape", "buffer dtype", "buffer tied",
    "buffer persistent", "calls", "source", "interface", "path", "input added", "input removed", "argument", "context",
    "seed", "loss", "forwards", "input", "weights", "buffer", "output", "state", "response",
    "gradient", "gradient presence", "parameter gradient", "response gradient", "noise", "run",
]  # fmt: skip

BEHAVIOR: frozenset[Kind] = frozenset({
    "seed", "loss", "forwards", "input", "weights", "buffer", "output", "state", "response",
    "gradient", "gradient presence", "parameter gradient", "response gradient", "noise", "run",
})  # fmt: skip
"""The kinds that numbers show; the others are architecture."""

Parts = Literal["all", "architecture", "behavior"]
Tolerance = float | Mapping[str, float] | None

Side = Literal["input", "output", "gradient", "input gradient", "inner gradient", "handed", "response gradient"]
CallKey = tuple[str, bool | None, int]
"""Root, its mode where forwards of both modes were recorded, and the number of the call."""
Place = tuple[str, CallKey | None, str, str]
"""Layer, call (None: of the layer itself), side, and path or name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not as expected."""

    layer: str
    """By the actual's name; of a layer that is gone, by the expected's."""
    kind: Kind
    what: str = ""
    """Which attribute, parameter or value."""
    call: int = 0
    """Which call of the layer, from 0."""
    actual: Plain = None
    expected: Plain = None
    change: float | None = None
    """Change relative to the expected norm (integers: share of elements); inf where there was nothing."""
    noise: float | None = None
    """Measured noise of the expected; None: not measured."""
    limit: float | None = None
    """Change up to which the two count as the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One call in both records."""

    layer: str
    key: CallKey
    actual: Call
    expected: Call

    @property
    def outermost(self) -> bool:
        """Whether the call is a forward: what it takes in comes from the test."""
        return self.layer == self.actual.root and self.actual.index == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All differences between two records, and how far every value moved."""

    actual: Record
    expected: Record
    """With its layers under the actual's names."""
    found: tuple[Difference, ...] = ()
    """What differs, also in layers that were not asked for."""
    notes: tuple[Difference, ...] = ()
    """Attributes that only one of the two has: what they change, if anything, differs by itself."""
    looser: tuple[Difference, ...] = ()
    """Where the noise of the actual allows far more than that of the expected: it would pass what did not pass."""
    wanted: frozenset[str] | None = None
    """The layers that were asked for; None: all."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Layers that have another name now: expected → actual."""
    changes: Mapping[Place, Change] = field(default_factory=dict, repr=False)
    """How far each value is from what it was."""
    calls: tuple[Pair, ...] = field(default=(), repr=False)
    """The calls that are in both, in order of execution of the actual."""

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What differs in the layers that were asked for."""
        if self.wanted is None:
            return self.found
        return tuple(difference for difference in self.found if difference.layer in self.wanted)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def unknown(self) -> int:
        """Values of which neither record has numbers: they count as the same."""
        return sum(not change.known for change in self.changes.values())

    @property
    def names_before(self) -> dict[str, str]:
        """Layers that have another name now: actual → expected."""
        return {new: old for old, new in self.renamed.items()}

    def change(self, layer: str, key: CallKey | None, side: str, path: str) -> Change:
        """Return how far a value moved; unknown where it was not compared."""
        return self.changes.get((layer, key, side, path), UNKNOWN)


def compare(
    actual: Record,
    expected: Record,
    *,
    rename: Mapping[str, str] | None = None,
    layers: Collection[str] | None = None,
    tolerance: Tolerance = None,
    parts: Parts = "all",
    nondeterministic: bool = False,
) -> Comparison:
    """Return what differs between two records.

    Args:
        actual: The record of now.
        expected: The record that it should be like.
        rename: Actual glob → expected glob, for layers that have another name.
        layers: Names, in the actual, of the layers to compare; None: all.
        tolerance: Multiplies what a value may change: one number, or a number for each glob of layers.
        parts: Everything, or what numbers do not show, or what they do.
        nondeterministic: Do not compare values that moved by more than a hundredth when the expected was repeated; they
            are counted. Else noise allows a hundredth.

    Raises:
        SelectionError: ``rename`` or ``tolerance`` names no layer.
        UsageError: A tolerance is not a positive number.
        NothingObservedError: Numbers alone are to be compared, and there are none.

    >>> old, new = (
    ...     Record(model="Net", layers={"norm": Layer(name="norm", type="LayerNorm", attributes={"eps": eps})})
    ...     for eps in (1e-5, 1e-6)
    ... )
    >>> [(d.layer, d.kind, d.what, d.actual, d.expected) for d in compare(new, old).differences]
    [('norm', 'attribute', 'eps', 1e-06, 1e-05)]
    """
    __tracebackhide__ = True
    said = resolve_rename(actual, expected, rename) if rename else {}
    found = match(actual, expected, said)
    removed = [name for name in expected.layers if name not in found]
    # A layer that is gone may have left its name to another.
    names = found | {name: f"{name} (removed)" for name in removed}
    kept = set(found.values())
    original = expected
    expected = renamed(expected, names)
    comparer = _Comparer(actual, expected, _Times(tolerance, actual), nondeterministic=nondeterministic)
    moved_names = {old: new for old, new in found.items() if old != new and old not in said}
    differences = [
        *(Difference(layer=name, kind="layer added") for name in actual.layers if name not in kept),
        *(Difference(layer=name, kind="layer removed", expected=original.layers[name].type_name) for name in removed),
        *(Difference(layer=new, kind="layer renamed", actual=new, expected=old) for old, new in moved_names.items()),
        *comparer.differences(),
    ]
    if parts == "behavior" and not differences and all(not change.known for change in comparer.changes.values()):
        raise NothingObservedError(
            "nothing was compared, for neither record has numbers: run the model, or compare its architecture"
        )
    wanted = None if layers is None else {*layers, *(removed if set(layers) >= set(actual.layers) else ())}
    return Comparison(
        actual=actual,
        expected=expected,
        found=tuple(d for d in differences if parts == "all" or (d.kind in BEHAVIOR) == (parts == "behavior")),
        notes=() if parts == "behavior" else tuple(comparer.notes),
        looser=tuple(comparer.looser),
        wanted=None if wanted is None else frozenset(wanted),
        renamed={**said, **moved_names},
        changes=comparer.changes,
        calls=tuple(comparer.pairs),
    )


class _Times:
    """The user's tolerance for each layer."""

    def __init__(self, tolerance: Tolerance, record: Record) -> None:
        __tracebackhide__ = True
        given = tolerance if isinstance(tolerance, Mapping) else {} if tolerance is None else {"**": tolerance}
        for glob, times in given.items():
            if type(times) not in (int, float) or not times > 0 or math.isinf(times):
                raise UsageError(f"a tolerance multiplies the measured noise and is a positive number; got {times!r}")
            if not any(map(Glob(glob).matches, record.layers)):
                raise SelectionError(f"tolerance: {glob!r} matches none of {len(record.layers)} layers")
        self._globs = [(Glob(glob), float(times)) for glob, times in given.items()]

    def of(self, layer: str) -> float:
        """Return the factor of the last glob that means the layer."""
        if not self._globs:
            return 1.0
        return next((times for glob, times in reversed(self._globs) if glob.matches(layer)), 1.0)


class _Comparer:
    def __init__(self, actual: Record, expected: Record, times: _Times, *, nondeterministic: bool) -> None:
        self.actual, self.expected = actual, expected
        self.times = times
        self.changes: dict[Place, Change] = {}
        self.pairs: list[Pair] = []
        self.notes: list[Difference] = []
        self.looser: list[Difference] = []
        self.backward = bool(actual.backwards) and bool(expected.backwards)
        self.measured = expected.noise == "measured"
        self.nondeterministic = nondeterministic and expected.noise == "not repeatable"
        self.both_read = has_numbers(actual) and has_numbers(expected)
        self.rounding = _coarsest(expected)
        self.modes_apart = _has_both_modes(actual) or _has_both_modes(expected)

    def differences(self) -> Iterator[Difference]:
        """Yield what differs in the layers that are in both."""
        a, e = self.actual, self.expected
        if a.forwards != e.forwards:
            yield Difference(layer=ROOT, kind="forwards", what="forwards", actual=a.forwards, expected=e.forwards)
        if a.forwards and e.forwards:
            if a.backwards != e.backwards and a.loss == e.loss:
                yield Difference(
                    layer=ROOT, kind="forwards", what="backwards", actual=a.backwards, expected=e.backwards
                )
            if a.seed != e.seed:
                yield Difference(layer=ROOT, kind="seed", what="seed", actual=a.seed, expected=e.seed)
            if a.loss != e.loss:
                yield Difference(layer=ROOT, kind="loss", what="loss", actual=a.loss, expected=e.loss)
            if has_numbers(a) != has_numbers(e):
                mine, theirs = ("numbers" if has_numbers(record) else "structure alone" for record in (a, e))
                yield Difference(layer=ROOT, kind="forwards", what="record", actual=mine, expected=theirs)
        for name, layer in a.layers.items():
            if name in e.layers:
                yield from self._layer(layer, e.layers[name])
        self.pairs.sort(key=lambda pair: pair.actual.started)

    def _layer(self, a: Layer, e: Layer) -> Iterator[Difference]:
        if a.type_name != e.type_name:
            yield Difference(layer=a.name, kind="type", actual=a.type_name, expected=e.type_name)
        for name in dict.fromkeys((*e.attributes, *a.attributes)):
            mine, theirs = a.attributes.get(name), e.attributes.get(name)
            if not _equal(mine, theirs):
                found = Difference(layer=a.name, kind="attribute", what=name, actual=mine, expected=theirs)
                if name in a.attributes and name in e.attributes:
                    yield found
                else:
                    self.notes.append(found)
        if a.training != e.training:
            yield Difference(layer=a.name, kind="mode", what="training", actual=a.training, expected=e.training)
        yield from self._parameters(a, a.parameters, e.parameters, "parameter")
        yield from self._parameters(a, a.buffers, e.buffers, "buffer")
        yield from self._calls(a, e)

    # --- parameters and buffers -----------------------------------------------------------------------------------

    def _parameters(
        self, layer: Layer, actual: Sequence[Parameter], expected: Sequence[Parameter], what: str
    ) -> Iterator[Difference]:
        mine, theirs = {p.name: p for p in actual}, {p.name: p for p in expected}

        def scale() -> float:
            return max((_norm(p.gradient) for p in expected), default=0.0)

        for name in dict.fromkeys((*theirs, *mine)):
            if name not in theirs:
                yield _structural(layer.name, what, name, "added", _described(mine[name]), None)
            elif name not in mine:
                yield _structural(layer.name, what, name, "removed", None, _described(theirs[name]))
            else:
                a, e = mine[name], theirs[name]
                for aspect, x, y in (
                    ("shape", a.shape, e.shape),
                    ("dtype", a.dtype, e.dtype),
                    ("trainable", a.requires_grad, e.requires_grad),
                    ("tied", a.tied_to, e.tied_to),
                    ("persistent", a.persistent, e.persistent),
                ):
                    unknown = aspect == "persistent" and None in (x, y)
                    if x != y and not unknown and not (what == "buffer" and aspect == "trainable"):
                        shown = (_shape(v) if isinstance(v, tuple) else v for v in (x, y))
                        yield _structural(layer.name, what, name, aspect, *shown)
                if a.shape == e.shape:
                    yield from self._numbers_of(layer.name, a, e, what, scale)

    def _numbers_of(
        self, layer: str, a: Parameter, e: Parameter, what: str, scale: Callable[[], float]
    ) -> Iterator[Difference]:
        kind: Kind = "weights" if what == "parameter" else "buffer"
        if a.tied_to is None or a.tied_to != e.tied_to:  # else it was looked at where it is owned
            yield from self._value((layer, None, what, a.name), kind, a.reading, e.reading, e.dtype, "state")
        if a.after is not None or e.after is not None:
            left, was_left = a.after or a.reading, e.after or e.reading
            yield from self._value((layer, None, "after", a.name), "state", left, was_left, e.dtype, "forward")
        if self.backward and a.requires_grad and e.requires_grad:
            place = (layer, None, "parameter gradient", a.name)
            yield from self._gradient(place, "parameter gradient", a.gradient, e.gradient, e.dtype, scale)

    # --- calls ----------------------------------------------------------------------------------------------------

    def _key(self, call: Call) -> CallKey:
        return call.root, call.root_training if self.modes_apart else None, call.index

    def _calls(self, a: Layer, e: Layer) -> Iterator[Difference]:
        mine, theirs = ({self._key(call): call for call in layer.calls} for layer in (a, e))
        if mine.keys() != theirs.keys():
            yield Difference(layer=a.name, kind="calls", what="calls", actual=len(mine), expected=len(theirs))
        for key, call in mine.items():
            if key in theirs:
                pair = Pair(layer=a.name, key=key, actual=call, expected=theirs[key])
                self.pairs.append(pair)
                yield from self._call(pair)

    def _call(self, pair: Pair) -> Iterator[Difference]:
        a, e = pair.actual, pair.expected
        at = functools.partial(Difference, layer=pair.layer, call=a.index)
        for name in dict.fromkeys((*e.arguments, *a.arguments)):
            mine, theirs = a.arguments.get(name), e.arguments.get(name)
            if not (_equal(mine, theirs) or _is_default(name, a.arguments, e.arguments)):
                yield at(kind="argument", what=name, actual=mine, expected=theirs)
        for name in ("grad_enabled", "autocast"):
            mine, theirs = getattr(a, name), getattr(e, name)
            if mine != theirs:
                yield at(kind="context", what=name, actual=mine, expected=theirs)
        inputs, added, removed = _paired(a.inputs, e.inputs)
        for value in added:
            yield at(kind="input added", what=value.path, actual=_described(value))
        for value in removed:
            yield at(kind="input removed", what=value.path, expected=_described(value))
        scales = functools.partial(_scale, e), functools.partial(_scale, e, of="backward")
        for value, other in inputs:
            yield from self._values(pair, "input", value, other, scales)
        outputs, added, removed = _paired(a.outputs, e.outputs)
        for value in added:
            yield at(kind="path", what=value.path, actual=value.path)
        for value in removed:
            yield at(kind="path", what=value.path, expected=value.path)
        for value, other in outputs:
            if value.path != other.path:
                yield at(kind="path", what=value.path, actual=value.path, expected=other.path)
            yield from self._values(pair, "output", value, other, scales)
        if a.response is not None and e.response is not None:
            yield from self._responses(
                pair, a.response, e.response, {value.path: other.path for value, other in outputs}
            )

    def _values(
        self, pair: Pair, side: str, a: Value, e: Value, scales: tuple[Callable[[], float], Callable[[], float]]
    ) -> Iterator[Difference]:
        index = pair.actual.index
        if a.shape != e.shape or a.dtype != e.dtype:
            mine, theirs = _described(a), _described(e)
            yield Difference(layer=pair.layer, kind="interface", call=index, what=a.path, actual=mine, expected=theirs)
        is_input = side == "input"
        if is_input and a.source != e.source and not pair.outermost and not self._one_tensor(pair, a, e):
            yield Difference(
                layer=pair.layer, kind="source", call=index, what=a.path, actual=a.source, expected=e.source
            )
        told = not is_input or a.source is None  # else it is told of the output that it is
        place = (pair.layer, pair.key, side, a.path)
        kind: Kind = "input" if is_input else "output"
        found = self._value(place, kind, a.forward, e.forward, e.dtype, "forward", scales[0])
        yield from found if told else ()
        if self.backward and not (a.overwritten or e.overwritten):
            place = (pair.layer, pair.key, "input gradient" if is_input else "gradient", a.path)
            found = self._gradient(place, "gradient", a.backward, e.backward, e.dtype, scales[1])
            yield from found if told else ()
        if a.backward_inner is not None or e.backward_inner is not None:
            place = (pair.layer, pair.key, "inner gradient", a.path)
            scale = functools.partial(_scale, pair.expected, of="backward_inner")
            yield from self._gradient(place, "gradient", a.backward_inner, e.backward_inner, e.dtype, scale)

    def _one_tensor(self, pair: Pair, a: Value, e: Value) -> bool:
        """Whether two sources name one tensor: a container's output may be that of its last child, or not any more."""

        def found(outputs: Mapping[tuple[str, bool, str], Value], call: Call, value: Value, source: str | None) -> bool:
            made = outputs.get((call.root, call.root_training, source or ""))
            if made is None:
                return False
            change = _tolerance.change(made.forward, value.forward, measured=True)
            return change.known and not change.differs

        return found(self._outputs_now, pair.actual, a, e.source) or found(
            self._outputs_then, pair.expected, e, a.source
        )

    @functools.cached_property
    def _outputs_now(self) -> Mapping[tuple[str, bool, str], Value]:
        return _outputs(self.actual)

    @functools.cached_property
    def _outputs_then(self) -> Mapping[tuple[str, bool, str], Value]:
        return _outputs(self.expected)

    def _responses(
        self, pair: Pair, a: IsolatedResponse, e: IsolatedResponse, paths: Mapping[str, str]
    ) -> Iterator[Difference]:
        """Yield what a call answers otherwise; ``paths`` are those of its outputs, and what they were."""
        if not comparable(a, e):
            return
        at = functools.partial(Difference, layer=pair.layer, kind="response", call=pair.actual.index)
        dtype = next((value.dtype for value in pair.expected.outputs), "float32")
        pairs, gone = _handed_pairs(a.handed, e.handed, paths)
        for handed, other in pairs:
            if other is None:
                yield from _handed_alone(at(what=handed.where, actual=handed.passed or "computed"))
            elif handed.passed != other.passed:
                computed = "computed"
                yield at(what=handed.where, actual=handed.passed or computed, expected=other.passed or computed)
            elif handed.reading is not None and other.reading is not None:
                place = (pair.layer, pair.key, "handed", handed.where)
                yield from self._value(place, "response", handed.reading, other.reading, dtype, "forward")
        for other in gone:
            yield from _handed_alone(at(what=other.where, expected=other.passed or "computed"))
        lost, found = (tuple(n for n in x.without_gradient if n not in y.without_gradient) for x, y in ((a, e), (e, a)))
        for name in (*lost, *found):
            yield at(kind="response gradient", what=name, actual=name in found, expected=name in lost)
        # Gradients are put together by the names of what they are of.
        renamed = any(other is not None and handed.where != other.where for handed, other in pairs)
        if a.gradient is not None and e.gradient is not None and not (lost or found or renamed):
            place = (pair.layer, pair.key, "response gradient", "")
            yield from self._value(place, "response gradient", a.gradient, e.gradient, dtype, "backward")

    # --- values ---------------------------------------------------------------------------------------------------

    def _value(
        self,
        place: Place,
        kind: Kind,
        a: Reading,
        e: Reading,
        dtype: str,
        direction: Direction,
        scale: Callable[[], float] = float,
    ) -> Sequence[Difference]:
        if not (self.both_read or (is_read(a) and is_read(e))):  # that is said of the record as a whole
            return ()
        if self.nondeterministic and (e.noise or 0.0) > _tolerance.MOST[direction]:
            self.changes[place] = UNKNOWN
            return ()
        layer, key, _, path = place
        times = self.times.of(layer)
        found = self.changes[place] = _tolerance.change(
            a,
            e,
            direction=direction,
            dtype=dtype,
            measured=self.measured,
            scale=scale,
            times=times,
            rounding=self.rounding,
        )
        index = 0 if key is None else key[-1]
        if a.noise and allows_more(a, e, direction=direction, dtype=dtype, measured=self.measured):
            noise = Difference(layer=layer, kind="noise", what=path, call=index, actual=a.noise, expected=e.noise)
            self.looser.append(noise)
        if not found.differs:
            return ()
        numbers = {"change": found.change, "noise": found.noise, "limit": found.limit}
        return (Difference(layer=layer, kind=kind, what=path, call=index, **numbers),)

    def _gradient(
        self, place: Place, kind: Kind, a: Reading | None, e: Reading | None, dtype: str, scale: Callable[[], float]
    ) -> Sequence[Difference]:
        if a is not None and e is not None:
            return self._value(place, kind, a, e, dtype, "backward", scale)
        if a is e or not self.both_read:
            return ()
        layer, key, _, path = place
        change = self.changes[place] = GONE if a is None else CAME
        index = 0 if key is None else key[-1]
        there = {"actual": a is not None, "expected": e is not None}
        found = Difference(layer=layer, kind="gradient presence", what=path, call=index, change=change.change, **there)
        return (found,)


def comparable(a: IsolatedResponse | None, e: IsolatedResponse | None) -> bool:
    """Whether two responses are answers to the same synthetic tensors."""
    if a is None or e is None or a.reason is not None or e.reason is not None:
        return False
    if a.recipes == e.recipes:
        return True
    return all(e.recipes[name] == recipe for name, recipe in a.recipes.items() if name in e.recipes)


def children(response: IsolatedResponse) -> Mapping[str, None]:
    """Return the children of a call as they are called: ``attn``, ``attn (call 2)``."""
    return dict.fromkeys(h.where.rpartition(" ")[0] for h in response.handed)


def _structural(layer: str, what: str, name: str, aspect: str, actual: Plain, expected: Plain) -> Difference:
    kind: Kind = f"{what} {aspect}"  # type: ignore[assignment]
    return Difference(layer=layer, kind=kind, what=name, actual=actual, expected=expected)


def _has_both_modes(record: Record) -> bool:
    """Whether there are forwards in training mode and in evaluation mode of one root."""
    kinds = {(call.root, call.root_training) for layer in record.layers.values() for call in layer.calls}
    return len(kinds) > len({root for root, _ in kinds})


def _coarsest(record: Record) -> float:
    """Return the largest rounding of any dtype that a run computed in."""
    calls = [call for _, call in record.calls]
    dtypes = {call.autocast or "" for call in calls} | {
        v.dtype for call in calls for v in (*call.inputs, *call.outputs)
    }
    return max(map(_tolerance.epsilon, dtypes), default=0.0)


def _outputs(record: Record) -> Mapping[tuple[str, bool, str], Value]:
    """Return each output by the kind of its forward and its address."""
    return {
        (call.root, call.root_training, address(layer.name, call, value.path)): value
        for layer in record.layers.values()
        for call, value in layer.outputs
    }


def _equal(a: Plain, e: Plain) -> bool:
    """Whether two plain values are one, also NaN and NaN; True is not 1."""
    return type(a) is type(e) and (a == e or (a != a and e != e))


def _handed_pairs(
    actual: Sequence[EmittedTensor], expected: Sequence[EmittedTensor], paths: Mapping[str, str]
) -> tuple[Sequence[tuple[EmittedTensor, EmittedTensor | None]], Sequence[EmittedTensor]]:
    """Return what is handed on with what was handed on to the same place, and what is not any more.

    ``paths`` are those of outputs that were known by another.
    """
    was = [paths.get(handed.where, handed.where) for handed in actual]
    if was == [handed.where for handed in expected]:
        return list(zip(actual, expected, strict=True)), ()
    theirs: dict[str, list[EmittedTensor]] = {}
    for handed in expected:
        theirs.setdefault(handed.where, []).append(handed)
    pairs = [(h, theirs[where].pop(0) if theirs.get(where) else None) for h, where in zip(actual, was, strict=True)]
    gone = [handed for left in theirs.values() for handed in left]
    came = [handed for handed, other in pairs if other is None]

    def alone(handed: EmittedTensor, others: Sequence[EmittedTensor]) -> bool:
        child = _child(handed)
        tensor = child != "" and not (handed.passed or "").startswith("=")
        return tensor and sum(_child(other) == child for other in others) == 1

    # One tensor that a child gets by keyword now, and got by position then.
    renamed = {id(h): other for h in came for other in gone if _child(h) == _child(other) and alone(h, came)}
    renamed = {key: other for key, other in renamed.items() if alone(other, gone)}
    moved = set(map(id, renamed.values()))
    return [(h, other or renamed.get(id(h))) for h, other in pairs], [h for h in gone if id(h) not in moved]


def _child(handed: EmittedTensor) -> str:
    """Return the child that gets something; empty for what a call gives out."""
    return handed.where.rpartition(" ")[0]


def _handed_alone(difference: Difference) -> Sequence[Difference]:
    """Return the difference that only one of two responses hands on something; a plain False is as good as nothing."""
    return () if "=False" in (difference.actual, difference.expected) else (difference,)


def _is_default(name: str, actual: Mapping[str, Plain], expected: Mapping[str, Plain]) -> bool:
    """Whether an argument is None or False in one call and not given in the other: what it most often is by default."""
    value = actual.get(name, expected.get(name))
    return (name in actual) != (name in expected) and (value is None or value is False)


def _paired(
    actual: Sequence[Value], expected: Sequence[Value]
) -> tuple[list[tuple[Value, Value]], list[Value], list[Value]]:
    """Return which value is which, and those that came and went.

    They are paired by path; those left over (by keyword now, by position then) in order by like shape and dtype.
    """
    if [value.path for value in actual] == [value.path for value in expected]:
        return list(zip(actual, expected, strict=True)), [], []
    theirs = {value.path: value for value in expected}
    pairs = {value.path: theirs.pop(value.path) for value in actual if value.path in theirs}
    left = list(theirs.values())
    for value in actual:
        if value.path not in pairs:
            alike = (v for v in left if (v.shape, v.dtype) == (value.shape, value.dtype))
            if (other := next(alike, None)) is not None:
                pairs[value.path] = other
                left = [v for v in left if v is not other]
    added = [value for value in actual if value.path not in pairs]
    return [(value, pairs[value.path]) for value in actual if value.path in pairs], added, left


def _described(tensor: Parameter | Value) -> str:
    said = f"{_shape(tensor.shape)} {tensor.dtype}"
    return f"{said}, not persistent" if getattr(tensor, "persistent", None) is False else said


def _shape(shape: Sequence[Dimension]) -> str:
    parts = [str(d) if isinstance(d, int) else f"{d[0]}..{d[1]}" for d in shape]
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def _norm(reading: Reading | None) -> float:
    statistics = None if reading is None else reading.statistics
    return 0.0 if statistics is None else statistics.norm


def _scale(call: Call, *, of: str = "forward") -> float:
    """Return the largest norm of a quantity in a call: what is zero in exact arithmetic is judged against it."""
    values = filter(is_quantity, (*call.inputs, *call.outputs))
    return max((_norm(getattr(value, of)) for value in values), default=0.0)


def is_quantity(value: Value) -> bool:
    """Whether a value is neither numbers of something, as tokens are, nor an attention mask."""
    numbers = value.forward.statistics
    if not value.dtype.startswith(("float", "bfloat", "complex")):
        return False
    if numbers is None or numbers.min is None or numbers.max is None:
        return True
    return numbers.min > -1e4 or -numbers.min < 100 * numbers.max
