"""Masks of positions: which argument is one, what it marks, and which positions it leaves out.

A model may compute anything at the positions of padding, so checks neither replace nor compare what is there. Libraries
disagree on what a mask marks: 0 is left out in an ``attention_mask``, True in a ``key_padding_mask``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pytest_modelprobe.checks.session import PreparedModel
from pytest_modelprobe.record import ROOT

_MASKED = -1e3
"""A float up to here masks the score that it is added to: a softmax over it gives 0."""


class MaskedOut:
    """Positions of an input that a mask leaves out, as those of padding: a model may compute anything there.

    Args:
        positions: True where a position is left out, of shape (batch, positions). With `None` nothing is left out.
    """

    def __init__(self, positions: Tensor | None = None) -> None:
        self.positions = positions if positions is not None and bool(positions.any()) else None

    def __bool__(self) -> bool:
        return self.positions is not None

    def filled(self, tensor: Tensor, axis: int, value: Tensor | float = 0.0, *, start: int = 0) -> Tensor:
        """Return a tensor with a value at the positions that are left out.

        Args:
            tensor: A tensor with an axis of rows, the first unless that is ``axis``: the batch, or several rows for
                each of it. A tensor without one is returned as it is.
            axis: Its axis of positions.
            value: A number, or a tensor of the same shape.
            start: The position at which the tensor begins.

        >>> MaskedOut(torch.tensor([[True, False], [False, False]])).filled(torch.ones(2, 2), 1)
        tensor([[0., 1.],
                [1., 1.]])
        """
        if self.positions is None or tensor.dim() < 2:
            return tensor
        axis, rows = axis % tensor.dim(), 0 if axis % tensor.dim() else 1
        each, rest = divmod(tensor.shape[rows], len(self.positions))
        if rest:
            return tensor
        where = self.positions.narrow(1, start, tensor.shape[axis]).repeat_interleave(each, 0).to(tensor.device)
        shape = [n if i in (rows, axis) else 1 for i, n in enumerate(tensor.shape)]
        where = (where.T if axis < rows else where).reshape(shape)
        return torch.where(where, torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device), tensor)


def masked_out(prepared: PreparedModel, path: str, axis: int) -> MaskedOut:
    """Return the positions of an input that its masks leave out, or that have the id of padding."""
    shape = positions_of(prepared, path, axis)
    names = masks_of(prepared, path, shape)
    if shape[0] == shape[1]:  # any other may be of (positions, positions)
        names = [name for name in names if prepared.argument(name).endswith("attention_mask")]
    found = [left_out(prepared.argument(name), dict(prepared.dense)[name]) for name in names]
    tensor, padding = dict(prepared.dense)[path], pad_id_of(prepared)
    if padding is not None and not tensor.is_floating_point() and tensor.shape == shape:
        found.append(tensor == padding)
    return MaskedOut(torch.stack([positions.cpu() for positions in found]).any(0) if found else None)


def positions_of(prepared: PreparedModel, path: str, axis: int) -> tuple[int, int]:
    """Return the numbers of rows and of positions of an input, the shape of its masks."""
    tensor = dict(prepared.dense)[path]
    return tensor.shape[0 if axis % tensor.dim() else 1 % tensor.dim()], tensor.shape[axis]


def pad_id_of(prepared: PreparedModel) -> int | None:
    """Return the id by which a model of transformers detects padding."""
    found = getattr(getattr(prepared.layers.modules[ROOT], "config", None), "pad_token_id", None)
    return found if isinstance(found, int) and found >= 0 else None


def masks_of(prepared: PreparedModel, path: str, shape: tuple[int, int]) -> list[str]:
    """Return the arguments that are masks of an input, by their names: of shape (batch, positions)."""
    of_decoder = prepared.argument(path).startswith("decoder_")
    named = [(name, prepared.argument(name)) for name, x in prepared.dense if x.shape == shape]
    return [path for path, name in named if name.endswith("mask") and name.startswith("decoder_") == of_decoder]


def left_out(name: str, mask: Tensor) -> Tensor:
    """Return where a mask leaves out what it belongs to.

    >>> left_out("attention_mask", torch.tensor([0, 1])), left_out("pad_mask", torch.tensor([False, True]))
    (tensor([ True, False]), tensor([False,  True]))
    """
    marks = mark(name, mask)
    return mask <= _MASKED if marks == -math.inf else mask == marks


def mark(name: str, mask: Tensor) -> bool | int | float:
    """Return the value that marks what is left out, such that the given mask does not leave out everything."""
    if mask.is_floating_point() and not bool((mask > 0).any()):
        return -math.inf
    marks = mask.dtype == torch.bool and "pad" in name
    if bool((mask.bool() == marks).all()):
        marks = not marks
    return marks if mask.dtype == torch.bool else int(marks)
