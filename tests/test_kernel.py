"""The compiled kernel alone: any memory, any instruction set, and which code runs."""

import contextlib
import ctypes
import importlib.util
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_modelprobe import kernel
from pytest_modelprobe._torch import openmp_team
from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.statistics.operations import PackedReduction, prepare

compiled = pytest.mark.skipif(kernel.active is None, reason="the kernel is not compiled")

KINDS = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
HASH = bytes(8)


@pytest.fixture(autouse=True, scope="module")
def _tables():
    if kernel.active is not None:
        prepare()


def drawn(kind, count, seed, scale=1.0, special=()):
    """Return elements as they lie in memory, and as float64."""
    values = np.random.default_rng(seed).standard_normal(count) * scale
    for place, value in enumerate(special):
        values[(place * 7919) % count] = value
    if kind == "bfloat16":
        wide = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return (wide >> np.uint32(16)).astype(np.uint16), wide.view(np.float32).astype(np.float64)
    stored = values.astype(kind)
    return stored, stored.astype(np.float64)


def strided(array, start, shape, strides):
    size = array.itemsize
    return np.lib.stride_tricks.as_strided(array[start:], shape, [step * size for step in strides], writeable=False)


def unpack(numbers):
    found = PackedReduction(1, None, numbers).computed()
    counts = None if found.histogram is None else found.histogram.numpy()
    return found.row, found.low, found.high, found.fingerprint, counts


def check(found, values, axis=None):
    """Compare with numpy in float64."""
    row, low, high, *_ = unpack(found)
    finite = values[np.isfinite(values)]
    assert row[:5] == (
        finite.size,
        np.isnan(values).sum(),
        np.isposinf(values).sum(),
        np.isneginf(values).sum(),
        (values == 0).sum(),
    )
    if finite.size:
        rms = math.sqrt((finite**2).mean())
        assert row[8:10] == (finite.min(), finite.max())
        assert row[10] == pytest.approx(finite.mean(), rel=0, abs=1e-6 * rms)
        assert math.sqrt(row[11] / finite.size) == pytest.approx(finite.std(), rel=0, abs=1e-6 * rms)
    if axis is not None:
        by_unit = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
        np.testing.assert_array_equal(low, by_unit.min(1))
        np.testing.assert_array_equal(high, by_unit.max(1))


@st.composite
def views(draw):
    """Any strides within a buffer: zero, negative, overlapping."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 17, 64, 130]), max_size=4)))
    strides = tuple(draw(st.integers(-40, 90)) for _ in shape)
    lowest = sum(min(0, (n - 1) * step) for n, step in zip(shape, strides, strict=True))
    highest = sum(max(0, (n - 1) * step) for n, step in zip(shape, strides, strict=True))
    return shape, strides, -lowest, highest - lowest + 1


SPECIAL = st.lists(st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 40.0]), max_size=5)


@compiled
@given(views(), st.sampled_from(list(KINDS)), st.integers(0, 99), st.data(), SPECIAL)
@settings(max_examples=int(os.environ.get("MODELPROBE_EXAMPLES", "50")), deadline=None)
def test_any_strides(view, kind, seed, data, special):
    shape, strides, start, size = view
    stored, values = drawn(kind, size, seed, special=special)
    axis = data.draw(st.integers(-len(shape), -1)) if shape else None
    address = stored.ctypes.data + start * stored.itemsize
    found = kernel.active.reduce(address, KINDS[kind], shape, strides, axis, 0, HASH, 1)
    with np.errstate(all="ignore"):
        check(found, strided(values, start, shape, strides), axis)


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_any_size(kind):
    for size in (1, 2, 15, 16, 17, 255, 256, 257, 4095, 4097, 8192, 8193, 40_001):
        stored, values = drawn(kind, size, size, special=[0.0])
        check(kernel.active.reduce(stored.ctypes.data, KINDS[kind], (size,), (1,), None, 0, HASH, 1), values)


@compiled
def test_memory_that_is_not_aligned_and_read_only():
    kind = "float64"
    stored, values = drawn(kind, 10_000, 1)
    data = b"x" + stored.tobytes()
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value + 1
    check(
        kernel.active.reduce(address, KINDS[kind], (100, 100), (100, 1), -1, 0, HASH, 1),
        values.reshape(100, 100),
        -1,
    )


@compiled
def test_no_element_is_read_where_there_is_none():
    row, low, high, numbers, _ = unpack(kernel.active.reduce(0, 0, (3, 0), (0, 1), -2, 0, HASH, 1))
    assert row[:5] == (0, 0, 0, 0, 0)
    assert low.tolist() == [math.inf] * 3
    assert high.tolist() == [-math.inf] * 3
    assert numbers.tolist() == [0.0] * 16


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_neither_instruction_set_nor_number_of_threads_changes_a_bit(kind):
    """Of random tensors, in any order of dimensions, with gaps and a broadcast one."""
    levels, examples = kernel.active.LEVELS, int(os.environ.get("MODELPROBE_EXAMPLES", "80"))
    try:
        for seed in range(examples // len(KINDS)):
            arguments, stored = random_view(kind, np.random.default_rng(seed))
            found = []
            for level in levels:
                kernel.active.choose(level)
                found += [kernel.active.reduce(*arguments, 1, True)]
                with team_of(3):
                    found += [kernel.active.reduce(*arguments, threads, True) for threads in (2, 5)]
            assert found == [found[0]] * len(found), f"seed {seed}"
            del stored
    finally:
        kernel.active.choose(levels[-1])


def random_view(kind, rng):
    """Return the arguments of a reduction, and the memory that it reads."""
    sizes = [int(size) for size in rng.choice([1, 2, 3, 7, 16, 33, 64, 250], rng.integers(1, 5))]
    while math.prod(sizes) < 200_000 and rng.random() < 0.7:
        sizes[rng.integers(len(sizes))] *= int(rng.integers(2, 9))
    while math.prod(sizes) > 300_000:
        sizes[int(np.argmax(sizes))] //= 3
    lying, strides, step = rng.permutation(len(sizes)), [0] * len(sizes), int(rng.integers(1, 3))
    for place in lying:
        strides[place], step = step, step * sizes[place]
    if rng.random() < 0.2:
        strides[int(rng.integers(len(sizes)))] = 0
    special = [math.nan, math.inf] if rng.random() < 0.2 else [0.0]
    stored, _ = drawn(kind, step, int(rng.integers(1 << 30)), 10.0 ** int(rng.integers(-12, 4)), special)
    axis = [None, *range(-len(sizes), 0)][rng.integers(len(sizes) + 1)]
    signs = HASH * (sizes[0] if rng.random() < 0.5 else 1)
    return (stored.ctypes.data, KINDS[kind], tuple(sizes), tuple(strides), axis, 0, signs), stored


@compiled
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 7, 8, 16, 33, 49, 70]), min_size=2, max_size=4),
    st.sampled_from(list(KINDS)),
    st.data(),
)
@settings(max_examples=int(os.environ.get("MODELPROBE_EXAMPLES", "40")), deadline=None)
def test_with_a_fingerprint_the_order_in_memory_changes_no_bit(shape, kind, data):
    while math.prod(shape) > 40_000:
        shape[shape.index(max(shape))] //= 2
    order = data.draw(st.permutations(range(len(shape))))
    axis = data.draw(st.integers(-len(shape), -1))
    signs = HASH * data.draw(st.sampled_from([1, shape[0]]))
    check_orders(kind, tuple(shape), order, axis, signs)


def check_orders(kind, shape, order, axis, signs):
    """Compare what lies in logical order with the same, permuted to lie in another order of the dimensions."""
    straight = drawn(kind, math.prod(shape), 3)[0].reshape(shape)
    turned = np.ascontiguousarray(straight.transpose(order)).transpose(np.argsort(order))
    found = [
        kernel.active.reduce(
            x.ctypes.data, KINDS[kind], shape, tuple(step // x.itemsize for step in x.strides), axis, 0, signs, 1
        )
        for x in (straight, turned)
    ]
    assert found[0] == found[1]


# --- several together -------------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("special", [(0.0,), (math.nan, math.inf, -math.inf)])
def test_numbers_of_two_tensors_together_are_those_of_all_their_elements(kind, special):
    one, other = (drawn(kind, 300, seed, special=special if seed else ())[0] for seed in (0, 1))
    both = np.concatenate([one, other])
    signs = None if math.nan in special else HASH  # of what is not finite the kernel computes no fingerprint

    def numbers(array, index):
        shape, strides = (len(array) // 3, 3), (3, 1)
        return kernel.active.reduce(array.ctypes.data, KINDS[kind], shape, strides, -1, index, signs, 1, True)

    merged = kernel.active.merge(numbers(one, 0), numbers(other, 5))
    row, low, high, fingerprint, counts = unpack(merged)
    check(merged, both.astype(np.float64).reshape(-1, 3), -1)
    assert row[5:8] == ((5, 5, 5) if math.nan in special else (math.inf,) * 3)
    assert (low.dtype, high.dtype) == (kind, kind)
    parts = [unpack(numbers(array, 0)) for array in (one, other)]
    assert counts.sum() == np.isfinite(both).sum()
    assert counts.tolist() == sum(part[4] for part in parts).tolist()
    if signs is not None:
        assert fingerprint.tolist() == sum(part[3] for part in parts).tolist()


@compiled
def test_numbers_of_tensors_of_other_kinds_are_not_put_together():
    array = np.ones(6)

    def numbers(kind, units, signs, *histogram):
        return kernel.active.reduce(array.ctypes.data, kind, (1, units), (units, 1), -1, 0, signs, 1, *histogram)

    one = numbers(1, 3, HASH)
    assert kernel.active.merge(one, one) is not None
    others = [numbers(0, 3, HASH), numbers(0, 6, HASH), numbers(1, 2, HASH), numbers(1, 3, None)]
    for other in (*others, numbers(1, 3, HASH, True)):
        assert kernel.active.merge(one, other) is None
        assert kernel.active.merge(other, one) is None


@compiled
def test_what_is_not_the_numbers_of_a_tensor_is_refused():
    with pytest.raises(ValueError, match="no numbers of a tensor"):
        kernel.active.merge(b"", b"")
    with pytest.raises(TypeError):
        kernel.active.merge(1, 2)


# --- threads ----------------------------------------------------------------------------------------------------------


TEAM = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@contextlib.contextmanager
def team_of(size):
    """A team of threads in place of that of torch, and how often each reduction called it."""
    calls = []

    def run(work, data, *_):
        calls.append(size)
        threads = [threading.Thread(target=WORK(work), args=(data,)) for _ in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    called = TEAM(run)
    kernel.active.set_team(ctypes.cast(called, ctypes.c_void_p).value)
    try:
        yield calls
    finally:
        kernel.active.set_team(openmp_team())


LARGE = {
    "units": ((40, 8, 10_000), (80_000, 10_000, 1), -2),
    "columns": ((64_000, 50), (50, 1), -1),
    "slices": ((2_000, 799), (1_600, 2), -1),
}


@compiled
@pytest.mark.parametrize("layout", LARGE)
def test_any_number_of_threads_gives_the_same_bits(layout):
    (shape, strides, axis), kind = LARGE[layout], "float64" if layout == "columns" else "float32"
    stored, _ = drawn(kind, 3_200_000, 5, special=[math.nan, 0.0, math.inf])
    for special in (True, False):
        if not special:
            stored[~np.isfinite(stored)] = 1
        arguments = (stored.ctypes.data, KINDS[kind], shape, strides, axis, 0, HASH)
        alone = kernel.active.reduce(*arguments, 1)
        for size in (2, 7):
            for threads in (2, 5):  # a team may have fewer threads than were expected, or more
                with team_of(size) as calls:
                    assert kernel.active.reduce(*arguments, threads) == alone
                assert calls == [size]


@compiled
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no such signals")
def test_a_signal_while_threads_read_is_handled_after_and_a_process_ends_while_one_reads():
    # In the last thread only the kernel runs: a process that ends during an operation of torch may be aborted.
    script = """
import signal, sys, threading, time
import torch
from pytest_modelprobe import kernel
from pytest_modelprobe.statistics import reduce
torch.set_num_threads(2)
x = torch.ones(5_000_000)
before = reduce(x)
def read_for_ever():
    while True:
        reduce(x)
def stop(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, stop)
for _ in range(20):
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    try:
        read_for_ever()
    except KeyboardInterrupt:
        pass
print(reduce(x).numbers == before.numbers, flush=True)
arguments = (x.data_ptr(), 0, (len(x),), (1,), None, 0, None, 2)
def read_for_ever():
    while True:
        kernel.active.reduce(*arguments)
threading.Thread(target=read_for_ever, daemon=True).start()
time.sleep(0.05)
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 3)


@compiled
def test_what_cannot_be_meant_is_an_error():
    for arguments, error in (
        ((0, 9, (), (), None, 0, None, 1), "ValueError: no such type, strides or axis"),
        ((0, 0, (2,), (), None, 0, None, 1), "ValueError: no such type, strides or axis"),
        ((0, 0, [2], (1,), None, 0, None, 1), "TypeError: sizes and strides are tuples"),
        ((0, 0, (1,) * 65, (1,) * 65, None, 0, None, 1), "ValueError: a tensor of 65 dimensions"),
        ((0, 0, (0,), (1,), None, 0, b"123", 1), "ValueError: hashes that are not one uint64 for each sample"),
        ((0, 0), "TypeError: reduce() takes 8 arguments or 9"),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            kernel.active.reduce(*arguments)
        assert f"{caught.type.__name__}: {caught.value}" == error


# --- which code runs --------------------------------------------------------------------------------------------------


def test_the_variable_makes_a_missing_kernel_an_error(monkeypatch):
    monkeypatch.setenv("MODELPROBE_KERNEL", "compiled")
    monkeypatch.setitem(sys.modules, "pytest_modelprobe._kernel", None)
    with pytest.raises(ModelProbeError, match=r"^MODELPROBE_KERNEL=compiled: there is no compiled module"):
        kernel._load()


def test_another_value_of_the_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("MODELPROBE_KERNEL", "c")
    with pytest.raises(ModelProbeError, match=r"^MODELPROBE_KERNEL=c: it is 'torch' or 'compiled', or not set$"):
        kernel._load()


def test_without_the_compiled_module_torch_computes(monkeypatch):
    monkeypatch.delenv("MODELPROBE_KERNEL", raising=False)
    monkeypatch.setitem(sys.modules, "pytest_modelprobe._kernel", None)
    monkeypatch.setattr(kernel, "active", kernel._load())
    assert kernel.description() == "torch (no compiled module)"


def test_asking_which_code_runs_does_not_import_torch():
    code = "import sys; from pytest_modelprobe import kernel; kernel.description(); print('torch' in sys.modules)"
    package = Path(importlib.util.find_spec("pytest_modelprobe").origin).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=package.parent, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
