"""The batch: its rows know nothing of each other, and there may be any number of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pytest_modelprobe.report.text import count

from .agreement import COLUMNS, Pairs, disagreements, rows
from .check import check
from .outcome import Break, NotApplicableError
from .sequence import other
from .trial import Trial


@check
def batch_independent(trial: Trial, *, axis: int = 0, tolerance: float | None = None) -> Break | str:
    """Check that in evaluation mode a row of the batch gives out the same whatever the other rows are.

    Args:
        trial: The model and its inputs.
        axis: Which axis of the inputs the batch is along.
        tolerance: Largest relative change; None: by dtype.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.batch_independent(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    batch_independent holds for Linear: the first of 4 rows, in 1 layer
    >>> print(checks.batch_independent.outcome(probe, nn.Softmax(dim=0), probe.randn(4, 3)).layer)
    (root)
    """
    size = size_of(trial, axis)
    if size < 2:
        raise NotApplicableError("the batch has one row: give it two or more")
    varied = batched(trial, size, axis)

    def vary(path: str, x: Tensor) -> Tensor:
        if path not in varied or x.dtype == torch.bool or path.endswith("mask"):
            return x
        return torch.cat([x.narrow(axis, 0, 1), other(trial, x).narrow(axis, 1, size - 1)], axis)

    one, two = trial.reference(mode="eval"), trial.other(mode="eval", vary=vary)
    first_rows = _first_rows(size, size)
    layers = {given.layer for given in one.given if first_rows(given.tensor, given.tensor)}
    if not layers:
        raise NotApplicableError(f"no layer gives out anything along an axis of {count(size, 'row')}")
    found = disagreements(one, two, pairs=first_rows, tolerance=tolerance)
    if not found:
        return f"the first of {count(size, 'row')}, in {count(len(layers), 'layer')}"
    first = found[0]
    return Break(
        layer=first.given.layer,
        line=f"{first.given.layer} mixes the batch: the first row changed by {first.row[1]} with the other rows",
        columns=COLUMNS,
        rows=rows(found),
        advice="Look for what is taken over axis 0: a softmax, a norm, a mean, a reshape; or a BatchNorm that is not "
        "in evaluation mode.",
    )


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
    varied = batched(trial, size, axis)

    def sized(n: int) -> Callable[[str, Tensor], Tensor]:
        def vary(path: str, x: Tensor) -> Tensor:
            return x.index_select(axis, torch.arange(n, device=x.device) % size) if path in varied else x

        return vary

    one = trial.reference(mode="eval")
    for n in sorted({1, size + 1} - {size}):
        two = trial.run(mode="eval", vary=sized(n))
        if two.error is not None:
            return Break(
                layer=two.raised_in,
                line=f"{two.raised_in} takes no batch of {n}, only of {size}: {two.failure}",
                advice="Look for a size that is written into a view, a buffer or a loop.",
            )
        found = disagreements(one, two, pairs=_first_rows(size, n), tolerance=tolerance)
        if found:
            first = found[0]
            return Break(
                layer=first.given.layer,
                line=f"{first.given.layer} depends on the batch size: the first row changed by {first.row[1]} in a "
                f"batch of {n}, not {size}",
                columns=COLUMNS,
                rows=rows(found),
                advice="Look for a size that is written into a view, a buffer or a loop, and for what is taken over "
                "axis 0.",
            )
    return f"batches of {', '.join(str(n) for n in sorted({1, size}))} and {size + 1}"


def size_of(trial: Trial, axis: int) -> int:
    """Return the number of rows of the batch."""
    for _, tensor in trial.inputs:
        if tensor.dim() > axis:
            return tensor.shape[axis]
    raise NotApplicableError(f"no input has an axis {axis}, of a batch")


def batched(trial: Trial, size: int, axis: int) -> set[str]:
    """Return the paths of the inputs that have a row for each of the batch."""
    return {path for path, tensor in trial.inputs if tensor.dim() > axis and tensor.shape[axis] == size}


def _first_rows(size: int, n: int) -> Pairs:
    """Return what takes the first row of two batches, along each axis that may be theirs."""

    def pairs(one: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
        sizes = enumerate(zip(one.shape, other.shape, strict=False))
        return [(one.select(i, 0), other.select(i, 0)) for i, both in sizes if both == (size, n)]

    return pairs
