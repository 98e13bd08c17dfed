"""The memory of tensors: whether there is some, as bytes, and as an array of numpy."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # documented, but not in `__all__`

_CPU = (1, 0)  # as DLPack writes it


def has_dense_storage(leaf: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a dense tensor in memory: not meta, fake, sparse or uninitialized."""
    return (
        isinstance(leaf, torch.Tensor)
        and type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not is_lazy(leaf)
        and not leaf.is_meta
        and leaf.layout is torch.strided
    )


def version(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was written to; None if torch does not count it: inference and lazy tensors.

    >>> x = torch.ones(2)
    >>> version(x.add_(1))
    1
    """
    return None if is_lazy(tensor) or tensor.is_inference() else tensor._version


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as pairs of real numbers, along a last axis of its own; any other as it is.

    >>> as_real(torch.tensor([1 + 2j]).conj())
    tensor([[ 1., -2.]])
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a flat uint8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the elements of a plain CPU tensor as an array that shares its memory, to be read at once.

    `Tensor.numpy` and `numpy.asarray` would make the memory unresizable for good, in every tensor that shares it, and
    the model's own `resize_` would raise. It stays resizable, so an array that is kept may refer to freed memory.

    Args:
        tensor: Detached, of a dtype that numpy has, neither conjugated nor negated lazily.

    >>> x = torch.ones(2)
    >>> as_array(x)
    array([1., 1.], dtype=float32)
    >>> x.resize_(3).shape
    torch.Size([3])
    """
    return np.from_dlpack(_Exported(to_dlpack(tensor)))


class _Exported:
    """An argument of `numpy.from_dlpack`: a `Tensor` takes four times as long."""

    __slots__ = ("_capsule",)

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU
