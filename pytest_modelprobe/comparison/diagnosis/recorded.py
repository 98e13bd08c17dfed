"""Causes that the two records show directly: inputs, architecture, attributes, weights, what an optimizer holds.

These need no evidence. What follows from another one is left out here: an attribute that repeats the shape of a weight,
the layers inside one that was added, the name of a layer inside one that was renamed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_modelprobe.comparison.tolerance import CallPair, Difference, DifferenceKind
from pytest_modelprobe.record import (
    ROOT,
    Layer,
    Parameter,
    Plain,
    Reading,
    Record,
    containers,
    parent,
    proportion,
)
from pytest_modelprobe.text import count, significant

from .causes import Cause, cause_of, cause_of_all, worst_first
from .index import STRUCTURE, ComparisonIndex

# --- weights and buffers with other values ----------------------------------------------------------------------------

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


_ASPECTS = {"shape": "", "trainable": "requires_grad", "tied": "tied to", "order": "position"}


def handed_on_causes(index: ComparisonIndex) -> list[Cause]:
    """Return the inputs of forwards that earlier forwards returned: an effect of another cause, where one is found."""
    found = [(d, pair) for pair in index.comparison.calls if pair.outermost for d in index.of_call(pair, "input")]
    hint = "an earlier forward returned it"
    return [cause_of("input", [d], hints=(hint,)) for d, pair in found if index.is_handed_on(pair, d)]


def recorded_causes(index: ComparisonIndex) -> list[Cause]:
    """Return the causes visible directly in the two records, the most basic first."""
    return [*_inputs(index), *_architecture(index), *_attributes(index), *weight_causes(index)]


def update_causes(index: ComparisonIndex) -> Iterator[Cause]:
    """Yield the layers with parameters that an optimizer holds no longer, or only now, in records of a step."""
    for found in index.of_layer.values():
        for updated in (False, True):
            here = [d for d in found if d.kind == "update presence" and d.actual is updated]
            if here:
                yield cause_of_all("gradient", here, gradient="updated" if updated else "not updated")


def _inputs(index: ComparisonIndex) -> Iterator[Cause]:
    for difference in index.differences("seed", "loss", "forwards"):
        yield cause_of("seed" if difference.kind == "seed" else "input", [difference])
    for pair in index.comparison.calls:
        if pair.outermost:
            shaped = index.of_call(pair, "interface", "input added", "input removed", side="input")
            found = [d for d in index.of_call(pair, "input", "argument") if not index.is_handed_on(pair, d)]
            if shaped:
                yield cause_of("input", [*shaped, *found])
            elif found:
                yield cause_of_all("input", found)


def _architecture(index: ComparisonIndex) -> Iterator[Cause]:
    yield from _came_or_went(index, "layer added", "added")
    yield from _came_or_went(index, "layer removed", "removed")
    renamed = {d.layer: d for d in index.differences("layer renamed")}
    drawn = {container for name in redrawn_by_name(index) for container in (*containers(name), name)}
    for name, difference in renamed.items():
        above = renamed.get(parent(name))
        own = name.rpartition(".")[2]
        if above is None or f"{above.expected}.{own}" != difference.expected:
            hints = ("its weights are others: build draws them by name",) if name in drawn else ()
            yield cause_of("architecture", [difference], what="renamed", hints=hints)
    seen = set()  # outputs that have another path, each at the layer that makes it
    for pair in index.comparison.calls:
        for difference in index.of_call(pair, "path", "name"):
            layer = _maker(index, pair, difference)
            told = layer, difference.actual, difference.expected
            if pair.actual.index == 0 and not index.has(layer, "type") and told not in seen:
                yield path_cause(difference, layer=layer)
            seen.add(told)
    for found in index.of_layer.values():
        retyped = [d for d in found if d.kind == "type"]
        if retyped:
            yield cause_of("architecture", retyped, what="type")
            continue
        kinds = dict.fromkeys(d.kind for d in found if d.kind in STRUCTURE)
        for same in ([d for d in found if d.kind == one] for one in kinds):
            aspect = same[0].kind.partition(" ")[2]
            also = tuple(f"also {d.what} {d.expected} → {d.actual}" for d in same[1:])
            what = f"{same[0].what} {_ASPECTS.get(aspect, aspect)}".strip()
            yield cause_of("architecture", same, what=what, hints=also)


def _maker(index: ComparisonIndex, pair: CallPair, difference: Difference) -> str:
    """Return the innermost layer that gives out a value of another path."""
    paths = (difference.actual, difference.expected)
    for child in index.child_calls(pair):
        renamed = index.comparison.names_before.paths.get(child.layer, {}).items()
        if paths in renamed or any(paths == (d.actual, d.expected) for d in index.of_call(child, "path")):
            return _maker(index, child, difference)
    return pair.layer


def path_cause(difference: Difference, **fields: Any) -> Cause:
    """Return the cause of a value that was added, was removed or has another path."""
    return cause_of("architecture", [difference], what="path", **fields)


def _came_or_went(index: ComparisonIndex, kind: DifferenceKind, what: str) -> Iterator[Cause]:
    """Yield a cause for each added or removed layer, together with the layers inside it."""
    found = {d.layer: d for d in index.differences(kind)}
    outermost: dict[str, list[Difference]] = {}
    for name, difference in found.items():
        top = next((other for other in (*containers(name), name) if other in found), name)
        outermost.setdefault(top, []).append(difference)
    others = index.then if what == "added" else index.now
    shared = {alias: layer.name for layer in reversed([*others.values()]) for alias in layer.aliases}
    for name, with_inside in outermost.items():
        layer = index.now.get(name) if what == "added" else None
        same = shared.get(name)
        yield Cause(
            kind="architecture",
            layer=name,
            what=what,
            actual=None if layer is None else layer.type_name,
            expected=found[name].expected,
            hints=() if same is None else (f"it {'was' if what == 'added' else 'is'} {same} again",),
            differences=tuple(with_inside),
        )


def _attributes(index: ComparisonIndex) -> Iterator[Cause]:
    for name, found in index.of_layer.items():
        kinds = {d.kind for d in found}
        if "type" in kinds:
            continue
        reshaped = not kinds.isdisjoint({"parameter shape", "buffer shape"})
        for difference in found:
            if difference.kind == "attribute":
                # Attributes that are sizes repeat the shape of the weight.
                if not (reshaped and _is_size(difference, found)):
                    yield cause_of("attribute", [difference])
            elif difference.kind == "mode" and (name == ROOT or not index.has(parent(name), "mode")):
                yield cause_of("attribute", [difference])


def _is_size(attribute: Difference, found: Collection[Difference]) -> bool:
    """Whether an attribute is a size that a parameter had, and is the one that it has now."""
    shapes = [d for d in found if d.kind in ("parameter shape", "buffer shape")]

    def within(value: Plain, shape: Plain) -> bool:
        sized = type(value) is int or (isinstance(value, str) and value.startswith("("))
        sizes = re.findall(r"\d+", str(shape))
        return sized and all(size in sizes for size in re.findall(r"\d+", str(value)))

    return any(within(attribute.actual, d.actual) and within(attribute.expected, d.expected) for d in shapes)


# --- what optimizers did in a step ------------------------------------------------------------------------------------

_EXACT = 2e-3
"""What is left, relative to the norm, of an update that is a multiple: rounding, and the precision of a fingerprint."""

_ZERO = "are 0"

Fingerprint = tuple[float, ...]


def optimizer_causes(index: ComparisonIndex) -> list[Cause]:
    """Return what differs in how optimizers took the step, and then updates that nothing else explains."""
    found = list(index.differences("optimizer"))
    updates = _own_updates(index)
    if not found:
        return list(_update_causes(index, updates))
    moved = [difference for difference in found if difference.what.endswith(" group")]
    of_run = [difference for difference in found if difference not in moved]
    manners: dict[str, int] = {}
    for difference in updates:
        manner = _manner(index, difference) or "changed"
        manners[manner] = manners.get(manner, 0) + 1
    total = sum(own.update is not None for own in index.comparison.actual.parameters)
    most = sorted(manners.items(), key=lambda pair: -pair[1])[:2]
    parts = [f"{manner} in {n} of {count(total, 'parameter')}" for manner, n in most]
    hints = (f"updates {', '.join(parts)}",) if parts else ()
    causes = [cause_of("optimizer", [difference], hints=hints) for difference in of_run]
    for layer in dict.fromkeys(difference.layer for difference in moved):
        here = [difference for difference in moved if difference.layer == layer]
        causes.append(cause_of("optimizer", here, hints=hints))
    return causes


def _own_updates(index: ComparisonIndex) -> list[Difference]:
    """Return the updates that differ though gradient and values are the same, as far as they are known."""
    changes = index.comparison.changes

    def has_same_reasons(d: Difference) -> bool:
        sides = ("parameter", "parameter gradient")
        return not any(change.differs for side in sides if (change := changes.get((d.layer, None, side, d.what))))

    return [difference for difference in index.differences("update") if has_same_reasons(difference)]


def _update_causes(index: ComparisonIndex, updates: Sequence[Difference]) -> Iterator[Cause]:
    """Yield a cause for each group and each manner in which its updates differ; of one layer, that layer is named."""
    kinds: dict[tuple[int | None, str], list[Difference]] = {}
    for difference in updates:
        now = _parameter(index.comparison.actual, difference)
        kinds.setdefault((now.group, _manner(index, difference)), []).append(difference)
    for (group, manner), found in kinds.items():
        layers = dict.fromkeys(difference.layer for difference in found)
        hints = (manner,) if manner else ()
        if len(layers) == 1:
            yield cause_of_all("update", found, hints=hints)
        else:
            held = sum(own.group == group for own in index.comparison.actual.parameters)
            what = f"{len(found)} of {count(held, 'parameter')}"
            yield cause_of("update", worst_first(found), layer=ROOT, what=what, hints=hints)


def _manner(index: ComparisonIndex, difference: Difference) -> str:
    """Return what an update is of the expected one, if that is a matter of arithmetic."""
    now, then = (_parameter(r, difference) for r in (index.comparison.actual, index.comparison.expected))
    actual, expected = _fingerprint(now.update), _fingerprint(then.update)
    if actual is None or expected is None:
        return ""
    if not any(actual):
        return _ZERO
    factor, left = proportion(actual, expected)
    if left > _EXACT * math.hypot(*actual) or abs(factor - 1) <= _EXACT:
        return ""
    return "with the other sign" if abs(factor + 1) <= _EXACT else f"x {significant(factor)}"


def _parameter(record: Record, difference: Difference) -> Parameter:
    layer = record.layers[difference.layer]
    return next(own for own in layer.parameters if own.name == difference.what)


def _fingerprint(reading: Reading | None) -> Fingerprint | None:
    return None if reading is None else reading.fingerprint
