"""Attach, observe, detach: the hooks on a model, and what they see while it runs.

The hooks hold numbers and a few copies of small tensors, never a tensor or graph of the model. A hook that comes
without its partner finds nothing to close; calls that ended without one (``KeyboardInterrupt`` and ``pytest.fail`` run
no hooks) are known by their Python frame.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import operator
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, MutableMapping
from types import FrameType, TracebackType
from typing import Any, cast
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import (
    CALL,
    any_autocast,
    function_modes,
    global_hooks,
    graph_task,
    hook_tables,
    is_view,
    is_wrapped,
    tensor_hooks,
    tracing_state,
    without_torch_function,
)
from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.models import (
    Flat,
    Layers,
    active_autocast,
    as_array,
    attributes,
    flatten,
    flatten_call,
    map_tensors,
    type_name,
    unseen,
)
from pytest_modelprobe.record import ROOT, Dimension, Plain, qualified
from pytest_modelprobe.statistics import Reduced, SmallTensors

from .attention import Attended, AttentionMode
from .functionals import ForwardMode, FunctionalMode, enter, leave
from .observation import (
    CallObservation,
    Contents,
    Forward,
    Identity,
    Kind,
    ParameterGradient,
    TensorObservation,
    Totals,
    Values,
    identity,
    plain_name,
    shape_of,
)
from .parameters import ParameterReading, contents, owned
from .steps import Accumulated, Steps
from .units import unit_axis

_DRAW_NOTHING = {
    module
    for module in vars(nn).values()
    if isinstance(module, type)
    and issubclass(module, nn.Module)
    and module.__module__.removeprefix("torch.nn.modules.")
    in {
        "activation", "batchnorm", "conv", "flatten", "fold", "instancenorm", "linear", "normalization", "padding",
        "pixelshuffle", "pooling", "sparse", "upsampling",
    }
    and module not in {nn.MultiheadAttention, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d}
}  # fmt: skip
_SCALER_STEP = getattr(torch.amp.GradScaler.step, "__code__", None)
_TOO_DEEP = "the model used up Python's stack (RecursionError) in a forward or backward, where calls were not seen"
_OWN_FRAMES = 100  # from where on it is our own code that used up the stack
_LARGE = 1 << 13  # elements above which to look whether a gradient was seen before is cheaper than to read it again


class Capture:
    """Observes a model from `attach` to `detach`; what it has seen lies in ``first``, ``newest`` and ``totals``.

    Args:
        layers: The layers of the model.
        selected: Names of those to record. The root is hooked in any case, for it marks where a forward begins.
        keep: Names of those whose output tensors of the newest forward are kept.
        functionals: Whether to record functional calls such as ``F.relu`` as pseudo-layers.
        attention: Whether to look at attention weights.
        begins: Told of each forward before it runs: its kind and its arguments.
    """

    def __init__(
        self,
        layers: Layers,
        selected: Collection[str],
        *,
        keep: Collection[str] = (),
        functionals: bool = False,
        attention: bool = False,
        begins: Callable[[Kind, tuple[Any, ...], dict[str, Any]], None] | None = None,
    ) -> None:
        self._begins = begins
        self.layers = layers
        self.selected = frozenset(selected)
        self.keep = frozenset(keep)
        self.kept: dict[str, list[Any]] = {}
        self.first: Forward | None = None
        self.newest: Forward | None = None
        self.totals: dict[tuple[str, bool], Totals] = {}
        self.functional_types: dict[str, str] = {}
        self.parameters: dict[str, ParameterGradient] = {}
        """Gradients of parameters by full name, of all backward passes."""
        self.before_training: dict[str, ParameterReading] | None = None
        """Parameters and buffers by full name, read before the first step of an optimizer that has one of them."""
        self.content_keys_after_first_forward: dict[str, Identity | None] | None = None
        """What tells parameters and buffers, by full name, as the first forward left them from later ones."""
        self.results: dict[str, set[str]] = {}
        """Plain attributes that a forward set, by layer: they tell what came out, not how the layer was made."""
        self.forwards = 0
        self.backwards = 0
        self.changes = 0
        """Counts what was seen: a record made at another count is out of date."""
        self.notes: dict[str, None] = dict.fromkeys(layers.notes)
        self.steps = Steps()
        self.guard = _Guard(self.notes)
        self.attached = False
        self._exit = contextlib.ExitStack()
        self._handles: list[RemovableHandle] = []
        self._before: list[_Before] = []
        # Layers from which somebody took our hooks, when they were last looked at.
        self._torn: list[str] = []
        self._attention = AttentionMode(self) if attention else None
        self._modes: list[ForwardMode] = [FunctionalMode(self)] if functionals else []
        if self._attention is not None:  # topmost of the two: it comes first, while no pseudo-layer is open
            self._modes.append(self._attention)
        # Of each layer inside the newest forward, where it is the first of its kind: class and attributes as it began.
        self._attributes: dict[str, tuple[type, dict[str, Plain]]] = {}
        # The calls that run, outermost first, all in one thread.
        self._stack: list[_Frame] = []
        self._thread = 0
        # The calls that run for activation checkpointing, in any thread, by their Python frame.
        self._recomputing: dict[FrameType, tuple[Forward, CallObservation]] = {}
        self._recomputed: tuple[Forward, int] | None = None
        # Hooks on tensors: those of this forward, and those before it that were alive when it began.
        self._tensor_hooks: list[ReferenceType[_TensorHook]] = []
        self._views = _Views()
        self._forwards: WeakSet[Forward] = WeakSet()
        # Parameters and buffers: where they are looked up; of parameters those that are hooked; the model's storages.
        self._owners: list[tuple[str, nn.Module]] = []
        self._parameters: dict[str, nn.Parameter] = {}
        self._storages: frozenset[int] = frozenset()
        self._backward = -1
        self._newest_task = -1
        self._small = SmallTensors()
        # Gradients of the newest backward pass, by what tells them apart.
        self._gradients: dict[tuple[int, Identity], tuple[Reduced, StorageWeakRef]] = {}

    # --- attach, detach -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on. On an error none stays behind."""
        graph_task()  # a torch that cannot answer is refused here, not in the hooks
        try:
            with _collection_paused(), without_torch_function():
                self._exit.enter_context(run_eagerly(self.layers))
                root = next(iter(self.layers.modules))
                for name, module in self.layers.modules.items():
                    if name == root or name in self.selected or name in self.keep:
                        self._attach_layer(name, module)
                self._storages = frozenset(_storages(self.layers.modules[root]))
                self._hook_parameters()
                self._handles.append(register_optimizer_step_pre_hook(self._before_step))
                self._handles.append(register_optimizer_step_post_hook(self._after_step))
        except BaseException:
            self.detach()
            raise
        self.attached = True

    def _attach_layer(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            after = _After(self, name, module)
            before = _Before(self, name, module, after)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            before.key = self._handles[-1].id
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
            after.key = self._handles[-1].id
            self._before.append(before)
        if name in self.selected:
            prefix = "" if name == ROOT else f"{name}."
            self._owners.append((prefix, module))
            if module._modules and self.layers.is_leaf(name):
                inside = module.named_modules(prefix=name.removeprefix(ROOT))
                self._owners += [(f"{path}.", owner) for path, owner in inside if owner is not module]

    def _hook_parameters(self) -> None:
        """Hook the parameters that have no hook yet: also those unfrozen, replaced, made by a lazy module since."""
        for prefix, owner in self._owners:
            for name, parameter in owner._parameters.items():
                if self._parameters.get(prefix + name) is parameter or not isinstance(parameter, nn.Parameter):
                    continue  # `functional_call` puts plain tensors here
                if parameter.requires_grad and parameter.is_leaf:
                    self._parameters[prefix + name] = parameter
                    hook = self._hook_on(parameter)
                    if hook is None:
                        hook = _ParameterHook(self, parameter)
                        accumulated = parameter.register_post_accumulate_grad_hook(_AccumulatedHook(hook))
                        self._handles += (parameter.register_hook(hook), accumulated)
                    hook.names.append(prefix + name)  # tied: one hook speaks for all its names

    def _hook_on(self, parameter: torch.Tensor) -> _ParameterHook | None:
        hooks = (tensor_hooks(parameter) or {}).values()
        return next((h for h in hooks if isinstance(h, _ParameterHook) and h.capture is self), None)

    def detach(self) -> None:
        """Take every hook off again: modules', parameters' and those on tensors still alive. Idempotent."""
        self._look_for_torn()
        self.attached = False
        self._stack.clear()
        self._recomputing.clear()
        self._attributes = {}
        self._leave_forward()
        for alive in self._tensor_hooks:
            if (hook := alive()) is not None:
                hook.handle.remove()
        self._tensor_hooks.clear()
        self._before.clear()
        self._parameters.clear()
        self._gradients.clear()
        with _collection_paused():
            while self._handles:
                self._handles.pop().remove()
        self._exit.close()

    def _look_for_torn(self) -> None:
        if self.attached:
            self._torn = [before.name for before in self._before if not before.is_there()]

    def check(self) -> None:
        """Raise the error that a hook ran into, if there was one, and one where hooks are gone."""
        self._look_for_torn()
        if self._torn:
            torn = f"{self._torn[0]} and {len(self._torn) - 1} more" if len(self._torn) > 1 else self._torn[0]
            raise ModelProbeError(
                f"the hooks of the probe were taken off {torn}, and what ran since was not seen: clear no dict of "
                "hooks while a model is watched, but call remove() of the handle that came with each hook"
            )
        failure = self.guard.failure
        if isinstance(failure, ModelProbeError):
            raise failure
        if failure is not None:
            raise ModelProbeError(
                f"a hook of the probe failed, so that the record is incomplete: {failure!r}"
            ) from failure

    # --- forward --------------------------------------------------------------------------------------------------

    def before(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        running: FrameType,
        *,
        late: bool = False,
    ) -> None:
        """Called before each call of a watched layer, with its arguments; ``late`` hooks may still change them."""
        self._drop_abandoned()
        flat = flatten_call(args, kwargs)
        if graph_task() != -1:
            self._begin_recompute(name, flat, running)
            return
        if not self._stack:
            self._begin_forward(name, module)
            if self._begins is not None:
                self._begins((name, module.training), args, kwargs)
        elif self._thread != threading.get_ident():
            self.notes["forwards ran in several threads at once; one of them was recorded"] = None
            return
        assert self.newest is not None
        frame = _Frame(name, running, self.newest, flat)
        if late:
            frame.read = _identities(flat)
        if name in self.selected:
            self._open(frame, module.training, may_draw=not _draws_nothing(module))
        self._stack.append(frame)
        if len(self._stack) == 1:
            enter(self._modes)

    def after(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        running: FrameType,
    ) -> None:
        """Called after each call of a watched layer, also when it raised."""
        self.changes += 1
        recomputed = self._recomputing.pop(running, None)
        if recomputed is not None:
            self._attach_recomputed(*recomputed, recomputed[1].outputs, flatten("output", output))
            return
        frame = self._close(name, running)
        if frame is None:
            return
        if frame.read is not None and frame.read != _identities(flatten_call(args, kwargs)):
            self.note_late(name, "inputs")
        error = sys.exc_info()[1]
        try:
            if error is not None and error is not frame.error_before:
                _note_raising(error, name, module, frame.inputs)
                return
            if frame.call is not None:
                self._shut(frame, frame.call, output, module)
            if name in self.keep:
                self._keep(name, output)
        finally:
            if not self._stack:
                self._leave_forward()

    def note_late(self, name: str, what: str) -> None:
        """Note that a hook came too late for one call to see what it changes."""
        self.notes[
            f"{name}: a hook was registered on it after the watch began, and what it did to the {what} of the first "
            "call was not seen"
        ] = None

    def _open(self, frame: _Frame, training: bool, *, may_draw: bool) -> None:
        call = frame.call = frame.forward.begin_call(frame.name)
        call.training = training
        call.arguments, call.inputs_known = frame.inputs.plain, frame.inputs.known
        call.grad_enabled, call.autocast = torch.is_grad_enabled(), _autocast_dtype(frame.inputs)
        axes = self._stack[-1].axes if self._stack else None
        with statistics.ambient_modes_disabled():
            call.inputs = [
                (path, self._observe(frame.forward, tensor, axes.get(shape_of(tensor)) if axes else None))
                for path, tensor in frame.inputs.tensors
            ]
            frame.random_states = _random_states() if may_draw else ()

    def _shut(self, frame: _Frame, call: CallObservation, output: Any, module: nn.Module | None) -> None:
        with statistics.ambient_modes_disabled():
            frame.forward.end_call(call)
            outputs = flatten("output", output)
            for path, tensor in outputs.tensors:
                axis = frame.axis_for(tensor)
                if module is not None and not tensor.is_nested:
                    axis = unit_axis(module, tensor, axis)
                call.outputs.append((path, self._observe(frame.forward, tensor, axis)))
            self._note_returned(frame, call, outputs)
            if outputs.opaque and not self._stack:
                self.notes[f"{frame.name}: {unseen(outputs)}"] = None
            if frame.random_states and any(map(operator.ne, frame.random_states, _random_states())):
                call.random = hashlib.blake2b(b"".join(frame.random_states), digest_size=8).hexdigest()
        if self._stack:
            axes = self._stack[-1].axes
            for _, seen in call.outputs:
                axes[seen.shape] = seen.axis

    def _keep(self, name: str, output: Any) -> None:
        if any(is_wrapped(x) for _, x in flatten("output", output).tensors):
            self.notes[f"outputs of {name} inside a torch.func transform are not kept: they are nothing outside"] = None
        with statistics.ambient_modes_disabled():
            self.kept.setdefault(name, []).append(map_tensors(_kept, output))

    def open_functional(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Frame | None:
        """Open a pseudo-layer for a functional call inside the running layer; None if it is none of ours."""
        with self.guard, without_torch_function():
            parent = self._stack[-1] if self._stack else None
            if parent is None or parent.name not in self.selected or parent.is_over(self._thread):
                return None
            if type_name(self.layers.modules[parent.name]).startswith("torch.nn.modules."):
                return None  # the module is the function
            name = qualified(parent.name, function)
            if name in self.layers.modules:
                name += "()"
            self.functional_types[name] = function
            frame = _Frame(name, parent.running, parent.forward, flatten_call(args, kwargs))
            self._open(frame, self.layers.modules[parent.name].training, may_draw=True)
            self._stack.append(frame)
            return frame
        return None

    def close_functional(self, frame: _Frame, output: Any) -> None:
        """Close the pseudo-layer of a functional call that returned."""
        with self.guard, without_torch_function():
            self.drop_functional(frame)
            assert frame.call is not None
            self._shut(frame, frame.call, output, None)

    def drop_functional(self, frame: _Frame) -> None:
        """Close the pseudo-layer of a functional call that raised."""
        if frame in self._stack:
            del self._stack[self._stack.index(frame) :]

    def running_call(self) -> CallObservation | None:
        """Return the innermost running call, if it is recorded."""
        frame = self._stack[-1] if self._stack else None
        return None if frame is None or frame.is_over(self._thread) else frame.call

    def _note_returned(self, frame: _Frame, call: CallObservation, outputs: Flat) -> None:
        """Look for attention weights among outputs of a call in which none were seen to be computed."""
        if self._attention is not None and not frame.attended:
            self.attend(call, self._attention.given_out(call, [tensor for _, tensor in outputs.tensors]))

    def attend(self, call: CallObservation, found: list[Attended]) -> None:
        """Add attention weights to a call; they were seen in all that run."""
        call.attention += found
        for outer in self._stack if found else ():
            outer.attended = True

    # --- the stack of running calls -------------------------------------------------------------------------------

    def _drop_abandoned(self) -> None:
        """Drop calls that no longer run, though no hook said that they ended."""
        while self._stack and self._stack[-1].is_over(self._thread):
            self._stack.pop()
            if not self._stack:
                self._leave_forward()

    def _close(self, name: str, running: FrameType) -> _Frame | None:
        for i in range(len(self._stack) - 1, -1, -1):
            if self._stack[i].running is running and self._stack[i].name == name:
                frame = self._stack[i]
                del self._stack[i:]
                return frame
        return None  # another hook raised before our pre-hook ran

    def _begin_forward(self, name: str, module: nn.Module) -> None:
        if self.newest is not None:
            self.totals.setdefault(self.newest.kind, Totals()).merge_from(self.newest)
        for before in self._before:
            before.stay_last_of_module()
        self._hook_parameters()
        self._thread = threading.get_ident()
        self._recomputing.clear()
        self._recomputed = None
        self._views.settle()
        self._tensor_hooks = [alive for alive in self._tensor_hooks if alive() is not None]
        kind = name, module.training
        self.steps.forward_begins(training=module.training)
        self._attributes = {} if kind in self.totals else dict(self._attributes_inside(name))
        self.newest = Forward(self.forwards, kind)
        self.first = self.first or self.newest
        self.forwards += 1
        self.kept = {}
        self._forwards.add(self.newest)

    def _leave_forward(self) -> None:
        leave(self._modes)
        self.note_results()
        if self.content_keys_after_first_forward is None and self.first is not None:
            self.content_keys_after_first_forward = {
                prefix + name: contents(tensor)
                for prefix, owner in self._owners
                for own in (owner._parameters, owner._buffers)
                for name, tensor in own.items()
                if tensor is not None
            }

    def _attributes_inside(self, root: str) -> Iterator[tuple[str, tuple[type, dict[str, Plain]]]]:
        for name, module in self.layers.modules.items():
            if name in self.selected and (root in (ROOT, name) or name.startswith(f"{root}.")):
                yield name, (type(module), attributes(module))

    def note_results(self) -> None:
        """Note which plain attributes were set since the newest forward began, if it is the first of its kind."""
        for name, (kind, before) in self._attributes.items():
            module = self.layers.modules[name]
            if type(module) is not kind:
                continue  # a lazy module became what it is
            for key, now in attributes(module).items():
                then = before.get(key)
                # A number that was computed again may be equal, but is another object; a sequence is text made anew.
                if now is not then and not (type(now) is str and now == then):
                    self.results.setdefault(name, set()).add(key)

    # --- tensors --------------------------------------------------------------------------------------------------

    def _observe(self, forward: Forward, tensor: torch.Tensor, axis: int | None) -> TensorObservation:
        """Look at a tensor in a new place: it is reduced once and hooked once, in however many it stands."""
        hook = self._tensor_hook(tensor)
        if hook is None:
            return TensorObservation(tensor, *self._read(forward, tensor, axis))
        before = hook.seen_in(forward)
        # `.data` may change a leaf, or a parameter of which this is a view, without a new version.
        if before is not None and hook.version is not None and not is_view(tensor):
            seen = TensorObservation(tensor, before.number, before.forward)
        else:
            _, reduced = self._read(forward, tensor, axis)
            # Numbered by the hook, as the same contents may have another gradient: detached, reversed.
            seen = TensorObservation(tensor, before.number if before is not None else forward.next_number(), reduced)
        hook.add(forward, seen)
        self._views.add(tensor, seen)
        return seen

    def _read(self, forward: Forward, tensor: torch.Tensor, axis: int | None) -> tuple[tuple[int, int], Reduced]:
        """Return the number of a tensor's contents, and what they come to."""
        key = identity(tensor)
        if key is not None and (key[0] in self._storages or _is_parameter(tensor)):
            key = None  # `p.data.add_()` changes a parameter without a new version
        known = None if key is None else forward.contents.get(key)
        if known is not None:
            return known.number, known.reduced
        number = forward.next_number()
        reduced = statistics.reduce(tensor, axis=axis, index=forward.index, small=self._small)
        if key is not None:
            forward.contents[key] = Contents(tensor, number, reduced)
        return number, reduced

    def _tensor_hook(self, tensor: torch.Tensor) -> _TensorHook | None:
        """Return our hook on the tensor as it is now, made if there is none; None where no gradient can come."""
        if not tensor.requires_grad:
            return None
        # A leaf keeps its hook for ever; another tensor that is written to becomes the output of another node.
        version = None if tensor.is_leaf else tensor._version
        for known in (tensor_hooks(tensor) or {}).values():
            if type(known) is _TensorHook and known.capture is self and known.version == version:
                return known
        hook = _TensorHook(self, version)
        hook.handle = tensor.register_hook(hook)
        self._tensor_hooks.append(ref(hook))
        return hook

    # --- recomputation by activation checkpointing ----------------------------------------------------------------

    def _begin_recompute(self, name: str, flat: Flat, running: FrameType) -> None:
        self._count_backward()
        with statistics.ambient_modes_disabled():
            found = self._original(name, flat)
        if found is not None:
            forward, call = found
            call.run_again()
            self._recomputing[running] = found
            self._recomputed = forward, call.started
            self._attach_recomputed(forward, call, call.inputs, flat)

    def _original(self, name: str, flat: Flat) -> tuple[Forward, CallObservation] | None:
        """Find the call that runs again: one with the same input, one that follows in the segment, or the last one."""
        keys = [key for _, tensor in flat.tensors if (key := identity(tensor)) is not None]
        segment, position = self._recomputed or (None, -1)

        def likelihood(candidate: tuple[Forward, CallObservation]) -> tuple[int, ...]:
            forward, call = candidate
            known = [forward.contents[key].reduced for key in keys if key in forward.contents]
            same = any(seen.forward is reduced for _, seen in call.inputs for reduced in known)
            follows = forward is segment and call.started > position
            # Segments run again from the last to the first, the calls in a segment in their order.
            return same, follows, -call.recomputed, forward.index, -call.started if follows else call.started

        return max(
            ((forward, call) for forward in self._forwards for call in forward.calls_of(name)),
            key=likelihood,
            default=None,
        )

    def _attach_recomputed(self, forward: Forward, call: CallObservation, values: Values, flat: Flat) -> None:
        """Take the values of the second run for those of the first, which the reentrant kind runs without gradient."""
        originals = dict(values)
        with statistics.ambient_modes_disabled():
            for path, tensor in () if call.grad_enabled else flat.tensors:
                seen = originals.get(path)
                hook = None if seen is None or tensor.is_leaf else self._tensor_hook(tensor)
                if seen is not None and hook is not None:
                    seen.requires_grad = True
                    hook.add(forward, seen)

    # --- backward -------------------------------------------------------------------------------------------------

    def gradient(self, hook: _TensorHook, gradient: torch.Tensor) -> None:
        """Called with the whole gradient of an observed tensor."""
        inner = self._count_backward()
        self._recomputed = None
        forwards = list(hook.observed)
        reduced = self._reduced(gradient, forwards[0].index if len(forwards) == 1 else max(f.index for f in forwards))
        for forward in forwards:
            for seen in hook.observed[forward]:
                seen.receive(reduced, inner=inner)
            if not inner:
                forward.backwards.add(self._backward)
                self.steps.reached(training=forward.kind[1])

    def parameter_gradient(self, names: list[str], gradient: torch.Tensor) -> None:
        """Called with the gradient of a parameter, before it is added to ``.grad``."""
        reduced = self._reduced(gradient, 0 if self.newest is None else self.newest.index)
        # Of the forwards that are told of alone, those that the pass came through; it may have come by no hooked value.
        alone = [self.newest, self.first] if self.first is not self.newest else [self.newest]
        reached = [f for f in alone if f is not None and self._backward in f.backwards]
        if not reached and self.newest is not None:
            reached = [self.newest]
        for gradients in (self.parameters, *(forward.parameters for forward in reached)):
            for name in names:
                if name not in gradients:
                    gradients[name] = ParameterGradient()
                gradients[name].receive(reduced, self._backward)

    def _reduced(self, gradient: torch.Tensor, index: int) -> Reduced:
        """Reduce a gradient: a large one once in a pass, though a sum hands it to each of its terms."""
        key = identity(gradient) if gradient.numel() > _LARGE else None
        if key is None:
            return statistics.reduce(gradient, index=index, small=self._small)
        known = self._gradients.get((index, key))
        if known is None:
            kept = StorageWeakRef(gradient.untyped_storage())  # while it lives its address is not used again
            known = self._gradients[index, key] = statistics.reduce(gradient, index=index), kept
        return known[0]

    def backward_pass(self) -> int:
        """Return which backward pass runs, counting it if it is new."""
        self._count_backward()
        return self._backward

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Read what the first step will change, and note whether a `GradScaler` calls it.

        Then gradients were seen before it took its factor out.
        """
        with self.guard, without_torch_function():
            self.changes += 1
            hooks = [self._hook_on(p) for group in optimizer.param_groups for p in group["params"]]
            held = [hook.held for hook in hooks if hook is not None]
            self.steps.step_begins(optimizer, held, self._parameters.values())
            scaled = _is_stepped_by_scaler(sys._getframe(1))
            if (scaled or self.before_training is None) and held:
                if scaled:
                    self.notes["gradients are those of the loss as a GradScaler scaled it"] = None
                if self.before_training is None:
                    self.before_training = owned(self.layers, self.selected)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.steps.step_ends()

    def _count_backward(self) -> bool:
        """Count the backward pass if it is new; return whether it runs inside a forward."""
        self.changes += 1
        self._drop_abandoned()
        inner = bool(self._stack)
        task = graph_task()
        if task > self._newest_task:
            self._newest_task = task
            self._gradients.clear()
            if self._recomputed is None:  # else it is the backward of a segment, inside that of the whole
                self._backward = task
                if not inner:
                    self.backwards += 1
                    self._views.settle()
        return inner


class _Guard:
    """Keeps the first error of our own, and lets none out: the model must run as it runs unwatched.

    Where the model itself had used up Python's stack there is no error of ours: what was not seen there is noted.
    """

    def __init__(self, notes: dict[str, None]) -> None:
        self.failure: Exception | None = None
        self._notes = notes

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if isinstance(error, RecursionError):
            own = 0  # frames of ours, counted here: a call may be one too many
            while trace is not None:
                own, trace = own + 1, trace.tb_next
            if own < _OWN_FRAMES:
                self._notes[_TOO_DEEP] = None
                return True
        self.failure = self.failure or error
        return True


class _Frame:
    """A call that is running."""

    __slots__ = (
        "attended", "axes", "call", "error_before", "forward", "inputs", "name", "random_states", "read", "running",
    )  # fmt: skip

    def __init__(self, name: str, running: FrameType, forward: Forward, inputs: Flat) -> None:
        self.name = name
        self.running = running
        self.forward = forward
        self.inputs = inputs
        self.call: CallObservation | None = None
        self.axes: dict[tuple[Dimension, ...], int | None] = {}
        """Unit axis of what the calls inside gave out, the newest of each shape."""
        self.random_states: tuple[bytes, ...] = ()
        """As the call began; none where it draws nothing."""
        self.read: list[Any] | None = None
        """What tells the inputs as they were read, where hooks came after."""
        self.attended = False
        """Whether attention weights were seen in the call."""
        self.error_before = sys.exc_info()[1]  # a forward inside an `except:` block sees the outer error

    def is_over(self, thread: int) -> bool:
        """Whether the call, which began in ``thread``, has ended: its Python frame is on no stack."""
        if _is_called_by(sys._getframe(1), self.running):
            return False
        elsewhere = None if thread == threading.get_ident() else sys._current_frames().get(thread)
        return not _is_called_by(elsewhere, self.running)

    def axis_for(self, output: torch.Tensor) -> int | None:
        """Return the unit axis that the output inherits: of what was made inside, else of an input of its shape."""
        shape = shape_of(output)
        inside = self.axes.get(shape)
        if inside is not None or self.call is None:
            return inside
        return next((seen.axis for _, seen in self.call.inputs if seen.shape == shape), None)


class _Views:
    """Views with a hook, which autograd drops without a word when the view is overwritten in place."""

    def __init__(self) -> None:
        self._views: list[tuple[TensorObservation, int, torch.Tensor]] = []

    def add(self, tensor: torch.Tensor, seen: TensorObservation) -> None:
        """Look after a tensor, if it is a view."""
        if is_view(tensor):
            version = tensor.detach()
            with contextlib.suppress(RuntimeError):  # a tensor subclass may not allow it
                # An alias without the memory: what it still shares is the count of versions.
                version.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                self._views.append((seen, tensor._version, version))

    def settle(self) -> None:
        """Mark those that were overwritten by now: what follows, a backward or another forward, ends the question."""
        for seen, before, version in self._views:
            seen.overwritten |= version._version > before
        self._views.clear()


# --- the hooks: objects that know their own module, and are nothing in a copy ---------------------------------------

_NOTHING = getattr, (contextlib.nullcontext(), "__exit__")
"""How a hook is pickled: takes any arguments, returns None, and is there where this package is not installed."""


class _Hook:
    __slots__ = ("_capture", "_module", "_name", "key")
    is_modelprobe = True
    key: int
    """Of the hook, among those of its module."""

    def __init__(self, capture: Capture, name: str, module: nn.Module) -> None:
        self._capture = capture
        self._name = name
        self._module = ref(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _NOTHING

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()

    @property
    def __name__(self) -> str:
        # What torch.jit.script asks of each hook before it compiles it. An AttributeError, as of any callable object.
        raise AttributeError(
            "a hook of a watch has no name, and torch.jit.script cannot compile it: script the model before it is "
            "watched, or after the watch is closed"
        )

    def _active(self, module: nn.Module) -> bool:
        traced = tracing_state() is not None
        return self._capture.attached and self._module() is module and not traced

    def stay_last(self, hooks: dict[int, Any]) -> bool:
        """Move behind hooks that came since, to see what they change; return whether there were any."""
        if next(reversed(hooks), self.key) == self.key or self.key not in hooks:
            return False
        behind = itertools.takewhile(lambda key: key != self.key, reversed(hooks))
        if all(getattr(hooks[key], "is_modelprobe", False) for key in behind):
            return False
        cast("OrderedDict[int, Any]", hooks).move_to_end(self.key)  # as torch does for prepend=True
        return True


class _Before(_Hook):
    __slots__ = ("after",)

    def __init__(self, capture: Capture, name: str, module: nn.Module, after: _After) -> None:
        super().__init__(capture, name, module)
        self.after = after

    @property
    def name(self) -> str:
        """Of the layer."""
        return self._name

    def stay_last_of_module(self) -> None:
        """Move behind hooks that came since."""
        module = self._module()
        if module is not None:
            self.stay_last(module._forward_pre_hooks)

    def is_there(self) -> bool:
        """Whether this and the hook after the call are on the module still."""
        module = self._module()
        return module is None or (self.key in module._forward_pre_hooks and self.after.key in module._forward_hooks)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if not torch.compiler.is_compiling():
                with self._capture.guard, without_torch_function():
                    if self._active(module):
                        late = self.stay_last(module._forward_pre_hooks)
                        self.after.stay_last(module._forward_hooks)
                        self._capture.before(self._name, module, args, kwargs, _running(sys._getframe(1)), late=late)
        except RecursionError:  # not even the guard could be called
            self._capture.notes[_TOO_DEEP] = None


class _After(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        try:
            if not torch.compiler.is_compiling():
                with self._capture.guard, without_torch_function():
                    if self._active(module):
                        if self.stay_last(module._forward_hooks):
                            self._capture.note_late(self._name, "outputs")
                        self._capture.after(self._name, module, args, kwargs, output, _running(sys._getframe(1)))
        except RecursionError:
            self._capture.notes[_TOO_DEEP] = None


class _Inert:
    """What a hook becomes in a copy of its module: nothing, and gone at the copy's first call."""

    __slots__ = ()
    is_modelprobe = True

    def __reduce__(self) -> tuple[Any, ...]:
        return _NOTHING

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        tables = hook_tables(module)
        for key in [key for table in tables for key, hook in table.items() if isinstance(hook, _Inert)]:
            for table in tables:
                table.pop(key, None)


class _TensorHook:
    """Our hook on one tensor: hands its gradient to every value that was seen of it."""

    __slots__ = ("__weakref__", "_fired", "capture", "handle", "observed", "version")
    __torch_unserializable__ = True  # else torch warns when the tensor is pickled

    def __init__(self, capture: Capture, version: int | None) -> None:
        self.capture = capture
        self._fired = False
        self.version = version
        self.handle: Any = None
        # A graph holds its forward by the hooks in it. A leaf outlives many graphs, so its hook holds none.
        self.observed: MutableMapping[Forward, list[TensorObservation]] = (
            {} if version is not None else WeakKeyDictionary()
        )

    def seen_in(self, forward: Forward) -> TensorObservation | None:
        """Return where the tensor was seen first in ``forward``, if it was."""
        seen = self.observed.get(forward)
        return seen[0] if seen else None

    def add(self, forward: Forward, seen: TensorObservation) -> None:
        """Let the gradient go to ``seen`` too."""
        if self._fired:  # an input used again: earlier forwards have had theirs
            for earlier in [other for other in self.observed if other is not forward]:
                del self.observed[earlier]
            self._fired = False
        self.observed.setdefault(forward, []).append(seen)

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if self.capture.attached and gradient is not None and self.observed:
            self._fired = True
            with self.capture.guard, without_torch_function():
                self.capture.gradient(self, gradient)


class _ParameterHook:
    """Sees the gradient on its way to ``.grad``, which may hold that of earlier passes."""

    __slots__ = ("_arrived", "_parameter", "_parts", "capture", "held", "names")
    is_modelprobe = True

    def __init__(self, capture: Capture, parameter: nn.Parameter) -> None:
        self.capture = capture
        self.held = Accumulated()
        self._parameter = ref(parameter)
        self.names: list[str] = []
        self._arrived = -1
        self._parts = 0

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if self.capture.attached and gradient is not None:
            with self.capture.guard, without_torch_function():
                backward = self.capture.backward_pass()
                self._parts = self._parts + 1 if backward == self._arrived else 1
                self._arrived = backward
                if self._parts == 1:
                    parameter = self._parameter()
                    if parameter is not None:
                        self.capture.steps.arrives(parameter, self.held, backward)
                    self.capture.parameter_gradient(self.names, gradient)

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Take ``.grad`` where the hook cannot do: it came in parts, or (FSDP2) torch did not call it."""
        if self.capture.attached:
            with self.capture.guard, without_torch_function():
                if self._parts == 1 and graph_task() == self._arrived:
                    return
                gradient = parameter.grad
                if gradient is not None and (self._parts > 1 or self.capture.backward_pass() != self._arrived):
                    self.capture.parameter_gradient(self.names, gradient)


class _AccumulatedHook:
    __slots__ = ("_hook",)
    is_modelprobe = True

    def __init__(self, hook: _ParameterHook) -> None:
        self._hook = hook

    def __call__(self, parameter: nn.Parameter) -> None:
        self._hook.accumulated(parameter)


# --- small questions --------------------------------------------------------------------------------------------------


def _is_stepped_by_scaler(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is _SCALER_STEP:
            scaler = frame.f_locals.get("self")
            return isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()
        frame = frame.f_back
    return False


def _running(frame: FrameType) -> FrameType:
    """Return the frame of the ``_call_impl`` that runs the hook: pre and post hook of one call share it."""
    while frame.f_code.co_name != CALL and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_called_by(frame: FrameType | None, caller: FrameType) -> bool:
    """Whether a frame is ``caller``, or runs for it; the walk is short where it is."""
    while frame is not None:
        if frame is caller:
            return True
        frame = frame.f_back
    return False


def _storages(model: nn.Module) -> Iterator[int]:
    """Yield what tells the storages of parameters and buffers."""
    for module in model.modules():
        if module._parameters or module._buffers:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                key = None if tensor is None else identity(tensor)
                if key is not None:
                    yield key[0]


def _identities(inputs: Flat) -> list[tuple[int, Identity | None]]:
    return [(id(tensor), identity(tensor)) for _, tensor in inputs.tensors]


def _is_parameter(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter)  # the second alone costs a microsecond


def _kept(tensor: torch.Tensor) -> torch.Tensor | None:
    return None if is_wrapped(tensor) else tensor.detach().clone()


def _autocast_dtype(inputs: Flat) -> str | None:
    """Return the dtype of the autocast that is active for the device of an input."""
    if not any_autocast():
        return None
    active = active_autocast(sorted({tensor.device.type for _, tensor in inputs.tensors} or {"cpu"}))
    return plain_name(active[0][1]) if active else None


def _draws_nothing(module: nn.Module) -> bool:
    """Whether torch's own code alone runs in a call, and draws no random numbers: to look for it is dear."""
    return (
        type(module) in _DRAW_NOTHING
        and "forward" not in module.__dict__
        and len(module._forward_pre_hooks) == len(module._forward_hooks) == 1  # ours
        and not (any(global_hooks) or function_modes())
    )


def _random_states() -> tuple[bytes, ...]:
    """Return the states of torch's generators, to tell whether a call drew from them."""
    states = as_array(torch.default_generator.get_state()).tobytes()
    if torch.cuda.is_initialized():
        return states, as_array(torch.cuda.get_rng_state()).tobytes()  # kept on the CPU: nothing waits
    return (states,)


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
    return f"{shape_of(tensor)} {plain_name(tensor.dtype)} {plain_name(tensor.device)}"


def run_eagerly(layers: Layers) -> contextlib.AbstractContextManager[object]:
    """Return what lets compiled code of a model run eagerly, hooks and all, where there may be some."""
    if layers.compiled or "torch._dynamo" in sys.modules:  # importing it takes seconds
        return _EagerStance()
    return contextlib.nullcontext()


class _EagerStance:
    """Compiled code runs eagerly meanwhile. Several may overlap in any order, so they are counted."""

    _entered = 0
    _stance = contextlib.ExitStack()

    def __enter__(self) -> None:
        if not _EagerStance._entered:
            _EagerStance._stance.enter_context(torch.compiler.set_stance("force_eager"))
        _EagerStance._entered += 1

    def __exit__(self, *error: object) -> None:
        _EagerStance._entered -= 1
        if not _EagerStance._entered:
            _EagerStance._stance.close()


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """No garbage collection meanwhile: thousands of small objects come or go, none of them in cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
