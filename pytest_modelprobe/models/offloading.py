"""Weights that accelerate keeps on the CPU or on disk.

Between calls a meta tensor stands in the place of each weight, so a record of its parameters would have no numbers. The
weights are read here where the hooks of accelerate keep them, and nothing of the model is moved.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


class Offloaded:
    """The weights of a model that are kept elsewhere. There are none if accelerate is not imported.

    Args:
        modules: The modules of the model, each before those inside it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept: dict[int, tuple[Mapping[str, torch.Tensor], str]] = {}
        for module in modules if "accelerate" in sys.modules else ():
            for weights in _weights(module):
                for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
                    if tensor.is_meta:
                        self._kept[id(tensor)] = weights, name

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._kept

    def load(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a call puts in the place of a meta tensor, and any other tensor as it is.

        >>> Offloaded([]).load(torch.ones(1))
        tensor([1.])
        """
        with contextlib.suppress(KeyError, OSError):  # the weight is kept nowhere, or its file is gone
            weights, name = self._kept[id(tensor)]
            return weights[name]
        return tensor


def _weights(module: nn.Module) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the mappings in which the hooks of accelerate on a module keep weights."""
    hook: Any = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):  # a `SequentialHook` has several
        if getattr(one, "weights_map", None) is not None:
            yield one.weights_map
