"""Shape specifications for `assert_shapes`: how they are read, and how shapes are compared with them.

A test of one layer can compare numbers. A test of a model wants to say that a size is the same in several layers, and
often does not care which. So a spec has names, and a name is bound by the first shape that has a size for it.

A spec is a string of tokens separated by whitespace, one for each dimension, outermost first:

===========  ===================================================================================
``16``       exactly this size
``batch``    any size, but the same wherever the name stands, in all layers; ``dims=`` fixes it
``_``        any size of one dimension
``...``      any number of dimensions, also none
``*lead``    any number of dimensions, but the same sizes wherever ``*lead`` stands
===========  ===================================================================================

A spec has at most one ``...`` or ``*name``: with two it would not be known where the first ends. The empty spec is the
shape of a scalar. A tuple or a list is a spec too. Each element is then an ``int``, a token, ``None`` for ``_``, or
``...``.

A size that varied between forwards is the inclusive range ``(low, high)``. A name may stand for such a range, and then
it matches only the same range. An integer never matches a range.

>>> bindings = Bindings(dims={"batch": 4})
>>> match("batch seq 64", (4, 10, 64), bindings, "encoder output")
[]
>>> [problem] = match("batch seq 32", (4, 12, 32), bindings, "decoder output")
>>> print(problem)
decoder output has shape (4, 12, 32): dimension 1 is 12, but seq is 10, bound by encoder output
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias, TypeGuard

from pytest_modelprobe.exceptions import ShapeSpecError
from pytest_modelprobe.record import Dimension
from pytest_modelprobe.text import count
from pytest_modelprobe.text import shape as shape_text

__tracebackhide__ = True  # a traceback ends at the line of the test

Size: TypeAlias = Dimension | tuple[Dimension, ...]
"""What a name stands for: one dimension. A ``*name`` stands for a tuple of dimensions."""

_TOKENS = "a token is an integer, a name, `_`, `...` or `*name`"
_DIMS = "dims="


@dataclass(frozen=True)
class ShapeSpec:
    """A spec that `parse` has read. ``str()`` returns its text, with one space between tokens."""

    tokens: tuple[int | str, ...]
    """The tokens, outermost dimension first. Sizes are of type ``int``, all other tokens are text."""

    def __str__(self) -> str:
        return " ".join(map(str, self.tokens))

    @property
    def names(self) -> tuple[str, ...]:
        """The tokens that are names, each once. A ``*name`` has its star.

        >>> parse("*lead n 3 n").names
        ('*lead', 'n')
        """
        return tuple(dict.fromkeys(token for token in self.tokens if _is_name(token)))

    @property
    def variadic(self) -> bool:
        """Whether one of the tokens takes any number of dimensions."""
        return any(map(_is_variadic, self.tokens))


Spec: TypeAlias = str | Sequence[int | str | EllipsisType | None] | ShapeSpec
"""What `parse` accepts."""


@dataclass(frozen=True)
class Bound:
    """The size that a name stands for, and where it was bound."""

    value: Size
    """The size, or the tuple of sizes of a ``*name``."""

    address: str
    """What bound the name: an address such as ``"fc1 output"``, or ``"dims="``."""


@dataclass(frozen=True)
class Mismatch:
    """One difference between an observed shape and a spec. ``str()`` describes it in a sentence."""

    address: str
    """The address of the value that has the shape, such as ``"fc2 output"``."""

    shape: tuple[Dimension, ...]
    """The whole observed shape."""

    dimension: int | None
    """The index of the dimension, from 0. For a ``*name`` it is the first one; it is `None` if the rank differs."""

    actual: str
    """What was observed there: ``"4"``, ``"1..8"``, ``"(4, 2)"`` for a ``*name``, or the rank."""

    expected: str
    """What the spec asks for there, in the same form. A rank is ``"2"`` or ``"at least 2"``."""

    token: str
    """The token, or the whole spec if the rank differs."""

    bound_by: str | None = None
    """What bound the name: an address, ``"dims="``, or ``"its own dimension 0"``. `None` if the token is no name."""

    def __str__(self) -> str:
        return f"{self.address} has shape {shape_text(self.shape)}: {self._complaint()}"

    def _complaint(self) -> str:
        if self.dimension is None:
            return f'{count(int(self.actual), "dimension")}, but "{self.token}" asks for {self.expected}'
        since = f"{'fixed' if self.bound_by == _DIMS else 'bound'} by {self.bound_by}"
        if self.token.startswith("*"):
            return f"{self.token} stands for {self.actual}, but is {self.expected}, {since}"
        varies = not isinstance(self.shape[self.dimension], int)
        here = f"dimension {self.dimension} {'varies in' if varies else 'is'} {self.actual}"
        if self.bound_by is None:
            return f"{here}, expected {self.expected}"
        return f"{here}, but {self.token} is {self.expected}, {since}"


class Bindings(dict[str, Bound]):
    """The names that are bound so far, each with its size and the address that bound it.

    Args:
        dims: Sizes that are fixed in advance. A ``"name"`` has an ``int`` or a range ``(low, high)``, a ``"*name"`` a
            tuple of these.

    Raises:
        ShapeSpecError: A key of ``dims`` is not a name, or its value is not a size.

    >>> bindings = Bindings(dims={"batch": 4})
    >>> bindings["batch"]
    Bound(value=4, address='dims=')
    >>> match("batch width", (4, 16), bindings, "fc1 output")
    []
    >>> bindings["width"]
    Bound(value=16, address='fc1 output')
    """

    def __init__(self, dims: Mapping[str, Size] | None = None) -> None:
        super().__init__()
        for name, value in (dims or {}).items():
            checked = _checked_name(name)
            self[checked] = Bound(_checked_size(checked, value), _DIMS)

    def __repr__(self) -> str:
        return f"Bindings({super().__repr__()})"

    def check_used(self, specs: Iterable[ShapeSpec]) -> None:
        """Check that every name of ``dims=`` is in one of the specs. A misspelt name would fix nothing.

        Raises:
            ShapeSpecError: A name is in no spec. The message has the name that was probably meant.

        >>> Bindings(dims={"bacth": 4}).check_used([parse("batch 16")])
        Traceback (most recent call last):
        pytest_modelprobe.exceptions.ShapeSpecError: dims= fixes 'bacth', which no spec uses; \
write 'batch'.
        """
        used = list(dict.fromkeys(name for spec in specs for name in spec.names))
        for name, bound in self.items():
            if bound.address == _DIMS and name not in used:
                near = difflib.get_close_matches(name, used, 1)
                names = ", ".join(map(repr, used)) or "none"
                hint = f"write {near[0]!r}" if near else f"the names in use are: {names}"
                raise ShapeSpecError(f"dims= fixes {name!r}, which no spec uses; {hint}.")


def parse(spec: Spec) -> ShapeSpec:
    """Return a spec as tokens. A `ShapeSpec` is returned unchanged.

    Raises:
        ShapeSpecError: A token cannot be read. The message has its position and what to write instead.

    >>> str(parse("  batch   16 "))
    'batch 16'
    >>> str(parse((4, None, ..., "width")))
    '4 _ ... width'
    >>> parse("batch, 16")
    Traceback (most recent call last):
    pytest_modelprobe.exceptions.ShapeSpecError: Shape spec 'batch, 16': token 1 of 2 is 'batch,'; \
write 'batch 16', with spaces alone between tokens.
    """
    if isinstance(spec, ShapeSpec):
        return spec
    if isinstance(spec, str):
        elements: Sequence[object] = spec.split()
    elif isinstance(spec, list | tuple):
        elements = spec
    else:
        raise ShapeSpecError(
            f"Shape spec {spec!r} is of type {type(spec).__name__}; write text such as 'batch 16', or a tuple."
        )
    tokens: list[int | str] = []
    for place, element in enumerate(elements, start=1):
        token = _token(element)
        if token is None:
            raise ShapeSpecError(
                f"Shape spec {spec!r}: token {place} of {len(elements)} is {element!r}; {_fix(spec, element)}."
            )
        tokens.append(token)
    variadic = [token for token in tokens if _is_variadic(token)]
    if len(variadic) > 1:
        raise ShapeSpecError(
            f"Shape spec {spec!r} has {len(variadic)} tokens of any length,"
            f" {' and '.join(map(repr, variadic))}; keep one, and write `_` for single dimensions."
        )
    return ShapeSpec(tuple(tokens))


def match(spec: Spec, shape: Sequence[Dimension], bindings: Bindings, address: str) -> list[Mismatch]:
    """Compare an observed shape with a spec, and bind the free names of the spec if it matches.

    A shape that does not match binds nothing, so that one wrong layer causes no errors in others.

    Args:
        spec: The spec, in any form that `parse` reads.
        shape: The observed sizes, outermost first.
        bindings: What the names stand for. New names are added only if the shape matches.
        address: Whose shape it is, for the messages: ``"fc1 output"``.

    Returns:
        All that is wrong, by dimension. If the rank is wrong, that is the only problem.

    >>> bindings = Bindings()
    >>> match("*lead 16", (4, 7, 16), bindings, "fc1 output")
    []
    >>> for problem in match("*lead 2", (28, 3), bindings, "fc2 output"):
    ...     print(problem)
    fc2 output has shape (28, 3): *lead stands for (28,), but is (4, 7), bound by fc1 output
    fc2 output has shape (28, 3): dimension 1 is 3, expected 2
    """
    parsed = parse(spec)
    observed = tuple(size if isinstance(size, int) else (size[0], size[1]) for size in shape)
    fixed = len(parsed.tokens) - parsed.variadic
    if len(observed) < fixed or (len(observed) > fixed and not parsed.variadic):
        least = "at least " if parsed.variadic else ""
        rank = str(len(observed))
        return [Mismatch(address, observed, None, rank, f"{least}{fixed}", str(parsed))]

    problems: list[Mismatch] = []
    fresh: dict[str, Bound] = {}
    for dimension, token, actual in _aligned(parsed, observed):
        if isinstance(token, int):
            expected = Bound(token, "")
        elif not _is_name(token):
            continue
        else:
            here = Bound(actual, f"its own dimension {dimension}")
            expected = bindings.get(token) or fresh.setdefault(token, here)
        if actual != expected.value:
            found, wanted = _format_size(token, actual), _format_size(token, expected.value)
            problems.append(Mismatch(address, observed, dimension, found, wanted, str(token), expected.address or None))
    if not problems:
        for name, bound in fresh.items():
            bindings[name] = Bound(bound.value, address)
    return problems


def _format_size(token: int | str, value: Any) -> str:
    if str(token).startswith("*"):
        return shape_text(value)
    return str(value) if isinstance(value, int) else f"{value[0]}..{value[1]}"


def _aligned(spec: ShapeSpec, shape: tuple[Dimension, ...]) -> Iterator[tuple[int, int | str, Size]]:
    """Yield each token with the index of its first dimension and its size in ``shape``."""
    dimension = 0
    for token in spec.tokens:
        if _is_variadic(token):
            end = dimension + len(shape) - len(spec.tokens) + 1
            yield dimension, token, shape[dimension:end]
            dimension = end
        else:
            yield dimension, token, shape[dimension]
            dimension += 1


# --- reading tokens -----------------------------------------------------------------------------


def _is_name(token: object) -> TypeGuard[str]:
    return isinstance(token, str) and token not in ("_", "...")


def _is_variadic(token: object) -> TypeGuard[str]:
    return isinstance(token, str) and (token == "..." or token.startswith("*"))


def _token(element: Any) -> int | str | None:
    """Return the token of a piece of text or of an element of a tuple, or `None` if it is not a token."""
    if element is None:
        return "_"
    if element is ...:
        return "..."
    if isinstance(element, str):
        if element.isascii() and element.isdecimal():
            return int(element)
        name = element.removeprefix("*")
        # "None" is an identifier, but stands for any size in other notations. The star of "*_" would
        # bind a name that elsewhere means "do not bind".
        known = element in ("_", "...") or (name.isidentifier() and name not in ("_", "None"))
        return element if known else None
    if isinstance(element, bool):
        return None
    try:
        size = operator.index(element)
    except TypeError:
        return None
    return size if size >= 0 else None


def _fix(spec: Spec, element: object) -> str:
    """Return what to write instead of an element that is not a token."""
    text = str(element)
    if re.fullmatch(r"-\d+|None|\?|\*", text):
        return "write `_` for any size"
    if text in ("..", "…", "**", "*_"):
        return "write `...` for any number of dimensions"
    if not isinstance(element, str):
        return _TOKENS
    if "=" in text:
        return "write the name alone, and its size in dims="
    if not isinstance(spec, str):
        return f"one token is one element, and {_TOKENS}"
    plain = re.sub(r"[()\[\],;]|(?<=\d)[x×](?=\d)", " ", spec).split()
    if all(_token(token) is not None for token in plain):
        return f"write {' '.join(plain)!r}, with spaces alone between tokens"
    return _TOKENS


def _checked_name(name: object) -> str:
    if isinstance(name, str) and isinstance(_token(name), str) and _is_name(name):
        return name
    raise ShapeSpecError(f"dims= has the key {name!r}; write a name, 'batch' or '*batch'.")


def _checked_size(name: str, value: Any) -> Size:
    """Return a value of ``dims=`` as integers and tuples, or raise `ShapeSpecError` if it is no size for the name."""
    if name.startswith("*"):
        sizes = [_dimension(each) for each in value] if isinstance(value, list | tuple) else [None]
        if None not in sizes:
            return tuple(size for size in sizes if size is not None)  # all of them, for mypy
        raise ShapeSpecError(f"dims= gives {name} the value {value!r}; write a tuple of sizes, such as (4, 16).")
    size = _dimension(value)
    if size is None:
        raise ShapeSpecError(
            f"dims= gives {name} the value {value!r}; write a size of 0 or more, (low, high) for a"
            f" size that varies, or '*{name}' for several dimensions."
        )
    return size


def _dimension(value: Any) -> Dimension | None:
    if isinstance(value, list | tuple):
        ends = [end for end in map(_dimension, value) if isinstance(end, int)]
        if len(ends) == len(value) == 2 and ends[0] < ends[1]:
            return ends[0], ends[1]
        return None
    size = None if isinstance(value, str) else _token(value)
    return size if isinstance(size, int) else None
