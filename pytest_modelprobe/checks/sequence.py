"""Positions of a sequence: which may know of which others."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.record import ROOT, nearest
from pytest_modelprobe.report.text import count, listed

from .agreement import Disagreement, Pairs, apart, broken, change, changed, disagreements, limit, told_inside
from .check import check
from .drawing import check_not_random
from .outcome import Break, NotApplicableError
from .trial import Trace, Trial, Vary, unchanged

_Axes = Callable[[Tensor], list[int]]
"""Of a tensor that a run gave out: the axes that its positions may be along."""


@check
def causal(trial: Trial, *, axis: int = 1, tolerance: float | None = None) -> Break | str:
    """Check that no position knows of later ones: those before a change of the inputs give out what they gave out.

    The second half of the first input is replaced, then one position more: what leaks within chunks, of any one length,
    shows in one of the two. Of each layer the axis as long as the sequence is looked at.

    Args:
        trial: The model and its inputs.
        axis: Which axis of the first input its positions are along.
        tolerance: Largest relative change; None: by dtype.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe, model = ModelProbe(), nn.LSTM(4, 8, batch_first=True)
    >>> print(checks.causal(probe, model, probe.randn(2, 6, 4)))  # doctest: +ELLIPSIS
    causal holds for LSTM: 1 layer at the first 3 and the first 2 of 6 positions; not looked at: output[1][0] ...
    >>> print(checks.causal.outcome(probe, nn.LSTM(4, 8, batch_first=True, bidirectional=True), probe.randn(2, 6, 4)))
    ... # doctest: +ELLIPSIS
    (root) knows of later positions: ...
    """
    path, tensor = sequence(trial, axis)
    length = tensor.shape[axis]
    half = (length + 1) // 2
    one = trial.reference(mode="eval")
    axes_in = _axes_that_follow(trial, one, path, axis)
    cuts = [before for before in (half, half - 1) if before]
    inside = None
    for before in cuts:

        def vary(name: str, x: Tensor, before: int = before) -> Tensor:
            return other_from(trial, x, axis, before) if name == path else x

        def pairs_of(trace: Trace, before: int = before) -> Pairs:
            return _first(before, axes_in(trace))

        two = trial.other(mode="eval", vary=vary)
        found, hidden = apart(trial, (one, two), (unchanged, vary), pairs_of, tolerance, exact=True)
        inside = inside or hidden
        if found:
            return broken(
                found,
                f"knows of later positions: the first {before} of {length} {{changed}} with the others",
                "Look at the causal mask of attention, at padding on both sides of a convolution, and at what is taken "
                "over all positions, or over those of a chunk: a norm, a mean.",
            )
    firsts = " and ".join(f"the first {n}" for n in cuts)
    return _looked_at(one, pairs_of(one), length, f"at {firsts} of {length} positions", inside)


@check
def padding_invariant(
    trial: Trial,
    *,
    mask: str | Tensor | None = None,
    pad_id: int | None = None,
    axis: int = 1,
    tolerance: float | None = None,
) -> Break | str:
    """Check that what stands at masked positions does not matter to the others.

    The last quarter of the positions is masked, and what stands there is replaced. The others must stay as they are,
    and what is pooled of a sequence: tensors of the shape (batch, features).

    A model may find padding by its id, besides a mask or without one. Where that id is known the last quarter is padded
    with it, and the others are to be as they are in a sequence without that quarter.

    Args:
        trial: The model and its inputs; one keyword is the mask, of the shape (batch, positions) of the first input.
            0 or False marks what is masked. True does in a mask of bools with ``pad`` in its name, as
            ``src_key_padding_mask``, and what is not 0 in a mask that is all 0 as it is given. Floats of which none is
            above 0 are added: -inf marks what is masked.
        mask: Its name, or the mask itself, of a model that has a keyword ``mask``; None: the one argument of that shape
            whose name ends with ``mask``.
        pad_id: The id of padding, of a model that finds it by that; None: ``model.config.pad_token_id``, if there is.
        axis: Which axis of the first input its positions are along.
        tolerance: Largest relative change; None: by dtype.

    Raises:
        UsageError: No argument has the name that is given.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe, layer = ModelProbe(), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> x, mask = probe.randn(2, 8, 8), torch.zeros(2, 8, dtype=torch.bool)
    >>> print(checks.padding_invariant(probe, layer, x, src_key_padding_mask=mask).text)
    9 layers at the first 6 of 8 positions without the others, masked by True in src_key_padding_mask
    """
    path, tensor = sequence(trial, axis)
    axis, length = axis % tensor.dim(), tensor.shape[axis]
    kept = length - max(1, length // 4)
    batch = tensor.shape[0 if axis else 1 % tensor.dim()]
    if isinstance(mask, Tensor):
        trial.kwargs["mask"], mask = mask, "mask"
    padding = _padding(trial, tensor, pad_id)
    name = None
    if padding is None or mask is not None or any(where.endswith("mask") for where, _ in trial.dense):
        name = _mask_name(trial, mask, path, (batch, length), axis)
    marks = _marks(name, dict(trial.inputs)[name]) if name else 0

    def masked(where: str, x: Tensor) -> Tensor:
        if where == name:
            x = x.clone()
            x[..., kept:] = marks
        elif where == path and padding is not None:
            x = x.clone()
            x.narrow(axis, kept, length - kept).fill_(padding)
        return x

    def replaced(where: str, x: Tensor) -> Tensor:
        return other_from(trial, x, axis, kept) if where == path else masked(where, x)

    def cut(where: str, x: Tensor) -> Tensor:
        if where == name or x.shape == (batch, length):
            return x[..., :kept].clone()
        return x.narrow(axis, 0, kept).clone() if x.shape[: axis + 1] == tensor.shape[: axis + 1] else x

    def alone(where: str, x: Tensor) -> Tensor:
        return cut(where, x) if where in (path, name) else x

    # What else is as long may be of another sequence: it is cut only where the model wants it to be as long still.
    ways = (vary for vary in (alone, cut) if trial.run(mode="eval", vary=vary).error is None)
    shorter = None if padding is None else next(ways, cut if name is None else None)
    if shorter is None:
        padding = None  # it takes sequences of one length alone
    one = trial.reference(mode="eval", vary=masked)
    varied: tuple[Vary, Vary] = masked, shorter or replaced
    two = trial.other(mode="eval", vary=varied[1])
    if padding is not None:  # where nothing is masked a model may hand on no mask
        both = {given.where for given in two.given}
        one.given = [given for given in one.given if given.is_final or given.where in both]
    rows = batch if axis else -1
    axes_in = _axes_that_follow(trial, one, path, axis)

    def pairs_of(trace: Trace) -> Pairs:
        cut = padding is not None
        return _cut_and_pooled(rows, kept, length) if cut else _first_and_pooled(rows, kept, axes_in(trace))

    found, inside = apart(trial, (one, two), varied, pairs_of, tolerance, exact=padding is None)
    others = "the others"
    if name is not None:
        others += f", masked by {marks} in {name}"
    if padding is not None:
        others += f", padded by {padding}"
    if not found:
        how = f"at the first {kept} of {length} positions without {others}"
        return _looked_at(one, pairs_of(one), length, how, inside)
    unused = _unused_masks(trial) if name is None and pad_id is None else []
    if unused:
        raise NotApplicableError(f"the model finds no padding without {listed(unused)}: give it, or pad_id=")
    return broken(
        found,
        f"sees masked positions: the first {kept} of {length} {{changed}} with {others}",
        "Look at whether the mask reaches the attention, the right way round, and at what is taken over all positions: "
        "a norm, a mean.",
    )


@check
def permutation_equivariant(trial: Trial, *, axis: int = 1, tolerance: float | None = None) -> Break | str:
    """Check that the order of the elements does not matter: other order in, the same in that order out.

    Args:
        trial: The model and its inputs.
        axis: Which axis of the first input its elements are along.
        tolerance: Largest relative change; None: by dtype.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe, layer = ModelProbe(), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> print(checks.permutation_equivariant(probe, layer, probe.randn(2, 5, 8)))
    permutation_equivariant holds for TransformerEncoderLayer: 9 layers of 5 elements in another order
    """
    path, tensor = sequence(trial, axis)
    length = tensor.shape[axis]
    order = torch.arange(length, device=trial.probe.device).roll(1)
    order[: length - 1] = order[: length - 1].flip(0)

    one, two = _reordered(trial, path, axis, order)
    back = torch.argsort(order)
    axes_of = _axes_that_follow(trial, one, path, axis)(one)

    def restored(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        axes = axes_of(x)
        if not axes or x.shape != y.shape:
            return [(x, y)] if axes else []
        found = [(x, y.index_select(axis, back.to(y.device))) for axis in axes]
        for axis in axes:  # as of attention weights
            y = y.index_select(axis, back.to(y.device))
        return [*found, (x, y)]

    found = disagreements(one, two, pairs=restored, tolerance=tolerance)
    if not found:
        return _looked_at(one, restored, length, f"of {length} elements in another order")
    check_not_random(trial)
    return broken(
        found,
        "depends on the order of its elements: {changed} beyond that",
        "Look for positions that are added, and for what is taken over neighbors: a convolution, a recurrence.",
    )


@check
def permutation_invariant(trial: Trial, *, axis: int = 1, tolerance: float | None = None) -> Break | str:
    """Check that the output does not depend on the order of the elements: a set goes in.

    Args:
        trial: The model and its inputs.
        axis: Which axis of the first input its elements are along.
        tolerance: Largest relative change; None: by dtype.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.permutation_invariant.outcome(probe, nn.Flatten(), probe.randn(2, 5, 8)).verdict)
    broken
    """
    path, tensor = sequence(trial, axis)
    order = torch.arange(tensor.shape[axis], device=trial.probe.device).flip(0)

    one, two = _reordered(trial, path, axis, order)
    for where, value in one.final.items():
        again = two.final.get(where)
        far = math.inf if again is None else change(value, again)
        rounded = value.is_floating_point() or value.is_complex()
        if not far <= (limit(value, tolerance) if rounded else 0.0):
            check_not_random(trial)
            return Break(
                layer=ROOT,
                line=f"{ROOT} depends on the order of its elements: {where} {changed(far)}",
                advice="Look for positions that are added, and for a last step that picks one element.",
            )
    return f"{count(len(one.final), 'output')} of {count(tensor.shape[axis], 'element')} in another order"


def _first_and_pooled(batch: int, before: int, axes_of: _Axes) -> Pairs:
    """Return what takes the first positions of two tensors, or all of what has no positions but one row an example."""
    first = _first(before, axes_of)

    def pairs(one: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
        pooled = one.dim() == 2 and len(one) == batch
        return first(one, other) or ([(one, other)] if pooled else [])

    return pairs


def _cut_and_pooled(batch: int, before: int, length: int) -> Pairs:
    """Return what takes the first positions of two tensors, the other of which has no more; and one row an example."""

    def pairs(one: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
        if one.dim() != other.dim():
            return []
        axes = [i for i, n in enumerate(other.shape) if one.shape[i] == length and (one is other or n == before)]
        cut = functools.reduce(lambda x, axis: x.narrow(axis, 0, before), axes, one)
        if one is other:
            return [(cut, cut)] if axes or one.shape[:1] == (batch,) else []
        return [(cut, other)] if cut.shape == other.shape and (axes or one.shape[:1] == (batch,)) else []

    return pairs


def _padding(trial: Trial, ids: Tensor, pad_id: int | None) -> int | None:
    """Return the id by which the model finds padding, if it takes ids and that is known."""
    if ids.is_floating_point() or ids.is_complex():
        if pad_id is not None:
            raise NotApplicableError("pad_id= is an id, and the first input holds none: it is not of integers")
        return None
    if pad_id is None:
        pad_id = getattr(getattr(trial.model, "config", None), "pad_token_id", None)
    return pad_id if isinstance(pad_id, int) and pad_id >= 0 else None


def _unused_masks(trial: Trial) -> list[str]:
    """Return the masks that the model takes."""
    return [name for name in inspect.signature(trial.model.forward).parameters if name.endswith("mask")]


def _reordered(trial: Trial, path: str, axis: int, order: Tensor) -> tuple[Trace, Trace]:
    """Return a run on the inputs as they are, and one with the elements of one of them in another order."""

    def vary(name: str, x: Tensor) -> Tensor:
        return x.index_select(axis, order) if name == path else x

    return trial.reference(mode="eval"), trial.other(mode="eval", vary=vary)


def other_from(trial: Trial, tensor: Tensor, axis: int, start: int) -> Tensor:
    """Return a tensor with other numbers of its kind from a position on; see `other`."""
    rest = tensor.shape[axis] - start
    return torch.cat([tensor.narrow(axis, 0, start), other(trial, tensor).narrow(axis, start, rest)], axis)


def other(trial: Trial, tensor: Tensor, *, time: int = 0) -> Tensor:
    """Return other numbers of the kind of a tensor: floats of its scale, integers that it holds, not where they are.

    Args:
        trial: The model and its inputs.
        tensor: The tensor.
        time: Which of several times: others each time, of integers as far as there are others.

    Raises:
        NotApplicableError: All integers are the same: which others the model takes is not known.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        scale = tensor.std() if tensor.numel() > 1 else tensor.abs().sum()
        return (
            trial.randn_like(tensor, f"other {time}" if time else "other") * (scale if scale > 0 else 1) + tensor.mean()
        )
    known = tensor.unique()
    if len(known) == 1:
        raise NotApplicableError("all elements of the first input are the same: which others there may be is not known")
    by = 1 + time % (len(known) - 1)
    another: Tensor = known[(torch.searchsorted(known, tensor) + by) % len(known)]
    return another


def sequence(trial: Trial, axis: int) -> tuple[str, Tensor]:
    """Return the first input that has positions."""
    for path, tensor in trial.dense:
        positions = -tensor.dim() <= axis < tensor.dim() and tensor.shape[axis] > 1
        if positions and tensor.dtype != torch.bool and not path.endswith("mask"):
            return path, tensor
    raise NotApplicableError(f"no input has more than one position along axis {axis}")


def _mask_name(trial: Trial, name: str | None, path: str, shape: tuple[int, int], axis: int) -> str:
    """Return the path of the mask, of the shape (batch, positions) that an input has along an axis."""
    shapes = {path: tuple(tensor.shape) for path, tensor in trial.dense}
    if name is not None:
        if name not in shapes:
            near = nearest(name, shapes, n=1)
            hint = f"is {near[0]} meant?" if near else f"there are {', '.join(shapes)}"
            raise UsageError(f"mask= names an argument {name!r} that is not given: {hint}")
        if shapes[name] != shape:
            raise NotApplicableError(f"{name} has the shape {shapes[name]}, not (batch, positions), here {shape}")
        return name
    found = [path for path in shapes if path.endswith("mask") and shapes[path] == shape]
    if not found:
        raise NotApplicableError(
            f"no argument of shape {shape}, the batch and axis {axis} of {path}, is called a mask: give mask= its name"
        )
    if len(found) > 1:
        raise NotApplicableError(f"there are several masks, {listed(found)}: give mask= the name of one")
    if shape[0] == shape[1]:
        raise NotApplicableError(
            f"there are as many rows as positions, {shape[0]}: {found[0]} may be of (positions, positions) "
            "too: give mask= its name"
        )
    return found[0]


def _marks(name: str, mask: Tensor) -> bool | int | float:
    """Return what marks a masked position: of a mask that leaves something to be seen, as it is given."""
    if mask.is_floating_point() and not bool((mask > 0).any()):
        return -math.inf
    marks = mask.dtype == torch.bool and "pad" in name
    if bool((mask.bool() == marks).all()):
        marks = not marks
    return marks if mask.dtype == torch.bool else int(marks)


def _axes(tensor: Tensor, length: int) -> list[int]:
    return [axis for axis, n in enumerate(tensor.shape) if n == length]


def _axes_that_follow(trial: Trial, one: Trace, path: str, axis: int) -> Callable[[Trace], _Axes]:
    """Return what finds the axes of positions in what runs give out: those that are shorter in a shorter sequence.

    Where the model takes none, all that are as long may be it: of features, or of a cache, there may be as many.

    Args:
        trial: The model and its inputs.
        one: The run.
        path: The input that has positions.
        axis: Which of its axes they are along.
    """
    tensor = dict(trial.inputs)[path]
    axis, length = axis % tensor.dim(), tensor.shape[axis]

    def guessed(x: Tensor) -> list[int]:
        found = _axes(x, length)
        return [] if found == [0] and axis and len(tensor) == length else found  # as many rows as positions

    for n in dict.fromkeys((length - 1, length // 2)):

        def shorter(where: str, x: Tensor, n: int = n) -> Tensor:
            if where.endswith("mask"):
                return functools.reduce(lambda x, axis: x.narrow(axis, 0, n), _axes(x, length)[-2:], x).clone()
            return x.narrow(axis, 0, n).clone() if x.shape[: axis + 1] == tensor.shape[: axis + 1] else x

        again = trial.run(mode="eval", vary=shorter)
        if again.error is None:
            there = {given.where: given.tensor.shape for given in again.given}
            known = {
                given.where: [i for i in _axes(given.tensor, length) if there[given.where][i : i + 1] == (n,)]
                for given in one.given
                if given.tensor.dim() == len(there.get(given.where, ()))
            }
            return functools.partial(_known_axes, known, guessed)
    return functools.partial(_known_axes, {}, guessed)


def _known_axes(known: Mapping[str, list[int]], guessed: _Axes, trace: Trace) -> _Axes:
    """Return what finds the axes that are known of a value by its address, and guesses those of others."""
    of = {id(given.tensor): known[given.where] for given in trace.given if given.where in known}
    return lambda x: of[id(x)] if id(x) in of else guessed(x)


def _first(before: int, axes_of: _Axes) -> Pairs:
    """Return what takes the first positions of two tensors, along each axis that may be theirs."""

    def pairs(one: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
        axes = axes_of(one)
        if axes and one.shape != other.shape:
            return [(one, other)]
        return [(one.narrow(axis, 0, before), other.narrow(axis, 0, before)) for axis in axes]

    return pairs


def _looked_at(trace: Trace, pairs: Pairs, length: int, how: str, inside: Disagreement | None = None) -> str:
    """Return what was looked at, and how, and what disagrees inside.

    Raises:
        NotApplicableError: No layer, or nothing that the model itself gives out, has an axis of positions.
    """
    along = {id(given): bool(pairs(given.tensor, given.tensor)) for given in trace.given if _is_rounded(given.tensor)}
    layers = {given.layer for given in trace.given if along.get(id(given))}
    if not layers:
        raise NotApplicableError(f"no layer gives out anything along an axis of {count(length, 'position')}")
    final = [given for given in trace.outputs if given.layer == ROOT]
    others = [
        f"{given.path} {tuple(given.tensor.shape)}"
        for given in final
        if given.tensor.dim() and not along.get(id(given))
    ]
    if not any(along.get(id(given)) for given in final):
        within = "agrees" if inside is None else f"does not agree, first {inside.given.where}, {inside.changed}"
        raise NotApplicableError(
            f"nothing that the model gives out can be compared along an axis of {count(length, 'position')}: "
            f"{listed(others) or 'single numbers alone'}; what is inside {within}, in {count(len(layers), 'layer')}"
        )
    text = f"{count(len(layers), 'layer')} {how}{told_inside(inside)}"
    return f"{text}; not looked at: {listed(others)}" if others else text


def _is_rounded(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
