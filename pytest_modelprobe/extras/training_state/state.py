"""The state of a training in its parts, which are found and read.

A user has a model, an optimizer, a scheduler and more in a dict, a tuple or an object. Each is a part with a name, and
is read as named leaves: tensors that are copied, numbers, and random states as bytes. So what a checkpoint leaves out
has a name: ``exp_avg of fc1.weight`` in the part ``optimizer``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

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


class Unequal(NamedTuple):
    """A leaf that differs between two readings of a state."""

    leaf: Leaf
    """As it should be."""
    now: Leaf | None
    """None: it is not there any more."""

    @property
    def change(self) -> float | None:
        """The relative error of a tensor; None of anything else."""
        then, now = self.leaf.value, None if self.now is None else self.now.value
        return relative_error(then, now) if isinstance(then, Tensor) and isinstance(now, Tensor) else None


class TrainingState:
    """The parts of a state that a user made.

    >>> model = nn.Linear(2, 1)
    >>> state = TrainingState({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "epoch": 0})
    >>> list(state.parts)
    ['model', 'optimizer', 'epoch']
    """

    def __init__(self, state: Any) -> None:
        self.whole = state
        self.parts: dict[str, Any] = {}
        self.unread: list[str] = []
        """Names of what has no state that is known."""
        self._seen: set[int] = set()
        self._visit("", state)

    @property
    def models(self) -> dict[str, nn.Module]:
        """The modules that hold tensors, without those that are inside others."""
        found = {name: one for name, one in self.parts.items() if isinstance(one, nn.Module)}
        inner = {id(child) for one in found.values() for child in one.modules() if child is not one}
        return {
            name: one
            for name, one in found.items()
            if id(one) not in inner and [*nn.Module.parameters(one), *nn.Module.buffers(one)]
        }

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
        # An average and a teacher are in no optimizer.
        held = {id(p) for part in self.parts.values() for group in _groups(part) for p in group["params"]}
        trained = {n: one for n, one in models.items() if any(id(p) in held for p in nn.Module.parameters(one))}
        trained = trained or models
        if len(trained) > 1 and "model" not in trained:
            names = listed([f"{name} ({type(one).__name__})" for name, one in trained.items()])
            raise UsageError(
                f"make() returned {len(trained)} models that may be the one that is trained, {names}: hold them in "
                'one torch.nn.ModuleDict, or name the one to watch "model"'
            )
        return trained.get("model") or next(iter(trained.values()))

    def read(self) -> dict[tuple[str, str], Leaf]:
        """Return all leaves as they are now, and the global random states."""
        names = {id(p): name for one in [*self.models.values()][::-1] for name, p in one.named_parameters()}
        leaves = [leaf for name, value in self.parts.items() for leaf in _leaves(name, value, names)]
        leaves += [
            Leaf(RANDOM, one.name, "random", _digest(now)) for one in GENERATORS if (now := one.get()) is not None
        ]
        return {(leaf.part, leaf.text): leaf for leaf in leaves}

    def _visit(self, name: str, value: Any) -> None:
        if not isinstance(value, PLAIN) and id(value) in self._seen:
            return
        self._seen.add(id(value))
        # The whole may have a state_dict of its own.
        is_holder = not name and not isinstance(value, nn.Module | torch.optim.Optimizer) and hasattr(value, "__dict__")
        is_part = isinstance(value, Tensor | DataLoader) or _generator_state(value) is not None
        is_part |= all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
        if isinstance(value, PLAIN) or (not is_holder and is_part):
            name = name or next((text for kind, text in _NAMES if isinstance(value, kind)), type(value).__name__)
            self.parts[name if name not in self.parts else f"{name} {len(self.parts)}"] = value
        elif isinstance(value, Mapping):
            for key, one in value.items():
                self._visit(_inside(name, str(key)), one)
        elif isinstance(value, list | tuple):
            for i, one in enumerate(value):
                self._visit(_inside(name, str(i)) if name or isinstance(one, PLAIN) else "", one)
        elif is_holder or hasattr(value, "__dataclass_fields__"):
            for key, one in vars(value).items():
                self._visit(_inside(name, key), one)
        elif name and not callable(value):
            self.unread.append(f"{name} ({type(value).__name__})")


_NAMES: tuple[tuple[Any, str], ...] = (
    (nn.Module, "model"),
    (torch.optim.Optimizer, "optimizer"),
    (torch.optim.lr_scheduler.LRScheduler, "scheduler"),
    (torch.amp.GradScaler, "scaler"),
    (DataLoader, "loader"),
)


def unequal(then: Leaves, now: Leaves) -> dict[tuple[str, str], Unequal]:
    """Return what differs between a reading of a state and another, bit for bit."""
    found = {key: Unequal(leaf, now.get(key)) for key, leaf in then.items()}
    found = {key: one for key, one in found.items() if one.now is None or not _is_equal(one.leaf.value, one.now.value)}
    # A scalar, as the step of Adam, says less than what goes with it.
    return dict(sorted(found.items(), key=lambda pair: pair[1].leaf.kind == "moments" and _size(pair[1].leaf) < 2))


def shown(value: Any) -> str:
    """Return a leaf in a cell of a table.

    >>> shown(torch.tensor([3.0, 4.0])), shown(0.1), shown(b"some"), shown(torch.tensor(3.0))
    ('rms 3.536', '0.1', 'state 736f6d65', '3')
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        size = torch.linalg.vector_norm(value.to(torch.complex128 if value.is_complex() else torch.double)).item()
        return f"rms {size / math.sqrt(max(value.numel(), 1)):.4g}"
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, bytes):
        return f"state {value.hex()[:8]}"
    return f"{value:.6g}" if type(value) is float else str(value)


# --- leaves -----------------------------------------------------------------------------------------------------------


def _leaves(part: str, value: Any, names: Mapping[int, str]) -> Iterator[Leaf]:
    if isinstance(value, nn.Module):
        yield from _of_module(part, value)
    elif _groups(value):
        yield from _of_optimizer(part, value, names)
    elif isinstance(value, DataLoader):
        # The usual sampler has the generator of the loader.
        generator = getattr(value.sampler, "generator", None) or value.generator
        if (read := _generator_state(generator)) is not None:
            yield Leaf(part, "state of its generator", "random", _digest(read()))
    elif (read := _generator_state(value)) is not None:
        yield Leaf(part, "the state", "random", _digest(read()))
    elif isinstance(value, Tensor):
        yield from _tensor(part, "the tensor", "tensor", value)
    elif isinstance(value, PLAIN):
        yield Leaf(part, "the value", "value", value)
    else:
        for text, one in _flat("", value.state_dict()):
            if isinstance(one, Tensor):
                yield from _tensor(part, text, "state", one)
            else:
                yield Leaf(part, text, "state", one)


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
    for p, kept in optimizer.state.items():
        name = names.get(id(p), "a parameter")
        for key, one in _flat("", kept):
            if isinstance(one, Tensor):
                yield from _tensor(part, f"{key} of {name}", "moments", one, name)
            elif one is not None:  # SGD notes so that it has no momentum
                yield Leaf(part, f"{key} of {name}", "moments", one, name)
    for i, group in enumerate(optimizer.param_groups):
        where = f" of group {i}" if len(optimizer.param_groups) > 1 else ""
        for key, one in _flat("", {key: one for key, one in group.items() if key not in _NO_EFFECT}):
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
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
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


def _groups(value: Any) -> list[Mapping[str, Any]]:
    groups: Any = getattr(value, "param_groups", None)
    if not isinstance(groups, list) or not isinstance(getattr(value, "state", None), Mapping):
        return []
    return [] if isinstance(value, nn.Module) else groups


def _generator_state(value: Any) -> Callable[[], Any] | None:
    """Return how the state of a random generator is read; None for anything else.

    Those of numpy and Python are known by their methods.
    """
    if hasattr(value, "bit_generator"):  # numpy.random.Generator
        return lambda: value.bit_generator.state
    names = (("get_state", "set_state"), ("getstate", "setstate"))
    return next((getattr(value, get) for get, put in names if hasattr(value, get) and hasattr(value, put)), None)


def _inside(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
