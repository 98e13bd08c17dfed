"""From a parsed numbers file and its architecture to the layers of a record.

A tensor is written once, where it is first seen. Wherever it is seen again, the file has the name of that place, or
nothing if the architecture says where the value is from. So values are read in the order of execution, as they were
written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pytest_modelprobe.record import (
    Call,
    EmittedTensor,
    ForwardKind,
    IsolatedResponse,
    Layer,
    Operation,
    Parameter,
    Reading,
    Value,
    address,
    qualified,
)

from . import layout
from .architecture_file import LayerLine, Named, Structure, in_line
from .order import all_events, forward_kind_of
from .parsing import check_fields, excerpt, string_tuple, text_or_none
from .readings import Role, reading_from
from .recipe_text import Outline, Recipes
from .specs import FormatError, ParsedSpec, absolute, keys, name_of


def operation_from(data: Any) -> Operation | None:
    """Return an operation from its list of three texts; ``None`` if there is none."""
    if data is None:
        return None
    if len(data) != 3 or type(data[0]) is not str or type(data[2]) is not str or type(data[1]) not in (str, type(None)):
        raise FormatError(f"{excerpt(data)} is no operation")
    return Operation(name=data[0], location=data[1], detail=data[2])


# The names and types of the fields, as in `architecture_file`.
_NUMBERS = {
    "modelprobe": int, "architecture": str, "compared": str, "device": str, "applied": str, "noise": str,
    "notes": list, "origin": list, "gradient_origin": list, "versions": dict, layout.SAMPLES: str, "columns": list,
    "gradient columns": list, "keys": dict, layout.RESPONSES: dict, layout.LAYERS: dict,
}  # fmt: skip


def check_numbers(data: Mapping[str, Any]) -> None:
    """Raise `FormatError` unless this is the header of a numbers file. Its lines are checked when they are used."""
    check_fields(data, _NUMBERS)
    if layout.SAMPLES not in data and data["modelprobe"] == layout.SCHEMA:
        raise FormatError("it does not say which samples its fingerprints are of")


class _ValueReadings(NamedTuple):
    """The readings of a value or parameter."""

    first: Reading = Reading()
    gradient: Reading | None = None
    other: Reading | None = None
    """Of a value the gradient inside a forward, of a parameter its value after the run."""
    update: Reading | None = None
    tensor: int = -1


_MOST_UNITS = 1 << 24
"""Units of all values together. Three numbers in a file stand for as many units in memory."""

_ValuePosition = tuple[int, int, bool, int]
"""The index of the line and of the call, whether it is an output, and its index among the inputs or outputs."""


class RecordBuilder:
    """Builds layers from the lines of both files."""

    def __init__(self, structure: Structure, numbers: Mapping[str, Any]) -> None:
        self.structure = structure
        self.device: str = numbers.get("device", "cpu")
        self.samples: str = numbers.get(layout.SAMPLES, "")
        self.responses: dict[str, Any] = numbers.get(layout.RESPONSES, {})
        self.units = 0
        self.own: dict[str, _ValueReadings] = {}
        self.values: dict[_ValuePosition, _ValueReadings] = {}
        self.given: dict[_ValuePosition, Any] = {}
        self.besides: dict[tuple[int, int, str], str] = {}
        self.answers: dict[str, IsolatedResponse] = {}
        """Responses by key, without recipes. Equal responses share a key, and recipes follow from the call."""
        self.recipes = Recipes(
            [Outline(line.name, [*line.parameters, *line.buffers], line.values) for line in structure.lines]
        )
        if numbers:
            for i, line in enumerate(structure.lines):
                with in_line(line.name):
                    self._sort(i, line, numbers[layout.LAYERS].get(line.name, {}))
            self._resolve()

    def _sort(self, i: int, line: LayerLine, data: Mapping[str, Any]) -> None:
        """Assign the entries of a line to parameters, values and calls."""
        if type(data) is not dict:
            raise FormatError("it is no object")
        own = [*line.parameters, *line.buffers]
        for key, (name, spec) in zip(keys([name for name, _ in own]), own, strict=True):
            if layout.OWN + key in data:
                entry = self._entry(data[layout.OWN + key], spec.shape, "own", "own gradient", "own", "own gradient")
                self.own[qualified(line.name, name)] = entry
        for j, (inputs, outputs) in enumerate(line.values):
            number = str(j + 1) if j else ""
            for sign, end, values in ((number + layout.INPUT, False, inputs), (number + layout.OUTPUT, True, outputs)):
                for k, key in enumerate(keys(path for path, _ in values)):
                    if sign + key in data:
                        self.given[i, j, end, k] = data[sign + key]
            for key in (layout.ALONE, layout.RANDOM, layout.SAMPLES):
                if (text := text_or_none(data.get(number + key), key)) is not None:
                    self.besides[i, j, key] = text

    def _entry(self, data: Any, shape: Sequence[Any], *roles: Role) -> _ValueReadings:
        """Return the readings of a list with one of each role at most; the first is always there."""
        if type(data) is not list or not 0 < len(data) <= len(roles) or data[0] is None:
            raise FormatError(f"{excerpt(data)} are no numbers of a tensor")
        pairs = zip(data, roles, strict=False)
        found = [None if one is None else self._reading(one, shape, role) for one, role in pairs]
        return _ValueReadings(*found)._replace(tensor=len(self.values))  # type: ignore[arg-type]

    def _reading(self, data: Any, shape: Sequence[Any] | None, role: Role) -> Reading:
        reading = reading_from(data, shape, role)
        if reading.units is not None:
            self.units += len(reading.units)
            if self.units > _MOST_UNITS:
                raise FormatError("there are more units than a model has")
        return reading

    def _resolve(self) -> None:
        """Assign to each value its own readings, or those of the value that it refers to."""
        lines, calls = self.structure.lines, self.structure.calls
        known: dict[tuple[ForwardKind, str], _ValueReadings] = {}
        written: dict[tuple[ForwardKind, str], _ValueReadings] = {}
        for i, j, end in all_events(self.structure.events, calls):
            values = lines[i].values[j][end]
            if not values:
                continue
            name, call = lines[i].name, calls[i][j]
            kind = forward_kind_of(call)
            with in_line(name):
                for k, (path, spec) in enumerate(values):
                    data = self.given.get((i, j, end, k))
                    if type(data) is list:
                        entry = self._entry(data, spec.shape, "value", "gradient", "gradient")
                    elif data is None and spec.origin is None:
                        entry = _ValueReadings(tensor=len(self.values))
                    else:
                        where = spec.origin if data is None else data
                        there = (kind, absolute(where, name)) if type(where) is str else None
                        same = there and (written if data is None else known).get(there)
                        if same is None:
                            raise FormatError(f"there are no numbers of {excerpt(where)}, which {excerpt(path)} is")
                        entry = same
                    self.values[i, j, end, k] = entry
                    here = kind, address(name, call, path)
                    known.setdefault(here, entry)
                    if end:
                        written[here] = entry

    # --- the record

    def layer(self, i: int, line: LayerLine) -> Layer:
        """Return a layer with parameters, buffers and calls."""
        with in_line(line.name):
            return dataclasses.replace(
                line.layer,
                parameters=self._parameters(line, line.parameters),
                buffers=self._parameters(line, line.buffers),
                calls=tuple([self._call(i, j, line) for j in range(len(line.values))]),
            )

    def _parameters(self, line: LayerLine, own: Named) -> tuple[Parameter, ...]:
        found = []
        for name, spec in own:
            entry = self.own.get(qualified(line.name, name)) or self.own.get(spec.origin or "")
            first, gradient, after, update, _ = entry or _ValueReadings()
            held = bool(self.structure.optimizers) and spec.requires_grad and not spec.left_out
            found.append(
                Parameter(
                    name=name,
                    shape=spec.shape,  # type: ignore[arg-type]
                    dtype=spec.dtype,
                    device=self.device,
                    requires_grad=spec.requires_grad,
                    tied_to=spec.origin,
                    persistent=spec.persistent,
                    left_out=spec.left_out,
                    reading=first,
                    after=after,
                    gradient=gradient,
                    update=update,
                    group=spec.group if held else None,
                )
            )
        return tuple(found)

    def _call(self, i: int, j: int, line: LayerLine) -> Call:
        started, finished = self.structure.places.get((i, j), (-1, -1))
        alone = self.besides.get((i, j, layout.ALONE))
        inputs, outputs = line.values[j]
        return dataclasses.replace(
            line.layer.calls[j],
            started=started,
            finished=finished,
            inputs=tuple([self._value((i, j, False, k), line.name, v) for k, v in enumerate(inputs)]),
            outputs=tuple([self._value((i, j, True, k), line.name, v) for k, v in enumerate(outputs)]),
            random=self.besides.get((i, j, layout.RANDOM)),
            samples=self.besides.get((i, j, layout.SAMPLES), self.samples) or None,
            response=None if alone is None else self._response(i, j, alone),
        )

    def _value(self, place: _ValuePosition, layer: str, value: tuple[str, ParsedSpec]) -> Value:
        path, spec = value
        first, gradient, inner, _, tensor = self.values.get(place) or _ValueReadings()
        return Value(
            path=path,
            shape=spec.shape,
            dtype=spec.dtype,
            device=self.device,
            requires_grad=spec.requires_grad,
            tensor=tensor,
            forward=first,
            backward=gradient,
            backward_inner=inner,
            overwritten=spec.overwritten,
            source=None if spec.origin is None else absolute(spec.origin, layer),
        )

    # --- responses

    def _response(self, i: int, j: int, key: str) -> IsolatedResponse:
        data = self.responses.get(key)
        if type(data) is not dict:
            raise FormatError(f"there is no response {excerpt(key)}")
        if key not in self.answers:
            with in_line(key):
                self.answers[key] = self._answer(data)
        return dataclasses.replace(self.answers[key], recipes=self.recipes.read(i, j, data.get(layout.RECIPES, "")))

    def _answer(self, data: Mapping[str, Any]) -> IsolatedResponse:
        handed = []
        for key, value in data.items():
            if key[:1] == layout.HANDED:
                passed = value if type(value) is str else None
                reading = None if value is None or passed is not None else self._reading(value, None, "response")
                handed.append(EmittedTensor(where=name_of(key[1:]), passed=passed, reading=reading))
        gradient = None
        if layout.GRADIENT in data:
            gradient = self._reading(data[layout.GRADIENT], None, "response gradient")
        return IsolatedResponse(
            handed=tuple(handed),
            gradient=gradient,
            without_gradient=string_tuple(data.get(layout.UNREACHED, []), layout.UNREACHED),
            reason=text_or_none(data.get(layout.REASON), layout.REASON),
            mode_matters=data.get(layout.BY_MODE) is True if self.structure.is_of_this_schema else None,
        )
