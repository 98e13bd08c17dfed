"""The models of each library: small, with random weights, in evaluation mode.

A library has a module here, ``of_<library>``, with a list ``MODELS``. Weights are those of ``state_dict``, found by
their names; a library that maps old names to new ones itself has a class of its own that does so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Inputs:
    """What a model is called with."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """How a model is made, and what it is called with."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]

    def save(self, folder: Path) -> None:
        """Make the model with weights that no initialization gives, and save these."""
        torch.manual_seed(0)
        model = self.build().eval()
        perturb(model)
        torch.save(model.state_dict(), folder / f"{self.name}.weights.pt")

    def load(self, folder: Path) -> tuple[nn.Module, list[str]]:
        """Return the model with the saved weights, and which it had to guess or found no weights for."""
        torch.manual_seed(0)
        model = self.build().eval()
        return model, adopt(model, torch.load(folder / f"{self.name}.weights.pt"))


def models_of(library: str) -> dict[str, Model]:
    """Return the models of a library by their names; imports the library."""
    module: ModuleType = importlib.import_module(f"models.of_{library}")
    return {model.name: model for model in module.MODELS}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers, the same in every version."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Move every parameter and all running statistics: at zero or one, what a layer does may not show.

    Other buffers are constants of the architecture, and so are the rows of padding.
    """
    seeded = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.add_(torch.randn(parameter.shape, generator=seeded), alpha=0.05)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = 0
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer += 0.1 * torch.randn(buffer.shape, generator=seeded)
        elif name.endswith("running_var"):
            buffer *= 0.5 + torch.rand(buffer.shape, generator=seeded)


@torch.no_grad()
def adopt(model: nn.Module, saved: dict[str, Tensor]) -> list[str]:
    """Give a model saved weights, by their names; those left over by shape, in their order. Return what was unmatched.

    A guess reads ``new name = old name``.
    """
    own = {key: tensor for key, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    matched = {key: key for key in own if key in saved and saved[key].shape == own[key].shape}
    # A weight that is used under several names is matched once.
    known = {saved[key].data_ptr() for key in matched}
    left = [key for key in saved if key not in matched and saved[key].data_ptr() not in known]
    told = []
    for key in own:
        if key not in matched:
            found = next((other for other in left if saved[other].shape == own[key].shape), None)
            if found is not None:
                left = [other for other in left if saved[other].data_ptr() != saved[found].data_ptr()]
                matched[key] = found
            told.append(f"{key} = {found}")
    for key, other in matched.items():
        own[key].copy_(saved[other])
    return told + [f"None = {key}" for key in left]
