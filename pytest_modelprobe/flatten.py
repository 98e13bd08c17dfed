"""Nested values → (path, tensor) pairs: what goes into a call and what comes out of it.

Torch's own pytree takes a plain dataclass for a leaf, so containers are opened here: tuples, lists, mappings, named
tuples, dataclasses (`transformers.ModelOutput` is one) and attrs classes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .record import Plain

_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_MOST = 1000  # parts: a graph of objects that refer to each other would never end
_DEEPEST = 50


class Flat:
    """The tensors and the plain values of one nested value, each with its path."""

    __slots__ = ("_depth", "_left", "known", "plain", "tensors")

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.plain: dict[str, Plain] = {}
        self.known = True
        """False where a part is of a type that cannot be looked into."""
        self._left = _MOST
        self._depth = 0

    def add(self, path: str, value: Any) -> None:
        """Take in ``value``, found at ``path``."""
        if isinstance(value, torch.Tensor):
            self.tensors.append((path, value))
        elif value is None or isinstance(value, (bool, int, float, str)):
            self.plain[path] = _exactly(value)
        elif isinstance(value, _NAMED):
            self.plain[path] = str(value)
        else:
            parts = None if self._depth == _DEEPEST else _parts(value)
            if parts is None:
                self.known = False
                return
            self._depth += 1
            for suffix, part in parts:
                self._left -= 1
                if self._left < 0:
                    self.known = False
                    break
                self.add(path + suffix, part)
            self._depth -= 1


def _exactly(value: Any) -> Plain:
    """Return the builtin that a subclass (an enum, a numpy float) stands for: records hold no others."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value) if type(value) is not kind else value
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Return the (path suffix, part) pairs of a container; None for what is no container."""
    if isinstance(value, Mapping):
        return ((f".{k}" if str(k).isidentifier() else f"[{k!r}]", v) for k, v in value.items())
    names = _field_names(value)
    if names is not None:
        return ((f".{name}", getattr(value, name, None)) for name in names)
    if isinstance(value, (tuple, list)):
        return ((f"[{i}]", v) for i, v in enumerate(value))
    return None


def _field_names(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return tuple(f.name for f in dataclasses.fields(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(value._fields)
    attributes = getattr(type(value), "__attrs_attrs__", None)
    return None if attributes is None else tuple(a.name for a in attributes)


def flatten(path: str, value: Any) -> Flat:
    """Return the tensors and plain values inside ``value``.

    >>> flat = flatten("output", {"logits": torch.zeros(2), "n": 3})
    >>> [path for path, _ in flat.tensors], flat.plain
    (['output.logits'], {'output.n': 3})
    """
    flat = Flat()
    flat.add(path, value)
    return flat


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Flat:
    """Return the tensors and plain values among the arguments of a call.

    A single positional argument is ``input``, several are ``input[0]``, ``input[1]``..., keywords go by their name.

    >>> flat = flatten_call((torch.zeros(2),), {"mask": torch.ones(2), "causal": True})
    >>> [path for path, _ in flat.tensors], flat.plain
    (['input', 'mask'], {'causal': True})
    """
    flat = Flat()
    for i, arg in enumerate(args):
        flat.add("input" if len(args) == 1 else f"input[{i}]", arg)
    for name, arg in kwargs.items():
        flat.add("input=" if args and name == "input" else name, arg)  # `input` is the positional one
    return flat


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it; containers are rebuilt, others kept as they are.

    >>> map_tensors(lambda t: t + 1, [torch.zeros(1), {"n": 3}])
    [tensor([1.]), {'n': 3}]
    """
    done: dict[int, tuple[Any, Any]] = {}  # by id, each with what it was, so that the id stays its own

    def visit(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return function(value)
        if id(value) in done:
            return done[id(value)][1]
        parts = _settable(value)
        if parts is None:
            return value
        done[id(value)] = value, value  # it may hold itself
        changed = {key: visit(part) for key, part in parts}
        done[id(value)] = value, _rebuilt(value, changed)
        return done[id(value)][1]

    return visit(value)


def _settable(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return the parts of a container, each with what it is set by: key, index or attribute."""
    if isinstance(value, Mapping):
        return iter(value.items())
    names = _field_names(value)
    if names is not None and not isinstance(value, tuple):
        return ((name, getattr(value, name)) for name in names if hasattr(value, name))
    return enumerate(value) if isinstance(value, (tuple, list)) else None


def _rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a copy of a container with these parts, made without its ``__init__``, which may have other ideas."""
    if isinstance(value, tuple):
        named = hasattr(value, "_fields")
        return type(value)(*parts.values()) if named else type(value)(parts.values())
    try:
        rebuilt = copy.copy(value)
        if isinstance(value, (Mapping, list)):
            for key, part in parts.items():
                rebuilt[key] = part
        else:
            for name, part in parts.items():
                object.__setattr__(rebuilt, name, part)
        return rebuilt
    except TypeError:  # a mapping that cannot be written to
        return parts
