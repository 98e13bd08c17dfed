"""Notes on an exception of the model: which layer raised it, with which inputs."""

from __future__ import annotations

from torch import nn

from pytest_modelprobe.models import Flat

from .tensors import describe


def note_raising_layer(error: BaseException, name: str, module: nn.Module, inputs: Flat) -> None:
    """Add to an exception which layer raised it: the innermost one, as its hook runs first."""
    if any(note.startswith("raised in ") for note in getattr(error, "__notes__", ())):
        return
    shown = ", ".join(describe(tensor) for _, tensor in inputs.tensors) or "none"
    error.add_note(f"raised in {name} ({type(module).__name__}), inputs {shown}")
    devices = {str(p.device) for p in module.parameters()}
    for path, tensor in inputs.tensors:
        if len(devices) == 1 and str(tensor.device) not in devices and tensor.ndim > 0:
            here = devices.pop()
            error.add_note(f"{path} is on {tensor.device}, {name} on {here}: move one with .to({here!r})")
