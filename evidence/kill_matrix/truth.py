"""How large a fault is, measured without the tool: on whole tensors, compared in float64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from faults import Trial, start
from harmless import ROUNDINGS, SETTINGS
from torch import Tensor, nn

Tensors = dict[str, Tensor]

VISIBLE = 3.0
"""A fault is visible if it moves some tensor this many times as far as harmless changes move it."""
_EPSILON = 1.2e-7  # no float32 tensor is known better


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in an output."""
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, (tuple, list)) else []


def seen(trial: Trial) -> Tensors:
    """Run the model once, and return every layer's outputs, their gradients, the weights' and the buffers after."""
    found: Tensors = {}
    calls: dict[str, int] = {}

    def hook(name: str) -> Any:
        def see(module: nn.Module, inputs: Any, output: Any) -> None:
            call = calls[name] = calls.get(name, -1) + 1
            for i, tensor in enumerate(tensors(output)):
                key = f"{name or '(root)'} call {call} output {i}"
                found[key] = tensor.detach().double().clone()
                if tensor.requires_grad:
                    tensor.register_hook(
                        lambda g, key=key: found.__setitem__(f"{key} gradient", g.detach().double().clone())
                    )

        return see

    model = trial.model
    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(trial.seed)
    loss = trial.loss(model(*trial.inputs))
    found["loss"] = loss.detach().double()
    loss.backward()
    for handle in handles:
        handle.remove()
    found |= {f"{name} gradient": p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"{name} after": b.detach().double().clone() for name, b in model.named_buffers()}
    return found


def change(actual: Tensor | None, expected: Tensor | None) -> float:
    """Return ‖x − y‖ / ‖y‖; infinite where one is missing, of another shape or not finite."""
    if actual is None or expected is None or actual.shape != expected.shape:
        return math.inf
    if torch.equal(actual.isfinite(), expected.isfinite()) is False:
        return math.inf
    apart = float((actual - expected).nan_to_num(0, 0, 0).norm())
    norm = float(expected.nan_to_num(0, 0, 0).norm())
    return apart / norm if norm else math.inf if apart else 0.0


def changes(actual: Tensors, expected: Tensors) -> dict[str, float]:
    """Return the change of every tensor that either has."""
    return {key: change(actual.get(key), expected.get(key)) for key in {**expected, **actual}}


@dataclass(frozen=True)
class Clean:
    """A clean run, and how far harmless changes move it."""

    run: Tensors
    spread: Mapping[str, float]
    structure: Mapping[str, Any]


def clean(name: str, *, train: bool = False, dropout: float = 0.1) -> Clean:
    """Measure a clean model."""
    expected = seen(start(name, train=train, dropout=dropout))
    spread = dict.fromkeys(expected, _EPSILON)
    for variant in (SETTINGS | ROUNDINGS).values():
        trial = start(name, train=train, dropout=dropout)
        with variant(trial):
            moved = changes(seen(trial), expected)
        spread = {key: max(spread[key], moved[key]) for key in spread}
    return Clean(expected, spread, structure(start(name, train=train, dropout=dropout).model))


@dataclass(frozen=True)
class Effect:
    """Where a fault shows most, against what harmless changes do there."""

    where: str
    change: float
    spread: float
    structure: bool
    """Whether it shows without numbers: types, attributes, shapes, ties."""

    @property
    def visible(self) -> bool:
        """Whether a perfect observer would see it."""
        return self.structure or self.change > VISIBLE * self.spread


def effect(trial: Trial, of: Clean) -> Effect:
    """Return the effect of the fault that was planted."""
    with contextlib.suppress(RuntimeError):  # checkpoint and autocast warn; a model that cannot be run has no numbers
        moved = changes(seen(trial), of.run)
        where = max(moved, key=lambda key: moved[key] / of.spread.get(key, _EPSILON))
        spread = of.spread.get(where, _EPSILON)
        return Effect(where, moved[where], spread, structure(trial.model) != of.structure)
    return Effect("", math.inf, 0.0, structure=True)


def structure(model: nn.Module) -> dict[str, Any]:
    """Return what of a model is exact."""
    owners: dict[int, str] = {}

    def tensor(name: str, x: Tensor) -> tuple[Any, ...]:
        return tuple(x.shape), x.dtype, x.requires_grad, owners.setdefault(id(x), name)

    def of(name: str, module: nn.Module) -> tuple[Any, ...]:
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}
        own = [*module._parameters.items(), *module._buffers.items()]
        return type(module), plain, {k: tensor(f"{name}.{k}", x) for k, x in own if x is not None}

    return {name: of(name, module) for name, module in model.named_modules(remove_duplicate=False)}
