"""Devices beside the CPU: what one has and lacks, asked of the device and not of its name; streams; moving tensors."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe._torch import dispatch_modes

from .memory import as_array


@functools.cache
def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 if the device does not compute in float64.

    >>> widest(torch.device("cpu"))
    torch.float64
    """
    try:
        torch.ones(1, dtype=torch.float64, device=device).sum()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):  # MPS refuses to make one, XPU to compute with it
        return torch.float32
    return torch.float64


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, in float32 if it is of float64 and the device does not compute in that.

    Nothing waits for it, unless the device is the CPU: there a copy would be read before it has arrived.
    """
    if tensor.dtype == torch.float64:
        tensor = tensor.to(widest(device))
    return tensor.to(device, non_blocking=device.type != "cpu")


def together(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors on one device: that of the first which is not on the CPU. Nothing waits for it."""
    device = b.device if a.is_cpu else a.device
    return sent(a, device), sent(b, device)


def current_stream(device: torch.device) -> Any:
    """Return the current stream of a device, or `None` if it has no streams to choose from.

    >>> current_stream(torch.device("cpu"))
    """
    module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    return module.current_stream(device) if hasattr(module, "current_stream") else None


def devices_of(modules: Iterable[nn.Module], inputs: Iterable[Tensor] = ()) -> tuple[torch.device, ...]:
    """Return the devices beside the CPU on which modules have parameters or buffers, and those of inputs, in order.

    >>> devices_of([torch.nn.Linear(1, 1)])
    ()
    """
    held = (tensors for module in modules for tensors in (module._parameters, module._buffers) if tensors)
    own = (tensor for tensors in held for tensor in tensors.values() if tensor is not None)
    found = {tensor.device for tensor in itertools.chain(own, inputs) if not (tensor.is_cpu or tensor.is_meta)}
    return tuple(sorted(found, key=str))


def generator_state(device: torch.device) -> bytes:
    """Return the state of the global generator of a device. torch keeps it on the CPU: nothing waits.

    >>> generator_state(torch.device("cpu")) == torch.get_rng_state().numpy().tobytes()
    True
    """
    if device.type == "cpu":
        return as_array(torch.default_generator.get_state()).tobytes()
    read = torch.get_device_module(device).get_rng_state
    return as_array(read(device) if inspect.signature(read).parameters else read()).tobytes()  # that of MPS takes none


def is_captured() -> bool:
    """Whether a CUDA graph is being captured: then nothing computes yet, and nothing may be read."""
    # A build for CUDA raises where it finds no driver.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def wait_for(device: torch.device) -> None:
    """Wait until a device has computed what all of its streams were handed. One without streams is read in order."""
    if current_stream(device) is not None:
        torch.get_device_module(device).synchronize(device)


def read_flags(flags: Sequence[Tensor]) -> list[bool]:
    """Return booleans, each in a tensor without dimensions. Each device is waited for once.

    >>> read_flags([torch.tensor(True), torch.tensor(False)])
    [True, False]
    """
    found: dict[int, bool] = {}
    for device in {flag.device for flag in flags}:
        wait_for(device)
        here = [flag for flag in flags if flag.device == device]
        found.update(zip(map(id, here), torch.stack(here).tolist(), strict=True))
    return [found[id(flag)] for flag in flags]


def kept_on_devices(make: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that keeps on each device the tensors that ``make`` returns, for work on any stream.

    It takes the device, and after it what ``make`` takes.

    >>> kept_on_devices(lambda end: (torch.arange(end),))(torch.device("meta"), 3)[0].shape
    torch.Size([3])
    """
    known: dict[Any, tuple[tuple[Tensor, ...], Any, Any]] = {}

    @functools.wraps(make)
    def kept(device: torch.device, *options: Any) -> tuple[Tensor, ...]:
        stream = current_stream(device)
        if (device, options) not in known or dispatch_modes():
            there = tuple(sent(tensor, device) for tensor in make(*options))
            if dispatch_modes():  # they may be fake
                return there
            known[device, options] = there, stream, stream and stream.record_event()
        there, first, ready = known[device, options]
        # They may still be on their way on another stream. The capture of a CUDA graph begins with a synchronization,
        # and may not wait for work outside of it.
        if stream != first and not is_captured():
            stream.wait_event(ready)
        return there

    return kept
