"""The compiled module that computes the numbers of tensors. Without it, torch and numpy compute the same numbers.

It is compiled when the package is built, if there is a compiler. ``MODELPROBE_KERNEL=torch`` leaves it aside, and
``MODELPROBE_KERNEL=compiled`` makes it an error if it is missing. To say which code computes needs no torch, so this
room stands alone.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Protocol, cast

from .exceptions import ModelProbeError

VARIABLE = "MODELPROBE_KERNEL"


class Compiled(Protocol):
    """The module `_kernel`, made of ``statistics/kernel/kernel.c``."""

    LEVELS: tuple[str, ...]
    """Instruction sets, the best last: it is the one that is used."""

    def choose(self, level: str, /) -> None:
        """Use another instruction set: the numbers stay the same."""

    def set_tables(self, masks: bytes, lanes: bytes, orders: bytes, /) -> None:
        """Set the signs and orders of the fingerprint, int8: shapes (8, 256), (16, 16) and (256, 16)."""

    def set_team(self, address: int, /) -> None:
        """Set the address of ``GOMP_parallel``, by which several threads work, or 0 for one thread."""

    def reduce(
        self,
        address: int,
        kind: int,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        axis: int | None,
        index: float,
        hashes: Any,
        threads: int,
        histogram: bool = False,
        /,
    ) -> bytes | None:
        """Return the numbers of a tensor, its histogram, the ranges of its units, and its fingerprint.

        See `statistics.operations.PackedReduction`. Returns ``None`` if float64 does not hold the squares.

        Args:
            address: Of the first element.
            kind: Index of the type in float32, float64, float16, bfloat16.
            sizes: Shape of the tensor.
            strides: In elements.
            axis: Axis of the units, counted from the end.
            index: Number of the forward.
            hashes: A buffer with one uint64 for each sample, or None for no fingerprint.
            threads: How many threads of the team may work.
            histogram: Whether to count elements in bins, int64.
        """

    def merge(self, a: bytes, b: bytes, /) -> bytes | None:
        """Return the numbers of both sets of elements together; ``None`` if one has numbers that the other lacks."""


def _load() -> Compiled | None:
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "torch", "compiled"):
        raise ModelProbeError(f"{VARIABLE}={asked}: it is 'torch' or 'compiled', or not set")
    if asked == "torch":
        return None
    try:
        return cast(Compiled, importlib.import_module(f"{__package__}._kernel"))
    except ImportError as error:
        if asked == "compiled":
            raise ModelProbeError(f"{VARIABLE}=compiled: there is no compiled module ({error})") from None
        return None


active = _load()
"""The compiled module; ``None`` if torch and numpy compute."""


def description() -> str:
    """Return in words which code computes the numbers of tensors on the CPU.

    >>> description().split()[0] in ("compiled", "torch")
    True
    """
    if active is not None:
        return f"compiled ({active.LEVELS[-1]})"
    return f"torch ({VARIABLE}=torch)" if os.environ.get(VARIABLE) == "torch" else "torch (no compiled module)"
