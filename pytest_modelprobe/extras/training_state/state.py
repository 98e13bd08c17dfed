"""The state of a training in its parts: what it holds is found, read, saved and loaded.

A user has a model, an optimizer, a scheduler and more in a dict, a tuple or an object. Each is a part with a name, and
is read as named leaves: tensors that are copied, numbers, and random states as bytes. So what a checkpoint leaves out
has a name: ``exp_avg of fc1.weight`` in the part ``optimizer``.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from pytest_modelprobe.checks.outcome import line_of
from pytest_modelprobe.checks.rounding import relative_error
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import GENERATORS, as_array, detached_copy
from pytest_modelprobe.record import qualified
from pytest_modelprobe.text import listed

Kind = Literal["weights", "buffer", "attribute", "moments", "hyperparameters", "state", "random", "tensor", "value"]
"""``moments``: what an optimizer keeps for a parameter. ``state``: what a ``state_dict`` of anything else has."""

RANDOM = "random states"
"""Name of the part that no user holds: the global generators."""

PLAIN = bool | int | float | str | None

_NO_EFFECT = ("params", "foreach", "fused", "capturable", "differentiable")
"""Fields of a group of an optimizer that change no number."""

_DEEPEST = 20
"""Levels of a state_dict that are read: one may refer to itself."""


class Part(NamedTuple):
    """One thing that a state of training holds."""

    name: str
    value: Any
    put: Callable[[Any], object] | None = None
    """Puts another value in its place; None: its place cannot be written to."""


class Leaf(NamedTuple):
    """One tensor, number or random state of a part."""

    part: str
    text: str
    """``exp_avg of fc1.weight``."""
    kind: Kind
    value: Any
    of: str = ""
    """The parameter that it belongs to."""

    @property
    def name(self) -> str:
        """The part, and which of its leaves."""
        return f"{self.part}: {self.text}"


Leaves = Mapping[tuple[str, str], Leaf]
"""By part and text, in order."""


@dataclass(frozen=True, slots=True)
class Unequal:
    """A leaf that differs between two readings of a state."""

    leaf: Leaf
    """As it should be; of one that is only in the other reading, as it is there."""
    now: Leaf | None
    missing_then: bool = False

    @property
    def lost(self) -> bool:
        """Whether it is not there any more."""
        return self.now is None

    @property
    def change(self) -> float | None:
        """The relative error of a tensor; None of anything else."""
        if self.now is None or self.missing_then:
            return None
        both = self.now.value, self.leaf.value
        return relative_error(both[1], both[0]) if all(isinstance(x, Tensor) for x in both) else None


class TrainingState:
    """The parts of a state that a user made.

    >>> model = nn.Linear(2, 1)
    >>> state = TrainingState({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "epoch": 0})
    >>> [part.name for part in state.parts]
    ['model', 'optimizer', 'epoch']
    """

    def __init__(self, state: Any) -> None:
        self.whole = state
        self.parts: list[Part] = []
        """What is read. What is saved too, unless the whole has a ``state_dict`` of its own."""
        self.unread: list[str] = []
        """Names of what has no state that is known."""
        self._seen: set[int] = set()
        self._names: Counter[str] = Counter()
        self._visit("", state, None)
        self.own = None if any(part.value is state for part in self.parts) or not _is_stateful(state) else state

    @property
    def models(self) -> list[Part]:
        """The modules that hold tensors, without those that are inside others."""
        found = [part for part in self.parts if isinstance(part.value, nn.Module)]
        full = [part for part in found if [*nn.Module.parameters(part.value), *nn.Module.buffers(part.value)]] or found
        inner = {id(child) for part in full for child in part.value.modules() if child is not part.value}
        return [part for part in full if id(part.value) not in inner]

    def model(self) -> nn.Module:
        """Return the model that is trained: the only one, the only one that an optimizer holds, or ``model``.

        Raises:
            UsageError: There is none, or which is meant is not known.
        """
        __tracebackhide__ = True
        models = self.models
        if not models:
            raise UsageError(
                "make() returned no model: it returns a torch.nn.Module, or a dict, a tuple or an object that holds "
                f"one; got {type(self.whole).__name__}"
            )
        held = {
            id(p) for part in self.parts for group in _groups(part.value) for p in group["params"]
        }  # an average and a teacher are in no optimizer
        trained = [part for part in models if any(id(p) in held for p in nn.Module.parameters(part.value))] or models
        named = [part for part in trained if part.name == "model"] if len(trained) > 1 else trained
        if len(named) != 1:
            names = listed([f"{part.name} ({type(part.value).__name__})" for part in trained])
            raise UsageError(
                f"make() returned {len(trained)} models that may be the one that is trained, {names}: hold them in "
                'one torch.nn.ModuleDict, or name the one to watch "model"'
            )
        found: nn.Module = named[0].value
        return found

    def read(self) -> dict[tuple[str, str], Leaf]:
        """Return all leaves as they are now, and the global random states."""
        names = {id(p): name for part in self.models[::-1] for name, p in part.value.named_parameters()}
        leaves = [leaf for part in self.parts for leaf in _leaves(part, names)]
        leaves += [
            Leaf(RANDOM, one.name, "random", _digest(now)) for one in GENERATORS if (now := one.get()) is not None
        ]
        return {(leaf.part, leaf.text): leaf for leaf in leaves}

    # --- what is saved if the user does not say ---------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Return the ``state_dict`` of each part, what is plain, and all random states."""
        found: dict[str, Any] = {RANDOM: {one.name: one.get() for one in GENERATORS}}
        if self.own is not None:
            return {**found, "state": self.own.state_dict()}
        for part in self.parts:
            if _is_stateful(part.value):
                found[part.name] = part.value.state_dict()
            elif isinstance(part.value, DataLoader):
                found[part.name] = [read() for _, read, _ in _generators_of(part.value)]
            elif (generator := _generator(part.value)) is not None:
                found[part.name] = generator[0]()
            elif isinstance(part.value, Tensor) or part.put is not None:
                found[part.name] = part.value
        return found

    def load(self, saved: Mapping[str, Any]) -> None:
        """Put what `saved` returned into the parts."""
        if self.own is not None:
            self.own.load_state_dict(saved["state"])
        for part in self.parts if self.own is None else ():
            if part.name not in saved:
                continue
            was = saved[part.name]
            if _is_stateful(part.value):
                part.value.load_state_dict(was)
            elif isinstance(part.value, DataLoader):
                for (_, _, write), one in zip(_generators_of(part.value), was, strict=False):
                    write(one)
            elif (generator := _generator(part.value)) is not None:
                generator[1](was)
            elif isinstance(part.value, Tensor):
                with torch.no_grad():
                    part.value.copy_(was)
            elif part.put is not None:
                part.put(was)
        for one in GENERATORS:
            one.set(saved[RANDOM][one.name])

    # --- finding ----------------------------------------------------------------------------------------------------

    def _visit(self, name: str, value: Any, put: Callable[[Any], object] | None) -> None:
        if isinstance(value, PLAIN):
            self.parts.append(Part(name or type(value).__name__, value, put))
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        holds = not isinstance(value, nn.Module | torch.optim.Optimizer) and not name and hasattr(value, "__dict__")
        if not holds and (_is_stateful(value) or isinstance(value, Tensor | DataLoader) or _generator(value)):
            self.parts.append(Part(name or self._numbered(value), value))
        elif isinstance(value, Mapping):
            for key, one in value.items():
                self._visit(_inside(name, str(key)), one, _setter(value, key, MutableMapping))
        elif isinstance(value, list | tuple):
            fields = getattr(value, "_fields", ())
            for i, one in enumerate(value):
                own = fields[i] if fields else str(i) if isinstance(one, PLAIN) or name else self._numbered(one)
                self._visit(_inside(name, own), one, _setter(value, i, MutableSequence))
        elif holds or hasattr(value, "__dataclass_fields__"):
            for key, one in list(vars(value).items()):
                frozen = getattr(getattr(value, "__dataclass_params__", None), "frozen", False)
                self._visit(_inside(name, key), one, None if frozen else _attribute_setter(value, key))
        elif name and not callable(value):
            self.unread.append(f"{name} ({type(value).__name__})")

    def _numbered(self, value: Any) -> str:
        """Return the name of what has none: what it is, with a number from the second on."""
        name = next((text for kind, text in _NAMES if isinstance(value, kind)), type(value).__name__)
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name} {self._names[name]}"


_NAMES: tuple[tuple[Any, str], ...] = (
    (nn.Module, "model"),
    (torch.optim.Optimizer, "optimizer"),
    (torch.optim.lr_scheduler.LRScheduler, "scheduler"),
    (torch.amp.GradScaler, "scaler"),
    (DataLoader, "loader"),
    (torch.Generator, "generator"),
)


def unequal(then: Leaves, now: Leaves) -> dict[tuple[str, str], Unequal]:
    """Return what differs between a reading of a state and another, bit for bit."""
    found = {}
    for key, leaf in then.items():
        other = now.get(key)
        if other is None or not _is_equal(leaf.value, other.value):
            found[key] = Unequal(leaf, other)
    found |= {key: Unequal(leaf, leaf, missing_then=True) for key, leaf in now.items() if key not in then}
    # A scalar, as the step of Adam, says less than what goes with it.
    return dict(sorted(found.items(), key=lambda pair: pair[1].leaf.kind == "moments" and _size(pair[1].leaf) < 2))


def through_file(saved: Any) -> Any:
    """Return what a file would give back of a checkpoint.

    Raises:
        UsageError: It cannot be written; names what.
    """
    __tracebackhide__ = True
    file = io.BytesIO()
    try:
        torch.save(saved, file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    except Exception as error:
        where, what = _unwritable("", saved)
        name = f"{where} ({type(what).__name__})" if where else type(what).__name__
        raise UsageError(
            f"what save returned cannot be written to a file and read back: {name}: {line_of(error)}"
        ) from (error)


def shown(value: Any) -> str:
    """Return a leaf in a cell of a table.

    >>> shown(torch.tensor([3.0, 4.0])), shown(0.1), shown(b"some"), shown(torch.tensor(3.0))
    ('rms 3.536', '0.1', 'state 736f6d65', '3')
    """
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return f"{value.item():.6g}" if not value.is_complex() else str(value.item())
        size = torch.linalg.vector_norm(value.double() if not value.is_complex() else value).item()
        return f"rms {size / math.sqrt(max(value.numel(), 1)):.4g}"
    return (
        f"state {value.hex()[:8]}"
        if isinstance(value, bytes)
        else f"{value:.6g}"
        if type(value) is float
        else str(value)
    )


# --- leaves -----------------------------------------------------------------------------------------------------------


def _leaves(part: Part, names: Mapping[int, str]) -> Iterator[Leaf]:
    value = part.value
    if isinstance(value, nn.Module):
        yield from _of_module(part.name, value)
    elif _is_optimizer(value):
        yield from _of_optimizer(part.name, value, names)
    elif isinstance(value, DataLoader):
        for text, read, _ in _generators_of(value):
            yield Leaf(part.name, text, "random", _digest(read()))
        epoch = getattr(value.sampler, "epoch", None)
        if isinstance(epoch, int):
            yield Leaf(part.name, "epoch of its sampler", "value", epoch)
    elif (generator := _generator(value)) is not None:
        yield Leaf(part.name, "the state", "random", _digest(generator[0]()))
    elif isinstance(value, Tensor):
        yield from _tensor(part.name, "the tensor", "tensor", value)
    elif isinstance(value, PLAIN):
        yield Leaf(part.name, "the value", "value", value)
    else:
        for text, one in _flat("", value.state_dict()):
            if isinstance(one, Tensor):
                yield from _tensor(part.name, text, "state", one)
            else:
                yield Leaf(part.name, text, "state", one)


def _of_module(part: str, model: nn.Module) -> Iterator[Leaf]:
    for name, p in model.named_parameters():
        yield from _tensor(part, name, "weights", p, name)
    for name, x in model.named_buffers():
        yield from _tensor(part, name, "buffer", x, name)
    for name, module in model.named_modules():
        for key, one in vars(module).items():
            if not key.startswith("_") and isinstance(one, PLAIN):
                yield Leaf(part, qualified(name, key) if name else key, "attribute", one, name)


def _of_optimizer(part: str, optimizer: Any, names: Mapping[int, str]) -> Iterator[Leaf]:
    numbered = {id(p): f"parameter {i}" for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    for p, kept in optimizer.state.items():
        name = names.get(id(p)) or numbered.get(id(p), "")
        for key, one in _flat("", kept):
            if isinstance(one, Tensor):
                yield from _tensor(part, f"{key} of {name}", "moments", one, name)
            elif one is not None:  # SGD notes so that it has no momentum
                yield Leaf(part, f"{key} of {name}", "moments", one, name)
    for i, group in enumerate(optimizer.param_groups):
        where = f" of group {i}" if len(optimizer.param_groups) > 1 else ""
        options = {key: one for key, one in group.items() if key not in _NO_EFFECT}
        for key, one in _flat("", options):
            value = one.item() if isinstance(one, Tensor) and one.numel() == 1 else one
            if isinstance(value, PLAIN):
                yield Leaf(part, f"{key}{where}", "hyperparameters", value)


def _tensor(part: str, text: str, kind: Kind, tensor: Tensor, of: str = "") -> Iterator[Leaf]:
    copy = None if is_lazy(tensor) or tensor.is_meta else detached_copy(tensor)
    if copy is not None:
        yield Leaf(part, text, kind, copy, of)


def _flat(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and what is plain in a nested state_dict; other objects are not read."""
    if isinstance(value, Tensor | PLAIN):
        yield name, value
    elif isinstance(value, Mapping | list | tuple) and depth < _DEEPEST:
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in pairs:
            yield from _flat(_inside(name, str(key)), one, depth + 1)
    elif hasattr(value, "__array__"):
        yield name, _digest(value)


def _digest(state: Any) -> bytes:
    """Return a hash of the state of a generator; a pickle of a tensor is another each time."""
    return hashlib.sha256(repr(_frozen(state)).encode()).digest()


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return as_array(value).tobytes()
    if isinstance(value, Mapping):
        return [(key, _frozen(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [_frozen(one) for one in value]
    return value.tobytes() if hasattr(value, "tobytes") else value


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and relative_error(one, other) == 0
    same: bool = type(one) is type(other) and (one == other or (one != one and other != other))
    return same


def _size(leaf: Leaf) -> int:
    return leaf.value.numel() if isinstance(leaf.value, Tensor) else 1


def _is_stateful(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_optimizer(value: Any) -> bool:
    return bool(_groups(value)) and isinstance(getattr(value, "state", None), Mapping)


def _groups(value: Any) -> Iterable[Mapping[str, Any]]:
    groups = getattr(value, "param_groups", ())
    return groups if isinstance(groups, list) and not isinstance(value, nn.Module) else ()


_Generator = tuple[Callable[[], Any], Callable[[Any], object]]


def _generator(value: Any) -> _Generator | None:
    """Return how the state of a random generator is read and written; None for anything else.

    Those of numpy and Python are known by their methods.
    """
    if hasattr(value, "bit_generator"):  # numpy.random.Generator
        return lambda: value.bit_generator.state, lambda state: setattr(value.bit_generator, "state", state)
    for read, write in (("get_state", "set_state"), ("getstate", "setstate")):
        if hasattr(value, read) and hasattr(value, write):
            return getattr(value, read), getattr(value, write)
    return None


def _generators_of(loader: DataLoader[Any]) -> list[tuple[str, Callable[[], Any], Callable[[Any], object]]]:
    """Return the random generators that say in which order a loader returns data."""
    batches: Any = getattr(loader, "batch_sampler", None)
    places: tuple[tuple[str, Any], ...] = (
        ("state of its generator", loader),
        ("state of its sampler's generator", loader.sampler),
        ("state of its batch sampler's generator", batches),
        ("state of its batch sampler's sampler's generator", getattr(batches, "sampler", None)),
    )
    found: dict[int, tuple[str, Any]] = {}
    for text, one in places:
        if (generator := getattr(one, "generator", None)) is not None:
            found.setdefault(id(generator), (text, generator))
    return [(text, *pair) for text, one in found.values() if (pair := _generator(one)) is not None]


def _setter(holder: Any, key: Any, kind: type[Any]) -> Callable[[Any], object] | None:
    return functools.partial(holder.__setitem__, key) if isinstance(holder, kind) else None


def _attribute_setter(holder: Any, key: str) -> Callable[[Any], object]:
    return functools.partial(setattr, holder, key)


def _inside(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _unwritable(name: str, value: Any) -> tuple[str, Any]:
    """Return the name of the innermost entry that cannot be pickled, and the entry."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, one in pairs:
        try:
            torch.save(one, io.BytesIO())
        except Exception:  # noqa: BLE001 - whatever pickling raises
            return _unwritable(_inside(name, str(key)), one)
    return name, value
