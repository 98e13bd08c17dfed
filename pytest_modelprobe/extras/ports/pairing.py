"""Two implementations of one model: which layer of one is which of the other, and the first pair that differs.

`match` goes by names and types, which a port shares with its reference as little as a rewrite does. What both share is
the flow of values: so the calls of the two are aligned in the order in which they returned, by the sizes of what they
return, by their parameters, and by the values, which are the same up to the first error of the port.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_modelprobe.comparison import Precision, explained, tolerance
from pytest_modelprobe.exceptions import NothingObservedError
from pytest_modelprobe.record import (
    ROOT,
    CallTree,
    Layer,
    Parameter,
    Record,
    Step,
    Value,
    infer_rename,
    is_read,
    resolve_rename,
)
from pytest_modelprobe.text import count, failure, listed

from .layouts import Sums, chosen, forms, main, shared, size, sums_of


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which layers of two records are the same."""

    actual: Record
    expected: Record
    steps: tuple[tuple[Step, Step], ...]
    """Calls of the actual and of the expected, in the order in which those of the actual returned."""
    sums: Sums
    """What is compared with a residual added."""
    ambiguous: tuple[str, ...]
    """Names, in the actual, of called layers that fit several of the expected equally well. They are not paired."""

    @property
    def names(self) -> dict[str, str]:
        """Expected name → actual name."""
        return {e.layer.name: a.layer.name for a, e in self.steps}

    @property
    def rename(self) -> dict[str, str]:
        """The pairing as a ``rename`` of short globs: actual → expected, without names that agree."""
        changed = {old: new for old, new in self.names.items() if old != new}
        return infer_rename(self.actual, self.expected, changed) or {new: old for old, new in changed.items()}

    def unpaired(self) -> tuple[list[str], list[str]]:
        """Return the called layers of the actual and of the expected that have no partner, but may have values."""
        names = self.names
        mine, theirs = ([s.layer.name for s in _candidates(record)] for record in (self.actual, self.expected))
        known = set(names.values())
        return (
            [name for name in dict.fromkeys(mine) if name not in known],
            [name for name in dict.fromkeys(theirs) if name not in names],
        )

    def __str__(self) -> str:
        mine, theirs = self.unpaired()
        rows = [f"rename={self.rename!r}"] if self.rename else []
        for record, names in ((self.actual, mine), (self.expected, theirs)):
            if names:
                rows.append(f"{count(len(names), 'layer')} of {record.model} without a partner: {listed(names)}")
        outputs = next(([a.call.outputs, e.call.outputs] for a, e in self.steps if a.outermost), [(), ()])
        compared = map(main, shared(*outputs))
        for record, values, one in zip((self.actual, self.expected), outputs, compared, strict=True):
            if others := [value.path for value in values if value is not one]:
                rows.append(f"Only the largest output of both is compared, not {listed(others)} of {record.model}")
        if self.ambiguous:
            said = f"{listed(self.ambiguous)} {'fits' if len(self.ambiguous) == 1 else 'fit'} several layers"
            rows.append(f"Ambiguous: {said} equally well; say which with rename=")
        return "\n".join(rows)


def pair(actual: Record, expected: Record, rename: Mapping[str, str] | None = None) -> Pairing:
    """Return which layers of two implementations are the same, by structure and by what flows through them.

    Raises:
        SelectionError: ``rename`` matches no layer.
        NothingObservedError: No layer but the root could be paired, or the two were given other tensors.
    """
    __tracebackhide__ = True
    _reject_other_inputs(actual, expected)
    told = resolve_rename(actual, expected, rename) if rename else {}
    mine, theirs = list(_candidates(actual)), list(_candidates(expected))
    scores = _Scores(told, actual, expected)
    early = set(_aligned(mine, theirs, scores))
    late = {(a, e) for a, e in _aligned(mine[::-1], theirs[::-1], scores)}
    sure = sorted(early & late, key=lambda found: mine.index(found[0]))
    chance = _by_chance(sure, scores)
    sure = [found for found in sure if found not in chance]
    by_layer: dict[str, str] = {}
    for a, e in sure:  # a shared layer is where its first call says
        if a.layer.name not in by_layer and e.layer.name not in by_layer.values():
            by_layer[a.layer.name] = e.layer.name
    if not by_layer.keys() - {ROOT}:
        raise NothingObservedError(
            f"no layer of {actual.model} could be paired with one of {expected.model}: say which are the same, "
            'such as rename={"blocks.*": "transformer.h.*"}'
        )
    steps = tuple((a, e) for a, e in sure if by_layer.get(a.layer.name) == e.layer.name)
    unsure = {a.layer.name: None for a, _ in sorted(early ^ late, key=lambda found: mine.index(found[0]))}
    return Pairing(
        actual, expected, steps, sums_of(steps, _is_same), tuple(name for name in unsure if name not in by_layer)
    )


def port_failure(pairing: Pairing, tolerance: float = 1.0, *, unknown: Collection[str] = ()) -> str:
    """Return the message of the first pair that differs; an empty text if none does.

    Args:
        pairing: What is compared.
        tolerance: Factor by which every tolerance is multiplied.
        unknown: Names of parameters of the actual that are not known to have the values of the expected.

    Raises:
        NothingObservedError: No pair has numbers in both records.
    """
    __tracebackhide__ = True
    judged = [_Judged.of(a, e, pairing, tolerance) for a, e in pairing.steps]
    known = [one for one in judged if one.output.known]
    if not known:
        raise NothingObservedError("nothing was compared, for no pair of layers has numbers in both records")
    if any(one.actual.outermost and not one.output.known for one in judged):  # or the rest would read as the same
        raise NothingObservedError(
            f"the largest outputs of {pairing.actual.model} and {pairing.expected.model} have no numbers or another "
            "size, so that they cannot be compared: wrap one model in a module that returns what the other does"
        )
    steps_of = {one.actual: one for one in judged}
    different = [one for one in known if one.output.differs and (one.input.same or not _is_within_same(one, steps_of))]
    ties = list(_other_ties(pairing))
    weights = [one for one in judged if one.weights]
    if not (different or ties or weights):
        return ""
    own = next((one for one in different if one.input.same), None)
    looked_at = f"{count(len(known), 'pair')} of layers looked at"
    if own is not None:
        first = f"{own.first_line(different)}; {looked_at}"
        inside = "" if own.actual.outermost else f"{own.actual.layer.name}."
        other = [name for name in unknown if name.startswith(inside)]
        if other:
            first += f"; weights inside are not those of the expected: {listed(other)}"
    elif different:
        first = f"{different[0].names}: output differs by {_share(different[0].output)}; {looked_at}"
    elif weights:
        first = f"{weights[0].names}: {weights[0].weights}; {looked_at}"
    else:
        first = f"{ties[0]}; {looked_at}"
    mixtures = [one for one in judged if one.may_route_otherwise(pairing.expected)]
    if own in mixtures and not any(one.output.same and _is_inside(one.actual, own.actual) for one in mixtures):
        raise NothingObservedError(
            f"{first}; in half precision a router near a tie chooses other experts, so that this tells no error: "
            "compare in float32"
        )
    rows = [one.row() for one in dict.fromkeys([*([own] if own else []), *different, *weights])]
    steps = [*ties, *str(pairing).splitlines()]
    if own is not None and not own.weights:
        calls = [(one.layer.name, one.call.index) for one in (own.actual, own.expected)]
        steps = [*explained("pair", calls, pairing.actual, pairing.expected), *steps]
    return failure(first, _COLUMNS, rows, *(step for step in steps if step and step not in first))


_COLUMNS = ["actual", "expected", "input", "output", "what is known"]


@dataclass(frozen=True, slots=True)
class _Judged:
    actual: Step
    expected: Step
    input: tolerance.ValueChange
    output: tolerance.ValueChange
    weights: str
    """How the parameters differ; empty if they do not, as far as is known."""

    @classmethod
    def of(cls, a: Step, e: Step, pairing: Pairing, times: float) -> _Judged:
        measured = pairing.expected.noise is not None
        compared = functools.partial(_change, measured=measured, times=times)
        taken, made = (compared(*chosen((a, e), at, pairing.sums)) for at in ("inputs", "outputs"))
        weights = _other_weights(a.layer, e.layer)
        inside = a.last_child or e.last_child  # what a container has itself, the other may have in a layer inside
        if not weights and taken.same and made.differs and inside is None:
            weights = _other_parameters(a.layer, e.layer)
        return cls(a, e, taken, made, weights)

    @property
    def names(self) -> str:
        return f"{self.actual.label} and {self.expected.label}"

    def first_line(self, different: Sequence[_Judged]) -> str:
        share = _share(self.output)
        if self.weights:
            return f"{self.names}: {self.weights}, and the output differs by {share}"
        said = f"{self.actual.label} does not compute what {self.expected.label} does: output differs by {share}"
        inside = (one for one in different if one.input.differs and _is_inside(one.actual, self.actual))
        behind = next(inside, None)
        if behind is not None:
            return f"{said} for equal inputs, first in what it passes to {behind.actual.label}"
        return f"{said} for equal inputs" + (" and weights" if self.actual.layer.parameters else "")

    def may_route_otherwise(self, expected: Record) -> bool:
        """Whether it is a mixture of experts in half precision, where rounding may choose others."""
        made = main(self.expected.call.outputs)
        inside = (name for name in expected.layers if name.startswith(self.expected.layer.name))
        is_half = made is not None and tolerance.epsilon(made.dtype) > tolerance.epsilon("float32")
        return is_half and any("expert" in name for name in inside)

    def row(self) -> list[str]:
        then = self.expected.layer.attributes
        attributes = [
            f"{name} {value}, expected {then[name]}"
            for name, value in self.actual.layer.attributes.items()
            if name in then and then[name] != value and not name.startswith("_")
        ]
        known = "; ".join([*([self.weights] if self.weights else []), *attributes[:2]])
        return [self.actual.name, self.expected.name, _share(self.input), _share(self.output), known]


def _is_within_same(one: _Judged, others: Mapping[Step, _Judged]) -> bool:
    """Whether the innermost pair around one takes and returns the same: how it computes that is its own matter."""
    parent = one.actual.parent
    while parent is not None and parent not in others:
        parent = parent.parent
    return parent is not None and others[parent].input.same and others[parent].output.same


def _is_inside(step: Step, other: Step) -> bool:
    parent = step.parent
    while parent is not None and parent is not other:
        parent = parent.parent
    return parent is other


def _share(found: tolerance.ValueChange) -> str:
    if not found.known:
        return "not known"
    if found.same:
        return "same"
    return "all" if found.change is None or math.isinf(found.change) else f"{found.change:.2g} of the norm"


def _change(a: Value | None, e: Value | None, *, measured: bool, times: float) -> tolerance.ValueChange:
    if a is None or e is None or not (is_read(a.forward) and is_read(e.forward)) or size(a) != size(e):
        return tolerance.UNKNOWN
    x, y = a.forward, e.forward
    scale = functools.partial(tolerance.norm, y)
    if x.fingerprint and y.fingerprint and None in (x.statistics, y.statistics):  # a sum
        x, y = (dataclasses.replace(reading, statistics=None) for reading in (x, y))
    precision: Precision = "measured" if measured else "unmeasured"
    rounding = tolerance.epsilon(e.dtype)
    if rounding > tolerance.epsilon("float32"):  # each of the two rounds in its own order, in each layer
        times *= 2
        y = y if y.noise is not None else dataclasses.replace(y, noise=rounding)
    return tolerance.change(x, y, dtype=e.dtype, precision=precision, times=times, scale=scale, rounding=rounding)


def _is_same(a: Value, e: Value) -> bool:
    return _change(a, e, measured=False, times=1.0).same


def _other_weights(a: Layer, e: Layer) -> str:
    """Return how the values of the parameters of two layers differ, in whatever order their elements are."""
    for mine, theirs in _parameter_pairs(a, e):
        x, y = mine.reading.statistics, theirs.reading.statistics
        if x is None or y is None:
            continue
        least = 1e-4 * max(y.norm / math.sqrt(y.count or 1), 1e-12)
        moments = ("mean", "std", "min", "max")
        if any(abs((getattr(x, name) or 0.0) - (getattr(y, name) or 0.0)) > least for name in moments):
            return f"{mine.name} has other values than {theirs.name}"
    return ""


def _other_parameters(a: Layer, e: Layer) -> str:
    """Return what else may differ: how many parameters there are, and the order of their elements.

    A square matrix may be stored transposed, as in GPT-2, so that another order alone is no difference.
    """
    if len(a.parameters) != len(e.parameters):
        has, had = (" and ".join(p.name for p in layer.parameters) or "no parameter" for layer in (a, e))
        return f"has {has}, expected {had}"
    for mine, theirs in _parameter_pairs(a, e):
        if mine.shape == theirs.shape and tolerance.change(mine.reading, theirs.reading, direction="state").differs:
            return f"{mine.name} has the values of {theirs.name} in another order"
    return ""


def _parameter_pairs(a: Layer, e: Layer) -> Iterator[tuple[Parameter, Parameter]]:
    """Yield the parameters of the same name, else those that are the only ones of their size."""
    named = {p.name: p for p in e.parameters}
    others = [p for p in e.parameters if p.name not in {mine.name for mine in a.parameters}]
    for mine in a.parameters:
        size = math.prod(mine.shape)
        alike = [named[mine.name]] if mine.name in named else [p for p in others if math.prod(p.shape) == size]
        if len(alike) == 1 and math.prod(alike[0].shape) == size:
            yield mine, alike[0]


def _other_ties(pairing: Pairing) -> Iterator[str]:
    for a, e in pairing.steps:
        mine, theirs = ({p.tied_to for p in s.layer.parameters if p.tied_to} for s in (a, e))
        if bool(mine) != bool(theirs) and len(a.layer.parameters) == len(e.layer.parameters):
            tied, other = (a, e) if mine else (e, a)
            to = next(iter(mine or theirs))
            yield f"a weight of {tied.label} is tied to {to}, and that of {other.label} is not tied"


def _reject_other_inputs(actual: Record, expected: Record) -> None:
    """Refuse models that were given other tensors: the fingerprint of every value depends on all of these."""
    mine, theirs = ([s.call for s in _candidates(record) if s.outermost] for record in (actual, expected))
    for a, e in zip(mine, theirs, strict=False):
        same_samples = a.samples == e.samples is not None  # so no sign depends on what only one of them is given
        both = [(x, y) for x, y in zip(a.inputs, e.inputs, strict=False) if not same_samples or x.path == y.path]
        both += [(a.inputs[0], e.inputs[0])] if a.inputs and e.inputs else []
        comparable = same_samples or len(a.inputs) == len(e.inputs)
        if comparable and not any(_change(x, y, measured=False, times=1.0).differs for x, y in both):
            continue
        given = [listed([f"{v.path} {v.shape}" for v in call.inputs], most=9) or "no tensor" for call in (a, e)]
        packed = a.inputs and e.inputs and a.inputs[0].shape != e.inputs[0].shape
        advice = (
            "tokens= in both runs says which tokens there are, if one packs what the other pads"
            if packed
            else "give both the same, with the same tokens=, and bind what only one takes in a functools.partial "
            "of its forward"
        )
        raise NothingObservedError(
            f"{actual.model} was given {given[0]} and {expected.model} {given[1]}, which are not the same tensors, so "
            f"that no value can be compared: {advice}"
        )


def _by_chance(steps: Sequence[tuple[Step, Step]], scores: _Scores) -> set[tuple[Step, Step]]:
    """Return pairs of layers with other names that have other weights in all blocks: they are as large by chance.

    A rank has as many rows of one matrix for query, key and value as the other implementation has of the query alone.
    If no matrix is the same, weights were not carried over yet, and tell nothing.
    """
    other = {(a, e) for a, e in steps if _other_weights(a.layer, e.layer)}
    if all(found in other or not any(len(p.shape) > 1 for p in found[0].layer.parameters) for found in steps):
        return set()
    pairs: dict[str, list[tuple[Step, Step]]] = {}
    for a, e in steps:
        pairs.setdefault(_own_name(a), []).append((a, e))
    blocks = Counter(name.rpartition(".")[2] for name in scores.mine)

    def is_strange(name: str, found: tuple[Step, Step]) -> bool:
        a, e = found
        told = a.layer.name in scores.told_of
        return blocks[name] > 1 and found in other and _own_name(e) != name and not told

    strange = (those for name, those in pairs.items() if all(is_strange(name, found) for found in those))
    return {found for those in strange for found in those}


def _own_name(step: Step) -> str:
    return step.layer.name.rpartition(".")[2]


# --- the alignment ------------------------------------------------------------------------------------------------


def _candidates(record: Record) -> Iterator[Step]:
    """Yield the calls that compute something, in the order in which they returned: dropout that is off does not."""
    for step in CallTree(record).returned:
        taken, made = main(step.call.inputs), main(step.call.outputs)
        passes_on = taken is not None and made is not None and taken.forward.fingerprint == made.forward.fingerprint
        if made is not None and not (passes_on and made.forward.fingerprint is not None and not step.layer.parameters):
            yield step


class _Scores:
    """How well two calls fit; `None` if they cannot be the same."""

    def __init__(self, told: Mapping[str, str], actual: Record, expected: Record) -> None:
        self.told, self.told_of = told, {new: old for old, new in told.items()}
        self.parameters = {id(record): _parameters_inside(record) for record in (actual, expected)}
        self.mine, self.theirs = self.parameters[id(actual)], self.parameters[id(expected)]

    def __call__(self, a: Step, e: Step) -> float | None:
        now, then = a.layer.name, e.layer.name
        if now in self.told_of or then in self.told:
            return 1000.0 if self.told.get(then) == now else None
        if a.outermost or e.outermost:
            return 100.0 if a.outermost and e.outermost else None
        returned = shared(a.call.outputs, e.call.outputs)
        x, y = map(main, returned)
        if x is None or y is None or size(x) != size(y):
            return None
        leaf = a.last_child is None
        if leaf != (e.last_child is None):
            return None
        given, taken = map(forms, shared(a.call.inputs, e.call.inputs))
        if leaf and (_kind(a) != _kind(e) or list(map(size, given[:1])) != list(map(size, taken[:1]))):
            return None
        score = 1.0 + 4 * (now == then)
        score += 2 if self.mine[now] == self.theirs[then] else -0.5
        score += 2 * any(_is_same(*both) for both in itertools.product(*map(forms, returned)))
        score += 2 * any(_is_same(*both) for both in itertools.product(given, taken))
        if leaf and a.layer.parameters:
            score += 2 * (not _other_weights(a.layer, e.layer))
        score += 0.5 * (a.layer.type_name == e.layer.type_name)
        return score + 0.25 * (_own_name(a) == _own_name(e))


def _kind(step: Step) -> tuple[int, bool, int]:
    """Return what a layer without layers inside is: a norm has vectors, a linear layer a matrix, an embedding ids."""
    taken = main(step.call.inputs)
    rank = max((len(p.shape) for p in step.layer.parameters), default=0)
    largest = max((math.prod(p.shape) for p in step.layer.parameters), default=0)
    return rank, taken is not None and taken.is_floating, largest


def _parameters_inside(record: Record) -> dict[str, int]:
    found = dict.fromkeys(record.layers, 0)
    for name, layer in record.layers.items():
        own = sum(math.prod(p.shape) for p in layer.parameters)
        while True:
            if name in found:
                found[name] += own
            if "." not in name:
                break
            name = name.rpartition(".")[0]
    return found


def _aligned(mine: Sequence[Step], theirs: Sequence[Step], scores: _Scores) -> Iterator[tuple[Step, Step]]:
    """Yield the pairs of the alignment with the largest sum of scores; of equal ones, the one that pairs latest."""
    best = [[0.0] * (len(theirs) + 1) for _ in range(len(mine) + 1)]
    table = [[scores(a, e) for e in theirs] for a in mine]
    for i, row in enumerate(table):
        for j, score in enumerate(row):
            paired = best[i][j] + score if score is not None else -1.0
            best[i + 1][j + 1] = max(best[i][j + 1], best[i + 1][j], paired)
    i, j = len(mine), len(theirs)
    while i and j:
        score = table[i - 1][j - 1]
        if score is not None and best[i][j] == best[i - 1][j - 1] + score:
            i, j = i - 1, j - 1
            yield mine[i], theirs[j]
        elif best[i][j] == best[i - 1][j]:
            i -= 1
        else:
            j -= 1
