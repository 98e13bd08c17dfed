"""Nested values → (path, tensor) pairs: the arguments and the output of a call.

Torch's own pytree takes a plain dataclass for a leaf, so containers are opened here: tuples, lists, mappings, named
tuples, dataclasses (`transformers.ModelOutput` is one) and attrs classes. The attributes of other objects, such as a
distribution or a cache, are searched in outputs only: a cache is an argument of every layer, and would be recorded with
each of them. What cannot be opened is told, because a check that saw nothing of an output must not pass.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import torch

from pytest_modelprobe.record import Plain

_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_MOST = 1000  # parts of one value: objects that refer to each other would never end
_MOST_OPENED = 10_000  # parts of one value if objects are searched, which have many attributes
_DEEPEST = 50  # containers within each other: a list that contains itself has no end
_FROM_PYTHON = 1 << 9
"""Py_TPFLAGS_HEAPTYPE, the flag of classes made in Python. Objects of other types keep their contents elsewhere than in
attributes."""


class Flat:
    """The tensors and the plain values of one nested value, each with its path."""

    __slots__ = ("known", "opaque", "plain", "tensors")

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.plain: dict[str, Plain] = {}
        self.opaque: dict[str, str] = {}
        """The values that cannot be searched: path → name of the type."""
        self.known = True
        """False if a part is not a container. Of an object that is searched only the tensors are taken."""


class _Search:
    """Fills a `Flat` with what is found in a value.

    Args:
        flat: What is filled.
        objects: Whether to search the attributes of objects that are not containers.
    """

    def __init__(self, flat: Flat, *, objects: bool) -> None:
        self._flat = flat
        self._objects = objects
        self._opened: list[Any] = []
        self._left = _MOST_OPENED if objects else _MOST
        self._depth = 0

    def add(self, path: str, value: Any) -> None:
        """Add ``value``, found at ``path``."""
        flat = self._flat
        if isinstance(value, torch.Tensor):
            flat.tensors.append((path, value))
        elif value is None or isinstance(value, (bool, int, float, str)):
            flat.plain[path] = _exactly(value)
        elif isinstance(value, _NAMED):
            flat.plain[path] = str(value)
        else:
            inside = None if self._depth == _DEEPEST else parts(value)
            if inside is None:
                self._look_into(path, value)
                return
            self._depth += 1
            for suffix, part in inside:
                self._left -= 1
                if self._left < 0:
                    self._leave(path, value, " of too many parts")
                    break
                self.add(path + suffix, part)
            self._depth -= 1

    def _look_into(self, path: str, value: Any) -> None:
        """Add the tensors in the attributes of an object that is not a container."""
        flat = self._flat
        flat.known = False
        attributes = _attributes(value) if self._objects and self._depth < _DEEPEST else {}
        if not attributes:
            self._leave(path, value)
            return
        if any(value is known for known in self._opened):
            return
        # A function among the attributes may compute a part of the output later, which nobody would have looked at.
        hidden = (isinstance(x, functools.partial) or getattr(x, "__closure__", None) for x in attributes.values())
        if any(hidden):
            self._leave(path, value)
        self._opened.append(value)  # it may contain itself
        before, plain = len(flat.tensors), flat.plain
        flat.plain = {}
        self._depth += 1
        for name, part in attributes.items():
            self._left -= 1
            if self._left < 0:
                self._leave(path, value, " of too many parts")
                break
            if not _is_code(part):
                self.add(f"{path}.{name}", part)
        self._depth -= 1
        flat.plain = plain
        # Distributions hold their parameter a second time as `_param`.
        found = {id(tensor): (where, tensor) for where, tensor in reversed(flat.tensors[before:])}
        flat.tensors[before:] = reversed(found.values())

    def _leave(self, path: str, value: Any, more: str = "") -> None:
        self._flat.known = False
        self._flat.opaque[path] = type(value).__qualname__ + more


def _exactly(value: Any) -> Plain:
    """Convert an instance of a subclass (an enum, a numpy float) to the builtin type, which records are made of."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value) if type(value) is not kind else value
    return None


def parts(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Return the (path suffix, part) pairs of a container, or `None` if the value is not a container."""
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


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, or none if it has other contents too, like an iterator, mapping or module."""
    kinds = type(value).__mro__[:-1]
    if any(not kind.__flags__ & _FROM_PYTHON or vars(kind).get("__slots__") for kind in kinds):
        return {}
    if isinstance(value, (torch.nn.Module, Iterator, AsyncIterator, Mapping)):
        return {}
    return dict(getattr(value, "__dict__", {}))


def _is_code(value: Any) -> bool:
    """Whether an attribute is not a result but a function, a class or a module."""
    return callable(value) and not _attributes(value)


def flatten(path: str, value: Any, *, objects: bool = True) -> Flat:
    """Return the tensors and plain values inside ``value``, the output of a call.

    Args:
        path: Prefix of the paths.
        value: The nested value.
        objects: Whether to search the attributes of objects that are not containers. Modules and iterators are never
            searched.

    >>> flat = flatten("output", {"logits": torch.zeros(2), "n": 3})
    >>> [path for path, _ in flat.tensors], flat.plain
    (['output.logits'], {'output.n': 3})
    >>> flat = flatten("output", (torch.distributions.Normal(torch.zeros(2), torch.ones(2)), iter([])))
    >>> [path for path, _ in flat.tensors], flat.opaque
    (['output[0].loc', 'output[0].scale'], {'output[1]': 'list_iterator'})
    """
    flat = Flat()
    if type(value) is torch.Tensor:  # by far the most outputs are one tensor
        flat.tensors.append((path, value))
    else:
        _Search(flat, objects=objects).add(path, value)
    return flat


def unseen(flat: Flat) -> str | None:
    """Return a message on the parts of an output that cannot be searched, or `None` if there are none.

    >>> unseen(flatten("output", (torch.zeros(2), iter([]))))
    'output[1] cannot be looked into (list_iterator): give out tensors, or wrap the model in a module that does'
    """
    if not flat.opaque:
        return None
    path, kind = next(iter(flat.opaque.items()))
    more = f", and {len(flat.opaque) - 1} more" if len(flat.opaque) > 1 else ""
    return f"{path} cannot be looked into ({kind}){more}: give out tensors, or wrap the model in a module that does"


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, objects: bool = False) -> Flat:
    """Return the tensors and plain values among the arguments of a call.

    A single positional argument is ``input``, several are ``input[0]``, ``input[1]``... Keywords go by their name.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
        objects: Whether to search the attributes of objects that are not containers.

    >>> flat = flatten_call((torch.zeros(2),), {"mask": torch.ones(2), "causal": True})
    >>> [path for path, _ in flat.tensors], flat.plain
    (['input', 'mask'], {'causal': True})
    """
    flat = Flat()
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
        flat.tensors.append(("input", args[0]))
        return flat
    search = _Search(flat, objects=objects)
    for i, arg in enumerate(args):
        search.add("input" if len(args) == 1 else f"input[{i}]", arg)
    for name, arg in kwargs.items():
        search.add("input=" if args and name == "input" else name, arg)  # `input` is the positional one already
    return flat


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it. Values without tensors stay the same objects.

    A tensor that occurs several times is passed to ``function`` once, and its result stands in all these places.
    Containers are rebuilt, and so are objects in which `flatten` finds a tensor.

    >>> map_tensors(lambda t: t + 1, [torch.zeros(1), {"n": 3}])
    [tensor([1.]), {'n': 3}]
    """
    __tracebackhide__ = True
    return _mapped(function, value, {})


def _mapped(function: Callable[[torch.Tensor], Any], value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    """Return what `map_tensors` does.

    Args:
        function: Applied to each tensor.
        value: The value.
        done: Values with their results, by id. As long as a value lives, no other object gets its id.
    """
    __tracebackhide__ = True
    if id(value) in done:
        return done[id(value)][1]
    if isinstance(value, torch.Tensor):
        done[id(value)] = value, function(value)
        return done[id(value)][1]
    parts = _settable(value)
    if parts is None:
        return value
    done[id(value)] = value, value  # it may contain itself
    changed = {key: _mapped(function, part, done) for key, part in parts}
    done[id(value)] = value, _rebuilt(value, changed)
    return done[id(value)][1]


def _settable(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return the parts of a container, each with the key, index or attribute by which it is set."""
    if isinstance(value, Mapping):
        return iter(value.items())
    names = _field_names(value)
    if names is not None and not isinstance(value, tuple):
        return ((name, getattr(value, name)) for name in names if hasattr(value, name))
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    attributes = _attributes(value)
    return iter(attributes.items()) if attributes and flatten("", value).tensors else None


def _rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a copy of a container with these parts, made without its ``__init__``, whose arguments are not known."""
    if isinstance(value, tuple):
        named = hasattr(value, "_fields")
        return type(value)(*parts.values()) if named else type(value)(parts.values())
    if not isinstance(value, (Mapping, list)) and _field_names(value) is None:
        rebuilt = object.__new__(type(value))
        rebuilt.__dict__.update(parts)  # not `setattr`: a property may have the same name
        return rebuilt
    try:
        rebuilt = copy.copy(value)
        if isinstance(value, (Mapping, list)):
            for key, part in parts.items():
                rebuilt[key] = part
        else:
            for name, part in parts.items():
                object.__setattr__(rebuilt, name, part)  # the dataclass may be frozen
        return rebuilt
    except TypeError:  # a mapping that cannot be written to
        return parts
