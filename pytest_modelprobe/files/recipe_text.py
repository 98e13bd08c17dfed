"""How synthetic tensors were made, as one short text.

A response of a layer alone depends on a recipe for each tensor that the layer got. The names of these tensors, and
mostly their shapes, follow from the architecture, so they are left out and the recipes stand in their usual order. A
response may be shared by many calls, so the number of recipes that a file may ask for is limited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_modelprobe.record import ROOT, Parameter, Value

from .specs import FormatError, ParsedSpec, floating

_MOST = 1 << 22
"""Tensors with a recipe, of all calls together. One text in a file may stand for many calls."""

Shaped = Value | Parameter | ParsedSpec
"""What has a shape and a dtype. Writing knows values and parameters, and reading knows their specs."""

NamedValues = Sequence[tuple[str, Shaped]]
"""Values of a call with their paths."""


class Outline(NamedTuple):
    """The parts of a layer that its synthetic tensors follow from."""

    name: str
    own: Sequence[tuple[str, Shaped]]
    """Parameters and buffers."""
    calls: Sequence[tuple[NamedValues, NamedValues]]
    """Inputs and outputs of each call."""


class Recipes:
    """Writes and reads recipes. The layers are given in the order of the lines."""

    def __init__(self, layers: Sequence[Outline]) -> None:
        self._layers = layers
        self._of_children: dict[int, list[tuple[str, str]]] = {}
        self._most = _MOST

    def text(self, line: int, call: int, recipes: Mapping[str, str]) -> str | dict[str, str]:
        """Return the recipes of a call's response: as one text in their usual order, or else by name."""
        usual = dict(self._usual(line, call))
        short = {name: self._short(usual.get(name), recipe) for name, recipe in recipes.items()}
        if all(name in usual and recipe and "," not in recipe for name, recipe in short.items()):
            return ",".join(short.get(name, "") for name in usual)
        return short

    def read(self, line: int, call: int, data: Any) -> dict[str, str]:
        """Return the recipes that `text` wrote."""
        usual = dict(self._usual(line, call))
        if type(data) is str:
            texts = data.split(",") if data or len(usual) == 1 else []
            if len(texts) != len(usual) and data:
                raise FormatError(f"{len(texts)} recipes for {len(usual)} tensors")
            pairs = zip(usual, texts, strict=False)
            return {name: self._long(usual[name], text) for name, text in pairs if text}
        if type(data) is not dict or not all(type(text) is str for text in data.values()):
            raise FormatError(f"{str(data)[:80]!r} are no recipes")
        return {name: self._long(usual.get(name), text) for name, text in data.items()}

    def _usual(self, line: int, call: int) -> Iterator[tuple[str, str | None]]:
        """Yield the names of synthetic tensors, each with the shape before its recipe, if there is one."""
        layer = self._layers[line]
        if line not in self._of_children:
            self._of_children[line] = list(self._outputs_of_children(line))
        self._most -= len(layer.own) + len(self._of_children[line])
        if self._most < 0:
            raise FormatError(f"there are recipes of more than {_MOST:,} tensors")
        yield from ((name, None) for name, own in layer.own if floating(own.dtype))
        yield from ((path, _head(value)) for path, value in layer.calls[call][0])
        yield from self._of_children[line]

    def _outputs_of_children(self, line: int) -> Iterator[tuple[str, str]]:
        above = self._layers[line].name
        for child in self._children(line):
            name = child.name if above == ROOT else child.name[len(above) + 1 :]
            yield from ((f"{name} {path}", _head(value)) for path, value in child.calls[0][1])

    def _children(self, line: int) -> Iterator[Outline]:
        """Yield the layers that a layer calls, by their names."""
        above = self._layers[line].name
        taken = None
        for layer in self._layers[line + 1 :]:
            if above != ROOT and not layer.name.startswith(f"{above}."):
                return
            if layer.calls and (taken is None or not layer.name.startswith(f"{taken}.")):
                taken = layer.name
                yield layer

    @staticmethod
    def _short(head: str | None, recipe: str) -> str:
        if head is not None and recipe.startswith(f"{head} "):
            return recipe[len(head) + 1 :]
        return recipe if head is None and not recipe.startswith("=") else f"={recipe}"

    @staticmethod
    def _long(head: str | None, text: str) -> str:
        if text.startswith("="):
            return text[1:]
        return text if head is None else f"{head} {text}"


def _head(value: Shaped) -> str:
    sizes = "x".join(map(str, value.shape)) or "scalar"
    return sizes if value.dtype in ("float32", "int64", "bool") else f"{sizes}:{value.dtype}"
