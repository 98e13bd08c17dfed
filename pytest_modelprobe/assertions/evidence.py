"""What an assertion looks at: the record behind a probe, a watch or a record, and the layers selected in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeGuard, runtime_checkable

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import ROOT, Call, Layer, Record, Value
from pytest_modelprobe.selection import Selector, select


@runtime_checkable
class WatchLike(Protocol):
    """What a `Watch` offers."""

    name: str
    model: Any
    closed: bool
    first_hook: int

    @property
    def record(self) -> Record:
        """All forwards merged."""

    @property
    def last(self) -> Record:
        """The newest forward alone."""


@runtime_checkable
class ProbeLike(Protocol):
    """What a `ModelProbe` offers."""

    @property
    def source(self) -> Any:
        """The only watch, or the record of the only run."""


Subject = ProbeLike | WatchLike | Record
"""What assertions take first: a probe with one run or watch, a watch, or a record."""


def record_of(subject: Subject) -> Record:
    """Return the record behind ``subject``, of all forwards."""
    source = _source(subject)
    record = source if isinstance(source, Record) else source.record
    if not record.forwards:
        raise NothingObservedError(_nothing(source, record))
    return record


def newest_of(subject: Subject) -> Record:
    """Return the record of the newest forward alone, where it is known."""
    source = _source(subject)
    return source if isinstance(source, Record) else source.last


def backward_of(subject: Subject) -> Record:
    """Return the record behind ``subject``, in which a backward pass was seen."""
    record = record_of(subject)
    if not record.backwards:
        raise NothingObservedError(
            f"{record.model} saw {record.forwards} forward(s) but no backward: give run(..., loss=...), "
            "or call loss.backward() while the watch is open"
        )
    return record


def selected(record: Record, layers: Selector) -> list[Layer]:
    """Return the layers of ``record`` that ``layers`` selects."""
    names = select(record.layers, layers, is_instance=is_instance, type_name=lambda layer: layer.type_name)
    return [record.layers[name] for name in names]


def called(record: Record, layers: Selector) -> list[Layer]:
    """Return the selected layers that were called; none is an error."""
    found = selected(record, layers)
    active = [layer for layer in found if layer.calls]
    if not active:
        raise NothingObservedError(
            f"none of the {len(found)} selected layers of {record.model} was called, {found[0].name} among them: "
            "was the model run, and does its forward use them?"
        )
    return active


def is_instance(layer: Layer, cls: type) -> bool:
    """Whether the class of a recorded layer is ``cls`` or derived from it, as far as it is imported."""
    return layer.type in _qualified_names(cls)


def _qualified_names(cls: type) -> set[str]:
    names, classes = set(), [cls]
    while classes:
        current = classes.pop()
        name = f"{current.__module__}.{current.__qualname__}"
        if name not in names:
            names.add(name)
            classes.extend(type.__subclasses__(current))
    return names


def _source(subject: Subject) -> WatchLike | Record:
    if isinstance(subject, Record) or _is_watch(subject):
        return subject
    if isinstance(subject, ProbeLike):
        source: WatchLike | Record = subject.source
        return source
    raise UsageError(
        f"assertions take modelprobe, a watch or a record first; got {type(subject).__name__}: "
        "record = modelprobe.run(model, ...) gives one"
    )


def _is_watch(subject: object) -> TypeGuard[WatchLike]:
    return isinstance(subject, WatchLike)


def _nothing(source: WatchLike | Record, record: Record) -> str:
    if not isinstance(source, Record) and source.closed:
        return f"the watch on {source.name} was closed before the model was called: call the model while it is open"
    return f"{record.model} was never called: call it, or give architecture() its inputs"


# --- calls and what lies between them -----------------------------------------------------------------------------


def returned(record: Record) -> list[tuple[Layer, Call]]:
    """Return the calls that returned, in the order in which they did: a child before its container."""
    calls = ((layer, call) for layer in record.layers.values() for call in layer.calls if call.finished >= 0)
    return sorted(calls, key=lambda pair: pair[1].finished)


def made_outside(record: Record, layer: Layer, call: Call) -> Iterator[Value]:
    """Yield what a call took in first that no recorded layer gave out: results of code between layers."""
    outermost = call.root == layer.name and call.index == 0
    if not outermost:
        yield from (v for v in call.inputs if v.source is None and v.path in ("input", "input[0]"))


def between(record: Record, call: Call, layer: str) -> str:
    """Return where the code lies that made an input of ``call``: ``between fc1 and fc2``."""
    earlier = [
        (other, name.name) for name, other in returned(record) if other.finished < call.started and akin(other, call)
    ]
    parent = enclosing(record, call)
    inside = [pair for pair in earlier if parent is None or pair[0].started > parent[1].started]
    place = f" in {parent[0].name}'s forward" if parent is not None and parent[0].name != ROOT else ""
    return f"between {inside[-1][1]} and {layer}{place}" if inside else f"before {layer}{place}"


def enclosing(record: Record, call: Call) -> tuple[Layer, Call] | None:
    """Return the innermost recorded call during which ``call`` ran."""
    around = [
        (layer, other)
        for layer in record.layers.values()
        for other in layer.calls
        if akin(other, call) and other.started < call.started and (other.finished > call.started)
    ]
    return max(around, key=lambda pair: pair[1].started, default=None)


def akin(a: Call, b: Call) -> bool:
    """Whether two calls are of forwards of one kind."""
    return (a.root, a.root_training) == (b.root, b.root_training)


def is_floating(value: Value) -> bool:
    """Whether a value is of a floating or complex dtype: those that can be dead, or not finite."""
    return value.dtype.startswith(("float", "bfloat", "complex"))
