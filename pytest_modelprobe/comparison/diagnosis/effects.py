"""What a cause changed, and what it explains of others.

A cause in the records, such as another ``eps``, has no size of its own: it is that of what the layer answers now. And
what one cause explains must not become a second one: the isolated response of a layer with another attribute differs
although its code did not change.
"""

from __future__ import annotations

from collections.abc import Iterable

from pytest_modelprobe.comparison.compare import is_quantity
from pytest_modelprobe.comparison.differences import CallPair, Difference
from pytest_modelprobe.comparison.pairing import children, split_place

from .causes import ABSORBED, SAME_ELEMENTS, Cause, worst_first
from .index import ComparisonIndex
from .same_elements import has_same_elements

_OF_THE_WHOLE = ("added", "removed", "renamed", "path", "training")
"""Changes of a layer as a whole, which need not be the cause of its changed outputs."""

_NO_EFFECT_ALONE = ("buffer added", "buffer removed", "buffer persistent", "parameter trainable")
"""Changes that alter no output by themselves: code has to use a buffer that was added."""


def explained_by(index: ComparisonIndex, recorded: Iterable[Cause]) -> set[str]:
    """Return the layers whose isolated response may differ because of these causes."""
    kinds = ("architecture", "attribute", "buffers")
    changed = (cause for cause in recorded if cause.kind in kinds and not _has_no_effect_alone(index, cause))
    names = {cause.layer for cause in changed if cause.what not in ("renamed", "path")}
    came_or_went = (name for name in (*index.added, *index.removed) if not index.is_pass_through(name))
    names |= {index.caller(name) for name in came_or_went}
    # The effect of the mode is known for torch's own layers only.
    modes = {difference.layer for difference in index.differences("mode")}
    return names - modes | {name for name in modes if index.now[name].type.startswith("torch.nn.")}


def with_size_of_effect(index: ComparisonIndex, cause: Cause) -> Cause:
    """Add what a recorded cause changed: the layer's isolated response, else its output in the run."""
    pair = index.first_calls.get(cause.layer)
    if pair is None or cause.kind not in ("attribute", "architecture") or cause.what in _OF_THE_WHOLE:
        return cause
    if _has_no_effect_alone(index, cause) or index.is_unchanged_in_run(pair):
        return cause  # its response to other inputs may differ for other reasons
    here = [d for d in index.of_call(pair, "response") if d.change is not None]
    same_children = children(pair.actual.response) == children(pair.expected.response)
    if here and same_children and index.is_response_conclusive(pair) and not index.other_explanation(pair):
        worst = worst_first(here)[0]
        name, path = split_place(worst.what)
        effect = name if path == "after" else "output"
        if any(map(_is_reshaped, index.of_call(pair, "interface", side="output"))):
            effect = "shape"
        return cause.with_size(worst, effect=effect)
    # The layers that it calls, and its weights, may have changed themselves.
    alone = not index.child_steps(index.step_of(pair)) and not index.has(cause.layer, "weights")
    moved = index.largest_change(pair, "output") if alone and index.compare_inputs(pair).match else None
    if moved is None or index.reshaped_outputs(pair):
        return cause  # another shape has no relative change
    return cause.with_size(moved, effect="output")


def with_absorbed(index: ComparisonIndex, cause: Cause) -> Cause:
    """Add the hint `ABSORBED` where a layer gives out something else, and the next layer that may take it the same.

    So it is where code hands on something else, alone, and in the run the same.
    """
    pair = index.first_calls.get(cause.layer)
    if pair is None:
        return cause
    absorbed = _hands_on_the_same(index, cause, pair) or (
        cause.kind in ("attribute", "architecture", "computation")
        and cause.change is not None
        and index.largest_change(pair, "output") is not None
        and _is_made_up_for(index, pair)
    )
    return cause.with_hints(ABSORBED) if absorbed else cause


def with_same_elements(index: ComparisonIndex, cause: Cause) -> Cause:
    """Add the hint `SAME_ELEMENTS` to a shape or dtype that changes nothing by itself."""
    first = cause.differences[0] if cause.is_exact else None
    pair = None if first is None else index.pair_at(first)
    if first is None or pair is None or pair.outermost or not has_same_elements(index, pair, first):
        return cause
    return cause.with_hints(SAME_ELEMENTS)


def _hands_on_the_same(index: ComparisonIndex, cause: Cause, pair: CallPair) -> bool:
    """Whether code hands a child something else, alone, and in the run the same, as all else that differs alone."""
    if cause.kind != "computation" or cause.evidence != "isolated" or cause.is_call_change:
        return False
    handed = bool(split_place(cause.differences[0].what)[0])
    return handed and all(_is_same_in_run(index, pair, difference) for difference in cause.differences)


def _is_same_in_run(index: ComparisonIndex, pair: CallPair, response: Difference) -> bool:
    """Whether a value that differs in an isolated response is the same in the run."""
    child, path = split_place(response.what)
    called = index.child_call(pair, child) if child else pair
    return called is not None and index.change(called, "input" if child else "output", path).same


def _is_made_up_for(index: ComparisonIndex, pair: CallPair) -> bool:
    """Whether a layer takes the same that may be made of the output of a call, and all that may be made of it is.

    What was there before the call is not made of its output, as the input that the keys share with the queries.
    """
    step = index.step_of(pair)
    siblings = index.child_steps(step.parent)
    at, above = siblings.index(step), index.pair_of(step.parent)
    known = [value for one in siblings[:at] for value in (*one.call.inputs, *one.call.outputs)]
    known += [*step.call.inputs, *(() if step.parent is None else step.parent.call.inputs)]
    before = {value.tensor for value in known}
    made_up = False
    for later in siblings[at + 1 :]:
        taken = index.pair_of(later)
        if taken is None or taken.layer == pair.layer:
            return False
        for value in taken.actual.inputs:
            of_it = value.source is not None and value.source.startswith(f"{step.name} ")
            computed = value.source is None and (value.tensor not in before or value.tensor < 0)
            if is_quantity(value) and (of_it or computed):
                if index.change(taken, "input", value.path).same:
                    made_up = True
                elif index.largest_change(taken, "output") is not None:  # else it does not matter there
                    return False
    after = {value.tensor for one in siblings[at + 1 :] for value in one.call.outputs}
    returned = [] if above is None else [v.path for v in above.actual.outputs if v.tensor not in after or v.tensor < 0]
    return made_up and not any(above and index.change(above, "output", path).differs for path in returned)


def _has_no_effect_alone(index: ComparisonIndex, cause: Cause) -> bool:
    """Whether a cause changes what a layer holds, and no output; torch's own code checks what a layer holds."""
    layer = index.now.get(cause.layer)
    if layer is None or layer.type.startswith("torch.nn.") or not cause.differences:
        return False
    if cause.differences[0].kind in _NO_EFFECT_ALONE:
        return True
    return all(_is_unused_parameter(index, difference) for difference in cause.differences)


def _is_unused_parameter(index: ComparisonIndex, difference: Difference) -> bool:
    """Whether a trainable parameter came or went that got no gradient, not even zeros, in a run with a backward."""
    if difference.kind not in ("parameter added", "parameter removed"):
        return False
    record = index.comparison.actual if difference.kind == "parameter added" else index.comparison.expected
    found = next(p for p in record.layers[difference.layer].parameters if p.name == difference.what)
    return bool(record.backwards) and found.requires_grad and found.tied_to is None and found.gradient is None


def _is_reshaped(interface: Difference) -> bool:
    """Whether a value has another shape, and not only another dtype."""
    actual, expected = (str(said).rpartition(")")[0] for said in (interface.actual, interface.expected))
    return actual != expected
