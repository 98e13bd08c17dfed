"""Save and restore the state of a model: tensors, gradients, everything its attributes refer to, settings.

A run and a check leave no trace in the user's model. Everything is put back on the same objects and in the same
memory, because a tied parameter, a view or an optimizer may refer to them. How far that reaches is decided by type, in
`_savers_of`, and notes say where it ends.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import operator
import random
import sys
import types
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytest_modelprobe._torch import is_view, storage_key, without_dispatch_modes, without_torch_function
from pytest_modelprobe.interrupts import held

from .memory import as_bytes, has_dense_storage, is_strided
from .process import Settings, read_settings, restore_settings

# The attributes that `register_forward_hook` and its like change. They have a rule of their own, see `_Hooks`.
_HOOKS = frozenset(key for key in vars(nn.Module()) if "hook" in key)

_MOST_OBJECTS = 20_000  # objects besides modules and their attributes. A thousand take some milliseconds
_LONG = 200  # characters of a name in a note. Deeper values get the name of their container
_MOST_BYTES = 1 << 30  # of one array that is not a tensor: the index of a search engine is not copied for a forward


def preserved(model: nn.Module, *, values: bool = True, lazy: bool = True) -> ModelState:
    """Return a `with` block that restores `model` at its end, also after an exception. See `ModelState`.

    >>> model = nn.BatchNorm1d(3)
    >>> with preserved(model):
    ...     _ = model.double()(torch.ones(8, 3).double())
    ...     int(model.num_batches_tracked)
    1
    >>> int(model.num_batches_tracked), model.weight.dtype
    (0, torch.float32)
    """
    return ModelState(model, values=values, lazy=lazy)


def has_lazy(model: nn.Module) -> bool:
    """Whether the model has a lazy module that has seen no input."""
    return any(map(_is_lazy, model.modules()))


class ModelState:
    """The state of a model at the moment when this is made.

    `restore` puts it back, any number of times, and so does the end of a `with` block. These are put back, on the same
    objects and in the same memory:

    * parameters, buffers and all other tensors: their bits, device, dtype, requires_grad and gradients (the same
      tensors, the same bits). Memory that did not change is not written to, and no version counter moves.
    * attributes of modules: those that were set get their old value, and those that were added are deleted.
    * what attributes refer to, however deep: the contents of lists, dicts, sets and their subclasses, of arrays, the
      states of random generators, the attributes of objects, with `__slots__` or without, an optimizer's among them.
    * hooks of modules: those that were added are removed, and those that were removed are added.
    * lazy modules that had seen no input: they are lazy again.

    A `with` block also puts back the settings that the process had when it began, see `process.SETTINGS`. It holds
    interrupts, so that nothing is left half restored. Code of the user inside it runs in `interruptible`.

    The bits of sparse, nested and fake tensors are left alone, and those of tensors whose storage does not hold their
    elements. Iterators cannot be wound back, and the number of objects is limited. `notes` say all this. Also left
    alone are the bits of meta tensors, what a closure or a class holds, and the objects of the standard library and of
    torch itself that are not among those above.

    Args:
        model: The model. The memory of its tensors is copied once.
        values: Whether to copy the memory of tensors and put their bits back. A forward that cannot change any, such as
            one on fake tensors, does not need it.
        lazy: Whether lazy modules become lazy again. If False they keep the shapes that they get meanwhile, and only
            their mode is put back.
        generators: Whether to put back the model's own random generators. If False, what depends on them is different
            when the model runs again.
    """

    def __init__(self, model: nn.Module, *, values: bool = True, lazy: bool = True, generators: bool = True) -> None:
        self.notes: list[str] = []
        """What cannot be put back, in sentences."""
        self._values, self._lazy, self._with_generators = values, lazy, generators
        self._generators: list[_Generator] = []
        self._blocks: list[tuple[held, Settings]] = []
        self._known: set[int] = set()
        self._parts: list[_Part] = []
        self._memory: dict[int, _Memory] = {}  # by address
        self._late: list[_Part] = []  # hooks and lazy classes, which are put back after all attributes
        self._savers_by_type: dict[type, tuple[_Saver, ...]] = {}
        self._found: deque[tuple[str, Any]] = deque()
        with held(), _modes_off():
            for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
                self.save(name, tensor)  # first: other objects may be too many, and weights must not be among the rest
            # The innermost first, so that the modules inside one are known when its attributes are saved.
            for name, module in reversed(list(model.named_modules())):
                self.save(name, module)
            self._follow()

    def __enter__(self) -> ModelState:
        block = held()
        block.__enter__()
        self._blocks.append((block, read_settings()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        block, settings = self._blocks.pop()
        try:
            restore_settings(settings)
            self.restore()
        finally:
            block.__exit__()

    def restore(self) -> None:
        """Put the model back as it was when this state was taken."""
        with _modes_off():
            for part in (*self._parts, *self._memory.values(), *self._late):
                part.restore()
        # It has copies of the weights, in another dtype, as they were meanwhile. Under an autocast of the caller's they
        # outlive this block, and the model would compute with them.
        torch.clear_autocast_cache()

    def draw(self) -> None:
        """Draw a number from each random generator of the model, so that what depends on one will be different."""
        for generator in self._generators:
            generator.draw()

    # --- a method for each kind of value; the values inside are found, and saved later --------------------------------

    def save(self, name: str, value: Any) -> None:
        """Save a value in the ways of its type, once."""
        if id(value) not in self._known:
            self._known.add(id(value))
            for save in self._savers(type(value)):
                save(self, name, value)

    def save_module(self, name: str, module: Any) -> None:
        """Save a module: its attributes, their values, and its hooks."""
        names = vars(module)
        lazy = _is_lazy(module)
        if lazy and not self._lazy:
            self._parts.append(_Mode(names))
            return
        hooks = [value for key, value in names.items() if key in _HOOKS and isinstance(value, dict)]
        self._late.append(_Hooks(hooks))
        if lazy:
            self._late.append(_Lazy(module))
            self.notes.append(f"{name or 'the model'} is lazy and has seen no input: its shapes are those of this run")
        self._parts.append(_Attributes(names, without=_HOOKS))
        prefix = f"{name}." if name else ""
        for key, value in names.items():
            if key not in _HOOKS and self._savers(type(value)):
                self.save(prefix + key, value)

    def save_tensor(self, name: str, tensor: Any) -> None:
        """Save a tensor, its gradient, the tensors inside a subclass, and its memory."""
        self._known.add(id(tensor))
        if is_lazy(tensor):
            return
        state = _TensorState(tensor)
        if state.grad is not None:
            # First: torch takes a gradient only if its shape, dtype and device fit, and they may have changed too.
            self.save(f"{name}.grad", state.grad)
        self._parts.append(state)
        inner = _inner_tensors(tensor)
        for one in inner:
            self.save(name, one)
        self.save_attributes(name, tensor)
        if has_dense_storage(tensor):
            storage = tensor.untyped_storage()
            if self._values and storage_key(storage) not in self._memory:
                self._memory[storage_key(storage)] = _Memory(storage)
        elif self._values and not (inner or tensor.is_meta):
            self.notes.append(f"{name} has no dense memory that holds its elements: they stay as a forward leaves them")

    def save_items(self, name: str, items: Iterable[Any]) -> None:
        """Find the items of a container that itself cannot be changed."""
        self._find(name, enumerate(items))

    def save_mapping(self, name: str, mapping: Any) -> None:
        """Save the items of a dict."""
        contents = _Mapping(mapping)
        self._parts.append(contents)
        if contents.pairs:
            self._find(name, contents.pairs)
            self._find(f"{name}.keys()", ((None, key) for key, _ in contents.pairs))

    def save_contents(self, name: str, container: Any) -> None:
        """Save the items of a list, a set or a deque."""
        contents = _Contents(container)
        self._parts.append(contents)
        self._find(name, enumerate(contents.contents))

    def save_attributes(self, name: str, owner: Any) -> None:
        """Save the attributes of an object that is no module."""
        try:
            names = owner.__dict__
        except Exception:  # noqa: BLE001 - a proxy for something that is not there may raise anything
            return
        attributes = _Attributes(names)
        self._parts.append(attributes)
        self._find(name, attributes.values.items(), "{}.{}")

    def save_slots(self, name: str, owner: Any) -> None:
        """Save the values of `__slots__`."""
        slots = _Slots(owner)
        self._parts.append(slots)
        self._find(name, slots.values.items(), "{}.{}")

    def save_bytes(self, name: str, values: Any) -> None:
        """Save the contents of a bytearray or array."""
        self._parts.append(_Bytes(values))

    def save_array(self, name: str, values: npt.NDArray[Any]) -> None:
        """Save the elements of an array of numpy if it is writable and not too large."""
        if values.nbytes > _MOST_BYTES:
            self.notes.append(f"{name} is an array of {values.nbytes:,} bytes, and stays as a forward leaves it")
        elif values.flags.writeable:
            self._parts.append(_Array(values))
            if values.dtype.hasobject:
                self._find(name, enumerate(values.flat))

    def save_generator(self, name: str, generator: Any) -> None:
        """Save the state of a random generator."""
        self._generators.append(_Generator(generator))
        if self._with_generators:
            self._parts.append(self._generators[-1])

    def note_iterator(self, name: str, iterator: Any) -> None:
        """Note that an iterator cannot be restored."""
        self.notes.append(f"{name} is an iterator ({type(iterator).__name__}): what a forward takes of it is gone")

    def _find(self, name: str, items: Iterable[tuple[Any, Any]], form: str = "{}[{!r}]") -> None:
        for key, value in items:
            if self._savers(type(value)) and id(value) not in self._known:
                self._found.append((form.format(name, key) if len(name) < _LONG else name, value))

    def _follow(self) -> None:
        """Save the values that were found, and those found meanwhile. The nearest to a module come first."""
        for _ in range(_MOST_OBJECTS):
            if not self._found:
                return
            self.save(*self._found.popleft())
        name, _ = self._found.popleft()
        self.notes.append(
            f"{name} and what comes after it stays as a forward leaves it: {_MOST_OBJECTS:,} objects in the attributes "
            "of the model were looked at"
        )
        self._found.clear()

    def _savers(self, kind: type) -> tuple[_Saver, ...]:
        savers = self._savers_by_type.get(kind)
        if savers is None:
            savers = self._savers_by_type[kind] = _savers_of(kind)
        return savers


# --- the parts of a model that can be restored ------------------------------------------------------------------------


class _Part(Protocol):
    def restore(self) -> None:
        """Restore the saved state."""


class _Mapping:
    """The items of a dict, in order. They are set by the methods of dict: those of a subclass may refuse, or add up."""

    def __init__(self, mapping: Any) -> None:
        self._mapping = mapping
        self._base: Any = OrderedDict if isinstance(mapping, OrderedDict) else dict
        self.pairs = list(self._base.items(mapping))

    def restore(self) -> None:
        now = self._base.items(self._mapping)
        if len(now) == len(self.pairs) and all(
            k is key and v is value for (k, v), (key, value) in zip(now, self.pairs, strict=True)
        ):
            return
        self._base.clear(self._mapping)
        for key, value in self.pairs:
            self._base.__setitem__(self._mapping, key, value)


class _Contents:
    """The items of a list, deque or set."""

    def __init__(self, container: Any) -> None:
        self._container = container
        self._base: Any = next(kind for kind in _CONTAINERS if isinstance(container, kind))
        self.contents = list(self._base.__iter__(container))

    def restore(self) -> None:
        now = list(self._base.__iter__(self._container))
        if len(now) != len(self.contents) or not all(map(operator.is_, now, self.contents)):
            self._base.clear(self._container)
            add = self._base.update if self._base is set else self._base.extend
            add(self._container, self.contents)


class _Bytes:
    """The contents of a bytearray or array."""

    def __init__(self, values: Any) -> None:
        self._values, self._before = values, values[:]

    def restore(self) -> None:
        if self._values != self._before:
            self._values[:] = self._before


class _Attributes:
    """The contents of the `__dict__` of an object. Only what changed is written."""

    def __init__(self, names: dict[str, Any], *, without: frozenset[str] = frozenset()) -> None:
        self._names, self._without = names, without
        self.values = {key: value for key, value in names.items() if key not in without}

    def restore(self) -> None:
        for key in self._names.keys() - self.values.keys() - self._without:
            del self._names[key]
        for key, value in self.values.items():
            if self._names.get(key, _NOTHING) is not value:
                self._names[key] = value


class _Slots:
    """The values of the `__slots__` of an object."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._slots = _slots(type(owner))
        self.values = {slot.__name__: self._read(slot) for slot in self._slots}

    def _read(self, slot: Any) -> Any:
        try:
            return slot.__get__(self._owner)
        except AttributeError:
            return _NOTHING

    def restore(self) -> None:
        for slot in self._slots:
            value = self.values[slot.__name__]
            if self._read(slot) is value:
                continue
            if value is _NOTHING:
                slot.__delete__(self._owner)
            else:
                slot.__set__(self._owner, value)


class _Array:
    """The elements of an array of numpy."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array, self._elements = array, array.copy()

    def restore(self) -> None:
        if self._array.shape != self._elements.shape:
            self._array.resize(self._elements.shape, refcheck=False)
        # Compared as bytes, since a NaN is not equal to itself. Memory that did not change may be read-only.
        if self._array.tobytes() != self._elements.tobytes():
            np.copyto(self._array, self._elements)


class _Generator:
    """The state of a random generator."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._read, self._write, self._draw = next(_RANDOM[kind] for kind in _RANDOM if isinstance(generator, kind))
        self._state = self._read(generator)

    def restore(self) -> None:
        self._write(self._generator, self._state)

    def draw(self) -> None:
        self._draw(self._generator)


class _Hooks:
    """The hooks of a module: those that were added are removed, and those that were removed are added.

    A model that registers hooks in its first forward keeps an attribute that says so. If the attribute were restored
    and the hooks were not, the next forward would register them twice, or not at all. Our own hooks that were removed
    stay removed: their watch was closed meanwhile.
    """

    def __init__(self, tables: list[dict[int, Any]]) -> None:
        self._tables = [(hooks, list(hooks.items())) for hooks in tables]
        self._ours = {key for hooks in tables for key, hook in hooks.items() if getattr(hook, "is_modelprobe", False)}

    def restore(self) -> None:
        for hooks, before in self._tables:
            if not (hooks or before):
                continue
            wanted = {key: hook for key, hook in before if key not in self._ours or key in hooks}
            if list(hooks.items()) != list(wanted.items()):
                hooks.clear()
                hooks.update(wanted)


class _Mode:
    """The mode of a lazy module: whether it is training."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._training = names["training"]

    def restore(self) -> None:
        self._names["training"] = self._training


class _Lazy:
    """A lazy module that has seen no input: its class, which a forward changes, and its tensors without shapes."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._class = module, type(module)
        self._tensors = [
            (tensor, type(tensor), tensor.data, tensor.requires_grad)
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None and is_lazy(tensor)
        ]

    def restore(self) -> None:
        self._module.__class__ = self._class
        for tensor, kind, data, requires_grad in self._tensors:
            tensor.grad = None
            tensor.data = data
            tensor.__class__ = kind
            tensor.requires_grad_(requires_grad)


class _TensorState:
    """The memory that a tensor refers to, and its state in autograd."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._data = tensor.data if is_strided(tensor) else None
        self._place = None if self._data is None else _place(self._data)
        self._is_leaf = tensor.is_leaf
        self._requires_grad = tensor.requires_grad
        self.grad = tensor.grad if tensor.is_leaf else None

    def restore(self) -> None:
        tensor = self._tensor
        if self._data is not None and not (is_strided(tensor) and _place(tensor) == self._place):
            tensor.data = self._data  # it was replaced, as `module.to()` does
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
    """The bytes of a whole storage. By storages, views, overlaps and ties need no care."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._now = as_bytes(storage)
        self._before = self._now.clone()

    def restore(self) -> None:
        if self._storage.nbytes() != self._before.numel():
            self._storage.resize_(self._before.numel())
        # Memory that did not change may be read-only, and its version counter must not move.
        if not torch.equal(_words(self._now), _words(self._before)):
            self._now.copy_(self._before)


def _words(memory: torch.Tensor) -> torch.Tensor:
    """Return bytes as words of eight if none are left over: torch compares six times as many in the same time."""
    return memory.view(torch.int64) if memory.numel() % 8 == 0 else memory


@contextmanager
def _modes_off() -> Iterator[None]:
    """Work on the tensors themselves, whatever fake mode or default device is active."""
    with without_dispatch_modes(), without_torch_function():
        yield


# --- how the values of a type are saved -------------------------------------------------------------------------------

_Saver = Callable[[ModelState, str, Any], None]

_NOTHING = object()
_CONTAINERS = (list, deque, set)
_RANDOM: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object], Callable[[Any], object]]] = {
    torch.Generator: (
        torch.Generator.get_state,
        torch.Generator.set_state,
        lambda g: torch.rand((), generator=g, device=g.device),
    ),
    np.random.Generator: (
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
        lambda g: g.random(),
    ),
    np.random.BitGenerator: (lambda g: g.state, lambda g, state: setattr(g, "state", state), lambda g: g.random_raw()),
    np.random.RandomState: (
        np.random.RandomState.get_state,
        np.random.RandomState.set_state,
        np.random.RandomState.random_sample,
    ),
    random.Random: (random.Random.getstate, random.Random.setstate, random.Random.random),
}
"""For each kind of random generator: read its state, set it, draw a number."""
_HOLDERS = (types.SimpleNamespace, argparse.Namespace, ChainMap, UserDict, UserList, np.ma.MaskedArray)
"""Classes of the standard library and of numpy that are plain containers. They may hold a part of a model."""
_MADE_OF = ("torch.nn.", "torch.optim.", "torch.amp.", "torch.distributions.")
"""Packages of torch whose objects are parts of models. Objects of its other packages refer to half the process."""
_LIBRARIES = sys.stdlib_module_names | {"_pytest", "numpy", "pytest", "pytest_modelprobe", "torch"}
_PROCESS = frozenset({"asyncio", "concurrent", "io", "logging", "multiprocessing", "socket", "threading", "unittest"})
"""Packages of the standard library: objects whose classes derive from theirs run beside the model, and change on their
own while it runs."""


def _savers_of(kind: type) -> tuple[_Saver, ...]:
    """Return how the values of a type are saved: in no way if they cannot change, or are not part of a model."""
    savers: list[_Saver] = []
    if issubclass(kind, nn.Module):
        return ModelState.save_module, *([ModelState.save_slots] if _slots(kind) else [])
    if issubclass(kind, torch.Tensor):
        return (ModelState.save_tensor,)
    if issubclass(kind, dict):
        savers.append(ModelState.save_mapping)
    elif issubclass(kind, _CONTAINERS):
        savers.append(ModelState.save_contents)
    elif issubclass(kind, (tuple, frozenset)):
        savers.append(ModelState.save_items)
    elif issubclass(kind, (bytearray, array)):
        savers.append(ModelState.save_bytes)
    elif issubclass(kind, np.ndarray):
        savers.append(ModelState.save_array)
    # The generator of the operating system has no state.
    elif issubclass(kind, tuple(_RANDOM)) and not issubclass(kind, random.SystemRandom):
        savers.append(ModelState.save_generator)
    elif issubclass(kind, functools.partial):
        savers.append(lambda state, name, value: state.save_items(name, (value.func, value.args, value.keywords)))
    if _is_of_models(kind):
        if kind.__dictoffset__:
            savers.append(ModelState.save_attributes)
        if _slots(kind):
            savers.append(ModelState.save_slots)
    elif issubclass(kind, Iterator):
        savers.append(ModelState.note_iterator)
    return tuple(savers)


def _is_of_models(kind: type) -> bool:
    """Whether objects of a class may be parts of a model, and not of the process around it."""
    if issubclass(kind, type) or any(_top_package(base) in _PROCESS for base in kind.__mro__):
        return False
    return _top_package(kind) not in _LIBRARIES or f"{kind.__module__}.".startswith(_MADE_OF) or kind in _HOLDERS


def _top_package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _slots(kind: type) -> list[types.MemberDescriptorType]:
    own = (vars(cls).values() for cls in kind.__mro__ if "__slots__" in vars(cls))
    return [slot for slot in itertools.chain.from_iterable(own) if isinstance(slot, types.MemberDescriptorType)]


# --- helpers ----------------------------------------------------------------------------------------------------------


def _is_lazy(module: nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and is_lazy(tensor) for tensor in tensors)


def _inner_tensors(tensor: Any) -> list[object]:
    """Return the tensors inside a tensor subclass, such as a DTensor's local shard."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return []
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return where the elements of a strided tensor are. It stays the same unless the tensor's data are replaced."""
    storage = storage_key(tensor.untyped_storage())
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
