"""Training: accumulated gradients, parameters of the optimizer, a decreasing loss.

These checks need a loss or an optimizer, and change parameters; the prepared model restores them. Small differences are
looked at once more in float64, because gradients of sums that cancel are rounding errors.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from pytest_modelprobe._torch import BatchOrInstanceNorm
from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.models import map_tensors, preserved
from pytest_modelprobe.progress import progress
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.runs import Widening
from pytest_modelprobe.text import count, listed, number

from .agreement import check_not_random, gradient_error, in_backward_order, negligible
from .batch import batched, check_rows_go_together, size_of
from .check import check, check_unmodified
from .outcome import NotApplicableError, Violation, line_of
from .rounding import as_double, limit, relative_error
from .session import PreparedModel, Trace

_TARGETS = "the loss does not accept a part of the batch: pass the targets as inputs, to a model that returns its loss"


@check
def gradient_accumulation(prepared: PreparedModel, *, axis: int = 0, tolerance: float = 1e-3) -> Violation | str:
    """Check that the gradients of a batch are the mean of those of its rows, in evaluation mode.

    With a loss that is a mean over all tokens, rows of different lengths break it: each accumulation step divides by
    its own number of tokens. A loss that compares the rows of a batch, as contrastive ones and the balancing of experts
    do, breaks it on purpose: where rows alone give no gradient, or other parameters get the same, it is a hint.

    Args:
        prepared: The model and its inputs, with a loss. Targets that the loss function holds fit the whole batch alone:
            pass them as inputs, to a model that returns its loss.
        axis: Batch axis of the inputs.
        tolerance: Largest relative change of a gradient.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.gradient_accumulation(probe, nn.Linear(3, 2), probe.randn(4, 3), loss=lambda y: y.pow(2).mean()))
    gradient_accumulation holds for Linear: 2 parameters, a batch of 4 in 4 parts
    """
    if not prepared.has_loss:
        raise NotApplicableError("without loss= it is not known how the loss depends on the batch size")
    size = size_of(prepared, axis)
    if size < 2:
        raise NotApplicableError("the batch has one row: give it two or more")
    whole = prepared.reference(mode="eval", backward=True)
    found = _accumulated(prepared, whole, size, axis, tolerance)
    if found:  # gradients of sums that cancel are rounding errors
        with Widening(torch.float64), contextlib.suppress(NotApplicableError, UsageError):
            wide = prepared.copied(torch.float64)
            whole_wide = prepared.variation(mode="eval", backward=True, model=wide, vary=_wide)
            found = _accumulated(prepared, whole_wide, size, axis, tolerance, wide)
    if not found:
        return f"{count(len(whole.gradients), 'parameter')}, a batch of {size} in {size} parts"
    check_not_random(prepared)
    check_rows_go_together(prepared, axis)

    def rolled(x: Tensor) -> Tensor:
        return x.roll(1, axis) if x.dim() > axis and x.shape[axis] == size else x

    before, after = (prepared.loss(output) for output in (whole.output, map_tensors(rolled, whole.output)))
    if relative_error(before, after) > limit(before):  # the loss holds a target for each row
        raise NotApplicableError(_TARGETS)
    found = in_backward_order(found, whole)
    _, far, _ = found[0]
    advice = "Look at the loss: a sum is not divided, and a mean over tokens is divided by the tokens of each part."
    if len(found) < len(whole.arrived):
        advice += " The other gradients agree, so a layer between those and these may be the cause too."
    compares = _compares_rows(whole, found)
    if compares:
        advice = f"A loss that compares the rows of a batch does this on purpose. {advice}"
    return Violation.first_of(
        ((name, percent(far), number(times)) for name, far, times in found),
        f"gets a gradient in {size} parts that differs by {percent(far)} from that of the whole batch",
        columns=("parameter", "changed by", "norm, times"),
        advice=advice,
        level="hint" if compares else "broken",
    )


def _accumulated(
    prepared: PreparedModel, whole: Trace, size: int, axis: int, tolerance: float, model: nn.Module | None = None
) -> list[tuple[str, float, float]]:
    """Return the parameters whose gradient differs when each row is a part: name, relative change, and norm, times."""
    rows_of = batched(prepared, size, axis)
    parts = []
    for i in range(size):

        def part(path: str, x: Tensor, i: int = i) -> Tensor:
            x = x if model is None else as_double(x)
            return x.narrow(axis, i, 1).clone() if path in rows_of else x

        # Of targets that are broadcast torch warns; the order of the rows tells of them.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            try:
                parts.append(prepared.variation(mode="eval", backward=True, vary=part, model=model))
            except UsageError as error:  # it took the whole batch
                raise NotApplicableError(_TARGETS) from error
    found = []
    zero = negligible(whole)
    for name, gradient in whole.gradients.items():
        pieces = [g for g in (p.gradients.get(name) for p in parts) if g is not None]
        if gradient is None or not pieces:
            continue
        mean = torch.stack(pieces).sum(0) / size
        far, norm = gradient_error(gradient, mean, zero), gradient.norm().item()
        if not far <= tolerance:
            found.append((name, far, mean.norm().item() / norm if norm else math.inf))
    return found


def _compares_rows(whole: Trace, found: Sequence[tuple[str, float, float]]) -> bool:
    """Whether the loss seems to compare the rows of a batch: rows alone give nothing, or some parameters another sum.

    Other parameters get the same gradient then. Gradients that are scaled alike are a sum that is not divided.
    """
    if all(times == 0 for *_, times in found):
        return True
    differing, zero = {name for name, *_ in found}, negligible(whole)
    agree = any(g is not None and g.norm() > zero for name, g in whole.gradients.items() if name not in differing)
    return agree and not any(math.isclose(far, abs(times - 1), rel_tol=0.1) for _, far, times in found)


def _wide(_: str, x: Tensor) -> Tensor:
    return as_double(x)


@check_unmodified
def optimizer_covers(prepared: PreparedModel, *, optimizer: torch.optim.Optimizer) -> Violation | str:
    """Check that the optimizer holds each parameter that requires a gradient once, and no parameters of other models.

    Args:
        prepared: The model.
        optimizer: The optimizer.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    >>> print(checks.optimizer_covers.outcome(ModelProbe(), model, optimizer=optimizer).layer)
    1.weight
    """
    held = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    named = dict(prepared.model.named_parameters())
    missing = [name for name, p in named.items() if p.requires_grad and id(p) not in held]
    if missing:
        return Violation.first_of(
            ((name,) for name in missing),
            "is in no group of the optimizer: it is never trained",
            columns=("parameter",),
            advice="Create the optimizer after the model is complete and on its device.",
        )
    twice = [name for name, p in named.items() if held[id(p)] > 1]
    if twice:
        return Violation.first_of(
            ((name,) for name in twice),
            f"is in the optimizer {held[id(named[twice[0]])]} times: every step updates it as often",
            columns=("parameter",),
            advice="Put each parameter into one group only.",
        )
    foreign = len(held.keys() - {id(p) for p in named.values()})
    if foreign:
        return Violation.at(
            "(optimizer)",
            f"has {count(foreign, 'tensor')} that are not in the model",
            advice="Was a part of the model replaced after the optimizer was made?",
        )
    return count(len(held), "parameter")


@check_unmodified
def overfits_batch(
    prepared: PreparedModel,
    *,
    steps: int = 100,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    below: float = 0.5,
) -> Violation | str:
    """Check that training on one batch decreases the loss.

    Args:
        prepared: The model and its inputs, with a loss.
        steps: Number of steps; one or more.
        optimizer: Takes the parameters, ``lambda p: torch.optim.SGD(p, 0.1)``; None: Adam with a learning rate of 1e-2,
            and in float16 a larger ``eps``.
        below: Fraction of the first loss to reach, between 0 and 1.

    Raises:
        UsageError: ``steps`` or ``below`` is out of range.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.overfits_batch(probe, nn.Linear(3, 1), probe.randn(4, 3), loss=lambda y: y.pow(2).mean()))
    ... # doctest: +ELLIPSIS
    overfits_batch holds for Linear: loss ... in ... steps
    """
    if steps < 1:
        raise UsageError(f"steps= is 1 or more; got {steps}")
    if not 0 < below < 1:
        raise UsageError(f"below= is a fraction of the first loss, between 0 and 1; got {below}")
    if not prepared.has_loss:
        raise NotApplicableError("without loss= there is no loss to decrease")
    first = last = math.nan
    if prepared.inputs and not any(x.numel() for _, x in prepared.inputs):
        raise NotApplicableError("the inputs have no elements")
    parameters = [p for p in prepared.model.parameters() if p.requires_grad]
    if not parameters:
        raise NotApplicableError("no parameter requires a gradient")
    with prepared.keep_changes(), progress("step", steps) as each:
        # The default of eps= is 0 in float16.
        eps = max(1e-8, *(torch.finfo(p.dtype).tiny for p in parameters))
        taken = optimizer(parameters) if optimizer else torch.optim.Adam(parameters, 1e-2, eps=eps)
        before = {name: p.detach().clone() for name, p in prepared.model.named_parameters() if p.requires_grad}
        for done in each(range(steps + 1)):
            trace = prepared.run(backward=True, seed=f"step {done}", traced=not done)
            if trace.in_backward:
                return Violation.at(ROOT, f"cannot be trained: in step {done + 1} {trace.failure}")
            if trace.loss is None:
                raise NotApplicableError(f"the model does not run on these inputs: {trace.failure}") from trace.error
            for name, p in prepared.model.named_parameters():
                p.grad = trace.gradients.get(name)
            if not done:
                prepared.check_reference(trace)
            last = trace.loss.item()
            first = first if done else last
            if not math.isfinite(last):
                return Violation.at(
                    ROOT,
                    f"has a loss of {last} after {count(done, 'step')}",
                    advice="Look for a logarithm or a division by 0, and for a learning rate that is too high: pass "
                    "another optimizer=. assert_finite, on a run with this loss, names the layer where it begins.",
                )
            if first <= 0:
                raise NotApplicableError(f"the loss begins at {number(first)}: a fraction of it cannot be reached")
            if done == steps or (done and last <= below * first):
                break
            try:
                taken.step()
            except Exception as error:
                name = type(taken).__name__
                raise NotApplicableError(f"{name} raised {line_of(error)}: pass another optimizer=") from error
        still = [
            name for name, p in prepared.model.named_parameters() if name in before and torch.equal(p, before[name])
        ]
    moved = f"; {count(len(still), 'parameter')} never moved" if still else ""
    if last <= below * first:
        names = f": {listed(still)}" if still else ""
        return f"loss {number(first)} → {number(last)} in {count(done, 'step')}{moved}{names}"
    name = still[0] if still else ROOT
    return Violation.at(
        name,
        f"does not learn one batch: loss {number(first)} → {number(last)} in {count(steps, 'step')}{moved}",
        columns=("never moved",) if still else (),
        rows=tuple((one,) for one in still),
        advice="Look for a detached or frozen part, a softmax before a cross entropy, targets that do not belong "
        "to the inputs; or pass more steps=, another optimizer=.",
    )


@check_unmodified
def ema_tracks(
    prepared: PreparedModel, *, average: nn.Module, decay: float, updates: Callable[[], object]
) -> Violation | str:
    """Check that an update of an averaged model is ``average += (1 - decay) (model - average)`` for each parameter.

    The running statistics of norms have to be averaged too, or copied.

    Parameters and buffers of the model are changed at random, the average is updated once, and all are restored.

    Args:
        prepared: The model that is averaged.
        average: The averaged model: a copy, or an `AveragedModel` after its first update, which copies.
        decay: Decay of the average.
        updates: Updates the average once.

    >>> from torch import nn
    >>> from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> model = nn.Linear(2, 2)
    >>> ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    >>> ema.update_parameters(model)
    >>> print(
    ...     checks.ema_tracks(ModelProbe(), model, average=ema, decay=0.9, updates=lambda: ema.update_parameters(model))
    ... )
    ema_tracks holds for Linear: 2 parameters
    """
    if isinstance(average, AveragedModel) and not average.n_averaged:
        raise NotApplicableError("the average was never updated, and its first update copies the model: update it once")
    inner = average
    if dict(average.named_parameters()).keys().isdisjoint(dict(prepared.model.named_parameters())):
        inner = getattr(average, "module", average)  # a wrapper
    parameters = dict(prepared.model.named_parameters())
    norms = [name for name, module in prepared.model.named_modules() if isinstance(module, BatchOrInstanceNorm)]
    buffers = {
        name: x
        for name, x in prepared.model.named_buffers()
        if x.is_floating_point() and name.rpartition(".")[0] in norms
    }
    with preserved(average):
        before = {name: x.detach().clone() for name, x in (*inner.named_parameters(), *inner.named_buffers())}
        with torch.no_grad():
            for name, x in (*parameters.items(), *buffers.items()):
                x.add_(prepared.randn_like(x, name) * (1 + x.abs().mean()))  # more than rounding
        with interruptible():
            updates()
        found: list[tuple[str, str]] = []
        after = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
        for name, x in (*parameters.items(), *buffers.items()):
            then, now = before.get(name), after.get(name)
            if then is None or now is None:
                found.append((name, "is not in the average"))
                continue
            mine = x.detach().to(then.device)  # an average may be kept on the CPU
            far = relative_error((1 - decay) * (mine - then), now.detach() - then)
            if not far <= 1e-3 and not (name in buffers and relative_error(mine, now.detach()) <= 1e-3):
                found.append((name, f"is updated in the average with an error of {percent(far)}"))
    if not found:
        return count(len(parameters), "parameter") + (f", {count(len(buffers), 'buffer')}" if buffers else "")
    return Violation.first_of(
        found,
        found[0][1],
        columns=("parameter", "what"),
        advice="Check from which model the average is updated, and when; and whether buffers are averaged or copied: "
        "AveragedModel(use_buffers=True) averages them, update_bn recomputes those of a BatchNorm.",
    )
