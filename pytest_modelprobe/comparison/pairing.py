"""Pair the values of a call, and of its isolated response, with the expected ones.

Numbers are only compared where both sides are the same thing: values of one place in a call, and responses to the same
synthetic tensors. Here is decided what that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_modelprobe.record import (
    EmittedTensor,
    IsolatedResponse,
    NamesBefore,
    Reading,
    Record,
    Value,
    qualified,
    relative_name,
)

from .differences import CallPair
from .tolerance import change


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
