"""Statistics of tensors: reduced on the tensor's device, read when the record is made.

Hooks call `reduce`. On the CPU it returns plain numbers.
On another device it returns a small tensor that stays there: no element is read, so the model does not wait for it.
`merge` merges two reductions in the same manner, and `collect` reads any number of them with one transfer per device.

A tensor is read once, because on the CPU the price of a watch is the number of passes over the memory. The compiled
kernel does so. Torch's own operations, which need several passes, compute the same numbers where it is missing and on
other devices, and are what it is tested against.

Moments are accurate to 1e-6 of the root mean square. A float32 `dot` over 256 k elements of one magnitude is off by
5e-5, so squares are added 1,024 at a time. If the mean dominates, squares of the differences from it are taken.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytest_modelprobe._torch import function_modes
from pytest_modelprobe.models import as_array, together
from pytest_modelprobe.record import Reading, Statistics, Units

from .fingerprint import WHOLE, Array, Samples, SeenSamples, read, samples_of, sum_of_hashes, turned, turned_on_device
from .operations import (
    NO_ELEMENT,
    PackedReduction,
    Reduced,
    Reduction,
    by_kernel,
    by_kernel_merged,
    by_torch,
    fetch,
    from_counts,
    merged_row,
    merged_rows,
    on_cpu,
)
from .readable import ABSTRACT, ambient_modes_disabled, as_plain_tensor, is_expanded
from .tokens import Requests, Tokens

__all__ = [
    "ABSTRACT",
    "NO_ELEMENT",
    "WHOLE",
    "Reduced",
    "Reduction",
    "Samples",
    "SeenSamples",
    "collect",
    "fetch",
    "merge",
    "as_plain_tensor",
    "ambient_modes_disabled",
    "reduce",
    "samples_of",
    "Requests",
    "Tokens",
    "sum_of_hashes",
    "with_signs_of",
]


def reduce(
    tensor: Tensor,
    *,
    axis: int | None = None,
    index: int = 0,
    samples: Samples = WHOLE,
    fingerprint: bool = True,
    histogram: bool = False,
) -> Reduction:
    """Return the reduction of a tensor, or the reason why it cannot be read.

    Of a `DTensor` the local shard is reduced, and of complex elements their magnitudes.

    Args:
        tensor: Any tensor. It and every global state stay as they are.
        axis: Axis of the units, counted from the end (-1 is the last), or `None` for no units.
        index: Number of the forward, from 0, for `Statistics.first_nan` and the like.
        samples: The samples of the forward. If the tensor has the batch, its fingerprint is the sum over its samples.
        fingerprint: Whether to compute the fingerprint too.
        histogram: Whether to count the elements in bins too.

    >>> (reading,) = collect([reduce(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), axis=-1)])
    >>> reading.statistics.mean, reading.statistics.zeros, reading.units.dead
    (1.0, 2, 1)
    >>> reduce(torch.empty(3, device="meta")).reason
    'meta tensor'
    """
    tensor = samples.rows(tensor)
    if not function_modes():  # these see even attributes of tensors; no other mode sees what `by_kernel` does
        by_one_read = by_kernel(tensor, axis, index, samples if fingerprint else None, histogram)
        if by_one_read is not None:
            return by_one_read
    with ambient_modes_disabled():
        plain, reason = as_plain_tensor(tensor)
        if reason is not None:
            return Reduced(reason=reason)
        if is_expanded(plain):  # what depends on the place of an element would be read one by one, and never end
            axis, fingerprint = None, False
            reason = "expanded to very many elements: counted, without a fingerprint"
        by_one_read = by_kernel(plain, axis, index, samples if fingerprint else None, histogram)
        if by_one_read is not None:
            return by_one_read
        if samples is WHOLE and axis is None and fingerprint and not histogram and _is_counter(plain):
            return copy.copy(_reduced_counter(plain.shape, int(plain)))
        reduced = by_torch(plain, axis, index, samples, fingerprint, histogram)
        reduced.reason = reduced.reason or reason
        return on_cpu(reduced, plain) if plain.is_cpu else reduced


def _is_counter(tensor: Tensor) -> bool:
    """Whether a tensor is one integer, as each norm counts its batches: torch takes a millisecond to reduce it."""
    return tensor.is_cpu and tensor.dtype == torch.int64 and tensor.numel() == 1


@functools.lru_cache(1024)
def _reduced_counter(shape: torch.Size, value: int) -> Reduced:
    counter = torch.full(shape, value, device="cpu")
    return on_cpu(by_torch(counter, None, 0), counter)


def merge(a: Reduction, b: Reduction) -> Reduction:
    """Return the reduction of both sets of elements together. Nothing is read from a device.

    If one of the tensors cannot be read, the result has no numbers. If that one has no elements at all, as on the
    ``meta`` device, the result is the other one; see `ABSTRACT`.

    >>> (both,) = collect([merge(reduce(torch.zeros(2)), reduce(torch.ones(2)))])
    >>> both.tensors, both.statistics.mean, both.statistics.std
    (2, 0.5, 0.5)
    """
    packed = by_kernel_merged(a, b)
    return _merged(a.computed(), b.computed()) if packed is None else packed


def _merged(a: Reduced, b: Reduced) -> Reduced:
    if (a.reason in ABSTRACT) != (b.reason in ABSTRACT):
        return b if a.reason in ABSTRACT else a
    merged = Reduced(a.tensors + b.tensors, reason=a.reason or b.reason)
    on_cpu = a.rows is None and b.rows is None
    if a.row is not None and b.row is not None:
        merged.row = merged_row(a.row, b.row)
    elif on_cpu or not (_has_numbers(a) and _has_numbers(b)):
        return merged
    else:
        merged.row = a.row or b.row
    if a.histogram is not None and b.histogram is not None:
        with ambient_modes_disabled():
            merged.histogram = torch.add(*together(a.histogram, b.histogram))
    if on_cpu:
        _merge_units(merged, a, b)
        if a.fingerprint is not None and b.fingerprint is not None and len(a.fingerprint) == len(b.fingerprint):
            merged.fingerprint = a.fingerprint + b.fingerprint
        return merged
    with ambient_modes_disabled():
        merged.rows = b.rows if a.rows is None else a.rows
        if a.rows is not None and b.rows is not None:
            rows = torch.cat(together(a.rows, b.rows))
            # A device without float64 keeps all rows for the CPU: sums in float32 would lose digits at each merge.
            merged.rows = merged_rows(rows) if rows.dtype == torch.float64 else rows
        _merge_units(merged, a, b)
        size = _size_of_fingerprint(a)
        if size is None or size != _size_of_fingerprint(b):
            return merged  # one has none, or one is of integers and the other is not
        if a.fingerprint is not None and b.fingerprint is not None:
            merged.fingerprint = a.fingerprint + b.fingerprint
        else:
            merged.fingerprint = a.fingerprint if b.fingerprint is None else b.fingerprint
        remote = [one.remote_fingerprint for one in (a, b) if one.remote_fingerprint is not None]
        if remote:
            merged.remote_fingerprint = remote[0] if len(remote) == 1 else torch.add(*together(*remote))
    return merged


def with_signs_of(number: int, one: Reduction) -> Reduction:
    """Return a reduction whose fingerprint has other signs, to be merged with those of other forwards.

    Args:
        number: Chooses the signs. 0 leaves them as they are.
        one: A reduction with the signs that every forward begins with.

    >>> once = reduce(torch.tensor([1.0, 2.0]))
    >>> (twice,) = collect([merge(once, with_signs_of(1, once))])
    >>> f"{math.hypot(*twice.fingerprint) / math.hypot(*collect([once])[0].fingerprint):.1f}"
    '1.1'
    """
    if not number:
        return one
    if isinstance(one, PackedReduction):
        return one.with_fingerprint(turned(one.fingerprint, number)) if one.has_fingerprint else one
    found = replace(one.computed())
    if found.fingerprint is not None:
        found.fingerprint = turned(found.fingerprint, number)
    if found.remote_fingerprint is not None:
        with ambient_modes_disabled():
            found.remote_fingerprint = turned_on_device(found.remote_fingerprint, number)
    return found


def collect(reduced: Sequence[Reduction]) -> list[Reading]:
    """Return the readings of reductions in plain numbers, with one transfer for each device.

    >>> ones, zeros = collect([reduce(torch.ones(2)), reduce(torch.zeros(2))])
    >>> ones.statistics.max, zeros.statistics.max
    (1.0, 0.0)
    """
    computed = [one.computed() for one in reduced]
    remote = [
        t
        for r in computed
        if r.rows is not None or r.histogram is not None  # a reduction on a device always has rows
        for t in (r.rows, r.low, r.high, r.remote_fingerprint, r.histogram)
        if isinstance(t, Tensor) and not (t is r.histogram and t.is_cpu)
    ]
    with ambient_modes_disabled():
        numbers = fetch(remote)

    def plain(value: Array | Tensor) -> Array:
        return numbers[id(value)] if isinstance(value, Tensor) else value

    readings = []
    for one in computed:
        row = one.row
        for part in () if one.rows is None else map(tuple, plain(one.rows).reshape(-1, len(NO_ELEMENT)).tolist()):
            row = part if row is None else merged_row(row, part)
        statistics = None if row is None else _statistics(row)
        units = None
        if statistics and statistics.count and one.axis is not None and one.low is not None and one.high is not None:
            units = Units(axis=one.axis, low=_plain_numbers(plain(one.low)), high=_plain_numbers(plain(one.high)))
        histogram = None
        if one.histogram is not None:  # the counts of other devices were fetched, as floats
            counts = numbers.get(id(one.histogram))
            histogram = from_counts(as_array(one.histogram) if counts is None else counts.astype(np.int64))
        fingerprint, digest = None, None
        numbers_of_all = one.fingerprint
        if one.remote_fingerprint is not None:
            there = plain(one.remote_fingerprint)
            numbers_of_all = there if numbers_of_all is None else numbers_of_all + there
        if numbers_of_all is not None:
            fingerprint, digest = read(numbers_of_all)
        readings.append(
            Reading(
                tensors=one.tensors,
                statistics=statistics,
                units=units,
                fingerprint=fingerprint,
                digest=digest,
                reason=one.reason,
                histogram=histogram,
            )
        )
    return readings


def _statistics(row: Sequence[float]) -> Statistics:
    finite, nan, posinf, neginf, zeros, first_nan, first_posinf, first_neginf, low, high, mean, deviations = row
    # Adding 0 makes a negative zero positive: which of the two zeros a range has depends on the order of the elements.
    return Statistics(
        count=int(finite + nan + posinf + neginf),
        nan=int(nan),
        posinf=int(posinf),
        neginf=int(neginf),
        zeros=int(zeros),
        min=low + 0 if finite else None,
        max=high + 0 if finite else None,
        mean=mean + 0 if finite else None,
        deviations=deviations + 0 if finite else 0.0,
        first_nan=None if first_nan == math.inf else int(first_nan),
        first_posinf=None if first_posinf == math.inf else int(first_posinf),
        first_neginf=None if first_neginf == math.inf else int(first_neginf),
    )


def _plain_numbers(values: Array) -> tuple[float, ...]:
    return tuple((values.astype(np.float64) + 0.0).tolist())


def _has_numbers(reduced: Reduced) -> bool:
    return reduced.row is not None or reduced.rows is not None


def _size_of_fingerprint(reduced: Reduced) -> int | None:
    either = reduced.fingerprint if reduced.remote_fingerprint is None else reduced.remote_fingerprint
    return None if either is None else len(either)


def _merge_units(merged: Reduced, a: Reduced, b: Reduced) -> None:
    if a.axis is None and b.axis is None:
        return
    lows: Any = (a.low, b.low)
    highs: Any = (a.high, b.high)
    if a.axis != b.axis or len(lows[0]) != len(lows[1]):
        merged.reason = merged.reason or "number of units varies"
    elif isinstance(a.low, np.ndarray) and isinstance(b.low, np.ndarray):
        merged.axis, merged.low, merged.high = a.axis, np.minimum(*lows), np.maximum(*highs)
    else:
        # The arrays of the kernel are read-only.
        lows, highs = (
            together(*(one if isinstance(one, Tensor) else torch.from_numpy(one.copy()) for one in both))
            for both in (lows, highs)
        )
        merged.axis, merged.low, merged.high = a.axis, torch.minimum(*lows), torch.maximum(*highs)
