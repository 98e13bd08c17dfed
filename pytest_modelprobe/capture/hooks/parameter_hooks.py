"""Hooks on parameters: their gradients on the way to ``.grad``, and the steps of optimizers.

The gradient of a pass is read before it is added to ``.grad``, because ``.grad`` may hold that of earlier passes. A
tensor hook sees it at that moment. Parameters are looked for again before each forward, since a layer may be unfrozen,
or get new parameters, while it is watched.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils.hooks import RemovableHandle

from pytest_modelprobe._torch import graph_task, not_compiled, tensor_hooks
from pytest_modelprobe.capture.observed.units import stacked_axis
from pytest_modelprobe.capture.passes.backward import BackwardPasses
from pytest_modelprobe.capture.passes.observed_forwards import GradientState
from pytest_modelprobe.capture.passes.steps import Steps, are_zero
from pytest_modelprobe.capture.passes.training_steps import TrainingSteps, computes_gradients, has_closure, is_skipped
from pytest_modelprobe.models import Layers, sharded_parameters
from pytest_modelprobe.record import ROOT

from .guard import HookGuard, hidden


@dataclass(eq=False)
class ParameterHooks:
    """Puts one hook on each parameter of the layers added."""

    layers: Layers
    guard: HookGuard
    backward: BackwardPasses
    steps: Steps
    training: TrainingSteps

    def __post_init__(self) -> None:
        self._owners: list[tuple[str, nn.Module]] = []
        self._hooked: dict[str, nn.Parameter] = {}
        self._handles: list[RemovableHandle] = []
        self._skips: WeakSet[torch.optim.Optimizer] = WeakSet()
        """Optimizers whose newest step is not observed."""
        self.replaced: set[str] = set()
        """Full names of parameters that a plain tensor with a gradient replaced in a forward."""

    def add_layer(self, name: str, module: nn.Module) -> None:
        """Add the parameters of a layer, and those of its children if it is atomic.

        The children of an atomic layer, such as `nn.MultiheadAttention`, are never called, and so are no layers.
        """
        prefix = "" if name == ROOT else f"{name}."
        self._owners.append((prefix, module))
        if module._modules and self.layers.is_leaf(name):
            inside = module.named_modules(prefix=name.removeprefix(ROOT))
            self._owners += [(f"{path}.", owner) for path, owner in inside if owner is not module]

    def attach(self) -> None:
        """Hook the parameters that have no hook yet.

        This includes those that were unfrozen, replaced, or made by a lazy module since the last time.
        """
        # FSDP2 puts the whole parameter in the place of a shard for a time. Its gradient is not yet reduced over ranks.
        shards = sharded_parameters(self.layers.modules.values())
        for prefix, owner in self._owners:
            if not owner._parameters:
                continue  # most modules have none of their own, and this runs before each forward
            for name, held in owner._parameters.items():
                parameter: torch.Tensor | None = shards.get((owner, name), held) if shards else held
                if parameter is None or self._hooked.get(prefix + name) is parameter:
                    continue
                if not isinstance(parameter, nn.Parameter):  # `functional_call` puts plain tensors here
                    self.replaced.update([prefix + name] if parameter.requires_grad else [])
                    continue
                if parameter.requires_grad and parameter.is_leaf:
                    self._hooked[prefix + name] = parameter
                    hook = self._hook_on(parameter)
                    if hook is None:
                        hook = _ParameterHook(self, parameter, stacked_axis(owner, parameter))
                        self._handles.append(parameter.register_hook(hook))
                        if type(parameter) is not nn.Parameter:  # FSDP2 calls no other hook of its DTensors
                            self.see_accumulated(hook, parameter)
                    hook.names.append(prefix + name)  # tied: one hook for all its names

    def see_accumulated(self, hook: _ParameterHook, parameter: nn.Parameter) -> None:
        """Let the hook of a parameter also be called when the gradient has been added to ``.grad``."""
        self._handles.append(parameter.register_post_accumulate_grad_hook(_AccumulatedHook(hook)))
        hook.sees_accumulated = True

    def hold_gradients(self) -> bool:
        """Whether a parameter has a gradient already, to which that of the next pass is added."""
        return any(parameter.grad is not None for parameter in self._hooked.values())

    def detach(self) -> None:
        """Remove all hooks."""
        self._hooked.clear()
        while self._handles:
            self._handles.pop().remove()

    @not_compiled
    def step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step that an optimizer, of this model or another, is about to take."""
        if _is_inside_step(optimizer):
            return
        with self.guard.lock, self.guard, hidden():
            if not self.guard.observes() or is_skipped(optimizer):
                self._skips.add(optimizer)
                return
            self._skips.discard(optimizer)
            self.steps.settle()
            hooks = self._hooks_of(optimizer)
            early = computes_gradients(optimizer, args, kwargs)
            held = [hook.held for hook, _ in hooks]
            emptied = not has_closure(args, kwargs) and self._are_emptied(hooks)
            self.steps.step_begins(optimizer, held, self._hooked.values(), emptied=emptied)
            if hooks:
                self.training.step_begins(optimizer, _named(hooks), early=early)
                if _is_stepped_by_scaler():  # gradients were seen before it took its factor out
                    self.guard.notes["gradients are those of the loss as a GradScaler scaled it"] = None
            else:
                self.training.other_step_begins()

    @not_compiled
    def step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note that an optimizer has stepped."""
        if _is_inside_step(optimizer):
            return
        with self.guard.lock, self.guard, hidden():
            if optimizer in self._skips:  # known since it began: nothing is read again
                return
            self.steps.step_ends()
            hooks = self._hooks_of(optimizer)
            if hooks:
                self.training.step_ends(_named(hooks), early=computes_gradients(optimizer, args, kwargs))

    def _are_emptied(self, hooks: list[tuple[_ParameterHook, torch.Tensor]]) -> bool:
        """Whether gradients have arrived, and all of them are None or zero now.

        To look at a gradient waits for the device, so beside the CPU it is done only in steps that are kept.
        """
        if not any(hook.held.passes for hook, _ in hooks):
            return False
        left = [parameter.grad for _, parameter in hooks if parameter.grad is not None]
        if not left:
            return True
        if not (left[0].is_cpu or self.training.forwards.keeps_step) or not are_zero(left):
            return False
        pending = {passes: None for hook, _ in hooks for passes in hook.held.pending}
        names = [name for name, _ in _named(hooks)]
        return any(passes.has_gradient_other_than_zero(names) for passes in pending)

    def _hooks_of(self, optimizer: torch.optim.Optimizer) -> list[tuple[_ParameterHook, torch.Tensor]]:
        """Return our hooks on the parameters of an optimizer, each with its parameter."""
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return [(hook, parameter) for parameter in held if (hook := self._hook_on(parameter)) is not None]

    def _hook_on(self, parameter: torch.Tensor) -> _ParameterHook | None:
        hooks = (tensor_hooks(parameter) or {}).values()
        return next((h for h in hooks if isinstance(h, _ParameterHook) and h.owner is self), None)


class _ParameterHook:
    """Sees the gradient of a parameter on its way to ``.grad``.

    The gradient may come in parts, as that of a layer in two checkpointed segments does. Torch then calls the hook once
    for each part, and the sum is taken from ``.grad``.
    """

    __slots__ = ("_arrived", "_axis", "_parameter", "_parts", "held", "names", "owner", "sees_accumulated")
    is_modelprobe = True

    def __init__(self, owner: ParameterHooks, parameter: nn.Parameter, axis: int | None) -> None:
        self.owner = owner
        self._axis = axis
        self._parameter = ref(parameter)
        self.names: list[str] = []
        self.held = GradientState(self._parameter, self.names)
        self._arrived = -1
        self._parts = 0
        self.sees_accumulated = False

    def __call__(self, gradient: torch.Tensor | None) -> None:
        owner = self.owner
        if owner.guard.active and gradient is not None:
            with owner.guard.lock, owner.guard, hidden():
                if not owner.guard.observes():
                    return
                parameter = self._parameter()
                backward = owner.backward.current()
                if backward == self._arrived:
                    self._parts += 1
                    if parameter is not None and not self.sees_accumulated:
                        owner.see_accumulated(self, parameter)
                    return
                self._arrived, self._parts = backward, 1
                if parameter is not None:
                    into = owner.steps.arrives(parameter, self.held, backward)
                    owner.backward.receive_parameter(self.names, gradient, into, self._axis)

    def take_accumulated(self, parameter: nn.Parameter) -> None:
        """Take ``.grad`` if the hook could not see the gradient.

        That is so if it came in parts, and with FSDP2, where torch does not call the hook.
        """
        if self.owner.guard.active:
            with self.owner.guard.lock, self.owner.guard, hidden():
                if not self.owner.guard.observes() or (self._parts == 1 and graph_task() == self._arrived):
                    return
                gradient = parameter.grad
                backward = self.owner.backward.current()
                if gradient is not None and (self._parts > 1 or backward != self._arrived):
                    into = self.owner.steps.running(backward)
                    self.owner.backward.receive_parameter(self.names, gradient, into, self._axis)


class _AccumulatedHook:
    __slots__ = ("_hook",)
    is_modelprobe = True

    def __init__(self, hook: _ParameterHook) -> None:
        self._hook = hook

    def __call__(self, parameter: nn.Parameter) -> None:
        self._hook.take_accumulated(parameter)


def _named(hooks: list[tuple[_ParameterHook, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter) for hook, parameter in hooks for name in hook.names]


def _is_inside_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a `step` of the same optimizer runs already.

    Torch wraps the `step` of every class of optimizers, so a class that calls ``super().step()`` has the hooks called
    twice in one step.
    """
    frames = (frame for frame, _ in walk_stack(inspect.currentframe()) if frame.f_code.co_name == "step")
    return any(frame.f_locals.get("self") is optimizer for frame in frames)


def _is_stepped_by_scaler() -> bool:
    frames = (f for f, _ in walk_stack(inspect.currentframe()) if f.f_globals.get("__name__") == GradScaler.__module__)
    scaler = next((frame.f_locals.get("self") for frame in frames), None)
    return isinstance(scaler, GradScaler) and scaler.is_enabled()
