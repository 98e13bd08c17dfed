"""Hooks that know their module and do nothing in a copy of it, and among them those that change what it computes.

`copy.deepcopy` and `torch.save` take a module's hooks with it. A closure as a hook could not be pickled, and in a copy
it would record the copy's forwards as the model's. These hooks have a weak reference to their module instead, and turn
into something inert when they are copied or pickled.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import nn
from torch.utils.hooks import RemovableHandle

from pytest_modelprobe._torch import hook_tables


def _nothing(key: int) -> tuple[Any, ...]:
    """Return what a hook is pickled as: it takes any arguments, returns `None`, and exists without this package.

    Its handle goes with it, since torch, as it loads one, gives no hook that is registered later the same number. That
    hook would be called with keyword arguments, as ours was.
    """
    handle = RemovableHandle(OrderedDict())
    handle.id = key
    return getattr, (contextlib.nullcontext(handle), "__exit__")


class ModuleHook:
    """A hook on one module. If it is copied or pickled with the module, it does nothing."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing(self._key())

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert(self._key())

    def _key(self) -> int:
        """Return the number of the hook, or -1 if it is on its module no more."""
        module = self._module()
        tables = [] if module is None else hook_tables(module)
        return next((key for table in tables for key, hook in table.items() if hook is self), -1)


class ChangingHook(ModuleHook):
    """A hook that changes what a module computes. While it is there, the code of the module counts as changed."""

    __slots__ = ()


class _Inert:
    """What a hook becomes in a copy of its module. It does nothing, and removes itself at the copy's first call."""

    __slots__ = ("_key",)
    is_modelprobe = True

    def __init__(self, key: int) -> None:
        self._key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing(self._key)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return self

    def __call__(self, module: nn.Module, *given: Any) -> None:
        tables = hook_tables(module)
        for key in [key for table in tables for key, hook in table.items() if isinstance(hook, _Inert)]:
            for table in tables:
                table.pop(key, None)


def changing_hooks(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    """Return the numbers of the hooks that change what the modules compute."""
    tables = (table for module in modules for table in (module._forward_pre_hooks, module._forward_hooks) if table)
    return tuple(key for table in tables for key, hook in table.items() if isinstance(hook, ChangingHook))
