"""The first operation that differs between two devices: `./dev fake-cuda` runs this without a GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pytest_modelprobe import ModelProbe, assert_same_behavior, checks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Attention(nn.Module):
    approximate = "none"

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = F.softmax(q @ k.transpose(1, 2), dim=-1)
        x = self.out(weights @ v)
        return F.gelu(10 * x, approximate=self.approximate if x.is_cuda else "none")


class Approximate(Attention):
    approximate = "tanh"


@pytest.fixture
def _softmax_of_rows() -> Iterator[None]:
    """Compute a softmax along another axis on CUDA."""
    library = torch.library.Library("aten", "IMPL")

    def kernel(x, dim, half_to_float):
        return torch.ops.aten._softmax.default(x.cpu(), 1, half_to_float).to(x.device)

    library.impl("_softmax", kernel, "CUDA")
    yield
    library._destroy()


def texts(kind):
    """Return what a comparison of two records and the check say of a model on two devices."""
    cpu, cuda = ModelProbe(device="cpu"), ModelProbe(device="cuda")
    model, x = cpu.build(kind), cpu.randn(3, 8, 8)
    with pytest.raises(AssertionError) as error:
        assert_same_behavior(cuda.run(copy.deepcopy(model), x), cpu.run(model, x))
    return str(error.value), checks.device_parity.outcome(cpu, model, x, device="cuda", tolerance=1e-4).text


def at(number):
    return f"test_devices.py:{Attention.forward.__code__.co_firstlineno + number}"


def test_code_that_depends_on_the_device_is_named() -> None:
    now, then = (f"torch.nn.functional.gelu(approximate='{how}') at {at(4)}" for how in ("tanh", "none"))
    for text in texts(Approximate):
        assert f"First operation that differs: {now}, not {then}." in text


@pytest.mark.usefixtures("_softmax_of_rows")
def test_an_operation_that_a_device_computes_otherwise_is_named() -> None:
    for text in texts(Attention):
        assert f"First operation that differs: torch.nn.functional.softmax(dim=-1) at {at(2)}." in text


def test_of_equal_devices_nothing_is_said() -> None:
    cpu = ModelProbe(device="cpu")
    assert checks.device_parity(cpu, cpu.build(Attention), cpu.randn(3, 8, 8), device="cuda")
