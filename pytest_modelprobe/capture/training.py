"""The training loop: which gradients each step of an optimizer was taken with.

Torch calls a hook before and after each step and nothing when gradients are reset. Whether ``zero_grad`` was called is
therefore told by the gradients themselves. The counts say whether a loop resets, accumulates or mixes gradients.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import accumulates, graph_task
from pytest_modelprobe.models import Layers, detached_copy, holds_elements, read_flags
from pytest_modelprobe.record import ForwardKind, OptimizerGroup, Training
from pytest_modelprobe.statistics import Reduced, Reduction, ambient_modes_disabled, as_plain_tensor

from .forwards import ObservedForwards
from .tensors import named_tensors, read_parameters


@dataclass(slots=True, eq=False)
class _Pass:
    """A backward pass whose gradients are added to ``.grad``."""

    kinds: set[ForwardKind]
    """Of the forwards that it reached."""
    options: dict[_OptimizerSteps, list[Any]]
    """Hyperparameters of the groups of each optimizer that has stepped."""

    def has_other_mode(self, earlier: _Pass) -> bool:
        """Whether it reached a layer in another mode than an earlier pass did."""
        turned = ((root, not training) for root, training in self.kinds - earlier.kinds)
        return not earlier.kinds.isdisjoint(turned)


@dataclass(slots=True, eq=False)
class GradientState:
    """What the ``.grad`` of one parameter consists of."""

    parameter: ref[nn.Parameter]
    names: list[str]
    """Full names of the parameter."""
    passes: set[int] = field(default_factory=set)
    """Numbers of the backward passes added up since a reset or a step."""
    began: _Pass | None = None
    """The first of them."""
    newest: _Pass | None = None
    switched: bool = False
    """Whether one of them reached a layer in another mode than the first."""
    used: int = 0
    """Number of the newest step that was taken with these gradients, from 1; 0: there was none."""
    stale: bool = False
    """Whether a pass was added to gradients with which a step had been taken."""
    shared: bool = False
    """Whether another optimizer stepped with gradients of one of the passes."""
    mixed: bool = False
    """Whether passes before and after a step of another optimizer, which may have used them, were added up."""
    total: int = 0
    """Steps of all optimizers when the newest pass arrived."""
    others: int = 0
    """Those of optimizers that have no parameter of the model."""


@dataclass(slots=True, eq=False)
class _OptimizerSteps:
    """The steps of one optimizer with a forward before them."""

    taken: int = 0
    idle: int = 0
    """Steps before which a forward in training mode ran without gradients."""


class Steps:
    """Counts what optimizers do while a model is observed.

    >>> steps = Steps(ObservedForwards())
    >>> steps.counts is None
    True
    """

    def __init__(self, forwards: ObservedForwards) -> None:
        self.states: list[GradientState] = []
        """Of each hooked parameter."""
        self._all = forwards
        self._counts: Counter[str] = Counter()  # by field of `Training`
        self._by_optimizer: WeakKeyDictionary[Optimizer, _OptimizerSteps] = WeakKeyDictionary()
        self._optimizer_steps: list[_OptimizerSteps] = []
        self._lookalikes: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        """Of optimizers without a parameter of the model, whether theirs have the same shapes."""
        self._stepping = False
        self._pass = _Pass(set(), {})
        """The newest that adds to ``.grad``."""
        self._reached: tuple[int, set[ForwardKind]] = -1, set()
        """Number of the newest pass, and the kinds of the forwards that it reached."""
        self._task = -1
        self._adds = True  # whether the newest pass adds to ``.grad``
        self._were_reset: dict[int, bool] = {}  # by number of a step, as the newest pass began
        # Since the last step of an optimizer:
        self._forwards = 0
        self._idle = False
        self._in_evaluation = False

    @property
    def counts(self) -> Training | None:
        """The counts; None where no optimizer stepped and no gradients were discarded."""
        counts = self._counts
        if not (counts["steps"] or counts["others"] or counts["discarded"]):
            return None
        irregular = sum(r.idle for r in self._optimizer_steps if r.idle < r.taken)
        if self._idle and not any(0 < r.idle == r.taken for r in self._optimizer_steps):
            irregular += 1
        return Training(**counts, optimizers=len(self._optimizer_steps), idle=irregular)

    def forward_begins(self, module: nn.Module) -> None:
        """Count a forward of a module that begins."""
        if torch.is_grad_enabled():
            self._forwards += module.training
        elif module.training:
            # `torch.optim.swa_utils.update_bn` has the norms of a module average over all batches.
            norms = (one for one in module.modules() if "running_mean" in one._buffers)
            self._idle |= not any(one.training and getattr(one, "momentum", 0.0) is None for one in norms)

    def reached(self, kind: ForwardKind, task: int) -> None:
        """Note that a backward pass reached a forward."""
        self._kinds_of(task).add(kind)
        self._in_evaluation |= not kind[1]

    def _kinds_of(self, task: int) -> set[ForwardKind]:
        """Return the kinds of the forwards that the pass that runs has reached so far."""
        if task != self._reached[0]:
            self._reached = task, set()
        return self._reached[1]

    def arrives(self, parameter: nn.Parameter, held: GradientState, task: int) -> None:
        """Count a gradient that is about to be added to ``.grad``, or to be the result of `torch.autograd.grad`."""
        step, counts = self._all.step, self._counts
        if task != self._task:
            self._task, self._were_reset = task, {}
            with ambient_modes_disabled():  # the node of a leaf is that of a view of it, and there is none in inference
                self._adds = accumulates(parameter)
            if self._adds:
                counts["passes"] += 1
                known = self._by_optimizer.items()
                options = {steps: [_scheduled(group) for group in one.param_groups] for one, steps in known}
                self._pass = _Pass(self._kinds_of(task), options)
                if not (step.taken or self._stepping):
                    self._discard_what_was_reset(task)
        if not self._adds:
            return
        # Whether another optimizer stepped since earlier passes, and may have used them.
        between = bool(held.passes) and (held.shared or held.others != counts["others"])
        if parameter.grad is None or ((held.used or between) and self._was_reset(held, parameter.grad)):
            if held.passes and not (step.taken or self._stepping):
                for name in held.names:  # the step will be taken without them
                    step.gradients.pop(name, None)
            _forget(held)
        elif held.used:
            held.stale = True
        elif between:
            held.mixed = True
        held.passes.add(task)
        held.began, held.newest = held.began or self._pass, self._pass
        held.switched |= self._pass.has_other_mode(held.began)
        held.total, held.others = counts["steps"] + counts["others"], counts["others"]
        if self._stepping:  # in the closure of a step, which uses it
            held.used = counts["steps"]

    def _discard_what_was_reset(self, task: int) -> None:
        """Find out whether all gradients that no step has used were reset."""
        waiting = [one for one in self.states if one.passes and not one.shared]
        if waiting and self.are_reset(waiting):
            total = self._counts["steps"] + self._counts["others"]
            self._counts["discarded"] += any(one.total == total for one in waiting)
            for one in waiting:
                _forget(one)
            self._all.discard(task)

    def are_reset(self, states: Collection[GradientState]) -> bool:
        """Whether all gradients are None or zero, and did not arrive as zeros. Reading waits for the device."""
        left = [p.grad for one in states if (p := one.parameter()) is not None and p.grad is not None]
        if not left:
            return True
        if not are_zero(left):
            return False
        known = self._all.step.gradients
        reduced = [known[name].reduced for one in states for name in one.names if name in known]
        arrived = statistics.collect([one for one in reduced if one is not None])
        return any(one.statistics is not None and not one.statistics.all_zero for one in arrived)

    def step_begins(
        self,
        optimizer: Optimizer,
        held: Collection[GradientState],
        parameters: Collection[nn.Parameter],
        *,
        emptied: bool,
    ) -> None:
        """Count a step that an optimizer is about to take.

        Args:
            optimizer: The optimizer.
            held: The gradients of those of its parameters that are hooked.
            parameters: All hooked parameters of the model.
            emptied: Whether all gradients that had arrived are gone.
        """
        found = self._counts
        if not held:
            found["others"] += 1
            if optimizer not in self._lookalikes:
                shapes = Counter(p.shape for group in optimizer.param_groups for p in group["params"])
                self._lookalikes[optimizer] = shapes <= Counter(p.shape for p in parameters)
            found["lookalikes"] += self._lookalikes[optimizer]
        else:
            found["steps"] += 1
            found["emptied"] += emptied
            found["stale"] += any(one.stale for one in held)
            found["mixed"] += any(one.mixed for one in held)
            found["accumulated"] += self._forwards > 1 and any(len(one.passes) > 1 for one in held)
            found["evaluating"] += self._in_evaluation
            self._in_evaluation = False
            counts = self._by_optimizer.get(optimizer)
            if counts is None:
                counts = self._by_optimizer[optimizer] = _OptimizerSteps()
                self._optimizer_steps.append(counts)
            used = {task for one in held for task in one.passes}
            found["switched"] += any(one.switched for one in held)
            ends = [(one.began.options, one.newest.options) for one in held if one.began and one.newest]
            found["rescheduled"] += any(counts in first and first[counts] != newest[counts] for first, newest in ends)
            for one in held:
                _forget(one)
                one.used = found["steps"]
            for one in self.states:
                one.shared |= not used.isdisjoint(one.passes)
            counts.taken += bool(self._forwards or self._idle)
            counts.idle += self._idle
            self._stepping = True
        self._forwards, self._idle = 0, False

    def step_ends(self) -> None:
        """Note that an optimizer has stepped."""
        if self._stepping:
            self._stepping = False
            for one in self.states:
                if one.used == self._counts["steps"]:  # it has used the gradients of its closure
                    one.passes.clear()
                    one.began, one.switched = None, False

    def _was_reset(self, held: GradientState, gradient: torch.Tensor) -> bool:
        """Whether a gradient with which a step was taken was reset to zero since.

        One gradient of each step is read in a pass, as reading synchronizes on CUDA.
        """
        if held.used not in self._were_reset:
            self._were_reset[held.used] = is_zero(gradient) is not False
        return self._were_reset[held.used]


def _scheduled(group: Mapping[str, Any]) -> list[Any]:
    """Return the hyperparameters of a group that schedulers change. A tensor is not read: that waits for its device."""
    options = (group.get(name) for name in ("lr", "weight_decay", "momentum", "betas"))
    return [option for option in options if isinstance(option, (int, float, tuple))]


def _forget(held: GradientState) -> None:
    held.passes, held.used, held.stale, held.shared, held.mixed = set(), 0, False, False, False
    held.began, held.switched = None, False


def is_zero(gradient: torch.Tensor) -> bool | None:
    """Whether a gradient is zero everywhere, on this rank; None if that is not known. Reading waits for its device."""
    found = _any(gradient)
    return None if found is None else not found


def are_zero(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether all gradients are known to be zero everywhere. The first is read, then all others together."""
    if not all(map(is_zero, gradients[:1])):
        return False
    others = [found for gradient in gradients[1:] if (found := _any(gradient)) is not None]
    known = len(others) == len(gradients[1:])
    with ambient_modes_disabled():
        return known and not any(read_flags(others))


def _any(gradient: torch.Tensor) -> torch.Tensor | None:
    with ambient_modes_disabled(), contextlib.suppress(RuntimeError, NotImplementedError):  # of a kind without `any`
        plain, reason = as_plain_tensor(gradient.coalesce().values() if gradient.is_sparse else gradient)
        if reason is None:
            return plain.any()
    return None


# --- what an optimizer does in a step ---------------------------------------------------------------------------------

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
    _copies: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters by full name as the step that runs found them."""
    _running: list[int] = field(default_factory=list)
    """Ids of the optimizers whose step runs: that of one may call that of another, as in ZeRO, or a forward."""

    def forward_begins(self) -> None:
        """Free the copies, unless the forward is in the closure of a step."""
        if not self._running:
            self._copies.clear()

    def step_begins(self, optimizer: torch.optim.Optimizer, parameters: Named, *, early: bool) -> None:
        """Read parameters before an optimizer changes them, and its gradients unless it computes them itself."""
        step = self.forwards.step
        if self.forwards.keeps_step:
            if id(optimizer) in self._running:  # a step of it raised an error
                self._running.clear()
            self._running.append(id(optimizer))
            if early or not step.before:  # within the step of another, as in ZeRO, it is known
                readings = read_parameters(self.layers, self.selected)
                self._before = {name: reading.reduced for name, reading in readings.items()}
            step.before = step.before or self._before
            self._copy(parameters)
            for group in optimizer.param_groups:
                own = {id(tensor) for tensor in group["params"]}
                held = [name for name, tensor in parameters if id(tensor) in own]
                step.groups.update((name, len(step.optimizers)) for name in held if name not in step.groups)
                if held:
                    options = {key: _plain(value) for key, value in group.items() if key not in _NO_EFFECT}
                    found = {key: value for key, value in options.items() if value is not NotImplemented}
                    step.optimizers.append(OptimizerGroup(optimizer=type(optimizer).__name__, options=found))
            if not early:
                self._read_gradients(parameters)

    def step_ends(self, parameters: Named, *, early: bool) -> None:
        """Read what the optimizer did."""
        step = self.forwards.step
        step.taken = True
        if self.forwards.keeps_step:
            step.before = step.before or self._before  # a forward in a closure began the step
            step.modes = {name: module.training for name, module in self.layers.modules.items()}
            if early:
                self._read_gradients(parameters)
            for name, tensor in () if graph_task() != -1 else named_tensors(self.layers, self.selected):
                if not isinstance(tensor, nn.Parameter):
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

    def _read_gradients(self, parameters: Named) -> None:
        newest = self.forwards.newest
        index = 0 if newest is None else newest.index
        for name, parameter in parameters:
            if parameter.grad is not None:
                self.forwards.step.applied[name] = statistics.reduce(parameter.grad, index=index)


def clamped(zeros: torch.Tensor, weight: torch.Tensor) -> int:
    """Return how many elements of a weight have no gradient because their values are too large or too small.

    Left out are rows and columns without a gradient, as of dead units and of inputs that are always zero, and rows in
    which too few elements have one. A clamp of weights is known by the values: nearly all that have no gradient are
    beyond the middle nine tenths of those in their row that have one.

    Args:
        zeros: Whether the gradient of an element was zero in every pass.
        weight: The values. Two dimensions or more.

    >>> weight = torch.stack([torch.linspace(-1, 1, 100), torch.linspace(-1, 1, 100).roll(50)])
    >>> clamped(weight.abs() > 0.9, weight), clamped(weight.abs() < 0.1, weight)
    (20, 0)
    """
    if weight.shape != zeros.shape or not weight.is_cpu or not holds_elements(weight):  # moved or freed since
        return 0
    with ambient_modes_disabled(), torch.no_grad():
        rows, values = zeros.flatten(1), weight.detach().float().flatten(1)
        learning = (~rows).sum(1, keepdim=True)
        left = zeros & (learning >= max(3, rows.shape[1] // 4)).view(-1, *[1] * (zeros.ndim - 1))
        for dim in range(1, zeros.ndim):
            whole = zeros.movedim(dim, 0).flatten(1).all(1)
            left &= ~whole.view(-1, *[1] * (zeros.ndim - 1 - dim))
        if not left.any():
            return 0
        low, high = torch.nanquantile(
            values.masked_fill(rows, torch.nan), torch.tensor([0.05, 0.95]), dim=1, keepdim=True
        )
        beyond = left.flatten(1) & ((values < low) | (values > high))
        return int(left.sum()) if beyond.sum() > 0.9 * left.sum() else 0


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
