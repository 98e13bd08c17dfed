"""Functional calls as pseudo-layers: ``F.relu`` inside ``block`` is recorded as ``block.relu``.

A model that calls ``F.relu`` has no module for it, and so no hook. A function mode sees the call instead. It costs some
microseconds for each call of torch, so ``functionals=True`` has to ask for it. Functions that a module of torch calls
itself are left out, since the module is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelprobe.capture.hooks.function_modes import ForwardMode, leave_after
from pytest_modelprobe.capture.hooks.guard import HookGuard, hidden
from pytest_modelprobe.capture.observed.call_recorder import CallRecorder
from pytest_modelprobe.capture.observed.running_calls import RunningCall, RunningCalls
from pytest_modelprobe.models import Layers, flatten_call, type_name
from pytest_modelprobe.record import qualified

_NAMES = (
    "batch_norm", "celu", "dropout", "dropout1d", "dropout2d", "dropout3d", "elu", "gelu", "glu", "group_norm",
    "hardsigmoid", "hardswish", "hardtanh", "layer_norm", "leaky_relu", "log_softmax", "logsigmoid", "mish",
    "normalize", "prelu", "relu", "relu6", "rms_norm", "scaled_dot_product_attention", "selu", "sigmoid", "silu",
    "softmax", "softmin", "softplus", "softsign", "tanh", "tanhshrink",
)  # fmt: skip


def _recorded() -> Iterator[tuple[Callable[..., Any], str]]:
    for name in _NAMES:
        for home in (F, torch, torch.Tensor):
            for spelling in (name, f"{name}_"):
                function = getattr(home, spelling, None)
                if function is not None:
                    yield function, name


_FUNCTIONS = dict(_recorded())


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
        self.modes: Sequence[ForwardMode] = [self]
        """All modes that are on the stack together, this one among them. They are taken off together."""
        self.types: dict[str, str] = {}
        """Name of the function by name of the pseudo-layer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = _FUNCTIONS.get(func)
        started = None if name is None else self._start(name, args, kwargs)
        if started is None:
            return func(*args, **kwargs)
        call, module = started
        try:
            output = func(*args, **kwargs)
        except BaseException:
            self._running.remove(call)
            raise
        try:
            with self._guard.lock, self._guard, hidden():
                self._running.remove(call)
                self._recorder.finish(call, output, None)
        except Exception:
            # The guard lets only the error of ``stop_on=`` through. It closes the watch, which cannot take off the mode
            # whose handler runs now.
            leave_after(module, self.modes)
            raise
        return output

    def _start(
        self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[RunningCall, nn.Module] | None:
        """Begin a functional call inside the running layer, and return both, or `None` if it is not to be recorded."""
        with self._guard.lock, self._guard, hidden():
            layer = self._running.innermost_here() if self._guard.observes() else None
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
            return call, module
        return None
