"""Differences as rows of a table: the same change in repeated layers is one row.

A model has the same block dozens of times, and a change of its class is in each of them. All reports show these rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_modelprobe.record import Plain, Record, containers
from pytest_modelprobe.text import listed, number, pattern

from .differences import Difference
from .text import moved_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One change of one layer, or the same change of several."""

    layer: str
    what: str
    now: str
    was: str
    layers: tuple[str, ...]
    """The layers with this change."""

    @property
    def times(self) -> str:
        """``x6`` for several layers, else empty."""
        return f"x{len(self.layers)}" if len(self.layers) > 1 else ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of `CHANGE_COLUMNS`."""
        return self.layer, self.times, self.what, self.now, self.was


CHANGE_COLUMNS = ("layer", "layers", "change", "now", "was")


def rows(differences: Sequence[Difference], actual: Record, expected: Record) -> list[Row]:
    """Return differences as rows: equal ones of repeated layers as one, changed values as one for each layer."""
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    moved: dict[str, list[Difference]] = {}
    # Of added or removed layers only the outermost is shown.
    outer = {(d.kind, d.layer) for d in differences if d.kind in ("layer added", "layer removed")}
    for difference in differences:
        shown = pattern(difference.layer)
        if difference.change is not None:
            moved.setdefault(shown, []).append(difference)
        elif not any((difference.kind, container) in outer for container in containers(difference.layer)[1:]):
            alike.setdefault((shown, *_texts(difference, actual, expected)), []).append(difference.layer)
    return [
        *(_row(shown, what, now, was, layers) for (shown, what, now, was), layers in alike.items()),
        *(_moved(shown, found) for shown, found in moved.items()),
    ]


def _row(shown: str, what: str, now: str, was: str, names: Iterable[str]) -> Row:
    layers = tuple(dict.fromkeys(names))
    return Row(layer=shown if len(layers) > 1 else layers[0], what=what, now=now, was=was, layers=layers)


def _moved(shown: str, differences: Sequence[Difference]) -> Row:
    what = listed(list(dict.fromkeys(_label(d) for d in differences)))
    by = moved_by(differences, "up to " if len(differences) > 1 else "")
    return _row(shown, what, by, "", (d.layer for d in differences))


def _texts(difference: Difference, actual: Record, expected: Record) -> tuple[str, str, str]:
    """Return the change, the new value and the old one."""
    kind = difference.kind
    now, was = _cell(difference.actual), _cell(difference.expected)
    if kind == "layer added" and difference.layer in actual.layers:
        now = actual[difference.layer].type_name
    elif kind == "layer removed" and difference.layer in expected.layers:
        was = expected[difference.layer].type_name
    return _label(difference), now, was


def _label(difference: Difference) -> str:
    kind, what = difference.kind, difference.what
    own, _, how = kind.partition(" ")
    if own in ("parameter", "buffer") and how:
        label = f"{what} {how}"
    elif kind == "attribute":
        label = what
    else:
        label = what if what.startswith(kind) else f"{kind} {what}".strip()
    return f"{label} (call {difference.call + 1})" if difference.call else label


def _cell(value: Plain) -> str:
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else str(value)
