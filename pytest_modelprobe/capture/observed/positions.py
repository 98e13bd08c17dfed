"""The last position of values: what one forward over a sequence has in common with a step of decoding.

A step of decoding with a cache computes one position, and one forward over the whole sequence computes them all. In a
causal model the values of the last position are the same. So a watch may keep to these, in both, and the records can be
compared. A value is looked at only if its shape says which axis the positions are; the others are left out, with a
note, because a wrong slice would differ without a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from pytest_modelprobe import statistics
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.record import LAST_POSITION
from pytest_modelprobe.text import listed, pattern


class LastPosition:
    """Cuts the last position out of the values of each forward."""

    def __init__(self) -> None:
        self._size: tuple[int, int] | None = None
        """Batch and length of the newest forward."""
        self._cuts = 0
        self._left_out: dict[str, None] = {}

    def notes(self, forwards: int) -> Iterator[str]:
        """Yield what the record of so many forwards has to say.

        Raises:
            UsageError: There was no value with an axis of positions.
        """
        if forwards and not self._cuts:
            raise UsageError(
                'positions="last" found no axis of positions: the first input of the model has to be '
                "(batch, positions) or (batch, positions, features)"
            )
        if forwards:
            left_out = listed(list(self._left_out))
            more = f"; these have no axis of positions that is known, and are left out: {left_out}" if left_out else ""
            yield LAST_POSITION + more

    def begin(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Begin a forward with these inputs, and return what tells its samples apart: the last position of the first.

        The other inputs do not: a mask or the positions are written otherwise in a step of decoding.
        """
        first = next((tensor for tensor in inputs if not tensor.is_nested and tensor.dim() >= 2), None)
        self._size = None if first is None else (first.shape[0], first.shape[1])
        return [] if first is None else [tensor for tensor in [self._cut(first)] if tensor is not None]

    def of(self, layer: str, values: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the last position of each value, with its path. It is detached: a gradient would be of all positions.

        >>> import torch
        >>> last = LastPosition()
        >>> _ = last.begin([torch.zeros(2, 5)])
        >>> values = [("output[0]", torch.zeros(2, 5, 8)), ("output[1]", torch.zeros(2, 3, 5, 5))]
        >>> [(path, *tensor.shape) for path, tensor in last.of("h.0", values)]
        [('output[0]', 2, 1, 8)]
        """
        for path, tensor in values:
            with statistics.ambient_modes_disabled():
                cut = self._cut(tensor)
            if cut is None:
                self._left_out[f"{path} of {pattern(layer)}"] = None
            else:
                self._cuts += 1
                yield path, cut

    def _cut(self, tensor: Tensor) -> Tensor | None:
        if self._size is None or tensor.is_nested or tensor.dim() < 2:
            return None
        (batch, length), shape = self._size, tensor.shape
        # Heads may be as many as positions are. Then nobody knows which of the two axes is which.
        if shape[0] not in (1, batch) or shape[1] != length or (len(shape) > 3 and shape[2] == length):
            return None
        return tensor.detach().narrow(1, length - 1, 1)
