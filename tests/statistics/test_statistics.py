"""The statistics of a tensor, against the same numbers computed by numpy in float64."""

import contextlib
import functools
import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_modelprobe import kernel, statistics
from pytest_modelprobe.record import Statistics
from pytest_modelprobe.statistics import (
    ambient_modes_disabled,
    collect,
    merge,
    reduce,
)
from pytest_modelprobe.statistics.operations import NO_ELEMENT, by_torch, on_cpu

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EIGHT_BITS = sorted((d for n, d in vars(torch).items() if n.startswith("float8_")), key=str)
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


@pytest.fixture(autouse=True)
def _quiet_prototypes():
    """Complex32, nested and quantized tensors warn that they exist."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch|tests")
        warnings.filterwarnings("ignore", message=".*(prototype|experimental|deprecated|Sparse).*")
        yield


def read(tensor, **options):
    (reading,) = collect([reduce(tensor, **options)])
    return reading


def reduce_on_device(tensor, axis=None, index=0, **options):
    """The reduction by operations of torch, as another device gets it."""
    with ambient_modes_disabled():
        return by_torch(tensor.detach(), axis, index, **options)


def read_on_device(tensor, **options):
    (reading,) = collect([reduce_on_device(tensor, **options)])
    return reading


def read_without_kernel(tensor, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "active", None)
        return read(tensor, **options)


READS = [read, read_on_device, read_without_kernel]


def numbers(tensor):
    """The elements as numpy reads them, in float64."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex32:
        tensor = tensor.to(torch.complex64)
    if tensor.dtype in (torch.bfloat16, *EIGHT_BITS):
        tensor = tensor.float()
    array = tensor.numpy()
    return np.abs(array).astype(np.float64) if tensor.is_complex() else array.astype(np.float64)


def check(statistics, values, *, exactly=1e-15):
    """Compare with the moments and counts of values in float64; mean and std to 1e-6 of the rms."""
    values = values.reshape(-1)
    finite = values[np.isfinite(values)]
    assert statistics.count == values.size
    assert statistics.nan == np.isnan(values).sum()
    assert statistics.posinf == np.isposinf(values).sum()
    assert statistics.neginf == np.isneginf(values).sum()
    assert statistics.zeros == (values == 0).sum()
    if not finite.size:
        assert statistics.min is statistics.max is statistics.mean is None
        return
    with np.errstate(over="ignore"):
        rms = np.sqrt(np.mean((finite / (np.abs(finite).max() or 1)) ** 2)) * np.abs(finite).max()
    assert statistics.min == pytest.approx(finite.min(), rel=exactly)
    assert statistics.max == pytest.approx(finite.max(), rel=exactly)
    assert statistics.mean == pytest.approx((finite / finite.size).sum(), rel=0, abs=1e-6 * rms)
    if rms < 1e150:
        assert statistics.std == pytest.approx(finite.std(), rel=0, abs=1e-6 * rms)


def check_units(units, values, axis):
    values = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
    assert units.axis == axis
    np.testing.assert_array_equal(units.low, values.min(1))
    np.testing.assert_array_equal(units.high, values.max(1))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- what the numbers are ------------------------------------------------------------------------------------------


def test_a_tensor_becomes_plain_numbers():
    reading = read(torch.tensor([[1.0, 0.0, -3.0], [5.0, 0.0, 7.0]]), axis=-1)

    assert reading.statistics == Statistics(
        count=6, zeros=2, min=-3.0, max=7.0, mean=5 / 3, deviations=reading.statistics.deviations
    )
    assert reading.statistics.std == pytest.approx(np.std([1, 0, -3, 5, 0, 7]))
    assert reading.units.low == (1.0, 0.0, -3.0)
    assert reading.units.high == (5.0, 0.0, 7.0)
    assert reading.units.dead == 1
    assert {type(v) for v in (*reading.units.low, reading.statistics.min, reading.statistics.mean)} == {float}


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHT_BITS], ids=str)
def test_floating_dtypes(dtype):
    for size, read in itertools.product((40, 70_000), READS):
        tensor = draw(size // 4, 4).relu().to(dtype)
        reading = read(tensor, axis=-1)
        check(reading.statistics, numbers(tensor))
        check_units(reading.units, numbers(tensor), -1)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_complex_elements_count_by_magnitude(dtype):
    tensor = torch.complex(draw(60, 4), draw(60, 4, seed=1)).to(dtype)
    tensor[0] = 0

    check(read(tensor).statistics, numbers(tensor), exactly=1e-6)  # torch and numpy round a root differently
    if dtype != torch.complex32:
        check(read(tensor.conj()).statistics, numbers(tensor), exactly=1e-6)
        check(read(tensor.conj().imag).statistics, numbers(tensor.conj().imag))  # with the negative bit
        assert read(torch.tensor(1 + 2j).conj().imag).statistics.mean == -2


def test_integers_and_bools():
    for dtype, read in itertools.product((*INTEGERS, torch.bool), (read_on_device, read_without_kernel)):
        tensor = torch.arange(12_000).remainder(100).reshape(-1, 4).to(dtype)
        reading = read(tensor, axis=-1)
        check(reading.statistics, numbers(tensor))
        check_units(reading.units, numbers(tensor), -1)


def test_the_range_of_integers_is_of_integers():
    found = read(torch.tensor([7, -3])).statistics
    assert repr((found.min, found.max)) == "(-3, 7)"


@pytest.mark.parametrize("read", READS)
def test_a_negative_zero_is_a_zero(read):
    reading = read(torch.full((2, 6), -0.0), axis=-2)
    s = reading.statistics
    numbers = (s.min, s.max, s.mean, *reading.units.low, *reading.units.high)
    assert [math.copysign(1, number) for number in numbers] == [1] * 7


@pytest.mark.parametrize("read", [read, read_on_device])
def test_an_empty_tensor_has_counts_and_no_units(read):
    for shape in ((0,), (0, 3), (3, 0)):
        assert read(torch.empty(shape), axis=-1).statistics == Statistics(count=0)
        assert read(torch.empty(shape), axis=-1).units is None


# --- accuracy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", READS)
def test_std_where_the_mean_is_large_against_it(read):
    for size, ratio in itertools.product((1_000, 300_000), (0, 30, 1e3)):
        tensor = draw(size) + ratio
        result = read(tensor).statistics
        check(result, numbers(tensor))
        assert result.std == pytest.approx(numbers(tensor).std(), rel=1e-5)


def test_magnitudes_that_all_round_the_same_way():
    """A float32 dot product of these is wrong by 5e-5."""
    tensor = torch.full((1 << 18,), 1 / 3)
    tensor[::2] *= -1

    assert read(tensor).statistics.std == pytest.approx(numbers(tensor).std(), rel=1e-6)


@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e30, 3e37])
def test_magnitudes_whose_squares_float32_does_not_hold(magnitude):
    for size, read in itertools.product((100, 20_000), READS):
        tensor = draw(size) * magnitude
        check(read(tensor).statistics, numbers(tensor))


def test_magnitudes_whose_squares_float64_does_not_hold():
    tensor = draw(20_000).double().clamp(-1, 1) * 1e308

    result = read(tensor).statistics

    check(result, numbers(tensor))
    assert result.std == math.inf
    assert read(torch.tensor([1e200, 1e-200], dtype=torch.float64)).statistics.mean == 5e199


def test_a_constant_has_no_deviation():
    for way, dtype in itertools.product((read, read_without_kernel), (torch.float32, torch.float64)):
        assert way(torch.full((70_000,), 0.1, dtype=dtype)).statistics.std == 0


# --- what is not finite --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", READS)
def test_what_is_not_finite_is_counted_apart(read):
    tensor = draw(20_000) + 100
    tensor[[0, 7, 8]] = torch.tensor([math.nan, math.inf, -math.inf])
    tensor[[11, 12]] = torch.tensor([-math.inf, 0.0])

    result = read(tensor, index=3).statistics

    check(result, numbers(tensor))
    assert (result.first_nan, result.first_posinf, result.first_neginf) == (3, 3, 3)


@pytest.mark.parametrize("read", READS)
def test_nothing_finite_at_all(read):
    for value in (math.nan, math.inf, -math.inf):
        result = read(torch.full((9_000,), value)).statistics
        assert result.nonfinite == result.count == 9_000
        assert result.mean is result.min is result.max is None


@pytest.mark.parametrize("read", [read, read_on_device])
def test_a_unit_with_a_nan_says_so(read):
    units = read(torch.tensor([[1.0, math.nan, -math.inf], [2.0, 3.0, 4.0]]), axis=-1).units
    assert (units.low[0], units.high[0]) == (1.0, 2.0)
    assert math.isnan(units.low[1])
    assert math.isnan(units.high[1])
    assert (units.low[2], units.high[2]) == (-math.inf, 4.0)


# --- memory layouts ------------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    "slice of the last": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "slice of the second": lambda x: torch.cat([x, x], 1)[:, ::2],
    "slices": lambda x: x[:, 1:, ::2, 1:],
    "expanded batch": lambda x: x[:1].expand(x.shape),
    "expanded units": lambda x: x[:, :1].expand(x.shape),
    "expanded scalar": lambda x: x[0, 0, 0, 0].expand(x.shape),
    "overlapping": lambda x: x.reshape(-1).as_strided((4, 3, 5, 2), (7, 2, 1, 1)),
    "unit of one": lambda x: x[:, :1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    for shape, way in itertools.product(((4, 3, 5, 6), (2, 800, 20, 20)), (read, read_on_device)):
        tensor = LAYOUTS[layout](draw(*shape).relu())
        for axis in (-3, -1):
            reading = way(tensor, axis=axis)
            check(reading.statistics, numbers(tensor))
            check_units(reading.units, numbers(tensor), axis)
        check(way(tensor).statistics, numbers(tensor))


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from([*FLOATS, torch.complex64, torch.int32, torch.bool]))
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    scale = draw(st.sampled_from([0, 1e-3, 1, 50]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    tensor = (torch.randn(shape, generator=generator) * scale + draw(st.sampled_from([0, 1, 40]))).to(dtype)
    if dtype.is_floating_point and tensor.numel():
        special = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1.0])
        for value in draw(st.lists(special, max_size=4)):
            tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = value
    if tensor.dim():
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        step = draw(st.sampled_from([1, 1, 2]))
        tensor = tensor[..., ::step]
        if draw(st.booleans()):
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


@given(tensors(), st.integers(-4, -1), st.sampled_from(READS))
@settings(max_examples=150, deadline=None)
def test_any_tensor(tensor, axis, read):
    tensor = tensor.abs() if tensor.is_complex() else tensor
    reading = read(tensor, axis=axis)
    check(reading.statistics, numbers(tensor))
    if reading.units is not None:
        check_units(reading.units, numbers(tensor), axis)
    else:
        assert not tensor.numel() or -axis > tensor.dim()


# --- merging -------------------------------------------------------------------------------------------------------


@given(tensors(), st.data(), st.sampled_from([reduce, reduce_on_device]))
@settings(max_examples=100, deadline=None)
def test_any_split_of_a_batch_merges_to_the_same(tensor, data, reduce):
    tensor = torch.atleast_1d(tensor.abs() if tensor.is_complex() else tensor)
    cuts = sorted(data.draw(st.lists(st.integers(0, tensor.shape[0]), max_size=3)))
    parts = torch.tensor_split(tensor, cuts)

    merged = functools.reduce(merge, [reduce(part, axis=-1, index=i) for i, part in enumerate(parts)])

    (reading,) = collect([merged])
    assert reading.tensors == len(parts)
    check(reading.statistics, numbers(tensor))
    nan = [i for i, part in enumerate(parts) if tensor.dtype.is_floating_point and part.isnan().any()]
    assert reading.statistics.first_nan == (nan[0] if nan else None)
    if tensor.dim() > 1 and tensor.numel():
        check_units(reading.units, numbers(tensor), -1)


@pytest.mark.parametrize("reduce", [reduce, reduce_on_device])
def test_another_number_of_units_drops_the_units_and_keeps_the_moments(reduce):
    merged = merge(reduce(torch.ones(2, 3), axis=-1), reduce(torch.ones(2, 4), axis=-1))
    (reading,) = collect([merge(merged, reduce(torch.ones(2, 3), axis=-1))])
    assert reading.statistics.count == 20
    assert reading.units is None
    assert reading.reason == "number of units varies"


def test_a_tensor_without_numbers_leaves_none_for_the_others():
    (reading,) = collect([merge(reduce(torch.ones(3)), reduce(torch.ones(3).to_sparse()))])
    assert reading.statistics is None
    assert reading.reason == "sparse tensor"
    assert reading.tensors == 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_tensor_without_elements_leaves_the_numbers_of_the_others(order):
    tensors = [torch.ones(3, device="meta"), torch.ones(3), torch.zeros(3)]
    (reading,) = collect([functools.reduce(merge, [reduce(tensors[i]) for i in order])])
    assert (reading.tensors, reading.statistics.mean, reading.reason) == (2, 0.5, None)


def test_reductions_of_two_devices_merge():
    tensor = draw(4, 3)
    merged = merge(reduce(tensor[:1], axis=-1), reduce_on_device(tensor[1:], axis=-1))
    (reading,) = collect([merged])
    check(reading.statistics, numbers(tensor))
    check_units(reading.units, numbers(tensor), -1)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("places", [("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "cuda", "cuda:1", "cpu")], ids=str)
def test_what_was_on_the_cpu_and_on_cuda_merges_without_waiting(places, nothing_waits):
    if torch.cuda.device_count() < 2 and "cuda:1" in places:
        pytest.skip("needs two CUDA devices")
    parts = draw(len(places), 900, 3)
    merge(*(reduce(parts[0].to(place), axis=-1, histogram=True) for place in ("cuda", "cpu")))  # makes the tables
    given = [part.to(place) for part, place in zip(parts, places, strict=True)]
    with nothing_waits():
        merged = functools.reduce(merge, [reduce(one, axis=-1, histogram=True) for one in given])
    (reading,) = collect([merged])
    check(reading.statistics, numbers(parts))
    check_units(reading.units, numbers(parts), -1)
    whole = collect([functools.reduce(merge, [reduce(part, histogram=True) for part in parts])])[0]
    assert reading.histogram == whole.histogram
    np.testing.assert_allclose(reading.fingerprint, whole.fingerprint, rtol=0, atol=1e-6 * parts.norm().item())


def test_a_device_without_float64_is_combined_on_the_cpu(monkeypatch):
    monkeypatch.setattr(statistics.operations, "widest", lambda device: torch.float32)
    monkeypatch.setattr(statistics.operations, "_BLOCK", 1000)
    tensor = draw(5_000, 3) + 30
    merged = functools.reduce(merge, [reduce_on_device(part, axis=-1) for part in tensor.split(1700)])
    assert merged.rows.dtype == torch.float32
    (reading,) = collect([merged])
    check(reading.statistics, numbers(tensor))
    check_units(reading.units, numbers(tensor), -1)


def test_collecting_keeps_the_order_and_copies_once_per_device(monkeypatch):
    copies = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor) or cpu(tensor))
    tensors = [draw(4, n, seed=n) for n in (3, 2, 5)]
    ways = [reduce_on_device, reduce, reduce_on_device]

    readings = collect([way(t, axis=-1) for way, t in zip(ways, tensors, strict=True)])

    for tensor, reading in zip(tensors, readings, strict=True):
        check(reading.statistics, numbers(tensor))
        check_units(reading.units, numbers(tensor), -1)
    assert len(copies) == 1


# --- nothing is read from a device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHT_BITS, torch.complex64, torch.int64, torch.bool], ids=str)
def test_the_device_path_runs_where_there_is_nothing_to_read(dtype):
    def reduced(tensor):
        one = reduce_on_device(tensor, axis=-1)
        return merge(one, reduce_on_device(tensor, axis=-1, index=1))

    meta = reduced(torch.empty(40, 3, dtype=dtype, device="meta"))
    assert meta.rows.shape == (1, len(NO_ELEMENT))
    assert meta.low.shape == (3,)
    with FakeTensorMode():
        one = by_torch(torch.empty(40, 3, dtype=dtype), -1, 0)  # fake only while the mode is on
        assert type(one.rows).__name__ == "FakeTensor"
        assert statistics.operations.merged_rows(torch.cat([one.rows, one.rows])).shape == (1, len(NO_ELEMENT))


# --- tensors without numbers ---------------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


class Tagged(torch.Tensor):
    """A subclass that is a plain tensor, and would not have its functions called."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


def freed():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake():
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(3, device="meta"), "meta tensor"),
        (fake, "fake tensor"),
        (lambda: torch.eye(3).to_sparse(), "sparse tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
        (lambda: torch.ones(4, dtype=torch.uint8).view(torch.uint4), "uint4 tensor"),
        (lambda: Wrapper(torch.ones(3)), "Wrapper tensor"),
        (lambda: torch.nn.LazyLinear(2).weight, "uninitialized parameter"),
        (freed, "tensor without storage"),
    ],
)
def test_a_tensor_that_cannot_be_read_gives_the_reason(make, reason):
    reading = read(make(), axis=-1)
    assert reading.reason == reason
    assert reading.statistics is None


def test_inside_a_transform_its_own_tensors_have_no_numbers_and_others_do():
    outside, seen = draw(40, 3), []
    torch.func.vmap(lambda x: (seen.extend([read(x), read(outside, axis=-1)]), x)[1])(torch.ones(2, 3))
    assert seen[0].reason == "tensor of a torch.func transform"
    check(seen[1].statistics, numbers(outside))


def test_a_subclass_that_holds_its_own_elements_is_read():
    check(read(draw(3).as_subclass(Tagged)).statistics, numbers(draw(3)))
    check(read(torch.nn.Parameter(draw(3))).statistics, numbers(draw(3)))


# --- contexts ------------------------------------------------------------------------------------------------------


class Refuse(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was seen by the mode")


class RefuseDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was seen by the mode")


@contextlib.contextmanager
def everything():
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta"), RefuseDispatch():
        yield


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "default device": lambda: torch.device("meta"),
    "function mode": Refuse,
    "dispatch mode": RefuseDispatch,
    "fake tensor mode": FakeTensorMode,
    "forward-mode gradients": forward_ad.dual_level,
    "everything": everything,
}


@pytest.mark.parametrize("way", [reduce, reduce_on_device])
@pytest.mark.parametrize("context", CONTEXTS)
def test_no_context_reaches_the_arithmetic(context, way):
    tensor = draw(40, 3, seed=4).requires_grad_()
    with CONTEXTS[context]():
        one = merge(way(tensor, axis=-1), way(tensor, axis=-1))
    with CONTEXTS[context]():
        (reading,) = collect([one])

    check(reading.statistics, np.stack([numbers(tensor)] * 2))
    check_units(reading.units, numbers(tensor), -1)
    rows = one.computed().rows
    assert rows is None or not (rows.is_inference() or rows.requires_grad)


def test_it_leaves_every_state_as_it_was():
    tensor = draw(20_000, 2).requires_grad_()
    tensor_state = tensor._version, tensor.is_leaf
    before = torch.get_rng_state()

    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta"):
        with ambient_modes_disabled():
            assert (torch.eye(2) @ torch.eye(2)).dtype == torch.float32
            assert torch.ones(2).device.type == "cpu"
            assert not torch.ones(2).is_inference()
        reduce(tensor, axis=-1)
        assert torch.ones(1).is_meta
        assert torch.ones(1).is_inference()
        assert torch.is_autocast_enabled("cpu")
        eye = torch.eye(2, device="cpu")
        assert (eye @ eye).dtype == torch.bfloat16

    assert (tensor._version, tensor.is_leaf) == tensor_state
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_a_tensor_expanded_to_very_many_elements_is_counted_without_being_read_one_by_one(dtype: torch.dtype) -> None:
    few = torch.tensor([[0], [1]], dtype=dtype)
    (many,) = collect([reduce(few.expand(2, 1 << 39), axis=-1, histogram=True)])
    (counted,) = collect([reduce(few, histogram=True)])
    assert many.statistics is not None
    assert counted.statistics is not None
    assert (many.statistics.count, many.statistics.zeros, many.statistics.deviations) == (1 << 40, 1 << 39, 2.0**38)
    assert (many.statistics.mean, many.statistics.min, many.statistics.max) == (0.5, 0, 1)
    assert many.histogram is not None
    assert many.histogram.zero == 1 << 39
    assert many.fingerprint is None
    assert many.reason is not None
    assert many.reason.startswith("expanded")


def test_a_counter_is_read_as_torch_reads_it():
    for value in (0, 1, -3, 2**40):
        counter = torch.tensor(value)
        one, again, other = collect([reduce(counter), reduce(counter), on_cpu(by_torch(counter, None, 0), counter)])
        assert one == again == other
    assert collect([reduce(torch.tensor([1]))]) != collect([reduce(torch.tensor([2]))])
