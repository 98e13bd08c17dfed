"""Differences → causes: which module's own code, attribute or weights changed. No text, no torch.

Two witnesses speak of a module's own code. Its *response* to synthetic inputs, alone, is independent of everything
upstream and below, so that any number of changes are told apart. *Propagation* looks at the run itself: what came in
matches, what went out does not. Where both can speak and only propagation does, a cause is *possible*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pytest_modelprobe.comparison.compare import Comparison, Difference, DifferenceKind
from pytest_modelprobe.record import Record

from .backward import gradient_causes
from .causes import DRIFT, Cause, CauseKind, Diagnosis, Witness, most_telling_first
from .computation import computation_causes
from .evidence import Evidence
from .hidden import hidden, tells_of_code
from .hints import hints
from .recorded import all_redrawn, explained_by, recorded_causes, with_effect, with_weights_folded

__all__ = [
    "Cause",
    "CauseKind",
    "Diagnosis",
    "Witness",
    "diagnose",
    "hidden",
    "hints",
    "tells_of_code",
]

_OUTPUTS: frozenset[DifferenceKind] = frozenset({"output", "state"})
_GRADIENTS: frozenset[DifferenceKind] = frozenset({"gradient", "gradient presence", "parameter gradient"})
_OTHER_RUN: frozenset[DifferenceKind] = frozenset({"forwards", "loss", "seed"})


def diagnose(comparison: Comparison) -> Diagnosis:
    """Return the causes of the differences.

    >>> from pytest_modelprobe.comparison import compare
    >>> from pytest_modelprobe.record import Layer, Record
    >>> old, new = (
    ...     Record(model="Net", layers={"norm": Layer(name="norm", type="LayerNorm", attributes={"eps": eps})})
    ...     for eps in (1e-5, 1e-6)
    ... )
    >>> [(c.kind, c.layer, c.what) for c in diagnose(compare(new, old)).causes]
    [('attribute', 'norm', 'eps')]
    """
    if comparison.same:
        return Diagnosis(comparison=comparison)
    evidence = Evidence(comparison)
    recorded = recorded_causes(evidence)
    explained = explained_by(evidence, recorded)
    computation, possible = computation_causes(evidence, recorded, explained)
    forward = [*(with_effect(evidence, cause) for cause in recorded), *computation]
    causes = [*forward, *gradient_causes(evidence, forward, explained)]
    unchanged = _is_unchanged(comparison)
    if unchanged and _learns_the_same(comparison):
        causes, possible = ([*map(_without_effect, found)] for found in (causes, possible))
    wanted = comparison.wanted
    if wanted is not None and any(cause.layer in wanted for cause in causes):  # else they lie before what is wanted
        causes = [cause for cause in causes if cause.layer in wanted]
        possible = [cause for cause in possible if cause.layer in wanted]
    to_blame = {cause.layer for cause in causes if cause.what != "training"}
    excused = {cause.layer for cause in causes if not _excuses_nothing(cause)}
    moved = evidence.moved(_OUTPUTS) or evidence.moved(_GRADIENTS)
    moved = tuple(name for name in moved if name not in to_blame and (wanted is None or name in wanted))
    return Diagnosis(
        comparison=comparison,
        causes=tuple(most_telling_first(with_weights_folded(evidence, causes))),
        possible=tuple(c for c in possible if c.layer not in excused and not (causes and DRIFT in c.hints)),
        unchanged=unchanged,
        output=max((d.change or 0.0 for d in _outputs(comparison)), default=None),
        moved=moved,
        not_judged=tuple(name for name in moved if not evidence.judged(name)),
        redrawn=all_redrawn(evidence, causes),
        unknown=None if causes or possible else _why_unknown(comparison.expected),
    )


def _is_unchanged(comparison: Comparison) -> bool:
    """Whether the model computes what it computed, as far as its run shows: each output known, and none another.

    What its layers hand to each other may differ where every gradient says that the whole is the same function: a
    factor may have moved from one layer into the next. Without gradients, what differs inside may be hidden by a zero.
    """
    places = [
        (pair.layer, pair.key, "output", value.path)
        for pair in comparison.calls
        if pair.outermost
        for value in pair.actual.outputs
    ]
    # An output that only one of the two has is a matter of structure.
    compared = [comparison.changes[place] for place in places if place in comparison.changes]
    if not compared or not all(change.known and not change.differs for change in compared):
        return False
    # What layers hand to each other may be written otherwise, as a mask is in another dtype.
    kinds = {d.kind for d in comparison.found}
    moved_inside = not kinds.isdisjoint({"output", *_GRADIENTS})
    return kinds.isdisjoint({"state", *_OTHER_RUN}) and (not moved_inside or _learns_the_same(comparison))


def _learns_the_same(comparison: Comparison) -> bool:
    """Whether gradients were compared, and those of all parameters and of the inputs of the model are the same."""
    roots = {(pair.layer, pair.key) for pair in comparison.calls if pair.outermost}
    compared = [
        (side, change)
        for (layer, key, side, _), change in comparison.changes.items()
        if side == "parameter gradient" or (side == "input gradient" and (layer, key) in roots)
    ]
    known = any(side == "parameter gradient" and change.known for side, change in compared)
    return known and not any(change.differs for _, change in compared)


def _excuses_nothing(cause: Cause) -> bool:
    """Whether a cause leaves open why a layer gives out something else: a name, or what it calls its children with."""
    named = cause.what in ("training", "path", "renamed")
    return named or (cause.kind == "computation" and cause.change is None and cause.witness == "recorded")


def _without_effect(cause: Cause) -> Cause:
    """Return a cause in a model that is the same function: what its code shows otherwise, other inputs show."""
    if cause.change is None or cause.kind in ("input", "seed", "weights", "buffers"):
        return cause
    only = ("not with the inputs of the run",) if cause.witness == "isolated" else ()
    return dataclasses.replace(cause, change=None, noise=None, effect="", hints=(*cause.hints, *only))


def _outputs(comparison: Comparison) -> Iterator[Difference]:
    """Yield the outputs of the model that differ."""
    outermost = {(pair.layer, pair.actual.index) for pair in comparison.calls if pair.outermost}
    return (d for d in comparison.found if d.kind == "output" and (d.layer, d.call) in outermost)


def _why_unknown(expected: Record) -> str:
    if expected.noise == "not repeatable":
        return "the run was not repeatable when it was recorded"
    if expected.noise is None:
        return "no module's inputs match while its output differs, and the noise was not measured"
    return "no module's inputs match while its output differs"
