"""What torch.distributed makes of a model: which parts are on this rank, and what its numbers stand for.

A rank that has a shard of a weight has other numbers than one process would have, so a record says what they are
numbers of. Nothing of torch.distributed is imported here, because what is not loaded is not in use.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import nn

from pytest_modelprobe._torch import shards, spec_of_local, waited, without_subclasses
from pytest_modelprobe.record import process_group, this_rank

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
