"""Causes that the records say by themselves: other inputs, another architecture, attributes, weights."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from pytest_modelprobe.comparison.compare import Difference, DifferenceKind
from pytest_modelprobe.record import ROOT, Layer, Plain, Reading

from .causes import Cause, CauseKind, cause_of, worst_first
from .evidence import STRUCTURE, Evidence
from .places import parent

_WITHOUT_EFFECT = ("added", "removed", "renamed", "path", "training")
"""What is said of layers as such: numbers that differ beside it need not be its doing."""

_ANOTHER_DRAW = 0.5
"""Relative change of weights drawn anew: 1.4 for independent ones."""

_MANY = 3
"""Layers with weights of which it is said at once that all have other ones."""

_SAID = {"shape": "", "trainable": "requires_grad", "tied": "tied to"}


def recorded_causes(evidence: Evidence) -> list[Cause]:
    """Return what is another in the records, the most basic first."""
    return [*_inputs(evidence), *_architecture(evidence), *_attributes(evidence), *_weights(evidence)]


def explained_by(evidence: Evidence, recorded: Iterable[Cause]) -> set[str]:
    """Return the layers whose own answer may differ for what is already said."""
    told = (cause for cause in recorded if cause.kind in ("architecture", "attribute", "buffers"))
    names = {cause.layer for cause in told if cause.what not in ("renamed", "path")}
    came_or_went = (name for name in (*evidence.added, *evidence.gone) if not evidence.passes_on(name))
    names |= {evidence.caller(name) for name in came_or_went}
    # Of torch's own layers it is known what the mode does: another one's code may have changed besides.
    layers = evidence.comparison.actual.layers
    modes = {difference.layer for difference in evidence.differences("mode")}
    return names - modes | {name for name in modes if layers[name].type.startswith("torch.nn.")}


def with_effect(evidence: Evidence, cause: Cause) -> Cause:
    """Tell of a recorded cause what it changed first: the layer's answer alone, else its output in the run."""
    if cause.kind not in ("attribute", "architecture") or cause.what in _WITHOUT_EFFECT:
        return cause
    pair = evidence.first.get(cause.layer)
    if pair is None:
        return cause
    here = [d for d in evidence.of_call(pair, "response") if d.change is not None]
    if evidence.is_as_it_was(pair):
        return cause  # what it answers to other inputs it may answer for other reasons
    if here and evidence.tells(pair) and evidence.calls_the_same(pair) and not evidence.gets_others(pair):
        worst = worst_first(here)[0]
        name, _, after = worst.what.rpartition(" ")
        effect = name if after == "after" else "output"
        return dataclasses.replace(cause, change=worst.change, noise=worst.noise, effect=effect)
    # What a layer calls may have changed by itself, and its weights.
    alone = evidence.calls_nothing(pair) and not evidence.has(cause.layer, "weights")
    moved = evidence.change(pair, "output") if alone and evidence.inputs(pair).match else None
    if moved is None or evidence.of_call(pair, "interface", side="output"):
        return cause  # of another shape there is no change to tell
    return dataclasses.replace(cause, change=moved.change, noise=moved.noise, effect="output")


def all_redrawn(evidence: Evidence, causes: Collection[Cause]) -> bool:
    """Whether weights are all that is to blame, and every layer that has random ones has others."""
    if not causes or any(cause.kind != "weights" or (cause.change or 0.0) < _ANOTHER_DRAW for cause in causes):
        return False
    if not evidence.all_compared:
        return False
    random = {name for name, layer in evidence.comparison.actual.layers.items() if _is_drawn(layer)}
    return random <= {cause.layer for cause in causes}


def with_weights_folded(evidence: Evidence, causes: Sequence[Cause]) -> list[Cause]:
    """Return the causes, those of weights as one where all layers have other ones: as of a model trained again."""
    now, then = evidence.comparison.actual.layers, evidence.comparison.expected.layers
    drawn = [name for name in now if name in then and (_is_drawn(now[name]) or _is_drawn(then[name]))]
    owning = {
        name
        for name in drawn
        if not evidence.has(name, "layer renamed")  # which has others for that
        and any(p.requires_grad and p.tied_to is None for p in now[name].parameters)
    }
    weights = [cause for cause in causes if cause.kind == "weights" and cause.layer in drawn]
    if len(owning) < _MANY or not owning <= {cause.layer for cause in weights}:
        return list(causes)
    worst = max(weights, key=lambda cause: cause.change or 0.0)
    both = (_rms(p.reading for name in owning for p in layers[name].parameters) for layers in (then, now))
    whole = dataclasses.replace(
        worst,
        layer=ROOT,
        what=f"all {len(weights)} layers",
        hints=("rms {:.3g} → {:.3g}".format(*both),),
        differences=tuple(difference for cause in weights for difference in cause.differences),
    )
    return [*(cause for cause in causes if cause not in weights), whole]


def _is_drawn(layer: Layer) -> bool:
    """Whether a layer has trainable weights that are not constant, as those of a fresh norm are."""
    own = (p.reading.statistics for p in layer.parameters if p.requires_grad)
    return any(numbers is not None and numbers.std for numbers in own)


def _rms(readings: Iterable[Reading]) -> float:
    known = [reading.statistics for reading in readings if reading.statistics is not None]
    count = sum(numbers.count for numbers in known)
    return math.hypot(*(numbers.norm for numbers in known)) / math.sqrt(count) if count else 0.0


def _inputs(evidence: Evidence) -> Iterator[Cause]:
    for difference in evidence.differences("seed", "loss", "forwards"):
        yield cause_of("seed" if difference.kind == "seed" else "input", [difference])
    for pair in evidence.comparison.calls:
        if pair.outermost:
            shaped = evidence.of_call(pair, "interface", "input added", "input removed", side="input")
            found = evidence.of_call(pair, "input", "argument")
            if shaped:
                yield cause_of("input", [*shaped, *found])
            elif found:
                yield _all_named("input", found)


def _architecture(evidence: Evidence) -> Iterator[Cause]:
    yield from _came_or_went(evidence, "layer added", "added")
    yield from _came_or_went(evidence, "layer removed", "removed")
    renamed = {d.layer: d for d in evidence.differences("layer renamed")}
    for name, difference in renamed.items():
        above = renamed.get(parent(name))
        own = name.rpartition(".")[2]
        if above is None or f"{above.expected}.{own}" != difference.expected:
            inside = (other for other in renamed if other == name or other.startswith(f"{name}."))
            drawn = any(evidence.has(other, "weights") for other in inside)
            hints = ("its weights are others: build draws them by name",) if drawn else ()
            yield dataclasses.replace(cause_of("architecture", [difference]), what="renamed", hints=hints)
    yield from _outputs(evidence)
    for found in evidence.of_layer.values():
        retyped = [d for d in found if d.kind == "type"]
        if retyped:
            yield dataclasses.replace(cause_of("architecture", retyped), what="type")
            continue
        kinds = dict.fromkeys(d.kind for d in found if d.kind in STRUCTURE)
        for same in ([d for d in found if d.kind == one] for one in kinds):
            aspect = same[0].kind.partition(" ")[2]
            also = tuple(f"also {d.what} {d.expected} → {d.actual}" for d in same[1:])
            what = f"{same[0].what} {_SAID.get(aspect, aspect)}".strip()
            yield dataclasses.replace(cause_of("architecture", same), what=what, hints=also)


def _outputs(evidence: Evidence) -> Iterator[Cause]:
    """Yield outputs that came, went or have another path, where they are made: not of layers that pass them on."""
    inside: dict[int, set[tuple[Plain, Plain]]] = {}
    for step in evidence.course:
        pair_here, above = evidence.pair(step), evidence.pair(step.parent)
        if pair_here is not None and above is not None:
            renamed = ((d.actual, d.expected) for d in evidence.of_call(pair_here, "path"))
            inside.setdefault(id(above), set()).update(renamed)
    for pair in evidence.comparison.calls:
        for difference in evidence.of_call(pair, "path"):
            told = pair.actual.index > 0 or evidence.has(pair.layer, "type")
            if not told and (difference.actual, difference.expected) not in inside.get(id(pair), ()):
                yield dataclasses.replace(cause_of("architecture", [difference]), what="path")


def _came_or_went(evidence: Evidence, kind: DifferenceKind, what: str) -> Iterator[Cause]:
    """Yield a cause for each layer that came or went, with all that is inside it."""
    found = {d.layer: d for d in evidence.differences(kind)}
    outermost: dict[str, list[Difference]] = {}
    for name, difference in found.items():
        outermost.setdefault(_outermost(name, found), []).append(difference)
    now, then = evidence.comparison.actual.layers, evidence.comparison.expected.layers
    for name, with_inside in outermost.items():
        layer = now.get(name) if what == "added" else None
        same = _also_called(name, then if what == "added" else now)
        yield Cause(
            kind="architecture",
            layer=name,
            what=what,
            actual=None if layer is None else layer.type_name,
            expected=found[name].expected,
            hints=() if same is None else (f"it {'was' if what == 'added' else 'is'} {same} again",),
            differences=tuple(with_inside),
        )


def _also_called(name: str, layers: Mapping[str, Layer]) -> str | None:
    """Return the layer that stands at a name too, as a block that is shared; None: none does."""
    return next((layer.name for layer in layers.values() if name in layer.aliases), None)


def _attributes(evidence: Evidence) -> Iterator[Cause]:
    for name, found in evidence.of_layer.items():
        kinds = {d.kind for d in found}
        if "type" in kinds:
            continue
        reshaped = not kinds.isdisjoint({"parameter shape", "buffer shape"})
        for difference in found:
            if difference.kind == "attribute":
                # The sizes among the attributes say again what the shape of the weight says.
                if not (reshaped and _is_size(difference, found)):
                    yield cause_of("attribute", [difference])
            elif difference.kind == "mode" and (name == ROOT or not evidence.has(parent(name), "mode")):
                yield cause_of("attribute", [difference])


def _is_size(attribute: Difference, found: Collection[Difference]) -> bool:
    """Whether an attribute is a size that a parameter had, and is the one that it has now."""
    shapes = [d for d in found if d.kind in ("parameter shape", "buffer shape")]

    def within(value: Plain, shape: Plain) -> bool:
        sized = type(value) is int or (isinstance(value, str) and value.startswith("("))
        sizes = re.findall(r"\d+", str(shape))
        return sized and all(size in sizes for size in re.findall(r"\d+", str(value)))

    return any(within(attribute.actual, d.actual) and within(attribute.expected, d.expected) for d in shapes)


def _weights(evidence: Evidence) -> Iterator[Cause]:
    kinds: tuple[tuple[DifferenceKind, CauseKind], ...] = (("weights", "weights"), ("buffer", "buffers"))
    for difference_kind, kind in kinds:
        for found in evidence.of_layer.values():
            here = [d for d in found if d.kind == difference_kind]
            # A bias is drawn for the size of its weight, and each by its name: another one, other numbers.
            if here and {d.kind for d in found}.isdisjoint({"type", "parameter shape", "layer renamed"}):
                cause = _all_named(kind, here)
                yield cause if kind == "buffers" else dataclasses.replace(cause, hints=_sizes(evidence, cause))


def _sizes(evidence: Evidence, cause: Cause) -> tuple[str, ...]:
    """Return how large weights were and are: another draw is as large as the first."""
    names = {difference.what for difference in cause.differences}
    layers = (record.layers[cause.layer] for record in (evidence.comparison.expected, evidence.comparison.actual))
    both = (_rms(p.reading for p in layer.parameters if p.name in names) for layer in layers)
    return ("rms {:.3g} → {:.3g}".format(*both),)


def _all_named(kind: CauseKind, found: list[Difference]) -> Cause:
    """Return one cause for differences: how far the worst of them is, and the names of all."""
    names = ", ".join(dict.fromkeys(d.what for d in found))
    return dataclasses.replace(cause_of(kind, worst_first(found)), what=names)


def _outermost(name: str, names: Collection[str]) -> str:
    """Return the outermost of the names that ``name`` is or is inside."""
    parts = name.split(".")
    around = (".".join(parts[:i]) for i in range(1, len(parts)))
    return next((other for other in (ROOT, *around) if other in names), name)
