"""Causes that the two records show directly: inputs, architecture, attributes, weights, what an optimizer holds.

These need no evidence. What follows from another one is left out here: an attribute that repeats the shape of a weight,
the layers inside one that was added, the name of a layer inside one that was renamed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from pytest_modelprobe.comparison.differences import CallPair, Difference, DifferenceKind
from pytest_modelprobe.record import ROOT, Plain, containers, parent

from .causes import Cause, cause_of, cause_of_all
from .index import STRUCTURE, ComparisonIndex
from .weights import redrawn_by_name, weight_causes

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
    yield from _outputs(index)
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


def _outputs(index: ComparisonIndex) -> Iterator[Cause]:
    """Yield outputs that were added, removed or have another path, at the layer that makes them."""
    seen = set()
    for pair in index.comparison.calls:
        for difference in index.of_call(pair, "path", "name"):
            layer = _maker(index, pair, difference)
            told = layer, difference.actual, difference.expected
            if pair.actual.index == 0 and not index.has(layer, "type") and told not in seen:
                yield path_cause(difference, layer=layer)
            seen.add(told)


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
        outermost.setdefault(_outermost(name, found), []).append(difference)
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


def _outermost(name: str, names: Collection[str]) -> str:
    """Return the outermost of the names that ``name`` is or is inside."""
    return next((other for other in (*containers(name), name) if other in names), name)
