"""A parsed architecture file → its layers and calls, checked, without numbers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, NamedTuple

from pytest_modelprobe.record import ROOT, ForwardKind, Plain

from .layout import ABSENT, ARROW, LAYERS, digest_of
from .order import containers, events, implied_timelines
from .parsing import check_fields, excerpt, string_dict, string_tuple
from .specs import DTYPE, Defaults, FormatError, ParsedSpec, name_of, parse_parameter, parse_value

_HEADER = {
    "modelprobe": int, "model": str, "root": str, "mode": str, "seed": int, "loss": str, "forwards": int,
    "backwards": int, "dtype": str, "requires_grad": bool, "grad_enabled": bool, "autocast": str, "attributes": dict,
    "numbers": bool, "notes": list, "order": list, "reason": str, "supersedes": str, LAYERS: dict,
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
_MOST_PARTS = 1 << 20
"""Layers, parameters, buffers, calls and values: a few bytes of a file are a hundred times as much in memory."""
_MODES = {"train": True, "eval": False}

Named = list[tuple[str, ParsedSpec]]


@dataclasses.dataclass(slots=True, kw_only=True)
class CallLine:
    """A call without values."""

    root: str
    root_training: bool
    index: int
    forwards: int
    training: bool
    inputs_known: bool
    arguments: dict[str, Plain]
    grad_enabled: bool
    autocast: str | None
    recomputed: int


class LayerLine(NamedTuple):
    """A layer without numbers."""

    name: str
    type: str
    leaf: bool
    functional: bool
    training: bool
    aliases: tuple[str, ...]
    attributes: dict[str, Plain]
    parameters: Named
    buffers: Named
    calls: list[CallLine]
    values: list[tuple[Named, Named]]
    """Inputs and outputs of each call."""


class Structure:
    """A parsed and checked architecture file."""

    def __init__(self, data: dict[str, Any]) -> None:
        check_fields(data, _HEADER)
        _count(data, "forwards", "backwards")
        if "model" not in data or data.get("mode") not in _MODES:
            raise FormatError("the model or its mode is missing")
        self.data = data
        if len(data[LAYERS]) > _MOST_LAYERS:
            raise FormatError(f"it has {len(data[LAYERS]):,} layers, and {_MOST_LAYERS:,} are the most that are read")
        self.digest = digest_of(data)
        self.has_numbers: bool = data.get("numbers", True)
        self.training = _MODES[data["mode"]]
        self.defaults = Defaults(data.get("dtype", DTYPE), data.get("requires_grad", False))
        self.attributes = _attributes(data.get("attributes", {}))
        self.parents = containers(data[LAYERS])
        self._contents: dict[str, tuple[Any, ...]] = {}
        """By their texts: the lines of repeated blocks are equal."""
        self._parts = 0
        self.lines = [self._line(name, line) for name, line in data[LAYERS].items()]
        self._place()

    def _line(self, name: str, line: Any) -> LayerLine:
        with in_line(name):
            if type(line) is not dict or "type" not in line:
                raise FormatError("it describes no layer")
            if name.count(".") >= _DEEPEST:
                raise FormatError(f"its name has {name.count('.') + 1:,} parts")
            inner = len(self.data[LAYERS]) > 1 if name == ROOT else name in self.parents
            text = repr(line)
            if text not in self._contents:
                self._contents[text] = self._content(line)
            *_, parameters, buffers, calls, values = self._contents[text]
            self._parts += 1 + len(parameters) + len(buffers) + len(calls) + sum(len(a) + len(b) for a, b in values)
            if self._parts > _MOST_PARTS:
                raise FormatError(f"up to it there are more than {_MOST_PARTS:,} parameters, calls and values")
            # Interned: of many snapshots the names of layers are what stays in memory.
            return LayerLine(sys.intern(name), line["type"], line.get("leaf", not inner), *self._contents[text])

    def _content(self, line: dict[str, Any]) -> tuple[Any, ...]:
        """Return the fields of a `LayerLine` from ``functional`` on."""
        check_fields(line, _LAYER)
        training = line.get("training", self.training)
        functional = line.get("functional", False)
        own = _attributes(line.get("attributes", {}))
        return (
            functional,
            training,
            string_tuple(line["aliases"], "aliases") if "aliases" in line else (),
            own if functional else self._with_usual(own, line.get("attributes", {})),
            self._own(line.get("parameters", {}), trainable=True),
            self._own(line.get("buffers", {}), trainable=False),
            *self._calls(line.get("calls", ()), training),
        )

    def _with_usual(self, own: dict[str, Plain], given: Mapping[str, Any]) -> dict[str, Plain]:
        if not self.attributes:
            return own
        defaults = {k: v for k, v in self.attributes.items() if k not in given}
        return own | defaults

    def _own(self, data: Any, *, trainable: bool) -> Named:
        return [
            (name_of(key), parse_parameter(text, self.defaults, trainable))
            for key, text in string_dict(data, "parameters").items()
        ]

    def _values(self, data: Any) -> Named:
        return [(name_of(key), parse_value(text, self.defaults)) for key, text in string_dict(data, "values").items()]

    def _calls(self, data: Sequence[Any], training: bool) -> tuple[list[CallLine], list[tuple[Named, Named]]]:
        calls, values = [], []
        index: dict[ForwardKind, int] = {}
        header = self.data
        for line in data:
            if type(line) is str:
                source, arrow, made = line.rpartition(ARROW)
                if not arrow:
                    raise FormatError(f"{excerpt(line)} is no call")
                line = {"inputs": {"input": source}, "outputs": {"output": made}}
            elif type(line) is not dict:
                raise FormatError(f"{excerpt(line)} is no call")
            check_fields(line, _CALL)
            _count(line, "index", "forwards", "recomputed")
            if line.get("mode", "eval") not in _MODES:
                raise FormatError(f"{excerpt(line['mode'])} is no mode")
            kind = line.get("root", header.get("root", ROOT)), _MODES[line["mode"]] if "mode" in line else self.training
            position = line.get("index", index.get(kind, 0))
            index[kind] = position + 1
            calls.append(
                CallLine(
                    root=kind[0],
                    root_training=kind[1],
                    index=position,
                    forwards=line.get("forwards", header.get("forwards", 1)),
                    training=line.get("training", training),
                    inputs_known=line.get("inputs_known", True),
                    arguments=_attributes(line.get("arguments", {})),
                    grad_enabled=line.get("grad_enabled", header.get("grad_enabled", True)),
                    autocast=line["autocast"] if "autocast" in line else header.get("autocast"),
                    recomputed=line.get("recomputed", 0),
                )
            )
            values.append((self._values(line.get("inputs", {})), self._values(line.get("outputs", {}))))
            if any(worded.origin is not None for _, worded in values[-1][1]):
                raise FormatError("what a call gives out comes from nowhere else")
        return calls, values

    def _place(self) -> None:
        """Assign each call its start and end in the order of its forward."""
        self.calls = [line.calls for line in self.lines]
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


class in_line:
    """Add the name of the line to a `FormatError` raised in a `with` block: a class, for each line enters several."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FormatError):
            raise FormatError(f"in the line of {excerpt(self._name)}: {error}") from None
