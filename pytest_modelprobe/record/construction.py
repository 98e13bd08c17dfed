"""What the frozen dataclasses of a record have in common.

A record has thousands of objects, and making them took a fifth of the time to read a snapshot. So they are made in half
the time that `dataclasses` takes, and with Python's garbage collector paused. A NaN in one equals a NaN in another: two
runs that both have a NaN at the same place have the same record.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, cast

T = TypeVar("T")


def quickly_made(kind: type[T]) -> type[T]:
    """Return a frozen dataclass with slots, with an ``__init__`` that sets each slot directly.

    The ``__init__`` that `dataclasses` writes for a frozen class passes the name of each field to
    ``object.__setattr__``, and takes twice as long.

    >>> from dataclasses import dataclass
    >>> @quickly_made
    ... @dataclass(frozen=True, slots=True, kw_only=True)
    ... class Size:
    ...     width: int
    ...     height: int = 1
    >>> Size(width=3)
    Size(width=3, height=1)
    """
    own = fields(kind)  # type: ignore[arg-type]
    names: dict[str, Any] = {"MISSING": MISSING}
    lines = []
    for field in own:
        names[f"set_{field.name}"] = getattr(kind, field.name).__set__
        value = field.name
        if field.default_factory is not MISSING:
            names[f"make_{field.name}"] = field.default_factory
            value = f"make_{value}() if {value} is MISSING else {value}"
        lines.append(f"    set_{field.name}(self, {value})")
    parameters = ", ".join(field.name for field in own)
    # Compiled from text, as in `dataclasses`: a loop over the slots would take longer than what it replaces.
    exec("\n".join([f"def __init__(self, *, {parameters}):", *lines]), names)
    made, written = names["__init__"], kind.__init__
    made.__kwdefaults__ = {
        field.name: field.default
        for field in own
        if field.default is not MISSING or field.default_factory is not MISSING
    }
    made.__annotations__, made.__qualname__ = written.__annotations__, written.__qualname__
    kind.__init__ = made  # type: ignore[method-assign]
    return kind


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause cyclic garbage collection in a block that makes or drops thousands of objects, none of them in cycles.

    >>> with gc_paused():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class NanEqual:
    """Base of dataclasses that are equal if all fields are equal, where a NaN equals a NaN."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        values = _values_of(cast(Any, type(self)))
        # Most objects have no NaN, and the plain comparison is the faster one.
        return bool(values(self) == values(other)) or _fields(self) == _fields(other)

    def __hash__(self) -> int:
        return hash(_fields(self))


def _fields(numbers: Any) -> tuple[Any, ...]:
    return tuple(_with_one_nan(getattr(numbers, f.name)) for f in fields(numbers) if f.compare)


@functools.cache
def _values_of(kind: type[Any]) -> Callable[[object], object]:
    return operator.attrgetter(*(field.name for field in fields(kind) if field.compare))


def _with_one_nan(value: Any) -> Any:
    """Return the value with `math.nan` for every NaN: in tuples and mappings an object always equals itself."""
    if isinstance(value, tuple):
        return tuple(map(_with_one_nan, value))
    if isinstance(value, Mapping):
        return {key: _with_one_nan(part) for key, part in value.items()}
    return math.nan if isinstance(value, float) and math.isnan(value) else value
