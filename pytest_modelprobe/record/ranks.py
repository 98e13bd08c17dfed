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
    """Return the rank of this process in its process group, else the one that ``torchrun`` gave it.

    >>> this_rank()
    Rank(rank=0, world_size=1)
    """
    distributed = process_group()
    if distributed is not None:
        return Rank(distributed.get_rank(), distributed.get_world_size())
    # torchrun sets this. A process that it started may ask before its process group is there.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return Rank(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    return Rank(0, 1)


def process_group() -> Any:
    """Return `torch.distributed` if the default process group is initialized, else `None`."""
    distributed = sys.modules.get("torch.distributed")
    there = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if there else None
