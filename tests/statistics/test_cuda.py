"""Which code computes the numbers of tensors on CUDA."""

import sys
import types

import pytest
import torch

from pytest_modelprobe.statistics import WHOLE, cuda


@pytest.fixture
def kernels(monkeypatch):
    """Nothing is known yet of the kernels, and torch is one for CUDA."""
    kernels = cuda._Kernels()
    monkeypatch.setattr(cuda, "KERNELS", kernels)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("MODELPROBE_KERNEL", "triton")
    return kernels


def test_without_triton_torch_computes(kernels, monkeypatch):
    monkeypatch.delitem(sys.modules, "pytest_modelprobe.statistics.triton_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert cuda.by_kernels(torch.ones(3), None, 0, WHOLE) is None
    assert kernels.problem == "import of triton halted; None in sys.modules"


def test_with_a_triton_that_cannot_be_imported_torch_computes(kernels, monkeypatch, tmp_path):
    (tmp_path / "triton.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("triton", "pytest_modelprobe.statistics.triton_kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert cuda.by_kernels(torch.ones(3), None, 0, WHOLE) is None
    assert kernels.problem == "RuntimeError: no driver"


@pytest.mark.parametrize("asked", ["", "torch", "compiled"])
def test_unless_triton_is_asked_for_torch_computes(kernels, monkeypatch, asked):
    monkeypatch.setenv("MODELPROBE_KERNEL", asked)
    assert cuda.by_kernels(torch.ones(3), None, 0, WHOLE) is None
    assert cuda.description() == "torch (MODELPROBE_KERNEL=triton asks for kernels in Triton)"


def test_on_another_platform_torch_computes(kernels, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cuda.by_kernels(torch.ones(3), None, 0, WHOLE) is None
    assert kernels.problem == "not CUDA"


def test_after_an_error_of_triton_torch_computes_what_is_alike(kernels, monkeypatch):
    def by_triton(module, x, *_):
        calls.append(x.dtype)
        if x.dtype == torch.bfloat16:
            raise RuntimeError("PassManager::run failed")
        return "by Triton"

    calls = []
    kernels.module = types.ModuleType("triton_kernels")
    monkeypatch.setattr(cuda, "by_triton", by_triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dtypes = [torch.bfloat16, torch.float32] * 2
    found = [cuda.by_kernels(torch.ones(3, dtype=dtype), None, 0, WHOLE) for dtype in dtypes]
    assert found == [None, "by Triton"] * 2
    assert calls == [torch.bfloat16, torch.float32, torch.float32]
    assert cuda.description() == "Triton, and torch where it failed (RuntimeError: PassManager::run failed)"


def test_a_device_without_memory_says_so(kernels, monkeypatch):
    def by_triton(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    kernels.module = types.ModuleType("triton_kernels")
    monkeypatch.setattr(cuda, "by_triton", by_triton)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        cuda.by_kernels(torch.ones(3), None, 0, WHOLE)
    assert kernels.problem is None


def test_which_code_computes_is_said_in_words(kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kernels.module = types.ModuleType("triton_kernels")
    assert cuda.description() == "Triton"
    kernels.problem = "RuntimeError: Failed to find C compiler."
    assert cuda.description() == "torch (RuntimeError: Failed to find C compiler.)"
    kernels.problem = "CompilationError: at 12:8:\n    x = tl.load(p)\n        ^"
    assert cuda.description() == "torch (CompilationError: at 12:8: x = tl.load(p) ^)"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_which_code_computes_is_known_once_it_was_tried(monkeypatch):
    monkeypatch.setattr(cuda, "KERNELS", cuda._Kernels())
    monkeypatch.setenv("MODELPROBE_KERNEL", "triton")
    monkeypatch.setattr(cuda, "by_triton", lambda *_: 1 / 0)
    assert cuda.description() == "torch (ZeroDivisionError: division by zero)"
