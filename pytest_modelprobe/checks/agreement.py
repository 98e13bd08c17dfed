"""Compare two traces, and find the first layer at which they disagree.

Most checks run a model twice and expect the same. What differs by rounding alone must not break a check: `limit` has
the tolerance of each dtype, `compare_runs` repeats a doubtful case in float64, and `check_not_random` refuses models
whose runs cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.record import ROOT, label_of
from pytest_modelprobe.runs import Mode
from pytest_modelprobe.text import Cell

from .outcome import NotApplicableError, Violation
from .rounding import as_double, is_rounded, limit, relative_error
from .session import LayerTensor, PreparedModel, Trace, Vary

Pairs = Callable[[LayerTensor, Tensor], list[tuple[Tensor, Tensor]]]
"""Takes a tensor of a layer and that of another run, and returns pairs of their parts, of which one has to agree.

Without a pair nothing is compared."""

_ROUNDING = 1e-6
"""Largest relative error of two runs in float64, as parts of a model may compute in float32 all the same."""

_NEGLIGIBLE = 1e-6
"""The share of the largest gradient up to which another one is the rounding error of terms that cancel."""

MISSING = "not returned"
"""The note of a tensor that the other run does not have."""

Row = TypeVar("Row", bound=tuple[object, ...])


@dataclass(frozen=True, slots=True, eq=False)
class Disagreement:
    """A tensor of a layer that differs between two runs."""

    layer_tensor: LayerTensor
    change: float
    """The relative error. It is inf if only one tensor is finite, or if the shapes differ."""
    note: str = ""
    """Replaces the number: a changed shape, or `MISSING`."""

    @property
    def row(self) -> tuple[Cell, ...]:
        """Address and change, for a table."""
        return self.layer_tensor.where, self.note or percent(self.change)

    @property
    def changed(self) -> str:
        """``changed by 3 %``, for a sentence."""
        if not self.note:
            return changed(self.change)
        return f"is {self.note}" if self.note == MISSING else f"changed its {self.note}"


def whole(given: LayerTensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the two tensors as the only pair."""
    return [(given.tensor, other)]


def disagreements(
    one: Trace,
    other: Trace,
    *,
    pairs: Pairs = whole,
    tolerance: float | None = None,
    least: float = 0.0,
    integers: bool = False,
) -> list[Disagreement]:
    """Return the tensors that differ between two runs, in the order in which the layers returned.

    A layer comes after those inside it, so the first one is the innermost layer that causes a difference.

    Args:
        one: The reference run.
        other: Another run.
        pairs: Returns the parts of two tensors to compare.
        tolerance: The largest relative error that counts as agreement. By default it is that of the dtype, see
            `TOLERANCE`. With 0, tensors agree only bit for bit.
        least: The default is not below this number.
        integers: Whether to compare integers and bools too; those that depend on rounding may differ.
    """
    found = []
    there = {given.where: given for given in other.tensors}
    for given in one.tensors:
        again = there.get(given.where)
        if again is None:
            found.append(Disagreement(given, math.inf, MISSING))
        elif integers or is_rounded(given.tensor):
            compared = pairs(given, again.tensor)
            least_change = min((relative_error(x, y) for x, y in compared), default=0.0)
            if not least_change <= limit(given.tensor, tolerance, least=least):
                reshaped = f"shape {tuple(given.tensor.shape)} → {tuple(again.tensor.shape)}"
                note = "" if any(x.shape == y.shape for x, y in compared) else reshaped
                found.append(Disagreement(given, least_change, note))
    return found


def axes_of_length(tensor: Tensor, length: int) -> list[int]:
    """Return the axes of a length.

    >>> axes_of_length(torch.ones(2, 3, 2), 2)
    [0, 2]
    """
    return [axis for axis, n in enumerate(tensor.shape) if n == length]


def axes_that_follow(one: Trace, other: Trace, length: int, now: int) -> dict[str, list[int]]:
    """Return the axes that follow one of the inputs: those of its length in a run, and in another one as it is there.

    Args:
        one: A run.
        other: A run on inputs of another length along their axis.
        length: The length in the first run.
        now: The length in the other one.

    Returns:
        By address, the axes of each tensor that has as many axes in the other run.
    """
    there = {given.where: given.tensor for given in other.tensors}
    both = [(given, there[given.where]) for given in one.tensors if given.where in there]
    return {
        given.where: [axis for axis in axes_of_length(given.tensor, length) if again.shape[axis] == now]
        for given, again in both
        if given.tensor.dim() == again.dim()
    }


def changed(by: float) -> str:
    """Return a relative error as a phrase.

    >>> changed(0.03), changed(math.inf)
    ('changed by 3 %', 'changed by ∞ %')
    """
    return f"changed by {percent(by)}"


def negligible(trace: Trace) -> float:
    """Return the norm up to which a gradient is a rounding error of terms that cancel, as before a softmax.

    It is small beside the largest gradient on the way from the loss back: where all gradients of the parameters cancel,
    none of them has the size of what canceled.
    """
    norms: list[float] = [gradient.norm().item() for gradient in trace.arrived]
    return _NEGLIGIBLE * max([trace.largest_gradient, *norms])


def gradient_error(one: Tensor | None, other: Tensor | None, zero: float) -> float:
    """Return the relative error of a gradient; 0 where both are `negligible`, or differ by what rounds the largest.

    An eighth of what is negligible is one unit in the last place of the largest gradient in float32. Zeros in place of
    none, as a reentrant checkpoint makes them, are no error.

    >>> gradient_error(torch.tensor([2e-5]), torch.tensor([2.01e-5]), zero=1e-6)
    0.0
    """
    if one is None or other is None:
        return math.inf if any(x is not None and bool(x.norm()) for x in (one, other)) else 0.0
    if one.norm() <= zero >= other.norm() or 8 * (one - other).norm() <= zero:
        return 0.0
    return relative_error(one, other)


def check_not_random(prepared: PreparedModel, vary: Vary | None = None) -> None:
    """Check that the output in evaluation mode does not depend on the seed, with the inputs as they are or varied.

    Raises:
        NotApplicableError: In evaluation mode another seed gives another output, beyond rounding.
    """
    one = prepared.reference(mode="eval", vary=vary)
    for seed in ("second", "third"):
        found = disagreements(one, prepared.variation(mode="eval", seed=seed, vary=vary), integers=True)
        if found:
            raise NotApplicableError(
                f"random in evaluation: another seed changes what {found[0].layer_tensor.layer} returns"
            )


def check_repeats(prepared: PreparedModel, mode: Mode | None = None, *, tolerance: float | None = None) -> None:
    """Check that two runs with the same seed agree.

    Raises:
        NotApplicableError: They do not, as with a random generator of the model's own.
    """
    one, two = (prepared.run(mode=mode) for _ in range(2))
    if found := disagreements(one, two, tolerance=tolerance, integers=True):
        layer = label_of(found[0].layer_tensor.layer)
        raise NotApplicableError(f"its runs do not repeat: with the same seed {layer} returns something else")


def compare_runs(
    prepared: PreparedModel,
    runs: tuple[Trace, Trace],
    varied: tuple[Vary, Vary],
    pairs: Pairs,
    tolerance: float | None,
    *,
    exact: bool = False,
) -> tuple[list[Disagreement], Disagreement | None]:
    """Return the differences of two runs if the output differs; else the first difference inside, beyond rounding.

    If the output agrees and a layer inside does not, both runs are repeated in float64, which separates small errors
    from rounding.

    Args:
        prepared: The model and its inputs.
        runs: The two runs.
        varied: The functions that changed their inputs, to repeat the runs in float64.
        pairs: Returns the parts of two tensors to compare.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.
        exact: Whether both ran the same operations on the same shapes, so that equal parts are equal bit for bit.
    """

    def compared(one: Trace, two: Trace, up_to: float | None) -> list[Disagreement]:
        found = disagreements(one, two, pairs=pairs, tolerance=up_to)
        there = {given.where for given in two.tensors}  # what other rows go to may not be called
        # Of a list of one for each row there are fewer; what is along the axis is there whatever its length.
        given = [one.layer_tensor for one in found if one.layer_tensor.is_final]
        along = {one.where for one in given if pairs(one, one.tensor)}
        return [one for one in found if one.layer_tensor.where in there | along]

    found = compared(*runs, tolerance)
    if any(one.layer_tensor.is_final for one in found):
        return found, None
    if not found and not (exact and tolerance is None and compared(*runs, 0.0)):
        return [], None
    try:
        model = prepared.copied(torch.float64)
        wide = [prepared.variation(mode="eval", model=model, vary=_in_double_precision(vary)) for vary in varied]
        found = compared(wide[0], wide[1], _ROUNDING if tolerance is None else tolerance)
    except NotApplicableError:  # it runs in its own dtype alone
        pass
    if any(one.layer_tensor.is_final for one in found):
        return found, None
    return [], found[0] if found else None


def inside_note(inside: Disagreement | None) -> str:
    """Return the end of a sentence about an output that agrees while a layer inside differs."""
    if inside is None:
        return ""
    return f"; layers inside differ, but the output agrees: first {inside.layer_tensor.where}, {inside.changed}"


def in_backward_order(rows: Iterable[Row], trace: Trace) -> list[Row]:
    """Return rows in the order in which a backward reaches their layers: the last layer comes first.

    Parameters of the root come at the end, since it is not known when its code uses them.

    Args:
        rows: Tuples that begin with the name of a parameter.
        trace: A run, which says in which order layers returned.
    """
    last = {given.layer: i for i, given in enumerate(trace.tensors) if given.layer != ROOT}
    return sorted(rows, key=lambda row: -last.get(str(row[0]).rpartition(".")[0], -1))


def violation_of(found: Sequence[Disagreement], said: str, advice: str = "") -> Violation:
    """Return the violation at the first of some differences, with a table of all.

    Args:
        found: The differences.
        said: The sentence after the layer's name. In it ``{path}`` stands for the output that changed, and
            ``{changed}`` for "changed by 3 %".
        advice: Where to look.
    """
    first = found[0]
    return Violation.at(
        first.layer_tensor.layer,
        said.format(path=first.layer_tensor.path, changed=first.changed),
        columns=("tensor", "changed by"),
        rows=tuple(one.row for one in found),
        advice=advice,
    )


def _in_double_precision(vary: Vary) -> Vary:
    return lambda path, x: as_double(vary(path, x))
