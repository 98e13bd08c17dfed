"""Which parts of the inputs, and which parameters, reach the output.

A gradient shows which floating elements matter. Inputs without gradients, and elements that no gradient reaches, are
replaced by other valid values: what then changes no output is not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import flatten
from pytest_modelprobe.record import parent
from pytest_modelprobe.runs import Mode
from pytest_modelprobe.text import count, listed, out_of

from .agreement import disagreements
from .check import check, check_unmodified
from .outcome import NotApplicableError, Violation
from .positions import masked_out
from .sequence import replacement
from .session import PreparedModel, Vary

# --- other values for inputs that have no gradient: identifiers, masks, labels --------------------------------------

_DRAWS = ("one", "two")


def other_values(prepared: PreparedModel, path: str, x: Tensor) -> list[tuple[Vary, str]]:
    """Return what gives an input other values, the likeliest to have an effect first, with how they were made.

    It is empty if no values are known to be valid.

    Args:
        prepared: The model and its inputs.
        path: Name of the input.
        x: A mask, whose elements are flipped; integers, in whose range others are taken; or floats.
    """
    if prepared.argument(path).endswith("mask") or x.dtype == torch.bool:
        made = _flipped(prepared, path, x)
    elif x.is_floating_point():
        made = ((prepared.redrawn(x, f"{path} {draw}"), "replaced by random numbers") for draw in _DRAWS)
    else:
        made = _integers(prepared, path, x)

    def giving(values: Tensor) -> Vary:
        return lambda where, given: values.to(given.device) if where == path else given

    return [(giving(values), said) for values, said in made if not torch.equal(values, x)]


def _flipped(prepared: PreparedModel, path: str, mask: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Yield a mask with elements flipped: to mask everything alone may be without effect, or an error."""
    opposite = (mask == 0).to(mask.dtype)
    positions = mask.shape[-1] if mask.dim() else 1
    if positions > 1:
        middle = torch.arange(positions, device=mask.device) == positions // 2
        yield torch.where(middle, opposite, mask), "flipped at its middle position"
        for draw in _DRAWS:
            half = prepared.randn_like(mask.to(torch.float32), f"{path} {draw}") > 0
            yield torch.where(half, opposite, mask), "flipped at random"
    # A softmax over one position is 1 whatever is masked; a mask that leaves out whole rows is of another kind.
    if positions > 1 or not bool((mask == mask.flatten()[0]).all()) or not prepared.argument(path).endswith("mask"):
        yield opposite, "flipped"


def _integers(prepared: PreparedModel, path: str, x: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Yield other integers. Negative ones stay: they mark what is ignored."""
    wide, stays = x.to(torch.int64), x < 0
    if bool(stays.all()):
        return
    known, most = wide[~stays].unique(), int(wide.max())
    if len(known) > 1:
        others = replacement(prepared, torch.where(stays, known[0], wide))
        yield torch.where(stays, x, others.to(x.dtype)), "replaced by others that occur in it"
    for draw in _DRAWS if most else ():
        drawn = prepared.probe.randint(0, most + 1, x.shape, name=f"check {path} {draw}").to(x.device, x.dtype)
        yield torch.where(stays, x, drawn), f"replaced by integers from 0 to {most:,}"
    if not most and prepared.probe.device.type == "cpu":  # an index that is out of range raises there, and only there
        yield torch.where(stays, x, x + 1), "replaced by 1"


_TIMES = ("one", "two", "three")
"""Seeds of random inputs: several, since a ReLU or a maximum may block the gradient of one."""

_LARGER = (10.0, -10.0, 100.0)
"""By what random inputs are multiplied besides: a ReLU may be dead for all numbers like the given ones."""

_MODES: tuple[Mode, ...] = ("eval", "train")

_MAY_BE_UNUSED = ("position_ids", "token_type_ids")
"""Arguments that tokenizers return for all models, of which some have relative positions, or one type."""

_SLIDING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.Unfold,
)


@check
def inputs_used(prepared: PreparedModel) -> Violation | str:
    """Check that every input is used, and every feature, channel and position of each floating input.

    A slice along any axis but the first, which is the batch, is unused if no gradient arrives at it in any row, for
    several random inputs in both modes, and if other values, up to 100 times as large, do not change any output. The
    remainder that the strides of a convolution or a pooling leave at the end of an axis is ignored, and so is what a
    mask leaves out.

    Integers, bools, masks, labels and targets are replaced as a whole, within their range: integers by others that
    occur in them or are below the largest, masks and bools by their opposite at the middle position, at random, and
    everywhere. One that changes no output is unused.
    ``position_ids`` and ``token_type_ids`` that are not used are a hint: not every model needs them.

    Args:
        prepared: The model and its inputs.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.inputs_used(probe, nn.Linear(8, 2), probe.randn(4, 8)))
    inputs_used holds for Linear: 1 input
    >>> print(checks.inputs_used(probe, nn.Embedding(9, 2), probe.randint(0, 9, (4, 8))))
    inputs_used holds for Embedding: 1 input; input replaced by others that occur in it
    """
    prepared.reference(mode="eval")
    once = {id(x): (path, x) for path, x in reversed(prepared.dense) if x.numel()}
    given = dict(reversed(once.values()))
    # No gradient says which parts of these are used.
    named = {
        path for path in given if prepared.argument(path).endswith(("mask", "labels", "label", "targets", "target"))
    }
    whole = {
        path: x
        for path, x in given.items()
        if path in named or not (x.is_floating_point() or x.is_complex() or x.is_quantized)
    }
    sliced = {path: x for path, x in given.items() if path not in whole and x.is_floating_point() and x.dim()}
    if not whole and not sliced:
        raise NotApplicableError("no input is of numbers whose range is known")
    reached = _reached(prepared, sliced) if sliced else {}
    if reached is None and not whole:
        raise NotApplicableError("no gradient can be taken of the inputs")
    alone: dict[str, list[str]] = {}
    for path, part, said in _unreached(prepared, sliced, reached or {}):
        where = {path: part}
        varies = [_replacing(prepared, where, time) for time in _TIMES]
        larger = [_replacing(prepared, where, _TIMES[0], size) for size in _LARGER]
        changed, seen_by = _effect(prepared, [*varies, *larger], allowed=len(varies))
        if changed is not None:
            how = "larger values alone" if changed >= len(varies) else "values alone, without a gradient"
            alone.setdefault(how, []).append(f"{said} of {path}" if said else path)
            continue
        lost = f"is not used at {said}" if said else "is not used"
        return _unused(path, f"{lost}: no gradient arrives there, and other values change no output", seen_by)
    notes = [f"{listed(names)} by {how}" for how, names in alone.items()]
    hint = None
    for path, x in whole.items():
        found = _use(prepared, path, x)
        if isinstance(found, str):
            notes.append(found)
        elif found.level == "broken":
            return found
        else:
            hint = hint or found
    if hint is not None:
        return hint
    if reached is None:
        notes.append(f"not looked at, as no gradient can be taken: {listed(list(sliced))}")
    return "; ".join([count(len(given), "input"), *notes])


@check_unmodified
def parameters_used(prepared: PreparedModel) -> Violation | str:
    """Check that each parameter that requires a gradient gets one, in evaluation or training mode; else it is a hint.

    All floating outputs have a gradient. A parameter without one is not used, or what is computed of it is detached. A
    model may have such on purpose: heads, experts and poolers that were not called, weights for an input that is
    optional, a token for masks. In `standard` the gradients that arrived in other checks count too.

    `assert_all_params_have_grad` fails where this is a hint.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.parameters_used(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    parameters_used holds for Linear: 2 parameters
    """
    wanted = {name: p for name, p in prepared.model.named_parameters() if p.requires_grad and p.numel()}
    if not wanted:
        raise NotApplicableError("no parameter requires a gradient")
    called, refused = set[str](), list[NotApplicableError]()
    for mode in _MODES:
        if not prepared.reached >= wanted.keys():
            try:
                trace = prepared.reference(mode=mode, backward=True, loss="random")
                called.update(given.layer for given in trace.tensors)
            except NotApplicableError as reason:
                refused.append(reason)
    if len(refused) == len(_MODES):
        raise refused[0]
    found = [name for name in wanted if name not in prepared.reached]
    if not found:
        return count(len(wanted), "parameter")
    rows = [(name, str(tuple(wanted[name].shape)), "yes" if parent(name) in called else "never") for name in found]
    return Violation.first_of(
        sorted(rows, key=lambda row: row[-1] == "never"),
        f"gets no gradient in either mode; {out_of(len(found), len(wanted), 'parameter')}",
        columns=("parameter", "shape", "layer called"),
        advice="No output depends on it, or what is computed of it is detached. A head, an expert or a token for other "
        "inputs or options may be so on purpose: freeze it, with requires_grad_(False), where it is never to train.",
        level="hint",
    )


def _use(prepared: PreparedModel, path: str, x: Tensor) -> Violation | str:
    """Return how an input was replaced, with an effect, or that it is not used."""
    ways = other_values(prepared, path, x)
    if not ways:
        return f"{path} not looked at, as no other valid values are known"
    varies = [vary for vary, _ in ways]
    changed, seen_by = _effect(prepared, varies)
    if changed is not None:
        return f"{path} {ways[changed][1]}"
    how = listed(list(dict.fromkeys(said for _, said in ways)))
    found = _unused(path, f"is not used: {how}, it changes no output", seen_by)
    return dataclasses.replace(found, level="hint") if prepared.argument(path) in _MAY_BE_UNUSED else found


def _unused(path: str, said: str, seen_by: str) -> Violation:
    nowhere = (
        "No layer uses them: look for a slice or an index, a weight that is zero, and an argument that is taken and "
        "not used."
    )
    advice = f"The values reach {seen_by} and no further." if seen_by else nowhere
    return Violation.at(path, said, advice=advice)


def _reached(prepared: PreparedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Return a mask of the elements of each input at which a gradient arrives, or `None` if no run has a gradient."""
    reached = {path: torch.zeros(x.shape, dtype=torch.bool) for path, x in inputs.items()}
    ran, refused = False, None
    for mode in _MODES:
        for time in _TIMES:
            vary = _replacing(prepared, {path: torch.ones((), dtype=torch.bool) for path in inputs}, time)
            try:
                given = None if time == _TIMES[0] else vary
                trace = prepared.run(mode=mode, seed=time, vary=given, backward=True, input_gradients=True)
            except NotApplicableError:  # a loss without a gradient
                continue
            except UsageError as error:  # a loss that takes what the other mode returns
                refused = error
                continue
            if trace.error is not None:
                continue
            ran = True
            for path, gradient in trace.input_gradients.items():
                if path in reached and gradient is not None:
                    reached[path] |= (gradient.to_dense() != 0).cpu()
    if refused is not None and not ran:
        raise refused
    return reached if ran else None


def _unreached(
    prepared: PreparedModel, inputs: dict[str, Tensor], reached: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor, str]]:
    """Yield the parts of inputs at which no gradient arrives: a path, a mask of the shape of the input, or one that
    broadcasts to it, and the part in words, empty for the whole.
    """
    slides = any(isinstance(module, _SLIDING) for module in prepared.model.modules())
    for path, there in reached.items():
        if not there.any():
            yield path, torch.ones((), dtype=torch.bool), ""
            continue
        if there.dim() > 1:
            there = masked_out(prepared, path, 1).filled(there, 1, True)
        for axis in range(1, there.dim()):
            lost = ~there.movedim(axis, 0).flatten(1).any(1)
            if slides and not _holds_channels(there, axis):
                lost[len(lost) - int(lost.flip(0).cummin(0).values.sum()) :] = False
            if lost.any():
                shape = [-1 if i == axis else 1 for i in range(there.dim())]
                yield path, lost.view(shape), _slice_text(there, axis, lost)


def _holds_channels(tensor: Tensor, axis: int) -> bool:
    """Whether an axis of images or videos is the channel axis: the shortest one."""
    return tensor.dim() > 3 and tensor.shape[axis] == min(tensor.shape[1:])


def _slice_text(tensor: Tensor, axis: int, lost: Tensor) -> str:
    """Return a slice in words.

    >>> _slice_text(torch.ones(2, 5), 1, torch.tensor([True, False, True, True, True]))
    'features 0 and 2 to 4 of 5'
    """
    features = axis == tensor.dim() - 1 and tensor.dim() < 4
    noun = "channel" if _holds_channels(tensor, axis) else "feature" if features else "position"
    along = f" along axis {axis}" if noun == "position" else ""
    runs: list[list[int]] = []
    for i in lost.nonzero().flatten().tolist():
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    which = listed([str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs])
    return f"{noun}{'s' * (int(lost.sum()) > 1)} {which} of {len(lost)}{along}"


def _replacing(prepared: PreparedModel, parts: dict[str, Tensor], time: str, size: float = 1.0) -> Vary:
    """Return a function that replaces parts of the inputs with random numbers of the same scale, times a number."""

    def vary(path: str, x: Tensor) -> Tensor:
        if path not in parts:
            return x
        return torch.where(parts[path].to(x.device), prepared.redrawn(x, f"{path} {time}") * size, x)

    return vary


def _effect(prepared: PreparedModel, varies: Sequence[Vary], allowed: int | None = None) -> tuple[int | None, str]:
    """Return which of several changes of the inputs changes an output, and the last tensor that one of them changes.

    An exception of the model is an effect. Of changes beyond the first ``allowed`` it may be that of a range.
    """
    seen_by = ""
    for mode in _MODES:
        one = prepared.run(mode=mode)
        if one.error is not None:
            continue
        for number, vary in enumerate(varies):
            two = prepared.run(mode=mode, vary=vary)
            if two.error is not None and number in range(len(varies))[allowed:]:
                continue
            if two.error is not None or flatten("output", one.output).plain != flatten("output", two.output).plain:
                return number, ""
            found = disagreements(one, two, tolerance=0.0, integers=True)
            if any(far.layer_tensor.is_final for far in found):
                return number, ""
            seen_by = found[-1].layer_tensor.where if found else seen_by
    return None, seen_by
