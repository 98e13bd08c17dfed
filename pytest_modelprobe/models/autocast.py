"""The state of autocast for each type of device: ``torch.autocast(*state)`` enters one again."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pytest_modelprobe._torch import any_autocast

Autocast = tuple[str, torch.dtype, bool]
"""Type of device, dtype to which autocast casts there, and whether it is enabled."""

_DEVICES = ("cpu", "cuda", "mps", "xpu")


def autocast_states(devices: Iterable[str] = _DEVICES) -> tuple[Autocast, ...]:
    """Return the state of autocast for those of the types of device that have it, enabled or not."""
    available = filter(torch.amp.is_autocast_available, dict.fromkeys(devices))
    return tuple((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in available)


def active_autocast(devices: Iterable[str] = _DEVICES) -> tuple[Autocast, ...]:
    """Return the state of autocast for those of the types of device for which it is enabled.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     active_autocast()
    (('cpu', torch.bfloat16, True),)
    """
    return tuple(state for state in autocast_states(devices) if state[2]) if any_autocast() else ()
