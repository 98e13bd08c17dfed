"""Differences between two snapshots that a comparison of two runs does not report.

A test compares a run with a file, and some fields of a file cannot make it fail: notes, the order of calls, noise that
allows more than before. The gate compares two files, and has to show what was edited there too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator

from pytest_modelprobe.comparison import CallPair, Comparison, Difference, is_drawn_otherwise
from pytest_modelprobe.record import ROOT, Call, IsolatedResponse, Layer, Parameter, Record, Value


def noise_differences(comparison: Comparison) -> Iterator[Difference]:
    """Yield the places where the noise in the file allows larger changes than before."""
    now, before = comparison.actual.noise, comparison.expected.noise
    if before == "measured" != now:
        yield Difference(layer=ROOT, kind="noise", what="noise", actual=now, expected=before)
    yield from comparison.looser


def architecture_differences(comparison: Comparison, other_calls: Collection[str] = ()) -> Iterator[Difference]:
    """Yield differences of the architecture files that no comparison of two records reports.

    Args:
        comparison: What the comparison reports.
        other_calls: Layers that are called more or less often, which changes no value: a layer without weights may be
            shared now, or no longer.
    """
    now, before = comparison.actual, comparison.expected
    if now.model != before.model:
        yield Difference(layer=ROOT, kind="type", what="of the model", actual=now.model, expected=before.model)
    for name, layer in now.layers.items():
        if (was := before.layers.get(name)) is not None:
            for difference in _fields(layer, was, functools.partial(Difference, layer=name, kind="type")):
                if not (difference.what == "aliases" and name in other_calls):
                    yield difference
            for call, other in zip(layer.calls, was.calls, strict=False):
                yield from _in_call(call, other, functools.partial(Difference, layer=name, call=call.index))
    order = ([step for step in _order(record) if step[0] not in other_calls] for record in (now, before))
    for x, y in zip(*order, strict=False):
        if x != y:
            yield Difference(layer=x[0], kind="calls", what="order", call=x[1], actual=x[0], expected=y[0])
            return


_MakeDifference = Callable[..., Difference]


def _in_call(call: Call, other: Call, make: _MakeDifference) -> Iterator[Difference]:
    yield from _fields(call, other, functools.partial(make, kind="calls"))
    for value, was in _by_path((*call.inputs, *call.outputs), other):
        yield from _fields(value, was, functools.partial(make, kind="calls"), f"{value.path} ")


def _by_path(values: Iterable[Value], other: Call) -> Iterator[tuple[Value, Value]]:
    """Yield the values that a different call has too, each with its counterpart."""
    known = {value.path: value for value in (*other.inputs, *other.outputs)}
    return ((value, known[value.path]) for value in values if value.path in known)


# Fields of layers, calls and values that a comparison of two records does not look at.
_UNSEEN = (
    "leaf",
    "functional",
    "aliases",
    "training",
    "forwards",
    "inputs_known",
    "recomputed",
    "requires_grad",
    "overwritten",
)


def _fields(now: object, before: object, make: _MakeDifference, of: str = "") -> Iterator[Difference]:
    for what in _UNSEEN:
        x, y = getattr(now, what, None), getattr(before, what, None)
        if x != y:
            actual, expected = (str(side) if isinstance(side, tuple) else side for side in (x, y))
            yield make(what=of + what, actual=actual, expected=expected)


def run_differences(comparison: Comparison) -> Iterator[Difference]:
    """Yield differences of the numbers files where every compared value is the same."""
    now, before = comparison.actual, comparison.expected
    for what in ("notes", "origin", "gradient_origin"):
        x, y = getattr(now, what), getattr(before, what)
        if x != y:
            yield Difference(layer=ROOT, kind="run", what=what, actual=str(x or None), expected=str(y or None))
    for name, layer in now.layers.items():
        gradients = {own.name: own.gradient for own in _parameters_and_buffers(before.layers.get(name))}
        for own in _parameters_and_buffers(layer):
            x, y = ("there" if g is not None else None for g in (own.gradient, gradients.get(own.name)))
            if x != y:  # The comparison looks at this only if something is trained.
                yield Difference(layer=name, kind="run", what=f"gradient of {own.name}", actual=x, expected=y)
    for (name, _, side, path), moved in comparison.changes.items():
        # An input that differs is reported where it comes from, and a response that differs is a difference itself.
        if moved.differs and not (side in _REPORTED and comparison.differences):
            yield Difference(layer=name, kind="run", what=f"{side} {path}", change=moved.change)
    for pair in comparison.calls:
        make = functools.partial(Difference, layer=pair.layer, call=pair.actual.index)
        if pair.actual.random != pair.expected.random:
            yield make(kind="run", what="random state", actual=pair.actual.random, expected=pair.expected.random)
        by_mode = [None if r is None else r.mode_matters for r in (pair.actual.response, pair.expected.response)]
        if None not in by_mode and by_mode[0] != by_mode[1]:
            yield make(kind="run", what="dependence on the mode, alone", actual=by_mode[0], expected=by_mode[1])
        for value, other in _by_path((*pair.actual.inputs, *pair.actual.outputs), pair.expected):
            now_dead, then_dead = (0 if v.forward.units is None else v.forward.units.dead for v in (value, other))
            if now_dead != then_dead:
                yield make(kind="run", what=f"dead units of {value.path}", actual=now_dead, expected=then_dead)


_REPORTED = ("input", "handed", "response gradient")


def responses_to_other_tensors(comparison: Comparison) -> Iterator[Difference]:
    """Yield the layers whose answers, each run alone, cannot be compared: for lack of one, or of the same tensors."""
    for pair in comparison.calls:
        x, y = _answered(pair.actual.response), _answered(pair.expected.response)
        drawn_otherwise = is_drawn_otherwise(pair.layer, pair.actual.response, comparison.names_before)
        if (x != y or drawn_otherwise) and not any(_lost(pair)):
            make = functools.partial(Difference, layer=pair.layer, kind="response", call=pair.actual.index)
            yield make(what="of the layer alone", actual=_kept(x, y), expected=_kept(y, x))


def lost_responses(comparison: Comparison) -> Iterator[Difference]:
    """Yield what the file no longer says of layers that ran alone. A test does not compare what only one side has."""
    for pair in comparison.calls:
        for what in _lost(pair):
            yield Difference(layer=pair.layer, kind="response", call=pair.actual.index, what=what, expected="kept")


def _lost(pair: CallPair) -> Iterator[str]:
    now, before = pair.actual.response, pair.expected.response
    if before is None or before.reason is not None:
        return
    if now is None or now.reason is not None or (before.handed and not now.handed):
        yield "of the layer alone"
        return
    handed = {one.where: one for one in now.handed}
    for one in before.handed:
        there = handed.get(one.where)
        if one.reading is not None and there is not None and there.reading is None and there.passed is None:
            yield f"{one.where} of the layer alone"
    if before.gradient is not None and now.gradient is None and now.without_gradient == before.without_gradient:
        yield "gradient of the layer alone"


def _parameters_and_buffers(layer: Layer | None) -> tuple[Parameter, ...]:
    return () if layer is None else (*layer.parameters, *layer.buffers)


def _answered(response: IsolatedResponse | None) -> tuple[object, ...] | None:
    """Return the synthetic inputs of an isolated response and which values it has; `None` if there is none."""
    if response is None or response.reason is not None:
        return None
    answered = tuple((h.where, h.passed, h.reading is not None) for h in response.handed)
    return dict(response.recipes), answered, response.gradient is not None, response.without_gradient


def _kept(answer: tuple[object, ...] | None, other: tuple[object, ...] | None) -> str | None:
    return None if answer is None else "kept" if other is None else "to other questions"


def _order(record: Record) -> list[tuple[str, int]]:
    """Return the calls in order: the name of the layer, and which of its calls it is."""
    calls = sorted(record.calls, key=lambda pair: (pair[1].root, pair[1].root_training, pair[1].started))
    return [(layer.name, call.index) for layer, call in calls]
