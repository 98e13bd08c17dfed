"""The parameters and buffers of a module itself; of an atomic module also those of its children."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pytest_modelprobe.models import has_dense_storage, own_buffers

ATOMIC = (nn.MultiheadAttention, nn.RNNBase)
"""Layers that are treated as one with the modules inside them."""


def weights_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the floating parameters of a layer itself, with their names."""
    for name, parameter in module.named_parameters(recurse=isinstance(module, ATOMIC)):
        if parameter.is_floating_point() and has_dense_storage(parameter):
            yield name, parameter


def buffers_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers of a layer itself that its code may write to, with their names."""
    found = own_buffers(module, atomic=isinstance(module, ATOMIC))
    return [(name, buffer) for name, buffer in found if has_dense_storage(buffer) and not buffer.is_inference()]


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every element."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
