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
from pytest_modelprobe.models import Layers, detached_copy
from pytest_modelprobe.record import OptimizerGroup
from pytest_modelprobe.statistics import Reduced, Reduction

from .observed_forwards import ObservedForwards
from .steps import is_zero

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
    notes: dict[str, None]
    _before: dict[str, Reduction] = field(default_factory=dict)
    """Parameters and buffers by full name before the newest step of an optimizer of this model."""
    _before_other: dict[str, Reduction] = field(default_factory=dict)
    """The same before another optimizer stepped, if gradients had arrived."""
    _copies: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters by full name as the step that runs found them."""
    _running: list[int] = field(default_factory=list)
    """Ids of the optimizers whose step runs: that of one may call that of another, as in ZeRO, or a forward."""

    def forward_begins(self) -> None:
        """End a step that nobody saw: gradients arrived, another optimizer stepped, and parameters have changed.

        ZeRO keeps the parameters in flat copies of its own, which its optimizer holds instead of them.
        """
        step, before = self.forwards.step, self._before_other
        self._before_other = {}
        if before and not step.taken:
            now = self._read()
            if _differ(before, now, list(self.forwards.gradients)):
                for passes in list(self.forwards.pending):
                    self.forwards.use(passes)
                step.taken, step.before, step.buffers = True, before, {name: now[name] for name, _ in self._buffers()}
                self._read_updates(self._parameters())
        if not self._running:
            self._copies.clear()

    def other_step_begins(self) -> None:
        """Read parameters before an optimizer that holds none of them steps, as it may hold copies of them."""
        step = self.forwards.step
        if self.forwards.keeps_step and self.forwards.gradients and not (step.taken or self._before_other):
            self._before_other = self._read()
            self._copy(self._parameters())
            step.modes = self._modes()

    def step_begins(self, optimizer: torch.optim.Optimizer, parameters: Named, *, early: bool) -> None:
        """Read parameters before an optimizer changes them, and its gradients unless it computes them itself."""
        step = self.forwards.step
        if self.forwards.keeps_step:
            if id(optimizer) in self._running:  # a step of it raised an error
                self._running.clear()
            self._running.append(id(optimizer))
            if early or not step.before:  # within the step of another, as in ZeRO, it is known
                self._before = self._read()
            step.before = step.before or self._before
            self._copy(parameters)
            self._note_groups(optimizer, parameters)
            if not early:
                self._read_gradients(parameters)

    def step_ends(self, parameters: Named, *, early: bool) -> None:
        """Read what the optimizer did."""
        step = self.forwards.step
        step.taken = True
        if self.forwards.keeps_step:
            step.before = step.before or self._before  # a forward in a closure began the step
            step.modes = self._modes()
            if early:
                self._read_gradients(parameters)
            for name, tensor in () if graph_task() != -1 else self._buffers():
                step.buffers[name] = statistics.reduce(tensor)
            del self._running[-1:]
            if not self._running:
                self._read_updates(parameters)

    def _copy(self, parameters: Named) -> None:
        """Copy parameters, to know what is added to them: their fingerprints are not as exact as that needs."""
        for name, tensor in parameters:
            if name not in self._copies:
                try:
                    copy = detached_copy(tensor)
                except torch.OutOfMemoryError:
                    self.notes["what optimizers added to parameters was not recorded: no memory for copies"] = None
                    return
                if copy is not None:
                    self._copies[name] = copy

    def _read_updates(self, parameters: Named) -> None:
        """Read what was added to parameters since they were copied, and free the copies."""
        updates = self.forwards.step.updates
        known: dict[int, Reduction] = {}
        for name, tensor in parameters:
            copy = self._copies.pop(name, None)
            if name in updates:
                updates[name] = Reduced(reason="several optimizers changed it in one step")
            elif copy is None or copy.shape != tensor.shape:
                updates[name] = Reduced(reason="it could not be copied before the step")
            elif id(tensor) not in known:
                known[id(tensor)] = updates[name] = statistics.reduce(tensor.detach() - copy)
            else:  # tied
                updates[name] = known[id(tensor)]

    def _note_groups(self, optimizer: torch.optim.Optimizer, parameters: Named) -> None:
        step = self.forwards.step
        for group in optimizer.param_groups:
            own = {id(tensor) for tensor in group["params"]}
            held = [name for name, tensor in parameters if id(tensor) in own]
            step.groups.update((name, len(step.optimizers)) for name in held if name not in step.groups)
            if held:
                options = {key: _plain(value) for key, value in group.items() if key not in _NO_EFFECT}
                found = {key: value for key, value in options.items() if value is not NotImplemented}
                step.optimizers.append(OptimizerGroup(optimizer=type(optimizer).__name__, options=found))

    def _read(self) -> dict[str, Reduction]:
        return {name: reading.reduced for name, reading in read_parameters(self.layers, self.selected).items()}

    def _modes(self) -> dict[str, bool]:
        return {name: module.training for name, module in self.layers.modules.items()}

    def _read_gradients(self, parameters: Named) -> None:
        newest = self.forwards.newest
        index = 0 if newest is None else newest.index
        for name, parameter in parameters:
            if parameter.grad is not None:
                self.forwards.step.applied[name] = statistics.reduce(parameter.grad, index=index)

    def _buffers(self) -> Named:
        named = named_tensors(self.layers, self.selected)
        return [(name, tensor) for name, tensor in named if not isinstance(tensor, torch.nn.Parameter)]

    def _parameters(self) -> Named:
        named = named_tensors(self.layers, self.selected)
        return [(name, tensor) for name, tensor in named if isinstance(tensor, torch.nn.Parameter)]


def computes_gradients(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether gradients are known only after a step: a closure computes them, or a fused kernel unscales them."""
    return has_closure(args, kwargs) or getattr(optimizer, "grad_scale", None) is not None


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether gradients are computed in the step."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None) is not None


def is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused step does nothing, as gradients are not finite. A scaler leaves out other steps by itself."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and is_zero(found_inf) is False


def _differ(before: dict[str, Reduction], now: dict[str, Reduction], names: list[str]) -> bool:
    """Whether a parameter has other elements; this reads from the device."""
    both = [name for name in names if name in before and name in now]
    then = statistics.collect([before[name] for name in both])
    return then != statistics.collect([now[name] for name in both])


_NO_EFFECT = ("params", "foreach", "fused", "capturable", "differentiable")
"""Fields of a group that change no number."""


def _plain(value: object) -> Any:
    """Return a hyperparameter as a record has it; `NotImplemented` if it is no number, text or tuple of them."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else NotImplemented
    if isinstance(value, (tuple, list)):
        parts = [_plain(one) for one in value]
        return NotImplemented if NotImplemented in parts else f"({', '.join(map(str, parts))})"
    return value if value is None or isinstance(value, (bool, int, float, str)) else NotImplemented
