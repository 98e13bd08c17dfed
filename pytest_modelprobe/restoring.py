"""Put a model back as it was: tensors bit for bit, attributes of its modules, gradients; and the settings of torch."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from ._torch import CUDNN, is_view, storage_key, without_dispatch_modes, without_torch_function
from .memory import as_bytes, has_bytes

# What register_forward_hook and its like change: hooks come and go as their owners want.
_HOOKS = frozenset(key for key in vars(nn.Module()) if "hook" in key)

# By exact type: a subclass may refuse to be cleared (transformers' ModelOutput does).
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)


def preserved(model: nn.Module, *, values: bool = True) -> ModelState:
    """Put `model` back on exit from a `with` block, also after an exception; see `ModelState`.

    >>> model = nn.BatchNorm1d(3)
    >>> with preserved(model):
    ...     _ = model.double()(torch.ones(8, 3).double())
    ...     int(model.num_batches_tracked)
    1
    >>> int(model.num_batches_tracked), model.weight.dtype
    (0, torch.float32)
    """
    return ModelState(model, values=values)


@contextmanager
def hooks_preserved(model: nn.Module) -> Iterator[None]:
    """Take away on exit the hooks that came meanwhile, which a `ModelState` leaves alone.

    A model that registers hooks in its first forward, as those of transformers do, says so in an attribute: where that
    is put back, the hooks have to go too, or the next forward registers them twice.

    >>> model = nn.Linear(2, 2)
    >>> with hooks_preserved(model):
    ...     _ = model.register_forward_hook(lambda *_: None)
    >>> len(model._forward_hooks)
    0
    """
    containers = [
        value
        for module in model.modules()
        for key, value in vars(module).items()
        if key in _HOOKS and isinstance(value, dict)
    ]
    before = [set(hooks) for hooks in containers]
    try:
        yield
    finally:
        for hooks, known in zip(containers, before, strict=True):
            for key in hooks.keys() - known:
                del hooks[key]


@contextmanager
def lazy_preserved(model: nn.Module) -> Iterator[None]:
    """Make lazy again on exit the modules that got their shapes meanwhile, which a `ModelState` leaves alone.

    >>> model = nn.LazyLinear(2)
    >>> with lazy_preserved(model):
    ...     _ = model(torch.ones(1, 3))
    ...     model
    Linear(in_features=3, out_features=2, bias=True)
    >>> model
    LazyLinear(in_features=0, out_features=2, bias=True)
    """
    with _modes_off():
        modules = [_Lazy(module) for module in model.modules() if _is_lazy(module)]
    try:
        yield
    finally:
        with _modes_off():
            for module in modules:
                module.restore()


def has_lazy(model: nn.Module) -> bool:
    """Whether the model has a module that waits for an input to know its shapes."""
    return any(map(_is_lazy, model.modules()))


@contextmanager
def settings_preserved() -> Iterator[None]:
    """Put back on exit the settings of torch for the whole process, which a forward may have changed.

    >>> with settings_preserved():
    ...     torch.set_default_dtype(torch.float64)
    >>> torch.ones(1).dtype
    torch.float32
    """
    before = [(change, now()) for now, change in _SETTINGS]
    try:
        yield
    finally:
        for (change, was), (now, _) in zip(before, _SETTINGS, strict=True):
            if now() != was:
                change(*was)


_SETTINGS: tuple[tuple[Callable[[], tuple[Any, ...]], Callable[..., object]], ...] = (
    (lambda: (torch.get_default_dtype(),), torch.set_default_dtype),
    (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda on, warn_only: torch.use_deterministic_algorithms(on, warn_only=warn_only),
    ),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        torch.autograd.set_detect_anomaly,
    ),
    # Not the properties of torch.backends, which cannot be set where they are frozen.
    *(((lambda read=read: (read(),)), change) for read, change in CUDNN),
)
"""How each is read, and how it is set to what was read."""


class ModelState:
    """What a model is at this moment, to be put back with `restore`, any number of times.

    Put back, on the same objects and in the same memory, are:

    * parameters, buffers and tensors that are attributes, or in a list, dict or set that is one:
      their bits, device, dtype, requires_grad and gradients (the same tensors, the same bits).
      Memory that did not change is not written to, and no version counter moves.
    * all attributes of all modules: those set get their old value, those added go. Lists, dicts
      and sets, `_modules` and `_buffers` among them, get their contents back, one level deep.

    Left alone are hooks, what attributes refer to beyond that level, and the bits of sparse, fake
    and meta tensors. A lazy module that has seen no input keeps the shapes it gets meanwhile, but
    for `lazy_preserved`; only its mode is put back.

    Args:
        model: The model; its tensors' memory is copied once.
        values: False copies no memory and puts no bits back: for a forward that cannot change any.
    """

    def __init__(self, model: nn.Module, *, values: bool = True) -> None:
        self._values = values
        self._containers: dict[int, _Part] = {}  # by id, so that shared ones come once
        self._tensors: dict[int, _TensorState] = {}
        self._memory: dict[int, _Memory] = {}  # by address
        with _modes_off():
            for module in model.modules():
                self._remember_module(module)
            for tensor in chain(model.parameters(), model.buffers()):
                self._remember_tensor(tensor)  # those of a ScriptModule are no attributes

    def __enter__(self) -> ModelState:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Put everything back as it was when this state was taken."""
        with _modes_off():
            parts: list[_Part] = [*self._containers.values(), *self._tensors.values()]
            for part in (*parts, *self._memory.values()):
                part.restore()
        torch.clear_autocast_cache()  # of copies, in another dtype, of the weights as they were meanwhile

    def _remember_module(self, module: nn.Module) -> None:
        names = vars(module)
        if _is_lazy(module):
            self._containers[id(names)] = _Mode(names)
            return
        self._containers[id(names)] = _Attributes(names)
        for value in [value for key, value in names.items() if key not in _HOOKS]:
            self._remember_tensor(value)
            if type(value) in _CONTAINERS:
                self._containers[id(value)] = _Contents(value)
                for item in value.values() if isinstance(value, dict) else value:
                    self._remember_tensor(item)

    def _remember_tensor(self, tensor: object) -> None:
        if not isinstance(tensor, torch.Tensor) or is_lazy(tensor) or id(tensor) in self._tensors:
            return
        state = _TensorState(tensor)
        self._remember_tensor(state.grad)  # first: it must fit again before it is assigned
        self._tensors[id(tensor)] = state
        for inner in _inner_tensors(tensor):
            self._remember_tensor(inner)
        if self._values and has_bytes(tensor):
            storage = tensor.untyped_storage()
            if storage_key(storage) not in self._memory:
                self._memory[storage_key(storage)] = _Memory(storage)


class _Part(Protocol):
    """A part of a model that can be put back."""

    def restore(self) -> None:
        """Put it back."""


class _Contents:
    """What a list, dict or set holds."""

    def __init__(self, container: Any) -> None:
        self._container = container
        self._contents = container.copy()

    def restore(self) -> None:
        self._container.clear()
        add = getattr(self._container, "extend", None) or self._container.update
        add(self._contents)


class _Attributes:
    """What a module's `__dict__` holds, hooks excepted."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._values = {key: value for key, value in names.items() if key not in _HOOKS}

    def restore(self) -> None:
        for key in self._names.keys() - self._values.keys() - _HOOKS:
            del self._names[key]
        self._names.update(self._values)


class _Mode:
    """Whether a lazy module was training."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._training = names["training"]

    def restore(self) -> None:
        self._names["training"] = self._training


class _Lazy:
    """A lazy module that has seen no input: its class, its attributes, its tensors without shapes, the hooks it takes.

    Those are the hooks whose handles are attributes: of any other hook the module does not know.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._class = module, type(module)
        names = vars(module)
        self._attributes = _Attributes(names)
        values = [value for key, value in names.items() if key not in _HOOKS]
        self._contents = [_Contents(value) for value in values if type(value) in _CONTAINERS]
        self._tensors = [
            (tensor, type(tensor), tensor.data, tensor.requires_grad)
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None and is_lazy(tensor)
        ]
        keys = [value.id for value in values if isinstance(value, RemovableHandle)]
        hooked = [hooks for name, hooks in names.items() if name in _HOOKS and isinstance(hooks, dict)]
        self._hooks = [(hooks, {key: hooks[key] for key in keys if key in hooks}) for hooks in hooked]

    def restore(self) -> None:
        self._module.__class__ = self._class
        self._attributes.restore()
        for contents in self._contents:
            contents.restore()
        for tensor, kind, data, requires_grad in self._tensors:
            tensor.grad = None
            tensor.data = data
            tensor.__class__ = kind
            tensor.requires_grad_(requires_grad)
        for hooks, own in self._hooks:
            others = {key: hook for key, hook in hooks.items() if key not in own}
            hooks.clear()
            hooks.update({**own, **others})  # they came first


class _TensorState:
    """Which memory a tensor looks at, and what autograd knows of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._place = tensor.data if has_bytes(tensor) else None
        self._is_leaf = tensor.is_leaf
        self._requires_grad = tensor.requires_grad
        self.grad = tensor.grad if tensor.is_leaf else None

    def restore(self) -> None:
        tensor = self._tensor
        if self._place is not None and not _same_place(tensor, self._place):
            tensor.data = self._place  # module.to() gave it another
        if not self._is_leaf:
            return
        if not tensor.is_leaf and not is_view(tensor):
            tensor.detach_()  # something in-place made it part of a graph
        if tensor.is_leaf:
            if tensor.requires_grad != self._requires_grad:
                tensor.requires_grad_(self._requires_grad)
            if tensor.grad is not self.grad:
                tensor.grad = self.grad


class _Memory:
    """The bytes of a storage: whole, so that views, overlaps and ties need no thought."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._bytes = as_bytes(storage).clone()

    def restore(self) -> None:
        if self._storage.nbytes() != self._bytes.numel():
            self._storage.resize_(self._bytes.numel())
        now = as_bytes(self._storage)
        if not torch.equal(now, self._bytes):  # memory that did not change may be read-only
            now.copy_(self._bytes)


@contextmanager
def _modes_off() -> Iterator[None]:
    """Work on the tensors themselves, whatever fake mode or default device is around."""
    with without_dispatch_modes(), without_torch_function():
        yield


def _is_lazy(module: nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and is_lazy(tensor) for tensor in tensors)


def _inner_tensors(tensor: Any) -> list[object]:
    """What a wrapper is made of: a DTensor's local shard, for one."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return []
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        has_bytes(a)
        and storage_key(a.untyped_storage()) == storage_key(b.untyped_storage())
        and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        and a.storage_offset() == b.storage_offset()
    )
