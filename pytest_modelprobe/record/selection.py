"""Selection of layers: from a ``layers=`` selector to names.

A selector is one of

====================  ==========================================================================
``"blocks.*.attn"``   a glob on the dotted name: ``*`` is exactly one segment, ``**`` any number
                      of segments, zero included; inside a segment ``*``, ``?`` and ``[...]``
                      mean the same as in :mod:`fnmatch`; upper and lower case differ
``"!blocks.0.**"``    a glob with ``!`` in front excludes
a ``re.Pattern``      must match the whole name
a class               the layers of that type
a callable            ``(name, layer) -> bool``
a list of these       the layers that any element includes, less those that any element excludes,
                      in whichever order they stand; exclusions alone start from every layer
====================  ==========================================================================

The root is called ``(root)``. To a glob it is the empty path: ``**`` matches it, ``*`` does not,
and ``"(root)"`` names it.

An element that matches nothing is an error, because an assertion about no layer would always pass.
The message then names what was probably meant: most mistakes are a segment too few or a typing error.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pytest_modelprobe.exceptions import SelectionError
from pytest_modelprobe.text import count

from .layer import ROOT

if TYPE_CHECKING:
    from .layer import Layer
    from .record import Record

__tracebackhide__ = True  # pytest shows the line of the user's test

T = TypeVar("T")

Selector: TypeAlias = (
    "str | re.Pattern[str] | type | Callable[[str, Any], bool] | Sequence[Selector] | AbstractSet[Selector]"
)
"""What ``layers=`` accepts."""

_SHOWN = 8
"""Names or types that a message lists before it counts the rest."""


class Glob:
    """A compiled glob on dotted names.

    Args:
        text: The glob, without a leading ``!``.

    Raises:
        SelectionError: The glob is empty, has an empty segment, or glues ``**`` to other text.

    >>> attention = Glob("blocks.*.attn")
    >>> attention.matches("blocks.0.attn"), attention.matches("blocks.attn")
    (True, False)
    >>> Glob("blocks.**").matches("blocks"), Glob("**").matches("(root)")
    (True, True)
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if not text:
            raise SelectionError('An empty glob matches no layer: write "**" for all of them.')
        # None stands for `**`, the one segment that no regular expression on a segment expresses.
        self._segments: list[re.Pattern[str] | None] = []
        for segment in text.split("."):
            if not segment or ("**" in segment and segment != "**"):
                raise SelectionError(
                    f"{text!r} has the segment {segment!r}: between two dots stands a name, in which * is any text, "
                    "or ** alone."
                )
            self._segments.append(None if segment == "**" else re.compile(fnmatch.translate(segment)))

    def __repr__(self) -> str:
        return f"Glob({self.text!r})"

    def matches(self, name: str) -> bool:
        """Whether the glob matches the layer called ``name``."""
        segments = self._segments
        if not any(segments):
            return True
        parts = name.split(".")
        if name == ROOT and self.text != ROOT:
            parts = []  # to a glob it is the empty path

        @functools.cache  # each pair once, so that `**.**.**.x` takes no exponential time
        def rest_matches(at: int, part: int) -> bool:
            if at == len(segments):
                return part == len(parts)
            segment = segments[at]
            if segment is None:
                return rest_matches(at + 1, part) or (part < len(parts) and rest_matches(at, part + 1))
            return part < len(parts) and bool(segment.match(parts[part])) and rest_matches(at + 1, part + 1)

        return rest_matches(0, 0)


def select(
    candidates: Mapping[str, T],
    selector: Selector,
    *,
    is_instance: Callable[[T, type], bool] = isinstance,
    type_name: Callable[[T], str] = lambda layer: type(layer).__name__,
) -> list[str]:
    """Return the names of the candidates that ``selector`` selects, in the order of ``candidates``.

    Args:
        candidates: Dotted name → layer: a module of a live model, or a recorded layer.
        selector: See the documentation of this module.
        is_instance: Decides whether a layer is of a class given as selector.
        type_name: Returns the name of a layer's type, for the message that lists the types there are.

    Raises:
        SelectionError: The selector is malformed, or it or one of its elements matches no layer.

    >>> layers = dict.fromkeys(["(root)", "blocks", "blocks.0", "blocks.0.attn", "blocks.0.mlp"])
    >>> select(layers, "blocks.*.attn")
    ['blocks.0.attn']
    >>> select(layers, ["!**.mlp", "!(root)"])
    ['blocks', 'blocks.0', 'blocks.0.attn']
    >>> select(layers, lambda name, layer: name.endswith("p"))
    ['blocks.0.mlp']
    >>> select(layers, "blocks.attn")
    Traceback (most recent call last):
    pytest_modelprobe.exceptions.SelectionError: 'blocks.attn' matches none of 5 layers; \
'blocks.*.attn' matches 1.
    """
    if selector == "**" and candidates:  # the default, asked of models with thousands of layers
        return list(candidates)
    included: set[str] = set()
    excluded: set[str] = set()
    exclusions: list[str] = []
    elements = list(_elements(selector))
    for element in elements:
        predicate = _predicate(element, candidates, is_instance)
        names = {name for name, layer in candidates.items() if predicate(name, layer)}
        if not names:
            raise SelectionError(_nothing_matched(element, candidates, type_name))
        if isinstance(element, str) and element.startswith("!"):
            excluded |= names
            exclusions.append(element)
        else:
            included |= names
    if len(exclusions) == len(elements):
        included = set(candidates)
    if included <= excluded:
        verb, none = "leaves" if len(exclusions) == 1 else "leave", f"none of {count(len(included), 'layer')}"
        raise SelectionError(
            f"{', '.join(map(repr, exclusions))} {verb} {none} included; exclude fewer, or include more."
        )
    return [name for name in candidates if name in included and name not in excluded]


def selected(record: Record, layers: Selector) -> list[Layer]:
    """Return the layers of ``record`` that ``layers`` selects. A class selects instances of its subclasses too."""
    # A record has the name of a class, not the class. Cached for this call only: subclasses may be defined later.
    names_of = functools.cache(_qualified_names)
    names = select(
        record.layers,
        layers,
        is_instance=lambda layer, cls: layer.type in names_of(cls),
        type_name=lambda layer: layer.type_name,
    )
    return [record.layers[name] for name in names]


def _qualified_names(cls: type) -> set[str]:
    names: set[str] = set()
    classes = [cls]
    while classes:
        current = classes.pop()
        name = f"{current.__module__}.{current.__qualname__}"
        if name not in names:
            names.add(name)
            classes.extend(type.__subclasses__(current))
    return names


def nearest(name: str, names: Iterable[str], n: int = 3) -> list[str]:
    """Return up to ``n`` of ``names`` that are spelled like ``name``, the most similar first.

    Case is ignored. If no whole name is near, the last segments are compared.

    >>> nearest("fc3", ["conv", "fc1", "fc2"])
    ['fc1', 'fc2']
    >>> nearest("atn", ["conv", "blocks.0.attn", "blocks.1.attn"])
    ['blocks.0.attn', 'blocks.1.attn']
    """

    def last_segment(one: str) -> str:
        return one.lower().rpartition(".")[2]

    known = list(names)
    # 0.6 is also what `difflib.get_close_matches` asks for by default.
    for key, least in ((str.lower, 0.6), (last_segment, 0.5)):
        matcher = difflib.SequenceMatcher(b=key(name))
        scores: dict[str, float] = {}
        for candidate in known:
            matcher.set_seq1(key(candidate))
            # `quick_ratio` is an upper bound and cheaper. Not `get_close_matches`, which reverses ties.
            if matcher.quick_ratio() >= least and matcher.ratio() >= least:
                scores[candidate] = matcher.ratio()
        if scores:
            return sorted(scores, key=lambda candidate: -scores[candidate])[:n]
    return []


# --- reading a selector -------------------------------------------------------------------------


def _elements(selector: Any) -> Iterator[Any]:
    """Yield the selectors in ``selector``, with lists, and lists in lists, taken apart."""
    many = isinstance(selector, Sequence | AbstractSet) and not isinstance(selector, str | bytes)
    if not many:
        yield selector
        return
    if not selector:
        raise SelectionError(f'{selector!r} selects no layer: write "**" for all of them.')
    for element in selector:
        yield from _elements(element)


def _predicate(
    element: Any, candidates: Mapping[str, T], is_instance: Callable[[T, type], bool]
) -> Callable[[str, T], object]:
    if isinstance(element, str):
        glob = Glob(element.removeprefix("!"))
        return lambda name, _: glob.matches(name)
    if isinstance(element, re.Pattern) and isinstance(element.pattern, str):
        return lambda name, _: element.fullmatch(name)
    if isinstance(element, type):
        return lambda _, layer: is_instance(layer, element)
    # A module is callable too, but nobody means to call it with a name.
    if callable(element) and not hasattr(element, "named_modules"):
        return element  # type: ignore[no-any-return]
    itself = next((name for name, layer in candidates.items() if layer is element and element is not None), None)
    if itself is not None:
        raise SelectionError(f"The module {itself} itself is no selector: write its name, {itself!r}.")
    given = "None" if element is None else f"A value of type {type(element).__name__}"
    raise SelectionError(
        f"{given} is no selector: write a glob such as 'blocks.*.attn' ('**' for all layers),"
        " a re.Pattern on str, a module type, a callable (name, layer) -> bool, or a list of these."
    )


# --- saying what is wrong -----------------------------------------------------------------------


def _nothing_matched(element: Any, candidates: Mapping[str, T], type_name: Callable[[T], str]) -> str:
    none = f"none of {count(len(candidates), 'layer')}"
    if isinstance(element, str):
        verb = "excludes" if element.startswith("!") else "matches"
        return f"{element!r} {verb} {none}; {_glob_hint(element, verb, candidates)}."
    if isinstance(element, re.Pattern):
        inside = next(filter(element.search, candidates), None)
        hint = f"it is found inside {inside!r}, but has to match the whole name"
        return f"The pattern {element.pattern!r} matches {none}; {hint if inside else _names(candidates)}."
    if isinstance(element, type):
        types = Counter(type_name(layer) for layer in candidates.values())
        named = [f"{name} ({number})" for name, number in types.most_common()]
        return f"{element.__name__} is the type of {none}; the types are {_listed(named)}."
    what = getattr(element, "__name__", type(element).__name__)
    return f"The callable {what} is true for {none}; {_names(candidates)}."


def _glob_hint(element: str, verb: str, candidates: Mapping[str, object]) -> str:
    """Return the glob that was probably meant and the number of its layers, or else the nearest names."""
    glob = element.removeprefix("!")
    segments = glob.split(".")
    for level in ("*", "**"):
        # Not at the end: what is below a layer is rarely meant by the name of the layer.
        for position in range(len(segments)):
            longer = Glob(".".join([*segments[:position], level, *segments[position:]]))
            number = sum(map(longer.matches, candidates))
            if number:
                return f"{element[: len(element) - len(glob)] + longer.text!r} {verb} {number}"
    near = nearest(glob, candidates)
    return f"nearest: {', '.join(map(repr, near))}" if near else _names(candidates)


def _names(candidates: Mapping[str, object]) -> str:
    return f"the names are {_listed([repr(name) for name in candidates])}"


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
