"""Which rank of a distributed run this process is: rank 0 alone compares and writes, and merged records alone.

torch is not imported for it: a process group of one that is not loaded does not exist.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple


class Place(NamedTuple):
    """A process among the ranks of a run."""

    rank: int
    """From 0."""
    world_size: int
    """1 outside a distributed run."""


def this_rank() -> Place:
    """Return the rank of this process in its process group, else the one that ``torchrun`` gave it.

    >>> this_rank()
    Place(rank=0, world_size=1)
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Place(distributed.get_rank(), distributed.get_world_size())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return Place(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    return Place(0, 1)
