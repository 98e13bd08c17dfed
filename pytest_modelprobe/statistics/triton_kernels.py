"""Reductions on CUDA in one read, by kernels in Triton: one reads a tensor, one combines what its programs wrote.

Plain torch needs some thirty kernels for the numbers of a tensor, and converts it to float64. Nothing waits for the
device: the kernels run on the current stream, and their memory is of torch's allocator.

A program reads a tile, which is rows of up to 256 elements of a sample, from anywhere. It adds in the dtype of the
tensor, at least float32. The numbers are scaled by a power of two, so that their squares neither overflow nor vanish.
Only the second kernel, which has a few numbers for each tile, adds in float64, because consumer cards compute that at
1/64 of the speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_modelprobe.models import kept_on_devices

from .readable import NO_CONTEXT
from .reduced import Reduced
from .samples import COLUMNS, Samples, columns, masks, orders

_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_TILE, _SMALL_TILE = 1 << 12, 1 << 10  # elements of a tile: 16 for each of 256 or 64 threads
_DEEP = 4  # rows of a tile that a thread adds up
_MOST_RUNS = 8  # up to so many units of a row, one after another, the kernel looks for each
_BLOCK = 512  # tiles, or units, that a program of the second kernel looks at together
_ROW = 12  # columns of a `Row`

PARTS = tl.constexpr(11)  # numbers of a tile before those of the fingerprint
NUMBERS = tl.constexpr(16)  # of the fingerprint of a tile: once of finite elements, once of what stands for others
TABLE = tl.constexpr(256)  # numbers of the tables before the places of sums
NAN = tl.constexpr(4.0)  # these stand for elements that are not finite, as in `fingerprint`
INFINITE = tl.constexpr(2.0)


@triton.jit
def _order(x: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """Return integers in the order of the numbers, so that atomic minima work on them. It is its own inverse.

    The caller gives NaN the least integer.
    """
    if WIDE:
        bits = x.to(tl.int64, bitcast=True)
        found = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        bits = x.to(tl.int32, bitcast=True)
        found = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return found


@triton.jit
def _power_of_two(x: tl.tensor, WIDE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the power of two at or below a number that is not negative, and its inverse.

    The exponent is kept in the range in which both are normal numbers.
    """
    if WIDE:
        exponent = (x.to(tl.int64, bitcast=True) >> 52) & 2047
        exponent = tl.minimum(tl.maximum(exponent, 1), 2045)
        found = (exponent << 52).to(tl.float64, bitcast=True)
        inverse = ((2046 - exponent) << 52).to(tl.float64, bitcast=True)
    else:
        exponent = (x.to(tl.int32, bitcast=True) >> 23) & 255
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)
        found = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return found, inverse


@triton.jit
def _lower(to: tl.tensor, key: tl.tensor, mask: tl.tensor) -> None:
    """Store the keys that are smaller than those stored. Most are not, and a read costs less than an atomic minimum."""
    mask = mask & (key < tl.load(to, mask=mask, other=0, cache_modifier=".cg"))
    tl.atomic_min(to, key, mask=mask, sem="relaxed")


@triton.jit
def _bits_of_rows(hashes: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return output number ``row + 1`` of splitmix64 that starts at the hash of the sample, int64."""
    z = hashes.to(tl.uint64, bitcast=True) + (row.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)).to(tl.int64, bitcast=True)


@triton.jit
def _project(
    x: tl.tensor, bits: tl.tensor, column_bits: tl.tensor, places: tl.tensor, to: tl.tensor, tiles: tl.tensor
) -> None:
    """Store the 16 signed sums of a tile of shape (., ., columns). A bit that is set is a minus."""
    mask = 16 + (bits & 7).to(tl.int32)
    x = tl.where((column_bits[None, None, :] >> mask[:, :, None]) & 1 != 0, -x, x)
    order = (bits >> 3 & 255).to(tl.int32)
    number = tl.arange(0, NUMBERS)
    sums = tl.zeros((NUMBERS,), x.dtype)
    for t in range(NUMBERS):  # not unrolled by static_range, which would take all registers
        of_columns = (1 - 2 * ((column_bits >> t) & 1)).to(x.dtype)
        of_rows = tl.sum(x * of_columns[None, None, :], axis=2)
        of_rows = tl.where(bits >> (48 + t) & 1 != 0, -of_rows, of_rows)
        place = tl.load(places + order * NUMBERS + t)
        here = tl.where(place[:, :, None] == number[None, None, :], of_rows[:, :, None], 0)
        sums += tl.sum(tl.sum(here, axis=0), axis=0)
    tl.store(to + number * tiles, sums)


@triton.jit(do_not_specialize=["tiles", "samples", "row_count", "phases", "repeats", "units"])
def read(
    x: tl.tensor,
    parts: tl.tensor,
    keys: tl.tensor,
    tables: tl.tensor,
    hashes: tl.tensor,
    tiles: tl.tensor,
    samples: tl.tensor,
    length: tl.tensor,
    row_count: tl.tensor,
    phases: tl.tensor,
    repeats: tl.tensor,
    units: tl.tensor,
    inner: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    size3: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    stride3: tl.tensor,
    stride4: tl.tensor,
    DEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUNS: tl.constexpr,
    WIDE: tl.constexpr,
    LONG: tl.constexpr,
    STRIDED: tl.constexpr,
    FINGERPRINT: tl.constexpr,
) -> None:
    """Store the numbers of a tile in a column of ``parts``, and take the range of its units into ``keys``.

    Args:
        x: The elements.
        parts: Shape (43, tiles), or (11, tiles) without fingerprints.
        keys: The least `_order` of each unit, and after them the least of its inverted bits, for the greatest element.
        tables: Int32. The signs of each of 256 columns as bits, 16 of the sums and 8 of the masks. After them, for each
            of 256 orders, the projection that each of 16 sums goes to.
        hashes: Hashes of the samples, int64.
        tiles: Number of programs.
        samples: Number of samples; the elements are (samples, length).
        length: Elements of a sample.
        row_count: Rows of a sample.
        phases: After so many rows, the columns are of the same units again. A tile has rows of one phase.
        repeats: Rows of a phase in a sample.
        units: Number of units. Unit u has the elements for which ``number // inner % units`` is u.
        inner: See ``units``.
        size1: Sizes and strides of the dimensions (samples, ., size1, size2, size3), if ``STRIDED``.
        size2: See ``size1``.
        size3: See ``size1``.
        stride0: See ``size1``.
        stride1: See ``size1``.
        stride2: See ``size1``.
        stride3: See ``size1``.
        stride4: See ``size1``.
        DEEP: Rows of a tile that follow each other in a thread.
        ROWS: The other factor of the number of rows.
        COLUMNS: Elements of a row.
        RUNS: Most units that a row has elements of, one after another. 0 if the units lie in columns, and -1 if there
            are no units.
        WIDE: Whether numbers are added in float64.
        LONG: Whether 32 bits are too few to number the elements.
        STRIDED: Whether the elements lie in another order.
        FINGERPRINT: Whether to compute the fingerprint.
    """
    tile = tl.program_id(0)
    phase = tile % phases
    number = (tl.arange(0, DEEP) * ROWS)[:, None] + tl.arange(0, ROWS)[None, :] + tile // phases * (DEEP * ROWS)
    sample = number // repeats
    row = phase + number % repeats * phases
    there = (sample < samples) & (row < row_count)
    if LONG:
        sample = sample.to(tl.int64)
        row = row.to(tl.int64)
    column = tl.arange(0, COLUMNS)
    place = (row * COLUMNS)[:, :, None] + column[None, None, :]  # in the sample
    ok = there[:, :, None] & (place < length)
    if STRIDED:
        rest = place
        offset = (rest % size3) * stride4
        rest = rest // size3
        offset += (rest % size2) * stride3
        rest = rest // size2
        offset += (rest % size1) * stride2
        offset += (rest // size1) * stride1
        offset += (sample * stride0)[:, :, None]
    else:
        offset = (sample * length)[:, :, None] + place
    v = tl.load(x + offset, mask=ok, other=0)
    v = v.to(tl.float64) if WIDE else v.to(tl.float32)

    # An element that is masked is 0, and so is finite.
    finite = (v - v) == 0
    good = ok & finite
    low = tl.min(tl.where(good, v, float("inf")))
    high = tl.max(tl.where(good, v, float("-inf")))
    zeros_and_bad = tl.sum((ok & (v == 0)).to(tl.int32) + ((finite == 0).to(tl.int32) << 16))
    zeros = zeros_and_bad & 0xFFFF
    bad = zeros_and_bad >> 16
    left = tl.where(there, tl.minimum(tl.maximum(length - row * COLUMNS, 0), COLUMNS), 0)
    count = tl.sum(left.to(tl.int32)) - bad
    scale, inverse = _power_of_two(tl.where(count > 0, tl.maximum(tl.abs(low), tl.abs(high)), 0), WIDE)
    y = tl.where(good, v, 0) * inverse
    n = tl.maximum(count, 1).to(y.dtype)
    mean = tl.sum(y) / n
    d = tl.where(good, y - mean, 0)
    parts += tile
    tl.store(parts, count)
    tl.store(parts + 4 * tiles, zeros)
    tl.store(parts + 5 * tiles, low)
    tl.store(parts + 6 * tiles, high)
    tl.store(parts + 7 * tiles, scale)
    tl.store(parts + 8 * tiles, mean)
    tl.store(parts + 9 * tiles, tl.sum(d))
    tl.store(parts + 10 * tiles, tl.sum(d * d))
    nan = 0
    posinf = 0
    if bad > 0:
        nan = tl.sum((v != v).to(tl.int32))
        posinf = tl.sum((v == float("inf")).to(tl.int32))
    tl.store(parts + 1 * tiles, nan)
    tl.store(parts + 2 * tiles, posinf)
    tl.store(parts + 3 * tiles, bad - nan - posinf)

    if FINGERPRINT:
        bits = _bits_of_rows(tl.load(hashes + sample, mask=there, other=0), row)
        column_bits = tl.load(tables + column)
        places = tables + TABLE
        _project(y, bits, column_bits, places, parts + PARTS * tiles, tiles)
        if bad > 0:
            stands = tl.where(v != v, NAN, tl.where(v > 0, INFINITE, -INFINITE))
            stands = tl.where(finite, 0, stands).to(y.dtype)
            _project(stands, bits, column_bits, places, parts + (PARTS + NUMBERS) * tiles, tiles)

    if RUNS >= 0:
        largest = 0x7FFFFFFFFFFFFFFF if WIDE else 0x7FFFFFFF
        least = -largest - 1
        key = _order(v, WIDE)
        upper = tl.where(v != v, least, ~key)
        key = tl.where(v != v, least, key)
        if RUNS == 0:
            key = tl.min(tl.min(tl.where(ok, key, largest), axis=0), axis=0)
            upper = tl.min(tl.min(tl.where(ok, upper, largest), axis=0), axis=0)
            first = phase * COLUMNS + column
            unit = first // inner % units
            _lower(keys + unit, key, first < length)
            _lower(keys + units + unit, upper, first < length)
        else:
            first = sample * length + row * COLUMNS
            run = first // inner
            for _ in tl.static_range(RUNS):
                from_here = (run * inner - first)[:, :, None]
                mine = ok & (column[None, None, :] >= from_here) & (column[None, None, :] < from_here + inner)
                some = there & (run * inner < first + COLUMNS) & (run * inner < (sample + 1) * length)
                unit = run % units
                low_of_run = tl.min(tl.where(mine, key, largest), axis=2)
                high_of_run = tl.min(tl.where(mine, upper, largest), axis=2)
                _lower(keys + unit, low_of_run, some)
                _lower(keys + units + unit, high_of_run, some)
                run += 1


@triton.jit(do_not_specialize=["tiles", "index", "units"])
def combine(
    parts: tl.tensor,
    keys: tl.tensor,
    out: tl.tensor,
    tiles: tl.tensor,
    index: tl.tensor,
    units: tl.tensor,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    UNITS: tl.constexpr,
    FINGERPRINT: tl.constexpr,
) -> None:
    """Store the columns of a `Row` and the fingerprint in ``out``, and turn ``keys`` into numbers, with their bits.

    Args:
        parts: What `read` stored.
        keys: What `read` stored.
        out: The results, in float64.
        tiles: Number of columns of ``parts``.
        index: Number of the forward.
        units: Number of units.
        BLOCK: Tiles looked at together.
        WIDE: See `read`.
        UNITS: Whether there are units.
        FINGERPRINT: Whether there are fingerprints.
    """
    job = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    jobs: tl.constexpr = 17 if FINGERPRINT else 1
    if job >= jobs:
        if UNITS:
            unit = (job - jobs) * BLOCK + lane
            low_key = tl.load(keys + unit, mask=unit < units, other=0)
            high_key = ~tl.load(keys + units + unit, mask=unit < units, other=0)
            if WIDE:
                tl.store(keys + unit, low_key ^ ((low_key >> 63) & 0x7FFFFFFFFFFFFFFF), mask=unit < units)
                tl.store(keys + units + unit, high_key ^ ((high_key >> 63) & 0x7FFFFFFFFFFFFFFF), mask=unit < units)
            else:
                tl.store(keys + unit, low_key ^ ((low_key >> 31) & 0x7FFFFFFF), mask=unit < units)
                tl.store(keys + units + unit, high_key ^ ((high_key >> 31) & 0x7FFFFFFF), mask=unit < units)
    else:
        lows = tl.full((BLOCK,), float("inf"), parts.dtype.element_ty)
        highs = tl.full((BLOCK,), float("-inf"), parts.dtype.element_ty)
        counts = tl.zeros((BLOCK,), tl.float64)
        bad = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, tiles, BLOCK):
            tile = start + lane
            here = tile < tiles
            counts += tl.load(parts + tile, mask=here, other=0)
            lows = tl.minimum(lows, tl.load(parts + 5 * tiles + tile, mask=here, other=float("inf")))
            highs = tl.maximum(highs, tl.load(parts + 6 * tiles + tile, mask=here, other=float("-inf")))
            bad += tl.load(parts + tiles + tile, mask=here, other=0)
            bad += tl.load(parts + 2 * tiles + tile, mask=here, other=0)
            bad += tl.load(parts + 3 * tiles + tile, mask=here, other=0)
        count = tl.sum(counts)
        low = tl.min(lows).to(tl.float64)
        high = tl.max(highs).to(tl.float64)
        if job == 0:
            _combine_row(parts, out, tiles, index, count, low, high, BLOCK)
        else:
            largest = tl.maximum(-low, high)
            largest = tl.where((count > 0) & (largest > 0), largest, 1.0)
            sums = tl.zeros((BLOCK,), tl.float64)
            not_finite = tl.sum(bad) > 0
            for start in range(0, tiles, BLOCK):
                tile = start + lane
                here = tile < tiles
                scale = tl.load(parts + 7 * tiles + tile, mask=here, other=0).to(tl.float64) / largest
                sums += scale * tl.load(parts + (PARTS + job - 1) * tiles + tile, mask=here, other=0).to(tl.float64)
                if not_finite:  # only tiles with elements that are not finite have stored numbers that stand for them
                    some = tl.load(parts + tiles + tile, mask=here, other=0)
                    some += tl.load(parts + 2 * tiles + tile, mask=here, other=0)
                    some += tl.load(parts + 3 * tiles + tile, mask=here, other=0)
                    stands = parts + (PARTS + NUMBERS + job - 1) * tiles + tile
                    sums += tl.load(stands, mask=here & (some > 0), other=0).to(tl.float64)
            number = tl.sum(sums) * 0.25 * largest
            most: tl.constexpr = 1.7976931348623157e308
            tl.store(out + 11 + job, tl.minimum(tl.maximum(number, -most), most))


@triton.jit
def _combine_row(
    parts: tl.tensor,
    out: tl.tensor,
    tiles: tl.tensor,
    index: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    lane = tl.arange(0, BLOCK)
    nan = tl.zeros((BLOCK,), tl.float64)
    posinf = tl.zeros((BLOCK,), tl.float64)
    neginf = tl.zeros((BLOCK,), tl.float64)
    zeros = tl.zeros((BLOCK,), tl.float64)
    centers = tl.zeros((BLOCK,), tl.float64)
    some = tl.maximum(count, 1.0)
    for start in range(0, tiles, BLOCK):
        tile = start + lane
        here = tile < tiles
        nan += tl.load(parts + tiles + tile, mask=here, other=0)
        posinf += tl.load(parts + 2 * tiles + tile, mask=here, other=0)
        neginf += tl.load(parts + 3 * tiles + tile, mask=here, other=0)
        zeros += tl.load(parts + 4 * tiles + tile, mask=here, other=0)
        n = tl.load(parts + tile, mask=here, other=0).to(tl.float64)
        centers += n / some * _mean(parts, tile, tiles, here, n)
    center = tl.sum(centers)
    squares = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, tiles, BLOCK):
        tile = start + lane
        here = tile < tiles
        n = tl.load(parts + tile, mask=here, other=0).to(tl.float64)
        scale = tl.load(parts + 7 * tiles + tile, mask=here, other=0).to(tl.float64)
        found = tl.load(parts + 10 * tiles + tile, mask=here, other=0).to(tl.float64)
        away = _mean(parts, tile, tiles, here, n) - center
        squares += found * scale * scale + n * (away * away)
    deviations = tl.sum(squares)
    constant = (low == high) | (count == 0)
    never = float("inf")
    tl.store(out, count)
    tl.store(out + 1, tl.sum(nan))
    tl.store(out + 2, tl.sum(posinf))
    tl.store(out + 3, tl.sum(neginf))
    tl.store(out + 4, tl.sum(zeros))
    tl.store(out + 5, tl.where(tl.sum(nan) > 0, index, never))
    tl.store(out + 6, tl.where(tl.sum(posinf) > 0, index, never))
    tl.store(out + 7, tl.where(tl.sum(neginf) > 0, index, never))
    tl.store(out + 8, low)
    tl.store(out + 9, high)
    tl.store(out + 10, tl.where(constant & (count > 0), low, center))
    tl.store(out + 11, tl.where(constant, 0.0, deviations))


@triton.jit
def _mean(parts: tl.tensor, tile: tl.tensor, tiles: tl.tensor, here: tl.tensor, n: tl.tensor) -> tl.tensor:
    scale = tl.load(parts + 7 * tiles + tile, mask=here, other=0).to(tl.float64)
    mean = tl.load(parts + 8 * tiles + tile, mask=here, other=0).to(tl.float64)
    rest = tl.load(parts + 9 * tiles + tile, mask=here, other=0).to(tl.float64)
    return scale * (mean + rest / tl.maximum(n, 1.0))


# --- from a tensor to the kernels -------------------------------------------------------------------------------------


def reduced(x: Tensor, axis: int | None, index: int, samples: Samples | None) -> Reduced | None:
    """Return the reduction of a plain tensor, or `None` if torch has to compute it.

    Torch computes if the dtype is not one of `_DTYPES`, if there are no elements, and if the kernel has no order for
    the units.

    Args:
        x: The tensor.
        axis: Axis of the units, counted from the end.
        index: Number of the forward.
        samples: The samples of the forward, or `None` if no fingerprint is asked for.
    """
    if x.dtype not in _DTYPES or not x.numel() or x.is_neg():
        return None
    place = None if axis is None or -axis > x.dim() else x.dim() + axis
    hashes = None if samples is None else samples.hashes_on(x.device, x.shape)
    if samples is None and not x.is_contiguous():  # without a fingerprint any order does, so that of the memory
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        x, place = x.permute(order), None if place is None else order.index(place)
    units, inner = (0, 1) if place is None else (x.shape[place], math.prod(x.shape[place + 1 :]))
    count = 1 if hashes is None else len(hashes)
    length = x.numel() // count

    width = next(n for n in (16, 64, COLUMNS) if length <= n or n == COLUMNS)
    row_count = -(-length // width)
    runs = _runs(units, inner, width, length)
    phases = 1
    if runs == 0:
        if length % (units * inner):
            return None
        phases = min(row_count, units * inner // math.gcd(units * inner, width))
    repeats = -(-row_count // phases)
    rows = (_TILE if count * repeats * width > _TILE // 4 else _SMALL_TILE) // width
    tiles = phases * -(-count * repeats // rows)

    x, strided, layout = _layout(x, count)
    wide = x.dtype == torch.float64
    dtype, integer = (torch.float64, torch.int64) if wide else (torch.float32, torch.int32)
    numbers = 0 if samples is None else NUMBERS.value
    parts = torch.empty((PARTS.value + 2 * numbers) * tiles, dtype=dtype, device=x.device)
    keys = torch.full((2 * units,), torch.iinfo(integer).max, dtype=integer, device=x.device) if units else parts
    out = torch.empty(_ROW + numbers, dtype=torch.float64, device=x.device)
    tables = _tables(x.device)[0] if numbers else out
    with torch.cuda.device(x.device) if x.is_cuda else NO_CONTEXT:
        read[(tiles,)](
            x, parts, keys, tables, out if hashes is None else hashes,
            tiles, count, length, row_count, phases, repeats, units, inner, *layout,
            DEEP=_DEEP, ROWS=rows // _DEEP, COLUMNS=width, RUNS=runs, WIDE=wide,
            LONG=_extent(x) >= 1 << 30, STRIDED=strided, FINGERPRINT=numbers > 0,
            num_warps=8 if rows * width == _TILE else 2, maxnreg=128, enable_fp_fusion=True,
        )  # fmt: skip
        combine[(1 + numbers + -(-units // _BLOCK),)](
            parts, keys, out, tiles, index, units,
            BLOCK=_BLOCK, WIDE=wide, UNITS=units > 0, FINGERPRINT=numbers > 0, enable_fp_fusion=True,
        )  # fmt: skip
    found = Reduced(1, rows=out[:_ROW].view(1, _ROW))
    if units:
        found.axis = axis
        found.low, found.high = keys.view(dtype).split(units)
    if numbers:
        found.remote_fingerprint = out[_ROW:]
    return found


def _runs(units: int, inner: int, width: int, length: int) -> int:
    """Return the most units that a row has elements of, rounded up to a power of two.

    Returns 0 if they are too many, and -1 if there are no units.
    """
    if not units:
        return -1
    most = 1 if inner % width == 0 or inner == length else (min(width, length) - 2) // inner + 2
    return 0 if most > _MOST_RUNS else 1 << (most - 1).bit_length()


def _layout(x: Tensor, count: int) -> tuple[Tensor, bool, Sequence[int]]:
    """Return the tensor, whether its elements lie in another order, and three sizes and five strides; see `read`."""
    if count > 1:
        x = x.unflatten(0, (count, -1))
    first = 1 if count > 1 else 0
    joined: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[first:], x.stride()[first:], strict=True):
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            joined[-1] = joined[-1][0] * size, stride
        else:
            joined.append((size, stride))
    if x.is_contiguous():
        return x, False, (1,) * 3 + (0,) * 5
    if len(joined) > 4:  # the kernel knows four dimensions, besides that of the samples
        return x.contiguous(), False, (1,) * 3 + (0,) * 5
    joined = [(1, 0)] * (4 - len(joined)) + joined
    outer = x.stride(0) if count > 1 else 0
    return x, True, (*(size for size, _ in joined[1:]), outer, *(stride for _, stride in joined))


def _extent(x: Tensor) -> int:
    """Return how far the elements reach, in elements, or how many there are if that is more."""
    return max(x.numel(), sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)))


@kept_on_devices
def _tables() -> tuple[Tensor, ...]:
    """Return the tables of `read`."""
    signs = np.concatenate([columns().T, masks()])
    bits = ((signs < 0) << np.arange(len(signs))[:, None]).sum(0)
    return (torch.from_numpy(np.concatenate([bits, orders().argsort(1).reshape(-1)]).astype(np.int32)),)
