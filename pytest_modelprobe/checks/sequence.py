"""Positions of a sequence: which outputs may depend on which inputs.

A model is run with other values at some positions, and outputs at others may not change. Which axis of a tensor is that
of positions is found by a run on a shorter sequence, since layers transpose and flatten.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.text import count, listed

from .agreement import (
    Disagreement,
    Pairs,
    axes_of_length,
    axes_that_follow,
    check_not_random,
    compare_runs,
    disagreements,
    inside_note,
    violation_of,
    whole,
)
from .check import check
from .outcome import NotApplicableError, Violation
from .positions import (
    MaskedOut,
    attended,
    causal_input,
    disagreeing_attention,
    mark_of,
    masked_out,
    masks_of,
    pad_id_of,
    positions_of,
)
from .rounding import is_rounded
from .session import LayerTensor, PreparedModel, Trace, Vary, keep_input

OFFERED = ("attention_mask", "src_key_padding_mask", "key_padding_mask", "padding_mask", "pad_mask")
"""Arguments that are masks of padding by their name."""

_BESIDE = ("mask", "position_ids", "token_type_ids")
"""Ends of the names of arguments that have an element for each position, and are no targets."""

_IGNORED = -100
"""The target that `cross_entropy` ignores."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
"""Layers that mix neighbors whatever a mask says, so a mask that nobody gave cannot be held against them."""

_Axes = Callable[[LayerTensor], list[int]]
"""Takes a tensor of a layer, returns the axes that may be those of its positions."""


@check
def causal(prepared: PreparedModel, *, axis: int = 1, tolerance: float | None = None) -> Violation | str:
    """Check that the output at each position does not depend on later positions of the input.

    The second half of the first input is replaced, then one position more: a leak within chunks of one length shows in
    one of the two runs. Of each layer, the axis that is as long as the sequence is compared. Positions that an argument
    called a mask leaves out are neither replaced nor compared.

    Args:
        prepared: The model and its inputs.
        axis: Axis of positions of the first input.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe, model = ModelProbe(), nn.LSTM(4, 8, batch_first=True)
    >>> print(checks.causal(probe, model, probe.randn(2, 6, 4)))  # doctest: +ELLIPSIS
    causal holds for LSTM: 1 layer at the first 3 and the first 2 of 6 positions; not looked at: output[1][0] ...
    >>> print(checks.causal.outcome(probe, nn.LSTM(4, 8, batch_first=True, bidirectional=True), probe.randn(2, 6, 4)))
    ... # doctest: +ELLIPSIS
    (root) is not causal: ...
    """
    return later_unseen(prepared, sequence(prepared, axis)[0], axis, tolerance)


def _causal_where_meant(prepared: PreparedModel) -> Violation | str:
    """Check that a model which is meant to be causal is so.

    Raises:
        NotApplicableError: Nothing says that it is meant to be, or only a part of it may be.
    """
    given = causal_input(prepared)
    found = later_unseen(prepared, given.path, given.axis, None)
    if not isinstance(found, Violation):
        return found
    others = disagreeing_attention(prepared, positions_of(prepared, given.path, given.axis)[1])
    if others:
        raise NotApplicableError(
            f"a part of it is causal, as {given.reason}, but not {listed(others)}: call checks.causal if all of it is "
            "meant to be"
        )
    return dataclasses.replace(found, advice=f"It is taken for causal, as {given.reason}. {found.advice}")


_causal_where_meant.__name__ = "causal"
causal_where_meant = check(_causal_where_meant)
"""`causal` among the standard checks."""


def later_unseen(prepared: PreparedModel, path: str, axis: int, tolerance: float | None) -> Violation | str:
    """Return where the output at a position depends on later positions of an input, or a summary."""
    length = positions_of(prepared, path, axis)[1]
    excluded = masked_out(prepared, path, axis)
    seen = (
        list(range(length)) if excluded.positions is None else (~excluded.positions).any(0).nonzero().flatten().tolist()
    )
    half = (len(seen) + 1) // 2
    cuts = [seen[i] for i in (half, half - 1) if 0 < i < len(seen)]
    if not cuts:
        raise NotApplicableError("the mask leaves fewer than two positions")
    one = prepared.reference(mode="eval")
    axes_of = _axes_of_positions(prepared, one, path, axis)
    inside = None
    pairs: Pairs = whole
    for before in cuts:

        def vary(name: str, x: Tensor, before: int = before) -> Tensor:
            return excluded.filled(replaced_from(prepared, x, axis, before), axis, x) if name == path else x

        two = prepared.variation(mode="eval", vary=vary)
        pairs = _first(before, axes_of, excluded)
        found, hidden = compare_runs(prepared, (one, two), (keep_input, vary), pairs, tolerance, exact=True)
        inside = inside or hidden
        if found:
            check_not_random(prepared)
            return violation_of(
                found,
                f"is not causal: the first {before} of {length} positions {{changed}} when later ones were replaced",
                "Look at the causal mask of attention, at padding on both sides of a convolution, and at operations "
                "over all positions, or over those of a chunk: a norm, a mean.",
            )
    firsts = " and ".join(f"the first {n}" for n in cuts)
    without = " without those that are masked" if excluded else ""
    return _looked_at(one, pairs, length, f"at {firsts} of {length} positions{without}", inside)


@check
def padding_invariant(
    prepared: PreparedModel,
    *,
    mask: str | Tensor | None = None,
    pad_id: int | None = None,
    axis: int = 1,
    tolerance: float | None = None,
) -> Violation | str:
    """Check that outputs do not depend on the inputs at masked positions.

    The last quarter of the positions is masked, and the inputs there are replaced. Outputs at the other positions must
    not change, nor may pooled outputs of the shape (batch, features).

    If the mask is given, single numbers must not change either, as a loss or an auxiliary loss. Integers called
    ``labels`` or ``targets``, one for each position, are -100 at what is masked. Where the model does not accept that,
    or takes something else for each position that may be targets, single numbers are not compared. If they alone
    change, this is a hint where the model has a convolution, which mixes neighbors, or gives out nothing else, which
    would show that the mask is one of padding.

    Where later positions are not seen anyway, as in a decoder, some after the first position are masked and replaced
    too. Without a mask, a model of attention that takes one called ``attention_mask``, or after keys or padding, is
    given one that masks nothing, if its output stays the same.

    A model may detect padding by its id, with or without a mask. If that id is known, the last quarter is filled with
    it, and the other outputs have to be those of a sequence without that quarter.

    Args:
        prepared: The model and its inputs; one keyword is the mask, of the shape (batch, positions) of the first input.
            0 or False marks what is masked. True does in a mask of bools with ``pad`` in its name, as
            ``src_key_padding_mask``, and what is not 0 in a mask that is all 0 as it is given. Floats of which none is
            above 0 are added: -inf marks what is masked.
        mask: The name of the mask, or the mask itself for a model with a keyword ``mask``. By default it is the only
            argument of that shape whose name ends with ``mask``; ``decoder_`` masks are those of ``decoder_`` inputs.
        pad_id: The id of padding. By default it is ``model.config.pad_token_id``, if there is one.
        axis: Axis of positions of the first input.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.

    Raises:
        UsageError: No argument has the name that is given.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe, layer = ModelProbe(), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> x, mask = probe.randn(2, 8, 8), torch.zeros(2, 8, dtype=torch.bool)
    >>> print(checks.padding_invariant(probe, layer, x, src_key_padding_mask=mask).text)
    9 layers at the first 6 of 8 positions without the others, masked by True in src_key_padding_mask
    """
    path, tensor = sequence(prepared, axis)
    axis = axis % tensor.dim()
    batch, length = positions_of(prepared, path, axis)
    kept = length - max(1, length // 4)
    if isinstance(mask, Tensor):
        prepared.kwargs["mask"], mask = mask, "mask"
    by_user = mask is not None or bool(_masks(prepared))
    offered = None if by_user else _offered(prepared, path, (batch, length))
    if is_rounded(tensor) and pad_id is not None:
        raise NotApplicableError("pad_id= needs an input of ids, and the first input is not of integers")
    padding = pad_id_of(prepared) if pad_id is None or pad_id < 0 else pad_id
    padding = None if is_rounded(tensor) else padding
    name = (
        _mask_name(prepared, mask, path, (batch, length), axis) if padding is None or mask or _masks(prepared) else None
    )
    marks = mark_of(prepared, name) if name else 0
    excluded = masked_out(prepared, path, axis)
    labels = _labels(prepared, path, name) if by_user and name is not None else None

    def masked(where: str, x: Tensor) -> Tensor:
        if where == name or where in (labels or ()):
            x = x.clone()
            x[..., kept:] = marks if where == name else _IGNORED
        elif where == path and padding is not None:
            x = x.clone()
            x.narrow(axis, kept, length - kept).fill_(padding)
        return x

    def replaced(where: str, x: Tensor) -> Tensor:
        return replaced_from(prepared, x, axis, kept) if where == path else masked(where, x)

    def cut(where: str, x: Tensor) -> Tensor:
        if where == name or x.shape == (batch, length):
            return x[..., :kept].clone()
        return x.narrow(axis, 0, kept).clone() if x.shape[: axis + 1] == tensor.shape[: axis + 1] else x

    def cut_alone(where: str, x: Tensor) -> Tensor:
        return cut(where, x) if where in (path, name) else masked(where, x)

    if labels and prepared.run(mode="eval", vary=masked).error is not None:
        labels = None
    # Other inputs of this length may belong to another sequence: they are cut only if the model fails otherwise.
    ways = (vary for vary in (cut_alone, cut) if prepared.run(mode="eval", vary=vary).error is None)
    shorter = None if padding is None else next(ways, cut if name is None else None)
    if shorter is None:
        padding = None  # the model accepts only one length
    one = prepared.reference(mode="eval", vary=masked)
    varied: tuple[Vary, Vary] = masked, shorter or replaced
    two = prepared.variation(mode="eval", vary=varied[1])
    if padding is not None:  # without padding a model may pass on no mask
        both = {given.where for given in two.tensors}
        one.tensors = [given for given in one.tensors if given.is_final or given.where in both]
    rows = batch if axis and not offered else -1  # what is pooled need not follow a mask that nobody gave
    first = _first(kept, _axes_of_positions(prepared, one, path, axis), excluded)

    def numbers(given: LayerTensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(given.tensor, other)] if labels is not None and is_number(given.tensor) else []

    def pairs(given: LayerTensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
        pooled = given.tensor.dim() == 2 and len(given.tensor) == rows
        if is_number(given.tensor):
            return numbers(given, other)
        if padding is None:
            return first(given, other) or ([(given.tensor, other)] if pooled else [])
        return _cut(given.tensor, other, rows, kept, length, excluded)

    found, inside = compare_runs(prepared, (one, two), varied, pairs, tolerance, exact=padding is None)
    how = "replaced" if padding is None else "removed"
    alone = bool(found) and all(is_number(one.layer_tensor.tensor) for one in found if one.layer_tensor.is_final)
    if alone and padding is not None:  # a loss may be divided by the number of positions
        two, how = prepared.variation(mode="eval", vary=replaced), "replaced"
        found, _ = compare_runs(prepared, (one, two), (masked, replaced), numbers, tolerance, exact=True)
    others = "the others"
    if name is not None:
        others += f", masked by {marks} in {name}"
    if padding is not None:
        others += f", padded by {padding}"
    if not found and name is not None and (between := _seen_between(prepared, path, axis, name, padding)):
        return between
    if not found:
        where = f"at the first {kept} of {length} positions without {others}"
        return _looked_at(one, pairs, length, where, inside)
    at = found[0].layer_tensor.layer
    if offered and isinstance(prepared.layers.modules[at], _CONVOLUTIONS):
        raise NotApplicableError(
            f"{at}, a convolution, mixes neighbors; give {offered}= if it is meant to know padding"
        )
    unused = [parameter for parameter in prepared.parameters if parameter.endswith("mask")]
    if unused and name is None and pad_id is None:
        raise NotApplicableError(f"the model detects no padding without {listed(unused)}: give it, or pad_id=")
    check_not_random(prepared, masked)
    what = "{path}" if is_number(found[0].layer_tensor.tensor) else f"the first {kept} of {length} positions"
    broken = violation_of(
        found,
        f"depends on masked positions: {what} {{changed}} when {others}, were {how}",
        "Check that the mask reaches the attention and is not inverted. Look for operations over all positions: "
        "a norm, a mean.",
    )
    mixes = any(isinstance(layer, _CONVOLUTIONS) for layer in prepared.layers.modules.values())
    agree = any(given.is_final and not is_number(given.tensor) and pairs(given, given.tensor) for given in one.tensors)
    return dataclasses.replace(broken, level="hint") if alone and (mixes or not agree) else broken


@check
def permutation_equivariant(
    prepared: PreparedModel, *, axis: int = 1, tolerance: float | None = None
) -> Violation | str:
    """Check that permuted elements of the input give the same output, permuted alike.

    Two elements are exchanged, then all are moved by one position: every permutation is made of these two. A model of
    neighbors, such as a circular convolution, passes the second alone.

    Args:
        prepared: The model and its inputs.
        axis: Axis of elements of the first input.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe, layer = ModelProbe(), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> print(checks.permutation_equivariant(probe, layer, probe.randn(2, 5, 8)))
    permutation_equivariant holds for TransformerEncoderLayer: 9 layers of 5 elements in 2 other orders
    """
    path, tensor = sequence(prepared, axis)
    length = tensor.shape[axis]
    one = prepared.reference(mode="eval")
    axes_of = _axes_of_positions(prepared, one, path, axis)
    for order in _orders(length):

        def restored(given: LayerTensor, other: Tensor, order: Tensor = order) -> list[tuple[Tensor, Tensor]]:
            axes = axes_of(given)
            if given.tensor.shape != other.shape:
                return [(given.tensor, other)] if axes else []
            back = torch.argsort(order).to(other.device)
            alone = [other.index_select(axis, back) for axis in axes]
            along_all = functools.reduce(lambda x, axis: x.index_select(axis, back), axes, other)  # attention weights
            return [(given.tensor, x) for x in (*alone, along_all)] if axes else []

        two = _reordered(prepared, path, axis, order)
        found = disagreements(one, two, pairs=restored, tolerance=tolerance)
        if found:
            check_not_random(prepared)
            return violation_of(
                found,
                "depends on the order of its elements: {path} {changed} after the permutation was undone",
                "Look for positional embeddings, and for operations over neighbors: a convolution, a recurrence.",
            )
    return _looked_at(one, restored, length, f"of {length} elements in {_orders_text(length)}")


@check
def permutation_invariant(prepared: PreparedModel, *, axis: int = 1, tolerance: float | None = None) -> Violation | str:
    """Check that the output does not depend on the order of the elements, as for a set.

    Two elements are exchanged, then all are moved by one position: every permutation is made of these two.

    Args:
        prepared: The model and its inputs.
        axis: Axis of elements of the first input.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.permutation_invariant.outcome(probe, nn.Flatten(), probe.randn(2, 5, 8)).verdict)
    broken
    """
    path, tensor = sequence(prepared, axis)
    length = tensor.shape[axis]
    one = prepared.reference(mode="eval")
    one.tensors = [given for given in one.tensors if given.is_final]
    for order in _orders(length):
        found = disagreements(one, _reordered(prepared, path, axis, order), tolerance=tolerance, integers=True)
        if found:
            check_not_random(prepared)
            return violation_of(
                found,
                "depends on the order of its elements: {path} {changed}",
                "Look for positional embeddings, and for a last step that picks one element.",
            )
    return f"{count(len(one.tensors), 'output')} of {count(length, 'element')} in {_orders_text(length)}"


def _orders(length: int) -> list[Tensor]:
    """Return two permutations that every other is made of: the first two elements exchanged, and all moved by one."""
    exchanged = torch.arange(length)
    exchanged[:2] = exchanged[:2].flip(0)
    return [exchanged, torch.arange(length).roll(1)][: length - 1]


def _orders_text(length: int) -> str:
    return "2 other orders" if length > 2 else "another order"


def _cut(
    one: Tensor, other: Tensor, rows: int, before: int, length: int, excluded: MaskedOut
) -> list[tuple[Tensor, Tensor]]:
    """Return the first positions of a tensor with a whole shorter one, or with itself; or whole pooled tensors."""
    if one.dim() != other.dim():
        return []
    axes = [axis for axis in axes_of_length(one, length) if one is other or other.shape[axis] == before]
    cut = functools.reduce(lambda x, axis: x.narrow(axis, 0, before), axes, one)
    other = cut if one is other else other
    if cut.shape != other.shape or not (axes or one.shape[:1] == (rows,)):
        return []
    for axis in axes[:1]:  # queries come before keys
        cut, other = excluded.filled(cut, axis), excluded.filled(other, axis)
    return [(cut, other)]


def _seen_between(prepared: PreparedModel, path: str, axis: int, name: str, padding: int | None) -> Violation | None:
    """Return where outputs depend on masked positions before them, of a model that sees no later ones anyway."""
    try:
        meant = causal_input(prepared)
    except NotApplicableError:
        return None
    if not meant.attends or (meant.path, meant.axis) != (path, axis):
        return None
    batch, length = positions_of(prepared, path, axis)
    last = max(1, length // 4)
    between = torch.zeros(batch, length, dtype=torch.bool)
    between[:, 1 : last + 1] = True  # the first stays: others have something to attend to
    given = masked_out(prepared, path, axis).positions
    excluded = MaskedOut(between if given is None else between | given.cpu())

    def masked(where: str, x: Tensor) -> Tensor:
        return MaskedOut(between).filled(x, 1, mark_of(prepared, name)) if where == name else x

    def replaced(where: str, x: Tensor) -> Tensor:
        if where != path:
            return masked(where, x)
        other = replacement(prepared, x)
        if padding is not None:  # a model may count the positions that are not padded
            other = torch.where((x == padding) | (other == padding), x, other)
        return MaskedOut(between).filled(x, axis, other)

    one, two = (prepared.variation(mode="eval", vary=vary) for vary in (masked, replaced))
    pairs = _first(length, _axes_of_positions(prepared, one, path, axis), excluded)
    found, _ = compare_runs(prepared, (one, two), (masked, replaced), pairs, None, exact=True)
    if not found:
        return None
    check_not_random(prepared, masked)
    said = f"depends on masked positions: others {{changed}} when positions 1 to {last} of {length}, masked in {name}, "
    return violation_of(found, said + "were replaced", "Check that the mask reaches the attention of each layer.")


def is_number(x: Tensor) -> bool:
    """Whether a tensor is a single number, as a loss is."""
    return x.numel() == 1 and x.dim() <= 1


def _labels(prepared: PreparedModel, path: str, mask: str) -> list[str] | None:
    """Return the inputs that are targets, one for each position; None if others may be targets too.

    Args:
        prepared: The model and its inputs. Targets are copied, as they may be the input itself.
        path: The input that has positions.
        mask: Its mask.
    """
    given, shape = dict(prepared.dense)[path], dict(prepared.dense)[mask].shape
    each = {where: x for where, x in prepared.dense if x.shape[:2] == shape and where not in (path, mask)}
    each = {where: x for where, x in each.items() if not prepared.argument(where).endswith(_BESIDE)}
    for where, x in each.items():
        named = prepared.argument(where).endswith(("labels", "label", "targets", "target"))
        if where in prepared.kwargs:
            prepared.kwargs[where] = x.clone()
        if not named or x.shape != shape or x.dtype != torch.int64 or (x is given and where not in prepared.kwargs):
            return None
    return list(each)


def _masks(prepared: PreparedModel) -> list[str]:
    """Return the arguments that are given and called masks."""
    return [path for path, _ in prepared.dense if prepared.argument(path).endswith("mask")]


def _offered(prepared: PreparedModel, path: str, shape: tuple[int, int]) -> str | None:
    """Give a model of attention a mask that masks nothing, if the output is the same with it; return its name.

    If it attends to other positions too, as a model that pools neighbors, what padding may reach is not known.
    """
    names = [n for n in OFFERED if n in prepared.parameters and not prepared.argument(path).startswith("decoder_")]
    if not names or attended(prepared) != {shape[1]}:
        return None
    without = prepared.reference(mode="eval")
    for name in names:
        kept = torch.ones(shape, dtype=torch.bool if "pad" in name else torch.int64)
        for given in (~kept, kept) if "pad" in name else (kept,):
            prepared.kwargs[name] = given
            again = prepared.run(mode="eval")
            if again.error is None and not any(far.layer_tensor.is_final for far in disagreements(without, again)):
                return name
        del prepared.kwargs[name]
    return None


def _reordered(prepared: PreparedModel, path: str, axis: int, order: Tensor) -> Trace:
    """Return a run with the elements of one input permuted, and its masks with them."""
    masks = masks_of(prepared, path, positions_of(prepared, path, axis))

    def vary(name: str, x: Tensor) -> Tensor:
        along = axis if name == path else -1 if name in masks else None
        return x if along is None else x.index_select(along, order.to(x.device))

    return prepared.variation(mode="eval", vary=vary)


def replaced_from(prepared: PreparedModel, tensor: Tensor, axis: int, start: int) -> Tensor:
    """Return a tensor with replaced numbers from a position on; see `replacement`."""
    rest = tensor.shape[axis] - start
    return torch.cat([tensor.narrow(axis, 0, start), replacement(prepared, tensor).narrow(axis, start, rest)], axis)


def replacement(prepared: PreparedModel, tensor: Tensor) -> Tensor:
    """Return other numbers for a tensor: floats of the same mean and scale; integers that occur in it elsewhere.

    Raises:
        NotApplicableError: All integers are equal: no other valid values are known.
    """
    if is_rounded(tensor):
        return prepared.redrawn(tensor, "other")
    known = tensor.unique()
    if len(known) == 1:
        raise NotApplicableError("all elements of the first input are equal: no other valid values are known")
    another: Tensor = known[(torch.searchsorted(known, tensor) + 1) % len(known)]
    return another


def sequence(prepared: PreparedModel, axis: int) -> tuple[str, Tensor]:
    """Return the first input that has positions."""
    for path, tensor in prepared.dense:
        positions = -tensor.dim() <= axis < tensor.dim() and tensor.shape[axis] > 1
        if positions and tensor.dtype != torch.bool and not prepared.argument(path).endswith("mask"):
            return path, tensor
    raise NotApplicableError(f"no input has more than one position along axis {axis}")


def _mask_name(prepared: PreparedModel, name: str | None, path: str, shape: tuple[int, int], axis: int) -> str:
    """Return the path of the mask, whose shape is (batch, positions)."""
    shapes = {path: tuple(tensor.shape) for path, tensor in prepared.dense}
    if name is not None:
        if name not in shapes:
            raise UsageError(f"mask= names an argument {name!r} that is not given: there are {', '.join(shapes)}")
        if shapes[name] != shape:
            raise NotApplicableError(f"{name} has the shape {shapes[name]}, not (batch, positions), here {shape}")
        return name
    found = masks_of(prepared, path, shape)
    if len(found) == 1 and shape[0] != shape[1]:
        return found[0]
    why = f"it is not known which mask is of (batch, positions), among {listed(found)}"
    if not found:
        why = f"no argument of shape {shape}, the batch and axis {axis} of {path}, is called a mask of it"
    raise NotApplicableError(f"{why}: give mask= its name")


def _axes_of_positions(prepared: PreparedModel, one: Trace, path: str, axis: int) -> _Axes:
    """Return a function that returns the axes of positions: those that are shorter for a shorter sequence.

    If the model accepts no shorter one, every axis of that length may be one.

    Args:
        prepared: The model and its inputs.
        one: The run.
        path: The input that has positions.
        axis: Its axis of positions.
    """
    tensor = dict(prepared.inputs)[path]
    axis, length = axis % tensor.dim(), tensor.shape[axis]
    known: Mapping[str, list[int]] = {}
    for n in dict.fromkeys((length - 1, length // 2)):

        def shorter(where: str, x: Tensor, n: int = n) -> Tensor:
            if prepared.argument(where).endswith("mask"):
                return functools.reduce(lambda x, axis: x.narrow(axis, 0, n), axes_of_length(x, length)[-2:], x).clone()
            return x.narrow(axis, 0, n).clone() if x.shape[: axis + 1] == tensor.shape[: axis + 1] else x

        again = prepared.run(mode="eval", vary=shorter)
        if again.error is None:
            known = axes_that_follow(one, again, length, n)
            break

    def axes_of(given: LayerTensor) -> list[int]:
        if given.where in known:
            return known[given.where]
        found = axes_of_length(given.tensor, length)
        return [] if found == [0] and axis and len(tensor) == length else found  # as many rows as positions

    return axes_of


def _first(before: int, axes_of: _Axes, excluded: MaskedOut) -> Pairs:
    """Return pairs of the first positions of two tensors, along each axis that may be that of positions."""

    def pairs(given: LayerTensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
        one, axes = given.tensor, axes_of(given)
        if axes and one.shape != other.shape:
            return [(one, other)]
        firsts = [(axis, one.narrow(axis, 0, before), other.narrow(axis, 0, before)) for axis in axes]
        return [(excluded.filled(x, axis), excluded.filled(y, axis)) for axis, x, y in firsts]

    return pairs


def _looked_at(trace: Trace, pairs: Pairs, length: int, how: str, inside: Disagreement | None = None) -> str:
    """Return a summary of what was compared, and how, and what differs inside.

    Raises:
        NotApplicableError: No layer, or no output of the model, has an axis of positions.
    """
    along = [given for given in trace.tensors if is_rounded(given.tensor) and pairs(given, given.tensor)]
    layers = {given.layer for given in along}
    if not layers:
        raise NotApplicableError(f"no layer returns a tensor with an axis of {count(length, 'position')}")
    final = [given for given in trace.outputs if given.layer == ROOT]
    others = [f"{g.path} {tuple(g.tensor.shape)}" for g in final if g.tensor.dim() and g not in along]
    if not any(given in along for given in final):
        within = "agrees" if inside is None else f"does not agree, first {inside.layer_tensor.where}, {inside.changed}"
        raise NotApplicableError(
            f"no output of the model can be compared along an axis of {count(length, 'position')}: "
            f"{listed(others) or 'single numbers alone'}; what is inside {within}, in {count(len(layers), 'layer')}"
        )
    text = f"{count(len(layers), 'layer')} {how}{inside_note(inside)}"
    return f"{text}; not looked at: {listed(others)}" if others else text
