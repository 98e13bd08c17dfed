"""Two traces → the first layer at which they disagree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_modelprobe.record import ROOT
from pytest_modelprobe.report.comparison import percent
from pytest_modelprobe.report.text import Cell

from .outcome import Break, NotApplicableError
from .trial import LayerTensor, Trace, Trial, Vary, plain, widened

Pairs = Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor]]]
"""What of two tensors is to agree: one pair; several where it is not known which axis is meant and one has to; none."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}
"""How far two results of one computation may be apart that kernels do in another order, relative to their norm."""

_ROUNDING = 1e-6
"""How far two runs in float64 may be apart: parts of a model may compute in float32 all the same."""

_MISSING = "not given out"


@dataclass(frozen=True, slots=True, eq=False)
class Disagreement:
    """A tensor that a layer gave out otherwise in one of two runs."""

    given: LayerTensor
    change: float
    """Relative to the norm of the first; inf where it is not finite in one of them, or of another shape."""
    note: str = ""
    """What else is to be said: another shape, or `_MISSING`."""

    @property
    def row(self) -> tuple[Cell, ...]:
        """For a table: where, and by how much."""
        return self.given.where, self.note or percent(self.change)

    @property
    def changed(self) -> str:
        """For a sentence: ``changed by 3 %``."""
        if not self.note:
            return changed(self.change)
        return f"is {self.note}" if self.note == _MISSING else f"changed its {self.note}"


def whole(one: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the two tensors: they are to agree as they are."""
    return [(one, other)]


def disagreements(
    one: Trace,
    other: Trace,
    *,
    pairs: Pairs = whole,
    tolerance: float | None = None,
    least: float = 0.0,
    integers: bool = False,
) -> list[Disagreement]:
    """Return what disagrees between two runs of a model, in the order in which the layers returned.

    A layer comes after those inside it: the first is the innermost whose own doing it is.

    Args:
        one: The run to judge by.
        other: Another run.
        pairs: What of two tensors to compare.
        tolerance: Largest relative change; None: by dtype, see `TOLERANCE`. 0: bit for bit.
        least: The least that None stands for.
        integers: Whether integers and bools are to agree too: those that are chosen by rounding need not.
    """
    found = []
    there = {given.where: given for given in other.given}
    for given in one.given:
        again = there.get(given.where)
        if again is None:
            found.append(Disagreement(given, math.inf, _MISSING))
        elif integers or given.tensor.is_floating_point() or given.tensor.is_complex():
            compared = pairs(given.tensor, again.tensor)
            least_change = min((change(x, y) for x, y in compared), default=0.0)
            if not least_change <= limit(given.tensor, tolerance, least=least):
                reshaped = f"shape {tuple(given.tensor.shape)} → {tuple(again.tensor.shape)}"
                note = "" if any(x.shape == y.shape for x, y in compared) else reshaped
                found.append(Disagreement(given, least_change, note))
    return found


def change(one: Tensor, other: Tensor) -> float:
    """Return ‖x − y‖ / ‖x‖; inf where shapes differ, or where only one is finite.

    >>> change(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    0.1
    """
    one, other = plain(one), plain(other)
    if one.shape != other.shape:
        return math.inf
    if torch.equal(one, other):
        return 0.0
    x, y = (_wide(tensor) for tensor in (one, other))
    known = x.isfinite() & y.isfinite()
    if not known.all():
        if not torch.equal(torch.nan_to_num(x[~known], nan=0.5), torch.nan_to_num(y[~known], nan=0.5)):
            return math.inf
        x, y = x[known], y[known]
    distance = torch.linalg.vector_norm(x - y.to(x.device)).item()
    norm = torch.linalg.vector_norm(x).item()
    return distance / norm if norm else math.inf if distance else 0.0


def changed(by: float) -> str:
    """Return a change as it stands in a sentence.

    >>> changed(0.03), changed(math.inf)
    ('changed by 3 %', 'changed by ∞ %')
    """
    return f"changed by {percent(by)}"


def negligible(gradients: Mapping[str, Tensor | None]) -> float:
    """Return the norm up to which a gradient is nothing but rounding of what cancels, as before a norm or a softmax."""
    return 1e-6 * max((g.norm().item() for g in gradients.values() if g is not None), default=0.0)


def apart(
    trial: Trial,
    runs: tuple[Trace, Trace],
    varied: tuple[Vary, Vary],
    pairs_of: Callable[[Trace], Pairs],
    tolerance: float | None,
    *,
    exact: bool = False,
) -> tuple[list[Disagreement], Disagreement | None]:
    """Return where two runs disagree, if the output does; else the first disagreement inside, beyond rounding.

    Where the output agrees and a layer inside does not, both are computed again in float64, which tells what is little
    from what is rounding.

    Args:
        trial: The model and its inputs.
        runs: The two runs.
        varied: What made their inputs, to run them again in float64.
        pairs_of: Returns which parts of a run are to agree with those of another.
        tolerance: Largest relative change; None: by dtype.
        exact: Whether both ran the same operations on tensors of the same shapes, so that equal parts come out equal
            to the last bit.
    """

    def compared(one: Trace, two: Trace, up_to: float | None) -> list[Disagreement]:
        pairs = pairs_of(one)
        found = disagreements(one, two, pairs=pairs, tolerance=up_to)
        there = {given.where for given in two.given}  # what other rows go to may not be called
        # Of a list of one for each row there are fewer; what is along the axis is there whatever its length.
        along = {one.given.where for one in found if one.given.is_final and pairs(*[one.given.tensor] * 2)}
        return [one for one in found if one.given.where in there | along]

    found = compared(*runs, tolerance)
    if any(one.given.is_final for one in found):
        return found, None
    if not found and not (exact and tolerance is None and compared(*runs, 0.0)):
        return [], None
    try:
        model = trial.copied(torch.float64)
        wide = [trial.other(mode="eval", model=model, vary=_in_double_precision(vary)) for vary in varied]
        found = compared(wide[0], wide[1], _ROUNDING if tolerance is None else tolerance)
    except NotApplicableError:  # it runs in its own dtype alone
        pass
    if any(one.given.is_final for one in found):
        return found, None
    return [], found[0] if found else None


def told_inside(inside: Disagreement | None) -> str:
    """Return the end of a sentence about an output that agrees: that something inside does not."""
    if inside is None:
        return ""
    return f"; layers inside differ, the output does not: first {inside.given.where}, {inside.changed}"


def from_the_loss(names: Iterable[str], trace: Trace) -> list[str]:
    """Return names of parameters in the order in which a backward gets to their layers: what runs last comes first.

    When the model's own code uses a parameter of the model itself is not known: those come at the end.
    """
    last = {given.layer: i for i, given in enumerate(trace.given) if given.layer != ROOT}
    return sorted(names, key=lambda name: -last.get(name.rpartition(".")[0], -1))


def broken(found: Sequence[Disagreement], said: str, advice: str = "") -> Break:
    """Return the break that disagreements show: at the first of them, with a table of all.

    Args:
        found: What disagrees.
        said: The sentence after the layer's name; ``{path}`` stands for which output changed, ``{changed}`` for
            "changed by 3 %".
        advice: Where to look.
    """
    first = found[0]
    return Break(
        layer=first.given.layer,
        line=f"{first.given.layer} {said.format(path=first.given.path, changed=first.changed)}",
        columns=("given out by", "changed by"),
        rows=tuple(one.row for one in found),
        advice=advice,
    )


def _in_double_precision(vary: Vary) -> Vary:
    return lambda path, x: widened(vary(path, x))


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    wide = tensor.to(torch.float64)
    if not tensor.is_floating_point():
        return wide
    # Masks of attention are made of the least number that a dtype has.
    return torch.where(tensor.abs() > torch.finfo(tensor.dtype).max / 4, wide.sign() * math.inf, wide)


def limit(tensor: Tensor, tolerance: float | None = None, *, least: float = 0.0) -> float:
    """Return the largest relative change that is none: the one given, or by dtype, see `TOLERANCE`.

    Args:
        tensor: What may change.
        tolerance: What was asked for.
        least: For dtypes that round less: where other kernels run, which may round as TensorFloat-32 does.

    >>> limit(torch.ones(1)), limit(torch.ones(1), least=1e-3), limit(torch.ones(1).bfloat16(), least=1e-3)
    (0.0001, 0.001, 0.05)
    """
    if tolerance is not None:
        return tolerance
    dtype = tensor.real.dtype if tensor.is_complex() else tensor.dtype
    return max(least, TOLERANCE.get(dtype, 1e-4))
