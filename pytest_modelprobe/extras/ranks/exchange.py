"""Exchange the records of all ranks through the store of their process group, without a collective.

Each of the first ranks merges some layers of all records, so that the time of a rank does not grow with the number of
ranks times layers.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from pytest_modelprobe._torch import default_store
from pytest_modelprobe.probe import ModelProbe, Watch
from pytest_modelprobe.record import Layer, Record, process_group, this_rank

from .merging import Merged, assembled, merge_layers

# --- parts, of which each rank merges some ----------------------------------------------------------------------------

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


_turns = itertools.count()
"""Numbers the exchanges of this process. Every rank makes the same ones in the same order, so the numbers agree."""


def merged(record: Record, *, mean_loss: bool = True, timeout: float = 60) -> Record:
    """Return the records of all ranks as one. Each rank has to call it.

    Args:
        record: The record of this rank.
        mean_loss: See `Record.merge`.
        timeout: Seconds to wait for the other ranks.
    """
    mine = this_rank()
    if process_group() is None or mine.world_size == 1:
        return Record.merge([record], mean_loss=mean_loss)
    exchange, numbers = _Exchange(timeout), range(min(mine.world_size, MOST_PARTS))
    for number, part in enumerate(split(record, len(numbers))):
        exchange.give(f"{mine.rank}/{number}", part)
    if mine.rank in numbers:
        of_ranks = exchange.take(f"{other}/{mine.rank}" for other in range(mine.world_size))
        exchange.give(f"merged/{mine.rank}", merge_part(of_ranks, mean_loss=mean_loss))
    return merged_of(exchange.take(f"merged/{number}" for number in numbers))


def merged_by_probe(probe: ModelProbe, subject: Watch | Record, /, *, mean_loss: bool = True) -> Record:
    """Return one record of what all ranks did, as one process would have made it of the whole batch.

    Every rank has to call it; each returns the same. The records go through the store of the process group, and no
    collective is called. Without a process group, or in one of one rank, it is the record alone, made alike.

    Args:
        subject: A watch: its first step, or all forwards where no optimizer stepped. Or a record of this rank.
        mean_loss: Whether each rank's loss is a mean over its part of the batch; False: a sum.

    Raises:
        AssertionError: Ranks disagree on what they should have in common; names the layer and the rank.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> probe = ModelProbe()
    >>> probe.merged(probe.run(nn.Linear(4, 2), probe.randn(3, 4))).ranks
    1
    """
    if isinstance(subject, Watch):
        subject = subject.first_step if len(subject.steps) else subject.record
    return merged(subject, mean_loss=mean_loss)


class _Exchange:
    """Plain data that ranks leave in the store for each other."""

    def __init__(self, timeout: float) -> None:
        self._store = default_store()
        self._turn = next(_turns)
        self._timeout = datetime.timedelta(seconds=timeout)

    def give(self, name: str, data: dict[str, Any]) -> None:
        """Leave something under a name."""
        self._store.set(self._key(name), zlib.compress(json.dumps(data).encode()))

    def take(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Return the data under these names, once all are there."""
        keys = [self._key(name) for name in names]
        self._store.wait(keys, self._timeout)
        return [json.loads(zlib.decompress(self._store.get(key))) for key in keys]

    def _key(self, name: str) -> str:
        return f"modelprobe/{self._turn}/{name}"
