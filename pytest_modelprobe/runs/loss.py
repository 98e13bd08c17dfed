"""The loss of ``loss="random"``: a fixed random projection of what a model gives out."""

from __future__ import annotations

import re
from typing import Any

import torch

from pytest_modelprobe.models import as_real, flatten, parts, seeding

_CACHE = re.compile(r"past_key_values?|(\w+_)?cache(_params)?|\w*Cache")
"""Names of fields, and of types, that hold what a decoder keeps for its next call."""


def random_loss(output: Any, *, seed: int) -> torch.Tensor | None:
    """Return the sum of every floating output times numbers seeded by its position, over the root of its size.

    Its position among the floating outputs, and not its path: the same tensors weigh the same in a tuple, a dict or
    alone. A cache beside other outputs does not count, for a model gives out one or not as it is asked. A complex
    output counts as its real and imaginary parts. None: no floating output requires a gradient.

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> bool(random_loss(x, seed=0) == random_loss({"logits": x, "past_key_values": (x, x)}, seed=0))
    True
    """
    total: torch.Tensor | None = None
    for position, tensor in enumerate(_weighed(output)):
        if tensor.requires_grad and tensor.numel():
            name = f"loss output[{position}]" if position else "loss output"
            weights = seeding.randn(tensor.shape, seed=seed, name=name, device=tensor.device, dtype=torch.float32)
            wide = tensor if tensor.dtype == torch.float64 else tensor.float()
            term = (wide * weights).sum() / tensor.numel() ** 0.5
            total = term if total is None else total + term.to(total.device)
    return total


def _weighed(output: Any) -> list[torch.Tensor]:
    """Return the floating outputs in their order, without those of a cache unless there are no others."""
    named = parts(output) or [("", output)]
    return _floating([part for name, part in named if not _is_cache(name, part)]) or _floating(output)


def _floating(output: Any) -> list[torch.Tensor]:
    tensors = (as_real(tensor) for _, tensor in flatten("output", output).tensors)
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _is_cache(name: str, part: Any) -> bool:
    """Whether a part of the output is a cache, by the name of its field or of its type."""
    return bool(_CACHE.fullmatch(name.removeprefix(".")) or _CACHE.fullmatch(type(part).__name__))
