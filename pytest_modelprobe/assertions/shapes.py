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
>>> match(parse("batch seq 64"), (4, 10, 64), bindings, "encoder output")
[]
>>> [problem] = match(parse("batch seq 32"), (4, 12, 32), bindings, "decoder output")
>>> print(problem)
decoder output has shape (4, 12, 32): dimension 1 is 12, but seq is 10, bound by encoder output
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias

from pytest_modelprobe.exceptions import ShapeSpecError
from pytest_modelprobe.record import Dimension
from pytest_modelprobe.text import count
from pytest_modelprobe.text import shape as shape_text

__tracebackhide__ = True  # a traceback ends at the line of the test

Size: TypeAlias = Dimension | tuple[Dimension, ...]
"""What a name stands for: one dimension. A ``*name`` stands for a tuple of dimensions."""

Spec: TypeAlias = str | Sequence[int | str | EllipsisType | None]
"""What `parse` accepts."""

Tokens: TypeAlias = tuple[int | str, ...]
"""A spec that `parse` has read, outermost dimension first. Sizes are of type ``int``, all other tokens are text."""

_DIMS = "dims="


@dataclass(frozen=True)
class Mismatch:
    """One difference between an observed shape and a spec. ``str()`` describes it in a sentence."""

    address: str
    """The address of the value that has the shape, such as ``"fc2 output"``."""
    shape: tuple[Dimension, ...]
    complaint: str
    actual: str
    """What was observed: ``"4"``, ``"1..8"``, ``"(4, 2)"`` for a ``*name``, or the rank."""
    expected: str
    """What the spec asks for there, in the same form. A rank is ``"2"`` or ``"at least 2"``."""
    bound_by: str | None = None
    """What bound the name: an address, ``"dims="``, or ``"its own dimension 0"``. `None` if the token is no name."""

    def __str__(self) -> str:
        return f"{self.address} has shape {shape_text(self.shape)}: {self.complaint}"


class Bindings(dict[str, tuple[Size, str]]):
    """The names that are bound so far, each with its size and the address that bound it.

    Args:
        dims: Sizes that are fixed in advance. A ``"name"`` has an ``int`` or a range ``(low, high)``, a ``"*name"`` a
            tuple of these.

    Raises:
        ShapeSpecError: A key of ``dims`` is not a name, or its value is not a size.
    """

    def __init__(self, dims: Mapping[str, Size] | None = None) -> None:
        super().__init__()
        for name, value in (dims or {}).items():
            if not _is_name(_token(name)):
                raise ShapeSpecError(f"dims= has the key {name!r}; write a name, 'batch' or '*batch'.")
            sizes = value if name.startswith("*") and isinstance(value, tuple) else [value]
            if (name.startswith("*") and sizes is not value) or not all(map(_is_size, sizes)):
                raise ShapeSpecError(
                    f"dims= gives {name} the value {value!r}; write a size of 0 or more, (low, high) for a size that "
                    "varies, or a tuple of these for a '*name'."
                )
            self[name] = value, _DIMS

    def check_used(self, specs: Iterable[Tokens]) -> None:
        """Check that every name of ``dims=`` is in one of the specs. A misspelt name would fix nothing.

        >>> Bindings(dims={"bacth": 4}).check_used([parse("batch 16")])
        Traceback (most recent call last):
        pytest_modelprobe.exceptions.ShapeSpecError: dims= fixes 'bacth', which no spec uses; \
write 'batch'.
        """
        used = list(dict.fromkeys(str(token) for tokens in specs for token in tokens if _is_name(token)))
        for name in self.keys() - set(used):
            near = difflib.get_close_matches(name, used, 1)
            hint = f"write {near[0]!r}" if near else f"the names in use are: {', '.join(map(repr, used)) or 'none'}"
            raise ShapeSpecError(f"dims= fixes {name!r}, which no spec uses; {hint}.")


def parse(spec: Spec) -> Tokens:
    """Return the tokens of a spec.

    >>> parse("  batch   16 "), parse((4, None, ..., "width"))
    (('batch', 16), (4, '_', '...', 'width'))
    >>> parse("batch, 16")
    Traceback (most recent call last):
    pytest_modelprobe.exceptions.ShapeSpecError: Shape spec 'batch, 16': token 1 of 2 is 'batch,'; \
a token is an integer, a name, `_`, `...` or `*name`, with spaces alone between tokens.
    """
    elements: Any = spec.split() if isinstance(spec, str) else spec
    if not isinstance(elements, list | tuple):
        raise ShapeSpecError(
            f"Shape spec {spec!r} is of type {type(spec).__name__}; write text such as 'batch 16', or a tuple."
        )
    tokens: list[int | str] = []
    for place, element in enumerate(elements, start=1):
        token = _token(element)
        if token is None:
            raise ShapeSpecError(
                f"Shape spec {spec!r}: token {place} of {len(elements)} is {element!r}; a token is an integer, a name, "
                "`_`, `...` or `*name`, with spaces alone between tokens."
            )
        tokens.append(token)
    if sum(map(_is_variadic, tokens)) > 1:
        raise ShapeSpecError(
            f"Shape spec {spec!r} has several tokens of any length; keep one, and write `_` for single dimensions."
        )
    return tuple(tokens)


def match(tokens: Tokens, shape: Sequence[Dimension], bindings: Bindings, address: str) -> list[Mismatch]:
    """Compare an observed shape with a spec, and bind the free names of the spec if it matches.

    A shape that does not match binds nothing, so that one wrong layer causes no errors in others.

    Args:
        tokens: The spec, as `parse` returns it.
        shape: The observed sizes, outermost first.
        bindings: What the names stand for. New names are added only if the shape matches.
        address: Whose shape it is, for the messages: ``"fc1 output"``.

    Returns:
        All that is wrong, by dimension. If the rank is wrong, that is the only problem.

    >>> bindings = Bindings()
    >>> match(parse("*lead 16"), (4, 7, 16), bindings, "fc1 output")
    []
    >>> for problem in match(parse("*lead 2"), (28, 3), bindings, "fc2 output"):
    ...     print(problem)
    fc2 output has shape (28, 3): *lead stands for (28,), but is (4, 7), bound by fc1 output
    fc2 output has shape (28, 3): dimension 1 is 3, expected 2
    """
    observed = tuple(size if isinstance(size, int) else (size[0], size[1]) for size in shape)
    variadic = any(map(_is_variadic, tokens))
    fixed = len(tokens) - variadic
    if len(observed) < fixed or (len(observed) > fixed and not variadic):
        wanted = f"at least {fixed}" if variadic else str(fixed)
        told = f'{count(len(observed), "dimension")}, but "{" ".join(map(str, tokens))}" asks for {wanted}'
        return [Mismatch(address, observed, told, str(len(observed)), wanted)]
    problems: list[Mismatch] = []
    fresh: dict[str, tuple[Size, str]] = {}
    for dimension, token, size in _aligned(tokens, observed):
        if isinstance(token, int):
            expected: tuple[Size, str | None] = token, None
        elif _is_name(token):
            expected = bindings.get(token) or fresh.setdefault(token, (size, f"its own dimension {dimension}"))
        else:
            continue
        if size != expected[0]:
            actual, wanted = (_size_text(token, one) for one in (size, expected[0]))
            since = f"{'fixed' if expected[1] == _DIMS else 'bound'} by {expected[1]}"
            here = f"dimension {dimension} {'is' if isinstance(size, int) else 'varies in'} {actual}"
            told = f"{here}, expected {wanted}" if expected[1] is None else f"{here}, but {token} is {wanted}, {since}"
            if str(token).startswith("*"):
                told = f"{token} stands for {actual}, but is {wanted}, {since}"
            problems.append(Mismatch(address, observed, told, actual, wanted, expected[1]))
    if not problems:
        bindings.update({name: (size, address) for name, (size, _) in fresh.items()})
    return problems


def _size_text(token: int | str, size: Any) -> str:
    if str(token).startswith("*"):
        return shape_text(size)
    return str(size) if isinstance(size, int) else f"{size[0]}..{size[1]}"


def _aligned(tokens: Tokens, shape: tuple[Dimension, ...]) -> Iterator[tuple[int, int | str, Size]]:
    """Yield each token with the index of its first dimension and its size in ``shape``."""
    dimension = 0
    for token in tokens:
        if _is_variadic(token):
            end = dimension + len(shape) - len(tokens) + 1
            yield dimension, token, shape[dimension:end]
            dimension = end
        else:
            yield dimension, token, shape[dimension]
            dimension += 1


def _is_name(token: object) -> bool:
    return isinstance(token, str) and token not in ("_", "...")


def _is_variadic(token: object) -> bool:
    return isinstance(token, str) and (token == "..." or token.startswith("*"))


def _token(element: Any) -> int | str | None:
    """Return the token of a piece of text or of an element of a tuple, or `None` if it is not a token."""
    if element is None or element is ...:
        return "_" if element is None else "..."
    if isinstance(element, str):
        if element.isascii() and element.isdecimal():
            return int(element)
        name = element.removeprefix("*")
        # "None" stands for any size in other notations. The star of "*_" would bind a name that means "do not bind".
        known = element in ("_", "...") or (name.isidentifier() and name not in ("_", "None"))
        return element if known else None
    return element if _is_size(element) and isinstance(element, int) else None


def _is_size(value: Any) -> bool:
    """Whether a value is one dimension: an integer of 0 or more, or a range ``(low, high)``."""
    if isinstance(value, tuple):
        return len(value) == 2 and all(type(end) is int and end >= 0 for end in value) and value[0] < value[1]
    return type(value) is int and value >= 0
