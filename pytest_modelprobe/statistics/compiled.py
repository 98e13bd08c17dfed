"""Reductions on the CPU by the compiled kernel, in one read.

No operation of torch computes several numbers in one pass, so each of them costs another read of the memory. The kernel
takes an address, sizes and strides, and knows nothing of torch. Whatever it cannot read is left to torch.
"""

from __future__ import annotations

import functools
import os

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from pytest_modelprobe import kernel
from pytest_modelprobe._torch import is_wrapped, openmp_team
from pytest_modelprobe.models import holds_elements

from .fingerprint import project
from .readable import ambient_modes_disabled, is_expanded
from .reduced import PackedReduction, Reduction
from .samples import Samples
from .signs import columns, masks, orders

_KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


def by_kernel(
    x: Tensor, axis: int | None, index: int, samples: Samples | None, histogram: bool = False
) -> Reduction | None:
    """Return the reduction of a CPU tensor, or None if torch has to compute it.

    Torch computes if there is no compiled kernel, if the dtype is not one of the four, if the tensor is a subclass or
    belongs to a transform, if it has no elements or is expanded to very many, and if an element is above 1e150. No
    operation of torch is called here, so a dispatch mode may be active, but no function mode.

    Args:
        x: The tensor; it may require a gradient, and modes may be active.
        axis: Axis of the units, counted from the end.
        index: Number of the forward.
        samples: The samples of the forward, or `None` if no fingerprint is asked for.
        histogram: Whether to count the elements in bins too.
    """
    if kernel.active is None or (type(x) is not Tensor and type(x) is not Parameter) or not x.is_cpu:
        return None
    kind = _KINDS.get(x.dtype)
    if kind is None or is_wrapped(x) or x.layout is not torch.strided or x.is_nested or x.is_neg():
        return None
    # The kernel reads any address that it is given, so the storage is asked first whether it holds the elements. A
    # tensor without elements has no address.
    if not holds_elements(x) or not (address := x.data_ptr()) or is_expanded(x):
        return None
    prepare()
    shape, hashes = x.shape, None
    if axis is not None and -axis > len(shape):
        axis = None
    if samples is not None:
        hashes = samples.hashes(shape)
    threads = torch.get_num_threads()
    numbers = kernel.active.reduce(address, kind, shape, x.stride(), axis, index, hashes, threads, histogram)
    if numbers is None:
        return None
    packed = PackedReduction(1, axis, numbers)
    if samples is None or packed.has_fingerprint:
        return packed
    # An element is not finite. Torch computes the fingerprint, where other numbers stand for such elements.
    reduced = packed.computed()
    with ambient_modes_disabled():
        reduced.fingerprint = project(x.detach(), samples)
    return reduced


def by_kernel_merged(a: Reduction, b: Reduction) -> PackedReduction | None:
    """Return two reductions together, or `None` if they are not both of the kernel, or differ in kind."""
    if type(a) is not PackedReduction or type(b) is not PackedReduction or a.axis != b.axis or kernel.active is None:
        return None
    numbers = kernel.active.merge(a.numbers, b.numbers)
    return None if numbers is None else PackedReduction(a.tensors + b.tensors, a.axis, numbers)


@functools.cache
def prepare() -> None:
    """Hand the tables of signs and orders to the kernel, and the team of threads."""
    assert kernel.active is not None
    tables = masks().astype(np.int8), columns()[:16].T.astype(np.int8), orders().astype(np.uint8)
    kernel.active.set_tables(*(table.tobytes() for table in tables))
    kernel.active.set_team(openmp_team())
    if hasattr(os, "register_at_fork"):  # the threads of a team stay with the parent, and a child would wait for them
        os.register_at_fork(after_in_child=functools.partial(kernel.active.set_team, 0))
