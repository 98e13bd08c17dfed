"""Layers whose own code changed gradients and no outputs.

A gradient also differs because a value does, so the isolated response is asked first: its values are the same there.
The run is only asked where nothing in the forward can have changed gradients, and then from the loss backward: the
first place on that way that differs is the cause, and all behind it follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from pytest_modelprobe.comparison.matching import child_of
from pytest_modelprobe.comparison.tolerance import CAME, GONE, CallPair, Difference, DifferenceKind, ValueChange
from pytest_modelprobe.record import Step, Value, address, label_of, relative_name
from pytest_modelprobe.text import count

from .causes import Cause, between, cause_of, in_layer_order, names_of, worst_first
from .index import ComparisonIndex, value_at


def gradient_causes(index: ComparisonIndex, causes: Sequence[Cause], explained: set[str]) -> list[Cause]:
    """Return the layers whose own backward changed.

    Args:
        index: What differs.
        causes: Those of the forward; they may explain gradients that differ in the run.
        explained: Layers whose isolated response may differ because of those.
    """
    found: dict[str, Cause] = {}
    explained = explained | {cause.layer for cause in causes}
    for pair in index.comparison.calls:
        here = [] if pair.layer in explained or pair.layer in found else gradient_differences(index, pair)
        if here:
            lost = [d for d in here if d.what and d.expected]
            found[pair.layer] = cause_of(
                "gradient",
                worst_first(here),
                what=names_of(lost),
                actual=None,
                expected=None,
                evidence="isolated",
                gradient="lost" if lost else None,
            )
    seen = _seen_in_run(index, causes)
    if seen is not None and seen.layer in found:
        found[seen.layer] = dataclasses.replace(found[seen.layer], evidence="both")
    elif seen is not None and not found:
        found[seen.layer] = seen
    return in_layer_order(found.values(), index.executed_layers)


def _seen_in_run(index: ComparisonIndex, causes: Sequence[Cause]) -> Cause | None:
    """Return the cause that the run shows; None if causes of the forward may explain its gradients."""
    if all(map(_changes_no_gradient, causes)):
        return _first_on_the_way_back(index)
    if all(_changes_no_gradient(cause) or _cuts_no_gradient(cause) for cause in causes):
        passes_on = all(map(index.is_pass_through, (*index.added, *index.removed)))
        return _first_on_the_way_back(index, lost=True) if passes_on else None
    return None


def _changes_no_gradient(cause: Cause) -> bool:
    """Whether a cause of the forward leaves gradients as they are, as another name or class does."""
    structural = cause.kind in ("architecture", "attribute") and cause.what not in ("added", "removed", "path")
    return cause.change is None and (cause.is_call_change or (structural and "requires_grad" not in cause.what))


def _cuts_no_gradient(cause: Cause) -> bool:
    """Whether a cause of the forward, of values or of layers that only pass them on, leaves no place without one."""
    return cause.kind in ("weights", "buffers") or (cause.kind == "architecture" and cause.what in ("added", "removed"))


def gradient_differences(index: ComparisonIndex, pair: CallPair) -> list[Difference]:
    """Return the gradient differences of a call's isolated response, without those of children that changed."""
    if not index.is_response_conclusive(pair) or index.other_explanation(pair) is not None:
        return []
    if index.of_call(pair, "input added", "input removed"):
        return []  # code without a mask has another gradient

    def of_another(name: str) -> bool:
        return " " in name and index.has(child_of(pair, name), "type", "interface")

    return [d for d in index.of_call(pair, "response gradient") if not of_another(d.what)]


def _first_on_the_way_back(index: ComparisonIndex, *, lost: bool = False) -> Cause | None:
    """Return the first gradient on the way back that differs, though the forward matches everywhere.

    Args:
        index: What differs.
        lost: Only look for a gradient that is there no longer: it needs no forward with the same values.
    """
    values: tuple[DifferenceKind, ...] = () if lost else ("input", "output", "weights", "buffer", "state")
    if any(index.differences("parameter trainable", "context", *values)):
        return None
    if (cut := next(_cut_outputs(index, lost=lost), None)) is not None:
        return cut
    if index.comparison.hands_on_same_gradients and not lost:
        return None  # an output takes the gradients of other uses, as one that is a copy now; nothing else gets others
    places: list[tuple[int, int, Step, str, str]] = []
    for step in index.steps:
        places += [(step.call.finished, 1, step, "gradient", v.path) for v in _computed_here(index, step)]
        places += [(step.call.finished, 0, step, "parameter gradient", p.name) for p in step.layer.parameters]
        places += [(step.call.started, 0, step, "input gradient", v.path) for v in step.call.inputs]
    for _, _, step, side, path in sorted(places, key=lambda place: place[:2], reverse=True):
        pair = index.pair_of(step)
        key = None if pair is None or side == "parameter gradient" else pair.key
        change = index.comparison.change(step.layer.name, key, side, path)
        if change == GONE if lost else change.differs:
            return _seen_at(index, step, side, path, change)
    return None


def _cut_outputs(index: ComparisonIndex, *, lost: bool) -> Iterator[Cause]:
    """Yield a cause for each output of the model that gets no gradient any more, or only now, from a random loss."""
    called = [pair for pair in index.comparison.calls if pair.outermost and has_random_loss(index)]
    for pair, value in ((one, value) for one in called for value in one.actual.outputs):
        change = index.change(pair, "gradient", value.path)
        if change == GONE:
            maker, path = _maker(index, index.step_of(pair), value)
            yield Cause(kind="gradient", layer=maker.layer.name, what=path, evidence="propagation", gradient="lost")
        elif change == CAME and not lost:
            yield _seen_at(index, index.step_of(pair), "gradient", value.path, change)


def _maker(index: ComparisonIndex, step: Step, value: Value) -> tuple[Step, str]:
    """Return the innermost call that gives out a tensor, and its path there."""
    for child in _paired_children(index, step):
        for own in child.call.outputs:
            if own.tensor == value.tensor:
                return _maker(index, child, own)
    return step, value.path


def has_random_loss(index: ComparisonIndex) -> bool:
    """Whether the loss is the random projection, the same for all models: it gives each output the same gradient."""
    return index.comparison.actual.loss == index.comparison.expected.loss == "random"


def _paired_children(index: ComparisonIndex, step: Step) -> list[Step]:
    return [child for child in index.child_steps(step) if index.pair_of(child)]


def _computed_here(index: ComparisonIndex, step: Step) -> list[Value]:
    """Return the outputs of a call that are not seen at a child already; all of the model's if the loss may differ."""
    loss = step.outermost and not has_random_loss(index)
    inner = {value.tensor for child in _paired_children(index, step) * (not loss) for value in child.call.outputs}
    return [value for value in step.call.outputs if value.tensor not in inner]


def _seen_at(index: ComparisonIndex, step: Step, side: str, path: str, change: ValueChange) -> Cause:
    """Return the cause of a gradient: the code that it passed through, or the layer of the parameter."""
    cause = Cause(
        kind="gradient",
        layer=step.layer.name,
        what=path,
        change=change.change,
        noise=change.noise,
        sizes=change.sizes,
        evidence="propagation",
        gradient="of value",
        hints=("no gradient arrives any more",) if change == GONE else (),
    )
    if side == "gradient" and step.outermost and not has_random_loss(index):
        return dataclasses.replace(cause, what="the loss", gradient="of loss")
    if (elsewhere := _arriving_otherwise(index)) is not None:
        return Cause(kind="gradient", layer=step.call.root, what=elsewhere, evidence="propagation", gradient="of loss")
    if side == "parameter gradient" or step.parent is None:
        return cause
    layer = step.parent.layer.name
    siblings = index.child_steps(step.parent)
    later = siblings[siblings.index(step) + 1 :]
    named = (step.previous, step) if side == "input gradient" else (step, later[0] if later else None)
    what = between(*(None if s is None else relative_name(s.name, layer) for s in named))
    return dataclasses.replace(cause, layer=layer, what=what, gradient="cut" if change == GONE else None)


def _arriving_otherwise(index: ComparisonIndex) -> str | None:
    """Return where more or fewer gradients arrive than before, if all code, alone, has the same ones.

    Then they come from the loss. A penalty on a gradient sends some through the backward of the layers, and none to
    the output.
    """
    if not all(map(index.is_response_conclusive, index.first_calls.values())):
        return None
    for pair in sorted(index.comparison.calls, key=lambda pair: pair.actual.finished, reverse=True):
        for value in pair.actual.outputs:
            now, then = value.backward, value_at(pair.expected.outputs, value.path)
            was = None if then is None else then.backward
            if now is not None and was is not None and now.tensors != was.tensors:
                place = label_of(address(pair.layer, pair.actual, value.path))
                return f"{place} gets {count(now.tensors, 'gradient')}, not {was.tensors}"
    return None
