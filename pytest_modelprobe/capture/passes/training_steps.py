"""Steps of training as optimizers take them: gradients and parameters before and after each step that is kept.

Reading all parameters takes time, so it is done for the first steps alone, as many as ``steps=`` says. A step may be
taken by several optimizers together, and by an optimizer that holds copies of the parameters, as in ZeRO.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import graph_task
from pytest_modelprobe.capture.observed.parameters import named_tensors, read_parameters
from pytest_modelprobe.models import Layers
from pytest_modelprobe.statistics import Reduction, SmallTensors

from .observed_forwards import ObservedForwards

Named = Iterable[tuple[str, torch.Tensor]]
"""Parameters with their full names; of a tied one all."""


@dataclass(slots=True, eq=False)
class TrainingSteps:
    """Reads what an optimizer does in each of the steps that are kept.

    A step is over when the next forward begins: several optimizers, or several calls of one within a backward pass, may
    take it together.
    """

    layers: Layers
    selected: Collection[str]
    """Names of the layers that are recorded."""
    forwards: ObservedForwards
    _before: dict[str, Reduction] = field(default_factory=dict)
    """Parameters and buffers by full name before the newest step of an optimizer of this model."""
    _before_other: dict[str, Reduction] = field(default_factory=dict)
    """The same before another optimizer stepped, if gradients had arrived."""

    def forward_begins(self) -> None:
        """End a step that nobody saw: gradients arrived, another optimizer stepped, and parameters have changed.

        ZeRO keeps the parameters in flat copies of its own, which its optimizer holds instead of them.
        """
        step, before = self.forwards.step, self._before_other
        self._before_other = {}
        if before and not step.taken:
            now = self._read()
            if _differ(before, now, list(step.gradients)):
                step.taken, step.before, step.after = True, before, now

    def other_step_begins(self) -> None:
        """Read parameters before an optimizer that holds none of them steps, as it may hold copies of them."""
        step = self.forwards.step
        if self.forwards.keeps_step and step.gradients and not (step.taken or self._before_other):
            self._before_other = self._read()
            step.modes = self._modes()

    def step_begins(self, parameters: Named, *, early: bool) -> None:
        """Read parameters before an optimizer changes them, and its gradients unless it computes them itself."""
        step = self.forwards.step
        if self.forwards.keeps_step:
            if early or not step.before:  # within the step of another, as in ZeRO, it is known
                self._before = self._read()
            step.before = step.before or self._before
            if not early:
                self._read_gradients(parameters)

    def step_ends(self, parameters: Named, *, early: bool) -> None:
        """Read what the optimizer left."""
        step = self.forwards.step
        if self.forwards.keeps_step:
            self.forwards.take_traced()
        step.taken = True
        if self.forwards.keeps_step:
            step.before = step.before or self._before  # a forward in a closure began the step
            step.modes = self._modes()
            if early:
                self._read_gradients(parameters)
            buffers = () if graph_task() != -1 else self._buffers()
            small = SmallTensors()
            for name, tensor in (*parameters, *buffers):
                step.after[name] = statistics.reduce(tensor, small=small)

    def _read(self) -> dict[str, Reduction]:
        return {name: reading.reduced for name, reading in read_parameters(self.layers, self.selected).items()}

    def _modes(self) -> dict[str, bool]:
        return {name: module.training for name, module in self.layers.modules.items()}

    def _read_gradients(self, parameters: Named) -> None:
        newest, small = self.forwards.newest, SmallTensors()
        index = 0 if newest is None else newest.index
        for name, parameter in parameters:
            if parameter.grad is not None:
                self.forwards.step.applied[name] = statistics.reduce(parameter.grad, index=index, small=small)

    def _buffers(self) -> Named:
        named = named_tensors(self.layers, self.selected)
        return [(name, tensor) for name, tensor in named if not isinstance(tensor, torch.nn.Parameter)]


def computes_gradients(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether gradients are known only after a step: a closure computes them, or a fused kernel unscales them."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure is not None or getattr(optimizer, "grad_scale", None) is not None


def _differ(before: dict[str, Reduction], now: dict[str, Reduction], names: list[str]) -> bool:
    """Whether a parameter has other elements; this reads from the device."""
    both = [name for name in names if name in before and name in now]
    then = statistics.collect([before[name] for name in both])
    return then != statistics.collect([now[name] for name in both])
