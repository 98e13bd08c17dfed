"""The calls of a model's layers while it runs, and compiled code that runs eagerly for a while, so that hooks run.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from pytest_modelprobe._torch import CompiledCalls, graph_task
from pytest_modelprobe.record import ROOT

from .layers import Layers


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


# --- compiled code ----------------------------------------------------------------------------------------------------
#
# A hook that is added after the first compiled call is not called, because torch does not check for new hooks. The
# stance of `torch.compiler` would help, but it is one for the whole process: functions that have nothing to do with the
# model would run eagerly too. So each compiled callable is asked whether the model can be reached from it.

_MOST_OBJECTS = 10_000
"""How many objects are searched for a model in one compiled callable and its arguments."""

_LEAVES = (torch.Tensor, torch.dtype, torch.device, str, bytes, int, float, complex, type, ModuleType, type(None))


class run_eagerly:
    """A context in which compiled code that holds a model runs eagerly. Several may overlap in any order.

    It makes no difference what is compiled, when, or whether torch._dynamo was imported before. A callable holds the
    model if a module of the model is reached from its closure, the globals that it names, its object or its arguments.

    Args:
        layers: The layers of the model.
        on_call: Called with the name of each callable that runs eagerly. For a compiled layer this is the layer's name.
    """

    _open: dict[int, run_eagerly] = {}  # noqa: RUF012 - shared on purpose
    _calls = CompiledCalls(lambda *call: run_eagerly._decide(*call))

    def __init__(self, layers: Layers, on_call: Callable[[str], object] | None = None) -> None:
        self._names = {id(module): name for name, module in layers.modules.items()}
        self._on_call = on_call

    def __enter__(self) -> None:
        run_eagerly._open[id(self)] = self
        run_eagerly._calls.intercept()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run_eagerly._open.pop(id(self), None)
        if not run_eagerly._open:
            run_eagerly._calls.release()

    @staticmethod
    def _decide(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a compiled callable is to run eagerly."""
        reached = {id(module) for module in _modules(function, args, kwargs)}
        holding = [context for context in list(run_eagerly._open.values()) if not reached.isdisjoint(context._names)]
        for context in holding:
            if context._on_call is not None:
                context._on_call(context._name_of(function))
        return bool(holding)

    def _name_of(self, function: Any) -> str:
        """Return the name of the layer that is compiled, or else that of the function."""
        of_torch = str(getattr(function, "__module__", None)).startswith("torch.")
        module = next(_modules(function), None) if of_torch else getattr(function, "__self__", None)
        name = getattr(function, "__qualname__", type(function).__name__)
        return self._names.get(id(module)) or (type(module).__name__ if of_torch and module is not None else name)


def _modules(*roots: Any) -> Iterator[nn.Module]:
    """Yield the modules that callables and other objects lead to."""
    todo, seen = list(roots), set[int]()
    while todo and len(seen) < _MOST_OBJECTS:
        found = todo.pop()
        if isinstance(found, _LEAVES) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, nn.Module):
            yield from nn.Module.modules(found)
        else:
            todo += _inside(found)


def _inside(found: Any) -> Iterator[Any]:
    if isinstance(found, MethodType):
        yield from (found.__self__, found.__func__)
    elif isinstance(found, FunctionType):
        # Only the globals that the code names: all globals of a test's module would lead to every model in it.
        for cell in found.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # the variable has no value yet
                continue
        yield from (found.__defaults__, found.__kwdefaults__)
        if not str(found.__module__).startswith("torch."):
            yield from (found.__globals__.get(name) for name in _names(found.__code__))
    elif isinstance(found, functools.partial):
        yield from (found.func, found.args, found.keywords)
    elif isinstance(found, dict):
        yield from dict.values(found)  # a subclass may run code in its own `values`
    elif isinstance(found, (list, tuple, set, frozenset)):
        yield from found
    elif not str(type(found).__module__).startswith("torch."):
        attributes = getattr(found, "__dict__", None)
        yield from attributes.values() if isinstance(attributes, dict) else ()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
