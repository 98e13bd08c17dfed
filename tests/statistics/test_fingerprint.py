"""What two fingerprints tell of two tensors, and that one tensor has one fingerprint, however it is laid out."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_modelprobe import kernel
from pytest_modelprobe.record import estimated_change, estimated_share
from pytest_modelprobe.statistics import (
    WHOLE,
    collect,
    fingerprint,
    merge,
    reduce,
    with_signs_of,
)
from pytest_modelprobe.statistics import samples as signs
from pytest_modelprobe.statistics.fingerprint import read, turned
from pytest_modelprobe.statistics.samples import K

from .test_statistics import reduce_on_device

SIZES = [1, 2, 255, 256, 257, 1000, 1025, 32_768, 65_537]
LARGE = [2**18 + 1, 2**20 - 1, 2**20, 2**20 + 300]  # around a piece


def project(tensor, samples=WHOLE):
    """The fingerprint by the kernel, or by torch and numpy."""
    if kernel.active is None:
        return fingerprint.project(tensor, samples)
    return reduce(tensor, samples=samples).fingerprint


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reading(tensor, samples=WHOLE):
    (one,) = collect([reduce(tensor, samples=samples)])
    return one


def on_device(tensor, samples=WHOLE):
    (one,) = collect([reduce_on_device(tensor, samples=samples)])
    return one


def change(x, y):
    return estimated_change(project(x), project(y), y.double().norm().item())


def true_change(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


def splitmix64(state):
    """Yield the outputs of splitmix64 from a state on."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def signs_of_elements(count):
    """The sign of each element of a sample of hash 0 in each projection, element by element from the definition."""
    found = np.empty((count, K))
    for row, bits in zip(range(-(-count // 256)), splitmix64(0), strict=False):
        mask, order = signs.masks()[bits & 7], signs.orders()[bits >> 3 & 255]
        minus = [bits >> 48 + t & 1 for t in range(K)]
        for column in range(min(256, count - 256 * row)):
            block, lane = divmod(column, 16)
            for k, t in enumerate(order.tolist()):
                odd = ((block ^ lane) & t).bit_count() + minus[t]
                found[256 * row + column, k] = mask[column] * (-1) ** odd
    return found


def bits_of_rows(hashes, count):
    """The bits of the first rows of samples, shape (samples, count)."""
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(signs.GAMMA)
    return signs.mix((hashes[..., None] + numbers).view(np.int64)).view(np.uint64)


def projected(values, bits):
    """The 16 signed sums of rows, before they are divided by 4, of the products of rows and columns."""
    minus = bits[..., None] >> np.arange(48, 64, dtype=np.uint64) & np.uint64(1)
    order = signs.orders()[bits >> np.uint64(3) & np.uint64(255)]
    return np.take_along_axis(np.where(minus, -values, values), order, -1)


def project_rows(x, hashes):
    """The fingerprints of several tensors of one size, from the definition."""
    count, samples = hashes.shape
    x = x.reshape(count, samples, -1)
    x = np.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % 256)))
    bits = bits_of_rows(hashes, x.shape[2] // 256).reshape(count, -1)
    values = x.reshape(*bits.shape, 256) * signs.masks()[bits % np.uint64(8)] @ signs.columns()
    return projected(values, bits).sum(1) / math.sqrt(K)


# --- the same for ever -----------------------------------------------------------------------------------------------


def test_the_generator_is_splitmix64():
    outputs = [number for number, _ in zip(splitmix64(1234567), range(3), strict=False)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]  # of the reference in C
    assert bits_of_rows(np.array([1234567], np.uint64), 3).tolist() == [outputs]
    assert signs.hashes(0, 1)[0] == 0xE220A8397B1DCDAF


def test_fingerprints_stay_what_they_are():
    x = torch.arange(1000, dtype=torch.float64) / 8
    golden = [
        28466, 33998, 1090, 20166, 2754, -8130, -7546, -1210,
        -33378, -12430, -35754, 1506, 11082, 13630, 930, 3014,
    ]  # fmt: skip
    assert (project(x) * 32).tolist() == pytest.approx(golden, rel=1e-12)
    assert reading(torch.arange(20_000)).digest == "e3439ca7f79dafd3"


@pytest.mark.parametrize("size", [1, 16, 300, 512, 20_000])
def test_a_fingerprint_is_the_sum_of_signed_elements(size):
    x = draw(size, dtype=torch.float64)
    expected = x.numpy() @ signs_of_elements(size) / math.sqrt(K)
    by_definition = project_rows(x.numpy()[None], np.zeros((1, 1), np.uint64))[0]
    for found in (project(x), fingerprint.project(x), by_definition):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * math.sqrt(size))


# --- how far off estimates are ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 2**18 + 2**16])
def test_a_generic_difference_is_estimated_to_eighteen_percent(size):
    found = np.array([np.linalg.norm(project(x := draw(size, seed=seed))) / x.norm().item() for seed in range(100)])
    assert found.mean() == pytest.approx(1, abs=0.06)
    assert 0.12 < found.std() < 0.24


def test_the_signs_keep_every_constant_shift_in_sight():
    columns = np.cumsum(signs.masks()[:, :, None] * signs.columns(), axis=1)  # of the first elements of a row
    bits = bits_of_rows(np.zeros(1, np.uint64), 20_000)[0]
    of_rows = projected(columns[bits % np.uint64(8), -1], bits)
    before = np.cumsum(of_rows, axis=0) - of_rows
    worst = []
    for count in range(1, 257):
        rows = slice(None) if count in (1, 2, 3, 64, 128, 200, 256) else slice(64)
        total = before[rows] + projected(columns[bits[rows] % np.uint64(8), count - 1], bits[rows])
        estimate = np.sqrt((total**2).mean(1) / (256 * np.arange(len(total)) + count))
        worst += [estimate.min(), estimate.max()]
    assert min(worst) > 0.7
    assert max(worst) < 1.35


def one_hot(rng, shape):
    return np.eye(shape[1])[rng.integers(shape[1], size=shape[0])]


def walsh(rng, shape):
    odd = np.array([number.bit_count() % 2 for number in range(256)])
    return 1.0 - 2 * odd[rng.integers(256, size=shape[0])[:, None] & np.arange(shape[1]) % 256]


STRUCTURES = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "constant": lambda rng, shape: np.ones(shape),
    "ramp": lambda rng, shape: np.arange(1.0, shape[1] + 1) + np.zeros(shape),
    "sinusoid": lambda rng, shape: np.sin(rng.uniform(0.01, 3, (shape[0], 1)) * np.arange(shape[1]) + 1),
    "one-hot": one_hot,
    "Walsh": walsh,
    "constant channels": lambda rng, shape: rng.normal(size=(shape[0], 8)).repeat(-(-shape[1] // 8), 1)[:, : shape[1]],
}


def ratios(rng, structure, size, samples, equal, count):
    """The length of fingerprints of random batches, whose samples have random hashes, beside the norm."""
    found = []
    for start in range(0, count, 2000):
        some = min(2000, count - start)
        x = STRUCTURES[structure](rng, (some * (1 if equal else samples), size))
        x = (x.repeat(samples, 0) if equal else x).reshape(some, -1)
        hashes = rng.integers(2**64, size=(some, samples), dtype=np.uint64)
        numbers = project_rows(x, hashes)
        found.append(np.linalg.norm(numbers, axis=1) / np.linalg.norm(x, axis=1))
    return np.concatenate(found)


def test_no_structure_of_a_batch_is_estimated_worse_than_by_sixteen_independent_sums():
    # Of independent sums 4 in a million are below a third: a chi-square of 16 degrees of freedom below 16 / 9.
    rng = np.random.default_rng(0)
    cases = [
        (size, samples, equal) for size in (1, 3, 16, 48, 192, 300) for samples in (1, 2, 3, 8) for equal in (0, 1)
    ]
    found = {(structure, *case): ratios(rng, structure, *case, 300) for structure in STRUCTURES for case in cases}
    everything = np.concatenate(list(found.values()))
    assert len(everything) > 100_000
    assert (everything < 1 / 3).sum() <= 2
    assert everything.max() < 2.2
    for case, some in found.items():
        assert 0.7 < np.mean(some**2) < 1.3, case  # of constants it depends on the 8 masks alone
        assert (some < 0.5).sum() <= 6, case


def one_column_scaled(x):
    x[:, 7] *= 1.01


def rolled_heads(x):
    heads = x.view(len(x), 4, -1)
    heads.copy_(heads.roll(1, 1))


def two_rows_swapped(x):
    x[[1, 2]] = x[[2, 1]]


def transposed(x):
    x.copy_(x.t().reshape(x.shape))


def sign_flip(x):
    x.neg_()


def late(x):
    x[-1, -1] += 1e-3


FAULTS = [one_column_scaled, rolled_heads, two_rows_swapped, transposed, sign_flip, late]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_goes_wrong_in_models_is_seen(fault):
    for shape in ((4, 16), (65, 1024), (256, 768)):
        y = draw(*shape) + 0.5
        x = y.clone()
        fault(x)
        assert 0.4 < change(x, y) / true_change(x, y) < 2


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 300), columns=st.integers(1, 1100), data=st.data())
def test_a_change_of_any_part_is_estimated_within_a_factor_of_three(seed, rows, columns, data):
    y = draw(rows, columns, seed=seed) + data.draw(st.sampled_from([0, 1, 100]))
    x = y.clone()
    first, last = sorted(data.draw(st.tuples(st.integers(0, rows - 1), st.integers(0, rows - 1))))
    left, right = sorted(data.draw(st.tuples(st.integers(0, columns - 1), st.integers(0, columns - 1))))
    part = x[first : last + 1, left : right + 1]
    how = data.draw(st.sampled_from(["noise", "shift", "scale"]))
    if how == "scale":
        part *= 1.01
    else:
        part += 1e-3 * (draw(*part.shape, seed=seed + 1) if how == "noise" else 1)
    true = true_change(x, y)
    assert true / 4 - 1e-6 < change(x, y) < true * 3 + 1e-6


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), size=st.integers(2, 3000), share=st.floats(0, 1))
def test_the_share_of_integers_that_differ_is_estimated(seed, size, share):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 50, (size,), generator=generator)
    x = torch.where(torch.rand(size, generator=generator) < share, y + 1, y)
    a, b = reading(x), reading(y)
    true = (x != y).float().mean().item()
    assert (a.digest == b.digest) is (true == 0)
    found = estimated_share(a.fingerprint, b.fingerprint, size)
    # One alone counts as the square of a difference of two numbers drawn from its hashes: as up to 6.
    assert found == pytest.approx(true, rel=2, abs=5.1 / size)
    assert (found == 0) is (true == 0)


# --- one tensor, one fingerprint --------------------------------------------------------------------------------------


def views():
    x = draw(6, 40, 30, 50)
    return {
        "channels last": draw(6, 40, 30, 50).to(memory_format=torch.channels_last),
        "reversed": x.permute(3, 2, 1, 0),
        "inner": x.permute(0, 2, 3, 1),
        "slices": x[:, ::2, 1:-1, ::3],
        "expanded": draw(6, 1, 1000).expand(6, 60, 1000),
        "long rows": draw(3000, 100).t(),
        "ints": torch.arange(360_000).view(600, 600).t(),
        "bools": (x > 0).permute(2, 0, 3, 1),
        "half": x.half().permute(3, 2, 1, 0),
        "small": x[0, 0].t(),
    }


@pytest.mark.parametrize("read", [reading, on_device])
def test_the_layout_does_not_matter(read):
    for x in views().values():
        a, b = read(x), read(x.contiguous())
        assert (a.fingerprint, a.digest) == (b.fingerprint, b.digest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64], ids=str)
def test_of_other_floats_it_is_that_of_the_same_numbers(dtype):
    x = draw(2**18 + 77, dtype=dtype)
    same = project(x.double().float() if dtype != torch.float64 else x.float())
    assert estimated_change(project(x), same) < 1e-6


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_of_complex_numbers_it_is_that_of_their_parts(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        x = torch.view_as_complex(draw(500, 2, dtype=torch.float16).double()).to(dtype)
        parts = torch.view_as_real(x.to(torch.complex128))
        assert estimated_change(project(x), project(parts)) < 1e-6
        assert estimated_change(project(x.conj()), project(x.conj().resolve_conj())) == 0


def test_every_device_gives_the_same():
    for size in (0, *SIZES, *LARGE):
        x = draw(size)
        a, b = reading(x), on_device(x)
        assert math.dist(a.fingerprint, b.fingerprint) <= 3e-7 * x.norm().item()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.uint16], ids=str)
def test_every_device_gives_the_same_digest(dtype):
    for size in (0, 2**18 + 77):
        x = torch.randint(-100, 100, (size,)).to(dtype) if dtype != torch.bool else torch.rand(size) < 0.5
        a, b = reading(x), on_device(x)
        assert a.digest == b.digest
        assert math.dist(a.fingerprint, b.fingerprint) <= 1e-6 * math.sqrt(size)


# --- what is not finite, and what is huge -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([1, math.inf, -3], [1, 6, -3]),
        ([1, -math.inf, -3], [1, -6, -3]),
        ([2, math.nan, 0], [2, 8, 0]),
        ([0, -math.inf, 0], [0, -2, 0]),
        ([math.nan, math.inf], [4, 2]),
    ],
)
def test_what_is_not_finite_counts_in_units_of_the_largest(given, meant):
    for way, dtype in itertools.product((reading, on_device), (torch.float16, torch.float32, torch.float64)):
        found = way(torch.tensor(given, dtype=dtype)).fingerprint
        assert found == pytest.approx(project(torch.tensor(meant, dtype=torch.float64)).tolist(), abs=1e-6)


@pytest.mark.parametrize("blocked", [-math.inf, torch.finfo(torch.float32).min], ids=["infinite", "huge"])
def test_a_mask_moved_by_one_place_is_seen(blocked):
    size = 600
    mask = torch.full((size, size), blocked)
    a, b = reading(mask.triu(1)).fingerprint, reading(mask.triu(2)).fingerprint
    true = math.sqrt((size - 1) / ((size - 1) * (size - 2) / 2))
    assert 0.5 < estimated_change(a, b) / true < 2


@pytest.mark.parametrize("read", [reading, on_device])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sums_of_huge_elements_do_not_overflow(dtype, read):
    size = 2**18 + 77
    x = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
    found = read(x).fingerprint
    assert all(map(math.isfinite, found))
    if dtype == torch.float32:
        expected = project(torch.ones(size)) * torch.finfo(dtype).max
        assert found == pytest.approx(expected.tolist())


# --- integers ---------------------------------------------------------------------------------------------------------


def test_a_digest_knows_each_element_and_its_place():
    ids = torch.arange(40_000)
    digests = {reading(ids).digest}
    for place in (0, 1, 16_383, 16_384, 39_999):
        other = ids.clone()
        other[place] += 1
        digests.add(reading(other).digest)
    orders = ids.flip(0), ids.roll(1), ids.roll(2**14), torch.cat([ids[:16_384].flip(0), ids[16_384:]])
    for order in (*orders, torch.cat([ids[16_384:32_768], ids[:16_384], ids[32_768:]])):
        digests.add(reading(order).digest)
    digests |= {reading(ids[:-1]).digest, reading(ids.view(200, 200).t()).digest}
    assert len(digests) == 13


def test_a_digest_is_of_the_numbers_not_of_their_dtype():
    x = torch.tensor([0, 1, 1, 0, 7])
    assert len({reading(x.to(dtype)).digest for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64)}) == 1
    assert reading(x[:4].bool()).digest == reading(x[:4]).digest


# --- over forwards ----------------------------------------------------------------------------------------------------


def over(tensors, way=reduce):
    total = None
    for index, tensor in enumerate(tensors):
        one = with_signs_of(index, way(tensor))
        total = one if total is None else merge(total, one)
    return collect([total])[0]


@pytest.mark.parametrize("way", [reduce, reduce_on_device])
@pytest.mark.parametrize("kind", ["float", "int"])
def test_batches_in_another_order_are_seen(kind, way):
    batches = [draw(10, seed=seed) if kind == "float" else torch.arange(10) + seed for seed in range(3)]
    a, b = over(batches, way), over([batches[1], batches[0], batches[2]], way)
    assert estimated_change(a.fingerprint, b.fingerprint) > 0.3
    if kind == "int":
        assert a.digest != b.digest


def test_merging_is_the_same_on_every_device():
    for batches in ([draw(10, seed=s) for s in range(3)], [torch.arange(10) * s for s in range(3)]):
        a, b = over(batches), over(batches, reduce_on_device)
        later = with_signs_of(1, reduce_on_device(batches[1])), with_signs_of(2, reduce(batches[2]))
        mixed = merge(reduce(batches[0]), merge(*later))
        (c,) = collect([mixed])
        assert a.digest == b.digest == c.digest
        assert max(estimated_change(one.fingerprint, a.fingerprint) for one in (b, c)) < 1e-6


@pytest.mark.parametrize("size", [1, 300])
def test_equal_values_of_any_two_of_the_first_forwards_neither_cancel_nor_double(size):
    each = np.stack([turned(np.array(project(torch.ones(size))), number) for number in range(32)])
    for first in range(32):
        both = np.linalg.norm(each[first] + each[first + 1 :], axis=1) / math.sqrt(2 * size)
        assert ((both > 0.4) & (both < 1.4)).all()


def test_integers_and_floats_merge_to_no_fingerprint():
    one = over([draw(3), torch.arange(3)])
    assert (one.fingerprint, one.digest) == (None, None)
    assert one.statistics.count == 6


def test_an_empty_tensor_has_a_fingerprint_of_zeros():
    assert reading(torch.ones(0)).fingerprint == (0.0,) * K
    assert reading(torch.arange(0)).digest == "0" * 16
    assert read(np.zeros(K)) == ((0.0,) * K, None)
