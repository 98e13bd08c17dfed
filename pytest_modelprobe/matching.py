"""Which layer of one record is which of another: by name, by what the user says, by what a layer is made of."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .exceptions import SelectionError
from .record import ROOT, Call, Layer, Parameter, Record, Response, Value, qualified


def match(actual: Record, expected: Record, said: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the layers of ``expected`` that are layers of ``actual``: expected name → actual name.

    What is ``said`` of a layer, as `declared` returns it, is so. Any other is first looked for under its name. Among
    the children of one container those left over are the same if they are made of the same types and parameters in the
    same order; the numbered children of a ``Sequential`` are aligned by their types, so that one inserted layer does
    not turn all after it into others. What has parameters and is left over then is looked for in other containers, and
    so are containers, by what they hold.
    Where several could be meant and nothing tells which, none is.

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
    _match_wrapped(new, old, found)
    _match_across(new, old, found)
    _match_by_contents(new, old, found)
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


def needed(rename: Mapping[str, str], expected: Record) -> dict[str, str]:
    """Return what of a user's ``rename`` a record needs: nothing where it has the new names already.

    >>> new = Record(model="Net", layers={"head": Layer(name="head", type="Linear")})
    >>> needed({"head": "fc"}, new)
    {}
    """

    def found(glob: str) -> bool:
        return any(map(_pattern(glob).fullmatch, expected.layers))

    return {new: old for new, old in rename.items() if found(old) or not found(new)}


def name_before(name: str, rename: Mapping[str, str]) -> str:
    """Return what a layer, or a tensor in it, is called by a user's ``rename``; of several rules the last counts.

    >>> name_before("layers.3.fc.weight", {"layers": "encoder.layer", "layers.*.fc": "encoder.layer.*.dense"})
    'encoder.layer.3.dense.weight'
    """
    matches = ((_pattern(new).fullmatch(name), old) for new, old in reversed(list(rename.items())))
    return next((_filled(old, found.groups()) for found, old in matches if found), name)


def rules(actual: Record, expected: Record, names: Mapping[str, str]) -> dict[str, str]:
    """Return the ``rename`` by which `declared` would say what `match` found: one rule for all inside a layer.

    Args:
        actual: The record with the new names.
        expected: The record with the old ones.
        names: Expected name → actual name, of the layers that have another one.

    >>> old, new = (
    ...     Record(model="Net", layers={f"{at}{i}": Layer(name=f"{at}{i}", type="Linear") for i in range(3)})
    ...     for at in ("encoder.layer.", "layers.")
    ... )
    >>> rules(new, old, {f"encoder.layer.{i}": f"layers.{i}" for i in range(3)})
    {'layers.*': 'encoder.layer.*'}
    """
    before = {new: old for old, new in names.items()}

    def told_by_container(new: str) -> bool:
        container, _, own = new.rpartition(".")
        return container in before and before[new] == f"{before[container]}.{own}"

    one_by_one = {new: before[new] for new in before if not told_by_container(new)}
    stars = [_folded_rule(*rule) for rule in one_by_one.items()]
    folded = dict(star if stars.count(star) > 1 else rule for star, rule in zip(stars, one_by_one.items(), strict=True))
    for found in (folded, one_by_one):
        outermost_first = dict(sorted(found.items(), key=lambda rule: rule[0].count(".")))
        with contextlib.suppress(SelectionError):
            if names.items() <= declared(actual, expected, outermost_first).items():
                return outermost_first
    return {}


def _folded_rule(new: str, old: str) -> tuple[str, str]:
    """Return a rule with a star for each number, where both have the same ones."""
    if _numbers(new) != _numbers(old):
        return new, old
    return _NUMBER.sub("*", new), _NUMBER.sub("*", old)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(_NUMBER.findall(name))


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
        """What the layer is made of, whatever it and its children are called.

        Their order counts where they are numbered: a file has the others as they ran, a model as they were made.
        """
        made_of = None
        if self.layer is not None:
            parameters = tuple((p.name, p.shape, p.dtype) for p in self.layer.parameters)
            made_of = self.layer.type_name, parameters
        inside = [child.signature() for child in self.children.values()]
        return made_of, tuple(inside) if all(map(str.isdigit, self.children)) else frozenset(Counter(inside).items())

    def kind(self) -> str:
        return "" if self.layer is None else self.layer.type_name

    def inside(self) -> Iterator[_Node]:
        """Yield the layer and all inside it."""
        yield self
        for child in self.children.values():
            yield from child.inside()

    def has_parameters(self) -> bool:
        return any(node.layer is not None and node.layer.parameters for node in self.inside())

    def started(self) -> int | None:
        """When its first call began; None: that is not known."""
        calls = () if self.layer is None else self.layer.calls
        return min((call.started for call in calls if call.started >= 0), default=None)


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
    gone, came = ([node for name, node in x.items() if name not in y] for x, y in ((old, new), (new, old)))
    if gone and came:
        yield from _made_alike(gone, came, _Node.signature)


_LONG = 200
"""Layers above which a closer look takes too long: numbered ones are paired by number, others made alike not at all."""


def _made_alike(
    old: Iterable[_Node], new: Iterable[_Node], key: Callable[[_Node], Hashable]
) -> Iterator[tuple[_Node, _Node]]:
    """Yield the layers that have a key in common, in order: of those keys that as many have, in one order."""
    groups: dict[Hashable, tuple[list[_Node], list[_Node]]] = {}
    for side, nodes in enumerate((old, new)):
        for node in nodes:
            groups.setdefault(key(node), ([], []))[side].append(node)
    for before, after in groups.values():
        if _in_one_order(before, after):
            yield from zip(before, after, strict=True)


def _in_one_order(old: Sequence[_Node], new: Sequence[_Node]) -> bool:
    """Whether as many layers are in the same order, so far as their names and their calls tell."""
    if len(old) != len(new) or len(old) > _LONG:
        return False
    if len(old) == 1:
        return True
    likeness = [[_likeness(a.name, b.name) for b in new] for a in old]
    columns = list(zip(*likeness, strict=True))
    if any(likeness[i][i] < max((*likeness[i], *columns[i])) for i in range(len(old))):
        return False
    called = [[node.started() for node in nodes] for nodes in (old, new)]
    if any(None in started for started in called):
        return True
    ranks = (sorted(range(len(started)), key=started.__getitem__) for started in called)  # type: ignore[arg-type]
    return next(ranks) == next(ranks)


def _likeness(name: str, other: str) -> int:
    """Return how much two names begin, and with their numbers end, alike.

    >>> _likeness("self.query", "attn.q_proj"), _likeness("conv1", "c1"), _likeness("conv1", "c2")
    (1, 2, 1)
    """
    mine, theirs = (full.rpartition(".")[2].lower() for full in (name, other))
    begin = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=False)))
    ends = [re.search(r"\d*$", own) for own in (mine, theirs)]
    return begin + (ends[0] is not None and ends[1] is not None and bool(ends[0][0]) and ends[0][0] == ends[1][0])


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


# --- in other containers ------------------------------------------------------------------------------------------


def _match_wrapped(new: Mapping[str, _Node], old: Mapping[str, _Node], found: dict[str, str]) -> None:
    """Match a layer with the one made like it inside what has its name now (``head``, ``head.fc``), or the reverse."""
    taken = set(found.values())
    for before, after in list(found.items()):
        a, e = new[after], old[before]
        if a.said or e.said or a.kind() == e.kind() or bool(a.children) == bool(e.children):
            continue
        whole, inner = (e, a) if a.children else (a, e)
        left = (node for node in inner.inside() if node.name not in (taken if inner is a else found))
        alike = [node for node in left if not node.said and node.signature() == whole.signature()]
        if len(alike) == 1 and whole.has_parameters():
            del found[before]
            _match(*((alike[0], whole) if inner is a else (whole, alike[0])), found)


def _match_across(new: Mapping[str, _Node], old: Mapping[str, _Node], found: dict[str, str]) -> None:
    """Match what is left by what it is made of, wherever it stands: the largest first, with all that is inside it.

    The numbers in both names are the same, or one has none and there is no other layer made like it.
    """
    taken = set(found.values())
    gone = [n for n in old.values() if n.name not in found and n.layer is not None and not n.said]
    came = [n for n in new.values() if n.name not in taken and n.layer is not None and not n.said]
    if not (gone and came):
        return
    made_of = {id(node): (node.signature(), node.has_parameters()) for node in (*gone, *came)}
    sizes = {id(node): sum(1 for _ in node.inside()) for node in gone}
    for size in sorted(set(sizes.values()), reverse=True):
        for numbered in (True, False):
            taken = set(found.values())
            left = [n for n in gone if sizes[id(n)] == size and n.name not in found and made_of[id(n)][1]]
            free = [n for n in came if n.name not in taken]
            key = functools.partial(_made_of, made_of=made_of, numbered=numbered)
            for group in _grouped(_made_alike(left, free, key), key):
                if _tells(group, numbered=numbered):
                    for before, after in group:
                        _match(after, before, found)


def _match_by_contents(new: Mapping[str, _Node], old: Mapping[str, _Node], found: dict[str, str]) -> None:
    """Match containers that hold the same layers, and then what is left in them by its name: one of it may be another.

    Those that are farthest inside come first, for they are what the others hold.
    """
    taken = set(found.values())
    for before in sorted(old.values(), key=lambda node: -node.name.count(".")):
        if before.name in found or before.said or before.layer is None:
            continue
        holders = {_holder(found[child.name]) for child in before.children.values() if child.name in found}
        after = new.get(holders.pop()) if len(holders) == 1 else None
        if after is None or after.name in taken or after.said or after.kind() != before.kind():
            continue
        found[before.name] = after.name
        for name, child in before.children.items():
            other = after.children.get(name)
            if other is not None and child.name not in found and other.name not in taken:
                _match(other, child, found)
        taken = set(found.values())


def _holder(name: str) -> str:
    return name.rpartition(".")[0] or ROOT


def _made_of(node: _Node, *, made_of: Mapping[int, Hashable], numbered: bool) -> Hashable:
    return made_of[id(node)], _numbers(node.name) if numbered else ()


def _grouped(
    pairs: Iterable[tuple[_Node, _Node]], key: Callable[[_Node], Hashable]
) -> Iterator[list[tuple[_Node, _Node]]]:
    for _, group in itertools.groupby(pairs, lambda pair: key(pair[0])):
        yield list(group)


def _tells(pairs: Sequence[tuple[_Node, _Node]], *, numbered: bool) -> bool:
    """Whether pairs from different containers are enough to tell: a single layer has also to be named alike."""
    named = any(old.children or _likeness(old.name, new.name) for old, new in pairs)
    first = pairs[0]
    alone = len(pairs) == 1 and not all(_numbers(node.name) for node in first)
    return named and (numbered or alone)


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
