"""The elements of a value by tokens, whatever its layout: a trainer pads requests, and an engine packs them.

With tokens as samples, a fingerprint is the sum over tokens: it is the same in any layout and in any order of requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pytest_modelprobe.exceptions import UsageError

from .fingerprint import Samples, hashes
from .readable import ambient_modes_disabled, as_plain_tensor

Requests = Tensor | Sequence[int] | Mapping[int, int]

_SALT = 8  # chooses the hashes of tokens among the outputs of splitmix64


class Tokens(Samples):
    """The tokens of a forward, each a sample.

    Args:
        of: Which tokens there are. A mask, which is not 0 at tokens. Or how many tokens each request has that is
            packed in one row: a list, or a dict of number of the request → how many, in the order of the row. Tokens
            are numbered by request.

    >>> padded, packed = Tokens(torch.tensor([[1, 1, 0], [1, 1, 1]])), Tokens([2, 3])
    >>> x = torch.randn(2, 3, 4)
    >>> rows = padded.rows(x)
    >>> (
    ...     rows.shape,
    ...     bool((packed.rows(rows[None]) == rows).all()),
    ...     bool((packed.hashes((5,)) == padded.hashes((5,))).all()),
    ... )
    (torch.Size([5, 4]), True, True)
    """

    def __init__(self, of: Requests) -> None:
        if isinstance(of, Tensor):
            self._cells, self._index = list(of.shape), of.flatten().nonzero().flatten().cpu()
        else:
            lengths = of if isinstance(of, Mapping) else dict(enumerate(of))
            ends = dict(zip(lengths, itertools.accumulate(lengths.values()), strict=True))
            order = [i for row in sorted(lengths) for i in range(ends[row] - lengths[row], ends[row])]
            self._cells, self._index = [len(order)], torch.tensor(order, dtype=torch.int64)
        if not len(self._index):
            raise UsageError(f"tokens is a mask or lengths of requests, with a token at least; got {of!r}")
        count = len(self._index)
        super().__init__(torch.from_numpy(hashes(_SALT, count).astype("int64")), [count])

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the elements of the tokens, a row for each, if the tensor has a place for each of them."""
        leading = self._leading(tensor.shape)
        if not leading:
            return tensor
        with ambient_modes_disabled():
            plain, reason = as_plain_tensor(tensor)
            return tensor if reason else plain.flatten(0, leading - 1)[self._index.to(plain.device)]

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of `rows` of a tensor."""
        leading = self._leading(shape)
        return (len(self._index), *shape[leading:]) if leading else tuple(shape)

    def _leading(self, shape: Sequence[int]) -> int:
        """Return how many first axes are those of tokens, or 0."""
        places = [n for n in self._cells if n > 1]
        for axes in range(1, min(len(self._cells) + 1, len(shape)) + 1):
            if [n for n in shape[:axes] if n > 1] in (places, [math.prod(places)]):
                return axes
        return 0
