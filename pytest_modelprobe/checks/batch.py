"""The batch: its rows are independent of each other, and it may have any size.

Which axis of a tensor is the batch is found by a run with another number of rows. Inputs that only happen to be as long
are left as they are.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_modelprobe.models import flatten_call
from pytest_modelprobe.text import count, listed

from .agreement import (
    Disagreement,
    Pairs,
    axes_that_follow,
    check_not_random,
    compare_runs,
    inside_note,
    violation_of,
)
from .check import check
from .outcome import NotApplicableError, Violation
from .rounding import is_rounded
from .sequence import is_number, replacement
from .session import LayerTensor, PreparedModel, Trace, Vary, keep_input


@check
def batch_independent(prepared: PreparedModel, *, axis: int = 0, tolerance: float | None = None) -> Violation | str:
    """Check that in evaluation mode the output of a row depends on no other row of the batch, nor on its own place.

    All rows but the first are replaced, then all but the last, which a recurrence over the batch reaches at its end.
    Then all rows are moved by one, with their masks and lengths, and each has to give the same in its new place. A
    model may raise for another order, as where lengths have to be sorted.

    A run with another number of rows shows which axes are the batch. If the output agrees and a layer inside does not,
    both runs are repeated in float64, which separates small errors from rounding.

    Args:
        prepared: The model and its inputs.
        axis: Batch axis of the inputs.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.batch_independent(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    batch_independent holds for Linear: the first and the last of 4 rows, and all moved by one, in 1 value of 1 layer
    >>> print(checks.batch_independent.outcome(probe, nn.Softmax(dim=0), probe.randn(4, 3)).layer)
    (root)
    """
    size = size_of(prepared, axis)
    if size < 2:
        raise NotApplicableError("the batch has one row: give it two or more")
    one = prepared.reference(mode="eval")
    resized = _resized(prepared, size, axis, (size + 1, 2 * size))
    if resized is None:
        _check_items_are_no_rows(prepared)
        raise NotApplicableError("the model accepts no other batch size, which shows the axes of the batch")
    rows = _Rows.of(one, size, resized)
    rows.check_known()
    inside = None
    for row, which in (0, "first"), (size - 1, "last"):
        found, hidden = _mixed(prepared, one, rows, axis, tolerance, row)
        if found:
            check_not_random(prepared)
            check_rows_go_together(prepared, axis)
            return violation_of(
                found,
                f"mixes the batch: the {which} row {{changed}} when the other rows were replaced",
                "Look for what is taken over axis 0: a softmax, a norm, a mean, a reshape; a recurrence without "
                "batch_first=True; or a BatchNorm that is not in evaluation mode.",
            )
        inside = inside or hidden
    moved = _moved(prepared, one, rows, axis, tolerance)
    found, hidden = moved or ([], None)
    if found:
        return violation_of(
            found,
            "depends on the place of a row in the batch: {path} {changed} after all rows were moved by one, and back",
            "Look for what is made for one row and used for all, as x[0], and for weights, masks and random numbers "
            "with an axis of rows.",
        )
    others = ", and all moved by one" if moved else ""
    return f"the first and the last of {count(size, 'row')}{others}, in {rows.summary(inside or hidden)}"


@check
def any_batch_size(prepared: PreparedModel, *, axis: int = 0, tolerance: float | None = None) -> Violation | str:
    """Check that in evaluation mode batches of one row, and of one row more, give the same rows.

    Args:
        prepared: The model and its inputs.
        axis: Batch axis of the inputs.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.any_batch_size(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    any_batch_size holds for Linear: batches of 1, 4 and 5, in 1 value of 1 layer
    >>> print(checks.any_batch_size.outcome(probe, nn.Unflatten(0, (2, 2)), probe.randn(4, 3)).layer)
    (root)
    """
    size = size_of(prepared, axis)
    one = prepared.reference(mode="eval")
    resized = _resized(prepared, size, axis, (size + 1,))
    inputs = batched(prepared, size, axis) if resized is None else resized[2]
    runs = {n: prepared.run(mode="eval", vary=_sized(inputs, size, n, axis)) for n in (1, size + 1) if n != size}
    for n, two in runs.items():
        if two.error is not None:
            check_rows_go_together(prepared, axis)
            return Violation.at(
                two.raised_in,
                f"takes no batch of {n}, only of {size}: {two.failure}",
                advice="Look for a size that is written into a view, a buffer or a loop.",
            )
    assert resized is not None
    rows = _Rows.of(one, size, resized)
    rows.check_known()
    inside = None
    for n, two in runs.items():
        varied = keep_input, _sized(inputs, size, n, axis)
        both = min(n, size)
        found, hidden = compare_runs(prepared, (one, two), varied, rows.pairs(n, range(both)), tolerance)
        if found:
            check_not_random(prepared)
            check_rows_go_together(prepared, axis)
            firsts = "the first row" if both == 1 else f"the first {both} rows"
            return violation_of(
                found,
                f"depends on the batch size: {firsts} {{changed}} in a batch of {n} instead of {size}",
                "Look for a size that is written into a view, a buffer or a loop, and for what is taken over axis 0.",
            )
        rows.check_inside(hidden, f"in a batch of {n}")
        inside = inside or hidden
    return f"batches of {', '.join(str(n) for n in sorted({1, size}))} and {size + 1}, in {rows.summary(inside)}"


def size_of(prepared: PreparedModel, axis: int) -> int:
    """Return the number of rows of the batch."""
    having = [tensor for _, tensor in prepared.dense if -tensor.dim() <= axis < tensor.dim()]
    if not having:
        raise NotApplicableError(f"no input has an axis {axis}, of a batch")
    if all(tensor.dim() == 1 and tensor.is_floating_point() for tensor in having):
        raise NotApplicableError("the inputs have one axis, which is more likely of features than of a batch")
    if not having[0].shape[axis]:
        raise NotApplicableError("the batch has no rows")
    return having[0].shape[axis]


def larger_batches(prepared: PreparedModel, axis: int) -> list[tuple[int, Vary]]:
    """Return two larger sizes of the batch, each with what resizes the inputs; none if the model accepts no other."""
    with contextlib.suppress(NotApplicableError):
        size = size_of(prepared, axis)
        if found := _resized(prepared, size, axis, (size + 1,)):
            return [(n, _sized(found[2], size, n, axis)) for n in (size + 1, size + 2)]
    return []


def check_rows_go_together(prepared: PreparedModel, axis: int) -> None:
    """Check that the rows are along the axis: that none are items of a list, and none belong to inputs of another size.

    Raises:
        NotApplicableError: The items of a list are the rows; or inputs, such as offsets or edges of a graph, differ in
            size along the axis.
    """
    _check_items_are_no_rows(prepared)
    inputs = [(path, x) for path, x in prepared.dense if x.dim() > axis and not path.endswith("mask")]
    sizes = {path: x.shape[axis] for path, x in inputs if x.shape[axis] != 1}
    if len(set(sizes.values())) > 1 and not all(x.is_floating_point() for _, x in inputs):
        told = listed([f"{path} has {n}" for path, n in sizes.items()])
        raise NotApplicableError(
            f"the inputs differ in size along axis {axis}: {told}; which rows belong together is unknown"
        )


def _check_items_are_no_rows(prepared: PreparedModel) -> None:
    """Raise `NotApplicableError` if the model returns more for one more item in a list, as a detector for an image."""
    given = (*prepared.args, *prepared.kwargs.values())
    lists = [value for value in given if type(value) in (list, tuple) and any(isinstance(x, Tensor) for x in value)]
    if not lists:
        return

    def longer(value: Any) -> Any:  # targets may be in a list beside the images
        alike = type(value) in (list, tuple) and len(value) == len(lists[0])
        return type(value)([*value, value[-1]]) if alike else value

    one = prepared.reference(mode="eval")
    args, kwargs = prepared.args, prepared.kwargs
    prepared.args, prepared.kwargs = tuple(map(longer, args)), {name: longer(x) for name, x in kwargs.items()}
    try:
        two = prepared.run(mode="eval")
    finally:
        prepared.args, prepared.kwargs = args, kwargs
    shapes = [{path: x.shape for path, x in trace.final.items()} for trace in (one, two)]
    if two.error is None and shapes[0] != shapes[1]:
        raise NotApplicableError("the inputs are lists with an item for each row, and have no axis of a batch")


def batched(prepared: PreparedModel, size: int, axis: int) -> set[str]:
    """Return the paths of the inputs that have the batch axis."""
    return {path for path, x in prepared.dense if -x.dim() <= axis < x.dim() and x.shape[axis] == size}


# --- the batch axes of each tensor --------------------------------------------------------------------------------


_Resized = tuple[Trace, int, set[str]]
"""A run of the model on a batch of a different size, that size, and the paths of the inputs along the batch."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The batch axes of the tensors that the layers return."""

    size: int
    inputs: set[str]
    axes: Mapping[str, list[int]]
    """The axes of each floating tensor, by address; none if its number of axes depends on the batch."""
    along: Sequence[LayerTensor]
    """The tensors of `axes`."""
    elsewhere: tuple[str, ...] = ()
    """Outputs without a batch axis, with their shapes. Single numbers are left out if `final`."""
    integers: tuple[str, ...] = ()
    """Outputs of integers, which may depend on rounding and are not compared."""
    number: bool = False
    """Whether all outputs are single numbers, as losses are."""

    @classmethod
    def of(cls, one: Trace, size: int, resized: _Resized) -> _Rows:
        """Return the axes that are longer in a longer batch."""
        trace, n, inputs = resized
        follow = axes_that_follow(one, trace, size, n)
        there = {given.where for given in trace.tensors}
        # With another number of axes it is compared as a whole.
        along = [
            g
            for g in one.tensors
            if g.where in there and (follow.get(g.where) or (g.is_final and g.where not in follow))
        ]
        beside = [given for given in one.tensors if given.is_final and given not in along]
        floating = [given for given in along if is_rounded(given.tensor)]
        final = any(given.is_final for given in floating)
        alike = one.final.keys() == trace.final.keys()  # and no list of one for each row
        return cls(
            size,
            inputs,
            {given.where: follow.get(given.where, []) for given in floating},
            floating,
            tuple(f"{g.path} {tuple(g.tensor.shape)}" for g in beside if not (final and is_number(g.tensor))),
            tuple(given.path for given in along if given.is_final and given not in floating),
            number=alike and all(is_number(given.tensor) for given in beside),
        )

    @property
    def final(self) -> bool:
        """Whether an output of the model has a batch axis."""
        return any(given.is_final for given in self.along)

    def pairs(self, n: int, rows: Sequence[int], others: Sequence[int] | None = None) -> Pairs:
        """Return a function that takes some rows of a tensor, and the same or others of another with a batch of n."""

        def pairs(given: LayerTensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
            one, axes = given.tensor, self.axes.get(given.where)
            if axes is None:
                return []
            # A matrix of rows by rows has two batch axes: of a row, its diagonal element is taken.
            x, y = _taken(one, axes, rows, self.size), _taken(other, axes, others or rows, n)
            if x is not None and y is not None:
                return [(x, y)]
            # An expert may receive as many tokens as there are rows.
            return [] if one.dim() == other.dim() and not given.is_final else [(one, other)]

        return pairs

    def check_known(self) -> None:
        """Raise `NotApplicableError` if no layer, or no output other than a number, has a batch axis."""
        if not self.axes:
            raise NotApplicableError(f"no layer returns a tensor with an axis of {count(self.size, 'row')}")
        if self.elsewhere and not (self.final or self.number):
            raise NotApplicableError(
                f"no output of the model has an axis of {count(self.size, 'row')}: {listed(list(self.elsewhere))}"
            )

    def check_inside(self, inside: Disagreement | None, when: str) -> None:
        """Raise `NotApplicableError` if a layer inside differs and no output has a batch axis: a loss may mix rows."""
        if inside is not None and not self.final:
            raise NotApplicableError(
                f"no output of the model is along the batch, and inside it {inside.layer_tensor.where} "
                f"{inside.changed} {when}"
            )

    def summary(self, inside: Disagreement | None) -> str:
        """Return a summary of what was compared."""
        text = f"{count(len(self.axes), 'value')} of {count(len({given.layer for given in self.along}), 'layer')}"
        for what, paths in ("not along the batch", self.elsewhere), ("not compared, as integers", self.integers):
            text += f"; {what}: {listed(list(paths))}" if paths else ""
        return text + inside_note(inside)


def _resized(prepared: PreparedModel, size: int, axis: int, sizes: tuple[int, ...]) -> _Resized | None:
    """Return a run on a batch of another size; None if the model accepts none.

    An input that only happens to be as long as the batch, as a mask of positions by positions, is left unchanged.
    """
    rows_of = batched(prepared, size, axis)
    inputs = [path for path, _ in prepared.dense if path in rows_of]
    for n in sizes:
        for left_out in (None, *inputs[1:]):
            varied = rows_of - {left_out}
            trace = prepared.run(mode="eval", vary=_sized(varied, size, n, axis))
            if trace.error is None:
                return trace, n, varied
    return None


def _taken(x: Tensor, axes: Sequence[int], rows: Sequence[int], n: int) -> Tensor | None:
    """Return some of n rows along all of these axes; None if there is none, or one has another length."""
    if not axes or any(axis >= x.dim() or x.shape[axis] != n for axis in axes):
        return None
    index = torch.tensor(rows, device=x.device)
    return functools.reduce(lambda x, axis: x.index_select(axis, index), axes, x)


# --- other rows, and other batch sizes ----------------------------------------------------------------------------


def _sized(inputs: set[str], size: int, n: int, axis: int) -> Vary:
    """Return a function that resizes a batch to n rows, repeating the first ones."""

    def vary(path: str, x: Tensor) -> Tensor:
        return x.index_select(axis, torch.arange(n, device=x.device) % size) if path in inputs else x

    return vary


def _mixed(
    prepared: PreparedModel, one: Trace, rows: _Rows, axis: int, tolerance: float | None, row: int
) -> tuple[list[Disagreement], Disagreement | None]:
    """Return how the output of a row changes when all other rows are replaced; see `compare_runs`.

    Masks and single integers, as of lengths, become those of the row that stays: other numbers may not be valid.
    """

    def vary(path: str, x: Tensor) -> Tensor:
        if path not in rows.inputs:
            return x
        if x.dtype == torch.bool or path.endswith("mask") or (x.dim() == 1 and not x.is_floating_point()):
            return x.select(axis, row).unsqueeze(axis).expand_as(x).clone()
        try:
            others = replacement(prepared, x)
        except NotApplicableError:  # token types that are all 0, say
            return x
        others.select(axis, row).copy_(x.select(axis, row))
        return others

    two = prepared.variation(mode="eval", vary=vary)
    if all(torch.equal(vary(path, x), x) for path, x in prepared.dense if path in rows.inputs):
        raise NotApplicableError("all elements of the inputs are equal: no other valid values are known")
    pairs = rows.pairs(rows.size, [row])
    found, inside = compare_runs(prepared, (one, two), (keep_input, vary), pairs, tolerance, exact=True)
    rows.check_inside(inside, "when the other rows were replaced")
    return found, inside


def _moved(
    prepared: PreparedModel, one: Trace, rows: _Rows, axis: int, tolerance: float | None
) -> tuple[list[Disagreement], Disagreement | None] | None:
    """Return how outputs change when all rows are moved by one, see `compare_runs`; None if that is not known.

    The model may raise for another order, a list with an item for each row, as of lengths, is not moved, and random
    numbers of a row are those of its place.
    """
    if not rows.final:
        return None
    order = [*range(1, rows.size), 0]

    def vary(path: str, x: Tensor) -> Tensor:
        return x.index_select(axis, torch.tensor(order, device=x.device)) if path in rows.inputs else x

    two = prepared.run(mode="eval", vary=vary)
    if two.error is not None:
        return None
    pairs = rows.pairs(rows.size, order, range(rows.size))
    found, inside = compare_runs(prepared, (one, two), (keep_input, vary), pairs, tolerance)
    if found:
        try:
            check_not_random(prepared)
            check_rows_go_together(prepared, axis)
        except NotApplicableError:
            return None
        if rows.size in _lengths_of_lists(prepared):
            return None
    return found, inside


def _lengths_of_lists(prepared: PreparedModel) -> Collection[int]:
    """Return the lengths of the lists and tuples among the inputs."""
    flat = flatten_call(prepared.args, prepared.kwargs, objects=True)
    paths = (*dict(flat.tensors), *flat.plain)
    items = {(path[: at.start()], at[0]) for path in paths for at in re.finditer(r"\[\d+\]", path)}
    # Several positional arguments have paths like the items of a list.
    return Counter(name for name, _ in items if name != "input" or len(prepared.args) == 1).values()
