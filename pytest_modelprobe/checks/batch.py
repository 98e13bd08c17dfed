"""The batch: its rows know nothing of each other, and there may be any number of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_modelprobe.report.text import count, listed

from .agreement import Disagreement, Pairs, apart, broken, change, limit, told_inside
from .check import check
from .drawing import check_not_random
from .outcome import Break, NotApplicableError
from .sequence import other
from .trial import LayerTensor, Trace, Trial, Vary, unchanged


@check
def batch_independent(trial: Trial, *, axis: int = 0, tolerance: float | None = None) -> Break | str:
    """Check that in evaluation mode a row of the batch gives out the same whatever the other rows are.

    All rows but the first are replaced, then all but the last, which a recurrence over the batch comes to at its end.
    Which axes are the batch's, a run with another number of rows shows. Where the output agrees and a layer inside does
    not, both are computed again in float64, which tells what is little from what is rounding.

    Args:
        trial: The model and its inputs.
        axis: Which axis of the inputs the batch is along.
        tolerance: Largest relative change; None: by dtype.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.batch_independent(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    batch_independent holds for Linear: the first and the last of 4 rows, in 1 value of 1 layer
    >>> print(checks.batch_independent.outcome(probe, nn.Softmax(dim=0), probe.randn(4, 3)).layer)
    (root)
    """
    size = size_of(trial, axis)
    if size < 2:
        raise NotApplicableError("the batch has one row: give it two or more")
    one = trial.reference(mode="eval")
    resized = _resized(trial, size, axis, (size + 1, 2 * size))
    rows = _as_long(trial, one, size, axis) if resized is None else _following(one, resized, size)
    if resized is not None and (collapse := _collapse(trial, one, resized, rows, axis)):
        return collapse
    rows.check_known()
    inside = None
    for row, which in (0, "first"), (size - 1, "last"):
        found, hidden = _mixed(trial, one, rows, axis, tolerance, row)
        if found:
            if resized is None:
                raise _no_batch(axis)
            check_rows_go_together(trial, axis)
            return broken(
                found,
                f"mixes the batch: the {which} row {{changed}} with the other rows",
                "Look for what is taken over axis 0: a softmax, a norm, a mean, a reshape; a recurrence without "
                "batch_first=True; or a BatchNorm that is not in evaluation mode.",
            )
        inside = inside or hidden
    _check_of_all_rows(trial, one, resized, rows, axis)
    return f"the first and the last of {count(size, 'row')}, in {rows.told(inside)}"


@check
def any_batch_size(trial: Trial, *, axis: int = 0, tolerance: float | None = None) -> Break | str:
    """Check that in evaluation mode a batch of one row, and one of a row more, run and give the same for the first row.

    An output that depends on the inputs and is as long whatever the batch has lost it, unless it is a single number of
    all rows, as a loss is.

    Args:
        trial: The model and its inputs.
        axis: Which axis of the inputs the batch is along.
        tolerance: Largest relative change; None: by dtype.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.any_batch_size(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    any_batch_size holds for Linear: batches of 1, 4 and 5, in 1 value of 1 layer
    >>> print(checks.any_batch_size.outcome(probe, nn.Unflatten(0, (2, 2)), probe.randn(4, 3)).layer)
    (root)
    """
    size = size_of(trial, axis)
    one = trial.reference(mode="eval")
    resized = _resized(trial, size, axis, (size + 1,))
    inputs = batched(trial, size, axis) if resized is None else resized.inputs
    runs = {n: trial.run(mode="eval", vary=_sized(inputs, size, n, axis)) for n in (1, size + 1) if n != size}
    for n, two in runs.items():
        if two.error is not None:
            check_rows_go_together(trial, axis)
            known = _as_long(trial, one, size, axis)
            mixes = (_mixed(trial, one, known, axis, tolerance, row)[0] for row in (0, size - 1))
            if size > 1 and known.final and any(mixes):
                raise _no_batch(axis)
            return Break(
                layer=two.raised_in,
                line=f"{two.raised_in} takes no batch of {n}, only of {size}: {two.failure}",
                advice="Look for a size that is written into a view, a buffer or a loop.",
            )
    assert resized is not None
    rows = _following(one, resized, size)
    if collapse := _collapse(trial, one, resized, rows, axis):
        return collapse
    rows.check_known()
    inside = None
    for n, two in runs.items():
        varied = unchanged, _sized(inputs, size, n, axis)
        found, hidden = apart(trial, (one, two), varied, functools.partial(rows.pairs, n=n), tolerance)
        if found:
            check_not_random(trial)
            check_rows_go_together(trial, axis)
            return broken(
                found,
                f"depends on the batch size: the first row {{changed}} in a batch of {n}, not {size}",
                "Look for a size that is written into a view, a buffer or a loop, and for what is taken over axis 0.",
            )
        rows.check_told(hidden, f"in a batch of {n}")
        inside = inside or hidden
    _check_of_all_rows(trial, one, resized, rows, axis)
    return f"batches of {', '.join(str(n) for n in sorted({1, size}))} and {size + 1}, in {rows.told(inside)}"


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


# --- which axes are the batch's -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis that has so many places for each row of the batch."""

    number: int
    places: int = 1
    together: bool = True
    """Whether places of one row are next to each other, and not those of one number."""

    def row(self, x: Tensor, row: int, n: int) -> Tensor | None:
        """Return a row of n; None where the axis is not as long."""
        if self.number >= x.dim() or x.shape[self.number] != n * self.places:
            return None
        places = torch.arange(self.places, device=x.device)
        return x.index_select(self.number, row * self.places + places if self.together else row + n * places)


@dataclass(frozen=True, slots=True)
class _Resized:
    """A run of the model on a batch of another size."""

    trace: Trace
    n: int
    inputs: set[str]
    """Paths of the inputs that have a row for each of the batch."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the rows of the batch are in what the layers give out."""

    size: int
    inputs: set[str]
    axes: Mapping[str, tuple[_Axis, ...]]
    """Of each floating value, by its address. No axis: it changes its number of axes with the batch."""
    layers: frozenset[str]
    final: bool
    """Whether something that the model itself gives out is along the batch."""
    elsewhere: tuple[str, ...] = ()
    """What it gives out that is not, with its shape; single numbers aside where something is."""
    integers: tuple[str, ...] = ()
    """What it gives out that is of integers, which may be chosen by rounding: it is not compared."""
    number: bool = False
    """Whether it gives out nothing else than single numbers, which losses are."""
    guessed: bool = False
    """Whether the model takes no batch of another size: each axis as long as the batch may be the batch's."""

    def pairs(self, trace: Trace, n: int, row: int = 0) -> Pairs:
        """Return what takes one row of a value of the trace, and of another one with a batch of n."""
        known = {id(given.tensor): (given, self.axes[given.where]) for given in trace.given if given.where in self.axes}

        def pairs(one: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
            if id(one) not in known:
                return []
            given, axes = known[id(one)]
            # A matrix of rows by rows has two axes: of a row there is what it has to do with itself.
            meant = [(axis,) for axis in axes] if self.guessed else [axes]
            rows = [(_taken(one, axes, row, self.size), _taken(other, axes, row, n)) for axes in meant]
            found = [(x, y) for x, y in rows if x is not None and y is not None]
            if found or (one.dim() == other.dim() and not given.is_final):
                return found  # tokens that go to an expert are as many as rows by chance
            return [(one, other)]

        return pairs

    def check_known(self) -> None:
        """Refuse a model of which nothing is along the batch, or which gives out nothing that is, but for a number."""
        if not self.axes:
            raise NotApplicableError(f"no layer gives out anything along an axis of {count(self.size, 'row')}")
        if self.elsewhere and not (self.final or self.number):
            raise NotApplicableError(
                f"nothing that the model gives out is along an axis of {count(self.size, 'row')}: "
                f"{listed(list(self.elsewhere))}"
            )

    def check_told(self, inside: Disagreement | None, when: str) -> None:
        """Refuse to judge what layers inside do where no output says whether it matters: a loss may compare rows."""
        if inside is not None and not self.final:
            raise NotApplicableError(
                f"nothing that the model gives out is along the batch, and inside it {inside.given.where} "
                f"{inside.changed} {when}"
            )

    def told(self, inside: Disagreement | None) -> str:
        """Return what was looked at."""
        text = f"{count(len(self.axes), 'value')} of {count(len(self.layers), 'layer')}"
        for what, paths in ("not along the batch", self.elsewhere), ("not compared, of integers", self.integers):
            text += f"; {what}: {listed(list(paths))}" if paths else ""
        text += told_inside(inside)
        if self.guessed:
            text += f"; the model takes no other batch: an axis of {self.size} is taken for the batch's"
        return text


def _resized(trial: Trial, size: int, axis: int, sizes: tuple[int, ...]) -> _Resized | None:
    """Return a run on a batch of another size; None where the model takes none.

    An input may be as long as the batch by chance, as a mask of positions by positions: it is then left as it is.
    """
    rows_of = batched(trial, size, axis)
    inputs = [path for path, _ in trial.dense if path in rows_of]
    for n in sizes:
        for left_out in (None, *inputs[1:]):
            varied = rows_of - {left_out}
            trace = trial.run(mode="eval", vary=_sized(varied, size, n, axis))
            if trace.error is None:
                return _Resized(trace, n, varied)
    return None


def _following(one: Trace, resized: _Resized, size: int) -> _Rows:
    """Return the axes that are longer in a longer batch."""
    again = {given.where: given.tensor for given in resized.trace.given}
    axes: dict[str, tuple[_Axis, ...]] = {}
    kept: list[LayerTensor] = []
    integers, elsewhere = [], []
    for given in one.given:
        x, y = given.tensor, again.get(given.where)
        found = () if y is None else _longer(x, y, size, resized.n, flattened=given.is_final)
        if y is None or not (found or (given.is_final and x.dim() != y.dim())):
            if given.is_final:
                elsewhere.append(given)
        elif x.is_floating_point() or x.is_complex():
            axes[given.where] = found
            kept.append(given)
        elif given.is_final:
            integers.append(given.path)
    layers = frozenset(given.layer for given in kept)
    final = any(given.is_final for given in kept)
    same = one.final.keys() == resized.trace.final.keys()  # and no list of one for each row
    number = same and all(_is_number(given.tensor) for given in elsewhere)
    told = [f"{g.path} {tuple(g.tensor.shape)}" for g in elsewhere if not (final and _is_number(g.tensor))]
    return _Rows(
        size,
        resized.inputs,
        axes,
        layers,
        final,
        elsewhere=tuple(told),
        integers=tuple(integers),
        number=number,
    )


def _longer(x: Tensor, y: Tensor, size: int, n: int, *, flattened: bool) -> tuple[_Axis, ...]:
    """Return the axes of two tensors that go with the size of the batch, from ``size`` to ``n``.

    Args:
        x: What was given out with a batch of ``size``.
        y: The same with a batch of ``n``.
        size: The one.
        n: The other.
        flattened: Whether an axis may have several places for each row.
    """
    if x.dim() != y.dim():
        return ()
    found = []
    for i, (before, after) in enumerate(zip(x.shape, y.shape, strict=True)):
        places = before // size
        if (before, after) != (size * places, n * places) or not places or (places > 1 and not flattened):
            continue
        orders = [_Axis(i, places), _Axis(i, places, together=False)] if places > 1 else [_Axis(i)]
        found.append(min(orders, key=lambda axis: _far(axis.row(x, 0, size), axis.row(y, 0, n))))
    return tuple(found)


def _taken(x: Tensor, axes: tuple[_Axis, ...], row: int, n: int) -> Tensor | None:
    """Return a row of n along all of these axes; None where one is not as long, or there is none."""
    found: Tensor | None = x if axes else None
    for axis in axes:
        found = None if found is None else axis.row(found, row, n)
    return found


def _far(x: Tensor | None, y: Tensor | None) -> float:
    return float("inf") if x is None or y is None else change(x, y)


def _as_long(trial: Trial, one: Trace, size: int, axis: int) -> _Rows:
    """Return all axes that are as long as the batch."""
    axes = {
        given.where: tuple(_Axis(i) for i, n in enumerate(given.tensor.shape) if n == size)
        for given in one.given
        if given.tensor.is_floating_point() or given.tensor.is_complex()
    }
    axes = {where: found for where, found in axes.items() if found}
    kept = [given for given in one.given if given.where in axes]
    layers, final = frozenset(given.layer for given in kept), any(given.is_final for given in kept)
    return _Rows(size, batched(trial, size, axis), axes, layers, final, guessed=True)


def _is_number(x: Tensor) -> bool:
    return x.numel() == 1 and x.dim() <= 1


def _collapse(trial: Trial, one: Trace, resized: _Resized, rows: _Rows, axis: int) -> Break | None:
    """Return the break of a model whose outputs depend on the inputs and are as long whatever the batch."""
    outputs, again = one.final, resized.trace.final
    if not outputs or outputs.keys() != again.keys():  # a list may hold one for each row
        return None
    if any(x.shape != again[path].shape for path, x in outputs.items()):
        return None
    if any(_is_number(x) for x in outputs.values()):  # a loss, and what else is taken over the whole batch
        return None
    replaced: list[str] = []
    two = trial.other(mode="eval", vary=_replacing(trial, rows.inputs, replaced))
    there = {given.where: given.tensor for given in two.given}
    changed = {
        given.where
        for given in one.given
        if (new := there.get(given.where)) is not None and not change(given.tensor, new) <= limit(given.tensor)
    }
    if not any(given.is_final and given.where in changed for given in one.given):
        return None
    check_rows_go_together(trial, axis)
    last = max((i for i, given in enumerate(one.given) if given.where in rows.axes), default=-1)
    first = next((given for given in one.given[last + 1 :] if given.where in changed), one.given[-1])
    shape = tuple(first.tensor.shape)
    return Break(
        layer=first.layer,
        line=f"{first.layer} loses the batch: {first.path} is {shape} for a batch of {rows.size} and of {resized.n}",
        columns=("given out by", "shape"),
        rows=tuple((g.where, str(tuple(g.tensor.shape))) for g in one.given[last + 1 :] if g.where in changed),
        advice="Look for a first row that is taken (out[:1], out[0]), a squeeze, and a mean over axis 0. If axis "
        f"{axis} of the inputs is no batch, name the one that is: axis=.",
    )


_TIMES = 12
"""Replacements of rows that leave an output as it is, after which it does not know of them: a share of rows that are
right, say, one of them may leave by chance."""


def _check_of_all_rows(trial: Trial, one: Trace, resized: _Resized | None, rows: _Rows, axis: int) -> None:
    """Refuse to take for a loss, or for statistics, what is of one row, as ``out[0]`` of a head with one output.

    Raises:
        NotApplicableError: What is not along the batch is another with other rows, and the same as long as one stays.
    """
    if rows.size < 2 or resized is None or one.final.keys() != resized.trace.final.keys():  # a list of one for each row
        return
    final = [given for given in one.given if given.is_final and given.where not in rows.axes]
    shapes = {given.path: tuple(given.tensor.shape) for given in final if given.tensor.is_floating_point()}
    for row, which in (0, "first"), (rows.size - 1, "last"):
        kept = set(shapes)
        for time in range(_TIMES):
            kept -= _moved(trial, one, kept, _replacing(trial, rows.inputs, [], axis, row, time=time))
        for path in sorted(_moved(trial, one, kept, _replacing(trial, rows.inputs, []))):
            raise NotApplicableError(
                f"{path} {shapes[path]} changes with the {which} row and with no other: a loss is of all rows; if it "
                "is none, the batch is lost, as in out[0]"
            )


def _moved(trial: Trial, one: Trace, paths: set[str], vary: Vary) -> set[str]:
    """Return which of these outputs are others with other inputs."""
    if not paths:
        return set()
    again = trial.other(mode="eval", vary=vary).final
    return {path for path in paths if path not in again or change(one.final[path], again[path])}


# --- other rows, and another number of them -----------------------------------------------------------------------


def _sized(inputs: set[str], size: int, n: int, axis: int) -> Vary:
    """Return what makes of a batch one of n rows: the first ones, over and over."""

    def vary(path: str, x: Tensor) -> Tensor:
        return x.index_select(axis, torch.arange(n, device=x.device) % size) if path in inputs else x

    return vary


def _replacing(
    trial: Trial, inputs: set[str], replaced: list[str], axis: int = 0, row: int | None = None, *, time: int = 0
) -> Vary:
    """Return what replaces the rows of a batch but one, and writes down the paths of the inputs in which it did."""

    def vary(path: str, x: Tensor) -> Tensor:
        if path not in inputs or x.dtype == torch.bool or path.endswith("mask"):
            return x
        try:
            others = other(trial, x, time=time)
        except NotApplicableError:  # token types that are all 0, say
            return x
        replaced.append(path)
        if row is not None:
            others.select(axis, row).copy_(x.select(axis, row))
        return others

    return vary


def _mixed(
    trial: Trial, one: Trace, rows: _Rows, axis: int, tolerance: float | None, row: int
) -> tuple[list[Disagreement], Disagreement | None]:
    """Return what a row gives out otherwise when all other rows are replaced; see `apart`."""
    replaced: list[str] = []
    vary = _replacing(trial, rows.inputs, replaced, axis, row)
    two = trial.other(mode="eval", vary=vary)
    if not replaced:
        raise NotApplicableError("all elements of the inputs are the same: which others there may be is not known")
    pairs_of = functools.partial(rows.pairs, n=rows.size, row=row)
    found, inside = apart(trial, (one, two), (unchanged, vary), pairs_of, tolerance, exact=True)
    rows.check_told(inside, "with the other rows")
    return found, inside
