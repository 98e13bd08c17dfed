"""The kernels for CUDA, against plain torch in float64: on a GPU where there is one, else in Triton's interpreter.

They need Triton, which comes with torch's CUDA builds for Linux. `tests/conftest.py` switches its interpreter on.
"""

import math

import numpy as np
import pytest
import torch

from pytest_modelprobe.statistics import WHOLE, ambient_modes_disabled, collect, merge, operations, reduce, samples_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="needs Triton")
from pytest_modelprobe.statistics import triton_kernels  # noqa: E402 - it imports Triton

pytestmark = pytest.mark.filterwarnings(  # numpy computes in the interpreter
    "ignore::RuntimeWarning", "ignore:Conversion of an array with ndim:DeprecationWarning"
)
LONG = pytest.mark.long  # the interpreter takes half a second for each
FLOATS = [
    pytest.param(torch.float32, marks=LONG),
    torch.float64,
    torch.bfloat16,
    pytest.param(torch.float16, marks=LONG),
]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # Triton imports more of itself with the first call


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reduce_on_device(tensor, axis=None, index=0, **options):
    """The reduction by operations of torch, as another device gets it."""
    with ambient_modes_disabled():
        return operations.by_torch(tensor.detach(), axis, index, **options)


def one_read(x, axis=None, index=0, samples=WHOLE):
    """The reduction by the kernels, with the layout of a tensor on the CPU."""
    there = x if DEVICE == "cpu" else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)
    return triton_kernels.reduced(there, axis, index, samples)


def check(x, axis=None, index=0, samples=WHOLE):
    """Compare with the path of other devices, which adds in float64."""
    (found,) = collect([one_read(x, axis, index, samples)])
    (meant,) = collect([reduce_on_device(x, axis=axis, index=index, samples=samples or WHOLE)])
    a, b = found.statistics, meant.statistics
    exact = ("count", "nan", "posinf", "neginf", "zeros", "first_nan", "first_posinf", "first_neginf", "min", "max")
    assert [getattr(a, name) for name in exact] == [getattr(b, name) for name in exact]
    if b.mean is not None:
        assert a.mean == pytest.approx(b.mean, rel=0, abs=1e-6 * b.rms)
        assert a.std == pytest.approx(b.std, rel=0, abs=1e-6 * b.rms)
    assert (found.units is None) == (meant.units is None)
    if meant.units is not None:
        assert found.units.axis == meant.units.axis
        np.testing.assert_array_equal(found.units.low, meant.units.low)
        np.testing.assert_array_equal(found.units.high, meant.units.high)
    if samples is not None:
        np.testing.assert_allclose(
            found.fingerprint, meant.fingerprint, rtol=0, atol=1e-6 * np.linalg.norm(meant.fingerprint)
        )


def test_a_contiguous_tensor_has_the_numbers_of_the_reference():
    check(draw(3, 1500).relu())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_float_has_them(dtype):
    check((draw(4, 300) + 5).to(dtype), axis=-1)


def test_without_a_fingerprint_they_are_the_same():
    check(draw(40, 30), axis=-1, samples=None)
    assert one_read(draw(3), samples=None).remote_fingerprint is None


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((1000,), -1),  # a row has elements of each unit once
        pytest.param((12, 256), -1, marks=LONG),
        pytest.param((30, 10), -1, marks=LONG),
        pytest.param((2, 3, 20, 20), -3, marks=LONG),  # one or two units in a row
        ((2, 40, 7, 7), -3),  # seven
        pytest.param((2, 50, 3, 3), -3, marks=LONG),  # each unit nine times in a row
        ((5, 70), -2),
        pytest.param((3, 1, 9), -2, marks=LONG),
        ((), -1),
        pytest.param((6, 4), -3, marks=LONG),  # no such axis
    ],
    ids=str,
)
def test_units_have_their_range(shape, axis):
    check(draw(math.prod(shape)).reshape(shape), axis=axis)


@pytest.mark.parametrize("axis", [-1, pytest.param(-3, marks=LONG)])
def test_a_unit_with_a_nan_says_so(axis):
    x = draw(2, 3, 4, 5)
    x[0, 0, 0, 0], x[1, 1, 1, 1], x[0, 2, 2, 2] = math.nan, math.inf, -math.inf
    x[1, 0, 3, 3] = math.copysign(math.nan, -1)
    check(x, axis=axis)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "slices": lambda x: x[:, 1:, ::2, 1:],
    "expanded": lambda x: x[:1].expand(x.shape),
    "overlapping": lambda x: x.reshape(-1).as_strided((4, 3, 5, 2), (7, 2, 1, 1)),
}


@pytest.mark.parametrize("samples", [WHOLE, pytest.param(None, marks=LONG)], ids=["fingerprint", "no fingerprint"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, samples):
    check(LAYOUTS[layout](draw(4, 5, 6, 7)), axis=-3, samples=samples)


def test_more_dimensions_than_the_kernel_walks_are_copied():
    check(draw(2, 2, 2, 2, 2, 4)[..., ::2].permute(5, 0, 4, 1, 3, 2)[:, ::2, :, :, ::2], axis=-1)


def test_what_is_not_finite_is_counted_apart():
    x = draw(3, 700) + 100
    x[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    check(x, index=3)


@pytest.mark.parametrize("value", [math.nan, pytest.param(-math.inf, marks=LONG), pytest.param(0.0, marks=LONG)])
def test_nothing_but_one_value(value):
    check(torch.full((700,), value))


@pytest.mark.parametrize("magnitude", [1e-42, pytest.param(1e-30, marks=LONG), pytest.param(3e37, marks=LONG)])
def test_magnitudes_whose_squares_float32_does_not_hold(magnitude):
    check(draw(900) * magnitude)


@LONG
def test_the_mean_may_be_large_against_the_deviations():
    check(draw(5000) * 1e-2 + torch.linspace(0, 1, 5000) + 1e3)


def test_the_mean_of_a_tile_is_not_rounded_to_float32():
    x = draw(3000) * 1e-3 + 0.1
    assert collect([one_read(x)])[0].statistics.mean == pytest.approx(x.double().mean().item(), rel=2e-9)
    x = draw(3000) * 1e-4 + 1000
    assert collect([one_read(x)])[0].statistics.std == pytest.approx(x.double().std(correction=0).item(), rel=1e-5)


def test_a_constant_has_no_deviation():
    (found,) = collect([one_read(torch.full((5000,), 0.1))])
    assert found.statistics.std == 0
    assert found.statistics.mean == pytest.approx(0.1)


@pytest.mark.parametrize(
    "shape", [pytest.param((3, 5), marks=LONG), (3, 300), (6, 40), pytest.param((3, 2, 1000), marks=LONG)], ids=str
)
def test_samples_have_their_hashes(shape):
    """Dimension 0 of 6 is the batch of 3, flattened with the next dimension."""
    batch = draw(3, 2, seed=1)
    samples = samples_of([batch.to(DEVICE)])
    (found,) = collect([one_read(draw(*shape), axis=-1, samples=samples)])
    (meant,) = collect([reduce_on_device(draw(*shape), axis=-1, samples=samples_of([batch]))])
    np.testing.assert_allclose(found.fingerprint, meant.fingerprint, rtol=0, atol=1e-5)
    assert found.units == meant.units


def test_they_merge_with_the_numbers_of_the_reference():
    x = draw(4, 300)
    (both,) = collect([merge(one_read(x[:3], axis=-1), reduce(x[3:], axis=-1))])
    assert both.statistics.count == 1200
    assert both.statistics.mean == pytest.approx(x.mean().item(), abs=1e-6)


@pytest.mark.parametrize("x", [torch.arange(5), torch.empty(0, 3), torch.ones(3, dtype=torch.complex64).conj().imag])
def test_what_it_does_not_read_is_for_torch(x):
    assert one_read(x) is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_on_cuda_is_read_by_the_kernels_without_waiting(nothing_waits):
    x = draw(64, 3, 50, 50).cuda()
    expected = collect([reduce(x.cpu(), axis=-3)])[0]
    reduce(x, axis=-3)  # compiles
    with nothing_waits():
        reduced = reduce(x, axis=-3)
    assert operations.TRITON.problem is None
    (found,) = collect([reduced])
    assert found.units == expected.units
    assert found.statistics.std == pytest.approx(expected.statistics.std, rel=1e-6)
    np.testing.assert_allclose(found.fingerprint, expected.fingerprint, rtol=0, atol=1e-6 * x.norm().item())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_runs_on_the_stream_that_is_current_and_within_a_captured_graph():
    x = draw(3000).cuda()
    reduce(x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reduced = reduce(x)
    x.fill_(2.0)
    graph.replay()
    (found,) = collect([reduced])
    assert (found.statistics.min, found.statistics.max) == (2.0, 2.0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_far_back_have_bits_of_their_own():
    check(draw((1 << 21) + 700))  # the interpreter takes minutes
