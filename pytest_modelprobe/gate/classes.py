"""The classes of change, their default levels, and which class a difference or a cause belongs to.

A class says what a change means to whoever uses the model: old checkpoints may not fit, or other code may not call it
any more. By default the gate denies what may break checkpoints or callers, and what it would no longer see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from pytest_modelprobe.comparison import BEHAVIOR, Cause, Comparison, Diagnosis, Difference, DifferenceKind
from pytest_modelprobe.record import Layer, Parameter, Record, elements, qualified

# --- what a change does to checkpoints that were saved before it ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """How the keys of the state_dict changed, and how many parameters there are."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    """Keys with another dtype. A checkpoint loads, and its values are converted."""
    tied: tuple[str, ...] = ()
    """Keys that share their storage with different keys than before."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Old key → new key, for the keys of renamed layers."""
    parameters: int = 0
    """The number of elements of all parameters now. Shared ones are counted once."""
    parameters_before: int = 0

    @property
    def none(self) -> bool:
        """Whether old checkpoints load exactly as before."""
        return not (self.added or self.removed or self.reshaped or self.cast or self.tied or self.renamed)

    @property
    def loads(self) -> bool:
        """Whether an old checkpoint loads without an error, even if values are converted or tied differently."""
        return not (self.added or self.removed or self.reshaped or self.renamed)


def effect_on_checkpoints(comparison: Comparison) -> Effect:
    """Return how the keys of the state_dict changed."""
    now, before = _keys(comparison.actual, comparison.expected), _keys(comparison.expected, comparison.actual)
    original = {new: old for old, new in comparison.renamed.items()}
    both = [key for key in now if key in before]

    def as_it_was(key: str) -> str:
        layer, own = before[key]
        return qualified(original.get(layer, layer.removesuffix(" (removed)")), own.name)

    def other(aspect: Callable[[Parameter], object]) -> tuple[str, ...]:
        return tuple(key for key in both if aspect(now[key][1]) != aspect(before[key][1]))

    return Effect(
        added=tuple(key for key in now if key not in before),
        removed=tuple(as_it_was(key) for key in before if key not in now),
        reshaped=other(lambda own: own.shape),
        cast=other(lambda own: own.dtype),
        tied=other(lambda own: own.tied_to),
        renamed={as_it_was(key): key for key in both if as_it_was(key) != key},
        parameters=elements(comparison.actual.parameters),
        parameters_before=elements(comparison.expected.parameters),
    )


def _keys(record: Record, other: Record) -> dict[str, tuple[str, Parameter]]:
    """Return key → the name of the layer and the tensor.

    A file of the structure alone does not say which buffers are persistent. Then ``other``, the record that it is
    compared with, may say so.
    """
    persistent = {(layer.name, own.name): own.persistent for layer in other.layers.values() for own in layer.buffers}

    def stored(layer: Layer) -> Iterator[Parameter]:
        yield from layer.parameters
        for own in layer.buffers:
            if persistent.get((layer.name, own.name)) if own.persistent is None else own.persistent:
                yield own

    return {
        qualified(name, own.name): (name, own)
        for layer in record.layers.values()
        # A shared module is stored under each of its names.
        for name in (layer.name, *layer.aliases)
        for own in stored(layer)
    }


Class = Literal[
    "checkpoint", "removed", "structure", "interface", "trainable", "behavior", "weights", "renamed", "new", "calls",
    "format",
]  # fmt: skip
"""A class of change. The most severe stands first."""


Level = Literal["deny", "warn", "allow"]


CLASSES: tuple[Class, ...] = get_args(Class)


LEVELS: tuple[Level, ...] = get_args(Level)


DEFAULTS: Mapping[Class, Level] = {
    "checkpoint": "deny",
    "removed": "deny",
    "structure": "deny",
    "interface": "deny",
    "trainable": "warn",
    "behavior": "warn",
    "weights": "warn",
    "renamed": "warn",
    "new": "warn",
    "calls": "allow",
    "format": "allow",
}


MEANING: Mapping[Class, str] = {
    "checkpoint": "keys, shapes, dtypes or ties of the state_dict changed, so old checkpoints do not fit",
    "removed": "a snapshot or its numbers were deleted, or a part of it is no longer compared",
    "structure": "layers, types, attributes or dataflow changed",
    "interface": "shapes, dtypes or names of a layer's inputs or outputs changed",
    "trainable": "parameters were frozen, unfrozen or left out of an optimizer",
    "behavior": "the model computes something else, its numbers moved and no cause was found, or a tolerance grew",
    "weights": "weights or buffers have other values, and nothing else that could be compared differs",
    "renamed": "a snapshot has another name, or layers do that are otherwise built as before",
    "new": "a snapshot was added",
    "calls": "calls are written differently, or layers that are never called came or went; every value is the same",
    "format": "the text of a file changed, but not its meaning",
}


def differences_by_class(diagnosis: Diagnosis, effect: Effect) -> dict[Class, list[Difference]]:
    """Return the differences of each class. A class that has causes alone has no differences."""
    comparison = diagnosis.comparison
    of_numbers = _class_of_numbers(diagnosis)
    found: dict[Class, list[Difference]] = {}
    for difference in comparison.differences:
        of = _class_where_same if diagnosis.same else _class_of_difference
        kind = of(difference, comparison)
        found.setdefault(of_numbers if kind == "behavior" else kind, []).append(difference)
    for note in comparison.notes:
        if note.kind == "name":
            found.setdefault(_class_where_same(note, comparison), []).append(note)
    if not effect.none:  # The parameters of a layer that was added, for example, are no differences of their own.
        found.setdefault("checkpoint", [])
    return found


def needs_reason(diagnosis: Diagnosis) -> bool:
    """Return whether the gate, with its default levels, denies the change unless a reason is given."""
    found = differences_by_class(diagnosis, effect_on_checkpoints(diagnosis.comparison))
    return any(DEFAULTS[kind] == "deny" for kind in found)


def class_of(cause: Cause, diagnosis: Diagnosis) -> Class:
    """Return the class of a cause.

    A cause without a known effect is ``structure`` if the output is unchanged, else ``behavior``.
    """
    if cause.kind in ("weights", "buffers"):
        return "weights"
    if cause.kind == "attribute":
        return "structure"
    if cause.kind == "architecture":
        return _class_of_difference(cause.differences[0], diagnosis.comparison) if cause.differences else "structure"
    if cause.gradient in ("updated", "not updated"):
        return "trainable"
    if cause.kind in ("optimizer", "update"):
        return "behavior"
    return "structure" if diagnosis.unchanged and cause.change is None else "behavior"


def class_of_note(note: Cause, comparison: Comparison) -> Class:
    """Return the class of what is written otherwise, where every value is the same."""
    classes = (_class_where_same(difference, comparison) for difference in note.differences)
    return min(classes, key=CLASSES.index, default="calls")


def causes_of(kind: Class, diagnosis: Diagnosis) -> Iterator[Cause]:
    """Yield the causes of a class. To behavior belong also the causes of other classes that have a measured effect."""
    for note in diagnosis.notes:
        if class_of_note(note, diagnosis.comparison) == kind:
            yield note
    for cause in (*diagnosis.causes, *diagnosis.possible):
        own = class_of(cause, diagnosis)
        if own == kind or (kind == "behavior" and own not in ("weights", "renamed") and cause.change is not None):
            yield cause


def _class_of_numbers(diagnosis: Diagnosis) -> Class:
    """Return the class of changed values: weights or renamed if these are the only causes, else behavior."""
    found = {class_of(cause, diagnosis) for cause in (*diagnosis.causes, *diagnosis.possible)}
    sized = (c for c in (*diagnosis.causes, *diagnosis.possible) if c.change is not None)
    if diagnosis.unchanged and found and all(class_of(cause, diagnosis) == "weights" for cause in sized):
        return min(found, key=CLASSES.index)  # The run is the same: only what a layer does alone differs.
    if diagnosis.possible or diagnosis.not_judged:
        return "behavior"
    if "weights" in found and found <= {"weights", "renamed"}:
        return "weights"
    # Weights of `build` are drawn by the names of parameters, so a renamed layer has other ones.
    drawn = any(d.kind == "weights" for d in diagnosis.comparison.found)
    return "renamed" if found == {"renamed"} and drawn else "behavior"


_OF_CALLS: frozenset[DifferenceKind] = BEHAVIOR | {
    "calls", "source", "interface", "input added", "input removed", "argument", "context", "name",
}  # fmt: skip
"""Kinds of differences of how calls are written, where every value is the same."""


def _class_where_same(difference: Difference, comparison: Comparison) -> Class:
    """Return the class of a difference where every value is the same, and nothing that fails a test differs."""
    kind, name = difference.kind, difference.layer
    if kind == "name" and difference.what.startswith("output"):
        return "interface"
    if kind in ("layer added", "layer removed"):
        layers = (comparison.actual if kind == "layer added" else comparison.expected).layers
        return "structure" if (layers.get(f"{name} (removed)") or layers[name]).calls else "calls"
    return "calls" if kind in _OF_CALLS else _class_of_difference(difference, comparison)


def _class_of_difference(difference: Difference, comparison: Comparison) -> Class:
    if difference.kind in ("weights", "buffer"):
        return "renamed" if difference.layer in comparison.names_before.layers else "weights"
    if difference.kind in ("update presence", "parameter trainable"):
        return "trainable"
    if difference.kind in BEHAVIOR:
        return "behavior"
    if difference.kind == "layer renamed":
        return "renamed"
    if difference.kind in ("interface", "path", "name"):
        return "interface"
    if difference.kind.startswith("buffer"):
        own = (layers.get(difference.layer) for layers in (comparison.actual.layers, comparison.expected.layers))
        found = (b for layer in own if layer is not None for b in layer.buffers if b.name == difference.what)
        return "checkpoint" if any(buffer.persistent for buffer in found) else "structure"
    return "checkpoint" if difference.kind.startswith("parameter") else "structure"
