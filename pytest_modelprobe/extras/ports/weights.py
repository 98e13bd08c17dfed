"""Weights of one implementation in another: which parameter has which values, and how they are carried over.

A port stores the same numbers in another way: the matrix transposed, or several matrices as the rows of one. So
parameters are recognized by their elements, and never by their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def recognized(model: nn.Module, source: nn.Module) -> dict[str, str]:
    """Return where the values of each parameter of a model are in another; parameters that are not found are left out.

    If all elements of a parameter are one number, as of a bias of zeros, and the other model has such a parameter too,
    the text is empty: nothing tells which one it is.

    >>> fused, parts = nn.Linear(4, 8, bias=False), nn.ModuleDict({n: nn.Linear(4, 4, bias=False) for n in "qk"})
    >>> with torch.no_grad():
    ...     _ = fused.weight.copy_(torch.cat([parts["q"].weight, parts["k"].weight]))
    >>> recognized(fused, parts), recognized(parts, fused)["k.weight"]
    ({'weight': 'rows of q.weight, k.weight'}, 'rows 4:8 of weight')
    """
    there = {name: parameter.detach() for name, parameter in source.named_parameters()}
    constants = {number for x in there.values() if (number := _constant(x)) is not None}
    found = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if _constant(values) in constants:
            found[name] = ""
        elif how := _where(values, there) or _where(values, there, reordered=True):
            found[name] = how
    return found


def _constant(x: Tensor) -> complex | None:
    """Return the number that all elements of a tensor are; `None` if they are not all the same."""
    alike = x.numel() and bool((x == x.flatten()[0]).all())
    return complex(x.flatten()[0].item()) if alike else None


def _where(values: Tensor, there: Mapping[str, Tensor], *, reordered: bool = False) -> str:
    """Return where values are in others, in another order of rows if that is said; an empty text if they are not."""
    offset = _offset_reordered if reordered else _offset
    for name, other in there.items():
        if torch.equal(values, other):
            return name
        if values.ndim == other.ndim == 2 and torch.equal(values, other.T):
            return f"{name} transposed"
    for turned in (False, True):
        said = f"{' transposed' if turned else ''}{', rows in another order' if reordered else ''}"
        looked_in = {name: x.T if turned and x.ndim == 2 else x for name, x in there.items()}
        for name, other in looked_in.items():
            start = offset(values, other)
            if start is not None:
                rows = f"rows {start}:{start + len(values)} of " if len(values) < len(other) else ""
                return f"{rows}{name}{said}"
        parts = {name: start for name, x in looked_in.items() if (start := offset(x, values)) is not None}
        if sum(len(looked_in[name]) for name in parts) == (len(values) if values.ndim else -1):
            return f"rows of {', '.join(sorted(parts, key=parts.__getitem__))}{said}"
    return ""


def _offset(part: Tensor, whole: Tensor) -> int | None:
    """Return the row at which a tensor stands in a longer one; `None` if it does not."""
    fits = part.ndim == whole.ndim > 0 and part.shape[1:] == whole.shape[1:] and 0 < len(part) < len(whole)
    if not fits or part.dtype != whole.dtype or part.device != whole.device:
        return None
    alike = (whole[: len(whole) - len(part) + 1] == part[0]).flatten(1).all(1) if part.ndim > 1 else (
        whole[: len(whole) - len(part) + 1] == part[0]
    )  # fmt: skip
    starts: Sequence[int] = alike.nonzero().flatten().tolist()
    return next((start for start in starts if torch.equal(whole[start : start + len(part)], part)), None)


def _offset_reordered(part: Tensor, whole: Tensor) -> int | None:
    """Return where the rows of a tensor stand in another one as a block, in any order; `None` if they do not.

    A conversion of rotary positions, from neighbors to halves, reorders the rows of queries and keys.
    """
    fits = part.ndim == whole.ndim > 0 and part.shape[1:] == whole.shape[1:] and 0 < len(part) <= len(whole)
    if not fits or part.dtype != whole.dtype or part.device != whole.device or part.is_complex():
        return None
    keys = _keys(part)
    at = torch.isin(_keys(whole), keys).nonzero().flatten().tolist()
    if len(at) != len(part) or at[-1] - at[0] + 1 != len(part):
        return None
    block = whole[at[0] : at[-1] + 1]
    return at[0] if torch.equal(block[_keys(block).argsort()], part[keys.argsort()]) else None


def _keys(x: Tensor) -> Tensor:
    """Return an integer for each row. Equal rows have equal ones, and rows with other first elements have others."""
    bits = x.reshape(len(x), -1)[:, :16].double().view(torch.int64)
    odd = torch.arange(1, bits.shape[1] + 1, device=x.device) * 0x9E3779B97F4A7C1
    return ((bits ^ (bits >> 29)) * odd).sum(1)


def carry(source: nn.Module, model: nn.Module, names: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Set parameters of a model from those of another, and return from which, and the names of those left as they are.

    Args:
        source: The model that has the weights.
        model: The model that gets them.
        names: Layer of ``source`` → layer of ``model``. Layers without a partner inside two that are partners are
            taken in order: as many as give the rows of one. Then parameters that are alone in their shape.

    >>> there, here = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4)), nn.Sequential(nn.Linear(2, 6))
    >>> carry(there, here, {"(root)": "(root)"})
    ({'0.weight': 'rows of 0.weight, 1.weight', '0.bias': 'rows of 0.bias, 1.bias'}, [])
    """
    own, its = dict(model.named_modules()), dict(source.named_modules())
    pairs = {_path(theirs): _path(mine) for theirs, mine in names.items()}
    groups = [([theirs], [mine]) for theirs, mine in pairs.items()]
    taken = set(pairs.values())
    for theirs, mine in sorted(
        pairs.items(), key=lambda found: -found[0].count(".") - bool(found[0])
    ):  # innermost first
        left, free = (_unpaired(tree, at, known) for tree, at, known in ((its, theirs, {*pairs}), (own, mine, taken)))
        grouped = _by_rows(its, left, own, free)
        groups += grouped
        pairs |= {name: "" for parts, _ in grouped for name in parts}
        taken |= {name for _, parts in grouped for name in parts}
    set_from: dict[str, str] = {}
    for before, now in groups:
        for kind in ("weight", "bias"):
            _carry_rows(its, before, own, now, kind, set_from)
        if len(before) == len(now) == 1 and before[0] in its and now[0] in own:
            there = dict(its[before[0]].named_parameters(recurse=False))
            for kind in there.keys() - {"weight", "bias"}:
                _carry_rows(its, before, own, now, kind, set_from)
    own_names = [name for name, _ in model.named_parameters()]  # a tied one has one name
    set_from |= _carry_by_shape(source, model, [name for name in own_names if name not in set_from])
    carried = {name: set_from[name] for name in own_names if name in set_from}
    return carried, [name for name in own_names if name not in carried]


def _carry_by_shape(source: nn.Module, model: nn.Module, left: list[str]) -> dict[str, str]:
    """Set parameters that are the only ones of their shape that are left in both, and return from which.

    One implementation has its class token at the root, and the other in a layer of embeddings.
    """
    known = recognized(source, model) if left else {}
    own, its = dict(model.named_parameters()), dict(source.named_parameters())
    by_shape: dict[torch.Size, tuple[list[str], list[str]]] = {}
    for side, (names, there) in enumerate(((left, own), ([name for name in its if name not in known], its))):
        for name in names:
            by_shape.setdefault(there[name].shape, ([], []))[side].append(name)
    only = {mine[0]: theirs[0] for mine, theirs in by_shape.values() if len(mine) == len(theirs) == 1}
    for mine, theirs in only.items():
        own[mine].detach().copy_(its[theirs].detach())
    return only


def _path(name: str) -> str:
    return "" if name == "(root)" else name


def _unpaired(tree: Mapping[str, nn.Module], at: str, known: set[str]) -> list[str]:
    """Return the layers with a matrix inside one, that have no partner."""
    inside = (name for name in tree if name not in known and (not at or name.startswith(f"{at}.")))
    return [name for name in inside if getattr(getattr(tree[name], "weight", None), "ndim", 0) == 2]


def _rows(layer: nn.Module) -> Tensor:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.detach().T if _is_turned(layer) else weight.detach()


def _by_rows(
    its: Mapping[str, nn.Module], left: list[str], own: Mapping[str, nn.Module], free: list[str]
) -> list[tuple[list[str], list[str]]]:
    """Return runs of layers that have as many rows; nothing unless all layers of both are in one."""
    left, free, found = left.copy(), free.copy(), []
    while left and free:
        before, now = [left.pop(0)], [free.pop(0)]
        while (x := sum(len(_rows(its[n])) for n in before)) != (y := sum(len(_rows(own[n])) for n in now)):
            if not (left if x < y else free):
                return []
            (before if x < y else now).append((left if x < y else free).pop(0))
        if len({_rows(its[n]).shape[1] for n in before} | {_rows(own[n]).shape[1] for n in now}) != 1:
            return []
        found.append((before, now))
    return [] if left or free else found


def _carry_rows(
    its: Mapping[str, nn.Module],
    before: list[str],
    own: Mapping[str, nn.Module],
    now: list[str],
    kind: str,
    set_from: dict[str, str],
) -> None:
    """Set the parameters of a kind of some layers to the rows of those of others, if there are as many."""
    there: list[Any] = [getattr(its[name], kind, None) if name in its else None for name in before]
    here: list[Any] = [getattr(own[name], kind, None) if name in own else None for name in now]
    if not all(isinstance(x, nn.Parameter) for x in (*there, *here)):
        return
    turned = [kind == "weight" and _is_turned(tree[n]) for tree, names in ((its, before), (own, now)) for n in names]
    values = [x.detach().T if turn else x.detach() for x, turn in zip((*there, *here), turned, strict=True)]
    whole, parts = torch.cat(values[: len(there)]).clone(), values[len(there) :]
    if whole.shape != (sum(map(len, parts)), *parts[0].shape[1:]):
        return
    said = f"rows of {', '.join(f'{n}.{kind}'.lstrip('.') for n in before)}" if len(before) > 1 or len(now) > 1 else ""
    for name, part, rows in zip(now, parts, whole.split(list(map(len, parts))), strict=True):
        part.copy_(rows)
        turn = " transposed" if turned[0] != turned[-1] else ""
        set_from[f"{name}.{kind}".lstrip(".")] = (said or f"{before[0]}.{kind}".lstrip(".")) + turn


def _is_turned(layer: nn.Module) -> bool:
    """Whether a layer has the inputs in the rows of its matrix, as Conv1D of transformers does."""
    return type(layer).__name__ == "Conv1D"
