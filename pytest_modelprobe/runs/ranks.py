"""Exchange the records of all ranks through the store of their process group, without a collective.

Each of the first ranks merges some layers of all records, so that the time of a rank does not grow with the number of
ranks times layers.
"""

from __future__ import annotations

import datetime
import itertools
import json
import zlib
from collections.abc import Iterable
from typing import Any

from pytest_modelprobe._torch import default_store
from pytest_modelprobe.record import Record, parts, process_group, this_rank

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
    exchange, numbers = _Exchange(timeout), range(min(mine.world_size, parts.MOST_PARTS))
    for number, part in enumerate(parts.split(record, len(numbers))):
        exchange.give(f"{mine.rank}/{number}", part)
    if mine.rank in numbers:
        of_ranks = exchange.take(f"{other}/{mine.rank}" for other in range(mine.world_size))
        exchange.give(f"merged/{mine.rank}", parts.merge_part(of_ranks, mean_loss=mean_loss))
    return parts.merged_of(exchange.take(f"merged/{number}" for number in numbers))


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
