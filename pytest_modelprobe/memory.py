"""Whether a tensor has memory of its own, and that memory as bytes."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch.nn.parameter import is_lazy


def has_bytes(leaf: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor with memory of its own kind: not meta, fake, sparse, lazy."""
    return (
        isinstance(leaf, torch.Tensor)
        and type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not is_lazy(leaf)
        and not leaf.is_meta
        and leaf.layout is torch.strided
    )


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a flat uint8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
