"""Names of devices: which are valid, and which exist on this machine.

A name is checked without torch, so a wrong option fails at once. torch is imported only to see what the machine has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

INVALID = "not a device of the probe; give cpu, cuda, cuda:N, mps, xpu or auto"
_KNOWN = ("cpu", "cuda", "mps", "xpu")


def is_device(name: Any) -> bool:
    """Whether ``name`` is that of a device, on any machine, or of another accelerator that torch finds on this one.

    >>> is_device("cuda:1"), is_device("gpu")
    (True, False)
    """
    found = re.fullmatch(r"([a-z]\w*)(:\d+)?", name) if isinstance(name, str) else None
    return name == "auto" or (found is not None and (found[1] in _KNOWN or found[1] == _accelerator()))


def as_list(devices: Any) -> Iterable[Any]:
    """Return one device or several as an iterable."""
    return devices if isinstance(devices, (list, tuple)) else [devices]


def available(names: Iterable[str]) -> list[str]:
    """Return the devices of ``--modelprobe-device`` without duplicates; raise `pytest.UsageError` if one is missing."""
    found = []
    for name in names:
        device, problem = resolve(name)
        if problem:
            raise pytest.UsageError(f"--modelprobe-device={name}: {problem}")
        found.append(device)
    return list(dict.fromkeys(found))


def resolve(name: str) -> tuple[str, str | None]:
    """Return the device of a name, and why it is not available, if it is not. ``auto`` is the best device there is."""
    if name == "cpu":
        return name, None
    import torch

    best = _accelerator()
    if name == "auto":
        return best or "cpu", None
    device = torch.device(name)
    if device.type == "cpu":
        return name, None
    if device.type != best:
        return name, f"torch finds no {device.type} device (torch {torch.__version__})"
    if device.index is not None and device.index >= torch.accelerator.device_count():
        return name, f"torch finds {torch.accelerator.device_count()} {best} device(s), numbered from 0"
    return name, None


def _accelerator() -> str | None:
    """Return the type of the accelerator that torch finds on this machine, or `None` if there is none."""
    import torch

    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, where there is none
        return None
    return found.type if found is not None and torch.accelerator.is_available() else None
