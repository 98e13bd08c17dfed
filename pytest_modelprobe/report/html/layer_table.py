"""The table of the layers of one run.

It has a column for each thing that a record may know of a layer, and leaves out the columns that are empty in the run.
Those of which most is looked at come first: a narrow window shows the first columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_modelprobe.text import shape

from .elements import Child, Markup, number, tag
from .histogram import Axis, Histogram, sparkline
from .status import badges, is_cause

Layer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    title: str | None
    cell: Callable[[Layer], Child]
    css: str | None = "n"
    """The class of its heading: ``n`` for numbers, which are aligned right; None for text; ``plain`` for pictures."""


def _output(layer: Layer) -> dict[str, Any]:
    return next(iter(layer["outputs"]), {})


def _statistic(name: str, of: str = "statistics") -> Callable[[Layer], Child]:
    return lambda layer: number((_output(layer).get(of) or {}).get(name))


def _shape(layer: Layer) -> Child:
    output = _output(layer)
    return shape(output["shape"]) if output else ""


def _range(layer: Layer) -> Child:
    low, high = _statistic("min")(layer), _statistic("max")(layer)
    return f"{low} … {high}" if low or high else ""


def _zeros(layer: Layer) -> Child:
    statistics = _output(layer).get("statistics")
    if not statistics or not statistics["count"]:
        return ""
    share = statistics["zeros"] / statistics["count"]
    return f"{share:.0%}" if share else "0"


def _nonfinite(layer: Layer) -> Child:
    statistics = _output(layer).get("statistics") or {}
    count = sum(statistics.get(name) or 0 for name in ("nan", "posinf", "neginf"))
    return f"{count:,}" if count else ""


def _units(name: str) -> Callable[[Layer], Child]:
    def cell(layer: Layer) -> Child:
        units = layer[name]
        return f"{units[0]:,}/{units[1]:,}" if units and units[0] else "0" if units else ""

    return cell


def _weights_gradient(layer: Layer) -> Child:
    return number((layer["weights"] or {}).get("gradient_rms"))


def _profile(name: str, scale: float = 1.0) -> Callable[[Layer], Child]:
    def cell(layer: Layer) -> Child:
        value = (layer["profile"] or {}).get(name)
        return number(value * scale if isinstance(value, float) else value)

    return cell


def _parameters(layer: Layer) -> Child:
    return number(layer["parameters"]) if layer["parameters"] else ""


def _calls(layer: Layer) -> Child:
    return number(layer["calls"]) if layer["calls"] != 1 else ""


_LONG = 28
"""A name of more characters may take several lines, so that the numbers stay in sight."""

_COLUMNS = (
    _Column("status", None, lambda layer: badges(layer["status"]), css=None),
    _Column("type", "Class of the module", lambda layer: layer["type"], css=None),
    _Column("output", "Shape of the first output", _shape, css=None),
    _Column("dead", "Units that are always zero, of all", _units("dead_units")),
    _Column("gradient", "Root mean square of the gradient of the output", _statistic("rms", of="gradient")),
    _Column("mean", "Mean of the output's finite elements", _statistic("mean")),
    _Column("± std", "Standard deviation of the output", _statistic("std")),
    _Column("range", "Smallest and largest finite element of the output", _range),
    _Column("zeros", "Share of the output's elements that are zero", _zeros),
    _Column("not finite", "Elements of the output that are NaN or infinite", _nonfinite),
    _Column("saturated", "Units that are always at a limit, of all", _units("saturated_units")),
    _Column("calls", "Calls, where it is not one", _calls),
    _Column("parameters", "Elements of the layer's own parameters", _parameters),
    _Column("of weights", "Root mean square of the gradient of the parameters", _weights_gradient),
    _Column("time ms", "Wall time, with the layers in it", _profile("wall_time", 1000.0)),
    _Column("FLOPs", "Floating-point operations, with the layers in it", _profile("flops")),
    _Column("bytes", "Bytes of activations", _profile("activation_bytes")),
)


def layer_table(layers: Sequence[Layer], anchor: Callable[[str], str | None], label: str) -> Markup:
    """Return the table, without the columns that are empty."""
    filled = [(column, cells) for column in _COLUMNS if any(cells := [column.cell(layer) for layer in layers])]
    axis = Axis.of(histogram for layer in layers if (histogram := _histogram(layer)))
    if axis is not None:
        limits = axis.limits()
        told = f"Elements of the output by magnitude, {limits}: negative, zero, positive; each scaled to its peak"
        picture = _Column("distribution", told, functools.partial(_picture, axis), css="plain")
        texts = sum(column.css is None for column, _ in filled)
        filled.insert(texts, (picture, list(map(picture.cell, layers))))
    head = [tag("th", "layer", scope="col", title="Name in the model")]
    head += [tag("th", one.heading, scope="col", title=one.title, class_=one.css) for one, _ in filled]
    rows = []
    for i, layer in enumerate(layers):
        rows.append(
            tag("tr", _name(layer["name"]), [tag("td", cells[i]) for _, cells in filled], id=anchor(layer["name"]))
        )
    first_of_numbers = 2 + sum(column.css != "n" for column, _ in filled)
    # The alignment of columns is a rule of the style sheet: a class of each cell would be a fifth of the page.
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", rows), class_=f"layers from{first_of_numbers}")
    return tag("div", table, class_="scroll", tabindex="0", role="group", aria_label=label)


def _name(name: str) -> Markup:
    if len(name) <= _LONG:
        return tag("th", name)
    first, *parts = name.split(".")
    return tag("th", first, [(".", tag("wbr"), part) for part in parts], class_="long")


def shown(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers of the table: those that say something that the row before does not.

    Left out are modules that return what the last layer in them returned, and layers without calls and parameters.
    """
    found: list[Layer] = []
    for layer in layers:
        own = layer["leaf"] or layer["parameters"] or layer["attention"]
        news = (layer["calls"] or layer["parameters"]) and (own or not found or not _same_output(layer, found[-1]))
        if news or any(map(is_cause, layer["status"])):
            found.append(layer)
    return found


def _same_output(layer: Layer, other: Layer) -> bool:
    a, b = _output(layer), _output(other)
    return bool(a) and (a["shape"], a.get("statistics")) == (b.get("shape"), b.get("statistics"))


def _histogram(layer: Layer) -> Histogram | None:
    found: Histogram | None = _output(layer).get("histogram")
    return found


def _picture(axis: Axis, layer: Layer) -> Child:
    found = _histogram(layer)
    return sparkline(axis, found) if found else None
