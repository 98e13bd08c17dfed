"""How calls are written: differences that change nothing that is computed, where every value is the same.

Updates of libraries write the same computation otherwise all the time, and a test that fails for it is soon not read
any more. So these differences become notes. Each rule has to show, in the records, that what differs cannot matter; a
rule that only finds it likely would hide a bug, and `tests/gate/attacks.py` tries to.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_modelprobe.comparison.differences import CallPair, Difference
from pytest_modelprobe.comparison.pairing import comparable, split_place
from pytest_modelprobe.record import Layer

from .causes import Cause
from .computation import has_new_source
from .index import ComparisonIndex
from .pass_through import returns_its_input
from .same_elements import has_same_elements, value_at

_NOTHING = (None, False)


def is_harmless(index: ComparisonIndex, difference: Difference) -> bool:
    """Whether a difference is one of how a call is written; what it gets or gives is the same, or is not used.

    So are arguments with their default, ``None`` or ``False``; a tensor that the code called does not use; another
    shape of the same elements; a mask in another dtype; and an output inside the model that nobody uses. Where a value
    differs, all of these may matter.
    """
    if difference.kind in ("response", "response gradient"):
        return True  # the run does not show it; where zeros may hide it, see `layers_behind_zeros`
    if difference.kind in ("buffer added", "buffer removed"):
        return _is_kept_beside(index, difference)
    if difference.kind in ("layer added", "layer removed", "calls"):
        return all(_computes_nothing(layer) or _was_or_is_shared(index, layer) for layer in _layers(index, difference))
    pair = index.pair_at(difference)
    if pair is None:
        return False
    if _was_or_is_shared(index, index.now[pair.layer]):
        return True  # its calls are those of several layers on one side, so they are no pairs
    if difference.kind in ("input added", "input removed"):
        return not pair.outermost and _is_unused(index, pair, difference)
    if difference.kind == "argument":
        return _is_same_argument(pair, difference) and not (pair.outermost and not _is_nothing(difference))
    if difference.kind in ("interface", "input"):
        return not pair.outermost and has_same_elements(index, pair, difference)
    if difference.kind == "path":
        return not pair.outermost
    if difference.kind == "gradient":
        # Those of all parameters are the same: another tensor of the same numbers takes the gradients of some uses.
        return value_at(pair.actual.inputs, difference.what) is not None
    if difference.kind == "source":
        above = index.step_of(pair).parent
        return above is not None and not has_new_source(index, difference, above)
    return False


def in_run(index: ComparisonIndex, cause: Cause) -> Iterator[Difference]:
    """Yield the differences of a cause; where a layer alone calls a child otherwise, those of the call in the run."""
    for difference in cause.differences:
        yield difference
        pair = index.pair_at(difference)
        child, path = split_place(difference.what)
        called = index.child_call(pair, child) if pair is not None and child else None
        if difference.kind == "response" and called is not None:
            given = index.of_call(called, "argument", "input added", "input removed")
            yield from (other for other in given if other.what == path)


def _layers(index: ComparisonIndex, difference: Difference) -> list[Layer]:
    """Return the layer of a difference in the records that have it; the expected one renames removed layers."""
    names = (difference.layer, f"{difference.layer} (removed)")
    return [layers[name] for layers in (index.now, index.then) for name in names if name in layers]


def _computes_nothing(layer: Layer) -> bool:
    """Whether a layer returns its input in either mode: an identity, dropout of nothing, an empty list of layers."""
    if layer.parameters or layer.buffers:
        return False
    if layer.type_name in ("ModuleList", "ModuleDict", "Sequential") and not layer.calls:
        return True  # what it holds is compared by itself
    chance = [layer.attributes[name] for name in ("p", "drop_prob") if name in layer.attributes]
    return layer.leaf and (chance == [0] or layer.type_name == "Identity") and returns_its_input(layer)


def _was_or_is_shared(index: ComparisonIndex, layer: Layer) -> bool:
    """Whether a layer without weights was another one of its kind under a second name, or is now."""
    if layer.parameters or layer.buffers or not layer.leaf:
        return False
    own = layer.name.removesuffix(" (removed)")
    others = (index.then if layer.name in index.added else index.now).values()
    if layer.name in index.added or layer.name in index.removed:
        alike = (o for o in others if (o.type_name, o.attributes) == (layer.type_name, layer.attributes))
        return any(own in other.aliases for other in alike)
    return {*index.now[layer.name].aliases} != {*index.then[layer.name].aliases}


def _is_kept_beside(index: ComparisonIndex, difference: Difference) -> bool:
    """Whether a buffer came or went that is in no checkpoint: like an attribute of one record alone."""
    layers = index.now if difference.kind == "buffer added" else index.then
    return any(b.name == difference.what and b.persistent is False for b in layers[difference.layer].buffers)


def _is_nothing(difference: Difference) -> bool:
    return difference.actual in _NOTHING and difference.expected in _NOTHING


def _is_same_argument(pair: CallPair, difference: Difference) -> bool:
    """Whether a plain argument means the same: ``None`` or ``False``, its default, or one that the code has no more."""
    if _is_nothing(difference):
        return True
    response, in_both = pair.actual.response, None not in (difference.actual, difference.expected)
    if in_both or response is None or response.arguments_matter is not False:
        return False
    given = difference.expected if difference.actual is None else difference.actual
    return difference.what not in response.defaults or response.defaults[difference.what] == given


def _is_unused(index: ComparisonIndex, pair: CallPair, difference: Difference) -> bool:
    """Whether the code of a call answers the same, alone, with a tensor and without it."""
    first = index.first_calls[pair.layer]
    a, e = first.actual.response, first.expected.response
    if a is None or e is None or not comparable(a, e) or a.arguments_matter:
        return False
    recipe = (a if difference.kind == "input added" else e).recipes.get(difference.what, "")
    _, _, kind = recipe.partition(" ")
    # A mask that masks nothing makes no difference, and the next one may.
    if not kind or kind.startswith(("const", "true", "false")):
        return False
    return a.arguments_matter is False or all(d.change is None for d in index.of_call(first, "response"))
