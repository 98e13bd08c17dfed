"""Attach, observe, detach: hooks on a model, and what they see while it runs.

The hooks keep numbers, never a tensor or graph of the model. `Capture` makes the
parts and decides what each event means: `before` and `after` of a call, and the beginning of a forward. Each part has a
module: what runs now, what was observed, hooks on modules, tensors and parameters.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import (
    graph_task,
    is_wrapped,
    learns_shapes,
    without_torch_function,
)
from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.interrupts import finished, held
from pytest_modelprobe.models import (
    RUN_EAGERLY,
    TENSOR_PARALLEL,
    Flat,
    Layers,
    detached_copy,
    devices_of,
    flatten,
    flatten_call,
    map_tensors,
    notes_on,
    run_eagerly,
)
from pytest_modelprobe.record import ForwardKind, Selector, gc_paused, select
from pytest_modelprobe.text import listed

from .attention import AttentionMode
from .calls import CallRecorder, FunctionalMode
from .forwards import ObservedForwards
from .gradients import Gradients, ParameterHooks, Recomputation
from .hooks import ForwardMode, HookGuard, ModuleHooks, enter, leave
from .observation import RunningCall, RunningCalls, SetAttributes
from .profiler import Profiler
from .tensors import ParameterReading, describe, may_draw, read_parameters, storage_keys
from .training import Steps, TrainingSteps

# --- What is asked of a capture: which layers are seen, and what is taken down of each -------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options that a run, a watch and a capture share."""

    layers: Selector = "**"
    """Which layers to record. The root is hooked in any case, for it marks where a forward begins."""
    keep: Selector = ()
    """Which layers' output tensors of the newest forward to keep."""
    functionals: bool = False
    """Whether to record functional calls such as ``F.relu`` as pseudo-layers."""
    attention: bool = False
    """Whether to look at attention weights."""
    profile: bool = False
    """Whether to measure what each layer costs."""
    histograms: bool = False
    """Whether to count the elements of each tensor and gradient in bins."""
    steps: int = 1
    """How many steps of training to keep, each apart."""
    tokens: statistics.Requests | None = None
    """Which tokens there are, if values are compared token by token; see `statistics.Tokens`."""

    @property
    def keeps(self) -> bool:
        """Whether outputs are kept. An empty list asks for none; `select` would refuse it."""
        return self.keep not in ((), [])


class Capture:
    """Observes a model from `attach` to `detach`.

    Args:
        layers: The layers of the model.
        options: What is asked.
        on_forward: Called before each forward with its kind and its arguments.
    """

    def __init__(
        self,
        layers: Layers,
        options: Options,
        *,
        on_forward: Callable[[ForwardKind, tuple[Any, ...], dict[str, Any]], None] | None = None,
    ) -> None:
        self.layers = layers
        self.selected = frozenset(select(layers.modules, options.layers))
        self.keep = frozenset(select(layers.modules, options.keep) if options.keeps else ())
        self.kept: dict[str, list[Any]] = {}
        """Copies of the outputs of the layers in ``keep`` in the newest forward, one entry a call."""
        self.parameters: dict[str, ParameterReading] | None = None
        """Parameters and buffers by full name, as the first forward left them unless `read_parameters` came before."""
        self.sample_inputs: Flat | None = None
        """What tells the samples of the forwards apart; None: their own arguments."""
        self.notes: dict[str, None] = dict.fromkeys(layers.notes)
        self._profiler = Profiler() if options.profile else None
        self.guard = HookGuard(self.notes, self._profiler)
        self._on_forward = on_forward
        self._tokens = None if options.tokens is None else statistics.Tokens(options.tokens)
        self.observed = ObservedForwards(options.steps, self._tokens)
        self._running = RunningCalls(on_abandoned=self._leave_forward)
        self.training = Steps(self.observed)
        self.gradients = Gradients(
            self.guard, self.observed, self._running, self.training, histograms=options.histograms
        )
        self._recomputation = Recomputation(self.gradients)
        self.set_attributes = SetAttributes(layers, self.selected)
        self._modules = ModuleHooks(self.guard, self.before, self.after)
        training = self._training_steps = TrainingSteps(layers, self.selected, self.observed, self.notes)
        self.parameter_hooks = ParameterHooks(layers, self.guard, self.gradients, self.training, training)
        attending = AttentionMode(self.guard, self._running) if options.attention else None
        self._calls = CallRecorder(self.gradients, self._running, self.notes, self._profiler)
        self.functionals = FunctionalMode(layers, self.selected, self.guard, self._running, self._calls)
        # Attention topmost: it comes first, while no pseudo-layer runs.
        modes: tuple[ForwardMode | None, ...] = (self.functionals if options.functionals else None, attending)
        self._modes = [mode for mode in modes if mode is not None]
        self._unhooked: list[str] = []
        self._unseen_thread = False
        self._children = layers.children()
        self._changed: dict[str, None] = {}
        """Names of layers that were replaced, added or removed before the end of a forward."""
        self._abstract = 0
        """Forwards that returned nothing but meta or fake tensors."""
        self._exit = contextlib.ExitStack()

    @property
    def all_notes(self) -> Iterator[str]:
        """The notes of a record of what was seen so far."""
        yield from self.notes
        if self._changed:
            yield (
                f"{listed([*self._changed])}: replaced, added or removed while the model was watched; the record has "
                "the modules from before, so watch the model again after such a change"
            )
        forwards = self.observed.count
        if 0 < self._abstract < forwards:
            yield f"{self._abstract:,} of {forwards:,} forwards ran on meta or fake tensors, which have no numbers"

    def read_parameters(self) -> None:
        """Read the parameters and buffers of the selected layers."""
        self.parameters = read_parameters(self.layers, self.selected)

    # --- attach, detach -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on. On an error none stays behind."""
        # A torch that cannot do what hooks need is refused here, while there is nothing to take off.
        graph_task()
        enter(self._modes)
        leave(self._modes)
        try:
            with held(), gc_paused(), without_torch_function():
                self._exit.enter_context(
                    run_eagerly(self.layers, lambda name: self.notes.update({f"{name} {RUN_EAGERLY}": None}))
                )
                root = next(iter(self.layers.modules))
                for name, module in self.layers.modules.items():
                    if name == root or name in self.selected or name in self.keep:
                        self._modules.attach(name, module)
                    if name in self.selected:
                        self.parameter_hooks.add_layer(name, module)
                self.gradients.model_storages = frozenset(storage_keys(self.layers))
                self.parameter_hooks.attach()
                self.parameter_hooks.observe_steps()
                self.guard.active = True
        except BaseException:
            self.detach()
            raise

    def __enter__(self) -> Capture:
        self.attach()
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    @finished
    def detach(self) -> None:
        """Take every hook off again: modules', parameters' and those on tensors still alive. Idempotent."""
        self._find_unhooked()
        self.guard.active = False
        self._running.stack.clear()
        self._recomputation.running.clear()
        self.set_attributes.clear()
        self._leave_forward()
        self.gradients.detach()
        with gc_paused():
            self.parameter_hooks.detach()
            self._modules.detach()
        self._exit.close()

    def check(self) -> None:
        """Raise the error of a hook, if there was one, and one where something was not seen that had to be."""
        self._find_unhooked()
        if self._unhooked:
            first, *more = self._unhooked
            torn = f"{first} and {len(more)} more" if more else first
            raise ModelProbeError(
                f"the hooks of the probe were taken off {torn}, and what ran since was not seen: clear no dict of "
                "hooks while a model is watched, but call remove() of the handle that came with each hook"
            )
        if self._unseen_thread:
            raise ModelProbeError(
                "a forward ran in one thread while another ran in a second, and only one of them was seen: let the "
                "threads call the model one after the other, under a lock, or watch a copy of the model in each"
            )
        self.guard.check()
        if self._tokens is not None:
            self._tokens.check()

    def _find_unhooked(self) -> None:
        if self.guard.active:
            self._unhooked = self._modules.removed()

    # --- forward --------------------------------------------------------------------------------------------------

    def before(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> None:
        """Begin a call of a hooked layer.

        Args:
            name: Name of the layer.
            module: The layer.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            frame: Python frame of the call.
        """
        outermost = not self._running.drop_abandoned(frame)
        inputs = flatten_call(args, kwargs)
        if graph_task() != -1:
            self._recomputation.begin_call(name, inputs, frame)
            return
        if outermost and learns_shapes(frame):
            self.notes["a stage of a pipeline called the model once to learn shapes: that forward is left out"] = None
            return
        if outermost:
            self._begin_forward(name, module, inputs)
            self.notes.update(dict.fromkeys(notes_on(self.layers.modules.values(), frame)))
            self.gradients.reads_layouts = TENSOR_PARALLEL in self.notes
            if self._on_forward is not None:
                self._on_forward((name, module.training), args, kwargs)
        elif self._running.is_elsewhere():
            self._unseen_thread = True
            return
        assert self.observed.newest is not None
        running = RunningCall(name, frame, self.observed.newest, inputs)
        if name in self.selected:
            self._calls.start(running, training=module.training, may_draw=may_draw(module))
        self._running.push(running)
        if outermost:
            enter(self._modes)

    def after(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        frame: FrameType,
    ) -> None:
        """End a call of a hooked layer, also one that raised."""
        if self._recomputation.running and self._recomputation.end_call(frame, output):
            return
        running = self._running.pop(name, frame)
        if running is None:
            return
        error = sys.exc_info()[1]
        try:
            if error is not None and error is not running.error_before:
                _note_raising_layer(error, name, module, running.inputs)
                return
            self._calls.finish(running, output, module, leaf=self._profiler is None or self.layers.is_leaf(name))
            if name in self.keep:
                self._keep(name, output)
        finally:
            if not self._running.stack:
                changed = self.layers.changed(self._children)
                self._changed.update((child, None) for parent, child in changed if self.selected & {parent, child})
                with statistics.ambient_modes_disabled():
                    tensors = flatten("output", output).tensors
                    reasons = {statistics.as_plain_tensor(tensor)[1] for _, tensor in tensors}
                self._abstract += bool(reasons) and reasons <= statistics.ABSTRACT
                self._leave_forward()

    def _begin_forward(self, name: str, module: nn.Module, inputs: Flat) -> None:
        kind = name, module.training
        self._training_steps.forward_begins()
        tensors = [tensor for _, tensor in (self.sample_inputs or inputs).tensors]
        given = [tensor for _, tensor in inputs.tensors]
        devices = devices_of(self.layers.modules.values(), given)
        self.observed.begin(kind, tensors, devices, accumulates=self.parameter_hooks.hold_gradients)
        self._modules.stay_last()
        self.parameter_hooks.attach()
        self._recomputation.running.clear()
        self.gradients.forward_begins()
        self.training.forward_begins(module)
        self.set_attributes.clear()
        if self.observed.is_new(kind):
            self.set_attributes.begin(name)
        self.kept = {}
        if self._profiler is not None and self.observed.newest is not None:
            self.observed.newest.costs = self._profiler.begin(given, self.gradients.model_storages, devices)

    def _leave_forward(self) -> None:
        leave(self._modes)
        if self._profiler is not None:
            self._profiler.end()
        self.set_attributes.update()
        if self.guard.active and self.parameters is None and self.observed.first is not None:
            self.read_parameters()

    def _keep(self, name: str, output: Any) -> None:
        def copied(tensor: torch.Tensor) -> torch.Tensor | None:
            copy = None if is_wrapped(tensor) else detached_copy(tensor)
            if copy is None:
                self.notes[f"outputs of {name} are not kept: torch cannot copy them, or not out of a transform"] = None
            return copy

        with statistics.ambient_modes_disabled():
            self.kept.setdefault(name, []).append(map_tensors(copied, output))


def _note_raising_layer(error: BaseException, name: str, module: nn.Module, inputs: Flat) -> None:
    """Add to an exception which layer raised it: the innermost one, as its hook runs first."""
    if any(note.startswith("raised in ") for note in getattr(error, "__notes__", ())):
        return
    shown = ", ".join(describe(tensor) for _, tensor in inputs.tensors) or "none"
    error.add_note(f"raised in {name} ({type(module).__name__}), inputs {shown}")
    devices = {str(p.device) for p in nn.Module.parameters(module)}
    for path, tensor in inputs.tensors:
        if len(devices) == 1 and str(tensor.device) not in devices and tensor.ndim > 0:
            here = devices.pop()
            error.add_note(f"{path} is on {tensor.device}, {name} on {here}: move one with .to({here!r})")
