"""Weights and buffers with other values: of one layer, of a model trained again, of one drawn outside the seed.

Where the weights of every layer changed, a cause for each would bury the others, so they are folded into one. Whether
the weights are a new draw of the same distribution is told by their size: two draws differ in every number, and hardly
in their root mean square.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from pytest_modelprobe.comparison.differences import DifferenceKind
from pytest_modelprobe.record import ROOT, Layer, Parameter

from .causes import Cause, cause_of_all
from .index import ComparisonIndex

_ANOTHER_DRAW = 0.5
"""Weights count as drawn anew if they changed at least this much. Two independent draws differ by 1.4, relatively."""

_STANDARD_ERRORS = 6.0
"""Two draws may be of one distribution if their sizes differ by at most this many standard errors.

The standard error of the rms of n normal numbers is 1/√(2n) of the rms. It is smaller for uniform numbers.
"""

_MANY = 3
"""Changes of all weights become one cause if at least this many layers have weights."""


def weight_causes(index: ComparisonIndex) -> Iterator[Cause]:
    """Yield the layers with other values of their weights, then those with other buffers."""
    # Weights are drawn by name, biases for the size of their weight: new names or sizes, new values.
    drawn: set[DifferenceKind] = {"type", "parameter shape"}
    if redrawn_by_name(index):
        drawn.add("layer renamed")
    judged = [found for found in index.of_layer.values() if drawn.isdisjoint(d.kind for d in found)]
    for found in judged:
        weights = [d for d in found if d.kind == "weights"]
        if weights:
            names = {difference.what for difference in weights}
            then, now = (_parameters(layers[weights[0].layer], names) for layers in (index.then, index.now))
            yield cause_of_all("weights", weights, hints=(_sizes(then, now),))
    for found in judged:
        buffers = [d for d in found if d.kind == "buffer"]
        if buffers:
            yield cause_of_all("buffers", buffers)


def redrawn_by_name(index: ComparisonIndex) -> Collection[str]:
    """Return the renamed layers with random weights if all of them have others, as after `build`; else none."""
    random = {d.layer for d in index.differences("layer renamed") if _is_drawn(index.now[d.layer])}
    return random if all(index.has(name, "weights") for name in random) else ()


def all_redrawn(index: ComparisonIndex, causes: Collection[Cause]) -> bool:
    """Whether all causes are weights drawn anew at the same scale, in every layer, and all else was compared."""
    if not causes or any(cause.kind != "weights" or (cause.change or 0.0) < _ANOTHER_DRAW for cause in causes):
        return False
    random = {name for name, layer in index.now.items() if _is_drawn(layer)}
    same_scale = index.is_all_comparable and not _drawn_at_another_scale(index)
    return same_scale and random <= {cause.layer for cause in causes}


def with_weights_folded(index: ComparisonIndex, causes: Sequence[Cause]) -> list[Cause]:
    """Return the causes, those of weights as one where the weights of all layers changed, as after another training."""
    now, then = index.now, index.then
    drawn = {name for name in now if name in then and (_is_drawn(now[name]) or _is_drawn(then[name]))}
    owning = [
        name
        for name in now
        if name in drawn
        and not index.has(name, "layer renamed")  # weights are drawn by name
        and any(p.requires_grad and p.tied_to is None for p in now[name].parameters)
    ]
    weights = [cause for cause in causes if cause.kind == "weights" and cause.layer in drawn]
    if len(owning) < _MANY or not {*owning} <= {cause.layer for cause in weights}:
        return list(causes)
    other_scales = _drawn_at_another_scale(index)
    few = 2 * len(other_scales) < len(weights)  # else it was trained, or all are drawn otherwise
    told = [f"{name} is drawn at another scale: {sizes}" for name, sizes in other_scales.items() if few]
    sizes = _sizes(*([p for name in owning for p in layers[name].parameters] for layers in (then, now)))
    whole = dataclasses.replace(
        max(weights, key=lambda cause: cause.change or 0.0),
        layer=ROOT,
        what=f"all {len(weights)} layers",
        hints=(sizes, *told),
        differences=tuple(difference for cause in weights for difference in cause.differences),
    )
    others = (cause for cause in causes if cause.kind != "weights" or cause.layer not in drawn)
    return [*others, whole]


def _drawn_at_another_scale(index: ComparisonIndex) -> Mapping[str, str]:
    """Return layer → the sizes of its weights before and now, where they differ by more than those of two draws do."""
    found: dict[str, str] = {}
    for difference in index.differences("weights"):
        then, now = (_parameters(layers[difference.layer], {difference.what}) for layers in (index.then, index.now))
        numbers = then[0].reading.statistics
        before, after = _rms(then), _rms(now)
        if numbers is None or not (before and after):
            continue
        if abs(math.log(after / before)) > _STANDARD_ERRORS / math.sqrt(2 * numbers.count):
            found.setdefault(difference.layer, _sizes(then, now))
    return found


def _parameters(layer: Layer, names: Collection[str]) -> list[Parameter]:
    return [p for p in layer.parameters if p.name in names]


def _is_drawn(layer: Layer) -> bool:
    """Whether a layer has trainable weights that are not constant; those of a new norm layer are."""
    own = (p.reading.statistics for p in layer.parameters if p.requires_grad and p.tied_to is None)
    return any(numbers is not None and numbers.std for numbers in own)


def _sizes(before: Iterable[Parameter], now: Iterable[Parameter]) -> str:
    """Return the sizes of weights before and after: new draws have the same, other scales do not."""
    return f"rms {_rms(before):.3g} → {_rms(now):.3g}"


def _rms(parameters: Iterable[Parameter]) -> float:
    known = [p.reading.statistics for p in parameters if p.reading.statistics is not None]
    count = sum(numbers.count for numbers in known)
    return math.hypot(*(numbers.norm for numbers in known)) / math.sqrt(count) if count else 0.0
