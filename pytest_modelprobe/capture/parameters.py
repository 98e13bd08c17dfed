"""Parameters and buffers of layers: read as they are, and whether they are still what was read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import without_torch_function
from pytest_modelprobe.models import Layers, own_buffers, own_parameters
from pytest_modelprobe.record import qualified
from pytest_modelprobe.statistics import Reduced, SmallTensors

from .observation import Identity, identity


@dataclass(frozen=True, slots=True, eq=False)
class ParameterReading:
    """What a parameter or buffer was when it was read."""

    tensor: torch.Tensor
    identity: Identity | None
    reduced: Reduced

    def is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is still what was read. Buffers are written to through ``.data``, which counts nothing."""
        return self.tensor is tensor and isinstance(tensor, nn.Parameter) and self.identity == contents(tensor)


def owned(layers: Layers, selected: Collection[str]) -> dict[str, ParameterReading]:
    """Return the parameters and buffers of the selected layers as they are, by full name; each is read once.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> read = owned(Layers(model), ["(root)"])
    >>> read["weight"].is_unchanged(model.weight)
    True
    """
    read: dict[int, ParameterReading] = {}
    small = SmallTensors()
    found: dict[str, ParameterReading] = {}
    with without_torch_function():
        for name, tensor in tensors(layers, selected):
            if id(tensor) not in read:
                read[id(tensor)] = ParameterReading(tensor, contents(tensor), statistics.reduce(tensor, small=small))
            found[name] = read[id(tensor)]
    return found


def tensors(layers: Layers, selected: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of the selected layers with their full names."""
    for name, module in layers.modules.items():
        if name in selected:
            atomic = layers.is_leaf(name)
            for own, tensor in (*own_parameters(module, atomic=atomic), *own_buffers(module, atomic=atomic)):
                yield qualified(name, own), tensor


def contents(tensor: torch.Tensor) -> Identity | None:
    """Return what tells the contents of a parameter or buffer apart from later ones; None where nothing does."""
    return None if is_lazy(tensor) else identity(tensor)
