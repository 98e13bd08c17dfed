"""Nested values → (path, tensor) pairs: what goes into a call and what comes out of it.

Torch's own pytree takes a plain dataclass for a leaf, so containers are opened here: tuples, lists, mappings, named
tuples, dataclasses (`transformers.ModelOutput` is one) and attrs classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .record import Plain

_DEEPEST = 16  # a container that holds itself would never end


class Flat:
    """The tensors and the plain values of one nested value, each with its path."""

    __slots__ = ("known", "plain", "tensors")

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.plain: dict[str, Plain] = {}
        self.known = True
        """False where a part is of a type that cannot be looked into."""

    def add(self, path: str, value: Any, depth: int = 0) -> None:
        """Take in ``value``, found at ``path``."""
        if isinstance(value, torch.Tensor):
            self.tensors.append((path, value))
        elif value is None or isinstance(value, (bool, int, float, str)):
            self.plain[path] = _exactly(value)
        elif isinstance(value, (torch.dtype, torch.device)):
            self.plain[path] = str(value)
        else:
            parts = _parts(value) if depth < _DEEPEST else None
            if parts is None:
                self.known = False
                return
            for suffix, part in parts:
                self.add(path + suffix, part, depth + 1)


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
        flat.add(name, arg)
    return flat


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it; containers are rebuilt, others kept as they are.

    >>> map_tensors(lambda t: t + 1, [torch.zeros(1), {"n": 3}])
    [tensor([1.]), {'n': 3}]
    """

    def visit(value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return function(value)
        if depth == _DEEPEST or isinstance(value, type):
            return value
        if isinstance(value, Mapping):
            items = {k: visit(v, depth + 1) for k, v in value.items()}
            return items if type(value) is dict else _rebuilt(value, items)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(visit(v, depth + 1) for v in value))
        if type(value) in (tuple, list):
            return type(value)(visit(v, depth + 1) for v in value)
        names = _field_names(value)
        if names is not None:
            return _rebuilt(value, {name: visit(getattr(value, name), depth + 1) for name in names})
        return value

    return visit(value, 0)


def _rebuilt(value: Any, parts: dict[str, Any]) -> Any:
    """Return a copy of a mapping or dataclass with new parts; the value itself where its class has other ideas."""
    try:
        return type(value)(**parts)
    except TypeError:
        return value
