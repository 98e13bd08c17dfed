"""Activations: layers that are dead, values that are not finite."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import Call, Layer, Record, Statistics, Value, address
from pytest_modelprobe.report.text import Cell, count, failure, listed, number
from pytest_modelprobe.selection import Selector

from .evidence import Subject, akin, between, called, is_floating, made_outside, newest_of, record_of, returned

# --- dead ---------------------------------------------------------------------------------------------------------


def assert_no_dead_layers(subject: Subject, *, layers: Selector = "**", max_dead_units: float | None = None) -> None:
    """Assert that no layer gives out nothing but zeros.

    A layer is dead if every output is zero, in all forwards or in the newest one; what a functional activation gives is
    seen where the next layer receives it. Where no output is, a layer whose gradient is zero throughout is reported. A
    layer that only passes on the zeros it is given is not, nor is one whose own parameters are all zero
    (zero-initialised). Leave out layers that are meant to give zeros with ``layers=["**", "!name"]``.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        layers: Which layers to look at.
        max_dead_units: How many units (channels or features that are zero in every call) a layer may have: a number
            of units if an int, a share of the layer's units if a float below 1. None: units are not looked at.

    Raises:
        AssertionError: A layer is dead, or has more dead units than allowed.
        NothingObservedError: No selected layer was called, or no units are known.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> assert_no_dead_layers(ModelProbe().run(model, torch.tensor([[1.0, -1.0], [-1.0, 1.0]])))
    """
    __tracebackhide__ = True
    record = record_of(subject)
    looked_at = called(record, layers)
    names = {layer.name for layer in looked_at}
    dead = find_dead(record, names)
    seen = {d.where for d in dead}
    dead += [d for d in find_dead(newest_of(subject), names) if d.where not in seen]
    if dead:
        raise AssertionError(_dead_text(dead, record, looked_at))
    silent = find_zero_gradients(record, names)
    if silent:
        raise AssertionError(_silent_text(silent, looked_at))
    if max_dead_units is not None:
        crowded = _too_many_dead_units(record, looked_at, max_dead_units)
        if crowded:
            raise AssertionError(_units_text(crowded, looked_at, max_dead_units))


@dataclass(frozen=True)
class Dead:
    """A value that is zero throughout."""

    where: str
    layer: Layer
    call: Call
    value: Value
    record: Record
    received: bool
    """It is an input: code between layers made it."""


def find_dead(record: Record, names: Iterable[str]) -> list[Dead]:
    """Return what is dead among the layers ``names``, in order of execution, each tensor once."""
    names = set(names)
    zero_initialised = {layer.name for layer in record.layers.values() if is_zero_initialised(layer)}
    found, said = [], set()
    alive = {layer.name for layer, _, value in _outputs(record) if not _dead(value)}
    for layer, call in returned(record):
        if layer.name not in names:
            continue
        for value in made_outside(record, layer, call):
            if _dead(value) and value.tensor not in said and not _follows_zeros(record, call):
                said.add(value.tensor)
                found.append(Dead(f"{layer.name} input", layer, call, value, record, received=True))
        if layer.name in zero_initialised:
            said.update(value.tensor for value in call.outputs)
            continue
        if layer.name in alive or _was_given_zeros(call):
            said.update(v.tensor for v in call.outputs if _dead(v))
            continue
        for value in call.outputs:
            if _dead(value) and value.tensor not in said:
                said.add(value.tensor)
                found.append(Dead(layer.name, layer, call, value, record, received=False))
    return found


def is_zero_initialised(layer: Layer) -> bool:
    """Whether the layer has parameters of its own and all of them are zero."""
    readings = [parameter.reading.statistics for parameter in layer.parameters]
    return bool(readings) and all(s is not None and s.all_zero for s in readings)


def find_zero_gradients(record: Record, names: Iterable[str]) -> list[tuple[Layer, Value]]:
    """Return the layers whose outputs all have a gradient that is zero throughout, in reverse order of execution."""
    names = set(names)
    found = []
    for layer in {layer.name: layer for layer, _ in reversed(returned(record))}.values():
        values = [v for _, v in layer.outputs if v.requires_grad and v.backward is not None]
        statistics = [v.backward.statistics for v in values if v.backward is not None]
        if layer.name in names and statistics and all(s is not None and s.all_zero for s in statistics):
            found.append((layer, values[0]))
    return found


def _outputs(record: Record) -> Iterable[tuple[Layer, Call, Value]]:
    return (
        (layer, call, value)
        for layer in record.layers.values()
        for call, value in layer.outputs
        if is_floating(value) and value.forward.statistics is not None and value.forward.statistics.count
    )


def _dead(value: Value) -> bool:
    statistics = value.forward.statistics
    return is_floating(value) and statistics is not None and statistics.all_zero


def _was_given_zeros(call: Call) -> bool:
    """Whether all that a call took in was zero: it merely passes that on."""
    entered = [v for v in call.inputs if is_floating(v)]
    return bool(entered) and all(_dead(v) for v in entered)


def _follows_zeros(record: Record, call: Call) -> bool:
    """Whether what was made last before a call is zero already: the code between passes it on."""
    earlier = [v for _, c in returned(record) if c.finished < call.started and akin(c, call) for v in c.outputs]
    return bool(earlier) and _dead(earlier[-1])


def _dead_text(dead: list[Dead], record: Record, looked_at: list[Layer]) -> str:
    first = dead[0]
    numbers = first.value.forward.statistics
    assert numbers is not None
    forwards = f"in {count(first.record.forwards, 'forward')}"
    if first.record is not record and first.record.forwards < record.forwards:
        forwards = f"in the newest of {record.forwards:,} forwards"
    if first.received:
        what = f"input of {first.layer.name} is dead: all {number(numbers.count)} values it receives are 0 {forwards}"
    else:
        what = f"{first.layer.name} is dead: all {count(numbers.count, 'output')} are 0 {forwards}"
    share = f"{len(dead)} of {count(len(looked_at), 'layer')} looked at"
    columns = ["layer", "type", "outputs", "dead units", "input min", "input max"]
    return failure(f"{what}; {share}", columns, [_dead_row(d) for d in dead], _dead_hint(first), _zero_note(record))


def _dead_row(dead: Dead) -> list[Cell]:
    s, units = dead.value.forward.statistics, dead.value.forward.units
    entered = None if dead.received else _first_statistics(dead.call.inputs)
    return [
        dead.where,
        dead.layer.type_name,
        s.count if s else None,
        "-" if units is None else f"{units.dead}/{len(units)}",
        None if entered is None else entered.min,
        None if entered is None else entered.max,
    ]


def _first_statistics(values: Iterable[Value]) -> Statistics | None:
    return next((v.forward.statistics for v in values if is_floating(v)), None)


def _dead_hint(dead: Dead) -> str:
    if dead.received:
        place = between(dead.record, dead.call, dead.layer.name)
        return f"The zeros are made {place}: look at the function called there."
    entered = _first_statistics(dead.call.inputs)
    source = next((v.source for v in dead.call.inputs if is_floating(v)), None)
    feeder = source.rpartition(" ")[0] if source else None
    if entered is not None and entered.max is not None and entered.max <= 0 and feeder:
        negative = "Every input of {} is negative" if entered.max < 0 else "No input of {} is positive"
        return f"{negative.format(dead.layer.name)}: look at the bias or the scale of {feeder}, which feeds it."
    if dead.layer.type_name.startswith("Dropout") and dead.layer.attributes.get("p") == 1.0:
        return f'{dead.layer.name} drops everything (p=1.0). If that is meant: layers=["**", "!{dead.layer.name}"].'
    return (
        f"Look at the parameters of {dead.layer.name} and at what multiplies its output. "
        f'If it is meant to give zeros: layers=["**", "!{dead.layer.name}"].'
    )


def _zero_note(record: Record) -> str:
    names = [layer.name for layer in record.layers.values() if is_zero_initialised(layer)]
    if not names:
        return ""
    return f"Zero-initialised, and so not counted as dead: {listed(names)}."


def _silent_text(silent: list[tuple[Layer, Value]], looked_at: list[Layer]) -> str:
    layer, value = silent[0]
    total = _elements(value)
    rows: list[list[Cell]] = [[found.name, found.type_name, v.path, _elements(v)] for found, v in silent]
    return failure(
        f"{layer.name} gets a zero gradient: all {count(total, 'element')} of its output's gradient are 0; "
        f"{len(silent)} of {count(len(looked_at), 'layer')} looked at",
        ["layer", "type", "value", "elements"],
        rows,
        f"What comes after {layer.name} does not depend on its output, or is flat there (saturated, dead, multiplied "
        "by zero).",
    )


def _elements(value: Value) -> int:
    reading = value.backward
    return reading.statistics.count if reading is not None and reading.statistics is not None else 0


@dataclass(frozen=True)
class _Crowded:
    layer: Layer
    dead: int
    units: int


def _too_many_dead_units(record: Record, looked_at: list[Layer], allowed: float) -> list[_Crowded]:
    if isinstance(allowed, bool) or allowed < 0 or (isinstance(allowed, float) and allowed > 1):
        raise UsageError(
            f"max_dead_units is a number of units (an int) or a share of them (a float from 0 to 1); got {allowed!r}"
        )
    known, found = 0, []
    for layer in looked_at:
        counts = _dead_units(layer)
        if counts is None:
            continue
        known += 1
        dead, units, inherited = counts
        limit = allowed * units if isinstance(allowed, float) else allowed
        if dead > limit and dead > inherited:
            found.append(_Crowded(layer, dead, units))
    if not known:
        raise NothingObservedError(
            f"the units of none of the {len(looked_at)} layers looked at are known: select layers with channels or "
            "features (conv, linear, norm, and activations after them)"
        )
    return sorted(found, key=lambda c: -c.dead / c.units)


def _dead_units(layer: Layer) -> tuple[int, int, int] | None:
    """Return dead units, units, and dead units of its input, over all calls."""
    lows, highs = [], []
    for _, value in layer.outputs:
        if value.forward.units is None or not is_floating(value):
            return None
        lows.append(value.forward.units.low)
        highs.append(value.forward.units.high)
    if not lows or len({len(low) for low in lows}) > 1:
        return None
    dead = sum(
        all(low == high == 0 for low, high in zip(unit_lows, unit_highs, strict=True))
        for unit_lows, unit_highs in zip(zip(*lows, strict=True), zip(*highs, strict=True), strict=True)
    )
    entered = [v.forward.units for _, v in layer.inputs if v.forward.units is not None]
    inherited = [units.dead for units in entered if len(units) == len(lows[0])]
    return dead, len(lows[0]), max(inherited, default=0)


def _units_text(crowded: list[_Crowded], looked_at: list[Layer], allowed: float) -> str:
    worst = crowded[0]
    limit = f"{allowed:.0%} are allowed" if isinstance(allowed, float) else f"{allowed:,} are allowed"
    return failure(
        f"{worst.layer.name} has {worst.dead:,} of {count(worst.units, 'dead unit')}, {limit}; "
        f"{len(crowded)} of {count(len(looked_at), 'layer')} looked at",
        ["layer", "type", "dead units", "share"],
        [[c.layer.name, c.layer.type_name, f"{c.dead}/{c.units}", f"{c.dead / c.units:.0%}"] for c in crowded],
        f"A dead unit is zero for every input of the test: give more inputs, or look at the bias and the learning "
        f"rate of what feeds {worst.layer.name}.",
    )


# --- finite -------------------------------------------------------------------------------------------------------


def assert_finite(subject: Subject, *, layers: Selector = "**") -> None:
    """Assert that no output of a layer is NaN or infinite; the failure names where it began.

    The origin is the first value, in order of execution, with a NaN, or an infinity of a sign, that what it was made
    from does not have: a mask of ``-inf`` is an input like others.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        layers: Which layers to look at. Leave out what is meant to give infinities: ``["**", "!mask"]``.

    Raises:
        AssertionError: An output is not finite.
        NothingObservedError: No selected layer was called.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> assert_finite(ModelProbe().run(nn.Linear(2, 3), torch.ones(4, 2)))
    """
    __tracebackhide__ = True
    record = record_of(subject)
    looked_at = called(record, layers)
    names = {layer.name for layer in looked_at}
    bad = [(layer, call, v) for layer, call, v in _outputs(record) if layer.name in names and _nonfinite(v)]
    if bad:
        raise AssertionError(_finite_text(record, bad, looked_at))


@dataclass(frozen=True)
class Origin:
    """The value in which something non-finite began."""

    position: int
    """Of the start or the end of the call, in order of execution."""
    layer: Layer
    call: Call
    value: Value
    kind: str
    """``input``: code between layers made it; ``given``: it went into the model so; ``output``: the layer made it."""


def find_origin(record: Record) -> Origin | None:
    """Return where the first non-finite value of a record began."""
    candidates = []
    for layer, call in returned(record):
        entered = _kinds(call.inputs)
        for value in call.outputs:
            for kind, since in _kinds([value]).items():
                if since < entered.get(kind, since + 1):
                    candidates.append((since, call.finished, Origin(call.finished, layer, call, value, "output")))
    for layer, call in record.calls:
        outermost = layer.name == call.root and call.index == 0
        kind = "given" if outermost else "input"
        candidates += (
            (since, call.started, Origin(call.started, layer, call, value, kind))
            for value in call.inputs
            if value.source is None and (outermost or value.path.startswith("input"))
            for since in _kinds([value]).values()
        )
    return min(candidates, key=lambda c: c[:2], default=(0, 0, None))[2]


def _kinds(values: Iterable[Value]) -> dict[str, int]:
    """Return which kinds of non-finite numbers are among the values, each with the forward of its first."""
    kinds: dict[str, int] = {}
    for value in values:
        s = value.forward.statistics
        if s is None:
            continue
        for kind, n, since in (
            ("nan", s.nan, s.first_nan),
            ("inf", s.posinf, s.first_posinf),
            ("-inf", s.neginf, s.first_neginf),
        ):
            if n:
                kinds[kind] = min(kinds.get(kind, since or 0), since or 0)
    return kinds


def _nonfinite(value: Value) -> bool:
    return value.forward.statistics is not None and value.forward.statistics.nonfinite > 0


def nonfinite_counts(s: Statistics) -> str:
    """Return ``12 NaN and 3 inf of 512``."""
    parts = [f"{n:,} {kind}" for kind, n in (("NaN", s.nan), ("inf", s.posinf), ("-inf", s.neginf)) if n]
    return f"{' and '.join(parts)} of {count(s.count, 'element')}"


def _finite_text(record: Record, bad: list[tuple[Layer, Call, Value]], looked_at: list[Layer]) -> str:
    origin = find_origin(record) or Origin(bad[0][1].finished, *bad[0], kind="output")
    s = origin.value.forward.statistics
    assert s is not None
    layers = {layer.name for layer, _, _ in bad}
    first, hint = _finite_first(record, origin, s)
    operation = f"It began in {record.origin}." if record.origin else ""
    return failure(
        f"{first}; {len(layers)} of {count(len(looked_at), 'layer')} looked at",
        ["layer", "type", "input min", "input max", "output min", "output max", "not finite"],
        _frames(record, origin),
        operation,
        hint,
    )


def _finite_first(record: Record, origin: Origin, s: Statistics) -> tuple[str, str]:
    name, counts = origin.layer.name, nonfinite_counts(s)
    where = address(name, origin.call, origin.value.path)
    if origin.kind == "given":
        return f"the model's input is not finite: {where} has {counts}", "Look at the data: the model was given it so."
    if origin.kind == "input":
        place = between(record, origin.call, name)
        return f"input of {name} is not finite: {counts}, made {place}", f"Look at the code {place}."
    bad = [
        p.name for p in origin.layer.parameters if p.reading.statistics is not None and p.reading.statistics.nonfinite
    ]
    if bad:
        return (
            f"{name}.{bad[0]} is not finite, a parameter of {name}; its output has {counts}",
            "Look at the step that wrote the parameter: its gradient (assert_grad_finite), the learning rate, loading.",
        )
    entered = _first_statistics(origin.call.inputs)
    since = next(iter(_kinds([origin.value]).values()))
    when = f" from forward {since + 1} on" if record.forwards > 1 else ""
    span = f" from {number(entered.min)} to {number(entered.max)}" if entered and entered.min is not None else ""
    return f"{name} is not finite{when}: its output has {counts}, its inputs are finite{span}", ""


def _frames(record: Record, origin: Origin) -> list[list[Cell]]:
    """Return rows for the calls before the origin, up to five, and the origin."""
    before = [
        (layer, call)
        for layer, call in returned(record)
        if call.finished < origin.position and (layer.leaf or layer.functional)
    ]
    rows = [_frame(layer, call) for layer, call in before[-5:]]
    return [*rows, _frame(origin.layer, origin.call)]


def _frame(layer: Layer, call: Call) -> list[Cell]:
    entered, left = _first_statistics(call.inputs), _first_statistics(call.outputs)
    values: list[Cell] = [_shown(s, bound) for s in (entered, left) for bound in ("min", "max")]
    name = f"{layer.name} (call {call.index + 1})" if call.index else layer.name
    bad = nonfinite_counts(left) if left is not None and left.nonfinite else "-"
    return [name, layer.type_name, *values, bad]


def _shown(s: Statistics | None, bound: str) -> str:
    value = None if s is None else getattr(s, bound)
    return "-" if value is None else f"{value:.4g}"
