"""Views with a hook: autograd drops the hook silently when the view is overwritten in place."""

from __future__ import annotations

import contextlib
import functools

import torch

from pytest_modelprobe.statistics import ambient_modes_disabled

from .observation import TensorObservation


class HookedViews:
    """Finds the views that were overwritten after they were observed."""

    def __init__(self) -> None:
        self._views: list[tuple[TensorObservation, int, torch.Tensor]] = []

    def add(self, tensor: torch.Tensor, seen: TensorObservation) -> None:
        """Look after a view."""
        with ambient_modes_disabled(), contextlib.suppress(RuntimeError):  # a tensor subclass may not allow it
            version = tensor.detach()
            # An alias without the memory: what it still shares is the count of versions.
            version.data = _no_elements(tensor.dtype, tensor.device)
            self._views.append((seen, tensor._version, version))

    def mark_overwritten(self) -> None:
        """Mark those that were overwritten by now, and look after none of them any more."""
        for seen, before, version in self._views:
            seen.overwritten |= version._version > before
        self._views.clear()


@functools.cache
def _no_elements(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)
