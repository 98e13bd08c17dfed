"""What assertions have in common: the record, the layers and the values that they look at.

An assertion on nothing would always pass. So each function here raises `NothingObservedError` where there is no call,
no layer or no number, and says what to do. A watch and a probe are described by protocols, because nothing after the
record imports torch. What a healthy model may do is known here too: zeros of layers that were initialized so, and
experts that few tokens reach.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, TypeVar, cast

from pytest_modelprobe.exceptions import HintWarning, NothingObservedError, SelectionError, UsageError
from pytest_modelprobe.record import (
    Call,
    Glob,
    Layer,
    Parameter,
    Record,
    Selector,
    Statistics,
    Value,
    nearest,
    qualified,
    selected,
)
from pytest_modelprobe.text import count, listed, printable

__tracebackhide__ = True  # a traceback ends at the line of the test


class WatchLike(Protocol):
    """The interface of a `Watch`."""

    name: str
    model: Any
    first_hook: int | None

    @property
    def closed(self) -> bool:
        """Whether its hooks are gone."""

    @property
    def record(self) -> Record:
        """All forwards merged."""

    @property
    def first(self) -> Record:
        """The first forward alone, with the parameters as it left them."""

    @property
    def last(self) -> Record:
        """The newest forward alone."""

    @property
    def steps(self) -> Sequence[Record]:
        """The records of the steps of training that are kept."""

    def reread(self) -> None:
        """Read parameters and buffers again for the next record."""


class ProbeLike(Protocol):
    """The interface of a `ModelProbe`."""

    @property
    def source(self) -> Any:
        """The only watch, or the record of the only run."""


Subject = ProbeLike | WatchLike | Record
"""The first argument of assertions: a probe with one run or watch, a watch, or a record."""


def record_of(subject: Subject) -> Record:
    """Return the record of all forwards of ``subject``."""
    source = source_of(subject)
    record = source if isinstance(source, Record) else source.record
    if not record.forwards:
        raise NothingObservedError(_never_called(source, record))
    return record


def start_of(subject: Subject) -> Record:
    """Return the record with the parameters before training: that of the first step; if no step is kept, of all."""
    source = source_of(subject)
    return source if isinstance(source, Record) else source.steps[0] if source.steps else record_of(source)


def newest_of(subject: Subject) -> Record:
    """Return the record of the newest forward alone; of a record, the record."""
    source = source_of(subject)
    return source if isinstance(source, Record) else source.last


def backward_of(subject: Subject) -> Record:
    """Return the record of ``subject``; NothingObservedError if it has no backward pass."""
    record = record_of(subject)
    if not record.backwards:
        raise NothingObservedError(
            f"{printable(record.model)} saw {count(record.forwards, 'forward')} but no backward: pass "
            "run(..., loss=...), or call loss.backward() while the watch is open; if it was, the graph is cut before "
            "it, or the newest forward is an evaluation: watch.steps has those of training"
        )
    return record


def source_of(subject: Subject) -> WatchLike | Record:
    """Return the watch or record of ``subject``."""
    if isinstance(subject, Record) or is_watch(subject):
        return subject
    if hasattr(type(subject), "source"):
        source: WatchLike | Record = cast(ProbeLike, subject).source
        return source
    raise UsageError(
        "the first argument of an assertion is modelprobe, a watch or a record; "
        f"got {type(subject).__name__}: record = modelprobe.run(model, ...) makes one"
    )


def fail_or_hint(text: str, why: str = "", *, hint: bool = False) -> None:
    """Raise AssertionError, or give a hint if a healthy model may look the same.

    It is a hint if there is a reason ``why``, or if ``hint`` is True. Only an assertion itself may call this: the
    warning names the line that called the assertion.
    """
    if not (why or hint):
        raise AssertionError(text)
    warnings.warn(HintWarning("\n\n".join(filter(None, [text, why]))), stacklevel=3)


def is_watch(subject: Any) -> TypeGuard[WatchLike]:
    """Whether ``subject`` is a watch. It looks at the class: reading the property would make a record."""
    return hasattr(type(subject), "last") and hasattr(subject, "first_hook")


def _never_called(source: WatchLike | Record, record: Record) -> str:
    notes = printable("; ".join(record.notes))
    quoted = f" ({notes})" if notes else ""
    if not isinstance(source, Record) and source.closed:
        return f"the watch on {printable(source.name)} was closed before the model was called: call it while it is open"
    if not isinstance(source, Record):
        return (
            f"{printable(source.name)} was never called while it was watched{quoted}: call it (a compiled function has "
            "to reach it from its closure, globals, object or arguments)"
        )
    return f"{printable(record.model)} was never called{quoted}: run it on inputs, modelprobe.run(model, ...)"


# --- layers -------------------------------------------------------------------------------------------------------


def called(record: Record, layers: Selector) -> list[Layer]:
    """Return the selected layers that were called; NothingObservedError if there are none."""
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
    """Return the selected layers with floating-point outputs; NothingObservedError if there are none."""
    active = called(record, layers)
    for layer in active:
        reject_opaque(record, layer)
    found = [layer for layer in active if any(numbers(value) for _, value in layer.outputs)]
    if not found:
        reasons = (v.forward.reason for layer in active for _, v in layer.outputs if v.forward.reason)
        why = next(reasons, "integers, booleans, or no tensor that could be read")
        raise NothingObservedError(
            f"none of the {count(len(active), 'layer')} looked at returned floating-point values, "
            f"{printable(active[0].label)} among them: {printable(why)}"
        )
    return found


def reject_opaque(record: Record, layer: Layer) -> None:
    """Raise NothingObservedError if a layer returned an object that cannot be looked into."""
    for note in record.notes:
        if note.startswith(f"{layer.name}: output") and "cannot be looked into" in note:
            raise NothingObservedError(f"{printable(note)}, or leave {printable(layer.name)} out of layers=")


LEAVE_OUT = "leave the layer out with layers=, and look at the value in the test itself"


def reject_unread(record: Record, layers: Selector) -> None:
    """Raise NothingObservedError for a floating-point output of a selected layer of which no number is known."""
    for layer in called(record, layers):
        reject_unread_values(layer, (value for _, value in layer.outputs))


def reject_unread_values(layer: Layer, values: Iterable[Value]) -> None:
    """Raise NothingObservedError for a floating-point value of a layer of which no number is known."""
    for value in values:
        if value.is_floating and value.forward.statistics is None and value.forward.reason:
            raise NothingObservedError(
                f"no number is known of {printable(layer.label)} {value.path}: {printable(value.forward.reason)}; "
                f"{LEAVE_OUT}"
            )


def full_name(layer: Layer, parameter: str) -> str:
    """Return a parameter's name within the model: ``fc1.weight``."""
    return qualified(layer.name, parameter)


def not_ignored(names: Sequence[str], ignore: str | Iterable[str]) -> set[str]:
    """Return the names of parameters that no glob in ``ignore`` matches; SelectionError if a glob matches none."""
    left = set(names)
    for glob in _globs(ignore):
        matched = {name for name in names if Glob(glob).matches(name)}
        if not matched:
            hint = wider_globs(glob, names) or f"nearest: {listed(nearest(glob, names)) or 'none'}"
            raise SelectionError(f"ignore={glob!r} matches none of {count(len(names), 'parameter')}; {hint}")
        left -= matched
    if not left:
        raise NothingObservedError(f"no parameter is left to look at: ignore= names all {len(names):,} of them")
    return left


def wider_globs(ignore: str | Iterable[str], names: Iterable[str]) -> str:
    """Return a sentence if a glob would match one of ``names`` with ``**`` in place of ``*``; else an empty text.

    >>> wider_globs("*.bias", ["blocks.0.fc.bias"])
    "ignore='**.bias' matches blocks.0.fc.bias: * is one segment of a name, ** any number of them."
    """
    left = [*names]
    for glob in _globs(ignore):
        wider = Glob(".".join("**" if segment == "*" else segment for segment in glob.split(".")))
        found = next(filter(wider.matches, left), None)
        if found is not None:
            return f"ignore={wider.text!r} matches {found}: * is one segment of a name, ** any number of them."
    return ""


def _globs(ignore: str | Iterable[str]) -> Iterable[str]:
    return [ignore] if isinstance(ignore, str) else ignore


def bounds(expected: int | tuple[int, int], noun: str) -> tuple[int, int]:
    """Return the minimum and the maximum that ``expected`` gives; UsageError if it is neither a number nor a range."""
    low, high = expected if isinstance(expected, tuple) and len(expected) == 2 else (expected, expected)
    if type(low) is not int or type(high) is not int or low > high:
        raise UsageError(f"expected is a number of {noun}, or a tuple (minimum, maximum); got {expected!r}")
    return low, high


def deviation(total: int, low: int, high: int) -> str:
    """Return how a number misses its bounds.

    >>> deviation(106, 110, 120), deviation(1060, 1000, 1000)
    ('not 110 to 120: 4 too few', 'not 1,000: 60 too many')
    """
    wanted = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    more = total - (high if total > high else low)
    return f"not {wanted}: {abs(more):,} too {'many' if more > 0 else 'few'}"


# --- values -------------------------------------------------------------------------------------------------------


def numbers(value: Value) -> Statistics | None:
    """Return the statistics of a floating-point value; None for other dtypes and empty tensors."""
    statistics = value.forward.statistics
    return statistics if value.is_floating and statistics is not None and statistics.count else None


def is_zero(value: Value) -> bool:
    """Whether all elements of a floating-point value are zero."""
    statistics = numbers(value)
    return statistics is not None and statistics.all_zero


def gradient_of(value: Value) -> Statistics | None:
    """Return the statistics of the gradient that arrived at a value; None if none did, or it has no numbers."""
    return None if value.backward is None else value.backward.statistics


# --- zeros that a healthy model may have ------------------------------------------------------------------------------

T = TypeVar("T")


def starts_from_zero(layer: Layer) -> bool:
    """Whether the outputs of a layer are zero because its parameters are, or were before they were trained."""
    outputs = [s for s in (numbers(value) for _, value in layer.outputs) if s is not None]
    return all(s.all_zero for s in outputs) and (has_zero_parameters(layer) or _learns(layer))


def has_zero_parameters(layer: Layer) -> bool:
    """Whether a layer has parameters of its own and all of them are zero."""
    readings = [parameter.reading.statistics for parameter in layer.parameters]
    return bool(readings) and all(s is not None and s.all_zero for s in readings)


def _learns(layer: Layer) -> bool:
    """Whether a parameter of a layer has a gradient that is not zero."""
    return any(map(_learns_in, layer.parameters))


def _learns_in(own: Parameter) -> bool:
    statistics = None if own.gradient is None else own.gradient.statistics
    return statistics is not None and bool(statistics.rms)


def second_look(
    record: Record, find: Callable[[Record], list[T]], name: Callable[[T], str], excuse: Callable[[list[T]], str]
) -> tuple[list[T], str]:
    """Return what is found in a record, and why a healthy model may have it; an empty text: nothing known explains it.

    A run is repeated with other random numbers, and with small ones in the place of parameters that are all zero: what
    it still has is the model's. A watch cannot be repeated.

    Args:
        record: The record.
        find: Returns what is wrong with a record.
        name: Returns the name of what was found, by which it is found again.
        excuse: Explains what is found in a watch.
    """
    found = find(record)
    drew = any(call.random is not None and call.root_training for _, call in record.calls)
    again = record.live_run if found and (drew or _zero_initialized(record)) else None
    other = None if again is None else again.varied(record)
    if other is None:
        return found, excuse(found) if found else ""
    names = set(map(name, find(other)))
    left = [one for one in found if name(one) in names]
    if left or not _zero_initialized(record):
        return left, ""
    return found, _said(_zero_initialized(record))


def excuse_gradients(subject: Subject) -> str:
    """Return why gradients of a step may be zero in a healthy model; an empty text: nothing known explains them."""
    record = record_of(subject)
    zero = [layer for layer in _zero_initialized(record) if _learns(layer)]
    if not zero and record.training is not None:
        woken, sizes = _woken(subject)
        zero = woken if record.training.steps <= len(sizes) else []  # each step wakes those that had a gradient
    if zero:
        return _said(zero)
    return BY_CHANCE if any(returns_drawn_zeros(call) for _, call in record.calls) else ""


def excuse_small_gradients(subject: Subject, began: Iterable[Parameter], share: float) -> str:
    """Return why gradients may be small in a healthy model; an empty text: nothing known explains them.

    They pass through weights that were zero as training began, and are small as long as these are.

    Args:
        subject: What was looked at.
        began: Those with small gradients, as they were in the first step.
        share: By which factor the smallest is below what is allowed.
    """
    woken, sizes = _woken(subject)
    through = woken and not any(map(_learns_in, began)) and math.prod(sizes.values()) <= share
    return _said(woken) if through else ""


def _woken(subject: Subject) -> tuple[list[Layer], dict[bool, float]]:
    """Return the layers with weights that were zero as training began and are not any more, and how large these are.

    That is the rms of the smallest: of those that had a gradient in the first step, and of those that had none, as they
    are behind others.
    """
    layers: dict[str, Layer] = {}
    sizes: dict[bool, float] = {}
    now = record_of(subject).layers
    for layer in start_of(subject).layers.values():
        for own, later in zip(layer.parameters, now[layer.name].parameters, strict=False):
            was, size = own.reading.statistics, later.reading.statistics
            hides = not own.name.endswith("bias") or has_zero_parameters(layer)  # as `wake_zeros` has it
            if layer.calls and hides and was is not None and was.all_zero and size is not None and size.rms:
                layers[layer.name] = layer
                sizes[_learns_in(own)] = min(sizes.get(_learns_in(own), 1.0), size.rms)
    return [*layers.values()], sizes


BY_CHANCE = "A hint: a layer that draws random numbers returned only zeros, as a drop path does. Watch several steps."


def returns_drawn_zeros(call: Call) -> bool:
    """Whether a call in training drew random numbers and returned zeros, as a drop path does."""
    outputs = [value for value in call.outputs if numbers(value)]
    return call.random is not None and call.training and bool(outputs) and all(map(is_zero, outputs))


def _zero_initialized(record: Record) -> list[Layer]:
    called = (layer for layer in record.layers.values() if layer.calls and layer.parameters)
    return [layer for layer in called if has_zero_parameters(layer) or starts_from_zero(layer)]


def _said(zero: list[Layer]) -> str:
    names = listed([layer.label for layer in zero])
    return f"A hint, because of what is zero-initialized: {names}. Other layers get a gradient after its first step."


# --- experts without a gradient ---------------------------------------------------------------------------------------

_TOKENS = 16
"""With so many tokens for each expert, it is no chance that one of them gets none."""


@dataclass(frozen=True, slots=True)
class Unreached:
    """A parameter of which some slices along the first axis get no gradient, and others do."""

    layer: Layer
    parameter: Parameter
    slices: tuple[int, ...]
    of: int
    tokens: int
    """How many rows the layer was given in all of its calls."""

    @property
    def name(self) -> str:
        """Its full name."""
        return full_name(self.layer, self.parameter.name)

    def __str__(self) -> str:
        one = len(self.slices) == 1
        who = f"expert {self.slices[0]}" if one else f"experts {listed(list(map(str, self.slices)))}"
        tokens = count(self.tokens, "token")
        return f"{self.name}: {who} of {self.of:,} {'gets' if one else 'get'} no gradient, with {tokens}"


def find_unreached(layers: Iterable[Layer]) -> Iterator[Unreached]:
    """Yield the parameters of which some slices have a gradient of zeros in every backward, and others have not.

    Left out are layers with so few tokens that an expert may have got none by chance.
    """
    for layer in layers:
        given = [[value for value in call.inputs if len(value.shape) > 1] for call in layer.calls]
        widths = {value.shape[-1] for values in given for value in values}
        for parameter in layer.parameters:
            units = None if parameter.gradient is None else parameter.gradient.units
            # The slices are matrices that fit the rows that the layer is given; those of a table of segments do not.
            if units is None or not 0 < units.dead < len(units) or (widths and widths.isdisjoint(parameter.shape[1:])):
                continue
            pairs = enumerate(zip(units.low, units.high, strict=True))
            zero = tuple(place for place, (low, high) in pairs if low == high == 0)
            tokens = sum(max(map(_rows, values), default=0) for values in given)
            if tokens >= _TOKENS * len(units):
                yield Unreached(layer, parameter, zero, len(units), tokens)


def _rows(value: Value) -> int:
    """Return the rows of a floating-point value in all forwards, of its last axis."""
    statistics, width = numbers(value), value.shape[-1]
    return statistics.count // width if statistics is not None and isinstance(width, int) and width else 0
