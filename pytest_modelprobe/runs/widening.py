"""Half precision computed in float32, and float32 in float64: what code computes but for rounding.

In half precision two right implementations differ by as much as a wrong epsilon does. In float32 the right ones agree
to seven digits and the wrong one does not. So layers are called alone in float32, and the noise of a run in half
precision is its distance to one run in float32. Where two layers differ in the sixth digit, float64 tells how much of
that is rounding.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe._torch import Operation, TorchDispatchMode, schema

NARROW = frozenset({torch.bfloat16, torch.float16})
"""The dtypes that are computed in float32."""


def widened(dtype: torch.dtype, wide: torch.dtype = torch.float32) -> torch.dtype:
    """Return ``wide``, float32 or float64, for a narrower dtype, and any other as it is, also one of eight bits.

    >>> widened(torch.bfloat16), widened(torch.float32), widened(torch.complex64, torch.float64)
    (torch.float32, torch.float32, torch.complex128)
    """
    floating = (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1
    return torch.promote_types(dtype, wide) if floating else dtype


class Widening(TorchDispatchMode):  # type: ignore[misc]
    """Computes in float32, or in float64, what code computes in a narrower dtype, written out or by autocast.

    Casts to half precision are casts to float32, and tensors in half precision are converted when an operation reads
    them. Tensors that an operation writes to, and views, stay as they are. A leaf that requires a gradient has to have
    that dtype before.

    >>> with Widening():
    ...     (torch.ones(2, dtype=torch.bfloat16) / 3).half().dtype
    torch.float32
    """

    supports_higher_order_operators = True

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._wide = wide

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch._dynamo is imported, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, Operation):  # a higher order operator calls others
            return func(*args, **(kwargs or {}))
        read = _arguments(func)
        args = [self._widened(arg, is_read) for arg, is_read in zip(args, read.values(), strict=False)]
        kwargs = {name: self._widened(arg, read[name]) for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)

    def _widened(self, value: Any, is_read: bool) -> Any:
        if isinstance(value, torch.dtype):
            return widened(value, self._wide)
        if isinstance(value, Tensor):
            return value.to(widened(value.dtype, self._wide)) if is_read else value
        if isinstance(value, list | tuple):
            return type(value)(self._widened(one, is_read) for one in value)
        return value


@functools.cache
def _arguments(operation: Any) -> dict[str, bool]:
    """Return the arguments of an operation, each with whether it is read alone: not written to, nor viewed."""
    return {
        argument.name: not (operation.is_view or (argument.alias_info is not None and argument.alias_info.is_write))
        for argument in schema(operation).arguments
    }


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute a model in float32 within the block.

    Its parameters and buffers are converted, and put back, parameters with their gradients.

    >>> layer = nn.Linear(2, 2).bfloat16()
    >>> with in_float32(layer):
    ...     layer(torch.ones(1, 2)).dtype, layer.weight.dtype
    (torch.float32, torch.float32)
    >>> layer.weight.dtype
    torch.bfloat16
    """
    held = (*nn.Module.parameters(model), *nn.Module.buffers(model))
    narrow = [(tensor, tensor.data, tensor.grad) for tensor in held if tensor.dtype in NARROW and tensor.is_leaf]
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(widened(default))
        for tensor, data, _ in narrow:
            tensor.grad = None
            tensor.data = data.float()
        with Widening():
            yield
    finally:
        torch.set_default_dtype(default)
        for tensor, data, gradient in narrow:
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradient


class InFloat32:
    """A repeat of a run in float32, on the same numbers. It takes the place of a `noise.Perturbation`."""

    far = True  # the gradients are wanted too

    def applied(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return `in_float32` of a model."""
        return in_float32(model)

    def input(self, tensor: Tensor, name: str) -> Tensor:
        """Return an input in float32."""
        return tensor.to(widened(tensor.dtype))

    def gradients(self, outputs: Iterable[Tensor]) -> None:
        """Leave the gradients as they are."""
