"""The memory of tensors: whether it holds their elements, as bytes, and as an array of numpy.

Before an address is read, the storage is asked whether it holds the elements. Most operations of torch do not ask, and
a tensor whose memory was freed crashes the process.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # documented, but not in `__all__`

_CPU = (1, 0)  # the CPU as DLPack writes it: kDLCPU, device 0


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer dtype for each number of bytes."""


def has_dense_storage(leaf: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a dense tensor whose memory holds its elements: see `is_strided` and `holds_elements`.

    >>> x = torch.ones(3)
    >>> _ = x.untyped_storage().resize_(4)
    >>> has_dense_storage(x), has_dense_storage(torch.ones(3))
    (False, True)
    """
    return is_strided(leaf) and holds_elements(leaf)


def is_strided(leaf: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor with strides and a device, and not meta, fake, sparse, nested or uninitialized."""
    return (
        isinstance(leaf, torch.Tensor)
        and type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not is_lazy(leaf)
        and not leaf.is_meta
        and leaf.layout is torch.strided
        and not leaf.is_nested
    )


def holds_elements(tensor: torch.Tensor) -> bool:
    """Whether the storage of a strided tensor holds all elements that its sizes and strides reach.

    Most operations of torch do not ask. If the storage was freed, as FSDP does with its own, or has shrunk, they read
    what is behind it, and the process crashes or computes with memory that belongs to something else. A symbolic zero
    and a functional tensor have a storage with a size and without memory. If another thread frees the memory between
    this call and the reading, the process crashes as it does without the probe.
    """
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()  # raises if there is a size and no memory
    except RuntimeError:
        return False
    reached = tensor.numel()
    if not reached:
        return True
    if not tensor.is_contiguous():
        reached = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return bool((tensor.storage_offset() + reached) * tensor.element_size() <= storage.nbytes())


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor should have a storage that holds its elements, but does not: see `holds_elements`."""
    return is_strided(tensor) and not holds_elements(tensor)


def detached_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy outside of graphs, expanded as the tensor is, or `None` if torch cannot copy it.

    It cannot if the memory is gone, and not for dtypes such as ``uint3`` or tensors that are quantized by channel.

    >>> detached_copy(torch.ones(1).expand(1 << 40)).shape
    torch.Size([1099511627776])
    """
    if not is_strided(tensor):
        return tensor.detach().clone()
    if not holds_elements(tensor):
        return None
    try:
        copy = unexpanded(tensor.detach()).clone()
    except RuntimeError:
        return None
    return copy if copy.shape == tensor.shape else copy.expand(tensor.shape)


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that can be written to: one element along each expanded axis.

    >>> unexpanded(torch.ones(2, 1).expand(2, 3)).shape
    torch.Size([2, 1])
    """
    if 0 not in tensor.stride():  # older torch cannot slice a tensor that is quantized by channel
        return tensor
    return tensor[tuple(slice(None, None if stride else 1) for stride in tensor.stride())]


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor as integers in the same memory: these compare and copy in any dtype.

    >>> as_bits(torch.ones(2, dtype=torch.complex128)).shape
    torch.Size([2, 2])
    """
    words = -(-tensor.element_size() // 8)  # two for complex128, whose 16 bytes no integer dtype has
    shape = [n if step else min(n, 1) for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    bits = torch.empty(0, dtype=_WORDS[tensor.element_size() // words], device=tensor.device)
    place = tensor.storage_offset() * words, (*shape, words), (*(step * words for step in tensor.stride()), 1)
    return bits.set_(tensor.untyped_storage(), *place)


def version(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was written to. `None` if torch does not count: for inference and lazy tensors.

    >>> x = torch.ones(2)
    >>> version(x.add_(1))
    1
    """
    return None if is_lazy(tensor) or tensor.is_inference() else tensor._version


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as pairs of real numbers along a new last axis, and any other tensor as it is.

    >>> as_real(torch.tensor([1 + 2j]).conj())
    tensor([[ 1., -2.]])
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a flat uint8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the elements of a plain CPU tensor as an array in the same memory, to be read at once.

    `Tensor.numpy` and `numpy.asarray` make the memory unresizable for good, in every tensor that shares it, and the
    model's own `resize_` would raise after that. Here the memory stays resizable, so do not keep the array: the memory
    may be freed.

    Args:
        tensor: A detached tensor, of a dtype that numpy has, neither conjugated nor negated lazily.

    >>> x = torch.ones(2)
    >>> as_array(x)
    array([1., 1.], dtype=float32)
    >>> x.resize_(3).shape
    torch.Size([3])
    """
    return np.from_dlpack(_Exported(to_dlpack(tensor)))


class _Exported:
    """The argument of `numpy.from_dlpack`. Given a `Tensor`, it takes four times as long."""

    __slots__ = ("_capsule",)

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU
