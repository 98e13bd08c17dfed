"""Two records → their differences, layer by layer; `diagnosis` finds the causes.

Structure is compared exactly, numbers within the tolerance of each value. A difference is reported once, where it is
made: at the output and not at the input that takes it, at the owner of a tied weight. The change of every value is
kept, also of those that are the same, because a diagnosis asks what did not change.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from pytest_modelprobe.exceptions import NothingObservedError, SelectionError, UsageError
from pytest_modelprobe.record import (
    ROOT,
    ROUNDING_OF_RESPONSES,
    Call,
    Glob,
    IsolatedResponse,
    Layer,
    NamesBefore,
    Parameter,
    Plain,
    Reading,
    Record,
    Value,
    address,
    containers,
    gc_paused,
    has_numbers,
    is_read,
    nearest,
    renamed,
    resolve_rename,
    response_dtype,
)
from pytest_modelprobe.text import count, shape

from . import tolerance as _tolerance
from .matching import (
    comparable,
    has_both_modes,
    is_drawn_otherwise,
    is_same,
    match,
    paired_emitted,
    paired_values,
    with_current_paths,
)
from .tolerance import (
    BEHAVIOR,
    CAME,
    GONE,
    UNKNOWN,
    CallPair,
    Comparison,
    Difference,
    DifferenceKind,
    Direction,
    Parts,
    Precision,
    Tolerance,
    ValueChange,
    ValueKey,
    allows_more,
    norm,
)


def compare(
    actual: Record,
    expected: Record,
    *,
    rename: Mapping[str, str] | None = None,
    layers: Collection[str] | None = None,
    tolerance: Tolerance = None,
    parts: Parts = "all",
    nondeterministic: bool = False,
    strict: bool = False,
    precision: Precision | None = None,
) -> Comparison:
    """Return what differs between two records.

    Args:
        actual: The new record.
        expected: The record that it is compared with.
        rename: Actual glob → expected glob, for renamed layers.
        layers: Names, in the actual, of the layers to compare; None: all.
        tolerance: Factor of the tolerance of each value: one number, or a number for each glob of layers.
        parts: Compare everything, the architecture alone, or the values alone.
        nondeterministic: Do not compare values whose noise is above a hundredth; they are counted.
        strict: Whether a refactoring differs, where every value is the same.
        precision: What is known of the expected values. By default it is whether their noise was measured.

    Raises:
        SelectionError: ``rename`` or ``tolerance`` names no layer.
        UsageError: A tolerance is not a positive number.
        NothingObservedError: ``parts`` is ``behavior``, and there are no numbers to compare.

    >>> old, new = (
    ...     Record(model="Net", layers={"norm": Layer(name="norm", type="LayerNorm", attributes={"eps": eps})})
    ...     for eps in (1e-5, 1e-6)
    ... )
    >>> [(d.layer, d.kind, d.what, d.actual, d.expected) for d in compare(new, old).differences]
    [('norm', 'attribute', 'eps', 1e-06, 1e-05)]
    """
    __tracebackhide__ = True
    renames = resolve_rename(actual, expected, rename) if rename else {}
    found = match(actual, expected, renames)
    removed = {name: layer.type_name for name, layer in expected.layers.items() if name not in found}
    # Another layer may have the name of a removed one.
    names = found | {name: f"{name} (removed)" for name in removed if name != ROOT or ROOT in actual.layers}
    kept = set(found.values())
    moved_names = {old: new for old, new in found.items() if old != new and old not in renames}
    before = {new: old for old, new in {**renames, **moved_names}.items()}
    expected, names_before, other_paths = with_current_paths(actual, renamed(expected, names), before)
    comparer = _Comparer(actual, expected, names_before, tolerance_factor(tolerance, actual))
    if precision is not None:
        comparer.precision = precision
    comparer.leaves_out_noisy = nondeterministic and expected.noise == "not repeatable"
    with gc_paused():
        differences = [
            *(Difference(layer=name, kind="layer added") for name in actual.layers if name not in kept),
            *(Difference(layer=name, kind="layer removed", expected=kind) for name, kind in removed.items()),
            *(Difference(layer=n, kind="layer renamed", actual=n, expected=old) for old, n in moved_names.items()),
            *comparer.differences(),
            *(difference for difference in other_paths if strict or difference.kind == "path"),
        ]
    notes = [] if strict else [difference for difference in other_paths if difference.kind == "name"]
    found_of_parts = tuple(d for d in differences if parts == "all" or (d.kind in BEHAVIOR) == (parts == "behavior"))
    if parts == "behavior" and not found_of_parts and not any(change.known for change in comparer.changes.values()):
        raise NothingObservedError(
            "nothing was compared, for no value has numbers in both records: run the model, or compare its architecture"
        )
    wanted = None if layers is None else {*layers, *(removed if set(layers) >= set(actual.layers) else ())}
    return Comparison(
        actual=actual,
        expected=expected,
        found=found_of_parts,
        notes=() if parts == "behavior" else (*comparer.notes, *notes),
        strict=strict,
        looser=tuple(comparer.looser),
        wanted=None if wanted is None else frozenset(wanted),
        renamed={**renames, **moved_names},
        names_before=names_before,
        changes=comparer.changes,
        calls=tuple(comparer.pairs),
    )


def tolerance_factor(tolerance: Tolerance, record: Record) -> Callable[[str], float]:
    """Return a function from a layer to the user's factor of its tolerance: that of the last glob that matches it."""
    __tracebackhide__ = True
    given = tolerance if isinstance(tolerance, Mapping) else {} if tolerance is None else {"**": tolerance}
    for glob, times in given.items():
        if type(times) not in (int, float) or not times > 0 or math.isinf(times):
            raise UsageError(f"a tolerance multiplies the measured noise and is a positive number; got {times!r}")
        if not any(map(Glob(glob).matches, record.layers)):
            near = nearest(glob, record.layers)
            hint = f"; nearest: {', '.join(map(repr, near))}" if near else ""
            raise SelectionError(f"tolerance: {glob!r} matches none of {count(len(record.layers), 'layer')}{hint}")
    globs = [(Glob(glob), float(times)) for glob, times in list(given.items())[::-1]]
    return lambda layer: next((times for glob, times in globs if glob.matches(layer)), 1.0)


def begins(differing: Collection[str], agreeing: Collection[str], takers: Mapping[str, Collection[str]]) -> list[str]:
    """Return the layers whose difference nothing makes up for.

    That is neither a layer around it, nor all layers that take what it returns.

    Args:
        differing: Layers that return something else, in the order in which they return.
        agreeing: Layers that return the same.
        takers: Layer → the layers that take what it returns, as far as they are known.

    >>> begins(["conv1", "conv2", "norm2", "(root)"], ["norm1"], {"conv1": ["norm1"], "conv2": ["norm2"]})
    ['conv2', 'norm2', '(root)']
    """
    made_up = {*agreeing}
    for name in reversed([*differing]):
        taken = takers.get(name)
        if not made_up.isdisjoint(containers(name)) or (taken and made_up.issuperset(taken)):
            made_up.add(name)
    return [name for name in differing if name not in made_up]


class _Comparer:
    def __init__(self, actual: Record, expected: Record, names: NamesBefore, times: Callable[[str], float]) -> None:
        self.actual, self.expected, self.names = actual, expected, names
        self.times = times
        self.changes: dict[ValueKey, ValueChange] = {}
        self.within_tolerance: dict[tuple[int, int, str, Direction, float, bool], ValueChange] = {}
        """By the ids of two readings: an input has the readings of the output that it is."""
        self.pairs: list[CallPair] = []
        self.notes: list[Difference] = []
        self.looser: list[Difference] = []
        self.backward = bool(actual.backwards) and bool(expected.backwards)
        self.precision: Precision = "measured" if expected.noise == "measured" else "unmeasured"
        self.leaves_out_noisy = False
        """Whether values that do not repeat are not compared."""
        self.is_same_torch = expected.versions.get("torch") in (None, actual.versions.get("torch"))
        """Whether the same version of torch made both, as far as is recorded."""
        self.both_read = has_numbers(actual) and has_numbers(expected)
        calls = [call for _, call in expected.calls]
        dtypes = {call.autocast or "" for call in calls} | {
            v.dtype for call in calls for v in (*call.inputs, *call.outputs)
        }
        self.rounding = max(map(_tolerance.epsilon, dtypes), default=0.0)
        self.has_both_modes = has_both_modes(actual) or has_both_modes(expected)

    def differences(self) -> Iterator[Difference]:
        """Yield the differences of the layers that are in both records."""
        yield from self._run()
        for name, layer in self.actual.layers.items():
            if name in self.expected.layers:
                yield from self._layer(layer, self.expected.layers[name])
        yield from self._order()
        self.pairs.sort(key=lambda pair: pair.actual.started)
        # forwards of other samples, where no input says so: only a file that was edited has such
        for pair in self.pairs:
            changes = [self.changes.get((pair.layer, pair.key, "input", value.path)) for value in pair.actual.inputs]
            told = any(change is not None and change.differs for change in changes)
            if pair.has_signs_of_inputs and not (pair.same_signs or told):
                mine, theirs = pair.actual.samples, pair.expected.samples
                yield Difference(layer=pair.layer, kind="input", what="samples", actual=mine, expected=theirs)

    def _order(self) -> Iterator[Difference]:
        """Yield the first parameter that is at another position, among those of both records, than it was."""
        mine, theirs = (
            [(layer.name, p.name) for layer in record.layers.values() for p in layer.parameters if p.tied_to is None]
            for record in (self.actual, self.expected)
        )
        both = {*mine} & {*theirs}
        now, then = ([place for place in order if place in both] for order in (mine, theirs))
        moved = next(((i, place) for i, place in enumerate(now) if place != then[i]), None)
        if moved is not None:
            position, (layer, name) = moved
            was = then.index((layer, name))
            yield Difference(layer=layer, kind="parameter order", what=name, actual=position, expected=was)

    def _run(self) -> Iterator[Difference]:
        """Yield what differs in how the model was run."""
        a, e = self.actual, self.expected
        told: list[tuple[DifferenceKind, str, Plain, Plain]] = [("forwards", "forwards", a.forwards, e.forwards)]
        if a.forwards and e.forwards:
            if a.loss == e.loss:
                told.append(("forwards", "backwards", a.backwards, e.backwards))
            now, then = ("numbers" if has_numbers(record) else "structure alone" for record in (a, e))
            told += [("seed", "seed", a.seed, e.seed), ("loss", "loss", a.loss, e.loss)]
            told.append(("forwards", "record", now, then))
        for kind, what, mine, theirs in told:
            if mine != theirs:
                yield Difference(layer=ROOT, kind=kind, what=what, actual=mine, expected=theirs)
        yield from self._optimizers()

    def _optimizers(self) -> Iterator[Difference]:
        """Yield what differs in how optimizers took a step."""
        at = functools.partial(Difference, layer=ROOT, kind="optimizer")
        actual, expected = self.actual.optimizers, self.expected.optimizers
        if not actual or not expected:
            return  # one of the two is no step: the other differences say so
        if len(actual) != len(expected):
            yield at(what="groups of parameters", actual=len(actual), expected=len(expected))
        for number, (a, e) in enumerate(zip(actual, expected, strict=False)):
            of = f" of group {number}" if len(expected) > 1 else ""
            if a.optimizer != e.optimizer:
                yield at(what=f"optimizer{of}", actual=a.optimizer, expected=e.optimizer)
            for name, mine, theirs in _unequal(a.options, e.options):
                if name in a.options and name in e.options:
                    yield at(what=f"{name}{of}", actual=mine, expected=theirs)
        mine, theirs = (
            None if r.applied is None else r.applied.partition(" by ")[0] for r in (self.actual, self.expected)
        )
        if None not in (mine, theirs) and mine != theirs:
            yield at(what="gradients", actual=self.actual.applied, expected=self.expected.applied)

    def _layer(self, a: Layer, e: Layer) -> Iterator[Difference]:
        if a.type_name != e.type_name:
            yield Difference(layer=a.name, kind="type", actual=a.type_name, expected=e.type_name)
        for name, mine, theirs in _unequal(a.attributes, e.attributes):
            # Versions of libraries add attributes. Of the same torch its own are there, or were cut out of the file.
            is_known = a.type_name == e.type_name and self.is_same_torch and _is_given_to_torch(a.type, name)
            is_cut_out = is_known and name not in e.attributes
            then = "not in the file" if is_cut_out else theirs
            found = Difference(layer=a.name, kind="attribute", what=name, actual=mine, expected=then)
            if is_cut_out or (name in a.attributes and name in e.attributes):
                yield found
            else:
                self.notes.append(found)
        if a.training != e.training:
            yield Difference(layer=a.name, kind="mode", what="training", actual=a.training, expected=e.training)
        if a.parameters or e.parameters:
            yield from self._parameters(a, a.parameters, e.parameters, "parameter")
        if a.buffers or e.buffers:
            yield from self._parameters(a, a.buffers, e.buffers, "buffer")
        yield from self._calls(a, e)

    # --- parameters and buffers -----------------------------------------------------------------------------------

    def _parameters(
        self, layer: Layer, actual: Sequence[Parameter], expected: Sequence[Parameter], what: str
    ) -> Iterator[Difference]:
        mine, theirs = {p.name: p for p in actual}, {p.name: p for p in expected}
        for name in dict.fromkeys((*theirs, *mine)):
            a, e = mine.get(name), theirs.get(name)
            if a is None or e is None:
                came_or_went = "added" if e is None else "removed"
                now, then = (None if one is None else _description(one) for one in (a, e))
                yield _structural(layer, what, name, came_or_went, now, then)
                continue
            for aspect, x, y in zip(_ASPECTS, _aspects(a), _aspects(e), strict=True):
                unknown = aspect == "persistent" and None in (x, y)
                if x != y and not unknown and not (what == "buffer" and aspect == "trainable"):
                    shown = (shape(v) if isinstance(v, tuple) else v for v in (x, y))
                    yield _structural(layer, what, name, aspect, *shown)
            if a.shape == e.shape:
                yield from self._parameter_values(layer.name, a, e, what)

    def _parameter_values(self, layer: str, a: Parameter, e: Parameter, what: str) -> Iterator[Difference]:
        kind: DifferenceKind = "weights" if what == "parameter" else "buffer"
        if a.tied_to is None or a.tied_to != e.tied_to:  # else reported at its owner
            yield from self._value((layer, None, what, a.name), kind, a.reading, e.reading, e.dtype, "state")
        if a.after is not None or e.after is not None:
            left, was_left = a.after or a.reading, e.after or e.reading
            yield from self._value((layer, None, "after", a.name), "state", left, was_left, e.dtype, "forward")
        if self.backward and a.requires_grad and e.requires_grad:
            place = (layer, None, "parameter gradient", a.name)
            rounding = self.rounding * _rounding_growth(self.expected.layers[layer], e)
            yield from self._gradient(place, "parameter gradient", a.gradient, e.gradient, e.dtype, e.reading, rounding)
        if a.requires_grad and e.requires_grad and a.left_out != e.left_out:
            at = functools.partial(Difference, layer=layer, kind="update presence", what=a.name)
            yield at(actual=not a.left_out, expected=not e.left_out)
        elif a.group != e.group and len(self.actual.optimizers) == len(self.expected.optimizers):
            yield Difference(layer=layer, kind="optimizer", what=f"{a.name} group", actual=a.group, expected=e.group)
        if a.update is not None and e.update is not None:
            yield from self._update((layer, None, "update", a.name), a.update, e.update, e)

    def _update(self, place: ValueKey, a: Reading, e: Reading, expected: Parameter) -> Sequence[Difference]:
        """Return how what an optimizer added differs.

        An optimizer such as Adam brings every gradient to one size, also one that is rounding alone: an update of such
        a gradient says nothing, unless it came or went.
        """
        gradient = norm(expected.applied or expected.gradient)
        if gradient <= _tolerance.ROUNDING * self._largest_gradient.beside(expected.reading) and norm(a) and norm(e):
            self.changes[place] = UNKNOWN
            return ()
        return self._value(place, "update", a, e, expected.dtype, "backward", lambda: self._largest_update)

    @functools.cached_property
    def _largest_update(self) -> float:
        return max((norm(own.update) for own in self.expected.parameters), default=0.0)

    # --- calls ----------------------------------------------------------------------------------------------------

    def _calls(self, a: Layer, e: Layer) -> Iterator[Difference]:
        mine, theirs = (
            {(call.root, call.root_training if self.has_both_modes else None, call.index): call for call in layer.calls}
            for layer in (a, e)
        )
        if mine.keys() != theirs.keys():
            yield Difference(layer=a.name, kind="calls", what="calls", actual=len(mine), expected=len(theirs))
        for key, call in mine.items():
            if key in theirs:
                pair = CallPair(layer=a.name, key=key, actual=call, expected=theirs[key])
                self.pairs.append(pair)
                yield from self._call(pair)

    def _call(self, pair: CallPair) -> Iterator[Difference]:
        a, e = pair.actual, pair.expected
        at = functools.partial(Difference, layer=pair.layer, call=a.index)
        for name, mine, theirs in _unequal(a.arguments, e.arguments):
            if not _is_default(name, a.arguments, e.arguments):
                yield at(kind="argument", what=name, actual=mine, expected=theirs)
        for name in ("grad_enabled", "autocast"):
            mine, theirs = getattr(a, name), getattr(e, name)
            if mine != theirs:
                yield at(kind="context", what=name, actual=mine, expected=theirs)
        inputs, added, removed = paired_values(a.inputs, e.inputs)
        for value in added:
            yield at(kind="input added", what=value.path, actual=_description(value))
        for value in removed:
            yield at(kind="input removed", what=value.path, expected=_description(value))
        scale = _Scale(e)
        for value, other in inputs:
            yield from self._values(pair, "input", value, other, scale)
        outputs, added, removed = paired_values(a.outputs, e.outputs)
        for value in added:
            yield at(kind="path", what=value.path, actual=value.path)
        for value in removed:
            yield at(kind="path", what=value.path, expected=value.path)
        for value, other in outputs:
            if value.path != other.path:
                yield at(kind="path", what=value.path, actual=value.path, expected=other.path)
            yield from self._values(pair, "output", value, other, scale)
        if a.response is not None and e.response is not None:
            yield from self._responses(pair, a.response, e.response)

    def _values(self, pair: CallPair, side: str, a: Value, e: Value, scale: _Scale) -> Iterator[Difference]:
        at = functools.partial(Difference, layer=pair.layer, call=pair.actual.index, what=a.path)
        if a.shape != e.shape or a.dtype != e.dtype:
            yield at(kind="interface", actual=_description(a), expected=_description(e))
        is_input = side == "input"
        if is_input and a.source != e.source and not pair.outermost and not self._is_same_tensor(pair, a, e):
            yield at(kind="source", actual=a.source, expected=e.source)
        place = (pair.layer, pair.key, side, a.path)
        kind: DifferenceKind = "input" if is_input else "output"
        same_signs = pair.same_signs
        alone = same_signs or (is_input and pair.has_signs_of_inputs)
        found = [*self._value(place, kind, a.forward, e.forward, e.dtype, "forward", scale, same_signs=alone)]
        if self.backward and not (a.overwritten or e.overwritten):
            place = (pair.layer, pair.key, "input gradient" if is_input else "gradient", a.path)
            gradients = a.backward, e.backward
            found += self._gradient(place, "gradient", *gradients, e.dtype, e.forward, same_signs=same_signs)
        if not is_input or a.source is None or pair.outermost:  # else the difference is reported at the output
            yield from found
        if a.backward_inner is not None or e.backward_inner is not None:
            place = (pair.layer, pair.key, "inner gradient", a.path)
            gradients = a.backward_inner, e.backward_inner
            yield from self._gradient(place, "gradient", *gradients, e.dtype, e.forward, same_signs=same_signs)

    def _is_same_tensor(self, pair: CallPair, a: Value, e: Value) -> bool:
        """Whether two sources are the same tensor, as the output of a container and of its last child.

        A source that is no output of the record, as in an edited file, is the same tensor as no other.
        """
        now, then = self._outputs_now, self._outputs_then
        if a.source is not None and _place(pair.actual, a.source) not in now:
            return False
        made, was_made = now.get(_place(pair.actual, e.source)), then.get(_place(pair.expected, a.source))
        both = ((made, a), (was_made, e))
        return any(output is not None and is_same(output.forward, value.forward) for output, value in both)

    @functools.cached_property
    def _largest_gradient(self) -> _tolerance.LargestGradient:
        return _tolerance.largest_gradient(self.expected)

    @functools.cached_property
    def _outputs_now(self) -> Mapping[_Place, Value]:
        return _outputs(self.actual)

    @functools.cached_property
    def _outputs_then(self) -> Mapping[_Place, Value]:
        return _outputs(self.expected)

    def _responses(self, pair: CallPair, a: IsolatedResponse, e: IsolatedResponse) -> Iterator[Difference]:
        """Yield the differences of isolated responses."""
        if not comparable(a, e) or is_drawn_otherwise(pair.layer, a, self.names):
            return
        at = functools.partial(Difference, layer=pair.layer, kind="response", call=pair.actual.index)
        dtype, rounding = response_dtype(pair.expected), ROUNDING_OF_RESPONSES
        pairs, gone = paired_emitted(a.handed, e.handed)
        for handed, other in pairs:
            if other is None:
                yield from _one_sided(at(what=handed.where, actual=handed.passed or _COMPUTED))
            elif handed.passed != other.passed:
                yield at(what=handed.where, actual=handed.passed or _COMPUTED, expected=other.passed or _COMPUTED)
            elif handed.reading is not None and other.reading is not None:
                place = (pair.layer, pair.key, "handed", handed.where)
                readings = handed.reading, other.reading
                yield from self._value(place, "response", *readings, dtype, "forward", rounding=rounding)
        for other in gone:
            yield from _one_sided(at(what=other.where, expected=other.passed or _COMPUTED))
        lost, found = (tuple(n for n in x.without_gradient if n not in y.without_gradient) for x, y in ((a, e), (e, a)))
        # A mask of bools has no gradient.
        others = {value.path for value in (*pair.actual.inputs, *pair.expected.inputs) if not value.is_floating}
        for name in (name for name in (*lost, *found) if name not in others):
            yield at(kind="response gradient", what=name, actual=name in found, expected=name in lost)
        if a.gradient is not None and e.gradient is not None and not (lost or found):
            place = (pair.layer, pair.key, "response gradient", "")
            gradients = a.gradient, e.gradient
            yield from self._value(place, "response gradient", *gradients, dtype, "backward", rounding=rounding)

    # --- values ---------------------------------------------------------------------------------------------------

    def _value(
        self,
        place: ValueKey,
        kind: DifferenceKind,
        a: Reading,
        e: Reading,
        dtype: str,
        direction: Direction,
        scale: Callable[[], float] = float,
        rounding: float | None = None,
        *,
        same_signs: bool = True,
    ) -> Sequence[Difference]:
        if not (self.both_read or (is_read(a) and is_read(e))):  # reported once for the whole record
            return ()
        if self.leaves_out_noisy and (e.noise or 0.0) > _tolerance.LARGEST_TOLERANCE[direction]:
            self.changes[place] = UNKNOWN
            return ()
        layer, key, _, path = place
        times = self.times(layer)
        pair = id(a), id(e), dtype, direction, times, same_signs
        found = self.within_tolerance.get(pair)
        if found is None:
            found = _tolerance.change(
                a,
                e,
                direction=direction,
                dtype=dtype,
                precision=self.precision,
                scale=scale,
                times=times,
                rounding=self.rounding if rounding is None else rounding,
                same_signs=same_signs,
            )
            if found.change == math.inf:
                found = found._replace(sizes=_tolerance.sizes(a, e))
            of_call = isinstance(scale, _Scale) and scale.computed is not None
            if not found.differs and not of_call:
                self.within_tolerance[pair] = found
        self.changes[place] = found
        at = functools.partial(Difference, layer=layer, what=path, call=0 if key is None else key[-1])
        if a.noise and allows_more(a, e, direction=direction, dtype=dtype, precision=self.precision):
            self.looser.append(at(kind="noise", actual=a.noise, expected=e.noise))
        if not found.differs:
            return ()
        return (at(kind=kind, change=found.change, noise=found.noise, limit=found.limit, sizes=found.sizes),)

    def _gradient(
        self,
        place: ValueKey,
        kind: DifferenceKind,
        a: Reading | None,
        e: Reading | None,
        dtype: str,
        of: Reading,
        rounding: float | None = None,
        *,
        same_signs: bool = True,
    ) -> Sequence[Difference]:
        if a is not None and e is not None:
            scale = functools.partial(self._largest_gradient.beside, of)
            return self._value(place, kind, a, e, dtype, "backward", scale, rounding, same_signs=same_signs)
        if a is e or not self.both_read:
            return ()
        layer, key, _, path = place
        change = self.changes[place] = GONE if a is None else CAME
        at = functools.partial(Difference, layer=layer, what=path, call=0 if key is None else key[-1])
        presence = at(kind="gradient presence", change=change.change, actual=a is not None, expected=e is not None)
        return (presence,)


_ASPECTS = ("shape", "dtype", "trainable", "tied", "persistent")
_aspects = operator.attrgetter("shape", "dtype", "requires_grad", "tied_to", "persistent")


_MASKING = -1e4
"""From here on a number may stand for minus infinity: some masks have -10,000, others the least of their dtype."""

_ONE_SIDED = 100.0
"""Smallest over largest element, without signs, from which on values are no activations: these have both signs."""

_COMPUTED = "computed"
"""Stands for a tensor that is none of the synthetic ones, where the other response hands on one of these."""

_Place = tuple[str, bool, str]
"""Root, mode and address of an output."""


def _structural(layer: Layer, what: str, name: str, aspect: str, actual: Plain, expected: Plain) -> Difference:
    kind: DifferenceKind = f"{what} {aspect}"  # type: ignore[assignment]
    return Difference(layer=layer.name, kind=kind, what=name, actual=actual, expected=expected)


def _rounding_growth(layer: Layer, parameter: Parameter) -> float:
    """Return the factor of the rounding of a parameter's gradient, which is a sum over the rows of outputs.

    A narrow dtype may round after each addition. Two orders of ``n`` random numbers then differ by up to sqrt(n) / 4
    epsilon of their sum. Noise allows four anyway.
    """
    outputs = sum(value.forward.statistics.count for _, value in layer.outputs if value.forward.statistics is not None)
    own = parameter.reading.statistics
    rows = outputs / own.count if own is not None and own.count else 0.0
    return max(1.0, math.sqrt(rows) / 16)


def _outputs(record: Record) -> Mapping[_Place, Value]:
    """Return the outputs by their places."""
    return {
        _place(call, address(layer.name, call, value.path)): value
        for layer in record.layers.values()
        for call, value in layer.outputs
    }


def _place(call: Call, source: str | None) -> _Place:
    return call.root, call.root_training, source or ""


def _is_given_to_torch(kind: str, name: str) -> bool:
    """Whether an attribute is an argument of a class of torch's own. What a user sets on a layer is none.

    >>> _is_given_to_torch("torch.nn.modules.dropout.Dropout", "p"), _is_given_to_torch("net.Dropout", "p")
    (True, False)
    """
    module, _, name_of_class = kind.rpartition(".")
    found = getattr(sys.modules.get(module), name_of_class, None) if module.startswith("torch.nn.") else None
    return isinstance(found, type) and name in inspect.signature(found).parameters


def _unequal(actual: Mapping[str, Plain], expected: Mapping[str, Plain]) -> Iterator[tuple[str, Plain, Plain]]:
    """Yield name and values of the entries that differ; None is no entry."""
    for name in expected if actual.keys() == expected.keys() else dict.fromkeys((*expected, *actual)):
        mine, theirs = actual.get(name), expected.get(name)
        if not _is_equal(mine, theirs):
            yield name, mine, theirs


def _is_equal(a: Plain, b: Plain) -> bool:
    """Whether two plain values are equal: numbers as float32, NaN and NaN, 1 and 1.0, but not 1 and True."""
    if isinstance(a, int | float) and isinstance(b, int | float) and bool not in (type(a), type(b)):
        return a == b or (a != a and b != b) or (float in (type(a), type(b)) and math.isclose(a, b, rel_tol=1e-7))
    return type(a) is type(b) and a == b


def _one_sided(difference: Difference) -> Sequence[Difference]:
    """Return the difference of a value in one response only; a plain False counts as no value."""
    return () if "=False" in (difference.actual, difference.expected) else (difference,)


def _is_default(name: str, actual: Mapping[str, Plain], expected: Mapping[str, Plain]) -> bool:
    """Whether an argument is None or False in one call and missing in the other: probably its default."""
    value = actual.get(name, expected.get(name))
    return (name in actual) != (name in expected) and (value is None or value is False)


def _description(tensor: Parameter | Value) -> str:
    said = f"{shape(tensor.shape)} {tensor.dtype}"
    return f"{said}, not persistent" if getattr(tensor, "persistent", None) is False else said


class _Scale:
    """The largest norm of a value in a call, which one that is zero in exact arithmetic is compared with.

    Computed once, when a value that differs needs it: few do.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self.computed: float | None = None
        """The norm, or `None` as long as no value needed it."""

    def __call__(self) -> float:
        if self.computed is None:
            values = filter(is_quantity, (*self._call.inputs, *self._call.outputs))
            self.computed = max((_tolerance.norm(value.forward) for value in values), default=0.0)
        return self.computed


def is_quantity(value: Value) -> bool:
    """Whether a value is floating-point and no attention mask, whose norm says nothing about other values.

    A mask has minus infinity, or a number that stands for it, where it masks, and zeros elsewhere.
    """
    numbers = value.forward.statistics
    if not value.is_floating:
        return False
    if numbers is None or numbers.min is None or numbers.max is None:
        return True
    if numbers.neginf and numbers.min == numbers.max == 0:
        return False
    return numbers.min > _MASKING or -numbers.min < _ONE_SIDED * numbers.max
