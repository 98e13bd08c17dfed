"""From a parsed architecture file to its layers and calls, checked, and still without numbers.

The numbers follow in `numbers_file`. Lines of repeated blocks are equal, so each text is parsed once. For the same
reason a small file may describe a huge model: the limits here hold for what is described, not for the size of the file.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import UnionType
from typing import Any, NamedTuple

from pytest_modelprobe.record import Call, ForwardKind, Layer, OptimizerGroup, Plain

from .layout import ABSENT, ARROW, LAYERS, MODES, SCHEMA, digest_of, usual_call, usual_layer
from .order import containers, events, implied_timelines
from .parsing import check_fields, excerpt, string_dict, string_tuple
from .specs import DTYPE, Defaults, FormatError, ParsedSpec, name_of, parse_parameter, parse_value

# The names and types of the fields. A field in no table is refused: an older version would drop what it does not know.
_HEADER = {
    "modelprobe": int, "model": str, "root": str, "mode": str, "seed": int, "loss": str, "forwards": int,
    "backwards": int, "dtype": str, "requires_grad": bool, "grad_enabled": bool, "autocast": str, "attributes": dict,
    "optimizers": list, "numbers": bool, "notes": list, "order": list, "parameter order": list,
    "reason": str, "supersedes": str, LAYERS: dict,
}  # fmt: skip
_LAYER = {
    "type": str, "functional": bool, "leaf": bool, "training": bool, "aliases": list, "attributes": dict,
    "parameters": dict, "buffers": dict, "calls": list,
}  # fmt: skip
_CALL: dict[str, type | UnionType] = {
    "root": str, "mode": str, "index": int, "forwards": int, "training": bool, "grad_enabled": bool,
    "autocast": str | None, "recomputed": int, "inputs": dict, "inputs_known": bool, "arguments": dict,
    "outputs": dict,
}  # fmt: skip
_DEEPEST = 256
"""Parts of a layer's name: Python's recursion limit allows no deeper calls."""
_MOST_LAYERS = 1 << 17
"""More layers than any model has."""
_MOST_PARTS = 1 << 20
"""Layers, parameters, buffers, calls and values together. A few bytes of a file take a hundred times as much memory."""

Named = list[tuple[str, ParsedSpec]]


class LayerLine(NamedTuple):
    """A layer without numbers."""

    layer: Layer
    """It has its calls. Its parameters, buffers and values are missing."""
    parameters: Named
    buffers: Named
    values: list[tuple[Named, Named]]
    """Inputs and outputs of each call."""

    @property
    def name(self) -> str:
        """The name of the layer."""
        return self.layer.name


class Structure:
    """A parsed and checked architecture file."""

    def __init__(self, data: dict[str, Any]) -> None:
        check_fields(data, _HEADER)
        _count(data, "forwards", "backwards")
        if "model" not in data or data.get("mode") not in MODES:
            raise FormatError("the model or its mode is missing")
        self.data = data
        self.is_of_this_schema = data["modelprobe"] == SCHEMA
        if len(data[LAYERS]) > _MOST_LAYERS:
            raise FormatError(f"it has {len(data[LAYERS]):,} layers, and {_MOST_LAYERS:,} are the most that are read")
        self.digest = digest_of(data)
        self.has_numbers: bool = data.get("numbers", True)
        self.defaults = Defaults(data.get("dtype", DTYPE), data.get("requires_grad", False))
        self.attributes = _attributes(data.get("attributes", {}))
        self.optimizers = tuple(map(_group, data.get("optimizers", ())))
        self.parents = containers(data[LAYERS])
        self._contents: dict[str, LayerLine] = {}
        """The parsed lines by their texts, for the lines of repeated blocks are equal."""
        self._parts = 0
        self.lines = [self._line(name, line) for name, line in data[LAYERS].items()]
        self._place()

    def _line(self, name: str, line: Any) -> LayerLine:
        with in_line(name):
            if type(line) is not dict or "type" not in line:
                raise FormatError("it describes no layer")
            if name.count(".") >= _DEEPEST:
                raise FormatError(f"its name has {name.count('.') + 1:,} parts")
            text = repr(line)
            if text not in self._contents:
                self._contents[text] = self._content(line)
            found = self._contents[text]
            self._parts += 1 + len(found.parameters) + len(found.buffers) + len(found.values)
            self._parts += sum(len(inputs) + len(outputs) for inputs, outputs in found.values)
            if self._parts > _MOST_PARTS:
                raise FormatError(f"up to it there are more than {_MOST_PARTS:,} parameters, calls and values")
            # Interned: if many snapshots are read, the names of layers are what stays in memory.
            leaf = line.get("leaf", name not in self.parents)
            return found._replace(layer=dataclasses.replace(found.layer, name=sys.intern(name), leaf=leaf))

    def _content(self, line: dict[str, Any]) -> LayerLine:
        """Return what a line says of a layer, whatever its name is."""
        check_fields(line, _LAYER)
        fields = usual_layer(self.data, has_children=False) | line
        attributes = _attributes(fields["attributes"])
        if not fields["functional"]:
            attributes |= {k: v for k, v in self.attributes.items() if k not in fields["attributes"]}
        fields["attributes"], fields["aliases"] = attributes, string_tuple(fields["aliases"], "aliases")
        parameters = self._own(fields.pop("parameters"), trainable=True)
        buffers = self._own(fields.pop("buffers"), trainable=False)
        fields["calls"], values = self._calls(fields["calls"], fields["training"])
        return LayerLine(Layer(name="", **fields), parameters, buffers, values)

    def _own(self, data: Any, *, trainable: bool) -> Named:
        return [
            (name_of(key), parse_parameter(text, self.defaults, trainable))
            for key, text in string_dict(data, "parameters").items()
        ]

    def _values(self, data: Any) -> Named:
        return [(name_of(key), parse_value(text, self.defaults)) for key, text in string_dict(data, "values").items()]

    def _calls(self, data: Sequence[Any], training: bool) -> tuple[tuple[Call, ...], list[tuple[Named, Named]]]:
        """Return the calls without their values, and the inputs and outputs of each."""
        calls, values = [], []
        following: dict[ForwardKind, int] = {}
        for line in data:
            if type(line) is str and ARROW in line:
                source, _, made = line.rpartition(ARROW)
                line = {"inputs": {"input": source}, "outputs": {"output": made}}
            if type(line) is not dict:
                raise FormatError(f"{excerpt(line)} is no call")
            check_fields(line, _CALL)
            fields = usual_call(self.data, training=training) | line
            _count(fields, "index", "forwards", "recomputed")
            mode, inputs, outputs = (fields.pop(name) for name in ("mode", "inputs", "outputs"))
            if mode not in MODES:
                raise FormatError(f"{excerpt(mode)} is no mode")
            kind = fields["root"], MODES[mode]
            fields["index"] = line.get("index", following.get(kind, 0))
            following[kind] = fields["index"] + 1
            fields["arguments"] = _attributes(fields["arguments"])
            calls.append(Call(root_training=MODES[mode], **fields))
            values.append((self._values(inputs), self._values(outputs)))
            if any(worded.origin is not None for _, worded in values[-1][1]):
                raise FormatError("what a call gives out comes from nowhere else")
        return tuple(calls), values

    def _place(self) -> None:
        """Assign each call its start and end in the order of its forward."""
        self.calls = [line.layer.calls for line in self.lines]
        order = self.data.get("order")
        if order is None:
            order = implied_timelines([line.name for line in self.lines], self.calls)
        elif not all(type(line) is list and all(type(token) is int and token for token in line) for line in order):
            raise FormatError("the order is no list of lists of whole numbers")
        self.events = events(order, self.calls)
        self.places: dict[tuple[int, int], tuple[int, int]] = {}
        for timeline in self.events:
            for position, (i, j, end) in enumerate(timeline):
                self.places[i, j] = (self.places[i, j][0], position) if end else (position, -1)


def _count(data: Mapping[str, Any], *names: str) -> None:
    """Raise `FormatError` unless each count is between 0 and 2⁶³."""
    for name in names:
        if not 0 <= data.get(name, 0) < 1 << 63:
            raise FormatError(f"{excerpt(name)} is {excerpt(data[name])}, which counts nothing")


def _group(data: Any) -> OptimizerGroup:
    if type(data) is not list or [type(part) for part in data] != [str, dict]:
        raise FormatError(f"{excerpt(data)} is no group of an optimizer")
    return OptimizerGroup(optimizer=data[0], options=_attributes(data[1]))


def _attributes(data: Any) -> dict[str, Plain]:
    return {k: _plain_value(v) for k, v in data.items() if v != ABSENT}


def _plain_value(value: Any) -> Plain:
    if type(value) is dict:
        text = value.get("float")
        if len(value) != 1 or text not in ("nan", "inf", "-inf"):
            raise FormatError(f"{excerpt(value)} is no plain value")
        return float(text)
    if type(value) is list:
        raise FormatError(f"{excerpt(value)} is no plain value")
    return value  # type: ignore[no-any-return]


@contextmanager
def in_line(name: str) -> Iterator[None]:
    """Add the name of a line to a `FormatError` that is raised in the block."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"in the line of {excerpt(name)}: {error}") from None
