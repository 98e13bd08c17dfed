"""Attach, observe, detach: the hooks on a model, and what they see while it runs.

The hooks hold numbers, never tensors. The stack of running calls is checked against Python's own, so that calls left
by ``KeyboardInterrupt`` or ``pytest.fail``, for which torch runs no hook, are dropped by the next call; a hook that
comes without its partner finds nothing to close.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import sys
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from . import statistics
from .exceptions import ModelProbeError
from .flatten import Flat, flatten, flatten_call, map_tensors
from .functionals import FunctionalMode
from .layers import Layers, own_parameters, type_name
from .observation import Forward, Observed, ObservedCall, Totals, identity
from .record import ROOT
from .units import unit_axis

Edge = Hashable
"""Identity of a gradient: the node that made the tensor and which of its outputs, or the leaf itself."""


class Capture:
    """Observes a model from `attach` to `detach`; what it has seen lies in ``first``, ``newest`` and ``totals``.

    Args:
        layers: The layers of the model.
        selected: Names of those to record. The root is hooked in any case, for it marks where a forward begins.
        keep: Names of those whose output tensors of the newest forward are kept.
        functionals: Whether to record functional calls such as ``F.relu`` as pseudo-layers.
    """

    def __init__(
        self,
        layers: Layers,
        selected: Collection[str],
        *,
        keep: Collection[str] = (),
        functionals: bool = False,
    ) -> None:
        self.layers = layers
        self.selected = frozenset(selected)
        self.keep = frozenset(keep)
        self.kept: dict[str, list[Any]] = {}
        self.first: Forward | None = None
        self.newest: Forward | None = None
        self.totals: dict[tuple[str, bool], Totals] = {}
        self.functional_types: dict[str, str] = {}
        self.forwards = 0
        self.backwards = 0
        self.changes = 0
        """Counts what was seen: a record made at another count is out of date."""
        self.guard = _Guard()
        self.attached = False
        self._stack: list[_Frame] = []
        self._alive: weakref.WeakSet[Forward] = weakref.WeakSet()
        self._edges: dict[Edge, _GradientHook] = {}
        self._tensor_handles: list[Any] = []
        self._last_backward = -1
        self._replay: tuple[Forward, int] | None = None
        self._state: frozenset[int] = frozenset()
        self._parameter_names: dict[nn.Parameter, list[str]] = {}
        self._mode = FunctionalMode(self) if functionals else None
        self._exit = contextlib.ExitStack()

    # --- attach, detach -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on. On an error none stays behind."""
        with _collection_paused(), contextlib.ExitStack() as exit_stack:
            if self.layers.compiled or "torch._dynamo" in sys.modules:
                exit_stack.enter_context(torch.compiler.set_stance("force_eager"))
            hooked = self.selected | self.keep | {next(iter(self.layers.modules))}
            for name, module in self.layers.modules.items():
                if name in hooked:
                    self._attach_layer(name, module, exit_stack)
            root = next(iter(self.layers.modules.values()))
            self._state = frozenset(_storages(root))
            self._exit = exit_stack.pop_all()
        self.attached = True

    def _attach_layer(self, name: str, module: nn.Module, exit_stack: contextlib.ExitStack) -> None:
        before = module.register_forward_pre_hook(_Before(self, name, module), with_kwargs=True)
        exit_stack.callback(before.remove)
        after = module.register_forward_hook(_After(self, name, module), with_kwargs=True, always_call=True)
        exit_stack.callback(after.remove)
        if name not in self.selected:
            return
        for own_name, parameter in own_parameters(module, atomic=self.layers.is_leaf(name)):
            full_name = own_name if name == ROOT else f"{name}.{own_name}"
            if parameter in self._parameter_names:  # tied: one hook speaks for all its names
                self._parameter_names[parameter].append(full_name)
            elif parameter.is_leaf and parameter.requires_grad:
                names = self._parameter_names[parameter] = [full_name]
                handle = parameter.register_post_accumulate_grad_hook(_ParameterHook(self, names))
                exit_stack.callback(handle.remove)

    def detach(self) -> None:
        """Take every hook off again: modules', parameters' and those on tensors still alive. Idempotent."""
        self.attached = False
        self._leave_forward()
        self._stack.clear()
        for handle in self._tensor_handles:
            handle.remove()
        self._tensor_handles.clear()
        self._parameter_names.clear()
        self._exit.close()

    # --- forward --------------------------------------------------------------------------------------------------

    def before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before each call of a watched layer, with its final arguments."""
        running = _call_frame(sys._getframe(2))
        self._drop_abandoned(running)
        recompute = torch._C._current_graph_task_id() != -1
        frame = _Frame(name, running, recompute)
        if not recompute:
            if not self._stack:
                self._begin_forward(name, module)
            assert self.newest is not None
            frame.forward = self.newest
        context = _grad_mode(), _autocast_dtype(args, kwargs)
        with statistics.plainly():
            flat = flatten_call(args, kwargs)
            if recompute:
                self._recall(frame, flat)
            elif name in self.selected:
                frame.call = frame.forward.begin_call(name, module.training)
                frame.call.grad_enabled, frame.call.autocast = context
                frame.call.arguments, frame.call.inputs_known = flat.plain, flat.known
                frame.call.inputs = self._observe_inputs(frame, flat)
                frame.random_state = _random_state()
        frame.inputs = flat
        self._stack.append(frame)
        if len(self._stack) == 1 and self._mode is not None and not recompute:
            self._mode.enter()

    def after(self, name: str, module: nn.Module, output: Any) -> None:
        """Called after each call of a watched layer, also when it raised."""
        self.changes += 1
        frame = self._close(name, _call_frame(sys._getframe(2)))
        if frame is None:
            return
        try:
            error = sys.exc_info()[1]
            if error is not None and error is not frame.error_before:
                if not frame.recompute:
                    _note_raising(error, name, module, frame.inputs)
            else:
                with statistics.plainly():
                    self._returned(frame, module, output)
        finally:
            if not self._stack:
                self._leave_forward()

    def _returned(self, frame: _Frame, module: nn.Module, output: Any) -> None:
        flat = flatten("output", output)
        if frame.recompute:
            self._hook_recomputed(frame, frame.call.outputs if frame.call else [], flat)
            return
        if frame.call is None:
            return
        frame.forward.end_call(frame.call)
        frame.call.outputs = [
            (path, self._observe(frame.forward, tensor, unit_axis(module, tensor, frame.axis_for(tensor))))
            for path, tensor in flat.tensors
        ]  # fmt: skip
        if frame.random_state is not None and (drawn := frame.random_state) != _random_state():
            frame.call.random = hashlib.blake2b(drawn, digest_size=8).hexdigest()
        if frame.name in self.keep:
            self.kept.setdefault(frame.name, []).append(map_tensors(_kept, output))
        if self._stack:
            self._stack[-1].produced.extend(seen for _, seen in frame.call.outputs)

    def open_functional(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Frame | None:
        """Open a pseudo-layer for a functional call inside the running layer; None if it is none of ours."""
        parent = self._stack[-1] if self._stack else None
        if parent is None or parent.recompute or parent.functional or parent.name not in self.selected:
            return None
        if type_name(self.layers.modules[parent.name]).startswith("torch.nn.modules."):
            return None  # the module is the function
        name = function if parent.name == ROOT else f"{parent.name}.{function}"
        if name in self.layers.modules:
            name += "()"
        frame = _Frame(name, parent.running, recompute=False)
        frame.functional, frame.forward, frame.inputs = True, parent.forward, flatten_call(args, kwargs)
        self.functional_types[name] = function
        frame.call = frame.forward.begin_call(name, training=False)
        frame.call.arguments = frame.inputs.plain
        with statistics.plainly():
            frame.call.inputs = self._observe_inputs(parent, frame.inputs)
        self._stack.append(frame)
        return frame

    def close_functional(self, frame: _Frame, output: Any, *, raised: bool) -> None:
        """Close the pseudo-layer."""
        if frame not in self._stack:
            return
        del self._stack[self._stack.index(frame) :]
        if raised or frame.call is None:
            return
        with statistics.plainly():
            flat = flatten("output", output)
            frame.forward.end_call(frame.call)
            axes = {seen.shape: seen.axis for _, seen in frame.call.inputs}
            frame.call.outputs = [
                (path, self._observe(frame.forward, t, axes.get(tuple(t.shape)))) for path, t in flat.tensors
            ]  # fmt: skip
            self._stack[-1].produced.extend(seen for _, seen in frame.call.outputs)

    # --- the stack of running calls -------------------------------------------------------------------------------

    def _drop_abandoned(self, running: FrameType) -> None:
        """Drop calls that no longer run, though no hook said that they ended."""
        dropped = False
        while self._stack and not _is_below(self._stack[-1].running, running):
            self._stack.pop()
            dropped = True
        if dropped and not self._stack:
            self._leave_forward()

    def _close(self, name: str, running: FrameType) -> _Frame | None:
        for i in range(len(self._stack) - 1, -1, -1):
            if self._stack[i].running is running and self._stack[i].name == name:
                frame = self._stack[i]
                del self._stack[i:]
                return frame
        return None  # another hook raised before our pre-hook ran

    def _begin_forward(self, name: str, module: nn.Module) -> None:
        self._leave_forward()
        if self.newest is not None:
            self.totals.setdefault(self.newest.kind, Totals()).absorb(self.newest)
        self.newest = Forward(self.forwards, (name, module.training))
        self.first = self.first or self.newest
        self.forwards += 1
        self.kept = {}
        self._alive.add(self.newest)
        self._tensor_handles = [h for h in self._tensor_handles if h.hooks_dict_ref() is not None]

    def _leave_forward(self) -> None:
        """Let go of what may not outlive a forward: graph nodes, and the function mode."""
        self._edges.clear()
        if self._mode is not None:
            self._mode.leave()

    # --- tensors --------------------------------------------------------------------------------------------------

    def _observe_inputs(self, frame: _Frame, flat: Flat) -> list[tuple[str, Observed]]:
        parent = self._stack[-1] if self._stack else frame
        return [
            (path, self._observe(frame.forward, tensor, parent.produced_axis(tensor))) for path, tensor in flat.tensors
        ]

    def _observe(self, forward: Forward, tensor: torch.Tensor, axis: int | None) -> Observed:
        key = identity(tensor)
        if key is not None and (key[0] in self._state or isinstance(tensor, nn.Parameter)):
            key = None  # `p.data.add_()` changes a parameter without a new version
        known = forward.by_storage.get(key) if key is not None else None
        edge = _edge(tensor)
        hook = self._edges.get(edge) if edge is not None else None
        if known is not None:
            if not known.requires_grad if hook is None else known in hook.observed:
                return known
            reduced = known.forward  # the same numbers, another gradient: detached, reversed
        else:
            reduced = statistics.reduce(tensor, axis=axis, index=forward.index)
        seen = Observed(tensor, forward.tensors, reduced)
        forward.tensors += 1
        if key is not None:
            self._remember(forward, key, tensor, seen)
        if edge is not None:
            self._hook_gradient(forward, tensor, edge, seen)
        return seen

    def _remember(self, forward: Forward, key: tuple[Any, ...], tensor: torch.Tensor, seen: Observed) -> None:
        seen.hold_storage(tensor)
        forward.by_storage[key] = seen
        for view, version in forward.views.get(key[0], ()):
            view.overwritten |= key[1] > version
        if tensor.requires_grad and tensor._is_view():
            forward.views.setdefault(key[0], []).append((seen, key[1]))

    def _hook_gradient(self, forward: Forward, tensor: torch.Tensor, edge: Edge, seen: Observed) -> None:
        hook = self._edges.get(edge)
        if hook is None:
            hook = _GradientHook(self, forward)
            self._tensor_handles.append(tensor.register_hook(hook))
            self._edges[edge] = hook
        if seen not in hook.observed:
            hook.observed.append(seen)

    # --- recomputation by activation checkpointing ----------------------------------------------------------------

    def _recall(self, frame: _Frame, flat: Flat) -> None:
        """Find the call that is computed again: the reentrant kind attaches its gradients only now."""
        found = self._original(frame.name, flat)
        if found is None:
            return
        frame.forward, frame.call = found
        frame.call.recomputed += 1
        self._replay = frame.forward, frame.call.started
        self._hook_recomputed(frame, frame.call.inputs, flat)

    def _original(self, name: str, flat: Flat) -> tuple[Forward, ObservedCall] | None:
        """Match by an input's identity, the others of a segment by the order in which they follow."""
        keys = [key for _, tensor in flat.tensors if (key := identity(tensor)) is not None]
        for forward in sorted(self._alive, key=lambda f: -f.index):
            numbers = {id(forward.by_storage[k].forward) for k in keys if k in forward.by_storage}
            calls = [
                call for call in _calls_of(forward, name) if any(id(seen.forward) in numbers for _, seen in call.inputs)
            ]
            if calls:
                return forward, min(calls, key=lambda call: call.recomputed)
        if self._replay is not None:
            forward, position = self._replay
            later = [call for call in _calls_of(forward, name) if call.started > position]
            if later:
                return forward, min(later, key=lambda call: call.started)
        return None

    def _hook_recomputed(self, frame: _Frame, values: list[tuple[str, Observed]], flat: Flat) -> None:
        originals = dict(values)
        for path, tensor in flat.tensors:
            seen, edge = originals.get(path), _edge(tensor)
            if seen is None or edge is None or tensor.is_leaf:
                continue
            hooked_already = seen.requires_grad and edge not in self._edges
            if not hooked_already:  # the first run was without gradient
                seen.requires_grad = True
                self._hook_gradient(frame.forward, tensor, edge, seen)

    # --- backward -------------------------------------------------------------------------------------------------

    def gradient(self, hook: _GradientHook, gradient: torch.Tensor) -> None:
        """Called with the whole gradient of an observed tensor."""
        inner = self._count_backward()
        with statistics.plainly():
            reduced = statistics.reduce(gradient, index=hook.forward.index)
        for seen in hook.observed:
            seen.receive(reduced, inner=inner)

    def parameter_gradient(self, names: list[str], parameter: torch.Tensor) -> None:
        """Called when the gradient of a parameter has been accumulated."""
        self._count_backward()
        if self.newest is None or parameter.grad is None:
            return
        with statistics.plainly():
            reduced = statistics.reduce(parameter.grad, index=self.newest.index)
        for name in names:
            before = self.newest.parameters.get(name)
            self.newest.parameters[name] = statistics.merge(before, reduced) if before else reduced

    def _count_backward(self) -> bool:
        """Count the pass if it is new; return whether it runs inside a forward."""
        self.changes += 1
        inner = any(not frame.recompute for frame in self._stack)
        task = torch._C._current_graph_task_id()
        if not inner and task > self._last_backward:
            self._last_backward = task
            self.backwards += 1
        return inner

    def check(self) -> None:
        """Raise the error that a hook ran into, if there was one."""
        failure = self.guard.failure
        if failure is not None:
            raise ModelProbeError(
                f"a hook of the probe failed, so that the record is incomplete: {failure!r}"
            ) from failure


class _Guard:
    """Keeps the first error of our own, and lets none out: the model must run as it runs unwatched."""

    failure: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failure = self.failure or error
        return True


class _Frame:
    """A call that is running."""

    __slots__ = (
        "call", "error_before", "forward", "functional", "inputs", "name", "produced", "random_state", "recompute",
        "running",
    )  # fmt: skip

    def __init__(self, name: str, running: FrameType, recompute: bool) -> None:
        self.name = name
        self.running = running
        self.recompute = recompute
        self.functional = False
        self.error_before = sys.exc_info()[1]  # a forward inside an `except:` block sees the outer error
        self.call: ObservedCall | None = None
        self.forward: Forward
        self.inputs = Flat()
        self.produced: list[Observed] = []
        self.random_state: bytes | None = None

    def produced_axis(self, tensor: torch.Tensor) -> int | None:
        """Return the unit axis of what the last call inside gave out, if the tensor has its shape."""
        shape = tuple(tensor.shape)
        return next((seen.axis for seen in reversed(self.produced) if seen.shape == shape), None)

    def axis_for(self, output: torch.Tensor) -> int | None:
        """Return the unit axis that the output inherits: of what was made inside, else of an input of its shape."""
        inside = self.produced_axis(output)
        if inside is not None or self.call is None:
            return inside
        shape = tuple(output.shape)
        return next((seen.axis for _, seen in self.call.inputs if seen.shape == shape), None)


# --- the hooks: objects that know their own module, and are nothing in a copy ---------------------------------------


class _Hook:
    __slots__ = ("_capture", "_module", "_name")
    is_modelprobe = True

    def __init__(self, capture: Capture, name: str, module: nn.Module) -> None:
        self._capture = capture
        self._name = name
        self._module = weakref.ref(module)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _Inert, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()

    def _active(self, module: nn.Module) -> bool:
        return (
            self._capture.attached
            and self._module() is module
            and not torch.compiler.is_compiling()
            and torch._C._get_tracing_state() is None
        )


class _Before(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._active(module):
            with self._capture.guard:
                self._capture.before(self._name, module, args, kwargs)


class _After(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._active(module):
            with self._capture.guard:
                self._capture.after(self._name, module, output)


class _Inert:
    """What a hook becomes in a copy of its module: nothing, and gone at the copy's first call."""

    __slots__ = ()
    is_modelprobe = True

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        if output:
            return  # torch may be iterating over the dict of these hooks just now
        for hooks, flags in (
            (module._forward_pre_hooks, [module._forward_pre_hooks_with_kwargs]),
            (module._forward_hooks, [module._forward_hooks_with_kwargs, module._forward_hooks_always_called]),
        ):  # fmt: skip
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Inert)]:
                del hooks[key]
                for flag in flags:
                    flag.pop(key, None)


class _GradientHook:
    __slots__ = ("_capture", "forward", "observed")

    def __init__(self, capture: Capture, forward: Forward) -> None:
        self._capture = capture
        self.forward = forward
        self.observed: list[Observed] = []

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if self._capture.attached and gradient is not None:
            with self._capture.guard:
                self._capture.gradient(self, gradient)


class _ParameterHook:
    __slots__ = ("_capture", "_names")

    def __init__(self, capture: Capture, names: list[str]) -> None:
        self._capture = capture
        self._names = names

    def __call__(self, parameter: torch.Tensor) -> None:
        if self._capture.attached:
            with self._capture.guard:
                self._capture.parameter_gradient(self._names, parameter)


# --- small questions --------------------------------------------------------------------------------------------------


def _call_frame(frame: FrameType) -> FrameType:
    """Return the frame of the ``_call_impl`` that runs the hook: pre and post hook of one call share it."""
    while frame.f_code.co_name != "_call_impl" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_below(frame: FrameType, top: FrameType | None) -> bool:
    """Whether ``frame`` is on the Python stack that ends in ``top``."""
    while top is not None:
        if top is frame:
            return True
        top = top.f_back
    return False


def _edge(tensor: torch.Tensor) -> Edge | None:
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    return _Leaf(tensor) if node is None else (node, tensor.output_nr)


class _Leaf:
    """A leaf tensor as a key, by identity; holds it while it is one."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __hash__(self) -> int:
        return id(self.tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Leaf) and self.tensor is other.tensor


def _calls_of(forward: Forward, layer: str) -> Iterator[ObservedCall]:
    return (forward.calls[layer, i] for i in range(forward.counts.get(layer, 0)))


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _storages(model: nn.Module) -> Iterator[int]:
    for tensor in (*model.parameters(), *model.buffers()):
        key = identity(tensor)
        if key is not None:
            yield key[0]


def _grad_mode() -> bool:
    return torch.is_grad_enabled()


def _autocast_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the dtype of the active autocast, of the device that the first tensor is on."""
    device = next((v.device.type for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), "cpu")
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _random_state() -> bytes:
    """Return the state of torch's generators, to tell whether a call drew from them."""
    state = torch.default_generator.get_state().numpy().tobytes()
    if torch.cuda.is_initialized():
        state += torch.cuda.get_rng_state().numpy().tobytes()
    return state


def _note_raising(error: BaseException, name: str, module: nn.Module, inputs: Flat) -> None:
    """Tell on the model's own exception which layer raised it: the innermost one is the first to come by."""
    if any(note.startswith("raised in ") for note in getattr(error, "__notes__", ())):
        return
    shown = ", ".join(describe(tensor) for _, tensor in inputs.tensors) or "none"
    error.add_note(f"raised in {name} ({type(module).__name__}), inputs {shown}")
    devices = {str(p.device) for p in module.parameters()}
    for path, tensor in inputs.tensors:
        if len(devices) == 1 and str(tensor.device) not in devices and tensor.ndim > 0:
            here = devices.pop()
            error.add_note(f"{path} is on {tensor.device}, {name} on {here}: move one with .to({here!r})")


def describe(tensor: torch.Tensor) -> str:
    """Return shape, dtype and device: ``(2, 17, 64) float32 cpu``."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}"


class _collection_paused:
    """No garbage collection meanwhile: thousands of small objects are made, none is garbage."""

    def __enter__(self) -> None:
        self._enabled = gc.isenabled()
        gc.disable()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            gc.enable()
