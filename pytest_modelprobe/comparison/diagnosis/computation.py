"""Whose own code changed: what a layer answers alone, what it gives out in the run, what it hands to its children."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from pytest_modelprobe.comparison.compare import CallPair, Difference, children, is_quantity
from pytest_modelprobe.comparison.tolerance import ValueChange
from pytest_modelprobe.record import ROOT, Plain, Step

from .built import built, generated_in_run
from .causes import DRIFT, Cause, cause_of, in_order
from .evidence import Evidence, Inputs, child_of
from .hints import hints
from .places import between, parent, relative_name

_AMPLIFICATION = 10.0
"""A module that makes this much more of what came in, in units of what is allowed, is more than sensitive."""

_BY_NUMBERS = "how many rows it chooses may depend on numbers that changed"


def computation_causes(
    evidence: Evidence, recorded: Sequence[Cause], explained: set[str]
) -> tuple[list[Cause], list[Cause]]:
    """Return the layers whose own code changed, and those of which that is possible.

    Args:
        evidence: What differs.
        recorded: The causes that the records say by themselves.
        explained: Layers whose own answer may differ for those.
    """
    certain: dict[str, Cause] = {}
    possible: dict[str, Cause] = {}
    around = {evidence.caller(name) for name in (*evidence.added, *evidence.gone)}
    altered = {cause.layer for cause in recorded if cause.kind == "attribute" or cause.what == "type"}
    for cause in (*_handed_on(evidence), *_given_out(evidence), *_times_called(evidence)):
        if cause.layer not in altered:
            (possible if _BY_NUMBERS in cause.hints else certain).setdefault(cause.layer, cause)
    for pair in evidence.comparison.calls:
        found = _response_differences(evidence, pair)
        if pair.layer in explained:  # a child that came or went has no part in masks and positions
            found = [d for d in found if pair.layer in around and _is_built(evidence, pair, d)]
        if not found:
            continue
        cause = _isolated(evidence, pair, found)
        before = certain.get(pair.layer)
        other = evidence.gets_others(pair)
        if other is not None and cause.change is not None:
            possible.setdefault(pair.layer, dataclasses.replace(cause, hints=(*cause.hints, other)))
        elif before is None or before.witness == "recorded":
            certain[pair.layer] = cause if before is None else _joined(before, cause)
    for step in evidence.course:
        pair_here = evidence.pair(step)
        seen = None if pair_here is None or pair_here.layer in explained else _propagated(evidence, step, pair_here)
        if pair_here is None or seen is None:
            continue
        cause, sure = seen
        known = certain.get(cause.layer)
        if known is not None:
            certain[cause.layer] = _joined(known, cause)
        elif not sure:
            possible.setdefault(cause.layer, cause)
        elif evidence.tells(pair_here):
            hint = "its own code answers synthetic inputs as before"
            possible.setdefault(cause.layer, dataclasses.replace(cause, hints=(*cause.hints, hint)))
        else:
            certain[cause.layer] = cause
    told = [_with_attributes(evidence, cause) for cause in certain.values()]
    return in_order(told, evidence.ran), in_order(possible.values(), evidence.ran)


def _with_attributes(evidence: Evidence, cause: Cause) -> Cause:
    """Tell of a layer of the same type which attributes it has otherwise, where that is no cause of its own."""
    a, e = (record.layers.get(cause.layer) for record in (evidence.comparison.actual, evidence.comparison.expected))
    if a is None or e is None or a.type_name != e.type_name or evidence.has(cause.layer, "attribute"):
        return cause
    both = ((name, e.attributes[name], a.attributes[name]) for name in e.attributes if name in a.attributes)
    others = [f"{name} {then} → {now}" for name, then, now in both if then != now]
    came = [f"{name} {value} is new" for name, value in a.attributes.items() if name not in e.attributes]
    went = [f"{name} is gone" for name in e.attributes if name not in a.attributes]
    return dataclasses.replace(cause, hints=(*cause.hints, *others, *came, *went))


def _joined(first: Cause, second: Cause) -> Cause:
    """Return one cause for what two witnesses say of one module; what was computed says more than what was called."""
    if first.is_exact and (second.change is None or math.isinf(second.change)):
        return dataclasses.replace(first, differences=(*first.differences, *second.differences))
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


# --- what the code of a container does otherwise with its children, as far as the exact part shows it ---------------


def _handed_on(evidence: Evidence) -> Iterator[Cause]:
    """Yield the containers that call a child with something else: a source, an argument, a context."""
    for step in evidence.course:
        pair = evidence.pair(step)
        if pair is None or step.parent is None or step.parent.layer.name in evidence.added:
            continue
        container, child = step.parent.layer.name, relative_name(pair.layer, step.parent.layer.name)
        above = evidence.pair(step.parent)
        for difference, doubts in _shaped_otherwise(evidence, above, step):
            cause = dataclasses.replace(cause_of("computation", [difference]), hints=doubts)
            yield dataclasses.replace(cause, layer=container, what=f"{child} {difference.what}")
        asked = above is not None and evidence.answers(above)  # then its answer says what it hands to whom
        for difference in evidence.of_call(pair, "source", "argument", "context", "input added", "input removed"):
            if asked and difference.kind != "context":
                continue
            if difference.kind == "source":
                if not _fed_by_another(evidence, difference, step.parent):
                    continue
            elif above is not None and _only_handed_on(evidence, above, difference):
                continue
            cause = cause_of("computation", [difference])
            if difference.what == "grad_enabled":
                cause = dataclasses.replace(cause, kind="gradient", gradient="switched")
            yield dataclasses.replace(cause, layer=container, what=f"{child} {difference.what}")


def _shaped_otherwise(
    evidence: Evidence, above: CallPair | None, step: Step
) -> Iterator[tuple[Difference, tuple[str, ...]]]:
    """Yield the inputs of a child that have another shape or dtype, though nothing has that the code had before.

    Whatever numbers changed, code alone makes other shapes of the same ones; of how many rows it chooses the hint says
    that numbers may decide.
    """
    pair = evidence.pair(step)
    if above is None or pair is None:
        return
    siblings = evidence.inside(step.parent)
    before = [evidence.pair(sibling) for sibling in siblings[: siblings.index(step)]]
    found = evidence.of_call(pair, "interface", side="input")
    yield from _made_of_the_same(evidence, above, before, found)


def _given_out(evidence: Evidence) -> Iterator[Cause]:
    """Yield the layers that give out another shape or dtype, though nothing has that their code had."""
    for step in evidence.course:
        pair = evidence.pair(step)
        found = [] if pair is None else evidence.of_call(pair, "interface", side="output")
        if pair is not None and found:
            inside = [evidence.pair(child) for child in evidence.inside(step)]
            for difference, doubts in _made_of_the_same(evidence, pair, inside, found):
                yield dataclasses.replace(cause_of("computation", [difference]), hints=doubts)


def _made_of_the_same(
    evidence: Evidence, pair: CallPair, before: Sequence[CallPair | None], found: Sequence[Difference]
) -> Iterator[tuple[Difference, tuple[str, ...]]]:
    """Yield what a call makes in another shape, if all that it had for it is of the same: what it got, what it called.

    Each comes with the doubts that there are.
    """
    if not evidence.same_structure(pair):
        return
    if any(p is None or evidence.of_call(p, "interface", "path", "context") for p in before):
        return
    same = evidence.inputs(pair).match and all(p and evidence.change(p, "output") is None for p in before)
    for difference in found:
        sides = (_sizes(difference.actual), _sizes(difference.expected))
        yield difference, () if same or sides[0][1:] != sides[1][1:] else (_BY_NUMBERS,)


def _sizes(described: Plain) -> list[str]:
    """Return what stands in ``(2, 12, 16) float32``."""
    return str(described).replace("(", "").replace(")", "").replace(",", "").split()


def _fed_by_another(evidence: Evidence, difference: Difference, container: Step) -> bool:
    """Whether a value comes from another child of the container than before, or from outside only now or then.

    Which layer inside the child gave it out is the child's business: one that passes its input on is as good. A child
    that came or went is a cause of its own.
    """
    now, then = difference.actual, difference.expected
    if now is None or then is None:
        return False  # computed, or equal to an output by chance: the numbers tell
    children = {step.layer.name for step in evidence.inside(container)}

    def child(source: Plain) -> str:
        name = _maker(source)
        while name not in children and name != ROOT:
            name = parent(name)
        return name

    came = not evidence.added.isdisjoint({_maker(now), _maker(then)})
    went = any(str(then).startswith(name) for name in evidence.gone)
    return child(now) != child(then) and not (came or went)


def _maker(source: Plain) -> str:
    return str(source).partition(" ")[0]


def _only_handed_on(evidence: Evidence, above: CallPair, difference: Difference) -> bool:
    """Whether the container got the changed argument or context itself."""
    name = difference.what.rpartition(".")[2]
    return any(
        d.what.rpartition(".")[2] == name and (d.actual, d.expected) == (difference.actual, difference.expected)
        for d in evidence.of_call(above, "argument", "context")
    )


def _times_called(evidence: Evidence) -> Iterator[Cause]:
    """Yield the containers that call a child more or fewer times, though what they get is the same."""
    for difference in evidence.differences("calls"):
        caller = evidence.caller(difference.layer)
        pair = evidence.first.get(caller)
        # An expert that gets no token is not called.
        told = pair is not None and (evidence.tells(pair) or not evidence.inputs(pair).match)
        if not told and not evidence.has(caller, "calls") and caller not in evidence.added:
            what = f"calls of {relative_name(difference.layer, caller)}"
            yield dataclasses.replace(cause_of("computation", [difference]), layer=caller, what=what)


def _response_differences(evidence: Evidence, pair: CallPair) -> list[Difference]:
    """Return what a call answers to synthetic inputs otherwise than before, and is not said elsewhere."""
    came_or_went = {d.what for d in evidence.of_call(pair, "path") if None in (d.actual, d.expected)}
    found = (d for d in evidence.of_call(pair, "response") if d.what not in came_or_went)
    # What a container does not get any more it cannot hand on.
    came, went = ({d.what for d in evidence.of_call(pair, kind)} for kind in ("input added", "input removed"))

    def only_handed_on(difference: Difference) -> bool:
        now, then = difference.actual, difference.expected
        return (then is None and now in came) or (now is None and then in went)

    # What a layer is given otherwise, it may hand on.
    given = {tuple(map(_as_handed, (d.actual, d.expected))) for d in evidence.of_call(pair, "argument")}
    return [
        d for d in found if (d.actual, d.expected) not in given and not only_handed_on(d) and evidence.tells_of(pair, d)
    ]


def _as_handed(value: Plain) -> str | None:
    return None if value is None else f"={value!r}"[:80]


def _is_built(evidence: Evidence, pair: CallPair, difference: Difference) -> bool:
    """Whether what a container hands to a child is made of no child's output: a mask, positions, tokens."""
    child, _, path = difference.what.rpartition(" ")
    called = evidence.called(pair, child) if difference.change is not None else None
    return called is not None and any(v.path == path and not is_quantity(v) for v in called.expected.inputs)


# --- the two witnesses ------------------------------------------------------------------------------------------------


def _isolated(evidence: Evidence, pair: CallPair, found: list[Difference]) -> Cause:
    """Return what a call's answers to synthetic inputs say."""
    if all(map(_is_argument, found)):
        return dataclasses.replace(cause_of("computation", found), witness="isolated")
    order = [handed.where for handed in pair.actual.response.handed] if pair.actual.response else []
    first = min(found, key=lambda d: order.index(d.what) if d.what in order else len(order))
    made = built(evidence, pair, first)
    if made is not None:
        cause = dataclasses.replace(cause_of("computation", [first, *(d for d in found if d is not first)]), noise=None)
        return dataclasses.replace(cause, what=made.what, change=made.share, witness="isolated", built=made.how)
    worst = max((d for d in found if d.change is not None), key=lambda d: d.change or 0.0, default=None)
    times = _other_times(evidence, pair)
    came_or_went = times is not None and 0 in (times.actual, times.expected)
    if times is not None and not came_or_went:
        cause = cause_of("computation", [times, *found])
        change, noise = (None, None) if worst is None else (worst.change, worst.noise)
        what = f"calls of {relative_name(times.layer, pair.layer)}"
        return dataclasses.replace(cause, layer=pair.layer, what=what, change=change, noise=noise, witness="isolated")
    return Cause(
        kind="computation",
        layer=pair.layer,
        what=_edge(order, first.what),
        change=None if worst is None else worst.change,
        noise=None if worst is None else worst.noise,
        witness="isolated",
        hints=(*_called_or_not(times, pair), *_looks(evidence, pair, [d.what for d in found])),
        differences=tuple(found),
    )


def _called_or_not(times: Difference | None, pair: CallPair) -> Iterator[str]:
    """Yield the child that is called now or no more: an inert one may be, so it is a hint beside what was computed."""
    if times is not None:
        child = relative_name(times.layer, pair.layer)
        yield f"no longer calls {child}" if times.actual == 0 else f"calls {child} now"


def _other_times(evidence: Evidence, pair: CallPair) -> Difference | None:
    """Return of which child a response shows that it is called more or fewer times, as it is in the run."""
    a, e = pair.actual.response, pair.expected.response
    if a is None or e is None:
        return None
    names = {child_of(pair, called) for called in children(a).keys() ^ children(e).keys() if called}
    return next((d for d in evidence.differences("calls") if d.layer in names), None)


def _is_argument(difference: Difference) -> bool:
    """Whether a response differs in what a child is called with, or whether it is called, and not in numbers."""
    sides = (difference.actual, difference.expected)
    plain = all(str(side).startswith("=") for side in sides)
    return difference.change is None and " " in difference.what and (None in sides or plain)


def _propagated(evidence: Evidence, step: Step, pair: CallPair) -> tuple[Cause, bool] | None:
    """Return what the run shows of a call's own code, and whether it is sure."""
    inputs = evidence.inputs(pair)
    if not (inputs.match and evidence.same_layer(pair)):
        return None
    previous: Step | None = None
    for child in evidence.inside(step):
        inner = evidence.pair(child)
        if inner is None:
            return None
        moved = evidence.change(inner, "input")
        if moved is not None:
            cause, sure = _between_calls(pair, previous, child, moved, inputs)
            made = generated_in_run(evidence, inner, relative_name(child.name, pair.layer))
            if made is not None:
                cause = dataclasses.replace(cause, what=made.what, change=made.share, noise=None, built=made.how)
            return cause, sure
        if evidence.change(inner, "output") is not None or evidence.of_call(inner, "interface"):
            return None
        known = inputs.known and inner.actual.inputs_known and inner.expected.inputs_known
        inputs = dataclasses.replace(inputs, known=known)
        previous = child
    moved = evidence.change(pair, "output") or evidence.change_of_state(pair)
    if moved is None:
        return None
    cause, sure = _between_calls(pair, previous, None, moved, inputs)
    return dataclasses.replace(cause, hints=(*cause.hints, *_looks(evidence, pair))), sure


def _between_calls(
    pair: CallPair, before: Step | None, after: Step | None, moved: ValueChange, inputs: Inputs
) -> tuple[Cause, bool]:
    names = (None if step is None else relative_name(step.name, pair.layer) for step in (before, after))
    amplified = moved.units >= _AMPLIFICATION * inputs.units
    cause = Cause(
        kind="computation",
        layer=pair.layer,
        what=between(*names),
        change=moved.change,
        noise=moved.noise,
        witness="propagation",
        hints=() if amplified else (DRIFT,),
    )
    return cause, inputs.known and amplified


def _looks(evidence: Evidence, pair: CallPair, handed: Sequence[str] = ()) -> tuple[str, ...]:
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
        if other is not None and evidence.comparison.change(pair.layer, pair.key, "output", value.path).differs:
            return hints(value.forward, other.forward)
    return ()


def _edge(order: list[str], where: str) -> str:
    """Return where in the code something was handed on: ``between norm1 and attn``; empty where nothing is called."""

    def child(place: str) -> str | None:
        # "attn input", "attn (call 2) input[1]"; what is returned has no child in front
        head, space, _ = place.rpartition(" ")
        return head if space else None

    children = list(dict.fromkeys(c for c in map(child, order) if c is not None))
    after = child(where)
    if after is None:
        return between(children[-1] if children else None, None)
    at = children.index(after) if after in children else len(children)
    return between(children[at - 1] if at else None, after)
