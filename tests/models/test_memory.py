"""Tensors whose memory is gone or none, in a process of their own: to read one may end it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pytest_modelprobe.models.tensors import as_bits, detached_copy, has_dense_storage, holds_elements

ODD_TENSORS = Path(__file__).with_name("odd_tensors.py")


def last_line_of(*arguments):
    """Return what was said last; fail with the case in which the process ended."""
    done = subprocess.run([sys.executable, ODD_TENSORS, *arguments], capture_output=True, text=True, check=False)
    said = done.stdout.splitlines() or ["nothing"]
    if done.returncode:
        pytest.fail(f"the process ended with {done.returncode} at: {said[-1]}\n{done.stderr[-4000:]}")
    return said[-1]


@pytest.mark.usefixtures("_forked")
def test_no_way_of_reading_reads_memory_that_is_not_the_tensors():
    """Under AddressSanitizer (``tox -e kernel-sanitized``) too, which sees less than everything.

    It checks each read of the kernel, which is compiled for it, and the memory that torch allocates with
    ``posix_memalign`` and copies with ``memcpy``, as it intercepts both. It does not see what torch's own vectorized
    loops read beyond the end of an allocation: those are not compiled for it. A read of an address that is mapped to
    nothing ends the process with or without it. What another thread frees in the middle of a read is not tried, as no
    operation of torch survives it; another thread that writes is.
    """
    count = os.environ.get("MODELPROBE_EXAMPLES", "300")
    assert last_line_of(count, "1").startswith(f"read {count} tensors: ")


@pytest.mark.parametrize(
    ("tensor", "size", "holds"),
    [
        (torch.ones(4), 16, True),
        (torch.ones(4), 15, False),
        (torch.ones(4)[1:], 0, False),
        (torch.ones(4)[3:], 15, False),
        (torch.ones(4)[::3], 16, True),
        (torch.ones(4)[::2], 12, True),
        (torch.ones(2, 2).t()[:, 1], 16, True),
        (torch.ones(2, 2)[:, 0], 12, True),
        (torch.ones(4)[:1].expand(100), 4, True),
        (torch.ones(4)[4:], 0, True),
        (torch.ones(4, 0), 0, True),
        (torch.tensor(1.0), 4, True),
        (torch.tensor(1.0), 3, False),
    ],
)
def test_a_storage_holds_what_sizes_and_strides_reach(tensor, size, holds):
    tensor.untyped_storage().resize_(size)
    assert holds_elements(tensor) is holds
    assert has_dense_storage(tensor) is holds
    assert (detached_copy(tensor) is not None) is holds


def test_a_copy_of_an_expanded_tensor_is_expanded():
    copy = detached_copy(torch.arange(3.0).expand(1 << 40, 3))
    assert (copy.shape, copy.stride()) == ((1 << 40, 3), (0, 1))
    assert copy[7].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.complex128])
def test_bits_share_the_memory_of_any_dtype(dtype):
    tensor = torch.zeros(6, 2, dtype=dtype)[1::2].t()
    bits = as_bits(tensor)
    assert bits.numel() * bits.element_size() == tensor.numel() * tensor.element_size()
    bits.copy_(as_bits(torch.ones(2, 3, dtype=dtype)))
    assert tensor.resolve_conj().to(torch.complex128).real.tolist() == [[1.0] * 3] * 2
