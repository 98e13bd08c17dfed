"""Ready-made changes for `intervene`: functions from a tensor to a tensor.

They do not draw from the caller's random generators, and return the same for the same tensor, so that a run repeats.
Faults that need a number or a tensor are made by a call, such as ``scale(2)``. The others are passed as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real

import torch
from torch import Tensor

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import seeding

__all__ = [
    "Fault", "clamp", "clip_gradient", "detach", "drop_gradient", "flip_sign", "inf", "nan", "noise",
    "normalize_input", "prune", "scale", "shift_sequence", "shuffle_batch", "stuck", "zero",
]  # fmt: skip


class Fault:
    """A change of a tensor. Its name stands in notes and messages.

    >>> Fault("double", lambda tensor: tensor * 2)
    double
    """

    def __init__(self, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
        self.name = name
        self._change = change

    def __call__(self, tensor: Tensor) -> Tensor | None:
        """Return the changed tensor, or `None` for no gradient. The given tensor is not written to.

        Raises:
            UsageError: The fault makes fractions, and the tensor has another dtype.
        """
        changed = self._change(tensor)
        if changed is not None and changed.dtype != tensor.dtype:
            raise UsageError(f"{self} makes {changed.dtype} of {tensor.dtype}: it is for floating-point tensors")
        return changed

    def __repr__(self) -> str:
        return self.name


# --- without arguments ------------------------------------------------------------------------------------------------


def _with_first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        first = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape) == 0
        return torch.where(first, value, tensor)

    return change


def _filled(tensor: Tensor, value: float) -> Tensor:
    # Not `full_like`, which would cut the graph: that is another fault, `detach`.
    every = torch.ones((), dtype=torch.bool, device=tensor.device)
    # In a tensor of integers `masked_fill` would drop a fraction silently. `where` makes floating-point numbers, and
    # `Fault` refuses these.
    return tensor.masked_fill(every, value) if float(value).is_integer() else torch.where(every, value, tensor)


def _shifted(tensor: Tensor) -> Tensor:
    if tensor.dim() < 3:  # without (N, L, ...) there is no sequence
        return tensor
    return torch.cat([torch.zeros_like(tensor[:, :1]), tensor[:, :-1]], dim=1)


nan = Fault("nan", _with_first(float("nan")))
"""Makes the first element NaN."""

inf = Fault("inf", _with_first(float("inf")))
"""Makes the first element infinite."""

zero = Fault("zero", lambda tensor: _filled(tensor, 0.0))
"""Makes all elements 0. The gradient that passes is 0 too."""

flip_sign = Fault("flip_sign", torch.neg)
"""Changes the sign of all elements."""

shuffle_batch = Fault("shuffle_batch", lambda tensor: tensor.roll(1, 0) if tensor.dim() else tensor)
"""Gives each sample the values of the sample before it, along dimension 0."""

shift_sequence = Fault("shift_sequence", _shifted)
"""Gives each position the values of the one before it, along dimension 1 of (N, L, ...), and the first one zeros."""

detach = Fault("detach", torch.Tensor.detach)
"""Keeps the values, and cuts them off from the graph."""

drop_gradient = Fault("drop_gradient", lambda gradient: None)
"""For ``gradient=``. No gradient is passed on, as if the graph were cut in the backward pass only."""

# --- with arguments ---------------------------------------------------------------------------------------------------


def _check(fault: str, **given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, Real):
            raise UsageError(
                f"faults.{fault} takes a number, {name}, and returns the fault; got {type(value).__name__}"
            )


def scale(k: float) -> Fault:
    """Return a fault that multiplies by ``k``."""
    _check("scale", k=k)
    return Fault(f"scale({k:g})", lambda tensor: tensor * k)


def noise(std: float, seed: int = 0) -> Fault:
    """Return a fault that adds normally distributed numbers with standard deviation ``std``, in units of the values.

    The numbers depend on the seed and the shape only, so they are the same in each call.
    """
    _check("noise", std=std)

    def change(tensor: Tensor) -> Tensor:
        dtype = tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.float32
        drawn = seeding.randn(tensor.shape, seed=seed, name="noise", device=tensor.device, dtype=dtype)
        return tensor + std * drawn

    return Fault(f"noise({std:g})", change)


def clamp(lo: float, hi: float) -> Fault:
    """Return a fault that limits values to ``lo`` and ``hi``."""
    _check("clamp", lo=lo, hi=hi)
    return Fault(f"clamp({lo:g}, {hi:g})", lambda tensor: tensor.clamp(lo, hi))


def stuck(value: float) -> Fault:
    """Return a fault that makes all elements ``value``. The gradient that passes is 0."""
    _check("stuck", value=value)
    return Fault(f"stuck({value:g})", lambda tensor: _filled(tensor, value))


def clip_gradient(norm: float) -> Fault:
    """Return a fault, for ``gradient=``, that scales a gradient down to the 2-norm ``norm`` if its norm is larger."""
    _check("clip_gradient", norm=norm)

    def change(gradient: Tensor) -> Tensor:
        scaled: Tensor = gradient * (norm / torch.linalg.vector_norm(gradient).clamp_min(norm))
        return scaled

    return Fault(f"clip_gradient({norm:g})", change)


def normalize_input(mean: float | Sequence[float], std: float | Sequence[float]) -> Fault:
    """Return a fault that subtracts ``mean`` and divides by ``std``.

    Each is a number, or a sequence with one number for each channel of (N, C, ...).
    """

    def of_channels(value: float | Sequence[float], tensor: Tensor) -> Tensor:
        channels = torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)
        return channels.reshape(-1, *[1] * (tensor.dim() - 2)) if channels.dim() else channels

    return Fault(
        f"normalize_input({mean}, {std})",
        lambda tensor: (tensor - of_channels(mean, tensor)) / of_channels(std, tensor),
    )


def prune(mask: Tensor) -> Fault:
    """Return a fault that multiplies by ``mask``, whose shape is that of the tensor or broadcasts to it."""
    return Fault(f"prune({'x'.join(map(str, mask.shape))})", lambda tensor: tensor * mask.to(tensor).expand_as(tensor))
