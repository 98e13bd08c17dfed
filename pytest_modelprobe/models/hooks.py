"""Hooks that know their module, and do nothing in a copy of it; and among them those that change what it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import nn

from pytest_modelprobe._torch import hook_tables

_NOTHING = getattr, (contextlib.nullcontext(), "__exit__")
"""How a hook is pickled: takes any arguments, returns None, and is there where this package is not installed."""


class ModuleHook:
    """A hook on one module; copied or pickled with the module, it does nothing."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _NOTHING

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()


class ChangingHook(ModuleHook):
    """A hook that changes what a module computes: the code of the module counts as changed while it is there."""

    __slots__ = ()


class _Inert:
    """What a hook becomes in a copy of its module: nothing, and gone at the copy's first call."""

    __slots__ = ()
    is_modelprobe = True

    def __reduce__(self) -> tuple[Any, ...]:
        return _NOTHING

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()

    def __call__(self, module: nn.Module, *given: Any) -> None:
        tables = hook_tables(module)
        for key in [key for table in tables for key, hook in table.items() if isinstance(hook, _Inert)]:
            for table in tables:
                table.pop(key, None)


def changing_hooks(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    """Return the numbers of the hooks that change what the modules compute."""
    tables = (table for module in modules for table in (module._forward_pre_hooks, module._forward_hooks) if table)
    return tuple(key for table in tables for key, hook in table.items() if isinstance(hook, ChangingHook))
