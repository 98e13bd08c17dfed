"""Put a model back as it was: tensors bit for bit, gradients, all that its attributes lead to; and torch's settings."""

from __future__ import annotations

import argparse
import functools
import itertools
import operator
import random
import sys
import types
from array import array
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytest_modelprobe._torch import CUDNN, is_view, storage_key, without_dispatch_modes, without_torch_function

from .memory import as_bytes, has_bytes

# What register_forward_hook and its like change.
_HOOKS = frozenset(key for key in vars(nn.Module()) if "hook" in key)

_MOST_OBJECTS = 20_000  # remembered beside modules and what stands in these; some milliseconds per thousand
_LONG = 200  # characters of a name in a note, beyond which what is deeper has the same
_MOST_BYTES = 1 << 30  # of arrays that are no tensors, each: an index of a search engine is not copied for a forward


def preserved(model: nn.Module, *, values: bool = True, lazy: bool = True) -> ModelState:
    """Put `model` back on exit from a `with` block, also after an exception; see `ModelState`.

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
    before = _Settings()
    try:
        yield
    finally:
        before.restore()


class ModelState:
    """What a model is at this moment, to be put back with `restore`, any number of times.

    Put back, on the same objects and in the same memory, are:

    * parameters, buffers and all other tensors: their bits, device, dtype, requires_grad and gradients (the same
      tensors, the same bits). Memory that did not change is not written to, and no version counter moves.
    * attributes of modules: those set get their old value, those added go.
    * what attributes lead to, however deep: the contents of lists, dicts, sets and their subclasses, of arrays, the
      states of random generators, the attributes of objects, with `__slots__` or without, an optimizer's among them.
    * hooks of modules: those that came go, those that went come back.
    * lazy modules that had seen no input: they are lazy again.
    * the settings of torch for the whole process.

    Left alone are the bits of sparse, fake and meta tensors, what a closure or a class holds, and the objects of the
    standard library and of torch itself that are none of those above. How far an iterator was read cannot be put back,
    and there is an end to the number of objects looked at: `notes` say so.

    Args:
        model: The model; its tensors' memory is copied once.
        values: False copies no memory of tensors and puts no bits back: for a forward that cannot change any.
        lazy: False leaves lazy modules the shapes that they get meanwhile; only their mode is put back.
        generators: False leaves the model's own random generators where they are, so that what depends on them is
            another when it runs again.
    """

    def __init__(self, model: nn.Module, *, values: bool = True, lazy: bool = True, generators: bool = True) -> None:
        self.notes: list[str] = []
        """What cannot be put back."""
        self._values, self._lazy, self._with_generators = values, lazy, generators
        self._generators: list[_Generator] = []
        self._settings = _Settings()
        self._known: set[int] = set()
        self._parts: list[_Part] = []
        self._memory: dict[int, _Memory] = {}  # by address
        self._late: list[_Part] = []
        self._ways: dict[type, tuple[_Way, ...]] = {}
        self._found: deque[tuple[str, Any]] = deque()
        with _modes_off():
            for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
                self.remember(name, tensor)  # those of a ScriptModule are no attributes
            for name, module in reversed(list(model.named_modules())):  # those inside are known then
                self.remember(name, module)
            self._follow()

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
        self._settings.restore()
        with _modes_off():
            for part in (*self._parts, *self._memory.values(), *self._late):
                part.restore()
        torch.clear_autocast_cache()  # of copies, in another dtype, of the weights as they were meanwhile

    def draw(self) -> None:
        """Draw a number from each random generator of the model, so that what depends on one will be another."""
        for generator in self._generators:
            generator.draw()

    # --- remembering: a method for each kind of value; those inside are found, and remembered later -------------------

    def remember(self, name: str, value: Any) -> None:
        """Remember a value in the ways of its type, once."""
        if id(value) not in self._known:
            self._known.add(id(value))
            for way in self._ways_of(type(value)):
                way(self, name, value)

    def remember_module(self, name: str, module: Any) -> None:
        """Remember a module: its attributes, its hooks, and at once what stands in these, as all modules have some."""
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
            if key not in _HOOKS and self._ways_of(type(value)):
                self.remember(prefix + key, value)

    def remember_tensor(self, name: str, tensor: Any) -> None:
        """Remember a tensor, its gradient, what it is made of, and its memory."""
        self._known.add(id(tensor))
        if is_lazy(tensor):
            return
        state = _TensorState(tensor)
        if state.grad is not None:
            self.remember(name, state.grad)  # first: it must fit again before it is assigned
        self._parts.append(state)
        for inner in _inner_tensors(tensor):
            self.remember(name, inner)
        if tensor.__dict__:
            self.remember_attributes(name, tensor)
        if self._values and has_bytes(tensor):
            storage = tensor.untyped_storage()
            if storage_key(storage) not in self._memory:
                self._memory[storage_key(storage)] = _Memory(storage)

    def remember_items(self, name: str, items: Iterable[Any]) -> None:
        """Find what is in something that cannot be changed itself."""
        self._find(name, enumerate(items))

    def remember_mapping(self, name: str, mapping: Any) -> None:
        """Remember what is in a dict."""
        contents = _Mapping(mapping)
        self._parts.append(contents)
        self._find(name, contents.pairs)
        self._find(f"{name}.keys()", ((None, key) for key, _ in contents.pairs))

    def remember_contents(self, name: str, container: Any) -> None:
        """Remember what is in a list, a set, a deque."""
        contents = _Contents(container)
        self._parts.append(contents)
        self._find(name, enumerate(contents.contents))

    def remember_attributes(self, name: str, owner: Any) -> None:
        """Remember the attributes of an object that is no module."""
        try:
            names = owner.__dict__
        except Exception:  # noqa: BLE001 - a proxy for what is not there
            return
        attributes = _Attributes(names)
        self._parts.append(attributes)
        self._find(name, attributes.values.items(), "{}.{}")

    def remember_slots(self, name: str, owner: Any) -> None:
        """Remember what stands in `__slots__`."""
        slots = _Slots(owner)
        self._parts.append(slots)
        self._find(name, slots.values.items(), "{}.{}")

    def remember_bytes(self, name: str, values: Any) -> None:
        """Remember what is in a bytearray or array."""
        self._parts.append(_Bytes(values))

    def remember_array(self, name: str, values: npt.NDArray[Any]) -> None:
        """Remember the elements of an array of numpy, where they can be written."""
        if values.nbytes > _MOST_BYTES:
            self.notes.append(f"{name} is an array of {values.nbytes:,} bytes, and stays as a forward leaves it")
        elif values.flags.writeable:
            self._parts.append(_Array(values))
            if values.dtype.hasobject:
                self._find(name, enumerate(values.flat))

    def remember_generator(self, name: str, generator: Any) -> None:
        """Remember the state of a random generator."""
        self._generators.append(_Generator(generator))
        if self._with_generators:
            self._parts.append(self._generators[-1])

    def note_iterator(self, name: str, iterator: Any) -> None:
        """Note what cannot be wound back."""
        self.notes.append(f"{name} is an iterator ({type(iterator).__name__}): what a forward takes of it is gone")

    def _find(self, name: str, items: Iterable[tuple[Any, Any]], form: str = "{}[{!r}]") -> None:
        for key, value in items:
            if self._ways_of(type(value)) and id(value) not in self._known:
                self._found.append((form.format(name, key) if len(name) < _LONG else name, value))

    def _follow(self) -> None:
        """Remember what was found, and what is found on the way, the nearest first."""
        for _ in range(_MOST_OBJECTS):
            if not self._found:
                return
            self.remember(*self._found.popleft())
        name, _ = self._found.popleft()
        self.notes.append(
            f"{name} and what comes after it stays as a forward leaves it: {_MOST_OBJECTS:,} objects in the attributes "
            "of the model were looked at"
        )
        self._found.clear()

    def _ways_of(self, kind: type) -> tuple[_Way, ...]:
        ways = self._ways.get(kind)
        if ways is None:
            ways = self._ways[kind] = _ways(kind)
        return ways


# --- the parts of a model that can be put back ------------------------------------------------------------------------


class _Part(Protocol):
    def restore(self) -> None:
        """Put it back."""


class _Settings:
    """The settings of torch."""

    def __init__(self) -> None:
        before = ((read, write, _tried(read)) for read, write in _SETTINGS)
        self._before = [(read, write, was) for read, write, was in before if was is not None]

    def restore(self) -> None:
        for read, write, was in self._before:
            if _tried(read) != was:
                write(*was)


class _Mapping:
    """What a dict holds, in its order. By the methods of dict itself: those of a subclass may refuse, or add up."""

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
    """What a list, deque or set holds."""

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
    """What a bytearray or array holds."""

    def __init__(self, values: Any) -> None:
        self._values, self._before = values, values[:]

    def restore(self) -> None:
        if self._values != self._before:
            self._values[:] = self._before


class _Attributes:
    """What the `__dict__` of an object holds."""

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
    """What stands in the `__slots__` of an object."""

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
        if self._array.tobytes() != self._elements.tobytes():  # memory that did not change may be read-only
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
    """The hooks of a module: those that came go, those that went come back, but for a watch that was closed meanwhile.

    A model that registers or removes hooks in its first forward says so in an attribute: where that is put back, the
    hooks have to follow, or the next forward registers them twice, or not at all.
    """

    def __init__(self, tables: list[dict[int, Any]]) -> None:
        self._tables = [(hooks, list(hooks.items())) for hooks in tables]
        self._ours = {key for hooks in tables for key, hook in hooks.items() if getattr(hook, "is_modelprobe", False)}

    def restore(self) -> None:
        for hooks, before in self._tables:
            wanted = {key: hook for key, hook in before if key not in self._ours or key in hooks}
            if list(hooks.items()) != list(wanted.items()):
                hooks.clear()
                hooks.update(wanted)


class _Mode:
    """Whether a lazy module was training."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._training = names["training"]

    def restore(self) -> None:
        self._names["training"] = self._training


class _Lazy:
    """A lazy module that has seen no input: its class, and its tensors without shapes."""

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


# --- how the values of a type are remembered --------------------------------------------------------------------------

_Way = Callable[[ModelState, str, Any], None]

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
"""Of each kind of random generator how its state is read and set, and a number drawn."""
_HOLDERS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)
"""Classes of the standard library that only hold what is given to them."""
_MADE_OF = ("torch.nn.", "torch.optim.", "torch.amp.", "torch.distributions.")
"""Rooms of torch of whose objects models are made; graphs, process groups and compilers hold half the process."""
_LIBRARIES = sys.stdlib_module_names | {"_pytest", "numpy", "pytest", "pytest_modelprobe", "torch"}
_PROCESS = frozenset({"asyncio", "concurrent", "io", "logging", "multiprocessing", "socket", "threading", "unittest"})
"""What is derived from these goes its own way while a model runs."""


def _ways(kind: type) -> tuple[_Way, ...]:
    """Return how the values of a type are remembered; nothing for those that cannot change, or are nobody's."""
    ways: list[_Way] = []
    if issubclass(kind, nn.Module):
        return ModelState.remember_module, *([ModelState.remember_slots] if _slots(kind) else [])
    if issubclass(kind, torch.Tensor):
        return (ModelState.remember_tensor,)
    if issubclass(kind, dict):
        ways.append(ModelState.remember_mapping)
    elif issubclass(kind, _CONTAINERS):
        ways.append(ModelState.remember_contents)
    elif issubclass(kind, (tuple, frozenset)):
        ways.append(ModelState.remember_items)
    elif issubclass(kind, (bytearray, array)):
        ways.append(ModelState.remember_bytes)
    elif issubclass(kind, np.ndarray):
        ways.append(ModelState.remember_array)
    elif issubclass(kind, tuple(_RANDOM)) and not issubclass(kind, random.SystemRandom):
        ways.append(ModelState.remember_generator)
    elif issubclass(kind, functools.partial):
        ways.append(lambda state, name, value: state.remember_items(name, (value.func, value.args, value.keywords)))
    if _is_of_models(kind):
        if kind.__dictoffset__:
            ways.append(ModelState.remember_attributes)
        if _slots(kind):
            ways.append(ModelState.remember_slots)
    elif issubclass(kind, Iterator):
        ways.append(ModelState.note_iterator)
    return tuple(ways)


def _is_of_models(kind: type) -> bool:
    """Whether the attributes of a class's objects are a model's, and not those of the process around it."""
    if issubclass(kind, type) or any(_room(base) in _PROCESS for base in kind.__mro__):
        return False
    return _room(kind) not in _LIBRARIES or f"{kind.__module__}.".startswith(_MADE_OF) or kind in _HOLDERS


def _room(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _slots(kind: type) -> list[types.MemberDescriptorType]:
    own = (vars(cls).values() for cls in kind.__mro__ if "__slots__" in vars(cls))
    return [slot for slot in itertools.chain.from_iterable(own) if isinstance(slot, types.MemberDescriptorType)]


_Setting = tuple[Callable[[], tuple[Any, ...]], Callable[..., object]]


def _setting(read: Callable[[], Any], write: Callable[[Any], object]) -> _Setting:
    return (lambda: (read(),)), write


def _settings() -> Iterator[_Setting]:
    """Yield how each setting of torch is read, and how it is set to what was read."""
    yield _setting(torch.get_default_dtype, torch.set_default_dtype)
    yield _setting(torch.is_grad_enabled, lambda on: torch.set_grad_enabled(on))
    yield _setting(torch.get_num_threads, torch.set_num_threads)
    yield _setting(torch.is_warn_always_enabled, torch.set_warn_always)
    yield _setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    yield (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda on, warn_only: torch.use_deterministic_algorithms(on, warn_only=warn_only),
    )
    yield (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        torch.autograd.set_detect_anomaly,
    )
    # Not the properties of torch.backends, which cannot be set where they are frozen.
    for read, write in CUDNN:
        yield _setting(read, write)
    yield _setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)
    for device in filter(torch.amp.is_autocast_available, ("cpu", "cuda")):
        yield _setting(
            functools.partial(torch.is_autocast_enabled, device), functools.partial(torch.set_autocast_enabled, device)
        )
        yield _setting(
            functools.partial(torch.get_autocast_dtype, device), functools.partial(torch.set_autocast_dtype, device)
        )

    backends = (torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn)
    for backend, operation in itertools.product(backends, ("matmul", "conv", "rnn")):
        one = getattr(backend, operation, None)
        if hasattr(one, "fp32_precision"):  # torch 2.9 and newer
            change = functools.partial(setattr, one, "fp32_precision")
            yield _setting(functools.partial(getattr, one, "fp32_precision"), change)


_SETTINGS = tuple(_settings())


def _tried(read: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """Return a setting; None where it has no value: of the two ways to set a precision, the older one may have none."""
    try:
        return read()
    except RuntimeError:
        return None


# --- small questions --------------------------------------------------------------------------------------------------


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
