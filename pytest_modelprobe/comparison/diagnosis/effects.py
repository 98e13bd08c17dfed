"""What a cause changed, and what it explains of others.

A cause in the records, such as another ``eps``, has no size of its own: it is that of what the layer answers now. And
what one cause explains must not become a second one: the isolated response of a layer with another attribute differs
although its code did not change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator

from pytest_modelprobe.comparison.compare import is_quantity
from pytest_modelprobe.comparison.matching import children, split_place
from pytest_modelprobe.comparison.tolerance import CallPair, Difference, DifferenceKind
from pytest_modelprobe.record import CallTree, Layer, Parameter, Record, Step, Value, qualified

from .backward import gradient_differences, has_random_loss
from .causes import ABSORBED, SAME_ELEMENTS, Cause, worst_first
from .computation import response_differences
from .index import ComparisonIndex, has_same_elements, returns_its_input, value_at

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


# --- which differences fail a test although the model gives out the same ----------------------------------------------

_OF_THE_MODEL: frozenset[DifferenceKind] = frozenset({"interface", "path", "input added", "input removed"})
"""Kinds that matter to whoever calls the model, and so at the model itself alone."""


def is_decisive(index: ComparisonIndex, difference: Difference) -> bool:
    """Whether a difference fails a test by itself where the outputs of the model are the same."""
    kind = difference.kind
    layers = [layer for layer in _layers(index, difference) if not _is_shared_otherwise(index, layer)]
    if kind in ("layer added", "layer removed", "layer renamed") and any(map(_is_stored, layers)):
        return True
    if kind in ("layer added", "layer removed", "type", "calls"):
        return any(map(depends_on_mode, layers))
    if kind == "layer renamed":
        return False
    if kind.startswith("buffer "):
        return any(b.name == difference.what and b.persistent is not False for b in _buffers(index, difference))
    pair = index.pair_at(difference)
    if kind == "source" or (pair is not None and not layers):
        return False
    if pair is None:
        return True
    if kind in _OF_THE_MODEL:
        return pair.outermost
    if kind == "argument":
        nothing = {difference.actual, difference.expected} <= {None, False}
        return not nothing and (pair.outermost or _may_matter(pair, difference))
    if kind == "context":
        return difference.what == "grad_enabled"
    if kind == "response":  # what the code hands to its children otherwise is told by their calls
        answers = difference.change is not None and difference in response_differences(index, pair)
        return answers and not _hands_on_same_elements(index, pair, difference)
    if kind == "response gradient":
        return not index.comparison.has_same_gradients and difference in gradient_differences(index, pair)
    if kind == "input":  # what a layer makes of another input shows in its output
        return pair.outermost
    if kind == "gradient presence":
        by_code = pair.outermost and has_random_loss(index)
        return by_code or not index.comparison.hands_on_same_gradients
    if kind in ("output", "gradient") and all(map(returns_its_input, layers)):
        return False  # an identity, or dropout, that is called in another place
    if kind != "gradient":
        return True
    # Another tensor of the same numbers takes the gradients of some uses, and all parameters get the same.
    is_input = value_at(pair.actual.inputs, difference.what) is not None
    return not (is_input or index.comparison.hands_on_same_gradients)


def is_indecisive(index: ComparisonIndex, cause: Cause) -> bool:
    """Whether a cause is made of differences of which none fails a test by itself."""
    return bool(cause.differences) and not any(is_decisive(index, found) for found in _of_cause(index, cause))


def _of_cause(index: ComparisonIndex, cause: Cause) -> Iterator[Difference]:
    """Yield the differences of a cause; where a layer alone calls a child otherwise, those of the call in the run."""
    for difference in cause.differences:
        yield difference
        pair = index.pair_at(difference)
        child, path = split_place(difference.what)
        called = index.child_call(pair, child) if pair is not None and child else None
        if difference.kind == "response" and called is not None:
            given = index.of_call(called, "argument", "input added", "input removed")
            yield from (other for other in given if other.what == path)


def depends_on_mode(layer: Layer) -> bool:
    """Whether the code of a layer, alone, answers otherwise in training than in evaluation mode, or may do so."""
    responses = [call.response for call in layer.calls if call.index == 0]
    return not layer.functional and any(
        r is None or r.reason is not None or r.mode_matters is not False for r in responses
    )


def _may_matter(pair: CallPair, argument: Difference) -> bool:
    """Whether the code of a call, alone, answers otherwise to a plain argument, or may do so in the other mode."""
    response = pair.actual.response
    if response is None or response.arguments_matter:
        return response is not None
    given = argument.expected if argument.actual is None else argument.actual
    in_both = None not in (argument.actual, argument.expected)
    return response.mode_matters is not False and (
        in_both or response.defaults.get(argument.what, (given,)) != (given,)
    )


def _hands_on_same_elements(index: ComparisonIndex, pair: CallPair, response: Difference) -> bool:
    """Whether what differs alone is a tensor for a child that has the same elements in another form in the run."""
    child, path = split_place(response.what)
    called = index.child_call(pair, child) if child else None
    if called is None or not any(d.what == path for d in index.of_call(called, "interface")):
        return False
    return has_same_elements(index, called, dataclasses.replace(response, what=path))


def _is_shared_otherwise(index: ComparisonIndex, layer: Layer) -> bool:
    """Whether a layer was another one of its kind under a second name, or is now, with the same tensors.

    Its calls are those of several layers on one side, and so are no pairs.
    """
    if not layer.leaf:
        return False
    own = layer.name.removesuffix(" (removed)")
    stored = (*layer.parameters, *layer.buffers)
    if layer.name in index.now and layer.name in index.then:
        return not stored and {*index.now[layer.name].aliases} != {*index.then[layer.name].aliases}
    others = (index.then if layer.name in index.added else index.now).values()
    alike = (o for o in others if (o.type_name, o.attributes) == (layer.type_name, layer.attributes))
    return any(own in o.aliases and all(p.tied_to == qualified(o.name, p.name) for p in stored) for o in alike)


def _is_stored(layer: Layer) -> bool:
    """Whether a checkpoint has a parameter or buffer of a layer."""
    return bool(layer.parameters) or any(buffer.persistent is not False for buffer in layer.buffers)


def _buffers(index: ComparisonIndex, difference: Difference) -> Iterator[Parameter]:
    return (buffer for layer in _layers(index, difference) for buffer in layer.buffers)


def _layers(index: ComparisonIndex, difference: Difference) -> list[Layer]:
    """Return the layer of a difference in the records that have it; the expected one renames removed layers."""
    names = (difference.layer, f"{difference.layer} (removed)")
    return [layers[name] for layers in (index.now, index.then) for name in names if name in layers]


# --- layers whose code may not affect the run, as its result may be multiplied by zero --------------------------------


def layers_behind_zeros(record: Record) -> list[str]:
    """Return the layers outside torch with an all-zero parameter, buffer, input or child output.

    Of leaf layers with the same type, attributes and shapes only the first is returned.

    >>> layers_behind_zeros(Record(model="Net"))
    []
    """
    steps = [step for step in CallTree(record).started if not step.layer.functional]
    giving_zeros = {id(step.parent) for step in steps if step.parent and _any_zero(step.call.outputs)}
    calling = {id(step.parent) for step in steps}
    kinds: set[Hashable] = set()
    found: dict[str, None] = {}
    for step in steps:
        layer = step.layer
        zeros = id(step) in giving_zeros or _any_zero((*layer.parameters, *layer.buffers, *step.call.inputs))
        if zeros and not layer.type.startswith("torch.nn."):
            kind = layer.name if id(step) in calling else _kind(step)
            if kind not in kinds:
                kinds.add(kind)
                found[layer.name] = None
    return list(found)


def _any_zero(some: Iterable[Parameter | Value]) -> bool:
    """Whether one of the tensors is all zero."""
    for one in some:
        reading = one.reading if isinstance(one, Parameter) else one.forward
        if reading.digest is None and reading.statistics is not None and reading.statistics.all_zero:
            return True
    return False


def _kind(step: Step) -> Hashable:
    layer = step.layer
    return (
        layer.type,
        tuple(layer.attributes.items()),
        tuple((own.name, own.shape) for own in (*layer.parameters, *layer.buffers)),
        tuple((value.path, value.shape) for value in step.call.inputs),
        tuple(step.call.arguments.items()),
    )
