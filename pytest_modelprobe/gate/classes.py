"""Classes of change: of a difference, of a cause, of a whole diagnosis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from pytest_modelprobe.comparison import BEHAVIOR, Cause, Comparison, Diagnosis, Difference

from .checkpoints import Effect, effect_on_checkpoints

Class = Literal[
    "checkpoint", "removed", "structure", "interface", "trainable", "behavior", "weights", "renamed", "new", "calls",
    "format",
]  # fmt: skip
"""Classes of change, the most severe first."""


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
    "checkpoint": "keys, shapes, dtypes or ties of the state_dict changed: old checkpoints do not fit",
    "removed": "a snapshot or its numbers are gone, or a part of it is not compared any more",
    "structure": "layers, types, attributes or dataflow changed",
    "interface": "shapes, dtypes or names of what a layer takes or gives changed",
    "trainable": "parameters were frozen or unfrozen, or left out of an optimizer",
    "behavior": "the model computes something else, its numbers moved for what cannot be found, or a tolerance grew",
    "weights": "weights or buffers have other values, and nothing else differs where it could be compared",
    "renamed": "a snapshot, or layers that are made as before, have another name",
    "new": "a snapshot is new",
    "calls": "calls are written otherwise, or layers that compute nothing came or went; every value is the same",
    "format": "the text changed, not what it says",
}


def differences_by_class(diagnosis: Diagnosis, effect: Effect) -> dict[Class, list[Difference]]:
    """Return class → differences; a class may have causes alone."""
    comparison = diagnosis.comparison
    of_numbers = _class_of_numbers(diagnosis)
    found: dict[Class, list[Difference]] = {}
    for difference in comparison.differences:
        kind = "calls" if diagnosis.same else _class_of_difference(difference, comparison)
        found.setdefault(of_numbers if kind == "behavior" else kind, []).append(difference)
    if names := [note for note in comparison.notes if note.kind == "name"]:
        found.setdefault("calls", []).extend(names)
    if not effect.none:  # as of an added layer, whose parameters are no differences of their own
        found.setdefault("checkpoint", [])
    return found


def needs_reason(diagnosis: Diagnosis) -> bool:
    """Whether the gate denies the change without a reason, by its default levels."""
    found = differences_by_class(diagnosis, effect_on_checkpoints(diagnosis.comparison))
    return any(DEFAULTS[kind] == "deny" for kind in found)


def class_of(cause: Cause, diagnosis: Diagnosis) -> Class:
    """Return the class of a cause; a cause without an effect is structure where the output is unchanged."""
    if cause.kind in ("weights", "buffers"):
        return "weights"
    if cause.kind == "attribute":
        return "structure"
    if cause.kind == "architecture":
        return _class_of_difference(cause.differences[0], diagnosis.comparison) if cause.differences else "structure"
    if cause.gradient in ("updated", "not updated"):
        return "trainable"
    return "structure" if diagnosis.unchanged and cause.change is None else "behavior"


def causes_of(kind: Class, diagnosis: Diagnosis) -> Iterator[Cause]:
    """Yield the causes of a class; behavior includes those of other classes that have a measured effect."""
    if kind == "calls":
        yield from diagnosis.notes
    for cause in (*diagnosis.causes, *diagnosis.possible):
        own = class_of(cause, diagnosis)
        if own == kind or (kind == "behavior" and own not in ("weights", "renamed") and cause.change is not None):
            yield cause


def _class_of_numbers(diagnosis: Diagnosis) -> Class:
    """Return the class of changed values: weights or names where these are the only causes, else behavior."""
    found = {class_of(cause, diagnosis) for cause in (*diagnosis.causes, *diagnosis.possible)}
    sized = (c for c in (*diagnosis.causes, *diagnosis.possible) if c.change is not None)
    if diagnosis.unchanged and found and all(class_of(cause, diagnosis) == "weights" for cause in sized):
        return min(found, key=CLASSES.index)  # only an isolated response differs
    if diagnosis.possible or diagnosis.not_judged:
        return "behavior"
    if "weights" in found and found <= {"weights", "renamed"}:
        return "weights"
    # Of a layer with another name the weights are drawn by that name.
    drawn = any(d.kind == "weights" for d in diagnosis.comparison.found)
    return "renamed" if found == {"renamed"} and drawn else "behavior"


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
