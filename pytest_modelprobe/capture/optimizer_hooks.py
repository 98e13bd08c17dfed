"""Hooks on the steps of optimizers: parameters are read before the first, and steps are counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from pytest_modelprobe._torch import without_torch_function

from .guard import HookGuard
from .parameter_hooks import ParameterHooks
from .parameters import ParameterReading
from .steps import Steps

_SCALER_STEP = getattr(torch.amp.GradScaler.step, "__code__", None)


class OptimizerHooks:
    """Observes the steps of all optimizers.

    Args:
        read: Returns readings of the model's parameters and buffers.
    """

    def __init__(
        self,
        guard: HookGuard,
        parameters: ParameterHooks,
        steps: Steps,
        read: Callable[[], dict[str, ParameterReading]],
    ) -> None:
        self._guard = guard
        self._parameters = parameters
        self._steps = steps
        self._read = read
        self._handles: list[RemovableHandle] = []
        self.before_training: dict[str, ParameterReading] | None = None
        """Parameters and buffers by full name, before the first step of an optimizer that has one of them."""

    def attach(self) -> None:
        """Register the hooks, which torch has for all optimizers together."""
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))

    def detach(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with self._guard, without_torch_function():
            held = self._parameters.gradient_states([p for group in optimizer.param_groups for p in group["params"]])
            self._steps.step_begins(optimizer, held, self._parameters.hooked)
            if not held:
                return
            if _is_stepped_by_scaler(sys._getframe(1)):  # gradients were seen before it took its factor out
                self._guard.notes["gradients are those of the loss as a GradScaler scaled it"] = None
            if self.before_training is None:
                self.before_training = self._read()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps.step_ends()


def _is_stepped_by_scaler(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is _SCALER_STEP:
            scaler = frame.f_locals.get("self")
            return isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()
        frame = frame.f_back
    return False
