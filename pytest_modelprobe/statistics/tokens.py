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
    """The tokens of a forward, each a sample. They are numbered by request.

    Args:
        of: Which tokens there are. A mask, which is not 0 at tokens. Or the lengths of the requests that are packed in
            one row: a list, or a dict of the number of a request → its length, in the order of the row.

    >>> padded, packed = Tokens(torch.tensor([[1, 1, 0], [1, 1, 1]])), Tokens([2, 3])
    >>> rows = padded.rows(torch.randn(2, 3, 4))
    >>> rows.shape, torch.equal(packed.rows(rows[None]), rows)
    (torch.Size([5, 4]), True)
    >>> bool((packed.hashes((5, 4)) == padded.hashes((5, 4))).all())
    True
    """

    def __init__(self, of: Requests) -> None:
        if isinstance(of, Tensor):
            self._places = {tuple(n for n in of.shape if n > 1): of.flatten().nonzero().flatten().cpu()}
        else:
            lengths = of if isinstance(of, Mapping) else dict(enumerate(of))
            ends = dict(zip(lengths, itertools.accumulate(lengths.values()), strict=True))
            order = [place for row in sorted(lengths) for place in range(ends[row] - lengths[row], ends[row])]
            rows = sorted(range(len(lengths)), key=list(lengths).__getitem__)
            # A value with one place for each request is of its last token, as logits are.
            self._places = {(len(lengths),): torch.tensor(rows), (len(order),): torch.tensor(order)}
        *_, index = self._places.values()
        if not len(index):
            raise UsageError(f"tokens= is a mask or the lengths of requests, with at least one token; got {of!r}")
        super().__init__(torch.from_numpy(hashes(_SALT, len(index)).view("int64")), [len(index)])

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the elements of the tokens, a row for each, if the tensor has a place for each of them."""
        with ambient_modes_disabled():
            plain, reason = as_plain_tensor(tensor)
            for axes in range(1, 1 if reason or plain.is_nested else plain.dim() + 1):
                found = tuple(n for n in plain.shape[:axes] if n > 1)
                for places, index in self._places.items():
                    if found and found in (places, (math.prod(places),)):
                        return plain.flatten(0, axes - 1)[index.to(plain.device)]
        return tensor
