"""Hooks on modules and modes of functions: where torch calls the capture, and the guard in which every hook runs.

Each hook hands on what it sees and computes nothing itself, so that the fragile part of torch's hooks is here. Those on
tensors and parameters are in `gradients`. No module has a full backward hook: that breaks ``ReLU(inplace=True)``, is
not called for outputs in a dict or dataclass, and costs four times as much.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, cast
from weakref import ref

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from pytest_modelprobe._torch import (
    CALL,
    default_device_mode,
    function_modes,
    pop_function_mode,
    push_function_mode,
    tracing_state,
    without_torch_function,
)
from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.interrupts import is_interrupt
from pytest_modelprobe.models import ModuleHook, is_captured

from .profiler import Profiler

CAPTURED = "what ran while a CUDA graph was captured is not recorded, and no replay of a graph is"


class HookGuard:
    """The context in which every hook runs. It keeps errors of hooks from the model.

    A watch must not change what the model does. The first error in our own code is therefore kept until a record is
    made, and the model goes on. Only what the handler of a signal raises reaches the model. While a hook runs, the
    clock of a profiler stops.
    """

    def __init__(self, notes: dict[str, None], profiler: Profiler | None = None) -> None:
        self.active = False
        """Whether the hooks observe: from `Capture.attach` to `Capture.detach`."""
        self.lock = threading.RLock()
        """Held while a hook runs, so that one thread at a time changes the stack of calls and the forwards."""
        self.entered = 0
        """How many hooks ran."""
        self.notes = notes
        self._profiler = profiler
        self._failure: Exception | None = None

    def observe(self, receive: Callable[..., Any], *args: Any) -> Any:
        """Call what a hook hands on to, if the watch is open and torch computes what it is told.

        No function mode sees what is computed there.
        """
        with self.lock, self, without_torch_function():
            if self.active and tracing_state() is None:
                if not is_captured():
                    return receive(*args)
                self.notes[CAPTURED] = None
        return None

    def __enter__(self) -> None:
        if self._profiler is not None:
            self._profiler.pause()
        self.entered += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._profiler is not None:
            self._profiler.resume()
        if error is None or not isinstance(error, Exception) or is_interrupt(error):  # nearly always None
            return False
        if self._failure is None:
            # The frames of a traceback would keep the watch alive, so it is kept as text.
            if not isinstance(error, ModelProbeError):
                error.add_note("".join(traceback.format_exception(error)))
            error.__cause__ = error.__context__ = None
            self._failure = error.with_traceback(None)
        return True

    def check(self) -> None:
        """Raise the error that was kept, if there is one."""
        if isinstance(self._failure, ModelProbeError):
            raise type(self._failure)(*self._failure.args)
        if self._failure is not None:
            raise ModelProbeError(
                f"a hook of the probe failed, so that the record is incomplete: {self._failure!r}"
            ) from self._failure


# --- hooks on modules -------------------------------------------------------------------------------------------------


class ModuleHooks:
    """Puts a hook before and a hook after each call of the modules added.

    The hooks stay on the user's model while a test does with it what it likes. Each hook therefore knows its own
    module, and does nothing on a copy or after a pickle. It moves behind hooks that are registered later, because it
    has to see what they change. Hooks before and after do not always come in pairs, since a hook of the user may raise
    in between, so a call is known again by its Python frame.

    Args:
        guard: Of all hooks.
        before: Takes the name of a layer, the layer, its arguments, and the frame of the call.
        after: Takes the name of a layer, the layer, its arguments, what it returned, and the frame of the call.
    """

    def __init__(self, guard: HookGuard, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._guard, self._receive_before, self._receive_after = guard, before, after
        self._before: list[_Before] = []
        self._handles: list[RemovableHandle] = []

    def attach(self, name: str, module: nn.Module) -> None:
        """Hook one module."""
        after = _After(self._guard, self._receive_after, name, module)
        before = _Before(self._guard, self._receive_before, name, module)
        before.after = after
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        before.key = self._handles[-1].id
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        after.key = self._handles[-1].id
        self._before.append(before)

    def stay_last(self) -> None:
        """Move the hooks before calls behind those that were registered since."""
        for before in self._before:
            module = before._module()
            if module is not None:
                before.stay_last(module._forward_pre_hooks)

    def removed(self) -> list[str]:
        """Return the names of the layers from which somebody else removed our hooks."""
        return [
            before.name
            for before in self._before
            if (module := before._module()) is not None
            and not (before.key in module._forward_pre_hooks and before.after.key in module._forward_hooks)
        ]

    def detach(self) -> None:
        """Remove all hooks."""
        self._before.clear()
        while self._handles:
            self._handles.pop().remove()


class _Hook(ModuleHook):
    __slots__ = ("guard", "key", "name", "receive")
    is_modelprobe = True
    key: int
    """Id of the hook in its module's table of hooks."""

    def __init__(self, guard: HookGuard, receive: Callable[..., None], name: str, module: nn.Module) -> None:
        # Set here, as `ModuleHook` does. A call of `super` would double the time, and there may be many modules.
        self._module = ref(module)
        self.guard, self.receive, self.name = guard, receive, name

    def note(self, text: str) -> None:
        """Add a note to the records of the watch."""
        self.guard.notes[text] = None

    def stay_last(self, hooks: dict[int, Any]) -> None:
        """Move behind hooks that were registered since."""
        if self.key in hooks and next(reversed(hooks)) != self.key:
            cast("OrderedDict[int, Any]", hooks).move_to_end(self.key)  # as torch does for prepend=True


class _Before(_Hook):
    __slots__ = ("after",)
    after: _After

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A shallow copy of a module shares its hooks. The hook knows another module then.
        if not torch.compiler.is_compiling() and self._module() is module:
            self.guard.observe(self._observe, module, args, kwargs, _frame_of_call(sys._getframe(1)))

    def _observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> None:
        self.stay_last(module._forward_pre_hooks)
        self.after.stay_last(module._forward_hooks)
        self.receive(self.name, module, args, kwargs, frame)


class _After(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.compiler.is_compiling() and self._module() is module:
            frame = _frame_of_call(sys._getframe(1))
            self.guard.observe(self.receive, self.name, module, args, kwargs, output, frame)


def _frame_of_call(frame: FrameType) -> FrameType:
    """Return the frame of the ``_call_impl`` that runs the hook. The hooks before and after a call share it."""
    while frame.f_code.co_name != CALL and frame.f_back is not None:
        frame = frame.f_back
    return frame


# --- function modes ---------------------------------------------------------------------------------------------------


class ForwardMode(TorchFunctionMode):
    """A mode that is on torch's stack of modes while a forward runs."""

    def end(self) -> None:
        """Forget what was kept of the forward that has ended."""


def enter(modes: Sequence[ForwardMode]) -> None:
    """Put the modes at the bottom of the stack, the last one topmost.

    A `with` block pops whatever is on top: where a forward was interrupted, that must not be one of these.
    """
    if modes:
        others = _pop_all_but(modes)
        # Torch requires the mode of `torch.set_default_device` to be the lowest.
        above = 1 if others and others[0] is default_device_mode() else 0
        for mode in (*others[:above], *modes, *others[above:]):
            push_function_mode(mode)


def leave(modes: Sequence[ForwardMode]) -> None:
    """Take the modes off the stack, wherever they are, and no other."""
    if modes:
        for other in _pop_all_but(modes):
            push_function_mode(other)
        for mode in modes:
            mode.end()


def _pop_all_but(modes: Sequence[ForwardMode]) -> list[TorchFunctionMode]:
    """Take everything off the stack, and return what is not among the modes, the bottom first."""
    stack = [pop_function_mode() for _ in range(function_modes())]
    return [mode for mode in reversed(stack) if not any(mode is one for one in modes)]
