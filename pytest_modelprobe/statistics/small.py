"""Small tensors: they are copied when they are seen, and reduced many at a time.

For a tensor of some thousand elements the calls cost more than the elements. So a hook only copies it. All copies of
one size are reduced by the same calls, as the rows of a matrix. That happens when a number is needed, or when there are
`_MOST` elements or `_COPIES` copies. The result of a tensor does not depend on the others in the batch, bit for bit.
The compiled kernel needs none of this. It is for tensors that torch has to reduce.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading

import numpy as np
import torch

from .cpu import on_cpu
from .fingerprint import project, project_rows
from .histogram import count_rows
from .readable import ambient_modes_disabled
from .reduced import Array, Reduced, row_of_finite
from .samples import WHOLE, Samples
from .signs import K

SMALL = 1 << 13  # elements up to which a tensor is small
_MOST = 1 << 18  # elements that wait at most, and the number of copies: limits of the memory that copies take
_COPIES = 1 << 12
_HUGE = 1e150  # from here on, float64 may not hold the squares of elements, or their sum
_layout_of = operator.itemgetter(2)

_Layout = tuple[int, int, int]
"""Elements before, on and after the axis of the units."""
_Form = tuple[int, bool, bool]
"""The size, whether with a fingerprint, and whether with a histogram. Tensors of one form are reduced together."""
_Copy = tuple[Reduced, Array, _Layout, int, Samples, _Form]


class SmallTensors:
    """Copies of tensors that are reduced together, later. Several threads may add to it.

    >>> small = SmallTensors()
    >>> ones, twos = (small.add(np.full((3, 4), n, np.float32), -1) for n in (1, 2))
    >>> small.flush()
    >>> ones.row == row_of_finite(12, 0, 1.0, 1.0, 1.0, 0.0), twos.low.tolist()
    (True, [2.0, 2.0, 2.0, 2.0])
    """

    def __init__(self) -> None:
        self._waiting: list[_Copy] = []
        self._elements = 0
        self._lock = threading.Lock()

    def add(
        self,
        values: Array,
        axis: int | None,
        index: int = 0,
        samples: Samples = WHOLE,
        fingerprint: bool = True,
        histogram: bool = False,
    ) -> Reduced:
        """Return a placeholder that `flush` fills.

        The array has at least one element, of a floating dtype. It is kept, so it must not be changed afterwards.
        """
        size = values.size
        if axis is None or -axis > values.ndim:
            axis, layout = None, (1, 1, size)
        else:
            shape, unit = values.shape, values.ndim + axis
            layout = math.prod(shape[:unit]), shape[unit], math.prod(shape[unit + 1 :])
        reduced = Reduced(axis=axis, pending=self)
        self._waiting.append((reduced, values, layout, index, samples, (size, fingerprint, histogram)))
        self._elements += size
        if self._elements > _MOST or len(self._waiting) > _COPIES:
            self.flush()
        return reduced

    def flush(self) -> None:
        """Reduce all copies. After an interrupt the next call does it."""
        # The copies are taken off the list only once they are reduced, so that an interrupt loses none.
        with self._lock, np.errstate(all="ignore"), ambient_modes_disabled():
            waiting = self._waiting[:]
            groups: dict[_Form, list[_Copy]] = {}
            for copy in waiting:
                groups.setdefault(copy[-1], []).append(copy)
            for form, copies in groups.items():
                _reduce(copies, *form)
            del self._waiting[: len(waiting)]
            self._elements = 0


def _samples_and_layout(copy: _Copy) -> tuple[int, _Layout]:
    _, values, layout, _, samples, _ = copy
    return len(samples.hashes(values.shape)), layout


def _reduce(copies: list[_Copy], count: int, fingerprint: bool, histogram: bool) -> None:
    copies.sort(key=_samples_and_layout)
    x = np.concatenate([values for _, values, *_ in copies], axis=None, dtype=np.float64).reshape(-1, count)
    low: list[Array] = []  # of the units of each tensor
    high: list[Array] = []
    ends: list[tuple[Array, Array]] = []
    for layout, alike in itertools.groupby(map(_layout_of, copies)):
        lows, highs = _ranges(x[len(low) : len(low) + len(list(alike))].reshape(-1, *layout))
        low.extend(lows)
        high.extend(highs)
        ends.append((lows.min(axis=1), highs.max(axis=1)))
    bottom, top = map(np.concatenate, zip(*ends, strict=True))
    mean = np.where(bottom == top, bottom, np.add.reduce(x, axis=1) / count)
    certain = np.isfinite(mean) & (np.maximum(-bottom, top) < _HUGE)
    zeros = count - np.count_nonzero(x, axis=1)
    numbers = _projected(x, [of.hashes(values.shape) for _, values, _, _, of, _ in copies]) if fingerprint else None
    counts = count_rows(torch.from_numpy(x)) if histogram else None
    x = x - mean[:, None]  # not in place, as the ranges may be views of x
    deviations = np.einsum("kn,kn->k", x, x)
    rows = zip(*(column.tolist() for column in (certain, zeros, bottom, top, mean, deviations)), strict=True)
    for i, ((reduced, values, _, index, of, _), (sure, *row)) in enumerate(zip(copies, rows, strict=True)):
        if sure:
            reduced.row = row_of_finite(count, *row)
            if reduced.axis is not None:
                reduced.low, reduced.high = low[i].copy(), high[i].copy()  # a view would keep the ranges of all alive
            reduced.fingerprint = None if numbers is None else numbers[i].copy()
        else:  # an element is huge or not finite, so the tensor is reduced alone, in float64 throughout
            tensor = torch.from_numpy(values)
            careful = on_cpu(tensor, reduced.axis, index)
            reduced.row, reduced.low, reduced.high = careful.row, careful.low, careful.high
            reduced.fingerprint = project(tensor, of) if fingerprint else None
        reduced.histogram = None if counts is None else counts[i].clone()
        reduced.pending = None


def _projected(x: Array, hashes: list[Array]) -> Array:
    """Return the fingerprint of each row, given the hashes of its samples.

    Rows with the same number of samples are next to each other.
    """
    numbers = np.empty((len(x), K))
    end = 0
    for _, group in itertools.groupby(hashes, key=len):
        alike = list(group)
        start, end = end, end + len(alike)
        numbers[start:end] = project_rows(x[start:end], np.stack(alike))
    return numbers


def _ranges(x: Array) -> tuple[Array, Array]:
    """Return the range of each unit of an array of shape (tensors, outer, units, inner).

    It takes one axis at a time, because both at once take longer.
    """
    low, high = (x.min(axis=1), x.max(axis=1)) if x.shape[1] > 1 else (x[:, 0], x[:, 0])
    return (low.min(axis=2), high.max(axis=2)) if x.shape[3] > 1 else (low[:, :, 0], high[:, :, 0])
