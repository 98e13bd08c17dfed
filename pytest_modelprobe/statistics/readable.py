"""Plain tensors that can be read, and a context without the modes that are active in the model.

What a hook computes has to be the same whatever the model runs under. Inside autocast to bfloat16, sums would be wrong
by 2e-3; inside inference mode, they could not be used outside. Tensors without readable elements are told apart
here, each with the reason that a record gives.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pytest_modelprobe._torch import (
    any_autocast,
    dispatch_modes,
    function_modes,
    is_wrapped,
    transform,
    waited,
    without_autocast,
    without_dispatch_modes,
    without_subclasses,
    without_torch_function,
    without_transforms,
)
from pytest_modelprobe.models import holds_elements

FLOATS = {torch.float32, torch.float64}
NARROW = {torch.float16, torch.bfloat16} | {
    value for name, value in vars(torch).items() if name.startswith("float8_") and isinstance(value, torch.dtype)
}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_INTEGERS = {torch.bool, torch.int8, torch.int16, torch.int32, torch.int64} | {
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}
_READABLE = FLOATS | NARROW | _COMPLEX | _INTEGERS
ABSTRACT = frozenset({"meta tensor", "fake tensor"})
"""Reasons of tensors that have no elements, so that there is nothing in them to be read."""
NO_CONTEXT = contextlib.nullcontext()
_MOST = 1 << 26  # elements of an expanded tensor up to which each place is read


def ambient_modes_disabled() -> AbstractContextManager[object]:
    """Return a context in which torch computes as if no other context were active.

    It disables autocast, inference mode, `torch.func` transforms, and function and dispatch modes (a default device is
    one). If none is active it costs half a microsecond. It does not disable gradients, so tensors have to be detached.

    >>> with torch.autocast("cpu", torch.bfloat16), ambient_modes_disabled():
    ...     (torch.eye(2) @ torch.eye(2)).dtype
    torch.float32
    """
    needed: list[Callable[[], AbstractContextManager[object]]] = []
    if function_modes():
        needed.append(without_torch_function)
    if dispatch_modes():
        needed.append(without_dispatch_modes)
    if any_autocast():
        needed.append(without_autocast)
    if torch.is_inference_mode_enabled():
        needed.append(functools.partial(torch.inference_mode, False))
    if transform() is not None:
        needed.append(without_transforms)
    if len(needed) > 1:
        return _all_of(needed)
    return needed[0]() if needed else NO_CONTEXT


@contextlib.contextmanager
def _all_of(contexts: Sequence[Callable[[], AbstractContextManager[object]]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            # Each is made only now. The contexts of torch take effect when they are made, and restore what they found.
            stack.enter_context(context())
        yield


def as_plain_tensor(tensor: Tensor) -> tuple[Tensor, str | None]:
    """Return a plain detached tensor and `None`, or the tensor itself and the reason why it cannot be read.

    >>> as_plain_tensor(torch.ones(2, device="meta"))[1]
    'meta tensor'
    """
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        tensor, reason = _without_subclass(tensor)
        if reason is not None:
            return tensor, reason
    if is_wrapped(tensor):
        return tensor, "tensor of a torch.func transform"
    if tensor.is_nested:
        return tensor, "nested tensor"
    if tensor.is_quantized:
        return tensor, "quantized tensor"
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").lstrip("_")
        return tensor, "sparse tensor" if layout.startswith("sparse") else f"{layout} tensor"
    if tensor.is_meta:
        return tensor, "meta tensor"
    if tensor.dtype not in _READABLE:
        return tensor, f"{str(tensor.dtype).removeprefix('torch.')} tensor"
    if not holds_elements(tensor):
        return tensor, "tensor without storage"
    return tensor.detach(), None


def is_expanded(x: Tensor) -> bool:
    """Whether elements occur in several places, and in more than could be read one by one.

    >>> is_expanded(torch.zeros(1).expand(1 << 40)), is_expanded(torch.zeros(1).expand(2))
    (True, False)
    """
    return x.numel() > _MOST and any(n > 1 and not stride for n, stride in zip(x.shape, x.stride(), strict=True))


def _without_subclass(tensor: Tensor) -> tuple[Tensor, str | None]:
    with without_subclasses():
        there = waited(tensor)
        if there is not None:
            return as_plain_tensor(there)
        distributed = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and isinstance(tensor, distributed.DTensor):
            if any(placement.is_partial() for placement in cast(Any, tensor).placements):
                return tensor, "DTensor of which each rank has a term, not the sum"
            with torch.no_grad():  # with gradients, `to_local` returns the output of an autograd function
                return as_plain_tensor(cast(Any, tensor).to_local())
        if is_lazy(tensor):
            return tensor, "uninitialized parameter"
        if tensor.layout is torch.jagged:
            return tensor, "nested tensor"
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            name = type(tensor).__name__
            return tensor, "fake tensor" if name == "FakeTensor" else f"{name} tensor"
        return tensor.as_subclass(Tensor), None


def real(x: Tensor) -> Tensor:
    """Return the elements in a dtype that numpy and every kernel support."""
    if x.dtype in FLOATS:
        return x.resolve_neg() if x.is_neg() else x  # the check takes half as long as `resolve_neg`
    if x.dtype in NARROW:
        return x.float()
    if x.dtype in _COMPLEX:
        return (x.to(torch.complex64) if x.dtype == torch.complex32 else x).abs()
    return x.view(torch.uint8) if x.dtype == torch.bool else x
