"""The batch: its rows are independent of each other, and it may have any size.

Which axis of a tensor is the batch is found by a run with another number of rows. Inputs that only happen to be as long
are left as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_modelprobe.models import as_real
from pytest_modelprobe.text import count, listed

from .agreement import (
    Disagreement,
    Pairs,
    axes_of_length,
    axes_that_follow,
    check_not_random,
    compare_runs,
    inside_note,
    violation_of,
)
from .check import check
from .outcome import NotApplicableError, Violation
from .rounding import as_double, differing_bits, is_rounded, limit, relative_error
from .sequence import replacement
from .session import LayerTensor, PreparedModel, Trace, Vary, keep_input


@check
def batch_independent(prepared: PreparedModel, *, axis: int = 0, tolerance: float | None = None) -> Violation | str:
    """Check that in evaluation mode the output of a row does not depend on the other rows of the batch.

    All rows but the first are replaced, then all but the last, which a recurrence over the batch reaches at its end.
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
    batch_independent holds for Linear: the first and the last of 4 rows, in 1 value of 1 layer
    >>> print(checks.batch_independent.outcome(probe, nn.Softmax(dim=0), probe.randn(4, 3)).layer)
    (root)
    """
    size = size_of(prepared, axis)
    if size < 2:
        raise NotApplicableError("the batch has one row: give it two or more")
    one = prepared.reference(mode="eval")
    resized = _resized(prepared, size, axis, (size + 1, 2 * size))
    rows = _Rows.of(prepared, one, size, axis, resized)
    if resized is None:
        _check_items_are_no_rows(prepared)
    elif collapse := _collapse(prepared, one, resized, rows, axis):
        return collapse
    rows.check_known()
    inside = None
    for row, which in (0, "first"), (size - 1, "last"):
        found, hidden = _mixed(prepared, one, rows, axis, tolerance, row)
        if found:
            if resized is None:
                raise _no_batch(axis)
            check_not_random(prepared)
            check_rows_go_together(prepared, axis)
            return violation_of(
                found,
                f"mixes the batch: the {which} row {{changed}} when the other rows were replaced",
                "Look for what is taken over axis 0: a softmax, a norm, a mean, a reshape; a recurrence without "
                "batch_first=True; or a BatchNorm that is not in evaluation mode.",
            )
        inside = inside or hidden
    return f"the first and the last of {count(size, 'row')}, in {rows.summary(inside)}"


@check
def any_batch_size(
    prepared: PreparedModel, *, axis: int = 0, tolerance: float | None = None, bitwise: bool = False
) -> Violation | str:
    """Check that in evaluation mode batches of one row, and of one row more, give the same first row.

    An output that depends on the inputs but whose shape does not depend on the batch size breaks it, unless it is a
    single number for all rows, such as a loss.

    With ``bitwise=True`` the first row also has to be the same bit for bit: alone, and at the beginning, in the middle
    and at the end of batches of up to 64 rows, among rows of the batch and among others. Few models pass: kernels of
    matrix products add in another order for another number of rows. It is for inference that has to repeat, whatever
    else is in the batch.

    Args:
        prepared: The model and its inputs.
        axis: Batch axis of the inputs.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.
        bitwise: Whether the bits have to be the same too, in batches of more sizes and at other places.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.any_batch_size(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    any_batch_size holds for Linear: batches of 1, 4 and 5, in 1 value of 1 layer
    >>> print(checks.any_batch_size.outcome(probe, nn.Unflatten(0, (2, 2)), probe.randn(4, 3)).layer)
    (root)
    >>> print(checks.any_batch_size(probe, nn.LayerNorm(3), probe.randn(4, 3), bitwise=True).text)
    the same bits in batches of 1, 2, 3, 4, 5, 8, 16, 32 and 64 at up to 3 places, in 1 value of 1 layer
    """
    size = size_of(prepared, axis)
    one = prepared.reference(mode="eval")
    resized = _resized(prepared, size, axis, (size + 1,))
    inputs = batched(prepared, size, axis) if resized is None else resized.inputs
    runs = {n: prepared.run(mode="eval", vary=_sized(inputs, size, n, axis)) for n in (1, size + 1) if n != size}
    for n, two in runs.items():
        if two.error is not None:
            check_rows_go_together(prepared, axis)
            known = _Rows.of(prepared, one, size, axis, None)
            mixes = (_mixed(prepared, one, known, axis, tolerance, row)[0] for row in (0, size - 1))
            if size > 1 and known.final and any(mixes):
                raise _no_batch(axis)
            return Violation.at(
                two.raised_in,
                f"takes no batch of {n}, only of {size}: {two.failure}",
                advice="Look for a size that is written into a view, a buffer or a loop.",
            )
    assert resized is not None
    rows = _Rows.of(prepared, one, size, axis, resized)
    if collapse := _collapse(prepared, one, resized, rows, axis):
        return collapse
    rows.check_known()
    inside = None
    for n, two in runs.items():
        varied = keep_input, _sized(inputs, size, n, axis)
        found, hidden = compare_runs(prepared, (one, two), varied, rows.pairs(n), tolerance)
        if found:
            check_not_random(prepared)
            check_rows_go_together(prepared, axis)
            return violation_of(
                found,
                f"depends on the batch size: the first row {{changed}} in a batch of {n} instead of {size}",
                "Look for a size that is written into a view, a buffer or a loop, and for what is taken over axis 0.",
            )
        rows.check_inside(hidden, f"in a batch of {n}")
        inside = inside or hidden
    if bitwise:
        return _bit_for_bit(prepared, one, rows, axis)
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


def _no_batch(axis: int) -> NotApplicableError:
    return NotApplicableError(
        f"axis {axis} does not seem to be a batch axis: its rows depend on each other, and their number cannot change"
    )


def batched(prepared: PreparedModel, size: int, axis: int) -> set[str]:
    """Return the paths of the inputs that have the batch axis."""
    return {path for path, x in prepared.dense if -x.dim() <= axis < x.dim() and x.shape[axis] == size}


# --- bit for bit --------------------------------------------------------------------------------------------------

_SIZES = (1, 2, 3, 5, 8, 16, 32, 64)
"""Batch sizes for which kernels are known to choose other tiles and other splits of a sum."""


def _bit_for_bit(prepared: PreparedModel, one: Trace, rows: _Rows, axis: int) -> Violation | str:
    """Return where the first row has other bits in another batch, or a summary."""
    again = prepared.reference(mode="eval")
    for x, y in zip(one.tensors, again.tensors, strict=False):
        if x.where != y.where or _ulps(x.tensor, y.tensor):
            raise NotApplicableError(f"the same batch does not repeat bit for bit: {x.where} differs")
    sizes = sorted({*_SIZES, rows.size})
    batches = [(n, place) for n in sizes for place in sorted({0, n // 2, n - 1})]
    most: dict[str, float] = {}
    seen_in: dict[str, list[int]] = {}
    outputs = 0
    for n, place in batches:
        vary = _placed(prepared, rows.inputs, rows.size, n, place, axis, replaced=0 < place < n - 1)
        there = {given.where: given.tensor for given in prepared.variation(mode="eval", vary=vary).tensors}
        pairs, reaches_output = rows.pairs(n, place=place), False
        for given in one.tensors:
            compared = pairs(given, there[given.where]) if given.where in there else []
            if ulps := min((_ulps(x, y) for x, y in compared), default=0.0):
                most[given.where] = max(most.get(given.where, 0.0), ulps)
                seen_in.setdefault(given.where, []).append(n)
                reaches_output |= given.is_final
        outputs += reaches_output
    found = [given for given in rows.along if given.where in most]
    told = f"batches of {listed([str(n) for n in sizes], len(sizes))} at up to 3 places"
    if not outputs:
        inside = f"; layers inside differ, but the output agrees: first {found[0].where}" if found else ""
        return f"the same bits in {told}, in {rows.summary(None)}{inside}"
    first = found[0]
    n = seen_in[first.where][0]
    return Violation.at(
        first.layer,
        f"returns other bits for the same row in a batch of {n} instead of {rows.size}: {first.path} differs by up to "
        f"{_ulps_text(most[first.where])}; so does the output, in {outputs} of {count(len(batches), 'batch')}",
        columns=("tensor", "differs by up to", "in batches of"),
        rows=tuple(
            (g.where, _ulps_text(most[g.where]), listed([str(n) for n in dict.fromkeys(seen_in[g.where])], len(sizes)))
            for g in found
        ),
        advice="A matrix product, a convolution or a reduction adds in another order for another number of rows. Fix "
        "the order: compute row by row or in tiles of one size, or use batch-invariant kernels.",
    )


def _placed(
    prepared: PreparedModel, inputs: set[str], size: int, n: int, place: int, axis: int, *, replaced: bool
) -> Vary:
    """Return a function that resizes a batch to n rows, with the first one at another place.

    The other rows are those of the batch, or others if they are ``replaced``.
    """
    order = torch.arange(n) % size
    order[[0, place]] = order[[place, 0]]
    others = _replacing(prepared, inputs, axis, place) if replaced else keep_input

    def vary(path: str, x: Tensor) -> Tensor:
        return others(path, x.index_select(axis, order.to(x.device))) if path in inputs else x

    return vary


def _ulps(x: Tensor, y: Tensor) -> float:
    """Return the largest distance of two elements in units in the last place; inf if one alone is finite.

    >>> one = torch.ones(1)
    >>> _ulps(one, one + torch.finfo(torch.float32).eps), _ulps(torch.zeros(1), -torch.zeros(1)), _ulps(one, one)
    (1.0, 0.5, 0.0)
    """
    if x.shape != y.shape or x.dtype != y.dtype:
        return math.inf
    x, y = as_real(x), as_real(y).to(x.device)
    differs = differing_bits(x, y)
    if not differs.any():
        return 0.0
    if not x.is_floating_point():
        return math.inf
    info = torch.finfo(x.dtype)
    wide, other = as_double(x[differs]), as_double(y[differs])
    exponent = torch.frexp(torch.maximum(wide.abs(), other.abs()))[1] - 1
    unit = (info.eps * torch.exp2(exponent.double())).clamp(min=info.tiny * info.eps)
    ulps = ((wide - other).abs() / unit).max().item()
    return max(ulps, 0.5) if math.isfinite(ulps) else math.inf  # zeros of other signs are not apart


def _ulps_text(ulps: float) -> str:
    return "its sign of zero" if ulps == 0.5 else f"{count(round(ulps), 'ulp')}" if math.isfinite(ulps) else "∞ ulps"


# --- the batch axes of each tensor --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Resized:
    """A run of the model on a batch of a different size."""

    trace: Trace
    n: int
    inputs: set[str]
    """Paths of the inputs that have the batch axis."""


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
    guessed: bool = False
    """Whether the model accepts no other batch size: each axis as long as the batch may be the batch axis."""

    @classmethod
    def of(cls, prepared: PreparedModel, one: Trace, size: int, axis: int, resized: _Resized | None) -> _Rows:
        """Return the axes that are longer in a longer batch; without one, all that are as long as the batch."""
        if resized is None:
            axes = {g.where: axes_of_length(g.tensor, size) for g in one.tensors if is_rounded(g.tensor)}
            axes = {where: found for where, found in axes.items() if found}
            along = [given for given in one.tensors if given.where in axes]
            return cls(size, batched(prepared, size, axis), axes, along, guessed=True)
        follow = axes_that_follow(one, resized.trace, size, resized.n)
        there = {given.where for given in resized.trace.tensors}
        # With another number of axes it is compared as a whole.
        along = [
            g
            for g in one.tensors
            if g.where in there and (follow.get(g.where) or (g.is_final and g.where not in follow))
        ]
        beside = [given for given in one.tensors if given.is_final and given not in along]
        floating = [given for given in along if is_rounded(given.tensor)]
        final = any(given.is_final for given in floating)
        alike = one.final.keys() == resized.trace.final.keys()  # and no list of one for each row
        return cls(
            size,
            resized.inputs,
            {given.where: follow.get(given.where, []) for given in floating},
            floating,
            tuple(f"{g.path} {tuple(g.tensor.shape)}" for g in beside if not (final and _is_number(g.tensor))),
            tuple(given.path for given in along if given.is_final and given not in floating),
            number=alike and all(_is_number(given.tensor) for given in beside),
        )

    @property
    def final(self) -> bool:
        """Whether an output of the model has a batch axis."""
        return any(given.is_final for given in self.along)

    def pairs(self, n: int, row: int = 0, place: int | None = None) -> Pairs:
        """Return a function that takes one row of a tensor, and of another with a batch of n.

        In the other batch the row is at ``place``, by default where it is in the first.
        """
        there = row if place is None else place

        def pairs(given: LayerTensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
            one, axes = given.tensor, self.axes.get(given.where)
            if axes is None:
                return []
            # A matrix of rows by rows has two batch axes: of a row, its diagonal element is taken.
            meant = [[axis] for axis in axes] if self.guessed else [axes]
            rows = [(_taken(one, each, row, self.size), _taken(other, each, there, n)) for each in meant]
            found = [(x, y) for x, y in rows if x is not None and y is not None]
            if found or (one.dim() == other.dim() and not given.is_final):
                return found  # an expert may receive as many tokens as there are rows
            return [(one, other)]

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
        text += inside_note(inside)
        if self.guessed:
            text += f"; the model accepts no other batch size: each axis of {self.size} is assumed to be the batch"
        return text


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
                return _Resized(trace, n, varied)
    return None


def _taken(x: Tensor, axes: Sequence[int], row: int, n: int) -> Tensor | None:
    """Return one of n rows along all of these axes; None if there is none, or one has another length."""
    if not axes or any(axis >= x.dim() or x.shape[axis] != n for axis in axes):
        return None
    return functools.reduce(lambda x, axis: x.narrow(axis, row, 1), axes, x)


def _is_number(x: Tensor) -> bool:
    return x.numel() == 1 and x.dim() <= 1


def _collapse(prepared: PreparedModel, one: Trace, resized: _Resized, rows: _Rows, axis: int) -> Violation | None:
    """Return the violation of a model whose outputs depend on the inputs, but their shapes not on the batch."""
    outputs, again = one.final, resized.trace.final
    if not outputs or outputs.keys() != again.keys():  # a list may hold one for each row
        return None
    if any(x.shape != again[path].shape for path, x in outputs.items()):
        return None
    if any(_is_number(x) for x in outputs.values()):  # a loss, and what else is taken over the whole batch
        return None
    two = prepared.variation(mode="eval", vary=_replacing(prepared, rows.inputs))
    there = {given.where: given.tensor for given in two.tensors}
    changed = {
        given.where
        for given in one.tensors
        if (new := there.get(given.where)) is not None and not relative_error(given.tensor, new) <= limit(given.tensor)
    }
    if not any(given.is_final and given.where in changed for given in one.tensors):
        return None
    check_not_random(prepared)
    check_rows_go_together(prepared, axis)
    last = max((i for i, given in enumerate(one.tensors) if given.where in rows.axes), default=-1)
    first = next((given for given in one.tensors[last + 1 :] if given.where in changed), one.tensors[-1])
    shape = tuple(first.tensor.shape)
    return Violation.at(
        first.layer,
        f"loses the batch: {first.path} is {shape} for a batch of {rows.size} and of {resized.n}",
        columns=("tensor", "shape"),
        rows=tuple((g.where, str(tuple(g.tensor.shape))) for g in one.tensors[last + 1 :] if g.where in changed),
        advice="Look for a first row that is taken (out[:1], out[0]), a squeeze, and a mean over axis 0. If axis "
        f"{axis} of the inputs is no batch, name the one that is: axis=.",
    )


# --- other rows, and other batch sizes ----------------------------------------------------------------------------


def _sized(inputs: set[str], size: int, n: int, axis: int) -> Vary:
    """Return a function that resizes a batch to n rows, repeating the first ones."""

    def vary(path: str, x: Tensor) -> Tensor:
        return x.index_select(axis, torch.arange(n, device=x.device) % size) if path in inputs else x

    return vary


def _replacing(prepared: PreparedModel, inputs: set[str], axis: int = 0, row: int | None = None) -> Vary:
    """Return a function that replaces all rows but one.

    Masks and single integers, as of lengths, become those of the row that stays: other numbers may not be valid.
    """

    def vary(path: str, x: Tensor) -> Tensor:
        is_mask = x.dtype == torch.bool or path.endswith("mask")
        if path not in inputs or (is_mask and row is None):
            return x
        if row is not None and (is_mask or (x.dim() == 1 and not x.is_floating_point())):
            return x.select(axis, row).unsqueeze(axis).expand_as(x).clone()
        try:
            others = replacement(prepared, x)
        except NotApplicableError:  # token types that are all 0, say
            return x
        if row is not None:
            others.select(axis, row).copy_(x.select(axis, row))
        return others

    return vary


def _mixed(
    prepared: PreparedModel, one: Trace, rows: _Rows, axis: int, tolerance: float | None, row: int
) -> tuple[list[Disagreement], Disagreement | None]:
    """Return how the output of a row changes when all other rows are replaced; see `compare_runs`."""
    vary = _replacing(prepared, rows.inputs, axis, row)
    two = prepared.variation(mode="eval", vary=vary)
    if all(torch.equal(vary(path, x), x) for path, x in prepared.dense if path in rows.inputs):
        raise NotApplicableError("all elements of the inputs are equal: no other valid values are known")
    pairs = rows.pairs(rows.size, row)
    found, inside = compare_runs(prepared, (one, two), (keep_input, vary), pairs, tolerance, exact=True)
    rows.check_inside(inside, "when the other rows were replaced")
    return found, inside
