"""Match the layers of two records by declared renames, names, types and parameters, and the values of their calls.

If two layers are matched wrongly, the diagnosis compares layers that have nothing to do with each other. If a layer is
not matched, it is reported as removed and added. The second is the smaller harm, so ambiguous layers stay unmatched.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_modelprobe.record import (
    ROOT,
    Call,
    EmittedTensor,
    IsolatedResponse,
    Layer,
    NamesBefore,
    Plain,
    Reading,
    Record,
    Value,
    numbers_in,
    parent,
    qualified,
    relative_name,
    with_paths,
)

from .tolerance import CallPair, Difference, change

# --- the values of a call, and of its isolated response ---------------------------------------------------------------


def comparable(a: IsolatedResponse | None, e: IsolatedResponse | None) -> bool:
    """Whether two responses were made from the same synthetic tensors."""
    if a is None or e is None or a.reason is not None or e.reason is not None:
        return False
    if a.recipes == e.recipes:
        return True
    return all(_made(e.recipes[name]) == _made(recipe) for name, recipe in a.recipes.items() if name in e.recipes)


def _made(recipe: str) -> str:
    """Return a recipe, the same for masks of bools and of floats: the same entries are masked."""
    shape, _, kind = recipe.partition(" ")
    return f"{shape.partition(':')[0]} mask" if kind == "bool" or kind.startswith("mask ") else recipe


def is_drawn_otherwise(layer: str, a: IsolatedResponse | None, names: NamesBefore) -> bool:
    """Whether the synthetic tensors of a response were drawn by other names than those of the expected one."""
    if a is None or a.by_names_before:
        return False
    called = [qualified(layer, child.partition(" ")[0]) for child in children(a) if child]
    before = names.layers.get(layer, layer)
    renamed = (relative_name(names.layers.get(name, name), before) != relative_name(name, layer) for name in called)
    return any(name in names.paths for name in (layer, *called)) or any(renamed)


def emitted(response: IsolatedResponse | None) -> Sequence[EmittedTensor]:
    """Return what the code of a call, alone, passes to its children and returns; nothing if it was not run."""
    return () if response is None else response.handed


def children(response: IsolatedResponse | None) -> Mapping[str, None]:
    """Return the calls of children in a response: ``attn``, ``attn (call 2)``; an empty name for what is returned."""
    return dict.fromkeys(split_place(h.where)[0] for h in emitted(response))


def split_place(where: str) -> tuple[str, str]:
    """Split where a tensor goes into the call of a child and the path there; the child is empty for a returned value.

    >>> split_place("attn (call 2) input[1]"), split_place("output")
    (('attn (call 2)', 'input[1]'), ('', 'output'))
    """
    child, _, path = where.rpartition(" ")
    return child, path


def child_of(pair: CallPair, called: str) -> str:
    """Return the full name of a child given as ``attn`` or ``attn (call 2)``."""
    return qualified(pair.layer, called.partition(" ")[0])


def has_both_modes(record: Record) -> bool:
    """Whether there are forwards in training mode and in evaluation mode of one root."""
    kinds = {(call.root, call.root_training) for layer in record.layers.values() for call in layer.calls}
    return len(kinds) > len({root for root, _ in kinds})


def paired_emitted(
    actual: Sequence[EmittedTensor], expected: Sequence[EmittedTensor]
) -> tuple[Sequence[tuple[EmittedTensor, EmittedTensor | None]], Sequence[EmittedTensor]]:
    """Return each emitted tensor with the expected one at the same place, and the expected ones that are left."""
    if [handed.where for handed in actual] == [handed.where for handed in expected]:
        return list(zip(actual, expected, strict=True)), ()
    theirs: dict[str, list[EmittedTensor]] = {}
    for handed in expected:
        theirs.setdefault(handed.where, []).append(handed)
    pairs = [(h, theirs[h.where].pop(0) if theirs.get(h.where) else None) for h in actual]
    return pairs, [handed for left in theirs.values() for handed in left]


def paired_values(
    actual: Sequence[Value], expected: Sequence[Value]
) -> tuple[list[tuple[Value, Value]], list[Value], list[Value]]:
    """Return pairs of values, added values and removed values.

    They are paired by path. Where the paths are not the same, as by keyword now and by position then, equal values are
    pairs first, and what is left at last is paired in order by like shape and dtype.
    """
    if [value.path for value in actual] == [value.path for value in expected]:
        return list(zip(actual, expected, strict=True)), [], []
    pairs: dict[str, Value] = {}
    left = list(expected)

    def is_same_path(a: Value, e: Value) -> bool:
        return a.path == e.path

    def is_alike(a: Value, e: Value) -> bool:
        return (a.shape, a.dtype) == (e.shape, e.dtype)

    def is_equal(a: Value, e: Value) -> bool:
        return is_alike(a, e) and is_same(a.forward, e.forward)

    def is_both(a: Value, e: Value) -> bool:
        return is_same_path(a, e) and is_equal(a, e)

    other_paths = {value.path for value in actual} != {value.path for value in expected}
    for matches in (is_both, is_equal, is_same_path, is_alike) if other_paths else (is_same_path,):
        for value in actual:
            if value.path not in pairs and (other := next((e for e in left if matches(value, e)), None)) is not None:
                pairs[value.path] = other
                left = [e for e in left if e is not other]
    added = [value for value in actual if value.path not in pairs]
    return [(value, pairs[value.path]) for value in actual if value.path in pairs], added, left


def is_same(a: Reading, e: Reading) -> bool:
    """Whether two readings are known to be of the same numbers."""
    return change(a, e, precision="measured").same


def match(actual: Record, expected: Record, declared: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the layers of ``expected`` that are also in ``actual``: expected name → actual name.

    Declared renames come first, then equal names. The other children of one container match if they have the same types
    and parameters in the same order; numbered children of a ``Sequential`` are aligned by type, so that one inserted
    layer does not shift the rest. Layers with parameters that are left are looked for in other containers, and
    containers by their contents. Ambiguous layers are not matched.

    >>> old = Record(model="Net", layers={n: Layer(name=n, type=t) for n, t in [("fc", "Linear"), ("act", "ReLU")]})
    >>> new = Record(model="Net", layers={n: Layer(name=n, type=t) for n, t in [("head", "Linear"), ("act", "ReLU")]})
    >>> match(new, old)
    {'act': 'act', 'fc': 'head'}
    """
    declared = declared or {}
    new, old = _tree(actual), _tree(expected)
    for before, after in declared.items():
        old[before].declared = new[after].declared = True
    found: dict[str, str] = {}
    for before, after in {ROOT: ROOT, **declared}.items():
        _match(new[after], old[before], found)
    _match_wrapped(new, old, found)
    _match_by_values(new, old, found)
    _match_across(new, old, found)
    _match_by_contents(new, old, found)
    return found


@dataclass(eq=False, slots=True)
class _Node:
    name: str
    layer: Layer | None
    children: dict[str, _Node] = field(default_factory=dict)
    declared: bool = False
    """Whether a declared rename maps it."""

    def signature(self) -> Any:
        """Return types and parameters of the layer and its children, without names.

        The order counts for numbered children only: others are in order of execution in a file, of creation in a model.
        """
        made_of = None
        if self.layer is not None:
            parameters = tuple((p.name, p.shape, p.dtype) for p in self.layer.parameters)
            made_of = self.layer.type_name, parameters
        inside = [child.signature() for child in self.children.values()]
        return made_of, tuple(inside) if all(map(str.isdigit, self.children)) else frozenset(Counter(inside).items())

    def type_name(self) -> str:
        return "" if self.layer is None else self.layer.type_name

    def inside(self) -> Iterator[_Node]:
        """Yield the layer and all its descendants."""
        yield self
        for child in self.children.values():
            yield from child.inside()

    def has_parameters(self) -> bool:
        return any(node.layer is not None and node.layer.parameters for node in self.inside())

    def started(self) -> int | None:
        """Return when its first call started, or `None` if that is not known."""
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
    if both and actual.declared == expected.declared:  # a root that is declared to be another layer matches that only
        found[expected.name] = actual.name
    children = (
        {name: child for name, child in node.children.items() if not child.declared} for node in (expected, actual)
    )
    for old, new in _pairs(*children):
        _match(new, old, found)


def _pairs(old: Mapping[str, _Node], new: Mapping[str, _Node]) -> Iterator[tuple[_Node, _Node]]:
    common = [name for name in old if name in new]
    if any(old[name].type_name() != new[name].type_name() for name in common) and all(map(str.isdigit, (*old, *new))):
        yield from _aligned(list(old.values()), list(new.values()))
        return
    yield from ((old[name], new[name]) for name in common)
    gone, came = ([node for name, node in x.items() if name not in y] for x, y in ((old, new), (new, old)))
    if gone and came:
        for pairs in _pairs_by_key(gone, came, _Node.signature):
            yield from pairs


_LONG = 200
"""Above this number of layers, numbered ones are paired by number, and other equal ones are not matched.

Matching compares each with each, so its time grows with the square of their number.
"""


def _pairs_by_key(
    old: Iterable[_Node], new: Iterable[_Node], key: Callable[[_Node], Hashable]
) -> Iterator[list[tuple[_Node, _Node]]]:
    """Yield the pairs of layers of each key that the same number of layers have in the same order."""
    for before, after in _by_key(old, new, key):
        if _is_same_order(before, after):
            yield list(zip(before, after, strict=True))


def _by_key(
    old: Iterable[_Node], new: Iterable[_Node], key: Callable[[_Node], Hashable]
) -> Iterable[tuple[list[_Node], list[_Node]]]:
    """Return the old and the new layers of each key."""
    groups: dict[Hashable, tuple[list[_Node], list[_Node]]] = {}
    for side, nodes in enumerate((old, new)):
        for node in nodes:
            groups.setdefault(key(node), ([], []))[side].append(node)
    return groups.values()


def _is_same_order(old: Sequence[_Node], new: Sequence[_Node]) -> bool:
    """Whether both have the same number of layers in the same order, by names and calls."""
    if len(old) != len(new) or len(old) > _LONG:
        return False
    if len(old) == 1:
        return True
    likeness = [[_similarity(a.name, b.name) for b in new] for a in old]
    columns = list(zip(*likeness, strict=True))
    if any(likeness[i][i] < max((*likeness[i], *columns[i])) for i in range(len(old))):
        return False
    called = [[node.started() for node in nodes] for nodes in (old, new)]
    if any(None in started for started in called):
        return True
    ranks = (sorted(range(len(started)), key=started.__getitem__) for started in called)  # type: ignore[arg-type]
    return next(ranks) == next(ranks)


def _similarity(name: str, other: str) -> int:
    """Return how similar two names are: by their first letters, and by their numbers.

    >>> _similarity("self.query", "attn.q_proj"), _similarity("conv1", "c1"), _similarity("conv1", "c2")
    (1, 2, 1)
    """
    mine, theirs = (full.rpartition(".")[2].lower() for full in (name, other))
    begin = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=False)))
    ends = [re.search(r"\d*$", own) for own in (mine, theirs)]
    return begin + (ends[0] is not None and ends[1] is not None and bool(ends[0][0]) and ends[0][0] == ends[1][0])


def _aligned(old: list[_Node], new: list[_Node]) -> Iterator[tuple[_Node, _Node]]:
    start = _common_prefix(old, new)
    end = _common_prefix(old[start:][::-1], new[start:][::-1])  # what difflib would take long to find
    yield from zip(old[:start], new[:start], strict=True)
    yield from zip(old[len(old) - end :], new[len(new) - end :], strict=True)
    old, new = old[start : len(old) - end], new[start : len(new) - end]
    if max(len(old), len(new)) > _LONG:
        yield from zip(old, new, strict=False)
        return
    kinds = difflib.SequenceMatcher(None, [n.type_name() for n in old], [n.type_name() for n in new], autojunk=False)
    for _, i, j, k, m in kinds.get_opcodes():  # of two runs that differ, as many are pairs as there can be
        yield from zip(old[i:j], new[k:m], strict=False)


def _common_prefix(old: list[_Node], new: list[_Node]) -> int:
    """Return the length of the common prefix of types."""
    pairs = zip(old, new, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0].type_name() == pair[1].type_name(), pairs))


# --- in other containers ------------------------------------------------------------------------------------------


def _match_wrapped(new: Mapping[str, _Node], old: Mapping[str, _Node], found: dict[str, str]) -> None:
    """Match a layer that was wrapped in a container of its name (``head``, ``head.fc``), or unwrapped."""
    taken = set(found.values())
    for before, after in list(found.items()):
        a, e = new[after], old[before]
        if a.declared or e.declared or a.type_name() == e.type_name() or bool(a.children) == bool(e.children):
            continue
        whole, inner = (e, a) if a.children else (a, e)
        left = (node for node in inner.inside() if node.name not in (taken if inner is a else found))
        alike = [node for node in left if not node.declared and node.signature() == whole.signature()]
        if len(alike) == 1 and whole.has_parameters():
            del found[before]
            _match(*((alike[0], whole) if inner is a else (whole, alike[0])), found)


def _match_by_values(new: Mapping[str, _Node], old: Mapping[str, _Node], found: dict[str, str]) -> None:
    """Match the remaining layers without children whose weights have the values of one layer of the other record."""
    before, after = (
        [node for node in nodes.values() if node.name not in known and not node.declared and _owns_all(node)]
        for nodes, known in ((old, found.keys()), (new, {*found.values()}))
    )
    for gone, came in _by_key(before, after, _Node.signature):
        if max(len(gone), len(came)) > _LONG:
            continue
        alike = {e.name: [a for a in came if _has_same_values(a, e)] for e in gone}
        for name, (first, *others) in ((name, nodes) for name, nodes in alike.items() if nodes):
            if not others and sum(first in nodes for nodes in alike.values()) == 1:
                found[name] = first.name


def _owns_all(node: _Node) -> bool:
    """Whether a layer has parameters, and no layers inside it."""
    return node.layer is not None and bool(node.layer.parameters) and not node.children


def _has_same_values(a: _Node, e: _Node) -> bool:
    """Whether all parameters of two layers with the same signature have known and equal values."""
    mine, theirs = ([] if node.layer is None else [p.reading for p in node.layer.parameters] for node in (a, e))
    return all(map(is_same, mine, theirs))


def _match_across(new: Mapping[str, _Node], old: Mapping[str, _Node], found: dict[str, str]) -> None:
    """Match the remaining layers by signature over all containers: the largest first, with their descendants.

    The numbers in both names are equal, or one name has none and the signature is unique.
    """
    taken = set(found.values())
    gone = [n for n in old.values() if n.name not in found and n.layer is not None and not n.declared]
    came = [n for n in new.values() if n.name not in taken and n.layer is not None and not n.declared]
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
            for group in _pairs_by_key(left, free, key):
                named = any(old.children or _similarity(old.name, new.name) for old, new in group)
                alone = len(group) == 1 and not all(numbers_in(node.name) for node in group[0])
                if named and (numbered or alone):
                    for before, after in group:
                        _match(after, before, found)


def _match_by_contents(new: Mapping[str, _Node], old: Mapping[str, _Node], found: dict[str, str]) -> None:
    """Match containers of the same layers, innermost first, then their remaining children by name."""
    taken = set(found.values())
    for before in sorted(old.values(), key=lambda node: -node.name.count(".")):
        if before.name in found or before.declared or before.layer is None:
            continue
        holders = {parent(found[child.name]) for child in before.children.values() if child.name in found}
        after = new.get(holders.pop()) if len(holders) == 1 else None
        if after is None or after.name in taken or after.declared or after.type_name() != before.type_name():
            continue
        found[before.name] = after.name
        for name, child in before.children.items():
            other = after.children.get(name)
            if other is not None and child.name not in found and other.name not in taken:
                _match(other, child, found)
        taken = set(found.values())


def _made_of(node: _Node, *, made_of: Mapping[int, Hashable], numbered: bool) -> Hashable:
    return made_of[id(node)], numbers_in(node.name) if numbered else ()


# --- the same values under other names --------------------------------------------------------------------------------

_FORMER = "former_"
"""Prefix of the path of a value that is gone, where another has its path now."""


def with_current_paths(
    actual: Record, expected: Record, layers: Mapping[str, str]
) -> tuple[Record, NamesBefore, list[Difference]]:
    """Return the expected record with the paths of the actual one, what they were before, and a difference for each.

    It is of the kind ``path`` for an output of the model itself, which whoever uses the model sees, else ``name``.

    Args:
        actual: The new record.
        expected: The record that it is compared with, whose layers have their current names.
        layers: Current name → name before, of the layers that were renamed.
    """
    both = [(layer, expected.layers[name]) for name, layer in actual.layers.items() if name in expected.layers]
    paths = {a.name: found for a, e in both if (found := _of_calls(a, e))}
    seen = {
        layer.name: {v.path for call in layer.calls if call.root == layer.name for v in call.outputs}
        for layer, _ in both
    }
    differences = [
        Difference(layer=name, kind="path" if now in seen[name] else "name", what=now, actual=now, expected=before)
        for name, found in paths.items()
        for now, before in found.items()
        if not now.startswith(_FORMER)
    ]
    known = with_paths(expected, NamesBefore(paths=paths))
    for a, e in both:
        if weights := dict(_of_parameters(a, e)):
            paths[a.name] = paths.get(a.name, {}) | weights
    return known, NamesBefore(layers=layers, paths=paths), differences


def _of_calls(a: Layer, e: Layer) -> dict[str, str]:
    """Return current path → path before, of what each call of a layer takes and gives under another one."""
    before = {call.index: call for call in e.calls}
    found = [dict(_of_call(call, before[call.index])) for call in a.calls if call.index in before]
    # Where calls are written in different ways, one name stands for several.
    return found[0] if found and all(here == found[0] for here in found) else {}


def _of_call(a: Call, e: Call) -> Iterator[tuple[str, str]]:
    inputs, _, gone = paired_values(a.inputs, e.inputs)
    for value, other in inputs:
        # Of two keywords with other values, one came and one went.
        written = any(map(_is_positional, (value.path, other.path)))
        if value.path != other.path and (written or is_same(value.forward, other.forward)):
            yield value.path, other.path
    outputs, _, lost = paired_values(a.outputs, e.outputs)
    yield from ((value.path, other.path) for value, other in outputs if value.path != other.path)
    yield from _of_arguments(a.arguments, e.arguments)
    taken = {value.path for value in (*a.inputs, *a.outputs)}
    yield from ((f"{_FORMER}{value.path}", value.path) for value in (*gone, *lost) if value.path in taken)


def _of_arguments(actual: Mapping[str, Plain], expected: Mapping[str, Plain]) -> Iterator[tuple[str, str]]:
    """Yield equal arguments that are given by keyword in one call and by position in the other."""
    left = [path for path in expected if path not in actual]
    for path, value in actual.items():
        if path in expected or value is None or value is False:
            continue
        alike = (
            other
            for other in left
            if _is_positional(path) != _is_positional(other)
            and type(expected[other]) is type(value)
            and expected[other] == value
        )
        if (other := next(alike, None)) is not None:
            left.remove(other)
            yield path, other


def _is_positional(path: str) -> bool:
    return path == "input" or path.startswith("input[")


def _of_parameters(a: Layer, e: Layer) -> Iterator[tuple[str, str]]:
    """Yield parameters of a layer that have the values of one with another name."""
    came = [p for p in a.parameters if all(p.name != other.name for other in e.parameters)]
    gone = [p for p in e.parameters if all(p.name != other.name for other in a.parameters)]
    for parameter in came:
        alike = (p for p in gone if (p.shape, p.dtype) == (parameter.shape, parameter.dtype))
        if (same := next((p for p in alike if is_same(parameter.reading, p.reading)), None)) is not None:
            gone.remove(same)
            yield parameter.name, same.name
