"""Differences → causes: which module's own code, attribute or weights changed. No text, no torch.

There are two kinds of evidence that a module's own code changed. *Isolated*: its response to synthetic inputs, called
alone, differs; this does not depend on other modules, so any number of changes can be separated. *Propagation*: in the
run its inputs match and its outputs differ. Where both are available and only propagation differs, a cause is
*possible*.

`diagnose` reads as the steps are taken. Each stands in a module of its own; all ask the same questions of the
comparison through `index`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from pytest_modelprobe.comparison.tolerance import Comparison, Difference, DifferenceKind, ValueChange
from pytest_modelprobe.record import Record, is_narrow

from .backward import gradient_causes
from .causes import (
    DRIFT,
    GRADIENTS,
    Cause,
    Diagnosis,
    by_importance,
)
from .computation import computation_causes
from .effects import (
    explained_by,
    is_decisive,
    is_indecisive,
    with_absorbed,
    with_same_elements,
    with_size_of_effect,
)
from .index import ComparisonIndex
from .recorded import (
    all_redrawn,
    handed_on_causes,
    optimizer_causes,
    path_cause,
    recorded_causes,
    update_causes,
    with_weights_folded,
)

_OUTPUTS: tuple[DifferenceKind, ...] = ("output", "state")
_GRADIENTS: tuple[DifferenceKind, ...] = ("gradient", "gradient presence", "parameter gradient")
_OTHER_RUN: tuple[DifferenceKind, ...] = ("forwards", "loss", "seed")


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
    notes = [path_cause(note) for note in comparison.notes if note.kind == "name"]
    if comparison.same:
        return Diagnosis(comparison=comparison, notes=tuple(notes))
    index = ComparisonIndex(comparison)
    causes, possible = _all_causes(index)
    if not (causes or possible):
        causes = handed_on_causes(index)
    unchanged = _is_unchanged(comparison)
    if unchanged and not comparison.strict:
        decisive = any(is_decisive(index, d) for d in comparison.differences)
        # A cause without differences of its own stands for those that there are.
        indecisive = [c for c in (*causes, *possible) if is_indecisive(index, c) or not (decisive or c.differences)]
        others = len(indecisive) < len(causes) + len(possible)
        nothing_else = not others and not decisive
        if others or nothing_else:  # else they are all that is known of what differs
            notes += map(_without_effect, indecisive)
            causes, possible = ([cause for cause in found if cause not in indecisive] for found in (causes, possible))
        if nothing_else:
            return Diagnosis(comparison=comparison, notes=tuple(notes), unchanged=True)
    # Half precision rounds away what a layer alone shows in float32.
    if unchanged and comparison.has_same_gradients and not is_narrow(comparison.expected):
        causes, possible = ([*map(_without_effect, found)] for found in (causes, possible))
    causes, possible = _of_selected_layers(comparison, causes, possible)
    moved = _moved_layers(index, causes)
    roots = {pair.layer for pair in comparison.calls if pair.outermost}
    return Diagnosis(
        comparison=comparison,
        causes=tuple(by_importance(with_weights_folded(index, causes), roots)),
        possible=tuple(_still_possible(causes, possible)),
        notes=tuple(notes),
        unchanged=unchanged,
        within=max((c.limit for c in _output_changes(comparison) if unchanged and c.is_resolved), default=0.0),
        output=max((d.change or 0.0 for d in _changed_outputs(comparison)), default=None),
        moved=moved,
        not_judged=tuple(name for name in moved if not index.can_be_judged(name)),
        redrawn=not possible and all_redrawn(index, causes),
        unknown=None if causes or possible else _why_unknown(comparison.expected),
    )


# --- the causes -------------------------------------------------------------------------------------------------------


def _all_causes(index: ComparisonIndex) -> tuple[list[Cause], list[Cause]]:
    """Return all causes, and those that are only possible.

    Each step leaves out what an earlier one explains: first what the records show, then code that computes something
    else, and last code of the backward, which only counts where the forward explains no gradient.
    """
    recorded = recorded_causes(index)
    explained = explained_by(index, recorded)
    computation, possible = computation_causes(index, recorded, explained)
    forward = [with_absorbed(index, with_size_of_effect(index, cause)) for cause in recorded]
    forward += [with_same_elements(index, with_absorbed(index, cause)) for cause in computation]
    optimizer = optimizer_causes(index)
    backward = gradient_causes(index, forward, explained)
    if any(cause.what == GRADIENTS for cause in optimizer):  # those of the run are the ones that the optimizer had
        backward = [cause for cause in backward if cause.evidence != "propagation"]
    return [*forward, *backward, *optimizer, *update_causes(index)], possible


def _of_selected_layers(
    comparison: Comparison, causes: list[Cause], possible: list[Cause]
) -> tuple[list[Cause], list[Cause]]:
    """Return the causes in the layers that were selected; all if there are none in these: they are upstream."""
    wanted = comparison.wanted
    if wanted is None or not any(cause.layer in wanted for cause in causes):
        return causes, possible
    return [cause for cause in causes if cause.layer in wanted], [cause for cause in possible if cause.layer in wanted]


def _still_possible(causes: Collection[Cause], possible: Iterable[Cause]) -> Iterator[Cause]:
    """Yield the possible causes without those in layers whose output is explained, and without drift after a cause."""
    explained = {
        cause.layer
        for cause in causes
        # A new name, or other arguments to a child, explain no output of the layer.
        if cause.what not in ("training", "path", "renamed")
        and not (cause.kind == "computation" and cause.change is None and cause.evidence == "recorded")
    }
    return (cause for cause in possible if cause.layer not in explained and not (causes and DRIFT in cause.hints))


def _moved_layers(index: ComparisonIndex, causes: Iterable[Cause]) -> tuple[str, ...]:
    """Return the selected layers whose values changed after a cause; their gradients if no value did."""
    wanted = index.comparison.wanted
    to_blame = {cause.layer for cause in causes if cause.what != "training"}
    moved = index.layers_with(_OUTPUTS) or index.layers_with(_GRADIENTS)
    return tuple(name for name in moved if name not in to_blame and (wanted is None or name in wanted))


def _why_unknown(expected: Record) -> str:
    if expected.noise == "not repeatable":
        return "the run was not repeatable when it was recorded"
    if expected.noise is None:
        return "no module's inputs match while its output differs, and the noise was not measured"
    return "no module's inputs match while its output differs"


# --- what becomes a note ----------------------------------------------------------------------------------------------


def _without_effect(cause: Cause) -> Cause:
    """Return a cause without its change, for a model whose outputs are the same on these inputs."""
    if cause.change is None or cause.kind in ("input", "seed", "weights", "buffers", "update"):
        return cause
    only = ("not with the inputs of the run",) if cause.evidence == "isolated" else ()
    return cause.with_size(None, effect="", hints=(*cause.hints, *only))


# --- what the model gives out -----------------------------------------------------------------------------------------


def _is_unchanged(comparison: Comparison) -> bool:
    """Whether every output of the model was compared and none differs.

    Values between layers may differ where all gradients are the same: a factor may have moved from one layer into the
    next. Without gradients, a difference inside may be multiplied by zero.
    """
    compared = _output_changes(comparison)
    if not compared or not all(change.same for change in compared):
        return False
    # Inputs are not looked at: a mask may have another dtype and mean the same.
    kinds = {d.kind for d in comparison.found}
    if "output" in kinds and not comparison.has_same_gradients:
        return False
    same_gradients = kinds.isdisjoint(_GRADIENTS) or comparison.hands_on_same_gradients
    return same_gradients and kinds.isdisjoint({"state", *_OTHER_RUN})


def _output_changes(comparison: Comparison) -> list[ValueChange]:
    """Return the changes of the model's outputs. One that only one record has is a difference of structure."""
    places = [
        (pair.layer, pair.key, "output", value.path)
        for pair in comparison.calls
        if pair.outermost
        for value in pair.actual.outputs
    ]
    return [comparison.changes[place] for place in places if place in comparison.changes]


def _changed_outputs(comparison: Comparison) -> Iterator[Difference]:
    """Yield the outputs of the model that differ."""
    outermost = {(pair.layer, pair.actual.index) for pair in comparison.calls if pair.outermost}
    return (d for d in comparison.found if d.kind == "output" and (d.layer, d.call) in outermost)
