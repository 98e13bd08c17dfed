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
        of: Which tokens there are. A mask, which is 1 at tokens and 0 elsewhere. Or the lengths of the requests that
            are packed in one row: a list, or a dict of the number of a request → its length, in the order of the row.

    >>> padded, packed = Tokens(torch.tensor([[1, 1, 0], [1, 1, 1]])), Tokens([2, 3])
    >>> rows = padded.rows(torch.randn(2, 3, 4))
    >>> rows.shape, torch.equal(packed.rows(rows[None]), rows)
    (torch.Size([5, 4]), True)
    >>> bool((packed.hashes((5, 4)) == padded.hashes((5, 4))).all())
    True
    """

    def __init__(self, of: Requests) -> None:
        if not _are_tokens(of):
            raise UsageError(
                "tokens= is a mask of 1 at tokens and 0 elsewhere, or the lengths of requests: a list of integers, or "
                f"a dict of number → length, with at least one token; got {of!r}"
            )
        if isinstance(of, Tensor):
            mask = of.squeeze().cpu() != 0
            turned = torch.arange(mask.numel(), device="cpu").reshape(mask.shape[::-1])
            self._places = {tuple(mask.shape): mask.flatten().nonzero().flatten()}  # Megatron has the batch second:
            self._places.setdefault(tuple(turned.shape), turned.permute(*range(mask.dim())[::-1])[mask])
        else:
            lengths = of if isinstance(of, Mapping) else dict(enumerate(of))
            ends = dict(zip(lengths, itertools.accumulate(lengths.values()), strict=True))
            order = [place for row in sorted(lengths) for place in range(ends[row] - lengths[row], ends[row])]
            rows = sorted(range(len(lengths)), key=list(lengths).__getitem__)
            # A value with one place for each request is of its last token, as logits are.
            self._places = {(len(lengths),): torch.tensor(rows), (len(order),): torch.tensor(order)}
        *_, index = self._places.values()
        self._count, self._first_shape = len(index), tuple[int, ...]()
        self._is_placed = self._count == 1  # any value may be that of the only token
        super().__init__(torch.from_numpy(hashes(_SALT, len(index)).view("int64")), [len(index)])

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the elements of the tokens, a row for each, if the tensor has a place for each of them."""
        with ambient_modes_disabled():
            plain, reason = as_plain_tensor(tensor)
            for axes in range(1, 1 if reason or plain.is_nested else plain.dim() + 1):
                found = tuple(n for n in plain.shape[:axes] if n > 1)
                for places, index in self._places.items():
                    if found and found in (places, (math.prod(places),)):
                        # Integers with a place for each request are a table, as of a cache.
                        self._is_placed |= len(index) == self._count or plain.is_floating_point()
                        return plain.flatten(0, axes - 1)[index.to(plain.device)]
            self._first_shape = self._first_shape or (() if reason else tuple(plain.shape))
        return tensor

    def check(self) -> None:
        """Raise `UsageError` if no value that was read has a place for each token: none would be compared by token."""
        if self._first_shape and not self._is_placed:
            raise UsageError(
                f"tokens= says {self._count} tokens, and no value of the model has a place for each: the first is of "
                f"shape {self._first_shape}; a mask has the shape of the padded batch, and lengths add up to the "
                "packed row"
            )


def _are_tokens(of: object) -> bool:
    """Whether that says which tokens there are. A mask that is added has 0 at tokens, and lengths are no mask."""
    if isinstance(of, Tensor):
        return bool(((of == 0) | (of == 1)).all() and of.any())
    if not isinstance(of, Sequence | Mapping):
        return False
    lengths = [*of.values()] if isinstance(of, Mapping) else [*of]
    return all(isinstance(n, int) and n >= 0 for n in (*of, *lengths)) and any(lengths)
