"""Which rank of a distributed run this process is.

torch is not imported for the answer: if `torch.distributed` is not loaded, there is no process group.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple


class Rank(NamedTuple):
    """A process among all processes of a run."""

    rank: int
    """Its number, from 0."""
    world_size: int
    """The number of processes: 1 outside a distributed run."""


def this_rank() -> Rank:
    """Return the rank of this process in its process group. Without a group a process stands alone.

    >>> this_rank()
    Rank(rank=0, world_size=1)
    """
    distributed = process_group()
    return Rank(0, 1) if distributed is None else Rank(distributed.get_rank(), distributed.get_world_size())


def writing_rank() -> Rank:
    """Return the rank of this process for what writes files: without a group, the one that ``torchrun`` gave it.

    Processes that ``torchrun`` started may write before their group is there. Anything can set the variables that say
    so, and thus no verdict depends on them.
    """
    if process_group() is None and "TORCHELASTIC_RUN_ID" in os.environ:
        return Rank(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    return this_rank()


def process_group() -> Any:
    """Return `torch.distributed` if the default process group is initialized, else `None`."""
    distributed = sys.modules.get("torch.distributed")
    there = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if there else None
