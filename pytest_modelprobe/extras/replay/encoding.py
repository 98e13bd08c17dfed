"""Layers and the values in their calls → plain JSON and tensors, and back.

No constructor is called, because its arguments are not known: an object is made of its class and its attributes, as
`copy.copy` does. An attribute that is no plain data, and no object of a class that can be imported, is left out.

What a file names is imported and run. Nothing of Python's standard library is, as a layer needs none of it.
"""

from __future__ import annotations

import contextlib
import enum
import math
import pkgutil
import sys
import types
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe.exceptions import UsageError

_KINDS: dict[str, Any] = {"float": float, "tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}
_CONTAINERS = {kind: name for name, kind in _KINDS.items() if name != "float"}
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType)
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)

_CONTENT = ("_parameters", "_buffers", "_modules")

_LEFT_OUT = (vars(nn.Module()).keys() | {"forward"}) - {*_CONTENT, "training"}
"""Attributes of modules that are hooks and the like, and the ``forward`` of the isolated call."""


class NotPlainError(Exception):
    """A value cannot be written. The text says which."""


class Encoder:
    """Turns values into JSON, and collects their tensors. What is one object stays one.

    >>> tensors = {}
    >>> Encoder(tensors, {})((torch.ones(2), {"eps": 1e-5}), "it")
    {'tuple': [{'tensor': '0'}, {'dict': [['eps', 1e-05]]}]}
    >>> tensors
    {'0': tensor([1., 1.])}

    Args:
        tensors: What the tensors are added to.
        called: Modules, by id, of which the modules inside are left out, because they are not called.
    """

    def __init__(self, tensors: dict[str, Tensor], called: Mapping[int, object]) -> None:
        self._tensors, self._called = tensors, called
        self._known: dict[int, Any] = {}
        self.left_out: list[str] = []
        """Attributes that are no plain data, each with the reason."""

    def __call__(self, value: Any, where: str) -> Any:
        """Return a value as JSON."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind is list:
            return [self(one, where) for one in value]
        if kind in _CONTAINERS:
            return {_CONTAINERS[kind]: [self(one, where) for one in value]}
        if kind in (dict, OrderedDict):
            return {"dict": [[self(key, where), self(one, f"{where}[{key!r}]")] for key, one in value.items()]}
        if isinstance(value, _OF_TORCH):
            return {"torch": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": None}
        if id(value) not in self._known:
            self._known[id(value)] = {"same": len(self._known)}
            return self._new(value, where)
        return self._known[id(value)]

    def _new(self, value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
                raise NotPlainError(f"{where} is a tensor that is not dense ({type(value).__name__})")
            key = str(len(self._tensors))
            self._tensors[key] = value.detach().clone(memory_format=torch.contiguous_format)
            return {"parameter" if isinstance(value, nn.Parameter) else "tensor": key}
        if isinstance(value, _FUNCTIONS):
            return {"name": _name_of(value, where)}
        name = _name_of(type(value), where)
        if isinstance(value, enum.Enum):
            return {"name": f"{name}.{value.name}"}
        if isinstance(value, Mapping) and hasattr(value, "__dataclass_fields__"):  # such as an output of transformers
            return {"made": name, "of": {key: self(one, f"{where}.{key}") for key, one in value.items()}}
        if isinstance(value, Collection | int | float) or not hasattr(value, "__dict__"):
            raise NotPlainError(f"{where} is a {type(value).__name__}")
        return {"object": name, "of": self._attributes(value, where)}

    def _attributes(self, value: Any, where: str) -> dict[str, Any]:
        is_module = isinstance(value, nn.Module)
        state = value.__getstate__() if is_module else vars(value)  # less the weak references of an RNN to its weights
        found, is_called = {}, id(value) in self._called
        for name, one in state.items():
            if is_module and name in _LEFT_OUT:
                continue
            known = len(self._known)
            try:
                found[name] = self({} if name == "_modules" and is_called else one, f"{where}.{name}")
            except NotPlainError as error:
                if is_module and name in _CONTENT:
                    raise
                self.left_out.append(str(error))
                while len(self._known) > known:
                    self._known.popitem()
        return found


def _name_of(thing: Any, where: str) -> str:
    name = f"{thing.__module__}:{thing.__qualname__}"
    for one in (name, f"torch:{thing.__name__}"):  # what is written in C does not know its module
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            if not _is_standard(one) and pkgutil.resolve_name(one) is thing:
                return one
    raise NotPlainError(f"{where} is of {name.replace(':', '.')}, which cannot be imported by that name")


class Decoder:
    """Turns what `Encoder` made back into values, with their tensors on a device and floats in a dtype.

    >>> Decoder({"0": torch.ones(2)}, dtype=torch.float64)([{"tensor": "0"}, {"float": "inf"}])
    [tensor([1., 1.], dtype=torch.float64), inf]
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self._tensors, self._device, self._dtype = tensors, device or torch.device("cpu"), dtype
        self._known: list[Any] = []

    def __call__(self, data: Any) -> Any:
        """Return the value."""
        if isinstance(data, list):
            return [self(one) for one in data]
        if not isinstance(data, dict):
            return data
        (kind, content), *of = data.items()
        if kind in _KINDS:
            return _KINDS[kind](self(content))
        if kind == "dict":
            return {self(key): self(one) for key, one in content}
        if kind == "torch":
            return getattr(torch, content)
        if kind == "device":
            return self._device
        if kind == "same":
            return self._known[content]
        at = len(self._known)
        self._known.append(None)
        if kind == "object":
            made = self._known[at] = _empty(content)
            state = {name: self(one) for name, one in of[0][1].items()}
            made.__setstate__(state) if isinstance(made, nn.Module) else vars(made).update(state)
        elif kind == "made":
            made = _resolved(content)(**{name: self(one) for name, one in of[0][1].items()})
        elif kind == "name":
            made = _resolved(content)
        else:
            tensor = self._tensors[content]
            made = tensor.to(self._device, self._dtype if tensor.is_floating_point() else None, copy=True)
            made = nn.Parameter(made, requires_grad=False) if kind == "parameter" else made
        self._known[at] = made
        return made


def _empty(name: str) -> Any:
    cls = _resolved(name)
    if not isinstance(cls, type):
        raise UsageError(f"{name} is no class")
    made: Any = object.__new__(cls)
    if isinstance(made, nn.Module):
        nn.Module.__init__(made)
    return made


def _is_standard(name: str) -> bool:
    """Whether a name is one of Python's standard library, or of the program that was started."""
    return name.partition(":")[0].partition(".")[0] in {"__main__", *sys.stdlib_module_names} - {"math"}


def _resolved(name: str) -> Any:
    if _is_standard(name):
        raise UsageError(f"the file names {name}, of Python's standard library, which no layer is made of")
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        advice = "run the command in the root of the project, with the packages of the test"
        raise UsageError(f"{name} cannot be imported ({error}): {advice}") from error
