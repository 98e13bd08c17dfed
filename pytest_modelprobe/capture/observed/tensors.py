"""Facts about a tensor as records write them, and the key of its contents.

The key tells without reading a tensor whether it has the same elements as one that was seen before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from pytest_modelprobe._torch import storage_key
from pytest_modelprobe.record import Dimension, merge_dimensions
from pytest_modelprobe.statistics import ambient_modes_disabled

ContentKey = tuple[Any, ...]
"""Storage, version and layout of a tensor. Two tensors with one key have the same elements while the storage lives."""


def content_key(tensor: torch.Tensor, *, inference: bool = False) -> ContentKey | None:
    """Return the key of a tensor's contents, which is valid while its storage lives, or `None` if there is none.

    Inference tensors have no version: with ``inference``, their key does not tell that they were written to. Sparse
    tensors and those of `torch.func` transforms have no storage.
    """
    try:
        return (
            storage_key(tensor.untyped_storage()),
            -1 if inference and tensor.is_inference() else tensor._version,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_neg(),
        )
    except (RuntimeError, NotImplementedError):
        return None


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an `nn.Parameter`."""
    return type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter)  # the second alone costs a microsecond


def shape_of(tensor: torch.Tensor) -> tuple[Dimension, ...]:
    """Return the sizes of a tensor. Those of a nested tensor are of its parts, as a range where they differ.

    >>> shape_of(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(5, 3)], layout=torch.jagged))
    (2, (2, 5), 3)
    """
    if not tensor.is_nested:
        return tuple(tensor.shape)
    try:
        with ambient_modes_disabled():
            parts = [part.shape for part in tensor.detach().unbind()]
    except RuntimeError:  # its memory was freed, so only the number of parts is known
        return (tensor.size(0),)
    return len(parts), *(functools.reduce(merge_dimensions, sizes) for sizes in zip(*parts, strict=True))


@functools.cache
def plain_name(value: torch.dtype | torch.device) -> str:
    """Return a dtype or device as records write it: ``float32``, ``cuda:0``."""
    return str(value).removeprefix("torch.")


def describe(tensor: torch.Tensor) -> str:
    """Return shape, dtype and device: ``(2, 17, 64) float32 cpu``."""
    return f"{shape_of(tensor)} {plain_name(tensor.dtype)} {plain_name(tensor.device)}"
