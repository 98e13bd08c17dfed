"""Which layer of one record is which of another: by name, by what the user says, by what a layer is made of."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .exceptions import SelectionError
from .record import ROOT, Call, Layer, Parameter, Record, Response, Value, qualified


def match(actual: Record, expected: Record, said: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the layers of ``expected`` that are layers of ``actual``: expected name → actual name.

    What is ``said`` of a layer, as `declared` returns it, is so. Any other is first looked for under its name. Among
    the children of one container those left over are the same if they are made of the same types and parameters in the
    same order; the numbered children of a ``Sequential`` are aligned by their types, so that one inserted layer does
    not turn all after it into others.

    >>> old = Record(model="Net", layers={n: Layer(name=n, type=t) for n, t in [("fc", "Linear"), ("act", "ReLU")]})
    >>> new = Record(model="Net", layers={n: Layer(name=n, type=t) for n, t in [("head", "Linear"), ("act", "ReLU")]})
    >>> match(new, old)
    {'act': 'act', 'fc': 'head'}
    """
    said = said or {}
    new, old = _tree(actual), _tree(expected)
    for before, after in said.items():
        old[before].said = new[after].said = True
    found: dict[str, str] = {}
    for before, after in {ROOT: ROOT, **said}.items():
        _match(new[after], old[before], found)
    return found


def renamed(record: Record, names: Mapping[str, str]) -> Record:
    """Return the record with its layers under other names; those that ``names`` does not have keep theirs.

    >>> old = Record(model="Net", layers={"fc": Layer(name="fc", type="Linear")})
    >>> list(renamed(old, {"fc": "head"}).layers)
    ['head']
    """
    if all(old == new for old, new in names.items()):
        return record
    layers = (_renamed_layer(layer, names) for layer in record.layers.values())
    return dataclasses.replace(record, layers={layer.name: layer for layer in layers})


def declared(actual: Record, expected: Record, rename: Mapping[str, str]) -> dict[str, str]:
    """Return what a user's ``rename`` says: expected name → actual name, of the layers named and all inside them.

    Args:
        actual: The record with the names on the left.
        expected: The record with the names on the right.
        rename: Actual glob → expected glob; what a ``*`` stands for on the left it stands for on the right.

    Raises:
        SelectionError: A glob matches nothing, or the two have not the same wildcards.

    >>> new = Record(model="Net", layers={n: Layer(name=n, type="Linear") for n in ("blocks.0.fc", "blocks.1.fc")})
    >>> old = Record(model="Net", layers={n: Layer(name=n, type="Linear") for n in ("h.0.fc", "h.1.fc")})
    >>> declared(new, old, {"blocks.*": "h.*"})
    {'h.0.fc': 'blocks.0.fc', 'h.1.fc': 'blocks.1.fc'}
    """
    __tracebackhide__ = True
    found: dict[str, str] = {}
    for left, right in rename.items():
        wildcards = [re.findall(r"\*+", glob) for glob in (left, right)]
        if wildcards[0] != wildcards[1]:
            raise SelectionError(f"rename: {left!r} and {right!r} have not the same wildcards in the same order")
        pattern = _pattern(left)
        pairs = {_filled(right, m.groups()): name for name in actual.layers if (m := pattern.fullmatch(name))}
        if not pairs:
            raise SelectionError(f"rename: {left!r} matches no layer of the actual {actual.model}")
        known = {old: new for old, new in pairs.items() if old in expected.layers}
        if not known:
            raise SelectionError(
                f"rename: {right!r} matches no layer of the expected {expected.model}; "
                f"{left!r} makes it {', '.join(list(pairs)[:3])}"
            )
        taken = set(known.values())
        found = {old: new for old, new in found.items() if new not in taken} | known
    return found


def _pattern(glob: str) -> re.Pattern[str]:
    parts = [re.escape(part) if i % 2 == 0 else _WILD[part] for i, part in enumerate(re.split(r"(\*\*|\*)", glob))]
    return re.compile("".join(parts) + r"(\..*)?")


_WILD = {"*": r"([^.]*)", "**": r"(.*)"}


def _filled(glob: str, groups: Sequence[str | None]) -> str:
    *wild, below = groups
    values = iter(wild)
    return re.sub(r"\*\*|\*", lambda _: next(values) or "", glob) + (below or "")


# --- trees --------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Node:
    name: str
    layer: Layer | None
    children: dict[str, _Node] = field(default_factory=dict)
    said: bool = False
    """The user says which layer of the other record it is."""

    def signature(self) -> Any:
        """What the layer is made of, whatever it and its children are called."""
        made_of = None
        if self.layer is not None:
            parameters = tuple((p.name, p.shape, p.dtype) for p in self.layer.parameters)
            made_of = self.layer.type_name, parameters
        return made_of, tuple(child.signature() for child in self.children.values())

    def kind(self) -> str:
        return "" if self.layer is None else self.layer.type_name


def _tree(record: Record) -> dict[str, _Node]:
    """Return the nodes by name, the root among them."""
    top = _Node(ROOT, record.layers.get(ROOT))
    nodes = {ROOT: top}
    for name, layer in record.layers.items():
        if name == ROOT:
            continue
        node = top
        for part in name.split("."):
            full = qualified(node.name, part)
            if full not in nodes:
                nodes[full] = node.children[part] = _Node(full, None)
            node = nodes[full]
        node.layer = layer
    return nodes


def _match(actual: _Node, expected: _Node, found: dict[str, str]) -> None:
    both = actual.layer is not None and expected.layer is not None
    if both and actual.said == expected.said:  # a root that the user calls another layer is that alone
        found[expected.name] = actual.name
    children = ({name: child for name, child in node.children.items() if not child.said} for node in (expected, actual))
    for old, new in _pairs(*children):
        _match(new, old, found)


def _pairs(old: Mapping[str, _Node], new: Mapping[str, _Node]) -> Iterator[tuple[_Node, _Node]]:
    common = [name for name in old if name in new]
    if any(old[name].kind() != new[name].kind() for name in common) and all(map(str.isdigit, (*old, *new))):
        yield from _aligned(list(old.values()), list(new.values()))
        return
    yield from ((old[name], new[name]) for name in common)
    left = [(node, node.signature()) for name, node in new.items() if name not in old]
    for node in (node for name, node in old.items() if name not in new):
        signature = node.signature()
        for candidate in left:
            if candidate[1] == signature:
                left.remove(candidate)
                yield node, candidate[0]
                break


_LONG = 200  # children between the first and the last that changed, above which they are paired by number


def _aligned(old: list[_Node], new: list[_Node]) -> Iterator[tuple[_Node, _Node]]:
    start = _alike(old, new)
    end = _alike(old[start:][::-1], new[start:][::-1])  # what difflib would take long to find
    yield from zip(old[:start], new[:start], strict=True)
    yield from zip(old[len(old) - end :], new[len(new) - end :], strict=True)
    old, new = old[start : len(old) - end], new[start : len(new) - end]
    if max(len(old), len(new)) > _LONG:
        yield from zip(old, new, strict=False)
        return
    kinds = difflib.SequenceMatcher(None, [n.kind() for n in old], [n.kind() for n in new], autojunk=False)
    for _, i, j, k, m in kinds.get_opcodes():  # of two runs that differ, as many are pairs as there can be
        yield from zip(old[i:j], new[k:m], strict=False)


def _alike(old: list[_Node], new: list[_Node]) -> int:
    """Return how many are of one type from the first on."""
    pairs = zip(old, new, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0].kind() == pair[1].kind(), pairs))


# --- other names --------------------------------------------------------------------------------------------------


def _renamed_layer(layer: Layer, names: Mapping[str, str]) -> Layer:
    return dataclasses.replace(
        layer,
        name=names.get(layer.name, layer.name),
        parameters=tuple(_renamed_parameter(p, names) for p in layer.parameters),
        buffers=tuple(_renamed_parameter(p, names) for p in layer.buffers),
        calls=tuple(_renamed_call(call, layer.name, names) for call in layer.calls),
    )


def _renamed_parameter(parameter: Parameter, names: Mapping[str, str]) -> Parameter:
    if parameter.tied_to is None:
        return parameter
    layer, _, name = parameter.tied_to.rpartition(".")
    layer = layer or ROOT
    return dataclasses.replace(parameter, tied_to=qualified(names.get(layer, layer), name))


def _renamed_call(call: Call, layer: str, names: Mapping[str, str]) -> Call:
    return dataclasses.replace(
        call,
        root=names.get(call.root, call.root),
        inputs=tuple(_renamed_value(value, names) for value in call.inputs),
        response=None if call.response is None else _renamed_response(call.response, layer, names),
    )


def _renamed_value(value: Value, names: Mapping[str, str]) -> Value:
    return value if value.source is None else dataclasses.replace(value, source=_readdressed(value.source, names))


def _readdressed(address: str, names: Mapping[str, str]) -> str:
    layer, space, rest = address.partition(" ")
    return names.get(layer, layer) + space + rest


def _renamed_response(response: Response, layer: str, names: Mapping[str, str]) -> Response:
    """Rename the children, whose names are relative to the layer."""

    def inside(address: str) -> str:
        child, space, rest = address.partition(" ")
        new = names.get(qualified(layer, child)) if space else None  # else it is the call's own: `output`, `weight`
        if new is None:
            return address
        container = names.get(layer, layer)
        return new.removeprefix("" if container == ROOT else f"{container}.") + space + rest

    handed = tuple(
        dataclasses.replace(h, where=inside(h.where), passed=None if h.passed is None else inside(h.passed))
        for h in response.handed
    )
    return dataclasses.replace(
        response,
        handed=handed,
        recipes={inside(name): recipe for name, recipe in response.recipes.items()},
        without_gradient=tuple(map(inside, response.without_gradient)),
    )
