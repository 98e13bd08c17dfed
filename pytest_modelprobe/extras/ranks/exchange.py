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
from pytest_modelprobe.probe import ModelProbe, Watch
from pytest_modelprobe.record import Record, process_group, this_rank

from . import parts

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
