"""What an assertion looks at: the record behind a probe, a watch or a record, and the layers and calls in it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeGuard

from pytest_modelprobe.exceptions import NothingObservedError, SelectionError, UsageError
from pytest_modelprobe.record import Glob, Layer, Record, Selector, Statistics, Value, nearest, qualified, select
from pytest_modelprobe.report.text import count, listed, printable

__tracebackhide__ = True  # what a user sees of an error is his own line


class WatchLike(Protocol):
    """What a `Watch` offers."""

    name: str
    model: Any
    closed: bool
    first_hook: int | None

    @property
    def record(self) -> Record:
        """All forwards merged."""

    @property
    def first(self) -> Record:
        """The first forward alone, with the parameters as they were before the first step."""

    @property
    def last(self) -> Record:
        """The newest forward alone."""


class ProbeLike(Protocol):
    """What a `ModelProbe` offers."""

    @property
    def source(self) -> Any:
        """The only watch, or the record of the only run."""


Subject = ProbeLike | WatchLike | Record
"""What assertions take first: a probe with one run or watch, a watch, or a record."""


def record_of(subject: Subject) -> Record:
    """Return the record behind ``subject``, of all forwards."""
    source = source_of(subject)
    record = source if isinstance(source, Record) else source.record
    if not record.forwards:
        raise NothingObservedError(_nothing(source, record))
    return record


def newest_of(subject: Subject) -> Record:
    """Return the record of the newest forward alone, where it is known."""
    source = source_of(subject)
    return source if isinstance(source, Record) else source.last


def backward_of(subject: Subject) -> Record:
    """Return the record behind ``subject``, in which a backward pass was seen."""
    record = record_of(subject)
    if not record.backwards:
        raise NothingObservedError(
            f"{printable(record.model)} saw {count(record.forwards, 'forward')} but no backward: give "
            "run(..., loss=...), or call loss.backward() while the watch is open, or the graph is cut before it"
        )
    return record


def source_of(subject: Subject) -> WatchLike | Record:
    """Return the watch or record behind ``subject``."""
    if isinstance(subject, Record) or is_watch(subject):
        return subject
    if _is_probe(subject):
        source: WatchLike | Record = subject.source
        return source
    raise UsageError(
        f"assertions take modelprobe, a watch or a record first; got {type(subject).__name__}: "
        "record = modelprobe.run(model, ...) gives one"
    )


def is_watch(subject: Any) -> TypeGuard[WatchLike]:
    """Whether ``subject`` is a watch. Asks its class: to look at the property itself would make a record."""
    return hasattr(type(subject), "last") and hasattr(subject, "first_hook")


def _is_probe(subject: Any) -> TypeGuard[ProbeLike]:
    return hasattr(type(subject), "source")


def _nothing(source: WatchLike | Record, record: Record) -> str:
    if not isinstance(source, Record) and source.closed:
        return f"the watch on {printable(source.name)} was closed before the model was called: call it while it is open"
    if not isinstance(source, Record):
        return (
            f"{printable(source.name)} was never called while it was watched{_quoted(record.notes)}: call it (a model "
            "compiled after the watch began runs without hooks: compile it first)"
        )
    structure = any(note.startswith("structure") for note in record.notes)
    advice = "architecture() gives no more of it, modelprobe.run(model, ...) does" if structure else "run it on inputs"
    return f"{printable(record.model)} was never called{_quoted(record.notes)}: {advice}"


def _quoted(notes: Iterable[str]) -> str:
    text = printable("; ".join(notes))
    return f" ({text})" if text else ""


# --- layers -------------------------------------------------------------------------------------------------------


def selected(record: Record, layers: Selector) -> list[Layer]:
    """Return the layers of ``record`` that ``layers`` selects; of a class, those recorded under it or one below it."""
    names_of = functools.cache(_qualified_names)  # the classes there are now: others may be defined later
    names = select(
        record.layers,
        layers,
        is_instance=lambda layer, cls: layer.type in names_of(cls),
        type_name=lambda layer: layer.type_name,
    )
    return [record.layers[name] for name in names]


def called(record: Record, layers: Selector) -> list[Layer]:
    """Return the selected layers that were called; none is an error."""
    found = selected(record, layers)
    active = [layer for layer in found if layer.calls]
    if not active:
        others = f", nor any of {count(len(found) - 1, 'other')} selected," if len(found) > 1 else ""
        raise NothingObservedError(
            f"{printable(found[0].label)} was never called{others} in {count(record.forwards, 'forward')} of "
            f"{printable(record.model)}: select layers that its forward uses"
        )
    return active


def with_numbers(record: Record, layers: Selector) -> list[Layer]:
    """Return the selected layers that gave out floating numbers; none, or what cannot be looked into, is an error."""
    active = called(record, layers)
    for layer in active:
        for note in record.notes:
            if note.startswith(f"{layer.name}: output") and "cannot be looked into" in note:
                raise NothingObservedError(f"{printable(note)}, or leave {printable(layer.name)} out of layers=")
    found = [layer for layer in active if any(numbers(value) for _, value in layer.outputs)]
    if not found:
        reasons = (v.forward.reason for layer in active for _, v in layer.outputs if v.forward.reason)
        why = next(reasons, "integers, booleans, or no tensor that could be looked at")
        raise NothingObservedError(
            f"none of the {count(len(active), 'layer')} looked at gave out numbers, "
            f"{printable(active[0].label)} among them: {printable(why)}"
        )
    return found


def _qualified_names(cls: type) -> set[str]:
    names: set[str] = set()
    classes = [cls]
    while classes:
        current = classes.pop()
        name = f"{current.__module__}.{current.__qualname__}"
        if name not in names:
            names.add(name)
            classes.extend(type.__subclasses__(current))
    return names


def full_name(layer: Layer, parameter: str) -> str:
    """Return a parameter's name within the model: ``fc1.weight``."""
    return qualified(layer.name, parameter)


def not_ignored(names: Sequence[str], ignore: str | Iterable[str]) -> set[str]:
    """Return the names of parameters that no glob in ``ignore`` matches; a glob without a match is an error."""
    left = set(names)
    for glob in [ignore] if isinstance(ignore, str) else ignore:
        matched = {name for name in names if Glob(glob).matches(name)}
        if not matched:
            near = listed(nearest(glob, names)) or "none"
            raise SelectionError(f"ignore={glob!r} matches none of {len(names)} parameters; nearest: {near}")
        left -= matched
    if not left:
        raise NothingObservedError(f"no parameter is left to look at: ignore= names all {len(names):,} of them")
    return left


# --- values -------------------------------------------------------------------------------------------------------


def is_floating(value: Value) -> bool:
    """Whether a value is of a floating or complex dtype: those that can be dead, or not finite."""
    return value.dtype.startswith(("float", "bfloat", "complex"))


def numbers(value: Value) -> Statistics | None:
    """Return the statistics of a floating value that has elements."""
    statistics = value.forward.statistics
    return statistics if is_floating(value) and statistics is not None and statistics.count else None


def is_zero(value: Value) -> bool:
    """Whether a floating value is zero throughout."""
    statistics = numbers(value)
    return statistics is not None and statistics.all_zero
