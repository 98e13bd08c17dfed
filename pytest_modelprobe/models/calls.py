"""The calls of a model's layers while it runs: which call runs inside which, and which raises.

Isolation and the checks use this one tracer. Hooks do not always come in pairs: an interrupt skips the second, a hook
of somebody else may raise before the first, and an exception passes every layer around the one that raised it. So calls
are kept as a stack, and a hook that ends a call also ends all that are still listed inside it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from pytest_modelprobe._torch import graph_task
from pytest_modelprobe.record import ROOT


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of a layer."""

    layer: str
    index: int
    """Which of the layer's calls it is, from 0."""
    module: nn.Module
    parent: ModuleCall | None
    """The call that was running when this one began, or `None`."""
    handled: BaseException | None
    """The exception that was being handled when this one began. A forward that is called in an ``except`` block sees it
    too, without having failed."""


C = TypeVar("C", bound=ModuleCall)


class CallTracer(Generic[C]):
    """Follows the calls of modules within a `with` block.

    `capture.Capture` has hooks of its own. They stay on the user's model, and so have to survive copies, pickling,
    several threads and hooks that are registered later. None of these happens within one block.

    Args:
        modules: The modules to follow, by name.
        kind: Class of the calls, `ModuleCall` or a subclass whose further fields have defaults.
        before: Called before each call with the call, its positional and its keyword arguments.
        after: Called with each call that returned, its positional arguments and its output. What it returns replaces
            the output, unless it is `None`.
        failed: Called with each call that raised.
        prepend: Whether these hooks run before all others of a module.
        skip_recomputed: Whether to ignore calls in a backward pass, which activation checkpointing repeats.

    >>> import torch
    >>> model = nn.Sequential(nn.ReLU(), nn.ReLU())
    >>> names = []
    >>> with CallTracer(dict(model.named_modules()), ModuleCall, after=lambda call, *_: names.append(call.layer)):
    ...     _ = model(torch.ones(1))
    >>> names
    ['0', '1', '']
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        kind: type[C],
        *,
        before: Callable[[C, tuple[Any, ...], dict[str, Any]], None] | None = None,
        after: Callable[[C, tuple[Any, ...], Any], object] | None = None,
        failed: Callable[[C], None] | None = None,
        prepend: bool = False,
        skip_recomputed: bool = False,
    ) -> None:
        self.running: list[C] = []
        """Calls that have not ended, the outermost first."""
        self.raised_in = ROOT
        """The innermost layer that raised the newest exception."""
        self._modules, self._kind, self._prepend = modules, kind, prepend
        self._skip_recomputed = skip_recomputed
        self._before, self._after, self._failed = before, after, failed
        self._counts = Counter[str]()
        self._error: BaseException | None = None
        self._exit = contextlib.ExitStack()

    @property
    def innermost(self) -> str:
        """The layer whose own code is running."""
        return self.running[-1].layer if self.running else ROOT

    def __enter__(self) -> CallTracer[C]:
        if self._skip_recomputed:
            graph_task()  # a torch that cannot answer is refused here, and not in the middle of the user's forward
        for name, module in self._modules.items():
            begin = functools.partial(self._begin, name)
            pre = module.register_forward_pre_hook(begin, with_kwargs=True, prepend=self._prepend)
            # `always_call`: without it torch calls no hook of a forward that raised.
            post = module.register_forward_hook(self._end, prepend=self._prepend, always_call=True)
            self._exit.callback(pre.remove)
            self._exit.callback(post.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks. Safe to repeat."""
        self._exit.close()

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._skip_recomputed and graph_task() != -1:
            return
        call = self._kind(
            layer=name,
            index=self._counts[name],
            module=module,
            parent=self.running[-1] if self.running else None,
            handled=sys.exc_info()[1],
        )
        self._counts[name] += 1
        if self._before is not None:
            self._before(call, args, kwargs)
        self.running.append(call)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> object:
        if self._skip_recomputed and graph_task() != -1:
            return None
        # The innermost call of the module. Calls inside it that are still listed ended without a hook.
        found = next((i for i, call in reversed([*enumerate(self.running)]) if call.module is module), None)
        if found is None:
            return None  # another hook raised before `_begin` was called
        call = self.running[found]
        del self.running[found:]
        error = sys.exc_info()[1]
        if error is call.handled:  # not raised by this call
            return None if self._after is None else self._after(call, args, output)
        if not self._is_from_known(error):
            self.raised_in = call.layer
        self._error = error
        if self._failed is not None:
            self._failed(call)
        return None

    def _is_from_known(self, error: BaseException | None) -> bool:
        """Whether an exception is the newest one, or was raised while that one was handled: it passes outer layers."""
        while error is not None and error is not self._error:
            error = error.__context__
        return error is not None


_HOOKS = (CallTracer._begin.__code__, CallTracer._end.__code__)


def raised_in_hook(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised in place of, is of what a `CallTracer` calls: not of the model.

    >>> def refuse(*call):
    ...     raise NotImplementedError
    >>> try:
    ...     with CallTracer({"": (model := nn.ReLU())}, ModuleCall, before=refuse):
    ...         _ = model(1)
    ... except NotImplementedError as error:
    ...     raised_in_hook(error)
    True
    """
    while error is not None:
        if any(frame.f_code in _HOOKS for frame, _ in traceback.walk_tb(error.__traceback__)):
            return True
        error = error.__context__
    return False
