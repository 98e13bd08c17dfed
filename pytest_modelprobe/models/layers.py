"""Layers of a model by name, hooks on them, weights that are kept elsewhere, and weights that are zero.

Names must be those that the user knows: a wrapper of another library adds a segment that nobody wrote. Wrappers are
known by their type and never by a spelling, because a layer of the user may have any name. A module whose hooks would
report wrong values is refused here, before anything is attached.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import filterfalse
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pytest_modelprobe._torch import checkpointed, compiled, compiled_call, hook_tables, left_out
from pytest_modelprobe.exceptions import UnsupportedModelError
from pytest_modelprobe.record import ROOT, Plain, qualified

from .seeding import randn
from .tensors import DDP, notes_on, original_class, unexpanded

# --- hooks ------------------------------------------------------------------------------------------------------------
#
# `copy.deepcopy` and `torch.save` take a module's hooks with it. A closure as a hook could not be pickled, and in a
# copy it would record the copy's forwards as the model's. These hooks have a weak reference to their module instead,
# and turn into something inert when they are copied or pickled.


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


_ATOMIC = (nn.MultiheadAttention, nn.RNNBase)
"""Modules that compute in fused code without calling their children. Hooks on the children never fire, so that these
would look unused."""

_FABRIC = "fabric.wrappers._FabricModule"
"""Class of what `Fabric.setup` of Lightning returns, from either of its two packages."""

_OWN = frozenset(vars(nn.Module()))
"""The attributes that every module has, which say nothing of a layer."""

RUN_EAGERLY = "is compiled; it is run eagerly while it is watched"
"""What the note on a compiled model says after its name."""

# Of sequences only short ones are recorded: a stride or a padding, and not a table.
_PLAIN = frozenset({bool, int, float, str})
_SEQUENCES = frozenset({tuple, list, torch.Size})
_MOST_ITEMS = 16

_IDENTITY = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A UUID as text, which is drawn anew for each model, as in the attention of fair-esm: it sets nothing."""

Children = dict[str, dict[str, nn.Module | None]]
"""The children of layers by name, each by its name there."""


class Layers:
    """The layers of a model, found once, before anything is attached.

    Attributes:
        modules: The modules by name, in the order of ``named_modules()``. The root is ``(root)``.
        aliases: The other names of a module that occurs several times.
        notes: Remarks about wrappers that were skipped and about compiled modules.

    Raises:
        UnsupportedModelError: The model is not a module, its hooks do not fire or report wrong values, or a child has
            the root's name.

    >>> list(Layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).modules)
    ['(root)', '0', '1']
    """

    def __init__(self, model: Any) -> None:
        check_supported(model)
        self.modules: dict[str, nn.Module] = {}
        self.aliases: dict[str, list[str]] = {}
        self.notes: list[str] = []
        self._names: dict[nn.Module, str] = {}
        self._atomic: set[str] = set()
        self._plain: set[type] = set()
        """Classes that need no special treatment. Most modules are of a few of them, so each is looked at once."""
        self._walk("", model)
        self.notes += notes_on(self.modules.values())

    def _walk(self, name: str, module: nn.Module) -> None:
        kind = type(module)
        plain = kind in self._plain
        inner = None if plain else self._unwrapped(name, module)
        if inner is not None:
            return self._walk(name, inner)
        if module in self._names:
            self.aliases.setdefault(self._names[module], []).append(name or ROOT)
            return None
        self._names[module] = name or ROOT
        self.modules[name or ROOT] = module
        if compiled_call(module) is not None:
            self._note_compiled(name)
        # With hooks torch takes the other path, which is not equal to the last bit (4.8e-7 in torch 2.13).
        if not plain and isinstance(module, nn.TransformerEncoderLayer) and not module.training:
            self.notes.append(
                "TransformerEncoderLayer does not take its fused path (eval, no gradient) with hooks on it"
            )
        if not plain and isinstance(module, _ATOMIC):
            self._atomic.add(name or ROOT)
        else:
            if not (plain or isinstance(module, nn.TransformerEncoderLayer)):
                self._plain.add(kind)
            for key, child in module._modules.items():
                if child is not None:
                    if not name and key == ROOT:
                        raise UnsupportedModelError(
                            f"a child of the model is called {ROOT}, as the model itself is here: give it another name"
                        )
                    self._walk(f"{name}.{key}" if name else key, child)
        return None

    def _unwrapped(self, name: str, module: nn.Module) -> nn.Module | None:
        """Return the module inside a wrapper, or `None` if the module is not a wrapper."""
        reject_misreporting(module, name)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            self.notes.append(DDP)
            wrapped: nn.Module = module.module
            return wrapped
        if type_name(module).endswith(_FABRIC):
            return module._modules.get("_forward_module")
        inner = compiled(module)
        if inner is not None:
            self._note_compiled(name)
            return inner
        return checkpointed(module)

    def _note_compiled(self, name: str) -> None:
        self.notes.append(f"{name or ROOT} {RUN_EAGERLY}")

    def children(self) -> Children:
        """Return the children of each layer as they are now, for `changed`."""
        return {name: module._modules.copy() for name, module in self.modules.items()}

    def changed(self, before: Children) -> list[tuple[str, str]]:
        """Return the names of children that were replaced, added or removed since, each after that of its parent."""
        return [
            (name, qualified(name, key))
            for name, module in self.modules.items()
            if module._modules != (then := before[name])  # quick, as no module compares its contents
            for key in {**then, **module._modules}
            if module._modules.get(key) is not then.get(key)
        ]

    def is_leaf(self, name: str) -> bool:
        """Whether the layer has no child with calls of its own to record."""
        children = self.modules[name]._modules
        return not children or name in self._atomic or not any(child is not None for child in children.values())


def type_name(module: Any) -> str:
    """Return the qualified name of a module's class."""
    cls = original_class(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def check_supported(model: Any) -> None:
    """Raise `UnsupportedModelError` unless ``model`` is a module that can be watched as a whole."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UnsupportedModelError(
            f"{model.__name__} is the class, not a model: give an instance, {model.__name__}(...)"
        )
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"a model is a torch.nn.Module; got {type(model).__name__}"
            + (": wrap the function in a module whose forward calls it" if callable(model) else "")
        )


def reject_misreporting(module: nn.Module, name: str) -> None:
    """Raise `UnsupportedModelError` for wrappers under which hooks do not fire or report wrong values."""
    if isinstance(module, nn.DataParallel):
        raise UnsupportedModelError(
            "DataParallel runs copies of the model in threads, which hooks do not see: give model.module"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedModelError(
            f"{name or ROOT} is a ScriptModule, which runs outside Python and calls no hooks: use the eager "
            "module that it was made from"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")  # what is not imported is not in use
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        raise UnsupportedModelError(
            f"{name or ROOT} is wrapped in FSDP1, whose flat parameters hide which layer a gradient belongs to: "
            "use FSDP2 (fully_shard), or probe the model before wrapping it"
        )


def attributes(module: nn.Module) -> dict[str, Plain]:
    """Return every int, float, bool and str set on the module itself, and short public sequences of them as text.

    A text that is a UUID is left out.

    >>> attributes(nn.LayerNorm(4))
    {'normalized_shape': '(4,)', 'eps': 1e-05, 'elementwise_affine': True}
    """
    found: dict[str, Plain] = {}
    names = vars(module)
    for key in filterfalse(_OWN.__contains__, names):  # a loop in Python would take twice as long
        value = names[key]
        kind = type(value)
        if kind in _PLAIN:
            if kind is not str or not _IDENTITY.fullmatch(value):
                found[key] = value
        elif (
            kind in _SEQUENCES
            and len(value) <= _MOST_ITEMS
            and not key.startswith("_")
            and _PLAIN.issuperset(map(type, value))
        ):
            found[key] = repr(tuple(value))  # a list reads like a tuple
    return found


def own_parameters(module: nn.Module, *, atomic: bool) -> Iterable[tuple[str, nn.Parameter]]:
    """Return the parameters of the module itself, and those of its children too if it is atomic.

    ``module.parameters()`` may be the model's own, without arguments: what it hands to the optimizer, as the DPO of
    x-transformers does. What a module holds is therefore asked of `nn.Module` everywhere in this package.
    """
    if atomic and module._modules:
        return module.named_parameters(remove_duplicate=False)
    return [(name, own) for name, own in module._parameters.items() if own is not None]


def own_buffers(module: nn.Module, *, atomic: bool) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the buffers of the module itself, and those of its children too if it is atomic."""
    if atomic and module._modules:
        return module.named_buffers(remove_duplicate=False)
    return [(name, own) for name, own in module._buffers.items() if own is not None]


def is_persistent(module: nn.Module, buffer: str) -> bool | None:
    """Return whether the ``state_dict`` has a buffer, which is given by its path. `None` if that is not known.

    >>> norm = nn.BatchNorm1d(2)
    >>> norm.register_buffer("table", torch.zeros(2), persistent=False)
    >>> is_persistent(norm, "running_mean"), is_persistent(norm, "table")
    (True, False)
    """
    owner, _, name = buffer.rpartition(".")
    kept_out = left_out(module.get_submodule(owner))
    return None if kept_out is None else name not in kept_out


# --- weights that accelerate keeps on the CPU or on disk --------------------------------------------------------------
#
# Between calls a meta tensor stands in the place of each weight, so a record of its parameters would have no numbers.
# The weights are read here where the hooks of accelerate keep them, and nothing of the model is moved.


class Offloaded:
    """The weights of a model that are kept elsewhere. There are none if accelerate is not imported.

    Args:
        modules: The modules of the model, each before those inside it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept: dict[int, tuple[Mapping[str, torch.Tensor], str]] = {}
        for module in modules if "accelerate" in sys.modules else ():
            hook: Any = getattr(module, "_hf_hook", None)
            for one in getattr(hook, "hooks", (hook,)):  # a `SequentialHook` has several
                weights: Any = getattr(one, "weights_map", None)
                named = itertools.chain(module.named_parameters(), module.named_buffers())
                for name, tensor in named if weights is not None else ():
                    if tensor.is_meta:
                        self._kept[id(tensor)] = weights, name

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._kept

    def load(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a call puts in the place of a meta tensor, and any other tensor as it is.

        >>> Offloaded([]).load(torch.ones(1))
        tensor([1.])
        """
        with contextlib.suppress(KeyError, OSError):  # the weight is kept nowhere, or its file is gone
            weights, name = self._kept[id(tensor)]
            return weights[name]
        return tensor


# --- weights that are zero --------------------------------------------------------------------------------------------
#
# Heads and gates may be zero at first, on purpose. What such a weight scales is zero whatever the layers before it do,
# and no gradient reaches these, so a check would hold without having seen anything.

_STD = 0.02
"""The standard deviation, as in initializations of transformers."""


def wake_zeros(layers: Layers, seed: int) -> None:
    """Write small random numbers into weights that are all zero.

    >>> head = torch.nn.Linear(2, 1)
    >>> _ = torch.nn.init.zeros_(head.weight)
    >>> wake_zeros(Layers(head), seed=0)
    >>> bool(head.weight.any())
    True
    """
    for name, module in layers.modules.items():
        own = [(n, p) for n, p in module.named_parameters(recurse=False) if p.is_floating_point() and p.numel()]
        zero = [(n, p) for n, p in own if not p.any()]
        # A bias that is zero hides nothing, unless all parameters of the layer are zero.
        if len(zero) == len(own) or any(not n.endswith("bias") for n, _ in zero):
            for parameter_name, parameter in zero:
                written = unexpanded(parameter.detach())
                drawn = f"check {qualified(name, parameter_name)}"
                numbers = randn(written.shape, seed=seed, name=drawn, device=written.device, dtype=written.dtype)
                with torch.no_grad():
                    written.copy_(numbers * _STD)
