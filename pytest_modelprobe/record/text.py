"""A record as a table of its layers, as text, and the message for an unknown layer.

These are the words of a record, which stand with it: a record can say itself without `report`. Names of layers are
untrusted text, so they are made printable here, and escaped for HTML.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pytest_modelprobe.text import Cell, count, listed, number, printable, shape, table, wrapped

from .layer import Call, Layer, Value, call_name, elements
from .selection import nearest

if TYPE_CHECKING:
    from .record import Record


# --- the table of layers ----------------------------------------------------------------------------------------------

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
        rows: list[list[Cell]] = []
        for layer in map(record.layers.__getitem__, record.layers if names is None else names):
            shapes = listed([f"{p.name} {tuple(p.shape)}" for p in layer.parameters])
            rows.append([layer.name, layer.type_name, shapes or "-"])
        return ["layer", "type", "parameters"], rows
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
    cells: list[Cell] = [value.forward.reason or "-", "", "", "", ""]
    if s is not None:
        cells = [*map(number, (s.mean, s.std, s.min, s.max)), f"{s.zeros / s.count:.0%}" if s.count else "-"]
    row += [shape(value.shape), *cells, "-" if units is None else f"{units.dead}/{len(units)}"]
    if gradients:
        gradient = value.backward.statistics if value.backward is not None else None
        row.append("-" if gradient is None else number(gradient.rms))
    return row


def _number_of_calls(layer: Layer, call: Call) -> int:
    """Return how often a layer was called in forwards of this kind."""
    return len([c for c in layer.calls if (c.root, c.root_training) == (call.root, call.root_training)])


MOST_LAYERS = 60
"""Layers that ``print(record)`` shows; ``record.table()`` shows all."""


def headline(record: Record) -> str:
    """Return model, layers, parameters and run of a record in one line.

    >>> from pytest_modelprobe.record import Record
    >>> headline(Record(model="Net", forwards=1))
    'Net: 0 layers, 0 parameters; 1 forward on cpu, no backward'
    """
    how = f"loss {record.loss}" if record.loss else "no backward"
    if record.backwards and not record.loss:
        how = count(record.backwards, "backward")
    run = f"; {count(record.forwards, 'forward')} on {record.device}, {how}" if record.forwards else ""
    return printable(
        f"{record.model}: {count(len(record.layers), 'layer')}, {count(elements(record.parameters), 'parameter')}{run}"
    )


def record_text(
    record: Record,
    names: Iterable[str] | None = None,
    most: int | None = MOST_LAYERS,
    more: str = "record.table() has them all",
) -> str:
    """Return a record as a table of its layers, see `layer_rows`.

    Args:
        record: The record.
        names: The layers to show. By default they are chosen as by `layer_rows`.
        most: How many rows to show, or `None` for all of them.
        more: How to see the rows that are not shown.
    """
    columns, rows = layer_rows(record, names)
    lines = table(columns, rows, len(rows) if most is None else most, spare=SPARE)
    if most is not None and len(rows) > most:
        lines[-1] += f": {more}"
    notes = [wrapped(printable(f"note: {note}"), 6) for note in record.notes]
    return "\n".join([wrapped(headline(record)), *["", *lines] * bool(rows), *["", *notes] * bool(notes)])


def unknown_layer(record: Record, name: object) -> str:
    """Return the message for a name that no layer has, with the nearest names.

    >>> from pytest_modelprobe.record import Layer, Record
    >>> unknown_layer(Record(model="Net", layers={"fc1": Layer(name="fc1", type="Linear")}), "fc")
    "no layer 'fc' is among the 1 recorded of Net; nearest: 'fc1'"
    """
    if not isinstance(name, str):
        return f"layers have strings as names: record[{str(name)!r}], not record[{name!r}]"
    near = nearest(name, record.layers)
    names = listed([repr(known) for known in near or record.layers], most=8) or "none"
    said = f"nearest: {names}" if near else f"they are {names}; what layers= leaves out is not recorded"
    return printable(f"no layer {name!r} is among the {len(record.layers):,} recorded of {record.model}; {said}")
