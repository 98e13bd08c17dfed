"""The layers of a record as the rows of a table.

``print(record)``, a notebook, ``modelprobe show`` and the messages on snapshots show this table, so its rows are made
once. Layers that tell nothing new are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pytest_modelprobe.text import Cell, listed, number, shape, table

from .calls import Call, Value
from .layer import Layer, elements
from .naming import call_name
from .tensor_statistics import Statistics

if TYPE_CHECKING:
    from .record import Record


SPARE = ("calls", "min", "max", "mean", "zeros")
"""Columns that a narrow terminal leaves out first: dead units and gradients are looked at more."""


def layer_table(record: Record, most: int | None = 200) -> list[str]:
    """Return a table of the layers of a record, see `layer_rows`; without a limit of its rows if ``most`` is None."""
    columns, rows = layer_rows(record)
    return table(columns, rows, len(rows) if most is None else most, spare=SPARE) if rows else ["no layer was recorded"]


def layer_rows(record: Record, names: Iterable[str] | None = None) -> tuple[list[str], list[list[Cell]]]:
    """Return columns and rows of the table of layers, those that were called in order of execution.

    Containers without parameters whose output is that of a child are left out, and so are layers without calls and
    parameters, and the later calls of a layer that is called more than 8 times. If no layer was called, it is a table
    of parameters. If no output has numbers, as with fake tensors, one column says why in the place of theirs.

    Args:
        record: The record.
        names: The layers to show. By default they are chosen as above.
    """
    # By their end: a container comes after the child whose output it returns, and then has no news.
    calls = sorted(record.calls, key=lambda pair: pair[1].finished)
    if not calls:
        return _structure_rows(record, names)
    gradients = any(v.backward is not None for layer in record.layers.values() for _, v in layer.outputs)
    columns = ["layer", "type", "parameters", "calls", *_NUMBERS]
    wanted = None if names is None else set(names)
    rows = []
    said: set[int] = set()
    for layer, call in calls:
        value = next(iter(call.outputs), None)
        news = value is not None and (value.tensor not in said or layer.parameters)
        shown = not call.index or _number_of_calls(layer, call) <= _MOST_CALLS
        if shown and (news if wanted is None else layer.name in wanted):
            rows.append(_layer_row(layer, call, value, gradients))
        said |= set() if value is None else {value.tensor}
    rows += [
        [layer.name, layer.type_name, _parameters(layer), 0, *"-" * (len(_NUMBERS) + gradients)]
        for layer in record.layers.values()
        if not layer.calls and (layer.parameters if wanted is None else layer.name in wanted)
    ]
    if all(cells[_MEAN + 1] in ("", "-") for cells in rows):
        return [*columns[:_MEAN], "no numbers"], [cells[: _MEAN + 1] for cells in rows]
    return [*columns, "gradient rms"] if gradients else columns, rows


_MOST_CALLS = 8  # of a shared module, such as the only ReLU of a block; a recurrent cell is called for each token
_NUMBERS = ("output", "mean", "std", "min", "max", "zeros", "dead units")
_MEAN = 5  # its column, where a value without statistics has the reason


def _structure_rows(record: Record, names: Iterable[str] | None) -> tuple[list[str], list[list[Cell]]]:
    rows: list[list[Cell]] = []
    for name in record.layers if names is None else names:
        layer = record.layers[name]
        shapes = listed([f"{p.name} {tuple(p.shape)}" for p in layer.parameters])
        rows.append([layer.name, layer.type_name, shapes or "-"])
    return ["layer", "type", "parameters"], rows


def _parameters(layer: Layer) -> Cell:
    """Return the number of elements of a layer's own parameters without tied ones."""
    if not layer.parameters:
        return "-"
    return "tied" if all(p.tied_to for p in layer.parameters) else elements(layer.parameters)


def _layer_row(layer: Layer, call: Call, value: Value | None, gradients: bool) -> list[Cell]:
    row: list[Cell] = [layer.name, layer.type_name, _parameters(layer), _number_of_calls(layer, call)]
    if call.index:  # the row of the first call has the layer's parameters and number of calls
        row = [call_name(layer.name, call), layer.type_name, "-", "-"]
    if value is None:
        return [*row, *"-" * (len(_NUMBERS) + gradients)]
    s, units = value.forward.statistics, value.forward.units
    row += [
        shape(value.shape),
        *(_statistics_cells(s) if s is not None else [value.forward.reason or "-", "", "", "", ""]),
        "-" if units is None else f"{units.dead}/{len(units)}",
    ]
    if gradients:
        gradient = value.backward.statistics if value.backward is not None else None
        row.append("-" if gradient is None else number(gradient.rms))
    return row


def _number_of_calls(layer: Layer, call: Call) -> int:
    """Return how often a layer was called in forwards of this kind."""
    return len([c for c in layer.calls if (c.root, c.root_training) == (call.root, call.root_training)])


def _statistics_cells(s: Statistics) -> list[Cell]:
    zeros = f"{s.zeros / s.count:.0%}" if s.count else "-"
    return [*(number(v) for v in (s.mean, s.std, s.min, s.max)), zeros]
