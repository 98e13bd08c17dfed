"""Records one call of a layer: its inputs are observed when it begins, its outputs when it ends.

The inputs are read before the call because the layer may write into them. A functional call is recorded as that of a
pseudo-layer: ``F.relu`` inside ``block`` is ``block.relu``. A model that calls it has no module for it, and so no hook,
but a function mode sees the call. It costs some microseconds for each call of torch, so ``functionals=True`` has to ask
for it. Functions that a module of torch calls itself are left out, since the module is recorded.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelprobe._torch import WeakStorage, any_autocast
from pytest_modelprobe.models import Flat, Layers, active_autocast, flatten, flatten_call, type_name, unseen
from pytest_modelprobe.record import qualified

from .gradients import Gradients
from .hooks import ForwardMode, HookGuard
from .observation import CallObservation, RunningCall, RunningCalls
from .profiler import Profiler
from .tensors import ContentKey, content_key, plain_name, random_states, shape_of, unit_axis

_MOST_RETURNED = 256  # outputs of forwards that are remembered


@dataclass(slots=True, eq=False)
class CallRecorder:
    """Fills the `CallObservation` of each call of a selected layer."""

    gradients: Gradients
    running: RunningCalls
    notes: dict[str, None]
    profiler: Profiler | None
    """Measures what each call costs. `None` without ``profile=True``."""
    returned: dict[ContentKey, tuple[str, Any]] = field(default_factory=dict)
    """The newest tensors that forwards returned, which a loop may give to the next: their addresses and storages."""

    def start(self, running: RunningCall, *, training: bool, may_draw: bool) -> None:
        """Observe the inputs of a call, which is not on the stack yet.

        Args:
            running: The call.
            training: Whether the layer is in training mode.
            may_draw: Whether to find out if the call draws random numbers.
        """
        call = running.observation = running.forward.begin_call(running.name)
        call.training = training
        call.arguments, call.inputs_known = running.inputs.plain, running.inputs.known
        call.grad_enabled = torch.is_grad_enabled()
        if any_autocast():
            # That of the device of an input, or of the CPU without inputs.
            active = active_autocast(sorted({tensor.device.type for _, tensor in running.inputs.tensors} or {"cpu"}))
            call.autocast = plain_name(active[0][1]) if active else None
        # An input that another call inside the same layer returned has the unit axis that it had there.
        axes = self.running.stack[-1].unit_axes if self.running.stack else None
        inputs = running.inputs.tensors
        # What the model is given is read with the hashes of each input alone: else one that changes would change all.
        own = () if self.running.stack else running.forward.samples.inputs
        alone = own if len(own) == len(inputs) else [None] * len(inputs)
        for (path, tensor), samples in zip(inputs, alone, strict=True):
            axis = axes.get(shape_of(tensor)) if axes else None
            seen = self.gradients.observe(running.forward, tensor, axis, samples)
            if not self.running.stack and (key := content_key(tensor, inference=True)) in self.returned:
                seen.returned_as = self.returned[key][0]
            call.inputs.append((path, seen))
        if may_draw:
            running.random_states = random_states(running.forward.devices)
        if self.profiler is not None:
            running.start = self.profiler.start_call(running.name)

    def finish(self, running: RunningCall, output: Any, module: nn.Module | None, *, leaf: bool = True) -> None:
        """Observe the outputs of a call, which is off the stack already.

        Args:
            running: The call.
            output: What it returned.
            module: The module that was called, or `None` for a function.
            leaf: Whether no layer is inside. The profiler counts the memory of outputs of these only.
        """
        call = running.observation
        if call is None:
            return
        outer = self.running.stack[-1] if self.running.stack else None
        running.forward.end_call(call)
        outputs = flatten("output", output)
        if self.profiler is not None and running.start is not None:
            returned = [tensor for _, tensor in outputs.tensors]
            self.profiler.finish_call(
                running.name, running.start, None if outer is None else outer.start, returned, leaf=leaf
            )
        for path, tensor in outputs.tensors:
            if module is None or tensor.is_nested:
                axis = running.inherited_axis(tensor)
            else:
                axis = unit_axis(module, tensor, running.inherited_axis)
            seen = self.gradients.observe(running.forward, tensor, axis)
            call.outputs.append((path, seen))
            if outer is not None:
                outer.unit_axes[seen.shape] = seen.axis
        if outer is None:
            self._keep_returned(running, call, outputs)
        if outputs.opaque and outer is None:
            self.notes[f"{running.name}: {unseen(outputs)}"] = None
        before, devices = running.random_states, running.forward.devices
        if before and any(map(operator.ne, before, random_states(devices))):
            call.random = hashlib.blake2b(b"".join(before), digest_size=8).hexdigest()

    def _keep_returned(self, running: RunningCall, call: CallObservation, outputs: Flat) -> None:
        """Remember what a forward returned, without what it was given."""
        self.returned = {key: known for key, known in self.returned.items() if not known[1].expired()}
        given = {content_key(tensor, inference=True) for _, tensor in running.inputs.tensors}
        for path, tensor in outputs.tensors:
            key = content_key(tensor, inference=True)
            if key is not None and key not in given:
                # While the storage is held weakly its address is not used again.
                self.returned[key] = f"{running.name} {path}", WeakStorage(tensor.untyped_storage())
        for oldest in list(self.returned)[: max(0, len(self.returned) - _MOST_RETURNED)]:
            del self.returned[oldest]


# --- functional calls -------------------------------------------------------------------------------------------------

_NAMES = (
    "batch_norm", "celu", "dropout", "dropout1d", "dropout2d", "dropout3d", "elu", "gelu", "glu", "group_norm",
    "hardsigmoid", "hardswish", "hardtanh", "layer_norm", "leaky_relu", "log_softmax", "logsigmoid", "mish",
    "normalize", "prelu", "relu", "relu6", "rms_norm", "scaled_dot_product_attention", "selu", "sigmoid", "silu",
    "softmax", "softmin", "softplus", "softsign", "tanh", "tanhshrink",
)  # fmt: skip


_FUNCTIONS = {
    function: name
    for name in _NAMES
    for home in (F, torch, torch.Tensor)
    for spelling in (name, f"{name}_")
    if (function := getattr(home, spelling, None)) is not None
}


class FunctionalMode(ForwardMode):
    """Records functional calls while a forward runs, inside the layers that are selected."""

    def __init__(
        self,
        layers: Layers,
        selected: Collection[str],
        guard: HookGuard,
        running: RunningCalls,
        recorder: CallRecorder,
    ) -> None:
        super().__init__()
        self._layers = layers
        self._selected = selected
        self._guard = guard
        self._running = running
        self._recorder = recorder
        self.types: dict[str, str] = {}
        """Name of the function by name of the pseudo-layer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = _FUNCTIONS.get(func)
        call = None if name is None else self._guard.observe(self._start, name, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        try:
            output = func(*args, **kwargs)
        except BaseException:
            self._running.remove(call)
            raise
        self._guard.observe(self._finish, call, output)
        return output

    def _start(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunningCall | None:
        """Begin a functional call inside the running layer, unless it is not to be recorded."""
        layer = self._running.innermost_here()
        if layer is None or layer.name not in self._selected:
            return None
        module = self._layers.modules[layer.name]
        if type_name(module).startswith("torch.nn.modules."):
            return None  # the module is the function
        name = qualified(layer.name, function)
        if name in self._layers.modules:  # a child of the layer has the name of the function
            name += "()"
        self.types[name] = function
        call = RunningCall(name, layer.frame, layer.forward, flatten_call(args, kwargs))
        self._recorder.start(call, training=module.training, may_draw=True)
        self._running.push(call)
        return call

    def _finish(self, call: RunningCall, output: Any) -> None:
        self._running.remove(call)
        self._recorder.finish(call, output, None)
