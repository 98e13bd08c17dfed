"""Exchange the records of all ranks through the store of their process group, without a collective."""

from __future__ import annotations

import datetime
import itertools
import json
import zlib

from pytest_modelprobe._torch import default_store
from pytest_modelprobe.record import Record, process_group, this_rank

_turns = itertools.count()
"""Numbers the exchanges of this process: every rank makes the same ones, in the same order."""


def merged(record: Record, *, mean_loss: bool = True, timeout: float = 60) -> Record:
    """Return the records of all ranks as one; each rank has to call it.

    Args:
        record: Of this rank.
        mean_loss: See `Record.merge`.
        timeout: Seconds to wait for the other ranks.
    """
    mine = this_rank()
    if process_group() is None or mine.world_size == 1:
        return Record.merge([record], mean_loss=mean_loss)
    turn, store = next(_turns), default_store()
    store.set(_key(turn, mine.rank), zlib.compress(json.dumps(record.to_dict()).encode()))
    keys = [_key(turn, other) for other in range(mine.world_size)]
    store.wait(keys, datetime.timedelta(seconds=timeout))
    records = [Record.from_dict(json.loads(zlib.decompress(store.get(key)))) for key in keys]
    return Record.merge(records, mean_loss=mean_loss)


def _key(turn: int, number: int) -> str:
    return f"modelprobe/{turn}/{number}"
