"""What a snapshot means, taken from its record field by field, and where two mean something else.

The meaning of a snapshot is all that ``show`` prints of it in any format and all that a comparison is about:

- exactly: the model, its layers with class, mode, leaf or not, attributes, other names, parameters and buffers
  (shape, dtype, trainable, tied to), their calls in their order, and of each call its root, mode, forwards, arguments,
  context, random state, and its values (path, shape, dtype, gradient wanted, overwritten, source); what each call does
  alone (what it was given, what it hands on where, what no gradient reaches); seed, loss, notes, origins, and whether
  noise was measured;
- numbers, up to five times what a comparison allows: mean and standard deviation relative to the root mean square,
  smallest, largest and fingerprint relative to the norm; what is next to nothing beside the other numbers of the
  record may be anything as small;
- counts: of elements and tensors exactly, of those that are not finite exactly, of zeros up to a hundredth of the
  elements, of dead units exactly;
- noise may not grow to more than ten times what a comparison allowed before. It may shrink: less passes then.

It is none of it: versions, in what words something is said not to be known, the folder of a class, the order of
attributes and of layers that were not called, a reason that was declared, which of two devices of one kind, and three
things that a comparison leaves out on purpose: that an attribute is there on one side alone (``diff`` notes it), an
argument that is None or False on one side and not given on the other, and a source that is another name of the same
tensor. A name of an input may be another where shape and dtype tell which it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from pytest_modelprobe.comparison.tolerance import epsilon
from pytest_modelprobe.record import Call, Parameter, Reading, Record, Value, qualified

SLACK = 5.0
_IN = ": in "
GROWN = 10.0
_MOST = {"forward": 1e-2, "backward": 2e-2, "state": 1e-2}
_FLOOR = {"forward": 2e-6, "backward": 2e-6, "state": 3e-6}
_UNMEASURED = {"forward": 1e-4, "backward": 2e-2, "state": 3e-6}
_PRINTED = 2e-5


class Number(NamedTuple):
    """A reading, and how it is judged."""

    reading: Reading
    direction: str
    dtype: str
    measured: bool


class Meaning(NamedTuple):
    """What is exact, and the numbers, by where they stand."""

    exact: dict[str, Any]
    numbers: dict[str, Number]


def meaning(record: Record) -> Meaning:
    """Return what a record means."""
    numbers: dict[str, Number] = {}
    exact = dict(_exact(record, numbers))
    return Meaning(exact, {place: number for place, number in numbers.items() if _is_anything(number.reading)})


def _is_anything(reading: Reading) -> bool:
    return reading != Reading()


def _exact(record: Record, numbers: dict[str, Number]) -> Iterator[tuple[str, Any]]:
    for name in ("model", "forwards", "backwards", "seed", "loss", "notes", "origin", "gradient_origin", "noise"):
        yield name, getattr(record, name)
    yield "device", record.device.partition(":")[0]
    called = sorted(record.calls, key=lambda pair: (pair[1].root, pair[1].root_training, pair[1].started))
    yield "order of calls", [(layer.name, call.index) for layer, call in called if call.started >= 0]
    measured = record.noise == "measured"
    for name, layer in record.layers.items():
        yield f"{name}: type", layer.type_name
        for what in ("leaf", "functional", "training", "aliases"):
            yield f"{name}: {what}", getattr(layer, what)
        for attribute, value in layer.attributes.items():
            yield f"{name}: attribute {attribute}", _plain(value)
        for kind, owned in (("parameter", layer.parameters), ("buffer", layer.buffers)):
            for own in owned:
                yield from _own(f"{kind} {qualified(name, own.name)}", own, kind, numbers, measured)
        for call in layer.calls:
            yield from _call(f"{name} {call.root} {call.root_training} {call.index}", call, numbers, measured)


def _plain(value: Any) -> Any:
    """Return a value that equals itself and nothing of another type."""
    return type(value).__name__, "nan" if value != value else value


def _own(at: str, own: Parameter, kind: str, numbers: dict[str, Number], measured: bool) -> Iterator[tuple[str, Any]]:
    yield f"{at}: made", (own.shape, own.dtype, own.tied_to, own.requires_grad if kind == "parameter" else None)
    readings = {"state": own.reading, "after": own.after, "gradient": own.gradient}
    directions = {"state": "state", "after": "forward", "gradient": "backward"}
    for what, reading in readings.items():
        if reading is not None:
            numbers[f"{at}: {what}"] = Number(reading, directions[what], own.dtype, measured)


def _call(at: str, call: Call, numbers: dict[str, Number], measured: bool) -> Iterator[tuple[str, Any]]:
    for what in ("forwards", "training", "inputs_known", "grad_enabled", "autocast", "random", "recomputed"):
        yield f"{at}: {what}", getattr(call, what)
    for name, value in call.arguments.items():
        if value is not None and value is not False:
            yield f"{at}: argument {name}", _plain(value)
    yield f"{at}: inputs", sorted((value.shape, value.dtype) for value in call.inputs)
    for side, values in (("in", call.inputs), ("out", call.outputs)):
        for value in values:
            yield from _value(f"{at}: {side} {value.path}", value, numbers, measured)
    response = call.response
    if response is None:
        return
    dtype = next((value.dtype for value in call.outputs), "float32")
    yield f"{at}: alone", (dict(response.recipes), set(response.without_gradient), response.reason is None)
    for handed in response.handed:
        yield f"{at}: hands on {handed.where}", (handed.where, handed.passed)
        if handed.reading is not None:
            numbers[f"{at}: hands on {handed.where}"] = Number(handed.reading, "forward", dtype, measured)
    if response.gradient is not None:
        numbers[f"{at}: alone, gradient"] = Number(response.gradient, "backward", dtype, measured)


def _value(at: str, value: Value, numbers: dict[str, Number], measured: bool) -> Iterator[tuple[str, Any]]:
    yield f"{at}: made", (value.path, value.shape, value.dtype, value.requires_grad, value.overwritten)
    yield f"{at}: source", value.source
    readings = {"forward": value.forward, "backward": value.backward, "inner": value.backward_inner}
    for what, reading in readings.items():
        if reading is not None:
            direction = "forward" if what == "forward" else "backward"
            numbers[f"{at}: {what}"] = Number(reading, direction, value.dtype, measured)


# --- where two differ ---------------------------------------------------------------------------------------------


def apart(now: Meaning, before: Meaning) -> list[str]:
    """Return where two records mean something else, and what."""
    found = []
    for place in {**before.exact, **now.exact}:
        one_side = place not in before.exact or place not in now.exact
        if one_side and (": attribute " in place or _IN in place):
            continue
        a, e = now.exact.get(place), before.exact.get(place)
        if a != e:
            found.append(f"{place}: {e} is {a}")
    scale = max((_norm(number.reading) for number in before.numbers.values()), default=0.0)
    for place in {**before.numbers, **now.numbers}:
        a, e = now.numbers.get(place), before.numbers.get(place)
        if (a is None or e is None) and _IN in place:
            continue
        if a is None or e is None:
            found.append(f"{place}: numbers {'gone' if a is None else 'new'}")
        else:
            found += [f"{place}: {what}" for what in _moved(a, e, scale)]
    return found


def _norm(reading: Reading) -> float:
    return 0.0 if reading.statistics is None else reading.statistics.norm


def _floor(number: Number) -> float:
    if number.reading.digest is not None:
        return 0.0
    return max((_FLOOR if number.measured else _UNMEASURED)[number.direction], epsilon(number.dtype) / 4)


def _allowed(number: Number, beside: float = 1.0) -> float:
    """Return what a comparison allows; ``beside`` is how much larger the largest number of the record is."""
    floor = _floor(number)
    most = max(_MOST[number.direction], 4 * epsilon(number.dtype) * beside)
    return max(floor, min(4 * (number.reading.noise or 0.0), most))


def _moved(now: Number, before: Number, scale: float) -> Iterator[str]:
    a, e = now.reading, before.reading
    if (a.noise or 0.0) * 4 > GROWN * max(_floor(before), 4 * (e.noise or 0.0)) * 1.01:
        yield f"noise {e.noise} is {a.noise}"
    if a.digest != e.digest or a.tensors != e.tensors:
        yield "digest or tensors"
    if (a.statistics is None) != (e.statistics is None) or (a.fingerprint is None) != (e.fingerprint is None):
        yield "columns came or went"
    norm = max(_norm(e), 1e-5 * scale)
    limit = SLACK * _allowed(before, scale / norm if norm else 1.0)
    if a.fingerprint is not None and e.fingerprint is not None and a.digest is None:
        length = norm if e.statistics is not None and not e.statistics.nonfinite else math.hypot(*e.fingerprint)
        if not math.dist(a.fingerprint, e.fingerprint) <= limit * length:
            yield "fingerprint"
    x, y = a.statistics, e.statistics
    if x is None or y is None:
        return
    if (x.count, x.nan, x.posinf, x.neginf) != (y.count, y.nan, y.posinf, y.neginf):
        yield "counts"
    if (x.first_nan, x.first_posinf, x.first_neginf) != (y.first_nan, y.first_posinf, y.first_neginf):
        yield "where it was first not finite"
    rms = norm / math.sqrt(max(y.finite, 1))
    for what, extent in (("mean", rms), ("std", rms), ("min", norm), ("max", norm)):
        new, old = getattr(x, what), getattr(y, what)
        if (new is None) != (old is None):
            yield what
        elif new is not None and not abs(new - old) <= limit * extent + _PRINTED * SLACK * abs(old) + 1e-300:
            yield f"{what} {old} is {new}"
    if abs(x.zeros - y.zeros) > 0.01 * y.count:
        yield f"zeros {y.zeros} is {x.zeros}"
    dead = [0 if r.units is None else r.units.dead for r in (a, e)]
    units = [0 if r.units is None else len(r.units) for r in (a, e)]
    if dead[0] != dead[1] or (units[0] != units[1] and all(units)):
        yield f"dead units {dead[1]}/{units[1]} is {dead[0]}/{units[0]}"
