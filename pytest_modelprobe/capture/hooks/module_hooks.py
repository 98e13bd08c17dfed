"""Hooks on modules: one before and one after each call of a layer, which tell the `Capture` of the call.

The hooks stay on the user's model while a test does with it what it likes. Each hook therefore knows its own module,
and does nothing on a copy or after a pickle. It moves behind hooks that are registered later, because it has to see
what they change. Hooks before and after do not always come in pairs, since a hook of the user may raise in between, so
a call is known again by its Python frame.
"""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict
from types import FrameType
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pytest_modelprobe._torch import CALL
from pytest_modelprobe.models import ModuleHook

from .guard import TOO_DEEP, hidden

if TYPE_CHECKING:
    from pytest_modelprobe.capture.capture import Capture


class ModuleHooks:
    """Puts a hook before and a hook after each call of the modules added."""

    def __init__(self, receiver: Capture) -> None:
        self._receiver = receiver
        self._before: list[_Before] = []
        self._handles: list[RemovableHandle] = []

    def attach(self, name: str, module: nn.Module) -> None:
        """Hook one module."""
        after = _After(self._receiver, name, module)
        before = _Before(self._receiver, name, module)
        before.after = after
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
        before.key = handle.id
        self._handles.append(handle)
        handle = module.register_forward_hook(after, with_kwargs=True, always_call=True)
        after.key = handle.id
        self._handles.append(handle)
        self._before.append(before)

    def stay_last(self) -> None:
        """Move the hooks before calls behind those that were registered since."""
        for before in self._before:
            before.stay_last_of_module()

    def removed(self) -> list[str]:
        """Return the names of the layers from which somebody else removed our hooks."""
        return [before.name for before in self._before if not before.is_there()]

    def detach(self) -> None:
        """Remove all hooks."""
        self._before.clear()
        while self._handles:
            self._handles.pop().remove()


class _Hook(ModuleHook):
    __slots__ = ("_name", "_receiver", "key")
    is_modelprobe = True
    key: int
    """Id of the hook in its module's table of hooks."""

    def __init__(self, receiver: Capture, name: str, module: nn.Module) -> None:
        # Set here, as `ModuleHook` does. A call of `super` would double the time, and there may be many modules.
        self._module = ref(module)
        self._receiver = receiver
        self._name = name

    @property
    def __name__(self) -> str:
        # torch.jit.script reads this of each hook before it compiles it. An AttributeError is what it meets with any
        # callable object; ours says what to do.
        raise AttributeError(
            "a hook of a watch has no name, and torch.jit.script cannot compile it: script the model before it is "
            "watched, or after the watch is closed"
        )

    def note(self, text: str) -> None:
        """Add a note to the records of the watch."""
        self._receiver.guard.notes[text] = None

    def stay_last(self, hooks: dict[int, Any], *, move: bool = True) -> bool:
        """Move behind hooks that were registered since, and return whether there were any.

        Hooks of other watches do not count: they change nothing.
        """
        if next(reversed(hooks), self.key) == self.key or self.key not in hooks:
            return False
        behind = itertools.takewhile(lambda key: key != self.key, reversed(hooks))
        if all(getattr(hooks[key], "is_modelprobe", False) for key in behind):
            return False
        if move:
            cast("OrderedDict[int, Any]", hooks).move_to_end(self.key)  # as torch does for prepend=True
        return True


class _Before(_Hook):
    __slots__ = ("after",)

    after: _After

    @property
    def name(self) -> str:
        """Name of the layer."""
        return self._name

    def stay_last_of_module(self) -> None:
        """Move behind hooks that came since."""
        module = self._module()
        if module is not None and len(module._forward_pre_hooks) > 1:
            self.stay_last(module._forward_pre_hooks)

    def is_there(self) -> bool:
        """Whether this hook and the hook after the call are still on the module."""
        module = self._module()
        return module is None or (self.key in module._forward_pre_hooks and self.after.key in module._forward_hooks)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if not torch.compiler.is_compiling():
                receiver = self._receiver
                with receiver.guard.lock, receiver.guard, hidden():
                    # A shallow copy of a module shares its hooks. The hook knows another module then.
                    if self._module() is module and receiver.guard.observes():
                        late = len(module._forward_pre_hooks) > 1 and self.stay_last(module._forward_pre_hooks)
                        if len(module._forward_hooks) > 1:
                            self.after.stay_last(module._forward_hooks)
                        frame = _frame_of_call(sys._getframe(1))
                        receiver.before(self._name, module, args, kwargs, frame, late=late)
        except RecursionError:  # not even the guard could be called
            self._receiver.guard.notes[TOO_DEEP] = None


class _After(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        try:
            if not torch.compiler.is_compiling():
                receiver = self._receiver
                with receiver.guard.lock, receiver.guard, hidden():
                    if self._module() is module and receiver.guard.observes():
                        hooks = module._forward_hooks
                        # After an error torch iterates over the dict of hooks itself: a move would raise a
                        # RuntimeError there, in place of the model's own error.
                        if len(hooks) > 1 and self.stay_last(hooks, move=sys.exc_info()[1] is None):
                            receiver.note_late(self._name, "outputs")
                        frame = _frame_of_call(sys._getframe(1))
                        receiver.after(self._name, module, args, kwargs, output, frame)
        except RecursionError:
            self._receiver.guard.notes[TOO_DEEP] = None


def _frame_of_call(frame: FrameType) -> FrameType:
    """Return the frame of the ``_call_impl`` that runs the hook. The hooks before and after a call share it."""
    while frame.f_code.co_name != CALL and frame.f_back is not None:
        frame = frame.f_back
    return frame
