"""The memory of tensors, the devices that they are on, and which part of them torch.distributed leaves to this rank."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # documented, but not in `__all__`

from pytest_modelprobe._torch import dispatch_modes, shards, spec_of_local, waited, without_subclasses
from pytest_modelprobe.record import process_group, this_rank

# --- memory -----------------------------------------------------------------------------------------------------------
#
# Before an address is read, the storage is asked whether it holds the elements. Most operations of torch do not ask,
# and a tensor whose memory was freed crashes the process.

_CPU = (1, 0)  # the CPU as DLPack writes it: kDLCPU, device 0


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer dtype for each number of bytes."""


def has_dense_storage(leaf: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a dense tensor whose memory holds its elements: see `is_strided` and `holds_elements`.

    >>> x = torch.ones(3)
    >>> _ = x.untyped_storage().resize_(4)
    >>> has_dense_storage(x), has_dense_storage(torch.ones(3))
    (False, True)
    """
    return is_strided(leaf) and holds_elements(leaf)


def is_strided(leaf: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor with strides and a device, and not meta, fake, sparse, nested or uninitialized."""
    return (
        isinstance(leaf, torch.Tensor)
        and type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not is_lazy(leaf)
        and not leaf.is_meta
        and leaf.layout is torch.strided
        and not leaf.is_nested
    )


def holds_elements(tensor: torch.Tensor) -> bool:
    """Whether the storage of a strided tensor holds all elements that its sizes and strides reach.

    Most operations of torch do not ask. If the storage was freed, as FSDP does with its own, or has shrunk, they read
    what is behind it, and the process crashes or computes with memory that belongs to something else. A symbolic zero
    and a functional tensor have a storage with a size and without memory. If another thread frees the memory between
    this call and the reading, the process crashes as it does without the probe.
    """
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()  # raises if there is a size and no memory
    except RuntimeError:
        return False
    reached = tensor.numel()
    if not reached:
        return True
    if not tensor.is_contiguous():
        reached = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return bool((tensor.storage_offset() + reached) * tensor.element_size() <= storage.nbytes())


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor should have a storage that holds its elements, but does not: see `holds_elements`."""
    return is_strided(tensor) and not holds_elements(tensor)


def detached_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy outside of graphs, expanded as the tensor is, or `None` if torch cannot copy it.

    It cannot if the memory is gone, and not for dtypes such as ``uint3`` or tensors that are quantized by channel.

    >>> detached_copy(torch.ones(1).expand(1 << 40)).shape
    torch.Size([1099511627776])
    """
    if not is_strided(tensor):
        return tensor.detach().clone()
    if not holds_elements(tensor):
        return None
    try:
        copy = unexpanded(tensor.detach()).clone()
    except RuntimeError:
        return None
    return copy if copy.shape == tensor.shape else copy.expand(tensor.shape)


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that can be written to: one element along each expanded axis.

    >>> unexpanded(torch.ones(2, 1).expand(2, 3)).shape
    torch.Size([2, 1])
    """
    if 0 not in tensor.stride():  # older torch cannot slice a tensor that is quantized by channel
        return tensor
    return tensor[tuple(slice(None, None if stride else 1) for stride in tensor.stride())]


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor as integers in the same memory: these compare and copy in any dtype.

    >>> as_bits(torch.ones(2, dtype=torch.complex128)).shape
    torch.Size([2, 2])
    """
    words = -(-tensor.element_size() // 8)  # two for complex128, whose 16 bytes no integer dtype has
    shape = [n if step else min(n, 1) for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    bits = torch.empty(0, dtype=_WORDS[tensor.element_size() // words], device=tensor.device)
    place = tensor.storage_offset() * words, (*shape, words), (*(step * words for step in tensor.stride()), 1)
    return bits.set_(tensor.untyped_storage(), *place)


def version(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was written to. `None` if torch does not count: for inference and lazy tensors.

    >>> x = torch.ones(2)
    >>> version(x.add_(1))
    1
    """
    return None if is_lazy(tensor) or tensor.is_inference() else tensor._version


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as pairs of real numbers along a new last axis, and any other tensor as it is.

    >>> as_real(torch.tensor([1 + 2j]).conj())
    tensor([[ 1., -2.]])
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a flat uint8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the elements of a plain CPU tensor as an array in the same memory, to be read at once.

    `Tensor.numpy` and `numpy.asarray` make the memory unresizable for good, in every tensor that shares it, and the
    model's own `resize_` would raise after that. Here the memory stays resizable, so do not keep the array: the memory
    may be freed.

    Args:
        tensor: A detached tensor, of a dtype that numpy has, neither conjugated nor negated lazily.

    >>> x = torch.ones(2)
    >>> as_array(x)
    array([1., 1.], dtype=float32)
    >>> x.resize_(3).shape
    torch.Size([3])
    """
    return np.from_dlpack(_Exported(to_dlpack(tensor)))


class _Exported:
    """The argument of `numpy.from_dlpack`. Given a `Tensor`, it takes four times as long."""

    __slots__ = ("_capsule",)

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


# --- devices beside the CPU: what one has and lacks is asked of the device, and not of its name -----------------------


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


# --- torch.distributed ------------------------------------------------------------------------------------------------
#
# A rank that has a shard of a weight has other numbers than one process would have, so a record says what they are
# numbers of. Nothing of torch.distributed is imported here, because what is not loaded is not in use.

FSDP2 = "FSDP2: activations are of this rank's batch, parameters and their gradients this rank's shards"
TENSOR_PARALLEL = "tensor parallel: parameters are this rank's shards, and so may values be"
MIXED = "several kinds of parallelism: which part of a value this rank has is not known"
DDP = "DistributedDataParallel: gradients are this rank's, before averaging"

_MOST_FRAMES = 30
"""How many callers of a model are searched for DistributedDataParallel, which is near."""


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and hasattr(fsdp, "FSDPModule") and isinstance(module, fsdp.FSDPModule)


def original_class(module: Any) -> type:
    """Return the class of a module as its author wrote it.

    `fully_shard` makes a class that is derived from its own and from the author's, and gives it to the module.

    >>> original_class(nn.Linear(1, 1))
    <class 'torch.nn.modules.linear.Linear'>
    """
    if isinstance(module, nn.Module) and is_fully_sharded(module):
        return type(module).__mro__[2]
    return type(module)


def sharded_parameters(modules: Iterable[nn.Module]) -> Mapping[tuple[nn.Module, str], nn.Parameter]:
    """Return this rank's shard of each parameter under FSDP2, by owner and name. It is empty if FSDP2 is not in use."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    managing = getattr(fsdp, "FSDPModule", None)
    modules = list(modules)
    if managing is None or not any(issubclass(kind, managing) for kind in set(map(type, modules))):
        return {}
    return {
        (owner, name): shard for module in modules if is_fully_sharded(module) for owner, name, shard in shards(module)
    }


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, of which each rank has a part."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def layout(tensor: torch.Tensor) -> str | None:
    """Return which part of a DTensor this rank has, as records write it, or `None` for other tensors.

    >>> layout(torch.ones(1))
    """
    return _layout(cast(Any, tensor).placements) if is_distributed(tensor) else None


def value_layout(tensor: torch.Tensor) -> str | None:
    """Return the layout of a DTensor, or of the DTensor whose local tensor this is. `None` if it is not known.

    >>> value_layout(torch.ones(1))
    """
    spec = cast(Any, tensor) if is_distributed(tensor) else spec_of_local(tensor)
    return None if spec is None else _layout(spec.placements)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a DTensor, in the same memory, and any other tensor as it is."""
    if not is_distributed(tensor):
        return tensor
    # Never a collective: a hook runs on one rank, and the others would not take part.
    with torch.no_grad(), without_subclasses():
        local: torch.Tensor = cast(Any, tensor).to_local()
        there = waited(local)
    return local if there is None else there


def _layout(placements: Sequence[Any]) -> str:
    if any(placement.is_partial() for placement in placements):
        return "partial"
    dims = sorted({placement.dim for placement in placements if placement.is_shard()})
    return f"shard({', '.join(map(str, dims))})" if dims else "replicated"


def notes_on(modules: Iterable[nn.Module], frame: FrameType | None = None) -> Iterator[str]:
    """Yield what a reader has to know of a model's numbers.

    Args:
        modules: The modules of the model.
        frame: The Python frame of the model's call. A wrapper around the model is found among the callers.
    """
    if process_group() is None:
        return
    found = list(modules)
    managed = sharded_parameters(found)
    if managed or any(map(is_fully_sharded, found)):
        yield FSDP2
    parallel = [
        parameter
        for module in found
        for name, parameter in module._parameters.items()
        if parameter is not None and (module, name) not in managed and is_distributed(parameter)
    ]
    if parallel:
        yield TENSOR_PARALLEL
    if any(map(_is_on_part_of_a_mesh, (*parallel, *managed.values()))):
        yield MIXED
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        if isinstance(frame.f_locals.get("self"), nn.parallel.DistributedDataParallel):
            yield DDP
            return
        frame = frame.f_back


def _is_on_part_of_a_mesh(parameter: torch.Tensor) -> bool:
    """Whether a DTensor is spread over some of the ranks only, or in several ways. Its records cannot be merged."""
    if not is_distributed(parameter):
        return False
    mesh = cast(Any, parameter).device_mesh
    axes = [mesh.size(i) for i in range(mesh.ndim) if mesh.size(i) > 1]
    return len(axes) > 1 or math.prod(axes) != this_rank().world_size
