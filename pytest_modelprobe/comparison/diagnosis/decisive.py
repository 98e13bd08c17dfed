"""Which differences fail a test although the model gives out the same.

A refactoring is no failure. Where every number of the run is the same, a test fails only for what the run cannot show:
a layer that alone answers otherwise, or otherwise in another mode; checkpoints that would not load, or elsewhere; what
is trainable; an attribute that both sides have; and the inputs and outputs of the model itself. All else becomes a
note.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pytest_modelprobe.comparison.differences import CallPair, Difference, DifferenceKind
from pytest_modelprobe.comparison.pairing import split_place
from pytest_modelprobe.record import Layer, Parameter, qualified

from .backward import gradient_differences
from .causes import Cause
from .computation import response_differences
from .index import ComparisonIndex
from .pass_through import returns_its_input
from .same_elements import has_same_elements, value_at

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
        return answers and not _hands_on_the_same(index, pair, difference)
    if kind == "response gradient":
        return not index.comparison.has_same_gradients and difference in gradient_differences(index, pair)
    if kind == "input":  # what a layer makes of another input shows in its output
        return pair.outermost
    if kind == "gradient presence":
        return pair.outermost or not index.comparison.has_same_gradients
    if kind in ("output", "gradient") and all(map(returns_its_input, layers)):
        return False  # an identity, or dropout, that is called in another place
    # The gradients of all parameters are the same: another tensor of the same numbers takes those of some uses.
    return kind != "gradient" or value_at(pair.actual.inputs, difference.what) is None


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


def _hands_on_the_same(index: ComparisonIndex, pair: CallPair, response: Difference) -> bool:
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
