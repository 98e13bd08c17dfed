"""Parameters and buffers of layers: reductions of their elements, and whether they have changed since.

Reading is as dear as the model is large. A parameter is therefore read again only if another tensor stands in its place
or its version has changed. Buffers are always read again, since they are written to through ``.data``, which changes no
version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import storage_key, without_torch_function
from pytest_modelprobe.models import Layers, Offloaded, own_buffers, own_parameters, sharded_parameters
from pytest_modelprobe.record import qualified
from pytest_modelprobe.statistics import Reduction

from .tensors import ContentKey, content_key


@dataclass(frozen=True, slots=True, eq=False)
class ParameterReading:
    """A parameter or buffer as it was when it was read."""

    tensor: torch.Tensor
    content_key: ContentKey | None
    reduced: Reduction

    def is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is the one that was read, with the same elements.

        This is false for every buffer. Buffers are written to through ``.data``, which does not change the version.
        """
        same = self.tensor is tensor and isinstance(tensor, nn.Parameter)
        return same and self.content_key == parameter_content_key(tensor)


def read_parameters(layers: Layers, selected: Collection[str]) -> dict[str, ParameterReading]:
    """Return readings of the parameters and buffers of the selected layers by full name. Each tensor is read once.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> read = read_parameters(Layers(model), ["(root)"])
    >>> read["weight"].is_unchanged(model.weight)
    True
    """
    reduced = reducer(layers)
    with without_torch_function():
        return {
            name: ParameterReading(tensor, parameter_content_key(tensor), reduced(tensor))
            for name, tensor in named_tensors(layers, selected)
        }


def reducer(layers: Layers) -> Callable[[torch.Tensor], Reduction]:
    """Return a function that reduces the parameters and buffers of layers, each once."""
    known: dict[int, Reduction] = {}
    offloaded = Offloaded(layers.modules.values())

    def reduced(tensor: torch.Tensor) -> Reduction:
        if id(tensor) not in known:
            known[id(tensor)] = statistics.reduce(offloaded.load(tensor))
        return known[id(tensor)]

    return reduced


def named_tensors(layers: Layers, selected: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of the selected layers with their full names."""
    # FSDP2 puts the whole parameter in the place of this rank's shard for a time. The shard is what is recorded.
    shards = sharded_parameters(layers.modules.values())
    for name, module in layers.modules.items():
        if name in selected:
            atomic = layers.is_leaf(name)
            for own, tensor in (*own_parameters(module, atomic=atomic), *own_buffers(module, atomic=atomic)):
                yield qualified(name, own), shards.get((module, own), tensor) if shards else tensor


def parameter_content_key(tensor: torch.Tensor) -> ContentKey | None:
    """Return the content key of a parameter or buffer, or `None` if it has none or is uninitialized."""
    return None if is_lazy(tensor) else content_key(tensor)


def storage_keys(layers: Layers) -> Iterator[int]:
    """Yield the keys of the storages of all parameters and buffers."""
    for name, layer in layers.modules.items():
        for module in layer.modules() if layer._modules and layers.is_leaf(name) else (layer,):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                key = None if tensor is None else _storage_key(tensor)
                if key is not None:
                    yield key


def _storage_key(tensor: torch.Tensor) -> int | None:
    try:
        return storage_key(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # a sparse tensor, or one of a `torch.func` transform
        return None
