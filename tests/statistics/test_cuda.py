"""Which code computes the numbers of tensors on CUDA."""

import sys
import types

import pytest
import torch

from pytest_modelprobe.statistics import WHOLE, operations

MODULE = "pytest_modelprobe.statistics.triton_kernels"


@pytest.fixture
def triton(monkeypatch):
    """Nothing is known yet of the kernels, and torch is one for CUDA."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("MODELPROBE_KERNEL", "triton")
    return operations.Triton()


def test_without_triton_torch_computes(triton, monkeypatch):
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert triton.description() == "torch (import of triton halted; None in sys.modules)"


@pytest.mark.parametrize("asked", ["", "torch", "compiled"])
def test_unless_triton_is_asked_for_torch_computes(triton, monkeypatch, asked):
    monkeypatch.setenv("MODELPROBE_KERNEL", asked)
    assert triton.reduced(torch.ones(3), None, 0, WHOLE) is None
    assert triton.description() == "torch (MODELPROBE_KERNEL=triton asks for kernels in Triton)"


def test_on_another_platform_torch_computes(triton, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert triton.description() == "torch (not CUDA)"


def kernels(monkeypatch, reduced):
    module = types.ModuleType("triton_kernels")
    module.reduced = reduced
    monkeypatch.setitem(sys.modules, MODULE, module)


def test_after_an_error_of_triton_torch_computes(triton, monkeypatch):
    def reduced(x, *_):
        calls.append(x.dtype)
        if x.dtype == torch.bfloat16:
            raise RuntimeError("at 12:8:\n    PassManager::run failed")
        return "by Triton"

    calls = []
    kernels(monkeypatch, reduced)
    assert triton.description() == "Triton"
    dtypes = [torch.float32, torch.bfloat16, torch.float32]
    found = [triton.reduced(torch.ones(3, dtype=dtype), None, 0, WHOLE) for dtype in dtypes]
    assert found == ["by Triton", None, None]
    assert calls == [torch.float32, *dtypes[:2]]
    assert triton.description() == "torch (RuntimeError: at 12:8: PassManager::run failed)"


def test_a_device_without_memory_says_so(triton, monkeypatch):
    def reduced(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    kernels(monkeypatch, reduced)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        triton.reduced(torch.ones(3), None, 0, WHOLE)
    assert triton.problem is None
