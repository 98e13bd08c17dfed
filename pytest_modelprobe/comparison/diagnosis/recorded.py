"""Causes that are visible directly in the two records: inputs, architecture, attributes, weights."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from pytest_modelprobe.comparison.compare import is_quantity
from pytest_modelprobe.comparison.differences import CallPair, Difference, DifferenceKind
from pytest_modelprobe.record import ROOT, Layer, Parameter, Plain, containers, parent

from .causes import ABSORBED, Cause, CauseKind, cause_of, worst_first
from .index import STRUCTURE, ComparisonIndex

_WITHOUT_EFFECT = ("added", "removed", "renamed", "path", "training")
"""Changes of a layer as a whole, which need not be the cause of its changed outputs."""

_NO_EFFECT_ALONE = ("buffer added", "buffer removed", "buffer persistent", "parameter trainable")
"""Changes that alter no output by themselves: code has to use a buffer that was added."""

_ANOTHER_DRAW = 0.5
"""Relative change of weights drawn anew: 1.4 for independent ones."""

_STANDARD_ERRORS = 6.0
"""Difference of the sizes of two draws up to which they may be of one distribution; the standard error of the rms of n
normal numbers is 1/√(2n) of it, and less of uniform ones."""

_MANY = 3
"""Layers with weights from which on changes of all weights are one cause."""

_ASPECTS = {"shape": "", "trainable": "requires_grad", "tied": "tied to"}


def recorded_causes(index: ComparisonIndex) -> list[Cause]:
    """Return the causes visible directly in the two records, the most basic first."""
    return [*_inputs(index), *_architecture(index), *_attributes(index), *_weights(index)]


def update_causes(index: ComparisonIndex) -> Iterator[Cause]:
    """Yield the layers with parameters that an optimizer holds no longer, or only now, in records of a step."""
    for found in index.of_layer.values():
        for updated in (False, True):
            here = [d for d in found if d.kind == "update presence" and d.actual is updated]
            if here:
                yield dataclasses.replace(
                    _all_named("gradient", here), gradient="updated" if updated else "not updated"
                )


def explained_by(index: ComparisonIndex, recorded: Iterable[Cause]) -> set[str]:
    """Return the layers whose isolated response may differ because of these causes."""
    kinds = ("architecture", "attribute", "buffers")
    changed = (cause for cause in recorded if cause.kind in kinds and not _has_no_effect_alone(index, cause))
    names = {cause.layer for cause in changed if cause.what not in ("renamed", "path")}
    came_or_went = (name for name in (*index.added, *index.removed) if not index.is_pass_through(name))
    names |= {index.caller(name) for name in came_or_went}
    # The effect of the mode is known for torch's own layers only.
    layers = index.comparison.actual.layers
    modes = {difference.layer for difference in index.differences("mode")}
    return names - modes | {name for name in modes if layers[name].type.startswith("torch.nn.")}


def _has_no_effect_alone(index: ComparisonIndex, cause: Cause) -> bool:
    """Whether a cause changes what a layer holds, and no output; torch's own code checks what a layer holds."""
    layer = index.comparison.actual.layers.get(cause.layer)
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
    parameters = {p.name: p for p in record.layers[difference.layer].parameters}
    found = parameters[difference.what]
    return bool(record.backwards) and found.requires_grad and found.tied_to is None and found.gradient is None


def with_effect(index: ComparisonIndex, cause: Cause) -> Cause:
    """Add what a recorded cause changed: the layer's isolated response, else its output in the run."""
    if cause.kind not in ("attribute", "architecture") or cause.what in _WITHOUT_EFFECT:
        return cause
    if _has_no_effect_alone(index, cause):
        return cause
    pair = index.first_calls.get(cause.layer)
    if pair is None:
        return cause
    here = [d for d in index.of_call(pair, "response") if d.change is not None]
    if index.is_unchanged_in_run(pair):
        return cause  # its response to other inputs may differ for other reasons
    if (
        here
        and index.is_response_conclusive(pair)
        and index.has_same_children(pair)
        and not index.other_explanation(pair)
    ):
        worst = worst_first(here)[0]
        name, _, after = worst.what.rpartition(" ")
        effect = name if after == "after" else "output"
        if any(_is_reshaped(difference) for difference in index.of_call(pair, "interface", side="output")):
            effect = "shape"
        return dataclasses.replace(cause, change=worst.change, noise=worst.noise, effect=effect)
    # The layers that it calls, and its weights, may have changed themselves.
    alone = index.has_no_child_calls(pair) and not index.has(cause.layer, "weights")
    moved = index.largest_change(pair, "output") if alone and index.compare_inputs(pair).match else None
    if moved is None or index.reshaped_outputs(pair):
        return cause  # another shape has no relative change
    return dataclasses.replace(cause, change=moved.change, noise=moved.noise, effect="output")


def with_absorbed(index: ComparisonIndex, cause: Cause) -> Cause:
    """Add the hint `ABSORBED` where a layer gives out something else, and the next layer that may take it the same.

    So it is where code hands on something else, alone, and in the run the same.
    """
    pair = index.first_calls.get(cause.layer)
    if pair is not None and cause.kind == "computation" and cause.evidence == "isolated" and not cause.is_call_change:
        child, _, path = cause.differences[0].what.rpartition(" ")
        called = index.child_call(pair, child) if child else None
        given = None if called is None else index.comparison.change(called.layer, called.key, "input", path)
        if given is not None and given.known and not given.differs:
            return dataclasses.replace(cause, hints=(*cause.hints, ABSORBED))
    own = cause.kind in ("attribute", "architecture", "computation") and cause.change is not None
    step = None if pair is None or not own else index.step_of(pair)
    if pair is None or step is None or index.largest_change(pair, "output") is None:
        return cause
    siblings = index.child_steps(step.parent)
    for later in siblings[siblings.index(step) + 1 :]:
        taken = index.pair_of(later)
        if taken is None or taken.layer == cause.layer:
            return cause
        for value in taken.actual.inputs:
            if is_quantity(value) and (value.source is None or value.source.startswith(f"{step.name} ")):
                change = index.comparison.change(taken.layer, taken.key, "input", value.path)
                if change.known and not change.differs:
                    return dataclasses.replace(cause, hints=(*cause.hints, ABSORBED))
                if index.largest_change(taken, "output") is not None:  # else it does not matter there
                    return cause
    return cause


def _is_reshaped(interface: Difference) -> bool:
    """Whether a value has another shape, and not only another dtype."""
    actual, expected = (str(said).rpartition(")")[0] for said in (interface.actual, interface.expected))
    return actual != expected


def all_redrawn(index: ComparisonIndex, causes: Collection[Cause]) -> bool:
    """Whether all causes are weights drawn anew at the same scale, in every layer, and all else was compared."""
    if not causes or any(cause.kind != "weights" or (cause.change or 0.0) < _ANOTHER_DRAW for cause in causes):
        return False
    if not index.is_all_comparable or _drawn_at_another_scale(index):
        return False
    random = {name for name, layer in index.comparison.actual.layers.items() if _is_drawn(layer)}
    return random <= {cause.layer for cause in causes}


def _drawn_at_another_scale(index: ComparisonIndex) -> dict[str, str]:
    """Return layer → the sizes of its weights before and now, where they differ by more than those of two draws do."""
    found: dict[str, str] = {}
    for difference in index.differences("weights"):
        then, now = (
            next(p for p in record.layers[difference.layer].parameters if p.name == difference.what)
            for record in (index.comparison.expected, index.comparison.actual)
        )
        numbers = then.reading.statistics
        before, after = _rms([then]), _rms([now])
        if numbers is None or not (before and after):
            continue
        if abs(math.log(after / before)) > _STANDARD_ERRORS / math.sqrt(2 * numbers.count):
            found.setdefault(difference.layer, _rms_hint([then], [now])[0])
    return found


def with_weights_folded(index: ComparisonIndex, causes: Sequence[Cause]) -> list[Cause]:
    """Return the causes, those of weights merged where the weights of all layers changed, as after another training."""
    now, then = index.comparison.actual.layers, index.comparison.expected.layers
    drawn = {name for name in now if name in then and (_is_drawn(now[name]) or _is_drawn(then[name]))}
    owning = {
        name
        for name in drawn
        if not index.has(name, "layer renamed")  # weights are drawn by name
        and any(p.requires_grad and p.tied_to is None for p in now[name].parameters)
    }
    weights: list[Cause] = []
    others: list[Cause] = []
    for cause in causes:
        (weights if cause.kind == "weights" and cause.layer in drawn else others).append(cause)
    if len(owning) < _MANY or not owning <= {cause.layer for cause in weights}:
        return list(causes)
    worst = max(weights, key=lambda cause: cause.change or 0.0)
    others_scales = _drawn_at_another_scale(index)
    few = 2 * len(others_scales) < len(weights)  # else it was trained, or all are drawn otherwise
    scales = [f"{name} is drawn at another scale: {sizes}" for name, sizes in others_scales.items() if few]
    whole = dataclasses.replace(
        worst,
        layer=ROOT,
        what=f"all {len(weights)} layers",
        hints=(
            *_rms_hint(*([p for name in owning for p in layers[name].parameters] for layers in (then, now))),
            *scales,
        ),
        differences=tuple(difference for cause in weights for difference in cause.differences),
    )
    return [*others, whole]


def _is_drawn(layer: Layer) -> bool:
    """Whether a layer has trainable weights that are not constant; those of a new norm layer are."""
    own = (p.reading.statistics for p in layer.parameters if p.requires_grad and p.tied_to is None)
    return any(numbers is not None and numbers.std for numbers in own)


def _rms_hint(before: Iterable[Parameter], now: Iterable[Parameter]) -> tuple[str]:
    """Return the sizes of weights before and after: new draws have the same, other scales do not."""
    return (f"rms {_rms(before):.3g} → {_rms(now):.3g}",)


def _rms(parameters: Iterable[Parameter]) -> float:
    known = [p.reading.statistics for p in parameters if p.reading.statistics is not None]
    count = sum(numbers.count for numbers in known)
    return math.hypot(*(numbers.norm for numbers in known)) / math.sqrt(count) if count else 0.0


def _inputs(index: ComparisonIndex) -> Iterator[Cause]:
    for difference in index.differences("seed", "loss", "forwards"):
        yield cause_of("seed" if difference.kind == "seed" else "input", [difference])
    for pair in index.comparison.calls:
        if pair.outermost:
            shaped = index.of_call(pair, "interface", "input added", "input removed", side="input")
            found = index.of_call(pair, "input", "argument")
            if shaped:
                yield cause_of("input", [*shaped, *found])
            elif found:
                yield _all_named("input", found)


def _architecture(index: ComparisonIndex) -> Iterator[Cause]:
    yield from _came_or_went(index, "layer added", "added")
    yield from _came_or_went(index, "layer removed", "removed")
    renamed = {d.layer: d for d in index.differences("layer renamed")}
    drawn = {container for name in _redrawn_by_name(index) for container in (*containers(name), name)}
    for name, difference in renamed.items():
        above = renamed.get(parent(name))
        own = name.rpartition(".")[2]
        if above is None or f"{above.expected}.{own}" != difference.expected:
            hints = ("its weights are others: build draws them by name",) if name in drawn else ()
            yield dataclasses.replace(cause_of("architecture", [difference]), what="renamed", hints=hints)
    yield from _outputs(index)
    for found in index.of_layer.values():
        retyped = [d for d in found if d.kind == "type"]
        if retyped:
            yield dataclasses.replace(cause_of("architecture", retyped), what="type")
            continue
        kinds = dict.fromkeys(d.kind for d in found if d.kind in STRUCTURE)
        for same in ([d for d in found if d.kind == one] for one in kinds):
            aspect = same[0].kind.partition(" ")[2]
            also = tuple(f"also {d.what} {d.expected} → {d.actual}" for d in same[1:])
            what = f"{same[0].what} {_ASPECTS.get(aspect, aspect)}".strip()
            yield dataclasses.replace(cause_of("architecture", same), what=what, hints=also)


def _outputs(index: ComparisonIndex) -> Iterator[Cause]:
    """Yield outputs that were added, removed or have another path, at the layer that makes them."""
    seen = set()
    for pair in index.comparison.calls:
        for difference in index.of_call(pair, "path", "name"):
            layer = _maker(index, pair, difference)
            told = layer, difference.actual, difference.expected
            if pair.actual.index == 0 and not index.has(layer, "type") and told not in seen:
                yield dataclasses.replace(path_cause(difference), layer=layer)
            seen.add(told)


def _maker(index: ComparisonIndex, pair: CallPair, difference: Difference) -> str:
    """Return the innermost layer that gives out a value of another path."""
    paths = (difference.actual, difference.expected)
    for child in index.child_calls(pair):
        renamed = index.comparison.names_before.paths.get(child.layer, {}).items()
        if paths in renamed or any(paths == (d.actual, d.expected) for d in index.of_call(child, "path")):
            return _maker(index, child, difference)
    return pair.layer


def path_cause(difference: Difference) -> Cause:
    """Return the cause of a value that was added, was removed or has another path."""
    return dataclasses.replace(cause_of("architecture", [difference]), what="path")


def _came_or_went(index: ComparisonIndex, kind: DifferenceKind, what: str) -> Iterator[Cause]:
    """Yield a cause for each added or removed layer, together with the layers inside it."""
    found = {d.layer: d for d in index.differences(kind)}
    outermost: dict[str, list[Difference]] = {}
    for name, difference in found.items():
        outermost.setdefault(_outermost(name, found), []).append(difference)
    now, then = index.comparison.actual.layers, index.comparison.expected.layers
    others = then if what == "added" else now
    shared = {alias: layer.name for layer in reversed([*others.values()]) for alias in layer.aliases}
    for name, with_inside in outermost.items():
        layer = now.get(name) if what == "added" else None
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


def _weights(index: ComparisonIndex) -> Iterator[Cause]:
    kinds: tuple[tuple[DifferenceKind, CauseKind], ...] = (("weights", "weights"), ("buffer", "buffers"))
    # Weights are drawn by name, biases for the size of their weight: new names or sizes, new values.
    drawn: set[DifferenceKind] = {"type", "parameter shape"}
    if _redrawn_by_name(index):
        drawn.add("layer renamed")
    for difference_kind, kind in kinds:
        for found in index.of_layer.values():
            here = [d for d in found if d.kind == difference_kind]
            if here and drawn.isdisjoint(d.kind for d in found):
                cause = _all_named(kind, here)
                if kind == "weights":
                    layers = (r.layers[cause.layer] for r in (index.comparison.expected, index.comparison.actual))
                    hints = _rms_hint(*(_changed_parameters(layer, cause) for layer in layers))
                    cause = dataclasses.replace(cause, hints=hints)
                yield cause


def _redrawn_by_name(index: ComparisonIndex) -> set[str]:
    """Return the renamed layers with random weights if all of them have others, as after `build`; else none."""
    layers = index.comparison.actual.layers
    random = {d.layer for d in index.differences("layer renamed") if _is_drawn(layers[d.layer])}
    return random if all(index.has(name, "weights") for name in random) else set()


def _changed_parameters(layer: Layer, cause: Cause) -> list[Parameter]:
    names = {difference.what for difference in cause.differences}
    return [p for p in layer.parameters if p.name in names]


def _all_named(kind: CauseKind, found: list[Difference]) -> Cause:
    """Return one cause for differences, with the largest change and the names of all."""
    names = ", ".join(dict.fromkeys(d.what for d in found))
    return dataclasses.replace(cause_of(kind, worst_first(found)), what=names)


def _outermost(name: str, names: Collection[str]) -> str:
    """Return the outermost of the names that ``name`` is or is inside."""
    return next((other for other in (*containers(name), name) if other in names), name)
