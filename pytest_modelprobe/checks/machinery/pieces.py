"""Pieces of a sequence that are computed apart: which part of a tensor of the whole belongs to which piece.

Layers flatten rows and positions into one axis, and attention has two axes of positions. Which axes are meant shows in
the tensors of the pieces, which are shorter there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from torch import Tensor

Layout = list[tuple[int, int]]
"""Axes of positions, each with the number of rows that are flattened into the same axis before the positions.

0 stands for an axis that is as long as all positions so far, as in keys, values and attention weights.
"""


@dataclass(frozen=True, slots=True)
class Pieces:
    """A sequence that is cut into pieces of these lengths.

    >>> import torch
    >>> pieces, whole = Pieces((2, 3)), torch.arange(5)
    >>> layouts = pieces.layouts(whole, [whole[:2], whole[2:]])
    >>> layouts, pieces.cut(whole, layouts[0], 1)
    ([[(0, 1)]], tensor([2, 3, 4]))
    """

    sizes: Sequence[int]

    @property
    def length(self) -> int:
        """The length of the whole."""
        return sum(self.sizes)

    @property
    def starts(self) -> list[int]:
        """The first position of each piece."""
        return [0, *accumulate(self.sizes)][:-1]

    def layouts(self, whole: Tensor, parts: Sequence[Tensor]) -> list[Layout]:
        """Return which axes may be those of positions, given the same tensor of each piece; none if it is not known."""
        if any(part.dim() != whole.dim() for part in parts):
            return []
        options: list[list[tuple[int, int]]] = []
        for axis, n in enumerate(whole.shape):
            lengths = [part.shape[axis] for part in parts]
            if all(other == n for other in lengths):
                continue
            if all(other * self.length == n * size for other, size in zip(lengths, self.sizes, strict=True)):
                times = n // self.length
                options.append([(axis, outer) for outer in range(1, times + 1) if times % outer == 0])
            elif n == self.length and lengths == list(accumulate(self.sizes)):
                options.append([(axis, 0)])
            else:
                return []
        return [list(layout) for layout in product(*options)] if options else []

    def cut(self, whole: Tensor, layout: Layout, piece: int) -> Tensor:
        """Return the part of a tensor that belongs to a piece."""
        start, n = self.starts[piece], self.sizes[piece]
        for axis, outer in layout:
            if outer:
                split = whole.unflatten(axis, (outer, self.length, -1))
                whole = split.narrow(axis + 1, start, n).flatten(axis, axis + 2)
            else:
                whole = whole.narrow(axis, 0, start + n)
        return whole
