"""Compare two traces, and find the first layer at which they disagree.

Most checks run a model twice and expect the same. What differs by rounding alone must not break a check: `limit` has
the tolerance of each dtype, `compare_runs` repeats a doubtful case in float64, and `check_not_random` refuses models
whose runs cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.models import CallTracer, Layers, ModuleCall, flatten, run_eagerly
from pytest_modelprobe.record import ROOT, label_of, parent
from pytest_modelprobe.runs import Mode, Source, SourceMode
from pytest_modelprobe.text import Cell, listed

from .outcome import NotApplicableError, Violation
from .rounding import as_double, is_rounded, limit, plain, relative_error
from .session import LayerTensor, PreparedModel, Trace, Vary

Pairs = Callable[[LayerTensor, Tensor], list[tuple[Tensor, Tensor]]]
"""Takes a tensor of a layer and that of another run, and returns pairs of their parts, of which one has to agree.

Without a pair nothing is compared."""

ROUNDING = 1e-6
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
        wide = [
            prepared.variation(mode="eval", model=model, vary=lambda path, x, vary=vary: as_double(vary(path, x)))
            for vary in varied
        ]
        found = compared(wide[0], wide[1], ROUNDING if tolerance is None else tolerance)
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


# --- Outputs and gradients that are not finite, and the first layer where this begins --------------------------------

_MODES = {"eval": " in evaluation mode", "train": " in training mode", None: ""}

_KINDS = ("nan", "inf", "-inf")

_OUTPUT = (
    "Look for a division by 0, a logarithm or a root of what is not above 0, an exp that overflows, and a row of "
    "attention of which everything is masked. Write an intended infinity as a constant: masked_fill(mask, -inf)."
)
_GRADIENT = (
    "It begins between there and the loss. Look for a root, a norm or a logarithm at 0, a torch.where around one, and "
    "a division by what may be 0."
)


def check_finite(prepared: PreparedModel, trace: Trace, options: Mapping[str, Any]) -> None:
    """Check that the outputs, the loss and the gradients of a run are finite: NaN agrees with NaN.

    Raises:
        NotApplicableError: A run returned something that is not finite, or a gradient that is not.
    """
    found = not_finite(prepared, trace, options)
    if found is not None:
        raise NotApplicableError(f"not finite at {found.layer}")


def not_finite(prepared: PreparedModel, trace: Trace, options: Mapping[str, Any]) -> Violation | None:
    """Return where the outputs, the loss or the gradients of a run begin to be not finite.

    Values inside the model that do not reach the output, such as masks, may be infinite or NaN.

    Args:
        prepared: The model and its inputs.
        trace: The trace of the run.
        options: Options of the run, to repeat it.
    """
    when = _MODES[options.get("mode")]
    if found := _of_outputs(prepared, trace, options, when):
        return found
    if prepared.has_loss and trace.loss is not None and not trace.loss.isfinite():
        said = f"computes a loss of {trace.loss.item()}{when} from finite outputs"
        return Violation.at(ROOT, said, advice="Look for a division or a logarithm in the loss.")
    bad = [(name, g) for name, g in trace.gradients.items() if g is not None and _kinds(g)]
    if not bad:
        return None
    rows = in_backward_order(bad, trace)
    return Violation.first_of(
        ((name, *_counted(gradient)) for name, gradient in rows),
        f"gets a gradient that is not finite{when}: {_kinds_text(_kinds(rows[0][1]))}",
        columns=("gradient of", "NaN", "infinite", "elements"),
        advice=_GRADIENT,
    )


def _of_outputs(prepared: PreparedModel, trace: Trace, options: Mapping[str, Any], when: str) -> Violation | None:
    if not any(_kinds(tensor) for _, tensor in flatten("output", trace.output).tensors):
        return None
    sources = _sources(prepared, trace, options)
    bad = [kind for kind in _KINDS if kind in sources and not (sources[kind] or _UNKNOWN).given]
    if not bad:
        return None
    source = sources[bad[0]]
    rows = [(given.where, *_counted(given.tensor)) for given in trace.tensors if {*_kinds(given.tensor)} & {*bad}]
    layer = source.layer if source else next((g.layer for g in trace.tensors if bad[0] in _kinds(g.tensor)), ROOT)
    return Violation.at(
        layer,
        f"is not finite{when}: the model returns {_kinds_text(bad)}" + (f", from {source.text}" if source else ""),
        columns=("tensor", "NaN", "infinite", "elements"),
        rows=tuple(rows),
        advice=_OUTPUT,
    )


_UNKNOWN = Source("", "")


def _sources(prepared: PreparedModel, trace: Trace, options: Mapping[str, Any]) -> dict[str, Source | None]:
    """Return which kinds are in the output, each with its source, by repeating the run."""
    model = options.get("model", prepared.model)
    layers = Layers(model)
    calls = CallTracer(layers.modules, ModuleCall)
    held = {x: Source(path, path, given=True) for path, x in prepared.inputs}
    held |= {x: Source(parent(name), name, given=True) for name, x in model.named_buffers()}
    held |= {x: Source(parent(name), name) for name, x in model.named_parameters()}
    strided = {x: source for x, source in held.items() if x.layout is torch.strided and not x.is_nested}
    places = {x.untyped_storage().data_ptr(): source for x, source in strided.items()}
    mode = SourceMode(places, lambda: calls.innermost)
    with run_eagerly(layers), calls, mode:
        again = prepared.run(**{**options, "backward": False, "traced": False})
    found: dict[str, Source | None] = {}
    for _, tensor in flatten("output", trace.output).tensors:
        found |= dict.fromkeys(_kinds(tensor))
    for _, tensor in flatten("output", again.output).tensors:
        for kind, source in (mode.sources(tensor) if tensor.layout is torch.strided else {}).items():
            if found.get(kind) is None or not (source or _UNKNOWN).given:
                found[kind] = source
    return found


def _kinds(tensor: Tensor) -> list[str]:
    """Return which of NaN, inf and -inf occur in a tensor.

    >>> _kinds(torch.tensor([0.0, math.inf, math.nan]))
    ['nan', 'inf']
    """
    x = _values(tensor)
    if x.isfinite().all():
        return []
    return [kind for kind, there in zip(_KINDS, (x.isnan(), x == math.inf, x == -math.inf), strict=True) if there.any()]


def _counted(tensor: Tensor) -> tuple[Cell, ...]:
    x = _values(tensor)
    return int(x.isnan().sum()), int(x.isinf().sum()), tensor.numel()


def _values(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as real numbers."""
    tensor = tensor.detach()
    if tensor.is_nested:
        tensor = torch.nested.to_padded_tensor(tensor, 0.0 if tensor.is_floating_point() else 0)
    tensor = plain(tensor)
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _kinds_text(kinds: list[str]) -> str:
    return listed([kind.replace("nan", "NaN") for kind in kinds])
