"""Names of devices: which are valid, and which exist on this machine.

A name is checked without torch, so a wrong option fails at once. torch is imported only to see what the machine has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

INVALID = "not a device of the probe; give cpu, cuda, cuda:N, mps or auto"


def is_device(name: Any) -> bool:
    """Whether ``name`` is that of a device, on any machine.

    >>> is_device("cuda:1"), is_device("gpu")
    (True, False)
    """
    return isinstance(name, str) and re.fullmatch(r"(cpu|cuda|mps)(:\d+)?|auto", name) is not None


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

    if name == "auto":
        return ("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"), None
    device = torch.device(name)
    if device.type == "cuda":
        return name, _cuda_problem(device)
    if device.type == "mps" and not torch.backends.mps.is_available():
        return name, f"torch.backends.mps.is_available() is False (torch {torch.__version__})"
    return name, None


def _cuda_problem(device: Any) -> str | None:
    import torch

    if not torch.cuda.is_available():
        build = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        return f"torch.cuda.is_available() is False: {build} (torch {torch.__version__})"
    if device.index is not None and device.index >= torch.cuda.device_count():
        return f"torch finds {torch.cuda.device_count()} CUDA device(s), numbered from 0"
    return None
