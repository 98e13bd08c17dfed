"""Merging in parts: each rank merges some layers of all records.

If every rank merged all records whole, its work would grow with ranks times layers: at 1,024 ranks it took two minutes
for 59 layers. So a hash of a layer's name says which rank merges it, and each rank reads what the others merged.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

from pytest_modelprobe.record import Layer, Record

from .merging import Merged, assembled, merge_layers

MOST_PARTS = 64


def split(record: Record, parts: int) -> list[dict[str, Any]]:
    """Return the record of a rank in parts, as plain data. A part has the same layers in every rank.

    >>> [list(part["places"]) for part in split(Record(model="Net", layers={"fc": Layer(name="fc", type="Linear")}), 1)]
    [['fc']]
    """
    places: list[dict[str, int]] = [{} for _ in range(parts)]
    for place, name in enumerate(record.layers):
        # Not `hash`, which differs between processes.
        places[zlib.crc32(name.encode()) % parts][name] = place
    given = _input_of_model(record)
    return [
        {
            "places": some,
            "record": dataclasses.replace(
                record, layers=given | {name: record.layers[name] for name in some}, profile=None
            ).to_dict(),
        }
        for some in places
    ]


def merge_part(of_ranks: Sequence[dict[str, Any]], *, mean_loss: bool) -> dict[str, Any]:
    """Return one part of all ranks, merged, as plain data.

    Args:
        of_ranks: The same part of each rank, in the order of ranks.
        mean_loss: See `Record.merge`.
    """
    first: dict[str, tuple[int, int]] = {}
    for rank, part in enumerate(of_ranks):
        for name, place in part["places"].items():
            first.setdefault(name, (rank, place))
    # The order that merging whole records gives: the layers of the first rank, then those that only later ranks have.
    # With the rank in the upper bits, one number sorts by rank and then by place.
    places = {name: rank << 32 | place for name, (rank, place) in first.items()}
    merged = merge_layers([Record.from_dict(part["record"]) for part in of_ranks], places, mean_loss=mean_loss)
    return {
        "places": places,
        "record": merged.record.to_dict(),
        "problem": merged.problem,
        "nonfinite": merged.nonfinite,
    }


def merged_of(parts: Sequence[dict[str, Any]]) -> Record:
    """Return the record of all layers, given its merged parts.

    Raises:
        AssertionError: Ranks disagree; it names the first layer.
        UsageError: The records cannot be merged.
    """
    places: dict[str, int] = {name: place for part in parts for name, place in part["places"].items()}
    record = assembled(
        [
            Merged(
                Record.from_dict(part["record"]),
                None if part["problem"] is None else tuple(part["problem"]),
                tuple((place, text) for place, text in part["nonfinite"]),
            )
            for part in parts
        ]
    )
    layers = {name: record.layers[name] for name in sorted(places, key=places.__getitem__)}
    return dataclasses.replace(record, layers=layers)


def _input_of_model(record: Record) -> dict[str, Layer]:
    """Return the outermost layer with nothing but the model's input, which every part needs to know the batch."""
    for layer, call in record.calls:
        if call.root == layer.name:
            given = dataclasses.replace(call, outputs=())
            return {layer.name: dataclasses.replace(layer, parameters=(), buffers=(), calls=(given,))}
    return {}
