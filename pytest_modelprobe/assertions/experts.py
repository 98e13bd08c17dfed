"""Weights of several modules in one parameter, such as experts: which of them never get a gradient.

The parameter as a whole has a gradient, so that no assertion on parameters notices an expert that the router never
chooses. The gradient is looked at slice by slice along the first axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_modelprobe.record import Layer, Parameter, Value
from pytest_modelprobe.text import count, listed

from .sources import full_name, numbers

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
    """How many rows the layer was given in all of its calls, or 0 if that is not known."""

    @property
    def name(self) -> str:
        """Its full name."""
        return full_name(self.layer, self.parameter.name)

    @property
    def is_certain(self) -> bool:
        """Whether there were so many tokens that each expert should have got some."""
        return self.tokens >= _TOKENS * self.of

    def __str__(self) -> str:
        given = f", with {count(self.tokens, 'token')}" if self.tokens else ""
        who = f"expert {self.slices[0]}" if len(self.slices) == 1 else f"experts {listed(list(map(str, self.slices)))}"
        return f"{self.name}: {who} of {self.of:,} {'gets' if len(self.slices) == 1 else 'get'} no gradient{given}"


def find_unreached(layers: Iterable[Layer]) -> Iterator[Unreached]:
    """Yield the parameters of which some slices have a gradient of zeros in every backward, and others have not."""
    for layer in layers:
        for parameter in layer.parameters:
            units = None if parameter.gradient is None else parameter.gradient.units
            if units is not None and 0 < units.dead < len(units) and _takes_rows(layer, parameter):
                pairs = enumerate(zip(units.low, units.high, strict=True))
                zero = tuple(place for place, (low, high) in pairs if low == high == 0)
                yield Unreached(layer, parameter, zero, len(units), _tokens(layer))


def _takes_rows(layer: Layer, parameter: Parameter) -> bool:
    """Whether the slices are matrices that fit the rows that the layer is given; of a table of segments they do not."""
    widths = {value.shape[-1] for call in layer.calls for value in call.inputs if len(value.shape) > 1}
    return not widths or not widths.isdisjoint(parameter.shape[1:])


def _tokens(layer: Layer) -> int:
    return sum(max(map(_rows, call.inputs), default=0) for call in layer.calls)


def _rows(value: Value) -> int:
    """Return the rows of a floating-point value in all forwards, of its last axis."""
    statistics = numbers(value)
    width = value.shape[-1] if len(value.shape) > 1 else 0
    return statistics.count // width if statistics is not None and isinstance(width, int) and width else 0
