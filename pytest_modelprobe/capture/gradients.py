"""Hooks on tensors and parameters, and the backward passes in which they receive gradients.

A tensor is reduced once and hooked once, in however many places it is seen. The output of one layer is the input of the
next, so most tensors are seen several times. A tensor is known again by its contents (storage, version and layout) or
by our hook on it. The hook hands its gradient to every observation of it. Contents alone decide nothing about
gradients: a gradient reversal returns the memory of its input, and has another gradient.

Torch says when a gradient arrives, and not to which pass or forward it belongs. A pass is told by the number of the
graph task that runs. The forward is told by the observation that the hooked tensor holds. A large gradient that a sum
hands to several tensors is reduced once.

The gradient of a parameter is read before it is added to ``.grad``, because ``.grad`` may hold that of earlier passes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from traceback import walk_stack
from types import FrameType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import (
    WeakStorage,
    free_graphs,
    graph_task,
    hook_tensor,
    is_view,
    not_compiled,
    tensor_hooks,
    unhook_tensor,
)
from pytest_modelprobe.models import (
    Flat,
    Layers,
    flatten,
    is_distributed,
    local_tensor,
    sharded_parameters,
    value_layout,
)
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.statistics import WHOLE, Reduction, Samples, ambient_modes_disabled

from .forwards import ObservedForwards
from .hooks import HookGuard
from .observation import CallObservation, Forward, ParameterGradient, RunningCalls, TensorObservation, Values
from .tensors import ContentKey, content_key, is_parameter, shape_of, stacked_axis
from .training import GradientState, Steps, TrainingSteps, computes_gradients, has_closure, is_skipped

_index = operator.attrgetter("index")
_FEWEST_ZEROS = 0.05
"""A weight is worth a look from this share of elements without a gradient on."""
_LARGE = 1 << 13  # elements above which to look whether a gradient was seen before is cheaper than to read it again


@dataclass(eq=False)
class Gradients:
    """Makes a `TensorObservation` of each tensor, with a hook for its gradient; receives gradients, and counts passes.

    Autograd drops the hook on a view silently when the view is overwritten in place. Its gradient is then that of the
    uses before, and a record says so.
    """

    guard: HookGuard
    forwards: ObservedForwards
    running: RunningCalls
    steps: Steps
    histograms: bool
    """Whether to count the elements of each tensor in bins."""

    def __post_init__(self) -> None:
        self.model_storages: frozenset[int] = frozenset()
        """Keys of the storages of the model's parameters and buffers."""
        self.reads_layouts = False
        """Whether the model is tensor parallel."""
        # Hooks of the newest forward, and earlier ones that were alive when it began. They are removed on detach.
        self._hooks: list[ReferenceType[_TensorHook]] = []
        self._views: list[tuple[TensorObservation, int, torch.Tensor]] = []
        """Views that are hooked, each with its version and a tensor that shares the count of versions."""
        self._current = -1
        self._newest_task = -1
        self._reached = -1  # the newest pass that reached an observed tensor
        # Gradients of the newest backward pass, by index of the forward and content key.
        self._cache: dict[tuple[int, int | None, ContentKey], tuple[Reduction, Any]] = {}
        self.count = 0
        """Backward passes, those inside a forward left out."""
        self.zeros: dict[str, torch.Tensor | None] = {}
        """Elements of weights whose gradient was zero in every pass but the first, by full name.

        `None` if they are few, or not known. Only where there are many in each pass is there a tensor, so that most
        weights cost nothing.
        """
        self.recomputed: tuple[Forward, int] | None = None
        """Forward and start of the newest call that was recomputed, if no gradient has arrived since."""

    def observe(
        self, forward: Forward, tensor: torch.Tensor, axis: int | None, own: Samples | None = None
    ) -> TensorObservation:
        """Return the observation of a tensor in a new place.

        Args:
            forward: The forward.
            tensor: What is seen.
            axis: The axis of its units.
            own: Of an input of the model, samples with hashes of it alone, if those of the forward are others.
        """
        if not tensor.requires_grad:
            return self._seen(forward, tensor, *self._read(forward, tensor, axis, own))
        hook = self._hook_on(tensor)
        # `.data` may change a leaf, or a parameter of which this is a view, without a new version. So what was read of
        # these before is not used again.
        view = is_view(tensor)
        places = hook.observed.get(forward) if hook.observed else None
        before = places[0] if places else None
        if before is not None and hook.version is not None and not (view or before.forward in forward.own):
            without = before.backward is None and before.backward_inner is None
            if without and before.shape == shape_of(tensor):
                return before  # one observation in both places
            seen = self._seen(forward, tensor, before.number, before.forward)
        else:
            number, reduced = self._read(forward, tensor, axis, own)
            if before is not None:
                number = before.number
            elif not (self.reads_layouts and is_distributed(tensor)):
                # Numbered by the hook and not by the contents: after a `detach` or a gradient reversal, the same
                # contents have another gradient.
                number = forward.next_number()
                key = content_key(tensor) if self.reads_layouts else None
                if key in forward.reductions:  # a DTensor that is made of it gets the same number
                    forward.reductions[key] = number, *forward.reductions[key][1:]
            seen = self._seen(forward, tensor, number, reduced)
        hook.add(forward, seen)
        if view:
            with ambient_modes_disabled(), contextlib.suppress(RuntimeError):  # a tensor subclass may not allow it
                alias = tensor.detach()
                # The alias gives up the memory, so that it keeps none alive. It still shares the count of versions.
                alias.data = _no_elements(tensor.dtype, tensor.device)
                self._views.append((seen, tensor._version, alias))
        return seen

    def observe_again(self, forward: Forward, tensor: torch.Tensor, seen: TensorObservation) -> None:
        """Let the gradient of a recomputed tensor go to the observation of the original."""
        if tensor.requires_grad and not tensor.is_leaf:
            seen.requires_grad = True
            hook = self._hook_on(tensor)
            if not any(seen is known for known in hook.observed.get(forward, ())):
                hook.add(forward, seen)

    def forward_begins(self) -> None:
        """Mark the views that were overwritten by now, and forget the hooks whose tensors are gone."""
        self.recomputed = None
        self._mark_overwritten()
        free_graphs()
        self._hooks = [alive for alive in self._hooks if alive() is not None]

    def detach(self) -> None:
        """Remove the hooks from all tensors that are alive."""
        for alive in self._hooks:
            if (hook := alive()) is not None:
                unhook_tensor(hook.hooks, hook)
        self._hooks.clear()
        self._cache.clear()
        free_graphs()

    def _mark_overwritten(self) -> None:
        for seen, before, alias in self._views:
            seen.overwritten |= alias._version > before
        self._views.clear()

    def _read(
        self, forward: Forward, tensor: torch.Tensor, axis: int | None, own: Samples | None
    ) -> tuple[tuple[int, int], Reduction]:
        """Return the number of a tensor's contents, and their reduction."""
        # A DTensor that a layer is given may be made of the local tensor that the layer before returned, and then has
        # its memory.
        local = local_tensor(tensor) if self.reads_layouts else tensor
        key = content_key(local)
        if local is not tensor and value_layout(tensor) == "partial":
            key = None  # its local tensor is a summand of it, so they have different elements
        if key is not None and (key[0] in self.model_storages or is_parameter(tensor)):
            key = None  # `p.data.add_()` changes a parameter without a new version
        known = None if key is None else forward.reductions.get(key)
        number, reduced = (forward.next_number(), None) if known is None else known[:2]
        if reduced is not None and own is None and reduced not in forward.own:
            return number, reduced
        reduced = statistics.reduce(
            tensor,
            axis=axis,
            index=forward.index,
            samples=own or forward.samples,
            histogram=self.histograms,
        )
        if own is not None:
            forward.own.add(reduced)
        if key is not None:
            forward.reductions[key] = number, reduced, WeakStorage(local.untyped_storage())
        return number, reduced

    def _seen(
        self, forward: Forward, tensor: torch.Tensor, number: tuple[int, int], reduced: Reduction
    ) -> TensorObservation:
        """Return a new observation of a tensor of which the numbers are known."""
        local = local_tensor(tensor) if self.reads_layouts else tensor
        rows = forward.samples.rows(local)
        whole = local.is_nested or not forward.samples.has_batch(rows.shape)
        seen = TensorObservation(tensor, number, reduced, whole=whole)
        if rows is not local:
            seen.shape = tuple(rows.shape)
        if self.reads_layouts:
            seen.layout = value_layout(tensor)
        return seen

    def _hook_on(self, tensor: torch.Tensor) -> _TensorHook:
        """Return our hook on the tensor as it is now. It is made if there is none."""
        # A leaf keeps its hook for ever. Any other tensor becomes the output of another node when it is written to, and
        # the hook stays with the old node.
        version = None if tensor.is_leaf else tensor._version
        hooks = tensor_hooks(tensor)
        for known in hooks.values() if hooks else ():
            if type(known) is _TensorHook and known.gradients is self and known.version == version:
                return known
        hook = _TensorHook(self, version)
        hook.hooks = hook_tensor(tensor, hook, len(self._hooks))
        self._hooks.append(ref(hook))
        return hook

    def enter(self) -> bool:
        """Count the pass that runs if it is new; return whether it runs inside a forward."""
        inner = bool(self.running.stack) and self.running.drop_abandoned()
        task = graph_task()
        if task > self._newest_task:
            self._newest_task = task
            self._cache.clear()
            if self.recomputed is None:  # else it is the backward of a segment, inside that of the whole
                self._current = task
                if not inner:
                    self.count += 1
                    self._mark_overwritten()
        return inner

    def current(self) -> int:
        """Return the number of the pass that runs, counting it if it is new."""
        self.enter()
        return self._current

    def receive(self, observed: Mapping[Forward, list[TensorObservation]], gradient: torch.Tensor) -> None:
        """Take the whole gradient of a tensor that was observed, in one forward or several."""
        inner = self.enter()
        self.recomputed = None
        forwards = list(observed.items())
        newest = forwards[0][0] if len(forwards) == 1 else max((forward for forward, _ in forwards), key=_index)
        reduced = self._reduced(gradient, newest.index, newest.samples)
        for forward, places in forwards:
            for seen in places:
                seen.receive(reduced, inner=inner)
            if not inner:
                self._reached = self._current
                forward.backwards.add(self._current)
                forward.trained_by.add(self._current)
                self.steps.reached(forward.kind, self._current)

    def receive_parameter(self, names: list[str], gradient: torch.Tensor, axis: int | None = None) -> None:
        """Take the gradient of a parameter, before it is added to ``.grad``; ``axis`` is that of its units."""
        first, newest = self.forwards.first, self.forwards.newest
        reduced = self._reduced(gradient, 0 if newest is None else newest.index, WHOLE, axis)
        self._note_zeros(names[0], gradient, reduced)
        self.forwards.step.reached_by(self._current)
        receiving = [self.forwards.step.gradients]
        # The first and the newest forward have records of their own: those that the pass reached. It may have reached
        # no hooked value.
        if newest is not None and self._reached != self._current:
            newest.trained_by.add(self._current)
            receiving.append(newest.parameters)
        elif newest is not None:
            if self._current in newest.backwards:
                receiving.append(newest.parameters)
            if first is not None and first is not newest and self._current in first.backwards:
                receiving.append(first.parameters)
        for gradients in receiving:
            for name in names:
                held = gradients.get(name)
                if held is None:
                    gradients[name] = ParameterGradient(reduced, self._current)
                else:
                    held.receive(reduced, self._current)

    def _note_zeros(self, name: str, gradient: torch.Tensor, reduced: Reduction) -> None:
        """Note which elements of a weight had no gradient in any pass but the first. Beside the CPU it would wait."""
        if self.count < 2:  # a run has one pass, in which zeros may be chance
            return
        before = self.zeros.get(name)
        if before is None and name in self.zeros:
            return
        plain = type(gradient) is torch.Tensor and gradient.ndim > 1 and gradient.is_floating_point()
        count = reduced.computed().zeros if plain and (before is None or before.shape == gradient.shape) else None
        if count is None or count < _FEWEST_ZEROS * gradient.numel():
            self.zeros[name] = None
            return
        if count == gradient.numel():
            return
        with ambient_modes_disabled():
            zeros = gradient.detach() == 0
            if before is not None:
                zeros &= before
            rows = zeros.flatten(1)
            # Rows without any gradient alone are those of words that did not occur, or of dead units.
            self.zeros[name] = zeros if bool((rows.any(1) != rows.all(1)).any()) else None

    def _reduced(self, gradient: torch.Tensor, index: int, samples: Samples, axis: int | None = None) -> Reduction:
        """Reduce a gradient: a large one once in a pass, though a sum hands it to each of its terms."""
        key = content_key(gradient) if gradient.numel() > _LARGE else None
        known = None if key is None else self._cache.get((index, axis, key))
        if known is not None:
            return known[0]
        reduced = statistics.reduce(gradient, axis=axis, index=index, samples=samples, histogram=self.histograms)
        if key is not None:
            # While the storage is held weakly its address is not used again.
            self._cache[index, axis, key] = reduced, WeakStorage(gradient.untyped_storage())
        return reduced


@functools.cache
def _no_elements(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class _TensorHook:
    """Our hook on one tensor. It hands the gradient to every observation of the tensor."""

    __slots__ = ("__weakref__", "_fired", "gradients", "hooks", "observed", "version")
    __torch_unserializable__ = True  # without this, torch warns when the tensor is pickled

    def __init__(self, gradients: Gradients, version: int | None) -> None:
        self.gradients = gradients
        self._fired = False
        self.version = version
        self.hooks: Any = None
        # The graph holds its forward through the hooks in it. A leaf outlives many graphs, so its hook holds none.
        self.observed: MutableMapping[Forward, list[TensorObservation]] = (
            {} if version is not None else WeakKeyDictionary()
        )

    def add(self, forward: Forward, seen: TensorObservation) -> None:
        """Let the gradient go to ``seen`` too."""
        if self._fired:  # an input is used again, and earlier forwards have had its gradient
            for earlier in [other for other in self.observed if other is not forward]:
                del self.observed[earlier]
            self._fired = False
        self.observed.setdefault(forward, []).append(seen)

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if self.gradients.guard.active and gradient is not None and self.observed:
            self.gradients.guard.observe(self._receive, gradient)

    def _receive(self, gradient: torch.Tensor) -> None:
        self._fired = True
        self.gradients.receive(self.observed, gradient)


# --- parameters and optimizers ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class ParameterHooks:
    """Puts one hook on each parameter of the layers added."""

    layers: Layers
    guard: HookGuard
    gradients: Gradients
    steps: Steps
    training: TrainingSteps

    def __post_init__(self) -> None:
        self._owners: list[tuple[str, nn.Module]] = []
        self._hooked: dict[str, nn.Parameter] = {}
        self._handles: list[RemovableHandle] = []
        self._stepping: WeakSet[Optimizer] = WeakSet()
        """Optimizers whose newest step is observed."""
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
        self._handles.append(parameter.register_post_accumulate_grad_hook(hook.accumulated))
        hook.sees_accumulated = True

    def hold_gradients(self) -> bool:
        """Whether a parameter has a gradient already, to which that of the next pass is added."""
        return any(parameter.grad is not None for parameter in self._hooked.values())

    def observe_steps(self) -> None:
        """Observe the steps of all optimizers."""
        if not _OBSERVERS and not _STEP_HOOKS:
            _STEP_HOOKS.append(register_optimizer_step_pre_hook(_before_step))
            _STEP_HOOKS.append(register_optimizer_step_post_hook(_after_step))
        _OBSERVERS.append(self)

    def detach(self) -> None:
        """Remove all hooks."""
        self._hooked.clear()
        while self._handles:
            self._handles.pop().remove()
        if self in _OBSERVERS:
            _OBSERVERS.remove(self)
        # Torch walks over its hooks meanwhile. Where they have to stay, they do nothing, and go with the next watch.
        callers = (frame.f_globals.get("__name__") for frame, _ in walk_stack(inspect.currentframe()))
        if not _OBSERVERS and Optimizer.__module__ not in callers:
            while _STEP_HOOKS:
                _STEP_HOOKS.pop().remove()

    def step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step that an optimizer, of this model or another, is about to take."""
        if not _is_inside_step(optimizer):
            self._stepping.discard(optimizer)
            self.guard.observe(self._step_begins, optimizer, args, kwargs)

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_skipped(optimizer):
            return
        self._stepping.add(optimizer)
        hooks = self._hooks_of(optimizer)
        emptied = not has_closure(args, kwargs) and self._are_emptied(hooks)
        self.steps.step_begins(optimizer, [hook.held for hook, _ in hooks], self._hooked.values(), emptied=emptied)
        if hooks:
            self.training.step_begins(optimizer, _named(hooks), early=computes_gradients(optimizer, args, kwargs))
            callers = (frame for frame, _ in walk_stack(inspect.currentframe()))
            scaler = next((f for f in callers if f.f_globals.get("__name__") == GradScaler.__module__), None)
            stepping = None if scaler is None else scaler.f_locals.get("self")
            if isinstance(stepping, GradScaler) and stepping.is_enabled():  # it took its factor out after the backward
                self.guard.notes["gradients are those of the loss as a GradScaler scaled it"] = None

    def step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note that an optimizer has stepped."""
        if optimizer in self._stepping and not _is_inside_step(optimizer):
            self.guard.observe(self._step_ends, optimizer, args, kwargs)

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
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
        on_device = any(parameter.grad is not None and not parameter.grad.is_cpu for _, parameter in hooks)
        if on_device and not self.training.forwards.keeps_step:
            return False
        return self.steps.are_reset([hook.held for hook, _ in hooks])

    def _hooks_of(self, optimizer: Optimizer) -> list[tuple[_ParameterHook, torch.Tensor]]:
        """Return our hooks on the parameters of an optimizer, each with its parameter."""
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return [(hook, parameter) for parameter in held if (hook := self._hook_on(parameter)) is not None]

    def _hook_on(self, parameter: torch.Tensor) -> _ParameterHook | None:
        hooks = (tensor_hooks(parameter) or {}).values()
        return next((h for h in hooks if isinstance(h, _ParameterHook) and h.owner is self), None)


_OBSERVERS: list[ParameterHooks] = []
_STEP_HOOKS: list[RemovableHandle] = []
"""One pair for all watches: the garbage collector may close one during the step of any optimizer."""


@not_compiled
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for hooks in _OBSERVERS[:]:
        hooks.step_begins(optimizer, args, kwargs)


@not_compiled
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for hooks in _OBSERVERS[:]:
        hooks.step_ends(optimizer, args, kwargs)


class _ParameterHook:
    """Sees the gradient of a parameter on its way to ``.grad``.

    The gradient may come in parts, as that of a layer in two checkpointed segments does. Torch then calls the hook once
    for each part, and the sum is taken from ``.grad``.
    """

    __slots__ = ("_arrived", "_axis", "_parameter", "_parts", "held", "names", "owner", "sees_accumulated")

    def __init__(self, owner: ParameterHooks, parameter: nn.Parameter, axis: int | None) -> None:
        self.owner = owner
        self._axis = axis
        self._parameter = ref(parameter)
        self.names: list[str] = []
        self.held = GradientState(self._parameter, self.names)
        owner.steps.states.append(self.held)
        self._arrived = -1
        self._parts = 0
        self.sees_accumulated = False

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if self.owner.guard.active and gradient is not None:
            self.owner.guard.observe(self._receive, gradient)

    def _receive(self, gradient: torch.Tensor) -> None:
        owner, parameter = self.owner, self._parameter()
        backward = owner.gradients.current()
        if backward == self._arrived:
            self._parts += 1
            if parameter is not None and not self.sees_accumulated:
                owner.see_accumulated(self, parameter)
            return
        self._arrived, self._parts = backward, 1
        if parameter is not None:
            owner.steps.arrives(parameter, self.held, backward)
            owner.gradients.receive_parameter(self.names, gradient, self._axis)

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Look at ``.grad`` when a gradient has been added to it."""
        if self.owner.guard.active:
            self.owner.guard.observe(self._take_accumulated, parameter)

    def _take_accumulated(self, parameter: nn.Parameter) -> None:
        """Take ``.grad`` if the hook could not see the gradient.

        That is so if it came in parts, and with FSDP2, where torch does not call the hook.
        """
        if self._parts == 1 and graph_task() == self._arrived:
            return
        gradient = parameter.grad
        backward = self.owner.gradients.current()
        if gradient is not None and (self._parts > 1 or backward != self._arrived):
            self.owner.gradients.receive_parameter(self.names, gradient, self._axis)


def _named(hooks: list[tuple[_ParameterHook, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter) for hook, parameter in hooks for name in hook.names]


def _is_inside_step(optimizer: Optimizer) -> bool:
    """Whether a `step` of the same optimizer runs already.

    Torch wraps the `step` of every class of optimizers, so a class that calls ``super().step()`` has the hooks called
    twice in one step.
    """
    frames = (frame for frame, _ in walk_stack(inspect.currentframe()) if frame.f_code.co_name == "step")
    return any(frame.f_locals.get("self") is optimizer for frame in frames)


# --- activation checkpointing -----------------------------------------------------------------------------------------

_Original = tuple[Forward, CallObservation]


@dataclass(slots=True, eq=False)
class Recomputation:
    """Finds the call that runs again, and lets the gradients of the second run go to the observations of the first."""

    gradients: Gradients
    running: dict[FrameType, _Original] = field(default_factory=dict)
    """The calls that run, in any thread, by their Python frame."""

    def begin_call(self, name: str, inputs: Flat, frame: FrameType) -> None:
        """Take the inputs of a call that runs again."""
        self.gradients.enter()
        with statistics.ambient_modes_disabled():
            found = self._original(name, inputs)
        if found is not None:
            forward, call = found
            call.run_again()
            self.running[frame] = found
            self.gradients.recomputed = forward, call.started
            self._observe_again(forward, call, call.inputs, inputs)

    def end_call(self, frame: FrameType, output: Any) -> bool:
        """Take the output of a call that ran again. Returns False if no call that ran again is in that frame."""
        found = self.running.pop(frame, None)
        if found is None:
            return False
        forward, call = found
        self._observe_again(forward, call, call.outputs, flatten("output", output))
        return True

    def _original(self, name: str, inputs: Flat) -> _Original | None:
        """Find the call that runs again: one with the same input, else the next in the segment, else the last one."""
        keys = [key for _, tensor in inputs.tensors if (key := content_key(tensor)) is not None]
        segment, position = self.gradients.recomputed or (None, -1)

        def likelihood(candidate: _Original) -> tuple[int, ...]:
            forward, call = candidate
            known = [forward.reductions[key][1] for key in keys if key in forward.reductions]
            same = any(seen.forward is reduced for _, seen in call.inputs for reduced in known)
            follows = forward is segment and call.started > position
            # Segments run again from the last to the first, but the calls in a segment in their order. Within a segment
            # the nearest call after the position is likeliest, and else the latest call.
            return same, follows, -call.recomputed, forward.index, -call.started if follows else call.started

        return max(
            ((forward, call) for forward in self.gradients.forwards.alive for call in forward.calls_of(name)),
            key=likelihood,
            default=None,
        )

    def _observe_again(self, forward: Forward, call: CallObservation, values: Values, flat: Flat) -> None:
        """Let the values of the second run stand for those of the first.

        Only the reentrant kind needs it, whose first run is without gradients.
        """
        if call.grad_enabled:
            return
        originals = dict(values)
        with statistics.ambient_modes_disabled():
            for path, tensor in flat.tensors:
                seen = originals.get(path)
                if seen is not None:
                    self.gradients.observe_again(forward, tensor, seen)
