"""Save and restore the settings of the process, and the state of a model: tensors, gradients, all its attributes.

A run and a check leave no trace. A model may set a default dtype, warning filters or a thread count, and leave them so:
then a test would change the tests after it. The table of settings is read before a run, and what differs is set back
after it. The model is put back on the same objects and in the same memory, because a tied parameter, a view or an
optimizer may refer to them. How far that reaches is decided by type, and notes say where it ends.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytest_modelprobe import _torch
from pytest_modelprobe._torch import is_view, storage_key, without_dispatch_modes, without_torch_function
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.interrupts import held
from pytest_modelprobe.record import gc_paused

from .tensors import as_bytes, has_dense_storage, is_strided, read_flags


class Setting(NamedTuple):
    """One row of the table."""

    name: str
    """Its name in the documentation."""
    get: Callable[[], Any]
    set: Callable[[Any], object]


Settings = list[tuple[Setting, Any]]
"""The type of settings, each with its value."""


@contextmanager
def settings_preserved() -> Iterator[None]:
    """Restore on exit the settings of the process.

    >>> with settings_preserved():
    ...     torch.set_default_dtype(torch.float64)
    >>> torch.ones(1).dtype
    torch.float32
    """
    before = read_settings()
    try:
        yield
    finally:
        restore_settings(before)


def read_settings() -> Settings:
    """Return the settings that have a value."""
    return [(one, was) for one in SETTINGS if (was := _read(one)) is not _NO_VALUE]


def restore_settings(before: Settings) -> None:
    """Set the settings that have another value now. All others are left alone: to set some takes long, or warns."""
    for one, was in before:
        if _read(one) != was:
            one.set(was)


_NO_VALUE = object()


def _read(one: Setting) -> Any:
    try:
        return one.get()
    # torch has two ways to set a precision. After the newer one the older one may raise instead of having a value.
    except RuntimeError:
        return _NO_VALUE


Autocast = tuple[str, torch.dtype, bool]
"""Type of device, dtype to which autocast casts there, and whether it is enabled."""

_DEVICES = ("cpu", "cuda", "mps", "xpu")


def autocast_states(devices: Iterable[str] = _DEVICES) -> tuple[Autocast, ...]:
    """Return the state of autocast for the types of device that have it, enabled or not."""
    available = filter(torch.amp.is_autocast_available, dict.fromkeys(devices))
    return tuple((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in available)


def active_autocast(devices: Iterable[str] = _DEVICES) -> tuple[Autocast, ...]:
    """Return the state of autocast for the types of device for which it is enabled.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     active_autocast()
    (('cpu', torch.bfloat16, True),)
    """
    return tuple(state for state in autocast_states(devices) if state[2]) if _torch.any_autocast() else ()


# --- settings ---------------------------------------------------------------------------------------------------------

_ENVIRONMENT: Any = getattr(os.environ, "_data", os.environ)
"""The environment variables as Python keeps them, encoded. To decode them before and after each run took a twentieth of
the run of a small model."""


def _set_environment(encoded: dict[Any, Any]) -> None:
    variables = {os.fsdecode(name): os.fsdecode(value) for name, value in encoded.items()}
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _set_warning_filters(before: list[Any]) -> None:
    warnings.resetwarnings()  # it also makes Python forget what the old filters decided
    warnings.filters.extend(before)  # type: ignore[attr-defined]


def _set_autocast(before: tuple[Autocast, ...]) -> None:
    for device, dtype, enabled in before:  # set also where it is off: the dtype for the next time is a setting too
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


SETTINGS = (
    Setting("environment", _ENVIRONMENT.copy, _set_environment),
    Setting("warning filters", lambda: warnings.filters[:], _set_warning_filters),
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("grad mode", torch.is_grad_enabled, lambda on: torch.set_grad_enabled(on)),
    Setting("autocast", lambda: autocast_states(("cpu", "cuda")), _set_autocast),
    Setting(
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
    ),
    *(
        Setting(
            f"cuDNN {name}",
            functools.partial(getattr, torch.backends.cudnn, name),
            functools.partial(setattr, torch.backends.cudnn, name),
        )
        for name in ("benchmark", "deterministic", "enabled")
    ),
    Setting("precision of float32 products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Setting("threads", torch.get_num_threads, torch.set_num_threads),
)
"""The settings that `settings_preserved` puts back, in this order."""


# --- random generators ------------------------------------------------------------------------------------------------


def _set_cuda_states(before: Any) -> None:
    if before is not None:
        torch.cuda.set_rng_state_all(before)
    elif torch.backends.cuda.is_built():  # a seed that was set meanwhile would wait for CUDA's first use
        _torch.seed_cuda(torch.initial_seed())


def _generators() -> Iterator[Setting]:
    yield Setting("generator of torch on the CPU", torch.get_rng_state, torch.set_rng_state)
    if torch.backends.mps.is_available():
        yield Setting("generator of MPS", torch.mps.get_rng_state, torch.mps.set_rng_state)
    if torch.xpu.is_available():
        yield Setting("generators of XPU", torch.xpu.get_rng_state_all, torch.xpu.set_rng_state_all)
    yield Setting(
        "generators of CUDA",
        lambda: torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,  # it initializes CUDA
        _set_cuda_states,
    )
    yield Setting("generator of numpy", np.random.get_state, np.random.set_state)
    yield Setting("generator of random", random.getstate, random.setstate)


GENERATORS = tuple(_generators())
"""The generators that `seeding.forked_rng` puts back. The CPU comes first, because CUDA may need its seed."""

# The attributes that `register_forward_hook` and its like change. They have a rule of their own, see `_hooks`.
_HOOKS = frozenset(key for key in vars(nn.Module()) if "hook" in key)

_MOST_OBJECTS = 20_000  # objects besides modules and their attributes. A thousand take some milliseconds
_LONG = 200  # characters of a name in a note. Deeper values get the name of their container

_Action = Callable[[], object]
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
    np.random.RandomState: (
        np.random.RandomState.get_state,
        np.random.RandomState.set_state,
        np.random.RandomState.random_sample,
    ),
    random.Random: (random.Random.getstate, random.Random.setstate, random.Random.random),
}
"""For each kind of random generator: read its state, set it, draw a number."""
_KINDS = (nn.Module, torch.Tensor, dict, *_CONTAINERS, tuple, frozenset, np.ndarray, *_RANDOM)
_MADE_OF = ("torch.nn.", "torch.optim.", "torch.amp.", "torch.distributions.")
"""Packages of torch whose objects are parts of models. Objects of its other packages refer to half the process."""
_LIBRARIES = sys.stdlib_module_names | {"_pytest", "numpy", "pytest", "pytest_modelprobe", "torch"}
_PROCESS = frozenset({"asyncio", "concurrent", "io", "logging", "multiprocessing", "socket", "threading", "unittest"})
"""Packages of the standard library: objects whose classes derive from theirs run beside the model, and change on their
own while it runs."""


def preserved(model: nn.Module, *, values: bool = True, unwritten: Iterable[torch.Tensor] = ()) -> ModelState:
    """Return a `with` block that restores `model` at its end, also after an exception. See `ModelState`.

    >>> model = nn.BatchNorm1d(3)
    >>> with preserved(model):
    ...     _ = model.double()(torch.ones(8, 3).double())
    ...     int(model.num_batches_tracked)
    1
    >>> int(model.num_batches_tracked), model.weight.dtype
    (0, torch.float32)
    """
    return ModelState(model, values=values, unwritten=unwritten)


def has_lazy(module: nn.Module) -> bool:
    """Whether a module itself is lazy and has seen no input."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and is_lazy(tensor) for tensor in own)


def check_not_lazy(model: nn.Module) -> None:
    """Raise `UsageError` for a model with lazy modules that have seen no input: a run would give them shapes."""
    if any(map(has_lazy, model.modules())):
        raise UsageError("the model is lazy and has seen no input: call it once before, model(...)")


class ModelState:
    """The state of a model at the moment when this is made.

    `restore` puts it back, any number of times, and so does the end of a `with` block. These are put back, on the same
    objects and in the same memory:

    * parameters, buffers and all other tensors: their bits, device, dtype, requires_grad and gradients (the same
      tensors, the same bits). Memory that did not change is not written to, and no version counter moves.
    * attributes of modules: those that were set get their old value, and those that were added are deleted.
    * what attributes refer to, however deep: the contents of lists, dicts, sets, deques and their subclasses, the
      numbers in arrays of numpy, the states of random generators, the attributes of objects, an optimizer's among them.
    * hooks of modules: those that were added are removed, and those that were removed are added.

    A `with` block also puts back the settings that the process had when it began, see `process.SETTINGS`. It holds
    interrupts, so that nothing is left half restored. Code of the user inside it runs in `interruptible`.

    The bits of sparse, nested and fake tensors are left alone, and those of tensors whose storage does not hold their
    elements, and the number of objects is limited. `notes` say this. Also left alone are the bits of meta tensors, what
    a closure, a class, an iterator or `__slots__` hold, and the objects of the standard library and of torch itself
    that are not among those above.

    Args:
        model: The model. The memory of its tensors is copied once.
        values: Whether to copy the memory of tensors and put their bits back. A forward that cannot change any, such as
            one on fake tensors, does not need it.
        unwritten: Tensors whose memory is not copied, because nothing writes to it meanwhile.
        generators: Whether to put back the model's own random generators. If False, what depends on them is different
            when the model runs again.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        values: bool = True,
        unwritten: Iterable[torch.Tensor] = (),
        generators: bool = True,
    ) -> None:
        self.notes: list[str] = []
        """What cannot be put back, in sentences."""
        self._values, self._with_generators = values, generators
        self._unwritten = {*map(id, unwritten)}
        self._draws: list[_Action] = []
        self._blocks: list[tuple[held, Settings]] = []
        self._known: set[int] = set()
        self._restores: list[_Action] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # by address
        self._late: list[_Action] = []  # hooks, which are put back after all attributes
        self._types: dict[type, tuple[bool, bool]] = {}  # whether values are saved, and whether by their attributes
        self._found: deque[tuple[str, Any]] = deque()
        with held(), _modes_off():
            for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
                self._save(name, tensor)  # first: other objects may be too many, and weights must not be among the rest
            # The innermost first, so that the modules inside one are known when its attributes are saved.
            for name, module in reversed(list(model.named_modules())):
                self._save(name, module)
            # Then what was found in them, and what is found meanwhile: the nearest to a module come first.
            for _ in range(_MOST_OBJECTS):
                if self._found:
                    self._save(*self._found.popleft())
            self._copies = _Copies(self._storages.values())
        if self._found:
            self.notes.append(
                f"{self._found[0][0]} and what comes after it stays as a forward leaves it: {_MOST_OBJECTS:,} objects "
                "in the attributes of the model were looked at"
            )
            self._found.clear()

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
            for restore in self._restores:
                restore()
            # Bytes that did not change may be read-only, and their version counter must not move. Each device is waited
            # for once.
            memory, flags = [*zip(self._storages.values(), self._copies.bytes, strict=True)], []
            for storage, before in memory:
                if storage.nbytes() != before.numel():
                    storage.resize_(before.numel())
                now, then = as_bytes(storage), before
                if now.numel() % 8 == 0:  # torch compares six times as many in the same time
                    now, then = now.view(torch.int64), then.view(torch.int64)
                flags.append(torch.tensor(not torch.equal(now, then)) if now.is_cpu else (now != then).any())
            for (storage, before), differs in zip(memory, read_flags(flags), strict=True):
                if differs:
                    as_bytes(storage).copy_(before)
            for restore in self._late:
                restore()
        # It has copies of the weights, in another dtype, as they were meanwhile. Under an autocast of the caller's they
        # outlive this block, and the model would compute with them.
        torch.clear_autocast_cache()

    def draw(self) -> None:
        """Draw a number from each random generator of the model, so that what depends on one will be different."""
        for draw in self._draws:
            draw()

    # --- saving by type; the values inside of a value are found, and saved later --------------------------------------

    def _save(self, name: str, value: Any) -> None:
        """Save a value by its type, once."""
        if id(value) in self._known:
            return
        self._known.add(id(value))
        if isinstance(value, nn.Module):
            return self._save_module(name, value)
        if isinstance(value, torch.Tensor):
            return self._save_tensor(name, value)
        if isinstance(value, dict):
            mapping: Any = OrderedDict if isinstance(value, OrderedDict) else dict
            self._restores.append(_contents(value, mapping, mapping.items, mapping.update))
            self._find(name, mapping.items(value))
        elif isinstance(value, _CONTAINERS):
            base: Any = next(kind for kind in _CONTAINERS if isinstance(value, kind))
            self._restores.append(_contents(value, base, base.__iter__, base.update if base is set else base.extend))
            self._find(name, enumerate(base.__iter__(value)))
        elif isinstance(value, (tuple, frozenset)):
            self._find(name, enumerate(value))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and not value.dtype.hasobject:
                array, elements = value, value.copy()
                self._restores.append(lambda: np.copyto(array, elements))
        # The generator of the operating system has no state.
        elif isinstance(value, tuple(_RANDOM)) and not isinstance(value, random.SystemRandom):
            read, write, draw = next(_RANDOM[kind] for kind in _RANDOM if isinstance(value, kind))
            self._draws.append(lambda: draw(value))
            if self._with_generators:
                state = read(value)
                self._restores.append(lambda: write(value, state))
        if self._kept(type(value))[1]:
            self._save_attributes(name, value)
        return None

    def _save_module(self, name: str, module: nn.Module) -> None:
        names = vars(module)
        if has_lazy(module):
            self._restores.append(functools.partial(names.update, training=module.training))
            self.notes.append(f"{name or 'the model'} is lazy and has seen no input: it keeps the shapes of this run")
            return
        self._late.append(_hooks([value for key, value in names.items() if key in _HOOKS and isinstance(value, dict)]))
        self._restores.append(_attributes(names, without=_HOOKS))
        for key, value in names.items():
            if key not in _HOOKS and self._kept(type(value))[0]:
                self._save(f"{name}.{key}" if name else key, value)

    def _save_tensor(self, name: str, tensor: Any) -> None:
        """Save a tensor, its gradient, the tensors inside a subclass such as a DTensor, and its memory."""
        if is_lazy(tensor):
            return
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None:
            # First: torch takes a gradient only if its shape, dtype and device fit, and they may have changed too.
            self._save(f"{name}.grad", grad)
        self._restores.append(_autograd(tensor, grad))
        inner = tensor.__tensor_flatten__()[0] if hasattr(type(tensor), "__tensor_flatten__") else ()
        for key in inner:
            self._save(name, getattr(tensor, key))
        self._save_attributes(name, tensor)
        if has_dense_storage(tensor):
            storage = tensor.untyped_storage()
            if self._values and id(tensor) not in self._unwritten:
                self._storages.setdefault(storage_key(storage), storage)
        elif self._values and not (inner or tensor.is_meta):
            self.notes.append(f"{name} has no dense memory that holds its elements: they stay as a forward leaves them")

    def _save_attributes(self, name: str, owner: Any) -> None:
        try:
            names = owner.__dict__
        except Exception:  # noqa: BLE001 - a proxy for something that is not there may raise anything
            return
        self._restores.append(_attributes(names))
        self._find(name, names.items(), "{}.{}")

    def _find(self, name: str, items: Iterable[tuple[Any, Any]], form: str = "{}[{!r}]") -> None:
        for key, value in items:
            if self._kept(type(value))[0] and id(value) not in self._known:
                self._found.append((form.format(name, key) if len(name) < _LONG else name, value))

    def _kept(self, kind: type) -> tuple[bool, bool]:
        """Return whether values of a type are saved, and whether their attributes are.

        They are if the values may be parts of a model, and not of the process around it.
        """
        if kind not in self._types:
            root = kind.__module__.partition(".")[0]
            of_models = (
                bool(kind.__dictoffset__)
                and not issubclass(kind, type)
                and all(base.__module__.partition(".")[0] not in _PROCESS for base in kind.__mro__)
                and (
                    root not in _LIBRARIES
                    or f"{kind.__module__}.".startswith(_MADE_OF)
                    or kind is types.SimpleNamespace
                )
            )
            self._types[kind] = of_models or issubclass(kind, _KINDS), of_models
        return self._types[kind]


# --- copies of memory -------------------------------------------------------------------------------------------------

_ALIGNED = 64
"""Bytes to a multiple of which each copy begins."""

_MOST_SPARE = 1 << 30
"""Bytes of memory that are kept for later states."""

_spare: list[tuple[torch.Tensor, weakref.ref[_Copies]]] = []
"""Memory of states, which may have ended, each with what uses it."""

_lock = threading.Lock()


class _Copies:
    """Copies of storages. Those on the CPU are in one piece of memory, which a later state uses again.

    The system takes longer to hand out new memory than the copy takes.
    """

    def __init__(self, storages: Collection[torch.UntypedStorage]) -> None:
        sizes = [-(-one.nbytes() // _ALIGNED) * _ALIGNED if one.device.type == "cpu" else 0 for one in storages]
        with _lock:
            whole = self._piece_of(sum(sizes))
        self.bytes = []
        for storage, size, part in zip(storages, sizes, whole.split(sizes), strict=True):
            there = as_bytes(storage)
            self.bytes.append(part[: len(there)].copy_(there) if size else there.clone())

    def _piece_of(self, size: int) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        for number, (piece, user) in enumerate(_spare):
            if user() is None and len(piece) >= size:
                _spare[number] = piece, weakref.ref(self)
                return piece[:size]
        _spare[:] = [(piece, user) for piece, user in _spare if user() is not None]
        with torch.inference_mode(False):
            piece = torch.empty(size, dtype=torch.uint8)
        if size + sum(len(other) for other, _ in _spare) <= _MOST_SPARE:
            _spare.append((piece, weakref.ref(self)))
        return piece


# --- what puts one thing back -----------------------------------------------------------------------------------------


def _contents(value: Any, base: Any, read: Callable[[Any], Iterable[Any]], add: Callable[..., object]) -> _Action:
    """Put back the items of a container, in order, by the methods of its base: those of a subclass may refuse."""
    before = list(read(value))
    same = [*map(id, itertools.chain(*before))] if issubclass(base, dict) else [*map(id, before)]

    def restore() -> None:
        now = list(read(value))
        if [*map(id, itertools.chain(*now) if issubclass(base, dict) else now)] != same:
            base.clear(value)
            add(value, before)

    return restore


def _attributes(names: dict[str, Any], *, without: frozenset[str] = frozenset()) -> _Action:
    """Put back the contents of the `__dict__` of an object. Only what changed is written."""
    before = {key: value for key, value in names.items() if key not in without}

    def restore() -> None:
        for key in names.keys() - before.keys() - without:
            del names[key]
        names.update({key: value for key, value in before.items() if names.get(key, _NOTHING) is not value})

    return restore


def _hooks(tables: list[dict[int, Any]]) -> _Action:
    """Remove the hooks of a module that were added, and add those that were removed.

    A model that registers hooks in its first forward keeps an attribute that says so. If the attribute were restored
    and the hooks were not, the next forward would register them twice, or not at all. Our own hooks that were removed
    stay removed: their watch was closed meanwhile.
    """
    before = [(hooks, list(hooks.items())) for hooks in tables]
    ours = {key for hooks in tables for key, hook in hooks.items() if getattr(hook, "is_modelprobe", False)}

    def restore() -> None:
        for hooks, items in before:
            wanted = [(key, hook) for key, hook in items if key not in ours or key in hooks]
            if list(hooks.items()) != wanted:
                hooks.clear()
                hooks.update(wanted)

    return restore


def _autograd(tensor: torch.Tensor, grad: torch.Tensor | None) -> _Action:
    """Put back the memory that a tensor refers to, and its state in autograd."""
    data = tensor.data if is_strided(tensor) else None
    place = None if data is None else _place(data)
    was_leaf, requires_grad = tensor.is_leaf, tensor.requires_grad

    def restore() -> None:
        if data is not None and not (is_strided(tensor) and _place(tensor) == place):
            tensor.data = data  # it was replaced, as `module.to()` does
        if not was_leaf:
            return
        if not tensor.is_leaf and not is_view(tensor):
            tensor.detach_()  # something in-place made it part of a graph
        if tensor.is_leaf:
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not grad:
                tensor.grad = grad

    return restore


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return where the elements of a strided tensor are. It stays the same unless the tensor's data are replaced."""
    storage = storage_key(tensor.untyped_storage())
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


@contextmanager
def _modes_off() -> Iterator[None]:
    """Work on the tensors themselves, whatever fake mode or default device is active. No garbage is collected."""
    with without_dispatch_modes(), without_torch_function(), gc_paused():
        yield
