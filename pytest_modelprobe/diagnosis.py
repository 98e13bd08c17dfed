"""Differences → causes: which module's own code, attribute or weights changed. No text, no torch.

Two witnesses speak of a module's own code. Its *response* to synthetic inputs, alone, is independent of everything
upstream and below, so that any number of changes are told apart. *Propagation* looks at the run itself: what came in
matches, what went out does not. Where both can speak and only propagation does, a cause is *possible*.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .compare import BEHAVIOUR, Comparison, Difference, Kind, Pair, comparable
from .course import Course, Step
from .record import ROOT, Plain, Reading
from .tolerance import Change

CauseKind = Literal["input", "seed", "architecture", "attribute", "weights", "buffers", "computation", "gradient"]
Witness = Literal["recorded", "isolated", "propagation", "both"]

_AMPLIFICATION = 10.0
"""A module that makes this much more of what came in, in units of what is allowed, is more than sensitive."""

_DRIFT = "drift first visible here"

_FORWARD: frozenset[Kind] = frozenset({"input", "output", "state"})

_STRUCTURE: frozenset[Kind] = frozenset({
    "parameter added", "parameter removed", "parameter shape", "parameter dtype", "parameter trainable",
    "parameter tied", "buffer added", "buffer removed", "buffer shape", "buffer dtype", "buffer tied",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A difference that nothing upstream explains."""

    kind: CauseKind
    layer: str
    what: str = ""
    """Attribute or parameter name; of a computation where in the code: ``between norm1 and attn``, or empty."""
    actual: Plain = None
    expected: Plain = None
    change: float | None = None
    """Relative change of what it changed first: the layer's output, the weight itself."""
    noise: float | None = None
    witness: Witness = "recorded"
    hints: tuple[str, ...] = ()
    """What the change looks like: ``a permutation``, ``scaled by 2``, ``shifted``."""
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All causes of the differences between two records, most basic first."""

    comparison: Comparison
    causes: tuple[Cause, ...] = ()
    possible: tuple[Cause, ...] = ()
    """Those of which not all inputs are known, or that one of two witnesses does not confirm."""
    moved: tuple[str, ...] = ()
    """Layers whose values changed after a cause, in order of execution; their gradients if no value did."""
    not_judged: tuple[str, ...] = ()
    """Layers after a cause that could not be looked at alone."""
    unknown: str | None = None
    """Why the cause cannot be told, where it cannot."""


def diagnose(comparison: Comparison) -> Diagnosis:
    """Return the causes of the differences.

    >>> from .compare import compare
    >>> from .record import Layer, Record
    >>> old, new = (
    ...     Record(model="Net", layers={"norm": Layer(name="norm", type="LayerNorm", attributes={"eps": eps})})
    ...     for eps in (1e-5, 1e-6)
    ... )
    >>> [(c.kind, c.layer, c.what) for c in diagnose(compare(new, old)).causes]
    [('attribute', 'norm', 'eps')]
    """
    if comparison.same:
        return Diagnosis(comparison=comparison)
    return _Diagnoser(comparison).diagnosis()


class _Diagnoser:
    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.of: dict[str, list[Difference]] = {}
        self.of_call: dict[tuple[str, int], list[Difference]] = {}
        for difference in comparison.differences:
            self.of.setdefault(difference.layer, []).append(difference)
            self.of_call.setdefault((difference.layer, difference.call), []).append(difference)
        self.pairs = {(pair.layer, pair.key): pair for pair in comparison.calls}
        self.first = {pair.layer: pair for pair in reversed(comparison.calls)}
        course = Course(comparison.actual)
        self.course = course.started
        self.inside: dict[Step | None, list[Step]] = {}
        for step in course.started:
            self.inside.setdefault(step.around, []).append(step)
        by_call = {id(pair.actual): pair for pair in comparison.calls}
        self.pair_of = {id(step): by_call[id(step.call)] for step in course.started if id(step.call) in by_call}
        self.added = {d.layer for d in comparison.differences if d.kind == "layer added"}
        self.removed = {d.layer for d in comparison.differences if d.kind == "layer removed"}
        self.caller = _callers(Course(comparison.expected).started) | _callers(self.course)

    def diagnosis(self) -> Diagnosis:
        recorded = [*self._inputs(), *self._architecture(), *self._attributes(), *self._weights()]
        computation, possible = self._computation(recorded)
        gradient = self._gradient([*recorded, *computation], self._explained(recorded))
        causes = [*map(self._with_effect, recorded), *computation, *gradient]
        to_blame = {cause.layer for cause in causes}
        moved = self._moved(_FORWARD) or self._moved(BEHAVIOUR)
        moved = tuple(name for name in moved if name not in to_blame)
        return Diagnosis(
            comparison=self.comparison,
            causes=tuple(causes),
            possible=tuple(c for c in possible if c.layer not in to_blame and not (causes and _DRIFT in c.hints)),
            moved=moved,
            not_judged=tuple(name for name in moved if not self._judged(name)),
            unknown=None if causes or possible else self._why_unknown(),
        )

    # --- what the records say by themselves -----------------------------------------------------------------------

    def _inputs(self) -> Iterator[Cause]:
        for difference in self._differences("seed", "loss"):
            kind: CauseKind = "seed" if difference.kind == "seed" else "input"
            yield _cause(kind, [difference])
        for pair in self.comparison.calls:
            if _is_outermost(pair):
                shaped = self._of_call(pair, "interface", what_starts="input")
                found = self._of_call(pair, "input", "argument")
                if shaped:
                    yield _cause("input", [*shaped, *found])
                elif found:
                    worst = max(found, key=lambda d: d.change or 0.0)
                    yield dataclasses.replace(
                        _cause("input", [worst, *found]), what=", ".join(dict.fromkeys(d.what for d in found))
                    )

    def _architecture(self) -> Iterator[Cause]:
        for kind, what in (("layer added", "added"), ("layer removed", "removed")):
            found = {d.layer: d for d in self._differences(kind)}
            outermost: dict[str, list[Difference]] = {}
            for name, difference in found.items():
                outermost.setdefault(_outermost(name, found), []).append(difference)
            for name, with_inside in outermost.items():
                layer = self.comparison.actual.layers.get(name) if what == "added" else None
                yield Cause(
                    kind="architecture",
                    layer=name,
                    what=what,
                    actual=None if layer is None else layer.type_name,
                    expected=found[name].expected,
                    differences=tuple(with_inside),
                )
        renamed = {d.layer: d for d in self._differences("layer renamed")}
        for name, difference in renamed.items():
            parent = renamed.get(_parent(name))
            if parent is None or f"{parent.expected}.{_own(name)}" != difference.expected:
                yield dataclasses.replace(_cause("architecture", [difference]), what="renamed")
        for found_here in self.of.values():
            retyped = [d for d in found_here if d.kind == "type"]
            if retyped:
                yield dataclasses.replace(_cause("architecture", retyped), what="type")
                continue
            kinds = dict.fromkeys(d.kind for d in found_here if d.kind in _STRUCTURE)
            for same in ([d for d in found_here if d.kind == one] for one in kinds):
                aspect = same[0].kind.partition(" ")[2]
                also = tuple(f"also {d.what} {d.expected} → {d.actual}" for d in same[1:])
                what = f"{same[0].what} {_SAID.get(aspect, aspect)}".strip()
                yield dataclasses.replace(_cause("architecture", same), what=what, hints=also)

    def _attributes(self) -> Iterator[Cause]:
        for name, found in self.of.items():
            kinds = {d.kind for d in found}
            if "type" in kinds:
                continue
            reshaped = not kinds.isdisjoint({"parameter shape", "buffer shape"})
            for difference in found:
                if difference.kind == "attribute":
                    # The sizes among the attributes say again what the shape of the weight says.
                    if not (reshaped and type(difference.actual) is int):
                        yield _cause("attribute", [difference])
                elif difference.kind == "mode" and (name == ROOT or not self._has(_parent(name), "mode")):
                    yield _cause("attribute", [difference])

    def _weights(self) -> Iterator[Cause]:
        for difference_kind, kind in (("weights", "weights"), ("buffer", "buffers")):
            for found in self.of.values():
                here = [d for d in found if d.kind == difference_kind]
                # A bias is drawn for the size of its weight: another size, other numbers.
                if here and {d.kind for d in found}.isdisjoint({"type", "parameter shape"}):
                    worst = max(here, key=lambda d: d.change or 0.0)
                    names = ", ".join(d.what for d in here)
                    yield dataclasses.replace(_cause(kind, [worst, *here]), what=names)  # type: ignore[arg-type]

    # --- whose own code -------------------------------------------------------------------------------------------

    def _computation(self, recorded: list[Cause]) -> tuple[list[Cause], list[Cause]]:
        certain: dict[str, Cause] = {}
        possible: dict[str, Cause] = {}
        explained = self._explained(recorded)
        altered = {cause.layer for cause in recorded if cause.kind == "attribute" or cause.what == "type"}
        for cause in self._wiring():
            if cause.layer not in altered:
                certain.setdefault(cause.layer, cause)
        for pair in self.comparison.calls:
            found = self._of_call(pair, "response") if self._answers(pair) else []
            if found and pair.layer not in explained:
                cause = self._isolated(pair, found)
                before = certain.get(pair.layer)
                if before is None or before.witness == "recorded":
                    certain[pair.layer] = cause if before is None else _joined(before, cause)
        for step in self.course:
            found_here = self._propagated(step)
            if found_here is None or step.layer.name in explained:
                continue
            cause, sure = found_here
            known = certain.get(cause.layer)
            if known is not None:
                certain[cause.layer] = _joined(known, cause)
            elif not sure:
                possible.setdefault(cause.layer, cause)
            elif self._answers(self.pair_of[id(step)]):
                hint = "its own code answers synthetic inputs as before"
                possible.setdefault(cause.layer, dataclasses.replace(cause, hints=(*cause.hints, hint)))
            else:
                certain[cause.layer] = cause
        return self._in_order(certain.values()), self._in_order(possible.values())

    def _explained(self, recorded: Iterable[Cause]) -> set[str]:
        """Return the layers whose own answer may differ for what is already said."""
        names = {cause.layer for cause in recorded if cause.kind in ("architecture", "attribute", "buffers")}
        names |= {self._caller(name) for name in self.added}
        names |= {self._caller(f"{name} (removed)") for name in self.removed}
        return names | {name for name in self.of if self._has(name, "mode")}

    def _wiring(self) -> Iterator[Cause]:
        """Yield what the code of a container does otherwise with its children, as far as the exact part shows it."""
        for step in self.course:
            pair = self.pair_of.get(id(step))
            if pair is None or step.around is None or step.around.layer.name in self.added:
                continue
            container, child = step.around.layer.name, _relative(pair.layer, step.around.layer.name)
            above = self.pair_of.get(id(step.around))
            asked = above is not None and self._answers(above)  # then its answer says what it hands to whom
            for difference in self._of_call(pair, "source", "argument", "context"):
                if asked and difference.kind != "context":
                    continue
                if difference.kind == "source":
                    if self._same_maker(difference, step.around) or self._came_or_went(difference):
                        continue
                elif above is not None and self._same_above(above, difference):
                    continue
                kind: CauseKind = "gradient" if difference.what == "grad_enabled" else "computation"
                cause = _cause(kind, [difference])
                yield dataclasses.replace(cause, layer=container, what=f"{child} {difference.what}")
        for difference in self._differences("calls"):
            caller = self._caller(difference.layer)
            asked = caller in self.first and self._answers(self.first[caller])
            if not asked and not self._has(caller, "calls") and caller not in self.added:
                what = f"calls of {_relative(difference.layer, caller)}"
                yield dataclasses.replace(_cause("computation", [difference]), layer=caller, what=what)

    def _caller(self, name: str) -> str:
        """Return the layer whose code calls another; of one that is never called, the one that holds it."""
        return self.caller.get(name) or _parent(name)

    def _same_maker(self, difference: Difference, container: Step) -> bool:
        """Whether a value comes from the same child of the container as before, or as before from outside.

        Which layer inside the child gave it out is the child's business: one that passes its input on is as good.
        """
        children = {step.layer.name for step in self.inside[container]}

        def child(source: Plain) -> str:
            name = str(source).partition(" ")[0]
            while name not in children and name != ROOT:
                name = _parent(name)
            return name

        if difference.actual is None or difference.expected is None:
            return True  # computed, or equal to an output by chance: the numbers tell
        return child(difference.actual) == child(difference.expected)

    def _came_or_went(self, difference: Difference) -> bool:
        makers = {str(source).partition(" ")[0] for source in (difference.actual, difference.expected)}
        return not makers.isdisjoint(self.added) or any(
            str(difference.expected).startswith(f"{name} (removed)") for name in self.removed
        )

    def _same_above(self, above: Pair, difference: Difference) -> bool:
        """Whether the container got the changed argument or context itself, and only hands it on."""
        name = difference.what.rpartition(".")[2]
        return any(
            d.what.rpartition(".")[2] == name and (d.actual, d.expected) == (difference.actual, difference.expected)
            for d in self._of_call(above, "argument", "context")
        )

    def _isolated(self, pair: Pair, found: list[Difference]) -> Cause:
        order = [handed.where for handed in pair.actual.response.handed] if pair.actual.response else []
        first = min(found, key=lambda d: order.index(d.what) if d.what in order else len(order))
        worst = max((d for d in found if d.change is not None), key=lambda d: d.change or 0.0, default=None)
        return Cause(
            kind="computation",
            layer=pair.layer,
            what=_edge(order, first.what),
            change=None if worst is None else worst.change,
            noise=None if worst is None else worst.noise,
            witness="isolated",
            hints=self._hints(pair, [d.what for d in found]),
            differences=tuple(found),
        )

    def _propagated(self, step: Step) -> tuple[Cause, bool] | None:
        """Return what the run shows of a call's own code, and whether it is sure."""
        pair = self.pair_of.get(id(step))
        if pair is None or not self._state_same(pair):
            return None
        matched, sure, unit = self._inputs_match(pair)
        if not matched:
            return None
        previous: Step | None = None
        for child in self.inside.get(step, ()):
            inner = self.pair_of.get(id(child))
            if inner is None:
                return None
            moved = self._changed(inner, "input")
            if moved is not None:
                return self._edge_cause(pair, previous, child, moved, unit, sure)
            if self._changed(inner, "output") is not None or self._of_call(inner, "interface"):
                return None
            sure = sure and inner.actual.inputs_known and inner.expected.inputs_known
            previous = child
        moved = self._changed(pair, "output") or self._state_moved(pair)
        return None if moved is None else self._edge_cause(pair, previous, None, moved, unit, sure)

    def _edge_cause(
        self, pair: Pair, before: Step | None, after: Step | None, moved: Change, unit: float, sure: bool
    ) -> tuple[Cause, bool]:
        names = [None if s is None else _relative(s.name, pair.layer) for s in (before, after)]
        amplified = moved.units >= _AMPLIFICATION * unit
        cause = Cause(
            kind="computation",
            layer=pair.layer,
            what=_between(*names),
            change=moved.change,
            noise=moved.noise,
            witness="propagation",
            hints=(() if amplified else (_DRIFT,)) + (self._hints(pair, []) if after is None else ()),
        )
        return cause, sure and amplified

    def _inputs_match(self, pair: Pair) -> tuple[bool, bool, float]:
        """Return whether what came in matches as far as it is known, whether all is known, and the farthest it is."""
        if self._of_call(pair, "argument", "context") or self._of_call(pair, "interface", what_starts="input"):
            return False, False, 0.0
        a, e = pair.actual, pair.expected
        changes = [self.comparison.change(pair.layer, pair.key, "input", v.path) for v in a.inputs]
        sure = a.inputs_known and e.inputs_known and all(change.known for change in changes)
        drew_the_same = a.random == e.random or None in (a.random, e.random)
        matched = drew_the_same and not any(change.differs for change in changes)
        return matched, sure, max((change.units for change in changes), default=0.0)

    def _changed(self, pair: Pair, side: Literal["input", "output"]) -> Change | None:
        """Return the largest change among the values of a call, if there is one."""
        values = pair.actual.inputs if side == "input" else pair.actual.outputs
        found = [self.comparison.change(pair.layer, pair.key, side, v.path) for v in values]
        if self._of_call(pair, "interface", what_starts=side):
            found.append(Change(math.inf))
        return max((c for c in found if c.differs), key=lambda c: c.units, default=None)

    def _state_moved(self, pair: Pair) -> Change | None:
        found = [d for d in self.of.get(pair.layer, ()) if d.kind == "state"]
        changes = [self.comparison.change(pair.layer, None, "after", d.what) for d in found]
        return max(changes, key=lambda c: c.units, default=None)

    def _state_same(self, pair: Pair) -> bool:
        own = {d.kind for d in self.of.get(pair.layer, ())}
        return own.isdisjoint(_STRUCTURE | {"type", "attribute", "mode", "weights", "buffer", "calls"})

    def _answers(self, pair: Pair) -> bool:
        """Whether the isolated responses of a call can be compared: to the same tensors, for the same question."""
        return comparable(pair.actual.response, pair.expected.response) and not self._of_call(
            pair, "argument", "context", "interface", what_starts="input"
        )

    # --- backward -------------------------------------------------------------------------------------------------

    def _gradient(self, causes: list[Cause], explained: set[str]) -> list[Cause]:
        found: dict[str, Cause] = {}
        explained = explained | {cause.layer for cause in causes}
        for pair in self.comparison.calls:
            here = self._of_call(pair, "response gradient") if self._answers(pair) else []
            if here and pair.layer not in explained and pair.layer not in found:
                lost = [d.what for d in here if d.what and d.expected]
                cause = _cause("gradient", [max(here, key=lambda d: d.change or 0.0), *here])
                found[pair.layer] = dataclasses.replace(
                    cause,
                    what=f"no gradient for {', '.join(lost)}" if lost else "",
                    actual=None,
                    expected=None,
                    witness="isolated",
                )
        if not causes:
            cause_seen = self._first_in_backward()
            if cause_seen is not None:
                known = found.get(cause_seen.layer)
                if known is not None:
                    found[known.layer] = dataclasses.replace(known, witness="both")
                elif not found:
                    found[cause_seen.layer] = cause_seen
        return self._in_order(found.values())

    def _first_in_backward(self) -> Cause | None:
        """Return the first gradient on the way back that differs, though the forward matches everywhere."""
        if any(self._differences("input", "output", "weights", "buffer", "state", "parameter trainable", "context")):
            return None
        places: list[tuple[int, int, Step, str, str]] = []
        for step in self.course:
            places += [(step.call.finished, 1, step, "gradient", v.path) for v in step.call.outputs]
            places += [(step.call.finished, 0, step, "parameter gradient", p.name) for p in step.layer.parameters]
            places += [(step.call.started, 0, step, "input gradient", v.path) for v in step.call.inputs]
        for _, _, step, side, path in sorted(places, key=lambda place: place[:2], reverse=True):
            pair = self.pair_of.get(id(step))
            key = None if pair is None or side == "parameter gradient" else pair.key
            change = self.comparison.change(step.layer.name, key, side, path)
            if change.differs:
                return self._backward_cause(step, side, path, change)
        return None

    def _backward_cause(self, step: Step, side: str, path: str, change: Change) -> Cause:
        layer, what = step.layer.name, path
        if side == "gradient" and step.outermost:
            what = "the loss"
        elif side != "parameter gradient" and step.around is not None:
            layer = step.around.layer.name
            siblings = self.inside[step.around]
            at = siblings.index(step)
            later = siblings[at + 1] if side == "gradient" and at + 1 < len(siblings) else None
            earlier = step if side == "gradient" else step.before
            named = (earlier, later if side == "gradient" else step)
            what = _between(*(None if s is None else _relative(s.name, layer) for s in named))
        return Cause(
            kind="gradient",
            layer=layer,
            what=what,
            change=change.change,
            noise=change.noise,
            witness="propagation",
            hints=("no gradient arrives any more",) if change.change == 1.0 and change.limit == 0.0 else (),
        )

    # --- effects and hints ----------------------------------------------------------------------------------------

    def _with_effect(self, cause: Cause) -> Cause:
        """Tell of a recorded cause what it changed first: the layer's answer alone, else its output in the run."""
        if cause.kind not in ("attribute", "architecture") or cause.what in ("added", "removed", "renamed"):
            return cause
        pair = self.first.get(cause.layer)
        if pair is None:
            return cause
        here = [d for d in self._of_call(pair, "response") if d.change is not None]
        if here and self._answers(pair):
            worst = max(here, key=lambda d: d.change or 0.0)
            return dataclasses.replace(cause, change=worst.change, noise=worst.noise)
        matched, _, _ = self._inputs_match(pair)
        moved = self._changed(pair, "output") if matched else None
        return cause if moved is None else dataclasses.replace(cause, change=moved.change, noise=moved.noise)

    def _hints(self, pair: Pair, handed: list[str]) -> tuple[str, ...]:
        """Say what a change looks like, from the first place where it shows."""
        a, e = pair.actual.response, pair.expected.response
        if handed and a is not None and e is not None:
            mine, theirs = ({h.where: h.reading for h in x.handed} for x in (a, e))
            for where in handed:
                if (x := mine.get(where)) is not None and (y := theirs.get(where)) is not None:
                    return hints(x, y)
        expected = {v.path: v for v in pair.expected.outputs}
        for value in pair.actual.outputs:
            other = expected.get(value.path)
            if other is not None and self.comparison.change(pair.layer, pair.key, "output", value.path).differs:
                return hints(value.forward, other.forward)
        return ()

    # --- small questions ------------------------------------------------------------------------------------------

    def _moved(self, kinds: frozenset[Kind]) -> tuple[str, ...]:
        names = dict.fromkeys(step.layer.name for step in self.course)
        return tuple(name for name in names if any(d.kind in kinds for d in self.of.get(name, ())))

    def _differences(self, *kinds: str) -> Iterator[Difference]:
        return (d for d in self.comparison.differences if d.kind in kinds)

    def _has(self, layer: str, kind: Kind) -> bool:
        return any(d.kind == kind for d in self.of.get(layer, ()))

    def _of_call(self, pair: Pair, *kinds: str, what_starts: str = "") -> list[Difference]:
        return [
            d
            for d in self.of_call.get((pair.layer, pair.actual.index), ())
            if d.kind in kinds and (not what_starts or d.kind != "interface" or _side(pair, d.what) == what_starts)
        ]

    def _judged(self, layer: str) -> bool:
        pair = self.first.get(layer)
        return pair is None or self._answers(pair) or self._inputs_match(pair)[0]

    def _in_order(self, causes: Iterable[Cause]) -> list[Cause]:
        order = {name: i for i, name in enumerate(dict.fromkeys(step.layer.name for step in self.course))}
        return sorted(causes, key=lambda cause: order.get(cause.layer, len(order)))

    def _why_unknown(self) -> str:
        expected = self.comparison.expected
        if expected.noise == "not repeatable":
            return "the run was not repeatable when it was recorded"
        if expected.noise is None:
            return "no module's inputs match while its output differs, and the noise was not measured"
        return "no module's inputs match while its output differs"


def hints(actual: Reading, expected: Reading) -> tuple[str, ...]:
    """Return what a change from one reading to another looks like.

    >>> from .record import Statistics
    >>> numbers = Statistics(count=4, mean=0.0, deviations=4.0, min=-1.0, max=1.0)
    >>> old = Reading(statistics=numbers, fingerprint=(1.0, -1.0, 1.0, 1.0))
    >>> hints(Reading(statistics=numbers, fingerprint=(-1.0, 1.0, 1.0, -1.0)), old)
    ('a permutation of its elements',)
    """
    a, e = actual.statistics, expected.statistics
    if a is None or e is None:
        return ()
    if a.nonfinite > e.nonfinite:
        return (f"{a.nonfinite:,} elements are not finite any more",)
    if a.mean is None or e.mean is None:
        return ()
    if a.all_zero or e.all_zero:
        return ("all zero now",) if a.all_zero else ("all zero before",)
    x, y = actual.fingerprint, expected.fingerprint
    if x is not None and y is not None:
        scale = _dot(x, y) / _dot(y, y)
        rest = math.hypot(*(p - scale * q for p, q in zip(x, y, strict=True)))
        if rest < 1e-3 * math.hypot(*x) and abs(scale - 1) > 1e-3:
            return ("its sign flipped",) if math.isclose(scale, -1, rel_tol=1e-3) else (f"scaled by {scale:.4g}",)
        pairs = ((a.min, e.min), (a.max, e.max), (a.std, e.std))
        same = all(p is not None and q is not None and math.isclose(p, q, rel_tol=1e-4) for p, q in pairs)
        moved = math.dist(x, y) > 1e-2 * math.hypot(*y)
        if moved and same and math.isclose(a.mean, e.mean, rel_tol=1e-4, abs_tol=1e-4 * (e.rms or 1.0)):
            return ("a permutation of its elements",)
    shift = a.mean - e.mean
    if math.isclose(a.std or 0.0, e.std or 0.0, rel_tol=1e-3) and abs(shift) > 1e-2 * (e.rms or 1.0):
        return (f"shifted by {shift:.4g}",)
    if a.count and abs(a.zeros / a.count - e.zeros / max(e.count, 1)) > 0.2:
        return (f"zeros {e.zeros / max(e.count, 1):.0%} → {a.zeros / a.count:.0%}",)
    return ()


def _dot(x: tuple[float, ...], y: tuple[float, ...]) -> float:
    return sum(p * q for p, q in zip(x, y, strict=True))


_SAID = {"shape": "", "trainable": "requires_grad", "tied": "tied to"}


def _cause(kind: CauseKind, found: list[Difference]) -> Cause:
    first = found[0]
    return Cause(
        kind=kind,
        layer=first.layer,
        what=first.what,
        actual=first.actual,
        expected=first.expected,
        change=first.change,
        noise=first.noise,
        differences=tuple(dict.fromkeys(found)),
    )


def _joined(first: Cause, second: Cause) -> Cause:
    """Return one cause for what two witnesses say of one module; what was computed says more than what was called."""
    if first.witness == "recorded" and second.witness != "recorded":
        hint = f"{first.what} {first.expected} → {first.actual}"
        return dataclasses.replace(
            second, hints=(*second.hints, hint), differences=(*second.differences, *first.differences)
        )
    return dataclasses.replace(
        first,
        witness="both" if {first.witness, second.witness} == {"isolated", "propagation"} else first.witness,
        change=second.change if first.change is None else first.change,
        noise=second.noise if first.change is None else first.noise,
        hints=first.hints or second.hints,
        differences=(*first.differences, *second.differences),
    )


def _callers(course: Iterable[Step]) -> dict[str, str]:
    """Return of each layer the one whose code calls it, the first time."""
    found: dict[str, str] = {}
    for step in course:
        if step.around is not None:
            found.setdefault(step.layer.name, step.around.layer.name)
    return found


def _is_outermost(pair: Pair) -> bool:
    return pair.layer == pair.actual.root and pair.actual.index == 0


def _outermost(name: str, names: Collection[str]) -> str:
    """Return the outermost of the names that ``name`` is or is inside."""
    parts = name.split(".")
    around = (".".join(parts[:i]) for i in range(1, len(parts)))
    return next((other for other in (ROOT, *around) if other in names), name)


def _parent(name: str) -> str:
    return name.rpartition(".")[0] or ROOT


def _own(name: str) -> str:
    return name.rpartition(".")[2]


def _relative(name: str, container: str) -> str:
    return name if container == ROOT else name.removeprefix(f"{container}.")


def _side(pair: Pair, what: str) -> str:
    if what in ("input", "output"):
        return what
    return "input" if any(v.path == what for v in (*pair.actual.inputs, *pair.expected.inputs)) else "output"


def _edge(order: list[str], where: str) -> str:
    """Return where in the code something was handed on: ``between norm1 and attn``; empty where nothing is called."""

    def child(place: str) -> str | None:
        # "attn input", "attn (call 2) input[1]"; what is returned has no child in front
        head, space, _ = place.rpartition(" ")
        return head if space else None

    children = list(dict.fromkeys(c for c in map(child, order) if c is not None))
    after = child(where)
    if after is None:
        return _between(children[-1] if children else None, None)
    at = children.index(after) if after in children else len(children)
    return _between(children[at - 1] if at else None, after)


def _between(before: str | None, after: str | None) -> str:
    if before is None:
        return "" if after is None else f"before {after}"
    return f"after {before}" if after is None else f"between {before} and {after}"
