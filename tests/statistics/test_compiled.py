"""The fingerprint by the compiled kernel, against that by numpy."""

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch

from pytest_modelprobe import kernel
from pytest_modelprobe._torch import openmp_team
from pytest_modelprobe.statistics import WHOLE, reduce, samples_of
from pytest_modelprobe.statistics.fingerprint import project
from pytest_modelprobe.statistics.operations import count

pytestmark = pytest.mark.skipif(kernel.active is None, reason="the kernel is not compiled")

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES = [(1,), (3, 4), (5, 256), (4, 700), (3, 2048), (7, 5000), (2, 70_000), (3, 40, 1100), (1, 1_200_000)]
ORDERS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "channels_last": lambda x: (
        x.reshape(len(x), 1, 1, -1).expand(len(x), 24, 3, -1).contiguous(memory_format=torch.channels_last)[..., :2048]
    ),
    "slices": lambda x: torch.cat([x, x], -1)[..., 1::2],
    "expanded": lambda x: x.unsqueeze(1).expand(len(x), 3, *x.shape[1:]),
}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("order", ORDERS)
def test_it_is_that_of_the_reference(order):
    for shape, dtype in zip(SHAPES, itertools.cycle(DTYPES), strict=False):
        x = ORDERS[order](draw(*shape).to(dtype))
        of = samples_of([draw(len(x), 6)])
        for samples in (of, WHOLE):
            found, reference = reduce(x, samples=samples).fingerprint, project(x, samples)
            assert found == pytest.approx(reference, abs=2e-7 * float(x.double().norm()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_where_it_is_not_finite_it_is_the_reference(value):
    x = draw(300, 300)
    x[7] = value
    assert reduce(x).fingerprint.tolist() == project(x).tolist()


def test_a_tensor_that_requires_a_gradient_is_read_where_it_is_not_finite_too():
    x = draw(3, 4)
    x[1] = math.nan
    with torch.inference_mode():
        expected = reduce(x).fingerprint.tolist()
    assert reduce(x.requires_grad_()).fingerprint.tolist() == expected == project(x.detach()).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["contiguous", "slices"])
def test_the_histogram_is_that_of_torch(dtype, order):
    edges = torch.cat([2.0 ** torch.arange(-80, 80, 0.5, dtype=torch.float64), torch.tensor([0.0, math.nan, math.inf])])
    around = [edges, edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(1e300))]
    x = ORDERS[order](
        torch.cat([*around, *(-part for part in around), draw(3, 323).flatten()]).reshape(9, -1).to(dtype)
    )
    for fingerprint in (True, False):
        assert (
            reduce(x, fingerprint=fingerprint, histogram=True).computed().histogram.tolist()
            == count(x, torch.float64).tolist()
        )


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _three_threads():
    count = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("_three_threads")
def test_several_threads_count_the_same_histogram():
    x = draw(3_000_000)
    assert reduce(x, histogram=True).computed().histogram.tolist() == count(x, torch.float64).tolist()


@pytest.mark.skipif(sys.platform != "linux", reason="the library is looked for on Linux")
def test_the_team_of_torch_is_found():
    assert openmp_team()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_reads_on_one_thread():
    script = """
import os, warnings, torch
from pytest_modelprobe.statistics import reduce
warnings.simplefilter("ignore")  # that a process with threads forks
torch.set_num_threads(2)
x = torch.ones(3_000_000)
before = reduce(x).numbers
pid = os.fork()
same = reduce(x).numbers == before
if not pid:
    os._exit(0 if same else 1)
print(same, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True 0\n"
