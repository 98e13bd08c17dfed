"""Exchange the records of all ranks through the store of their process group, without a collective.

The first rank merges them, and every rank reads what it merged.
"""

from __future__ import annotations

import datetime
import itertools
import json
import zlib
from typing import Any

from pytest_modelprobe._torch import default_store
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.probe import ModelProbe, Watch
from pytest_modelprobe.record import Record, process_group, this_rank

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
    exchange = _Exchange(timeout)
    exchange.give(str(mine.rank), record.to_dict())
    if not mine.rank:
        records = [Record.from_dict(exchange.take(str(other))) for other in range(mine.world_size)]
        try:
            found: dict[str, Any] = {"record": Record.merge(records, mean_loss=mean_loss).to_dict()}
        except (AssertionError, UsageError) as error:  # every rank raises it
            found = {type(error).__name__: str(error)}
        exchange.give("merged", found)
    found = exchange.take("merged")
    for kind in (UsageError, AssertionError):
        if kind.__name__ in found:
            raise kind(found[kind.__name__])
    return Record.from_dict(found["record"])


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

    def take(self, name: str) -> dict[str, Any]:
        """Return the data under a name, once it is there."""
        self._store.wait([self._key(name)], self._timeout)
        data: dict[str, Any] = json.loads(zlib.decompress(self._store.get(self._key(name))))
        return data

    def _key(self, name: str) -> str:
        return f"modelprobe/{self._turn}/{name}"
