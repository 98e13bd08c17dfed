"""Compiled code that holds a watched model runs eagerly for a while, so that hooks run. Other code stays compiled.

A hook that is added after the first compiled call is not called, because torch does not check for new hooks. The stance
of `torch.compiler` would help, but it is one for the whole process: functions that have nothing to do with the model
would run eagerly too. So each compiled callable is asked whether the model can be reached from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

import torch
from torch import nn

from pytest_modelprobe._torch import CompiledCalls

from .layers import Layers

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
