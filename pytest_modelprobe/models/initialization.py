"""Initialization by name: each random weight is drawn with a seed made of its own name.

With one seed for all, a layer that is added moves the draws of all layers after it, and a snapshot shows a change in
each. Here it does not. The model's own code says how a weight is drawn, and its name is only known when the model is
complete. So each operation on random numbers is logged without its data while the factory runs. Then the part of the
log that the model's tensors depend on runs again, in order, and each draw is seeded by the name of the tensor that it
fills.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from pytest_modelprobe._torch import (
    TRUNC_NORMAL,
    DispatchMode,
    Operation,
    WeakStorage,
    schema,
    storage_key,
    without_torch_function,
)
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.interrupts import held, interruptible
from pytest_modelprobe.record import old_name

from .seeding import derive, fill_normal, seeded
from .tensors import as_bytes, has_dense_storage

M = TypeVar("M", bound=nn.Module)


def build(factory: Callable[[], M], *, seed: int, rename: Mapping[str, str] | None = None) -> M:
    """Make a model whose random weights are each drawn with a seed made of their own name.

    The model is the same every time, on every device, whatever was drawn before. If a layer is added, all layers that
    keep their names keep their weights. Each weight has the distribution that the model's own code gives it, and what
    that code makes equal or dependent stays so: ties, deep copies, normalized weights, a zeroed padding row. Tensors
    that no random number reaches stay as the factory made them, and so do draws from an explicit generator.

    Limits: random values that Python code looks at (`.item()`, a boolean mask, a rejection loop) and numbers from numpy
    or `random` are the same every time, but they depend on other layers. Uninitialized, meta and fake parameters are
    left alone.

    Args:
        factory: Makes the model. It is called once, and the random states are put back after it.
        seed: The base seed.
        rename: Glob of names → glob of the names by which their weights are drawn, as `compare` takes it.

    Raises:
        UsageError: `factory` is not a function that returns a module.

    >>> small = build(lambda: nn.Sequential(nn.Linear(4, 4)), seed=0)
    >>> large = build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), seed=0)
    >>> torch.equal(small[0].weight, large[0].weight)
    True
    """
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UsageError(_no_factory(factory))
    with held(), seeded(derive(seed, "build")):
        model: M = _drawn_by_name(factory, None, seed, rename or {})
    return model


def initialize(module: nn.Module, init: Callable[[], None], *, seed: int) -> None:
    """Run the constructor of a module, and draw each random weight with a seed made of its own name, as `build` does.

    >>> layer = nn.Linear.__new__(nn.Linear)
    >>> initialize(layer, lambda: nn.Linear.__init__(layer, 2, 2), seed=0)
    >>> layer.weight.shape
    torch.Size([2, 2])
    """
    with held(), seeded(seed):
        _drawn_by_name(init, module, seed, {})


def _drawn_by_name(make: Callable[[], Any], module: nn.Module | None, seed: int, rename: Mapping[str, str]) -> Any:
    """Call a function that makes a module, or the constructor of the given one, and draw its weights by name.

    Interrupts arrive in the function and in the replay only: outside of them global states are put back.
    """
    log = _RandomLog(seed)
    with log, _trunc_normal_logged_whole(log), interruptible():
        made = make()
    model = made if module is None else module
    if not isinstance(model, nn.Module):
        raise UsageError(_no_factory(model, "a function that returned "))
    with torch.no_grad(), without_torch_function(), interruptible():
        _Replay(log, model, seed, rename).run()
    return model


def _no_factory(value: object, kind: str = "") -> str:
    what = f"a {type(value).__name__}" + (", already made" if isinstance(value, nn.Module) else "")
    return f"build() takes a function that makes the model: build(lambda: Net(...)); got {kind}{what}"


# --- the log: operations on random numbers, without the data ----------------------------------


@dataclass(slots=True, eq=False)
class _Store:
    """One storage in the log. The storage itself may be freed: the log keeps no data."""

    alive: Any  # a `WeakStorage`, which also keeps the address from being given to another storage
    nbytes: int
    device: torch.device
    last: _Op | None = None  # the operation that made the current contents


@dataclass(slots=True, eq=False)
class _View:
    """How an operation sees a store."""

    store: _Store
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def extent(self) -> tuple[int, int]:
        """Return the first byte and the byte after the last."""
        if 0 in self.size:
            return 0, 0
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (self.offset + last + 1) * self.dtype.itemsize


@dataclass(eq=False)
class _Op:
    """One logged operation; tensors in its arguments are `_View`s, or copies of constants."""

    index: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: tuple[_View, ...]
    before: tuple[_Op, ...]  # the operations that made the contents it reads
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    seed: int | None = None  # None if it draws nothing
    makes: tuple[_Store | None, ...] = ()  # one for each output, None if the output is an input again
    observed: bool = False  # Python code has read its result: it must not be drawn anew

    @cached_property
    def stores(self) -> set[_Store]:
        views = (leaf for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, _View))
        return {view.store for view in views} | {store for store in self.makes if store}


class _RandomLog(DispatchMode):
    """Logs the operations on random numbers, and seeds each draw by its number.

    The number makes the first run repeatable, for values that Python code looks at. The replay then seeds by name.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._stores: dict[int, _Store] = {}  # the storages with random contents, by address
        self._sweep_at = 1024
        self._count = 0
        self._paused = False

    def call_whole(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that fills its first argument at random, logged as one operation."""
        self._paused = True
        try:
            return self.call(func, args, kwargs, pause=False)
        finally:
            self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], pause: bool = True) -> Any:
        if pause and self._paused:
            return func(*args, **kwargs)
        written, read = _written_and_read(func, args, kwargs)
        # An explicit generator is the user's own seed, and is left alone.
        leaves = _leaves((args, kwargs))
        draws = not isinstance(func, Operation) or torch.Tag.nondeterministic_seeded in func.tags
        draws = draws and not any(isinstance(leaf, torch.Generator) for leaf in leaves)
        if not (written or read or draws):
            return func(*args, **kwargs)
        if not all(map(_loggable, leaves)):  # the tensors that meet such a one keep the values of the first run
            for tensor in (t for t in (*written, *read) if has_dense_storage(t)):
                store = self.store_of(tensor)
                _observe(store.last if store else None)
            for tensor in (t for t in written if has_dense_storage(t)):
                self._stores.pop(_key(tensor), None)
            return func(*args, **kwargs)
        keys_read = {_key(tensor) for tensor in read}
        whole = {_key(t) for t in written if _overwrites(func, t)} - keys_read
        keys_read |= {_key(tensor) for tensor in written} - whole
        if not draws and not keys_read & self._stores.keys():
            for key in whole:
                self._stores.pop(key, None)  # something constant replaced the random contents
            return func(*args, **kwargs)
        # The operation is logged with its inputs as they are now: afterwards they may be overwritten.
        for tensor in written:
            if _key(tensor) not in self._stores:
                self._track(tensor, keep_contents=_key(tensor) not in whole)
        tracked = [leaf for leaf in leaves if has_dense_storage(leaf) and _key(leaf) in self._stores]
        views = {id(tensor): self._view(tensor) for tensor in tracked}
        before = {self._stores[key].last for key in {_key(t) for t in tracked} - whole}
        template = _mapped(lambda leaf: views.get(id(leaf)) or _constant(leaf), (args, kwargs))
        writes = tuple(views[id(tensor)] for tensor in written)
        op = self._op(func, *template, writes=writes, before=tuple(filter(None, before)))
        if draws:
            op.seed = derive(self._seed, f"draw {op.index}")
        out = _execute(op, args, kwargs)
        outputs, known = _leaves(out), {_key(tensor) for tensor in (*written, *read)}
        if _reveals(op, outputs):
            _observe(op)
        op.makes = tuple(
            self._track(leaf) if has_dense_storage(leaf) and _key(leaf) not in known else None for leaf in outputs
        )
        for store in (*(view.store for view in op.writes), *filter(None, op.makes)):
            store.last = op
        return out

    def store_of(self, tensor: torch.Tensor) -> _Store | None:
        return self._stores.get(_key(tensor))

    def _op(self, func: Any, args: Any, kwargs: Any, **more: Any) -> _Op:
        self._count += 1
        return _Op(self._count, func, args, kwargs, **more)

    def _view(self, tensor: torch.Tensor) -> _View:
        store, offset = self._stores[_key(tensor)], int(tensor.storage_offset())
        return _View(store, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    def _track(self, tensor: torch.Tensor, keep_contents: bool = False) -> _Store:
        if len(self._stores) > self._sweep_at:  # drop those that were freed, and operations that nothing depends on
            self._stores = {key: store for key, store in self._stores.items() if not store.alive.expired()}
            self._sweep_at = 2 * len(self._stores) + 1024  # in proportion, so that this never takes most of the time
        storage = tensor.untyped_storage()
        store = _Store(WeakStorage(storage), storage.nbytes(), storage.device)
        self._stores[_key(tensor)] = store
        if keep_contents:
            everything = _View(store, torch.uint8, (store.nbytes,), (1,), 0)
            args = (everything, as_bytes(storage).clone())
            copy = torch.ops.aten.copy_.default
            store.last = self._op(copy, args, {}, writes=(everything,), before=(), makes=(None,))
        return store


@contextmanager
def _trunc_normal_logged_whole(log: _RandomLog) -> Iterator[None]:
    # Since torch 2.13 it draws until all values are in range, a loop that no log can replay. Patching this one function
    # reaches also those who imported `trunc_normal_` itself.
    original = getattr(nn.init, TRUNC_NORMAL)

    def logged(*args: Any, **kwargs: Any) -> Any:
        return log.call_whole(original, *args, **kwargs)

    setattr(nn.init, TRUNC_NORMAL, logged)
    try:
        yield
    finally:
        setattr(nn.init, TRUNC_NORMAL, original)


def _observe(op: _Op | None) -> None:
    """Make an operation and all that it depends on keep the numbers of the first run, which Python code has seen."""
    waiting = [op] if op else []
    while waiting:
        op = waiting.pop()
        if not op.observed:
            op.observed = True
            waiting.extend(op.before)


def _reveals(op: _Op, outputs: list[Any]) -> bool:
    """Whether Python code sees values of the outputs: as numbers, in a shape, or in a tensor that cannot be logged."""
    if not isinstance(op.func, Operation):
        return False
    if any(leaf is not None and not has_dense_storage(leaf) for leaf in outputs):
        return True
    # torch tags `index` as of dynamic shape because of masks, but most indices are numbers.
    if _name(op.func) == "index":
        indices = (leaf for leaf in _leaves(op.args[1]) if isinstance(leaf, _View))
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    return torch.Tag.dynamic_output_shape in op.func.tags


def _leaves(value: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts, the only containers that operations take and return."""
    if type(value) in (list, tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return _leaves(list(value.values())) if type(value) is dict else [value]


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested lists, tuples and dicts with ``function`` applied to their leaves."""
    if type(value) in (list, tuple):
        return type(value)(_mapped(function, item) for item in value)
    return {key: _mapped(function, item) for key, item in value.items()} if type(value) is dict else function(value)


# --- the replay: the same operations, each draw seeded by name --------------------------------


class _Replay:
    """Runs the operations that the model's tensors depend on again, writing into the model's own storages."""

    def __init__(self, log: _RandomLog, model: nn.Module, seed: int, rename: Mapping[str, str]) -> None:
        self._seed = seed
        self._names: list[str] = []
        self._storages: dict[_Store, torch.UntypedStorage] = {}  # with their contents up to now
        # Which tensors show a store: first byte, end, and rank, the place of the tensor's name.
        self._claims: dict[_Store, list[tuple[int, int, int]]] = {}
        for name, tensor in _tensors(model):
            if store := log.store_of(tensor):
                low, high = log._view(tensor).extent()
                self._claims.setdefault(store, []).append((low, high, len(self._names)))
                self._storages[store] = tensor.untyped_storage()
                self._names.append(old_name(name, rename))
        self._ops = _ancestry(store.last for store in self._storages)

    def run(self) -> None:
        if not self._name_draws():
            return
        # To save memory, what no tensor of the model shows is freed after its last use.
        last_use = {store: op for op in self._ops for store in op.stores}
        default_dtype = torch.get_default_dtype()
        try:
            for op in self._ops:
                self._run(op)
                for store in op.stores:
                    if last_use[store] is op and store not in self._claims:
                        self._storages.pop(store, None)
        finally:
            torch.set_default_dtype(default_dtype)

    def _run(self, op: _Op) -> None:
        torch.set_default_dtype(op.default_dtype)
        args, kwargs = _mapped(self._resolve, (op.args, op.kwargs))
        outputs = _leaves(_execute(op, args, kwargs))
        for store, output in zip(op.makes, outputs, strict=True):
            if store in self._claims:
                as_bytes(self._storages[store]).copy_(as_bytes(output.untyped_storage()))
            elif store:
                self._storages[store] = output.untyped_storage()

    def _resolve(self, leaf: Any) -> Any:
        if not isinstance(leaf, _View):
            return leaf
        store = leaf.store
        if store not in self._storages:  # about to be overwritten
            self._storages[store] = torch.UntypedStorage(store.nbytes, device=store.device)
        return leaf.of(self._storages[store])

    def _name_draws(self) -> bool:
        """Seed each draw by the first name in which it ends up; return whether any draw changes."""
        counts: Counter[int] = Counter()
        owners = self._owners()
        for op in self._ops:
            rank = owners.get(op)
            if op.seed is not None and rank is not None and not op.observed:
                number = counts[rank]
                counts[rank] += 1
                name = self._names[rank] + (f"#{number}" if number else "")
                op.seed = derive(self._seed, name)
        return bool(counts)

    def _owners(self) -> dict[_Op, int]:
        """Return the rank of the tensor that each operation fills, or else of the first that depends on it.

        An operation has none if it fills no element, or only elements that no tensor of the model depends on.
        """
        owners: dict[_Op, int] = {}
        for op in reversed(self._ops):
            owner = min(self._claimants(op), default=owners.get(op))
            if owner is None:
                continue
            owners[op] = owner
            for earlier in op.before:
                owners[earlier] = min(owner, owners.get(earlier, owner))
        return owners

    def _claimants(self, op: _Op) -> Iterator[int]:
        regions = [(view.store, *view.extent()) for view in op.writes]
        regions += [(store, 0, store.nbytes) for store in op.makes if store]
        for store, low, high in regions:
            for first, end, rank in self._claims.get(store, ()):
                if low < end and first < high:
                    yield rank


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, then buffers, then tensors kept as plain attributes, each with its name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    for prefix, module in model.named_modules():
        named += [(f"{prefix}.{key}".lstrip("."), value) for key, value in vars(module).items()]
    for name, tensor in named:
        if has_dense_storage(tensor):
            yield name, tensor


def _ancestry(ops: Iterable[_Op | None]) -> list[_Op]:
    """Return the operations and all that they depend on, in the order of the first run."""
    waiting, found = list(ops), set[_Op]()
    while waiting:
        op = waiting.pop()
        if op and op not in found:
            found.add(op)
            waiting.extend(op.before)
    return sorted(found, key=lambda op: op.index)


# --- operations and tensors -------------------------------------------------------------------

# Operations that replace all of the tensor they write to, and those that make a random tensor.
_FILLS = {"normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_"}
_FILLS |= {"cauchy_", "geometric_", "zero_", "fill_", "copy_"}
_SOURCES = {"randn", "rand", "randint", "randperm", "normal", "bernoulli", "multinomial"}
_SOURCES |= {"randn_like", "rand_like", "randint_like"}


def _loggable(leaf: object) -> bool:
    if isinstance(leaf, torch.Tensor):
        return has_dense_storage(leaf) and not leaf.is_quantized
    return not isinstance(leaf, torch.device) or leaf.type != "meta"


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _name(func: Any) -> str:
    return schema(func).name.split("::")[1] if isinstance(func, Operation) else ""


def _constant(leaf: Any) -> Any:
    """Return a copy of an argument as it is now, because the factory may change it later."""
    if isinstance(leaf, torch.Generator):
        return leaf.clone_state()
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _written_and_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the tensors that a call writes, and those that it only reads."""
    if not isinstance(func, Operation):  # a function that is logged whole fills its first argument
        return [args[0]], []
    written: list[Any] = []
    read: list[Any] = []
    for position, argument in enumerate(schema(func).arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        (written if is_write else read).extend(leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))
    return written, read


def _overwrites(func: Any, tensor: torch.Tensor) -> bool:
    """Whether a call that writes `tensor` replaces all of its storage and reads nothing of it."""
    is_op = isinstance(func, Operation)
    replaces = not is_op or _name(func) in _FILLS or any(a.is_out for a in schema(func).arguments)
    return replaces and tensor.nbytes == tensor.untyped_storage().nbytes()


def _execute(op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the operation, on the CPU if it draws, so that all devices and machines get the same numbers."""
    # Held: an interrupt that comes as the block is left would leave the mode on.
    with held(), _Portable():
        return op.func(*args, **kwargs) if op.seed is None else _draw(op.func, op.seed, args, kwargs)


def _draw(func: Callable[..., Any], seed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves = _leaves((args, kwargs))
    devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    devices += [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    device = next((device for device in devices if device.type != "cpu"), None)
    if device is None:
        torch.default_generator.manual_seed(seed)
        return func(*args, **kwargs)
    if _name(func) in _FILLS | _SOURCES | {""}:  # no name has a function that is logged whole
        torch.default_generator.manual_seed(seed)
        return _on_cpu(func, args, kwargs, device)
    torch.manual_seed(seed)
    return func(*args, **kwargs)


class _Portable(DispatchMode):
    """Computes bits that are the same on every machine, where those of torch depend on instructions and threads.

    In float64, noise is far below the last bit of a float32 weight, and a snapshot from another machine would blame the
    code for the difference.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        portable = _PORTABLE.get(_name(func))
        kwargs = kwargs or {}
        return func(*args, **kwargs) if portable is None else portable(func, *args, **kwargs)


# These scale and shift in two steps, because each step is rounded alike on every machine. torch does both by one
# instruction where the machine has it, which rounds once.


def _normal(func: Any, tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
    return fill_normal(tensor, generator).mul_(std).add_(complex(mean, mean) if tensor.is_complex() else mean)


def _uniform(func: Any, tensor: torch.Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Any:
    return func(tensor, generator=generator).mul_(high - low).add_(low)


def _randn(func: Any, *args: Any, **kwargs: Any) -> Any:
    generator = kwargs.get("generator") or torch.default_generator
    state = generator.get_state()
    made = func(*args, **kwargs)
    generator.set_state(state)
    return fill_normal(made, generator)


def _in_float64(func: Any, tensor: torch.Tensor, *args: Any) -> Any:
    """Call the QR decomposition, by which `orthogonal_` works, in float64: its last bits depend on the threads."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float64))
    return tuple(result.to(tensor.dtype) for result in func(wide, *args))


_PORTABLE: Mapping[str, Callable[..., Any]] = {
    "normal_": _normal, "uniform_": _uniform, "randn": _randn, "randn_like": _randn, "linalg_qr": _in_float64,
}  # fmt: skip


def _on_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # copy and original, by the copy's id

    def there(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            copy = leaf.detach().cpu()
            moved[id(copy)] = copy, leaf
            return copy
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def back(leaf: Any) -> Any:
        if id(leaf) in moved:
            copy, original = moved[id(leaf)]
            original.detach().copy_(copy)
            return original
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return _mapped(back, func(*_mapped(there, args), **_mapped(there, kwargs)))
