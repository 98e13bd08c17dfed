"""Where a value has the batch: told from the shape of what the model was given."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable


def batch_sizes(size: int, inner: Iterable[int]) -> frozenset[int]:
    """Return the sizes of dimension 0 of values that have the batch there, alone or flattened with what comes next.

    A batch of one sample cannot be told from what else is flattened.

    Args:
        size: Samples in the batch.
        inner: The other dimensions of the first input of the model.

    >>> sorted(batch_sizes(8, (32,))), sorted(batch_sizes(1, (32,)))
    ([8, 256], [1])
    """
    return frozenset(itertools.accumulate(inner, operator.mul, initial=size) if size > 1 else [size])
