"""Layers whose own code changed: by how they call their children, by their isolated responses, by the run.

The three are looked at in this order. What the records say exactly (a child gets another argument) needs no numbers.
The isolated response depends on the layer's own code alone, so it tells any number of changes apart. The run is asked
last: it shows only the first change on a path, but with real values, and so it confirms the responses or puts them in
doubt.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence

from pytest_modelprobe.comparison.compare import is_quantity
from pytest_modelprobe.comparison.matching import child_of, children, emitted, split_place
from pytest_modelprobe.comparison.tolerance import CallPair, Difference, ValueChange
from pytest_modelprobe.record import ROOT, Plain, Step, Value, containers, parent, relative_name

from .causes import DRIFT, NO_EFFECT, Cause, between, cause_of, hints, in_layer_order
from .index import (
    ComparisonIndex,
    InputComparison,
    is_indifferent,
    sizes_and_dtype,
    value_at,
)

# --- masks, positions and tokens that a container generates for its children ------------------------------------------


def generated_input(index: ComparisonIndex, pair: CallPair, difference: Difference) -> str | None:
    """Return the mask, positions or tokens that a difference of a response is about: ``attention_mask (for layers.0)``.

    None if it is a hidden state, or not the input of a child.
    """
    child, path = split_place(difference.what)
    if not child or path == "after" or difference.change is None:
        return None
    call = index.child_call(pair, child)
    values = None if call is None else _both_inputs(call, path)
    return None if values is None or any(map(is_quantity, values)) else f"{path} (for {child})"


def generated_in_run(index: ComparisonIndex, child: CallPair, name: str) -> str | None:
    """Return the generated input of a call that differs in the run; None if hidden states differ too."""
    paths = [value.path for value in child.actual.inputs if index.change(child, "input", value.path).differs]
    differing = [values for path in paths if (values := _both_inputs(child, path)) is not None]
    if not differing or any(is_quantity(value) for values in differing for value in values):
        return None
    now, then = differing[0]
    # Masks of two dtypes may mask the same.
    return f"{now.path} (for {name})" if now.dtype == then.dtype else None


def _both_inputs(call: CallPair, path: str) -> tuple[Value, Value] | None:
    now, then = value_at(call.actual.inputs, path), value_at(call.expected.inputs, path)
    return None if now is None or then is None or now.shape != then.shape else (now, then)


_AMPLIFICATION = 10.0
"""The code is a certain cause if the output changed at least this many times as much as the inputs.

Both changes are in units of their limits. A smaller ratio may be the sensitivity of the layer to its inputs, so it is
reported as drift.
"""

_FAR = 1e4
"""The run is believed against an unchanged response if the output changed by more than this many times its noise.

Synthetic inputs lack much of what real ones have, such as a row of a mask that masks everything.
"""

_DATA_DEPENDENT = "how many rows it chooses may depend on numbers that changed"
_ROUTED = "which of these layers it calls may depend on numbers that changed"

Causes = dict[str, Cause]
"""Layer → its cause."""


def computation_causes(
    index: ComparisonIndex, recorded: Sequence[Cause], explained: Collection[str]
) -> tuple[list[Cause], list[Cause]]:
    """Return the layers whose own code changed, and those of which that is possible.

    Args:
        index: What differs.
        recorded: The causes that the records show directly.
        explained: Layers whose isolated response may differ for those reasons.
    """
    certain: Causes = {}
    possible: Causes = {}
    _add_other_calls(index, recorded, explained, certain, possible)
    _add_other_responses(index, explained, certain, possible)
    _add_seen_in_run(index, explained, certain, possible)
    changed = {cause.layer for cause in recorded if cause.what not in ("renamed", "path")} | {*certain, *possible}
    told = [_with_attributes(index, _with_effect_of_call(index, cause, changed)) for cause in certain.values()]
    return in_layer_order(told, index.executed_layers), in_layer_order(possible.values(), index.executed_layers)


def _add_other_calls(
    index: ComparisonIndex, recorded: Sequence[Cause], explained: Collection[str], certain: Causes, possible: Causes
) -> None:
    """Add the containers that call their children otherwise, one cause of each."""
    altered = {cause.layer for cause in recorded if cause.kind == "attribute" or cause.what == "type"}
    for cause in (*_changed_child_inputs(index), *_reshaped_outputs(index), *_changed_call_counts(index, explained)):
        if cause.layer not in altered:
            (possible if {_DATA_DEPENDENT, _ROUTED} & {*cause.hints} else certain).setdefault(cause.layer, cause)


def _add_other_responses(index: ComparisonIndex, explained: Collection[str], certain: Causes, possible: Causes) -> None:
    """Add the layers whose isolated response differs; only possible where something else may explain it."""
    around = {index.caller(name) for name in (*index.added, *index.removed)}
    for pair in index.comparison.calls:
        found = response_differences(index, pair)
        if pair.layer in explained:  # an added or removed child does not change masks and positions
            found = [d for d in found if pair.layer in around and generated_input(index, pair, d) is not None]
        if not found:
            continue
        cause = _isolated_cause(index, pair, found)
        before = certain.get(pair.layer)
        other = index.other_explanation(pair)
        if other is not None and (cause.change is not None or cause.is_generated):
            doubtful = dataclasses.replace(cause.with_hints(other), is_consequence=index.uses_changed_input(pair))
            possible.setdefault(pair.layer, doubtful)
        elif before is None or before.evidence == "recorded":
            certain[pair.layer] = cause if before is None else _merged(before, cause)


def _add_seen_in_run(index: ComparisonIndex, explained: Collection[str], certain: Causes, possible: Causes) -> None:
    """Add the layers whose inputs match in the run and whose outputs do not."""
    same_weights = not any(index.differences("weights", "buffer"))  # a layer may use those of another
    for step in index.steps:
        pair = index.pair_of(step)
        seen = None if pair is None or pair.layer in explained else _propagated_cause(index, step, pair)
        if pair is None or seen is None:
            continue
        cause, sure = seen
        if pair.layer in certain:
            certain[pair.layer] = _merged(certain[pair.layer], cause)
        elif not sure:
            possible.setdefault(pair.layer, cause)
        elif index.is_response_conclusive(pair) and not (
            same_weights and _is_far_beyond_noise(cause) and not _enters_changed_code(index, step, certain)
        ):
            possible.setdefault(pair.layer, cause.with_hints("its isolated response is unchanged"))
        else:
            certain[pair.layer] = cause


def _merged(first: Cause, second: Cause) -> Cause:
    """Merge two causes of one module; one about what it computes takes precedence over one about what it calls."""
    both = (*first.differences, *second.differences)
    if first.is_exact and (second.change is None or math.isinf(second.change)):
        return dataclasses.replace(first, differences=both)
    if first.evidence == "recorded" and second.evidence != "recorded":
        told = second.with_hints(f"{first.what} {first.expected} → {first.actual}")
        return dataclasses.replace(told, differences=(*second.differences, *first.differences))
    sized = second if first.change is None else first
    return dataclasses.replace(
        first,
        evidence="both" if {first.evidence, second.evidence} == {"isolated", "propagation"} else first.evidence,
        change=sized.change,
        noise=sized.noise,
        sizes=sized.sizes,
        hints=first.hints or second.hints,
        differences=both,
    )


def _with_effect_of_call(index: ComparisonIndex, cause: Cause, changed: Collection[str]) -> Cause:
    """Add to a cause without a size what it changed in the run: the output of a child that else gets the same."""
    pair = index.first_calls.get(cause.layer)
    if pair is None or cause.kind != "computation" or cause.change is not None or cause.is_exact:
        return cause
    places = [d.what for d in cause.differences if d.kind == "response"] or [cause.what]
    for child in dict.fromkeys(split_place(place)[0] for place in places):
        called = index.child_call(pair, child) if child else None
        # A child that may have changed itself, or something in it, is told beside it.
        itself = called is not None and any(called.layer in (name, *containers(name)) for name in changed)
        moved = None if called is None or itself else index.change_by_call(called)
        if moved is not None:
            return cause.with_size(moved, effect=f"output of {child}")
    return cause


def _with_attributes(index: ComparisonIndex, cause: Cause) -> Cause:
    """Add the changed attributes of a layer of the same type to the hints, where they are no cause of their own."""
    a, e = index.now.get(cause.layer), index.then.get(cause.layer)
    if a is None or e is None or a.type_name != e.type_name or index.has(cause.layer, "attribute"):
        return cause
    both = ((name, e.attributes[name], a.attributes[name]) for name in e.attributes if name in a.attributes)
    others = [f"{name} {then} → {now}" for name, then, now in both if then != now]
    return cause.with_hints(*others)


# --- how a container calls its children, as far as the exact part shows it ------------------------------------------


def _changed_child_inputs(index: ComparisonIndex) -> Iterator[Cause]:
    """Yield the containers that call a child with another source, argument or context."""
    for step in index.steps:
        pair = index.pair_of(step)
        if pair is None or step.parent is None or step.parent.layer.name in index.added:
            continue
        container = step.parent.layer.name
        child = relative_name(pair.layer, container)
        above = index.pair_of(step.parent)
        shaped = index.of_call(pair, "interface", side="input")
        if above is not None and shaped:
            siblings = index.child_steps(step.parent)
            yield from _reshaped_from_same(index, above, siblings[: siblings.index(step)], shaped, f"{child} ")
        asked = above is not None and index.has_comparable_responses(above)  # then its response shows what it passes on
        for difference in index.of_call(pair, "source", "argument", "context", "input added", "input removed"):
            if asked and difference.kind != "context":
                continue
            if difference.kind == "source":
                if not has_new_source(index, difference, step.parent):
                    continue
            elif above is not None and _is_forwarded(index, above, difference):
                continue
            without = (NO_EFFECT,) if difference.kind == "argument" and is_indifferent(pair) else ()
            what = f"{child} {difference.what}"
            cause = cause_of("computation", [difference], layer=container, what=what, hints=without)
            if difference.what == "grad_enabled":
                cause = dataclasses.replace(cause, kind="gradient", gradient="switched")
            yield cause


def _reshaped_outputs(index: ComparisonIndex) -> Iterator[Cause]:
    """Yield the layers whose output has a new shape or dtype, where their inputs and children have the old ones."""
    for step in index.steps:
        pair = index.pair_of(step)
        shaped = [] if pair is None else index.of_call(pair, "interface", side="output")
        if pair is not None and shaped:
            yield from _reshaped_from_same(index, pair, index.child_steps(step), shaped)


def _reshaped_from_same(
    index: ComparisonIndex, pair: CallPair, before: Sequence[Step], shaped: Sequence[Difference], place: str = ""
) -> Iterator[Cause]:
    """Yield new shapes and dtypes that a call makes, where its inputs and earlier child calls have the old ones.

    Only code derives another shape from the same shapes; a number of rows may also depend on values: then with a hint.
    """
    if not index.have_same_shapes(before) or not index.has_same_structure(pair):
        return
    moved = any(index.largest_change(child, "output") for child in map(index.pair_of, before) if child is not None)
    same = index.compare_inputs(pair).match and not moved
    for difference in shaped:
        now, then = sizes_and_dtype(difference.actual), sizes_and_dtype(difference.expected)
        doubts = () if same or now[1:] != then[1:] else (_DATA_DEPENDENT,)
        what = f"{place}{difference.what}"
        yield cause_of("computation", [difference], layer=pair.layer, what=what, hints=doubts)


def has_new_source(index: ComparisonIndex, difference: Difference, container: Step) -> bool:
    """Whether a value comes from another child of the container than before, or from outside in one record only.

    Which layer inside that child produced it does not count. An added or removed child is a cause of its own.
    """
    now, then = difference.actual, difference.expected
    if now is None or then is None:
        return False  # computed, or equal to an output by chance: its numbers are compared
    siblings = {step.layer.name for step in index.child_steps(container)}

    def child(source: Plain) -> str:
        name = _producer(source)
        while name not in siblings and name != ROOT:
            name = parent(name)
        return name

    came = not index.added.isdisjoint({_producer(now), _producer(then)})
    words = str(then).split(" ")
    went = any(" ".join(words[:i]) in index.removed for i in range(1, len(words) + 1))
    return child(now) != child(then) and not (came or went)


def _producer(source: Plain) -> str:
    return str(source).partition(" ")[0]


def _is_forwarded(index: ComparisonIndex, above: CallPair, difference: Difference) -> bool:
    """Whether the container itself was called with the changed argument or context."""
    name = difference.what.rpartition(".")[2]
    return any(
        d.what.rpartition(".")[2] == name and (d.actual, d.expected) == (difference.actual, difference.expected)
        for d in index.of_call(above, "argument", "context")
    )


def _changed_call_counts(index: ComparisonIndex, explained: Collection[str]) -> Iterator[Cause]:
    """Yield the containers that call a child more or fewer times for the same inputs."""
    for difference in index.differences("calls"):
        caller = index.caller(difference.layer)
        pair = index.first_calls.get(caller)
        # An expert without tokens is not called.
        judged = pair is not None and caller not in explained and index.is_response_conclusive(pair)
        told = judged or (pair is not None and not index.compare_inputs(pair).match)
        if not told and not index.has(caller, "calls") and caller not in index.added:
            doubts = (_ROUTED,) if pair is not None and _is_routed(index, pair, difference) else ()
            what = f"calls of {relative_name(difference.layer, caller)}"
            yield cause_of("computation", [difference], layer=caller, what=what, hints=doubts)


def _is_routed(index: ComparisonIndex, above: CallPair, calls: Difference) -> bool:
    """Whether another layer of the same list took over, and a child of the same call has other numbers by itself.

    As where a router with other weights chooses other experts.
    """
    less = calls.actual == 0
    around = parent(calls.layer)
    others = (name for name in index.of_layer if parent(name) == around and name != calls.layer)
    takes_over = around != above.layer and any(
        index.has(name, "interface") or any(d.kind == "calls" and (d.actual == 0) != less for d in index.of_layer[name])
        for name in others
    )
    return takes_over and any(
        index.compare_inputs(child).match and index.largest_change(child, "output") is not None
        for child in index.child_calls(above)
    )


# --- alone ------------------------------------------------------------------------------------------------------------


def response_differences(index: ComparisonIndex, pair: CallPair) -> list[Difference]:
    """Return the differences of a call's isolated response, without those that other differences report."""
    came_or_went = {d.what for d in index.of_call(pair, "path") if None in (d.actual, d.expected)}
    # An input that the container no longer gets cannot be passed on.
    came, went = ({d.what for d in index.of_call(pair, kind)} for kind in ("input added", "input removed"))
    # A changed argument may be passed on: that of the run, or of the expected call.
    given = {tuple(map(_argument_text, (d.actual, d.expected))) for d in index.of_call(pair, "argument")}
    given |= {(then, now) for now, then in given}

    def is_reported(d: Difference) -> bool:
        only_handed_on = (d.expected is None and d.actual in came) or (d.actual is None and d.expected in went)
        return d.what in came_or_went or (d.actual, d.expected) in given or only_handed_on

    found = index.of_call(pair, "response")
    return [d for d in found if not is_reported(d) and index.is_response_conclusive(pair, d)]


def _argument_text(value: Plain) -> str | None:
    return None if value is None else f"={value!r}"[:80]


def _isolated_cause(index: ComparisonIndex, pair: CallPair, found: list[Difference]) -> Cause:
    """Return the cause that the differences of an isolated response show."""
    if all(map(_is_argument, found)):
        called = (index.child_call(pair, split_place(d.what)[0]) for d in found)
        without = (NO_EFFECT,) if all(map(is_indifferent, called)) else ()
        return cause_of("computation", found, evidence="isolated", hints=without)
    order = [handed.where for handed in emitted(pair.actual.response)]
    rank = {where: i for i, where in enumerate(order)}
    first = min(found, key=lambda d: rank.get(d.what, len(order)))
    made = generated_input(index, pair, first)
    if made is not None:
        return cause_of(
            "computation", [first, *found], what=made, evidence="isolated", is_generated=True, change=None, noise=None
        )
    before = _before_other_children(pair)
    sized = [d for d in found if d.change is not None and d.what in before]
    times = _changed_call_count(index, pair)
    child = "" if times is None else relative_name(times.layer, pair.layer)
    if times is not None and 0 not in (times.actual, times.expected):
        cause = cause_of("computation", [times, *found], layer=pair.layer, what=f"calls of {child}")
    else:
        what = _position_of(order, first.what)
        cause = Cause(kind="computation", layer=pair.layer, what=what, differences=tuple(found))
        if times is not None:  # it may have no effect on what is computed
            cause = cause.with_hints(f"no longer calls {child}" if times.actual == 0 else f"calls {child} now")
        cause = cause.with_hints(*_value_hints(index, pair, [d.what for d in sized]))
    worst = max(sized, key=lambda d: d.change or 0.0, default=None)
    return cause.with_size(worst, evidence="isolated")


def _before_other_children(pair: CallPair) -> set[str]:
    """Return what both responses emit before a child that only one of them calls.

    Such a child returns a synthetic tensor, so what follows it differs, whatever the code computes in its place.
    """
    both = children(pair.actual.response).keys() & children(pair.expected.response).keys()
    places = ([h.where for h in emitted(response)] for response in (pair.actual.response, pair.expected.response))
    now, then = ({*itertools.takewhile(lambda place: split_place(place)[0] in both, of)} for of in places)
    return now & then


def _is_argument(difference: Difference) -> bool:
    """Whether a response differs in a plain argument of a child, or in whether it is called, not in numbers."""
    sides = (difference.actual, difference.expected)
    plain = all(str(side).startswith("=") for side in sides)
    return difference.change is None and " " in difference.what and (None in sides or plain)


def _changed_call_count(index: ComparisonIndex, pair: CallPair) -> Difference | None:
    """Return the child whose number of calls changed in the run, if the response shows it too."""
    changed = children(pair.actual.response).keys() ^ children(pair.expected.response).keys()
    names = {child_of(pair, called) for called in changed if called}
    return next((d for d in index.differences("calls") if d.layer in names), None)


def _position_of(order: Sequence[str], where: str) -> str:
    """Return where in the code a value was emitted: ``between norm1 and attn``; empty where nothing is called."""
    called = list(dict.fromkeys(child for child, _ in map(split_place, order) if child))
    after = split_place(where)[0]
    if not after:
        return between(called[-1] if called else None, None)
    at = called.index(after) if after in called else len(called)
    return between(called[at - 1] if at else None, after)


# --- in the run -------------------------------------------------------------------------------------------------------


def _propagated_cause(index: ComparisonIndex, step: Step, pair: CallPair) -> tuple[Cause, bool] | None:
    """Return the cause in a call's own code that the run shows, and whether it is certain."""
    inputs = index.compare_inputs(pair)
    if not (inputs.match and index.has_same_layer(pair)):
        return None
    previous: Step | None = None
    for child in index.child_steps(step):
        inner = index.pair_of(child)
        if inner is None:
            return None
        moved = index.largest_change(inner, "input")
        if moved is not None:
            cause, sure = _cause_between_calls(pair, previous, child, moved, inputs)
            made = generated_in_run(index, inner, relative_name(child.name, pair.layer))
            if made is not None:
                cause = dataclasses.replace(cause, what=made, is_generated=True, change=None, noise=None)
            return cause, sure
        if index.largest_change(inner, "output") is not None or index.of_call(inner, "interface"):
            return None
        known = inputs.known and inner.actual.inputs_known and inner.expected.inputs_known
        inputs = dataclasses.replace(inputs, known=known)
        previous = child
    moved = index.largest_change(pair, "output") or index.largest_buffer_change(pair)
    if moved is None:
        return None
    cause, sure = _cause_between_calls(pair, previous, None, moved, inputs)
    return cause.with_hints(*_value_hints(index, pair)), sure


def _cause_between_calls(
    pair: CallPair, before: Step | None, after: Step | None, moved: ValueChange, inputs: InputComparison
) -> tuple[Cause, bool]:
    names = (None if step is None else relative_name(step.name, pair.layer) for step in (before, after))
    amplified = moved.units >= _AMPLIFICATION * inputs.units
    cause = Cause(
        kind="computation",
        layer=pair.layer,
        what=between(*names),
        change=moved.change,
        noise=moved.noise,
        sizes=moved.sizes,
        evidence="propagation",
        hints=() if amplified else (DRIFT,),
    )
    return cause, inputs.known and amplified


def _is_far_beyond_noise(cause: Cause) -> bool:
    return cause.noise is not None and cause.change is not None and cause.change > _FAR * cause.noise > 0


def _enters_changed_code(index: ComparisonIndex, step: Step, changed: Collection[str]) -> bool:
    """Whether the first child with another input is a layer that changed: a hook on it may have made that input."""
    for child in index.child_steps(step):
        inner = index.pair_of(child)
        if inner is not None and index.largest_change(inner, "input") is not None:
            return child.name in changed
    return False


def _value_hints(index: ComparisonIndex, pair: CallPair, handed: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the hints of the first value that differs."""
    mine, theirs = ({h.where: h.reading for h in emitted(call.response)} for call in (pair.actual, pair.expected))
    for where in handed:
        if (x := mine.get(where)) is not None and (y := theirs.get(where)) is not None:
            return hints(x, y)
    for value in pair.actual.outputs:
        other = value_at(pair.expected.outputs, value.path)
        if other is not None and index.change(pair, "output", value.path).differs:
            return hints(value.forward, other.forward) if pair.same_signs else ()
    return ()
