"""Pair the values of a call, and of its isolated response, with the expected ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_modelprobe.record import (
    EmittedTensor,
    IsolatedResponse,
    Record,
    Value,
)


def comparable(a: IsolatedResponse | None, e: IsolatedResponse | None) -> bool:
    """Whether two responses were made from the same synthetic tensors."""
    if a is None or e is None or a.reason is not None or e.reason is not None:
        return False
    if a.recipes == e.recipes:
        return True
    return all(e.recipes[name] == recipe for name, recipe in a.recipes.items() if name in e.recipes)


def children(response: IsolatedResponse) -> Mapping[str, None]:
    """Return the calls of children in a response: ``attn``, ``attn (call 2)``."""
    return dict.fromkeys(h.where.rpartition(" ")[0] for h in response.handed)


def has_both_modes(record: Record) -> bool:
    """Whether there are forwards in training mode and in evaluation mode of one root."""
    kinds = {(call.root, call.root_training) for layer in record.layers.values() for call in layer.calls}
    return len(kinds) > len({root for root, _ in kinds})


def paired_emitted(
    actual: Sequence[EmittedTensor], expected: Sequence[EmittedTensor], paths: Mapping[str, str]
) -> tuple[Sequence[tuple[EmittedTensor, EmittedTensor | None]], Sequence[EmittedTensor]]:
    """Return each emitted tensor with the expected one at the same place, and the expected ones that are left.

    ``paths`` maps paths of outputs to the expected ones.
    """
    now, then = ([handed.where for handed in side] for side in (actual, expected))
    positions = {} if now == then else _numbered_otherwise(now, then)
    was = [positions.get(where) or paths.get(where, where) for where in now]
    if was == then:
        return list(zip(actual, expected, strict=True)), ()
    theirs: dict[str, list[EmittedTensor]] = {}
    for handed in expected:
        theirs.setdefault(handed.where, []).append(handed)
    pairs = [(h, theirs[where].pop(0) if theirs.get(where) else None) for h, where in zip(actual, was, strict=True)]
    gone = [handed for left in theirs.values() for handed in left]
    came = [handed for handed, other in pairs if other is None]

    def alone(handed: EmittedTensor, others: Sequence[EmittedTensor]) -> bool:
        child = _child(handed)
        tensor = child != "" and not (handed.passed or "").startswith("=")
        return tensor and sum(_child(other) == child for other in others) == 1

    # One tensor that a child gets by keyword now, and got by position then.
    renamed = {id(h): other for h in came for other in gone if _child(h) == _child(other) and alone(h, came)}
    renamed = {key: other for key, other in renamed.items() if alone(other, gone)}
    moved = set(map(id, renamed.values()))
    return [(h, other or renamed.get(id(h))) for h, other in pairs], [h for h in gone if id(h) not in moved]


def _numbered_otherwise(now: Sequence[str], then: Sequence[str]) -> Mapping[str, str]:
    """Return the path of the first positional input now → then, of children that get one on one side only.

    A single one is called ``input``, the first of several ``input[0]``.
    """
    came, gone = set(now) - set(then), set(then) - set(now)
    alone = {where: f"{where}[0]" for where in came if where.endswith(" input")}
    first = {where: where.removesuffix("[0]") for where in came if where.endswith(" input[0]")}
    return {where: other for where, other in (alone | first).items() if other in gone}


def _child(handed: EmittedTensor) -> str:
    """Return the child that a tensor is passed to; empty for an output."""
    return handed.where.rpartition(" ")[0]


def paired_values(
    actual: Sequence[Value], expected: Sequence[Value]
) -> tuple[list[tuple[Value, Value]], list[Value], list[Value]]:
    """Return pairs of values, added values and removed values.

    They are paired by path; those left over (by keyword now, by position then) in order by like shape and dtype.
    """
    if [value.path for value in actual] == [value.path for value in expected]:
        return list(zip(actual, expected, strict=True)), [], []
    theirs = {value.path: value for value in expected}
    pairs = {value.path: theirs.pop(value.path) for value in actual if value.path in theirs}
    left = list(theirs.values())
    for value in actual:
        if value.path not in pairs:
            alike = (v for v in left if (v.shape, v.dtype) == (value.shape, value.dtype))
            if (other := next(alike, None)) is not None:
                pairs[value.path] = other
                left = [v for v in left if v is not other]
    added = [value for value in actual if value.path not in pairs]
    return [(value, pairs[value.path]) for value in actual if value.path in pairs], added, left
