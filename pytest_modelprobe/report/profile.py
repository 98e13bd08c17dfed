"""The profile of a record as text."""

from __future__ import annotations

from pytest_modelprobe.record import LayerProfile, Profile

from .text import Cell, count, table


def as_text(profile: Profile) -> str:
    """Return a profile as a table of the layers that were called, each with what is inside it."""
    first = (
        f"{count(profile.forwards, 'forward')}: {count(profile.flops, 'FLOP')}, "
        f"{count(profile.activation_bytes, 'byte')} of activations, {_milliseconds(profile.wall_time)} ms; "
        f"the probe took {_milliseconds(profile.probe_time)} ms more"
    )
    columns = ["layer", "type", "calls", "parameters", "activations", "FLOPs", "ms", "time"]
    rows = [_row(name, layer, profile) for name, layer in profile.layers.items()]
    return "\n".join([first, *["", *table(columns, rows, most=len(rows))] * bool(rows)])


def _row(name: str, layer: LayerProfile, profile: Profile) -> list[Cell]:
    share = f"{layer.wall_time / profile.wall_time:.0%}" if profile.wall_time else "-"
    numbers = [layer.calls, layer.parameters, layer.activation_bytes, layer.flops]
    return [name, layer.type, *numbers, _milliseconds(layer.wall_time), share]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.3f}"
