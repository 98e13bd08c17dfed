"""The short texts of the architecture file: of a value, of a parameter, of where something comes from; and back.

A reviewer reads these texts, so defaults are left out. Names of nearby layers are relative, as in Python's imports.
Then lines of repeated blocks are equal, and if a parent is renamed only the keys of the lines change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from pytest_modelprobe.record import Dimension, Parameter, Value

DTYPE = "float32"
"""The dtype that no header needs to name."""


class FormatError(ValueError):
    """A part of a file has another format; the message says which."""


class Defaults(NamedTuple):
    """The defaults, which the texts of one file leave out."""

    dtype: str = DTYPE
    requires_grad: bool = False
    """Whether floating values require gradients."""


class ParsedSpec(NamedTuple):
    """The parsed text of a value or parameter."""

    shape: tuple[Dimension, ...]
    dtype: str
    requires_grad: bool
    overwritten: bool = False
    origin: str | None = None
    """The relative text after ``from``, or the full name after ``tied to``."""
    persistent: bool | None = None
    left_out: bool = False
    group: int = 0
    """Of the optimizer, where the record is that of a step."""


def floating(dtype: str) -> bool:
    """Whether values of a dtype have gradients."""
    return dtype.startswith(("float", "bfloat", "complex"))


_MOST_DIMENSIONS = 64  # as torch has
_MOST_ELEMENTS = 1 << 63  # torch counts them in int64


# --- values and parameters ----------------------------------------------------------------------------------------


def value_text(value: Value, layer: str, defaults: Defaults) -> str:
    """Return shape, dtype and source of a value.

    >>> value = Value(path="input", shape=(2, 16), dtype="int64", device="cpu", source="net.emb output")
    >>> value_text(value, "net.drop", Defaults())
    '(2, 16) int64 from .emb'
    """
    text = _shape_text(value.shape)
    if value.dtype != defaults.dtype:
        text += f" {value.dtype}"
    if value.requires_grad != (defaults.requires_grad and floating(value.dtype)):
        text += " requires grad" if value.requires_grad else " no grad"
    if value.overwritten:
        text += " overwritten"
    return text if value.source is None else f"{text} from {relative(value.source, layer)}"


def parameter_text(parameter: Parameter, defaults: Defaults, *, trainable: bool) -> str:
    """Return shape, dtype and ties of a parameter, or of a buffer, which is not ``trainable`` and may be persistent.

    >>> parameter_text(Parameter(name="weight", shape=(4,), dtype="float32", device="cpu"), Defaults(), trainable=True)
    '(4) frozen'
    >>> table = Parameter(name="table", shape=(4,), dtype="float32", device="cpu", persistent=False)
    >>> parameter_text(table, Defaults(), trainable=False)
    '(4) not persistent'
    >>> scale = Parameter(name="scale", shape=(4,), dtype="float32", device="cpu", requires_grad=True, left_out=True)
    >>> parameter_text(scale, Defaults(), trainable=True)  # in a step of an optimizer that does not hold it
    '(4) not updated'
    """
    text = _shape_text(parameter.shape)
    if parameter.dtype != defaults.dtype:
        text += f" {parameter.dtype}"
    if parameter.requires_grad != trainable:
        text += " trainable" if parameter.requires_grad else " frozen"
    if parameter.left_out:
        text += " not updated"
    if parameter.group:
        text += f" group {parameter.group}"
    if parameter.persistent is not None:
        text += " persistent" if parameter.persistent else " not persistent"
    return text if parameter.tied_to is None else f"{text} tied to {parameter.tied_to}"


_VALUE = re.compile(
    r"\(([0-9., ]*)\)(?: (?!no\b|requires\b|overwritten\b|from\b)(\w+))?( no grad| requires grad)?( overwritten)?"
    r"(?: from (.*))?",
    re.DOTALL,
)
_PARAMETER = re.compile(
    r"\(([0-9., ]*)\)(?: (?!frozen\b|trainable\b|persistent\b|not\b|group\b|tied\b)(\w+))?( frozen| trainable)?"
    r"( not updated)?(?: group ([1-9][0-9]{0,5}))?( not persistent| persistent)?(?: tied to (.*))?",
    re.DOTALL,
)


@lru_cache(maxsize=4096)
def parse_value(text: str, defaults: Defaults) -> ParsedSpec:
    """Return the parsed text of `value_text`."""
    found = _VALUE.fullmatch(text)
    if found is None:
        raise FormatError(f"{text[:80]!r} describes no value")
    shape, dtype, grad, overwritten, source = found.groups()
    dtype = dtype or defaults.dtype
    requires_grad = grad == " requires grad" if grad else defaults.requires_grad and floating(dtype)
    return ParsedSpec(_shape(shape), dtype, requires_grad, overwritten is not None, source)


@lru_cache(maxsize=4096)
def parse_parameter(text: str, defaults: Defaults, trainable: bool) -> ParsedSpec:
    """Return the parsed text of `parameter_text`."""
    found = _PARAMETER.fullmatch(text)
    if found is None:
        raise FormatError(f"{text[:80]!r} describes no parameter")
    shape, dtype, grad, left_out, group, persistent, tied_to = found.groups()
    if ".." in shape:
        raise FormatError(f"{text[:80]!r} describes no parameter: its size varies")
    requires_grad = grad == " trainable" if grad else trainable
    stored = None if persistent is None else persistent == " persistent"
    dtype = dtype or defaults.dtype
    return ParsedSpec(
        _shape(shape), dtype, requires_grad, False, tied_to, stored, left_out is not None, int(group or 0)
    )


def _shape_text(shape: tuple[Dimension, ...]) -> str:
    return f"({', '.join(str(d) if isinstance(d, int) else f'{d[0]}..{d[1]}' for d in shape)})"


def _shape(text: str) -> tuple[Dimension, ...]:
    if text.count(",") >= _MOST_DIMENSIONS:
        raise FormatError(f"{text[:80]!r} are too many sizes")
    shape = tuple(map(_dimension, text.split(", "))) if text else ()
    if math.prod(d if isinstance(d, int) else d[1] for d in shape) >= _MOST_ELEMENTS:
        raise FormatError(f"{text[:80]!r} are more elements than a tensor has")
    return shape


def _dimension(text: str) -> Dimension:
    low, between, high = text.partition("..")
    if not (low.isdecimal() and len(text) <= 40 and (high.isdecimal() if between else True)):
        raise FormatError(f"{text[:80]!r} is no size")
    return (int(low), int(high)) if between else int(low)


# --- addresses ----------------------------------------------------------------------------------------------------

_OUTPUT = " output"


def relative(address: str, layer: str) -> str:
    """Return an address relative to ``layer``; the ending ``output`` is left out.

    >>> relative("h.0.ln_1 output", "h.0.attn"), relative("h.0.ln_1 output", "h.0.attn.c_attn")
    ('.ln_1', '..ln_1')
    >>> relative("(root) input", "emb"), relative("h.0 (call 2) output", "h.1")
    ('(root) input', '.0 (call 2) output')
    """
    short = address.removesuffix(_OUTPUT)
    if " " not in address or short.startswith((".", "\\")):
        return f"\\{address}"  # not an address that we made: taken as it is
    if " " in short:
        short = address
    above, dots = layer, ""
    while "." in above and len(dots) < 3:
        above, dots = above.rpartition(".")[0], dots + "."
        rest = short.removeprefix(f"{above}.")
        if rest != short and rest and rest[0] not in ". ":
            return dots + rest
    return short


def absolute(text: str, layer: str) -> str:
    """Return the address that `relative` shortened.

    >>> absolute("..ln_1", "h.0.attn.c_attn")
    'h.0.ln_1 output'
    """
    if text.startswith("\\"):
        return text[1:]
    rest = text.lstrip(".")
    above = layer
    for _ in range(len(text) - len(rest)):
        above, dot, _ = above.rpartition(".")
        if not dot:
            raise FormatError(f"{text[:80]!r} leads out of the model")
    full = rest if rest == text else f"{above}.{rest}"
    return full if " " in full else full + _OUTPUT


# --- keys ---------------------------------------------------------------------------------------------------------

_NUMBERED = re.compile(r"#[0-9]+$")


def keys(names: Iterable[str]) -> Iterator[str]:
    """Yield keys for names, each its own, for names of which some may be the same.

    >>> list(keys(["input", "mask", "input"]))
    ['input', 'mask', 'input#2']
    """
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = number = seen.get(name, 0) + 1
        yield f"{name}#{number}" if number > 1 or ("#" in name and _NUMBERED.search(name)) else name


def name_of(key: str) -> str:
    """Return the name for which `keys` made a key."""
    return _NUMBERED.sub("", key) if "#" in key else key
