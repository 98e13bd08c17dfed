"""When two tensors count as equal: up to the rounding of their dtype, or bit for bit, whatever their layout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pytest_modelprobe.models import as_bits, widest

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}
"""Largest relative error between kernels that compute the same in another order."""


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor that every operation supports: dense, padded, dequantized, of two bytes or more an element.

    >>> plain(torch.eye(2).to_sparse())
    tensor([[1., 0.],
            [0., 1.]])
    """
    if tensor.is_nested:
        tensor = torch.nested.to_padded_tensor(tensor, math.nan if tensor.is_floating_point() else 0)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def is_rounded(tensor: Tensor) -> bool:
    """Whether a tensor has floating or complex numbers, which another order of operations rounds differently."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_double(tensor: Tensor) -> Tensor:
    """Return a floating or complex tensor in double precision, on the CPU if its device has none; any other unchanged.

    >>> as_double(torch.ones(1)).dtype, as_double(torch.ones(1, dtype=torch.int32)).dtype
    (torch.float64, torch.int32)
    """
    return _doubled(tensor) if is_rounded(tensor) else tensor


def _doubled(tensor: Tensor) -> Tensor:
    here = tensor if widest(tensor.device) == torch.float64 else tensor.cpu()
    return here.to(torch.complex128 if tensor.is_complex() else torch.float64)


def rms(tensor: Tensor) -> float:
    """Return the root mean square of the elements."""
    norm = torch.linalg.vector_norm(as_double(plain(tensor.detach()))).item()
    return float(norm) / math.sqrt(max(tensor.numel(), 1))


def same(now: Tensor, before: Tensor | None) -> bool:
    """Whether two tensors are equal; NaN is equal to NaN."""
    if before is None or now.shape != before.shape or now.dtype != before.dtype:
        return False
    now, before = plain(now), plain(before)
    return torch.equal(now, before) or torch.equal(torch.nan_to_num(now), torch.nan_to_num(before))


def relative_error(one: Tensor, other: Tensor) -> float:
    """Return ‖x − y‖ / ‖x‖ on the device of x; inf where shapes differ, or where only one is finite.

    >>> relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    0.1
    """
    one, other = plain(one), plain(other).to(one.device)
    if one.shape != other.shape:
        return math.inf
    if torch.equal(one, other):
        return 0.0
    x, y = (_wide(tensor) for tensor in (one, other))
    known = x.isfinite() & y.isfinite()
    if not known.all():
        if not torch.equal(torch.nan_to_num(x[~known], nan=0.5), torch.nan_to_num(y[~known], nan=0.5)):
            return math.inf
        x, y = x[known], y[known]
    distance = torch.linalg.vector_norm(x - y).item()
    norm = torch.linalg.vector_norm(x).item()
    return distance / norm if norm else math.inf if distance else 0.0


def differing_bits(one: Tensor, other: Tensor) -> Tensor:
    """Return in which elements two tensors of one shape and dtype differ bit for bit: -0 is not 0, and NaN is NaN.

    >>> differing_bits(torch.tensor([0.0, math.nan]), torch.tensor([-0.0, math.nan]))
    tensor([ True, False])
    """
    return (as_bits(one.contiguous()) != as_bits(other.contiguous())).any(-1)


def _wide(tensor: Tensor) -> Tensor:
    wide = _doubled(tensor)
    if not tensor.is_floating_point():
        return wide
    # Masks of attention are made of the least number that a dtype has.
    return torch.where(wide.abs() > torch.finfo(tensor.dtype).max / 4, wide.sign() * math.inf, wide)


def limit(tensor: Tensor, tolerance: float | None = None, *, least: float = 0.0) -> float:
    """Return the largest relative error that counts as agreement: the tolerance, or by dtype, see `TOLERANCE`.

    Args:
        tensor: The reference.
        tolerance: The tolerance of the user, if any.
        least: Lower bound, for kernels that may round as TensorFloat-32 does.

    >>> limit(torch.ones(1)), limit(torch.ones(1), least=1e-3), limit(torch.ones(1).bfloat16(), least=1e-3)
    (0.0001, 0.001, 0.05)
    """
    if tolerance is not None:
        return tolerance
    dtype = tensor.real.dtype if tensor.is_complex() else tensor.dtype
    return max(least, TOLERANCE.get(dtype, 1e-4))
