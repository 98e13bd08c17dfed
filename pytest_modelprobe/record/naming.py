"""Names of layers, and addresses of values, as messages write them.

Every finding names a layer, a call and a value in the same words. Records store addresses as text too, so the functions
that make and take apart such names stand here together.
"""

from __future__ import annotations

from typing import Protocol

ROOT = "(root)"
"""The name of the outermost module, which ``named_modules()`` calls the empty string."""

NOT_DEFAULT = ", not the default"
"""Suffix of an argument that is False in a call although the default of the layer is another value."""


def label_of(where: str, type_name: str = "") -> str:
    """Return a layer's name, or an address that begins with it, as it stands in a sentence.

    A name that is a number, as in `nn.Sequential`, gets quotation marks and its type.

    >>> label_of("1", "ReLU"), label_of("2 (call 3) output", "Linear"), label_of("1")
    ("layer '1' (ReLU)", "layer '2' (Linear) (call 3) output", "layer '1'")
    >>> label_of("fc1", "Linear"), label_of("2.fc1 output", "Linear"), label_of("0.weight")
    ('fc1', '2.fc1 output', '0.weight')
    """
    name, blank, rest = where.partition(" ")
    if not name.isdigit():
        return where
    return f"layer '{name}'{type_name and f' ({type_name})'}{blank}{rest}"


class Indexed(Protocol):
    """A call, recorded or just observed."""

    @property
    def index(self) -> int:
        """Which call of its layer it is within the forward, from 0."""


def qualified(layer: str, name: str) -> str:
    """Return the full name of a parameter, buffer or child: ``fc1.weight``, or ``weight`` of the root."""
    return name if layer == ROOT else f"{layer}.{name}"


def relative_name(name: str, container: str) -> str:
    """Return a name relative to a container, as its code calls the layer.

    >>> relative_name("blocks.0.fc", "blocks.0"), relative_name("fc", "(root)")
    ('fc', 'fc')
    """
    return name if container == ROOT else name.removeprefix(f"{container}.")


def parent(name: str) -> str:
    """Return the name of the layer that holds a layer.

    >>> parent("blocks.0.fc"), parent("fc")
    ('blocks.0', '(root)')
    """
    return name.rpartition(".")[0] or ROOT


def containers(name: str) -> list[str]:
    """Return the names of the layers around one, the outermost first.

    >>> containers("blocks.0.fc")
    ['(root)', 'blocks', 'blocks.0']
    """
    parts = name.split(".")
    return [] if name == ROOT else [ROOT, *(".".join(parts[:i]) for i in range(1, len(parts)))]


def address(layer: str, call: Indexed, path: str) -> str:
    """Return where a value was seen, for messages: ``fc1 output``, ``fc1 (call 2) input``."""
    return f"{call_name(layer, call)} {path}"


def call_name(layer: str, call: Indexed) -> str:
    """Return the name of a layer, with the number of the call from the second one on: ``fc1 (call 2)``."""
    return f"{layer} (call {call.index + 1})" if call.index else layer
