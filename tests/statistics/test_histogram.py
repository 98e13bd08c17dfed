"""Histograms: fixed exponential bins, against numpy; parts merge to the whole."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_modelprobe.record import Histogram, Reading
from pytest_modelprobe.statistics import Reduced, ambient_modes_disabled, collect, merge, reduce
from pytest_modelprobe.statistics.operations import by_torch, count


def reduce_on_device(tensor: torch.Tensor, axis: int | None = None) -> Reduced:
    """Return the reduction by operations of torch, as another device gets it."""
    with ambient_modes_disabled():
        return by_torch(tensor, axis, 0, histogram=True)


EDGES = [2.0 ** (k / 2) for k in range(-79, 81)]
"""Between the bins from -80 to 80; the doubles nearest to the odd ones are on the right side of the roots."""


def expected(values: np.ndarray) -> dict[tuple[int, int], int]:
    """Return the counts by sign and bin, zeros as (0, 0)."""
    finite = values[np.isfinite(values)].astype(np.float64)
    bins = np.searchsorted(EDGES, np.abs(finite), side="right") - 80
    keys = zip(np.sign(finite).astype(int).tolist(), np.where(finite == 0, 0, bins).tolist(), strict=True)
    counts: dict[tuple[int, int], int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    return counts


def counts_of(histogram: Histogram | None) -> dict[tuple[int, int], int]:
    assert histogram is not None
    found = {(0, 0): histogram.zero}
    for sign, bins in ((-1, histogram.negative), (1, histogram.positive)):
        found |= {(sign, k): n for k, n in enumerate(bins, histogram.first)}
    return {key: n for key, n in found.items() if n}


def histogram_of(tensor: torch.Tensor) -> Histogram | None:
    (reading,) = collect([reduce(tensor, histogram=True)])
    return reading.histogram


floats = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, -2.0, math.sqrt(2), 1e-45, -1e-40, 3e38, 2.0**40])


@settings(deadline=None, max_examples=30)
@given(st.lists(floats, max_size=40), st.lists(floats, max_size=40))
def test_counts_are_those_of_numpy_and_parts_merge_to_the_whole(a: list[float], b: list[float]) -> None:
    x, y = (torch.tensor(part, dtype=torch.float32) for part in (a, b))
    whole = torch.cat([x, y])
    assert counts_of(histogram_of(whole)) == expected(whole.numpy())
    (merged,) = collect([merge(reduce(x, histogram=True), reduce(y, histogram=True))])
    assert counts_of(merged.histogram) == expected(whole.numpy())
    both = [histogram_of(part) or Histogram() for part in (x, y)]
    assert counts_of(both[0].merge(both[1])) == expected(whole.numpy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_least_number_of_a_bin_is_in_it_and_the_one_below_is_not(dtype: torch.dtype) -> None:
    for k in (-80, -41, -1, 0, 1, 2, 79):
        edge = torch.tensor(2.0 ** (k / 2), dtype=torch.float64)
        narrow = edge.to(dtype)
        if not torch.finfo(dtype).tiny < narrow < math.inf:
            continue
        above = narrow if narrow.double() >= edge else torch.nextafter(narrow, torch.tensor(math.inf, dtype=dtype))
        below = torch.nextafter(above, torch.tensor(0.0, dtype=dtype))
        assert counts_of(histogram_of(torch.stack([above, -below]))) == {(1, k): 1, (-1, max(k - 1, -80)): 1}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(-300, 300),
        torch.tensor([0, 1, 255], dtype=torch.uint8),
        torch.tensor([True, False, True]),
        torch.tensor([3 + 4j, 0j, -1j]),
        torch.randn(300, 100, generator=torch.Generator().manual_seed(0)),
        torch.randn(300, 100, generator=torch.Generator().manual_seed(0)).t()[::3],
        torch.tensor([1.5, -2.0]).expand(1000, 2),
        torch.empty(0, 3),
        torch.tensor([math.nan, math.inf, -math.inf]),
        torch.tensor([1e300, -1e200, 1e-100, 5e-320, -5e-324, 0.0], dtype=torch.float64),
    ],
    ids=lambda tensor: f"{str(tensor.dtype)[6:]}-{tuple(tensor.shape)}",
)
def test_every_kind_of_tensor_is_counted_the_same_on_a_device(tensor: torch.Tensor) -> None:
    values = (tensor.abs() if tensor.is_complex() else tensor).numpy()
    assert counts_of(histogram_of(tensor)) == expected(values)
    (remote,) = collect([reduce_on_device(tensor)])
    assert counts_of(remote.histogram) == expected(values)


def test_no_element_is_read_on_a_device() -> None:
    # A meta tensor has none: to read one is an error.
    for dtype in (torch.float32, torch.float64):
        assert count(torch.empty(2, 5, device="meta", dtype=dtype), torch.float64).shape == (323,)
    assert reduce_on_device(torch.empty(9, 3, device="meta"), axis=-1).histogram.shape == (323,)


def test_a_histogram_is_not_compared() -> None:
    assert Reading(histogram=Histogram(zero=1)) == Reading()
    assert hash(Reading(histogram=Histogram(zero=1))) == hash(Reading())
