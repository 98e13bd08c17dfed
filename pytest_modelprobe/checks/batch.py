"""The batch: its rows know nothing of each other, and there may be any number of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pytest_modelprobe.report.text import count, listed

from .agreement import Disagreement, Pairs, broken, disagreements, upheld
from .check import check
from .drawing import check_not_random
from .outcome import Break, NotApplicableError
from .sequence import other
from .trial import Trace, Trial


@check
def batch_independent(trial: Trial, *, axis: int = 0, tolerance: float | None = None) -> Break | str:
    """Check that in evaluation mode a row of the batch gives out the same whatever the other rows are.

    All rows but the first are replaced, then all but the last, which a recurrence over the batch comes to at its end.

    Args:
        trial: The model and its inputs.
        axis: Which axis of the inputs the batch is along.
        tolerance: Largest relative change; None: by dtype.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.batch_independent(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    batch_independent holds for Linear: the first and the last of 4 rows, in 1 layer
    >>> print(checks.batch_independent.outcome(probe, nn.Softmax(dim=0), probe.randn(4, 3)).layer)
    (root)
    """
    size = size_of(trial, axis)
    if size < 2:
        raise NotApplicableError("the batch has one row: give it two or more")
    one = trial.reference(mode="eval")
    first_row = _row(size, size)
    layers = {given.layer for given in one.outputs if first_row(given.tensor, given.tensor)}
    if not layers:
        raise NotApplicableError(f"no layer gives out anything along an axis of {count(size, 'row')}")
    for row, which in (0, "first"), (size - 1, "last"):
        found = _mixed(trial, one, size, axis, tolerance, row)
        if not found:
            continue
        if trial.run(mode="eval", vary=_sized(trial, size, size + 1, axis)).error is not None:
            raise _no_batch(axis)
        check_rows_go_together(trial, axis)
        return broken(
            found,
            f"mixes the batch: the {which} row {{changed}} with the other rows",
            "Look for what is taken over axis 0: a softmax, a norm, a mean, a reshape; a recurrence without "
            "batch_first=True; or a BatchNorm that is not in evaluation mode.",
        )
    return f"the first and the last of {count(size, 'row')}, in {count(len(layers), 'layer')}"


@check
def any_batch_size(trial: Trial, *, axis: int = 0, tolerance: float | None = None) -> Break | str:
    """Check that in evaluation mode a batch of one row, and one of a row more, run and give the same for the first row.

    Args:
        trial: The model and its inputs.
        axis: Which axis of the inputs the batch is along.
        tolerance: Largest relative change; None: by dtype.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.any_batch_size(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    any_batch_size holds for Linear: batches of 1, 4 and 5
    >>> print(checks.any_batch_size.outcome(probe, nn.Unflatten(0, (2, 2)), probe.randn(4, 3)).layer)
    (root)
    """
    size = size_of(trial, axis)
    one = trial.reference(mode="eval")
    for n in sorted({1, size + 1} - {size}):
        two = trial.run(mode="eval", vary=_sized(trial, size, n, axis))
        if two.error is not None:
            check_rows_go_together(trial, axis)
            if size > 1 and any(_mixed(trial, one, size, axis, tolerance, row) for row in (0, size - 1)):
                raise _no_batch(axis)
            return Break(
                layer=two.raised_in,
                line=f"{two.raised_in} takes no batch of {n}, only of {size}: {two.failure}",
                advice="Look for a size that is written into a view, a buffer or a loop.",
            )
        found = disagreements(one, two, pairs=_row(size, n), tolerance=tolerance)
        found = upheld(found, one, _row(size, size))
        if found:
            check_not_random(trial)
            check_rows_go_together(trial, axis)
            return broken(
                found,
                f"depends on the batch size: the first row {{changed}} in a batch of {n}, not {size}",
                "Look for a size that is written into a view, a buffer or a loop, and for what is taken over axis 0.",
            )
    return f"batches of {', '.join(str(n) for n in sorted({1, size}))} and {size + 1}"


def size_of(trial: Trial, axis: int) -> int:
    """Return the number of rows of the batch."""
    having = [tensor for _, tensor in trial.dense if -tensor.dim() <= axis < tensor.dim()]
    if not having:
        raise NotApplicableError(f"no input has an axis {axis}, of a batch")
    if all(tensor.dim() == 1 and tensor.is_floating_point() for tensor in having):
        raise NotApplicableError("the inputs have one axis, which is more likely of features than of a batch")
    if not having[0].shape[axis]:
        raise NotApplicableError("the batch has no rows")
    return having[0].shape[axis]


def check_rows_go_together(trial: Trial, axis: int) -> None:
    """Refuse to call broken what takes offsets or edges of a graph beside rows: integers that point to them.

    Raises:
        NotApplicableError: Such inputs differ in size along the axis.
    """
    inputs = [(path, x) for path, x in trial.dense if x.dim() > axis and not path.endswith("mask")]
    sizes = {path: x.shape[axis] for path, x in inputs if x.shape[axis] != 1}
    if len(set(sizes.values())) > 1 and not all(x.is_floating_point() for _, x in inputs):
        told = listed([f"{path} has {n}" for path, n in sizes.items()])
        raise NotApplicableError(
            f"the inputs differ in size along axis {axis}: {told}; which rows are of one is unknown"
        )


def _no_batch(axis: int) -> NotApplicableError:
    return NotApplicableError(
        f"axis {axis} seems to be no batch: its rows know of each other, and there is one number of them"
    )


def batched(trial: Trial, size: int, axis: int) -> set[str]:
    """Return the paths of the inputs that have a row for each of the batch."""
    return {path for path, x in trial.dense if -x.dim() <= axis < x.dim() and x.shape[axis] == size}


def _sized(trial: Trial, size: int, n: int, axis: int) -> Callable[[str, Tensor], Tensor]:
    """Return what makes of a batch one of n rows: the first ones, over and over."""
    varied = batched(trial, size, axis)

    def vary(path: str, x: Tensor) -> Tensor:
        return x.index_select(axis, torch.arange(n, device=x.device) % size) if path in varied else x

    return vary


def _mixed(trial: Trial, one: Trace, size: int, axis: int, tolerance: float | None, row: int) -> list[Disagreement]:
    """Return what a row gives out otherwise when all other rows are replaced."""
    varied = batched(trial, size, axis)
    replaced = []

    def vary(path: str, x: Tensor) -> Tensor:
        if path not in varied or x.dtype == torch.bool or path.endswith("mask"):
            return x
        try:
            others = other(trial, x)
        except NotApplicableError:  # token types that are all 0, say
            return x
        replaced.append(path)
        others.select(axis, row).copy_(x.select(axis, row))
        return others

    two = trial.other(mode="eval", vary=vary)
    if not replaced:
        raise NotApplicableError("all elements of the inputs are the same: which others there may be is not known")
    pairs = _row(size, size, row)
    return upheld(disagreements(one, two, pairs=pairs, tolerance=tolerance), one, pairs)


def _row(size: int, n: int, row: int = 0) -> Pairs:
    """Return what takes one row of two batches, along each axis that may be theirs."""

    def pairs(one: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
        sizes = enumerate(zip(one.shape, other.shape, strict=False))
        return [(one.select(i, row), other.select(i, row)) for i, both in sizes if both == (size, n)]

    return pairs
