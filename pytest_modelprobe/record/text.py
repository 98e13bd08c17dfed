"""A record as text and as HTML, and the message for an unknown layer.

These are the words of a record, which stand with it: a record can say itself without `report`. Names of layers are
untrusted text, so they are made printable here, and escaped for HTML.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pytest_modelprobe.text import Cell, count, html_escaped, listed, number, printable, table, wrapped

from .layer import elements
from .selection import nearest
from .table import SPARE, layer_rows

if TYPE_CHECKING:
    from .record import Record

MOST_LAYERS = 60
"""Layers that ``print(record)`` shows; ``record.table()`` shows all."""

MOST_ROWS_IN_NOTEBOOK = 200
"""Rows that a notebook shows of a record."""


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


def as_text(
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


def as_html(record: Record) -> str:
    """Return a record as a table in HTML, without script and style sheet, and with every name escaped."""
    columns, rows = layer_rows(record)
    shown = rows[:MOST_ROWS_IN_NOTEBOOK]
    more = len(rows) - len(shown)
    notes = [f"... {count(more, 'row')} more: record.table() has them all"] * bool(more) + [
        f"note: {note}" for note in record.notes
    ]
    head = "".join(f"<th>{html_escaped(column)}</th>" for column in columns)
    body = "".join(f"<tr><th>{html_escaped(str(row[0]))}</th>{''.join(map(_cell, row[1:]))}</tr>" for row in shown)
    return (
        f"<div><p>{html_escaped(headline(record))}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"{''.join(f'<p>{html_escaped(note)}</p>' for note in notes)}</div>"
    )


def _cell(cell: Cell) -> str:
    text = cell if isinstance(cell, str) else number(cell)
    side = "right" if text[:1] in "-+0123456789" else "left"
    return f'<td style="text-align: {side}">{html_escaped(text)}</td>'


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
