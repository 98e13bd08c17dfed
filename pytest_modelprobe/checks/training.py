"""Training: gradients that add up and are right, parameters that an optimizer has, a loss that goes down."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from pytest_modelprobe._torch import BatchOrInstanceNorm, converted
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import map_tensors, preserved
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.report.comparison import percent
from pytest_modelprobe.report.text import count, listed, number

from .agreement import change, from_the_loss, limit, negligible
from .batch import batched, check_rows_go_together, size_of
from .check import check, check_as_it_is
from .drawing import check_not_random
from .outcome import Break, NotApplicableError, line_of
from .trial import Trace, Trial, widened

_TARGETS = (
    "the loss does not go with a part of the batch; give the targets as inputs, to a model that gives out its loss"
)


@check
def gradient_accumulation(trial: Trial, *, axis: int = 0, tolerance: float = 1e-3) -> Break | str:
    """Check that the gradients of a batch are the mean of those of its rows, in evaluation mode.

    With a loss that is a mean over all tokens, rows of different lengths break it: each step of accumulation divides by
    its own number.

    Args:
        trial: The model and its inputs, with a loss. Targets that the loss holds itself have a row for each of the
            whole batch, and go with no part of it: they are to be inputs too, of a model that gives out its loss.
        axis: Which axis of the inputs the batch is along.
        tolerance: Largest relative change of a gradient.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.gradient_accumulation(probe, nn.Linear(3, 2), probe.randn(4, 3), loss=lambda y: y.pow(2).mean()))
    gradient_accumulation holds for Linear: 2 parameters, a batch of 4 in 4 parts
    """
    if not trial.has_loss:
        raise NotApplicableError("without loss= it is not known how the loss goes with the size of the batch")
    size = size_of(trial, axis)
    if size < 2:
        raise NotApplicableError("the batch has one row: give it two or more")
    whole = trial.reference(mode="eval", backward=True)
    found = _accumulated(trial, whole, size, axis, tolerance)
    if found:
        found = _beyond_rounding(trial, size, axis, tolerance, found)
    if not found:
        return f"{count(len(whole.gradients), 'parameter')}, a batch of {size} in {size} parts"
    check_not_random(trial)
    check_rows_go_together(trial, axis)
    if _knows_rows(trial, whole, size, axis):
        raise NotApplicableError(_TARGETS)
    order = from_the_loss([name for name, *_ in found], whole)
    found.sort(key=lambda row: order.index(row[0]))
    name, far_by, _ = found[0]
    advice = "Look at the loss: a sum is divided by nothing, a mean over tokens by the tokens of each part."
    if len(found) < sum(gradient is not None for gradient in whole.gradients.values()):
        advice += " The other gradients agree: it may also be a layer between those and these."
    return Break(
        layer=name,
        line=f"{name} gets another gradient in {size} parts than from the batch of {size}: {far_by} away",
        columns=("parameter", "changed by", "norm, times"),
        rows=tuple(found),
        advice=advice,
    )


def _accumulated(
    trial: Trial, whole: Trace, size: int, axis: int, tolerance: float, model: nn.Module | None = None
) -> list[tuple[str, str, str]]:
    """Return the rows of a table of parameters whose gradient is another in as many parts as there are rows."""
    rows_of = batched(trial, size, axis)
    parts = []
    for i in range(size):

        def part(path: str, x: Tensor, i: int = i) -> Tensor:
            x = x if model is None else widened(x)
            return x.narrow(axis, i, 1).clone() if path in rows_of else x

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of targets that are broadcast: `_knows_rows` tells of them
            try:
                parts.append(trial.other(mode="eval", backward=True, vary=part, model=model))
            except UsageError as error:  # it took the whole batch
                raise NotApplicableError(_TARGETS) from error
    found = []
    zero = negligible(whole.gradients)
    for name, gradient in whole.gradients.items():
        pieces = [g for g in (p.gradients.get(name) for p in parts) if g is not None]
        if gradient is None or not pieces:
            continue
        mean = torch.stack(pieces).sum(0) / size
        far, norm = change(gradient, mean), gradient.norm().item()
        if not far <= tolerance and not max(norm, mean.norm().item()) <= zero:
            found.append((name, percent(far), number(mean.norm().item() / norm if norm else math.inf)))
    return found


def _knows_rows(trial: Trial, whole: Trace, size: int, axis: int) -> bool:
    """Whether the loss, or its gradient, is another when the rows of the output are in another order.

    It holds a target for each. In its gradient they show where the rows of the output are still almost the same.
    """

    def at(by: int) -> list[Tensor]:
        leaves = list[Tensor]()

        def leaf(x: Tensor) -> Tensor:
            if x.dim() <= axis or x.shape[axis] != size:
                return x
            x = x.detach().roll(by, axis)
            if x.is_floating_point() or x.is_complex():
                leaves.append(x.requires_grad_())
            return x

        loss = trial.loss(map_tensors(leaf, whole.output))
        known = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
        return [loss.detach(), *(gradient.roll(-by, axis) for gradient in known if gradient is not None)]

    return any(change(one, other) > limit(one) for one, other in zip(at(0), at(1), strict=True))


def _beyond_rounding(
    trial: Trial, size: int, axis: int, tolerance: float, found: list[tuple[str, str, str]]
) -> list[tuple[str, str, str]]:
    """Return what is found in float64; what was found before where the model does not run in it."""
    try:
        wide = trial.copied(torch.float64)
        whole = trial.other(mode="eval", backward=True, model=wide, vary=_wide)
    except (NotApplicableError, UsageError):  # the loss may hold tensors of float32
        return found
    return _accumulated(trial, whole, size, axis, tolerance, wide)


def _wide(_: str, x: Tensor) -> Tensor:
    return widened(x)


@check
def gradcheck(trial: Trial, *, tolerance: float = 1e-3, step: float = 1e-6) -> Break | str:
    """Check each parameter's gradient, and each floating input's, against differences of the loss, in float64.

    Along one direction each: ``(loss(x + step d) - loss(x - step d)) / 2 step`` is to be the gradient times d. Half
    of d is the gradient's own direction, so that a wrong size shows, and half is random.

    Args:
        trial: The model and its inputs.
        tolerance: Largest difference, relative to the gradient's norm.
        step: How far the loss is looked at from there.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.gradcheck(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    gradcheck holds for Linear: 3 gradients
    """
    if step <= 0:
        raise UsageError(f"step= is how far the loss is looked at from there: more than 0; got {step}")
    model = trial.copied()
    converted(model, widened)  # .double() leaves complex ones in single precision
    parameters = dict(model.named_parameters())
    try:
        one = trial.run(mode="eval", model=model, vary=_wide, backward=True, input_gradients=True)
    except UsageError as error:
        trial.reference(mode="eval", backward=True)  # a loss that never works is refused
        raise NotApplicableError(
            f"{error}, in float64: cast the tensors that it holds, target.to(output.dtype)"
        ) from error
    if one.error is not None:
        raise NotApplicableError(f"the model does not run in float64: {one.failure}")
    trial.judge(one, mode="eval", model=model, vary=_wide)

    def loss_at(tensor_name: str | None, path: str | None, direction: Tensor, by: float) -> float:
        def moved(where: str, x: Tensor) -> Tensor:
            x = widened(x)
            return x + by * direction if where == path else x

        parameter = parameters.get(tensor_name or "")
        if parameter is None:
            trace = trial.run(mode="eval", model=model, vary=moved, backward=True, input_gradients=True)
        else:
            before = parameter.detach().clone()
            with torch.no_grad():
                parameter.add_(by * direction)
            trace = trial.run(mode="eval", model=model, vary=moved, backward=True, input_gradients=True)
            with torch.no_grad():
                parameter.copy_(before)
        if trace.error is not None or trace.loss is None:
            raise NotApplicableError(f"the model does not run close by: {trace.failure}")
        return trace.loss.item()

    found: list[tuple[str, str, str]] = []
    looked_at = 0
    at = one.loss.item() if one.loss is not None else 0.0
    inputs = {path: widened(x.detach().to(trial.probe.device)) for path, x in trial.inputs}
    wanted = [(n, None, g) for n, g in one.gradients.items()] + [(None, p, g) for p, g in one.input_gradients.items()]
    for name, path, gradient in wanted:
        known = parameters[name] if name else inputs[path or ""]
        if not known.numel():
            continue
        looked_at += 1
        direction = trial.randn_like(known, f"direction {name or path}")
        direction = direction / direction.norm()
        if gradient is not None and gradient.norm() > 0:
            direction = direction + gradient / gradient.norm()
            direction = direction / direction.norm()
        near = (loss_at(name, path, direction, step) - loss_at(name, path, direction, -step)) / (2 * step)
        exact = 0.0 if gradient is None else (gradient.conj() * direction).sum().real.item()
        scale = max(0.0 if gradient is None else gradient.norm().item(), 1e-6 * max(1.0, abs(at)))
        if not abs(near - exact) <= tolerance * scale:
            found.append((name or path or "", "none" if gradient is None else number(exact), number(near)))
    if not looked_at:
        raise NotApplicableError("nothing has a gradient")
    if not found:
        return count(looked_at, "gradient")
    order = from_the_loss([name for name, *_ in found], one)
    found.sort(key=lambda row: order.index(row[0]))
    name_first, exact_said, near_said = found[0]
    return Break(
        layer=name_first,
        line=f"{name_first} has a wrong gradient: {exact_said}, where the loss grows by {near_said}",
        columns=("of", "gradient", "differences"),
        rows=tuple(found),
        advice="It goes wrong between there and the loss. Look for an autograd.Function with a wrong backward, for "
        ".detach(), .data and no_grad; and for a kink right there, as of a ReLU at 0.",
    )


@check_as_it_is
def optimizer_covers(trial: Trial, *, optimizer: torch.optim.Optimizer) -> Break | str:
    """Check that the optimizer has every parameter that requires a gradient, once, and no other model's.

    Args:
        trial: The model.
        optimizer: The optimizer.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    >>> print(checks.optimizer_covers.outcome(ModelProbe(), model, optimizer=optimizer).layer)
    1.weight
    """
    held = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    named = dict(trial.model.named_parameters())
    missing = [name for name, p in named.items() if p.requires_grad and id(p) not in held]
    if missing:
        return Break(
            layer=missing[0],
            line=f"{missing[0]} is in no group of the optimizer: it is never trained",
            columns=("parameter",),
            rows=tuple((name,) for name in missing),
            advice="Make the optimizer after the model is whole, and on the device where it stays.",
        )
    twice = [name for name, p in named.items() if held[id(p)] > 1]
    if twice:
        return Break(
            layer=twice[0],
            line=f"{twice[0]} is in the optimizer {held[id(named[twice[0]])]} times: each takes a step with it",
            columns=("parameter",),
            rows=tuple((name,) for name in twice),
            advice="Make each group of parameters of what the groups before it have not.",
        )
    foreign = len(held.keys() - {id(p) for p in named.values()})
    if foreign:
        return Break(
            layer="(optimizer)",
            line=f"(optimizer) has {count(foreign, 'tensor')} that the model has not",
            advice="Was a part of the model replaced after the optimizer was made?",
        )
    return count(len(held), "parameter")


@check_as_it_is
def overfits_batch(
    trial: Trial,
    *,
    steps: int = 100,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    below: float = 0.5,
) -> Break | str:
    """Check that training on this one batch brings the loss down: the least that a model has to do.

    Args:
        trial: The model and its inputs, with a loss.
        steps: How many; one or more.
        optimizer: Makes one of the parameters, ``lambda p: torch.optim.SGD(p, 0.1)``; None: Adam with a step of 1e-2.
        below: The share of the first loss that is to be reached, between 0 and 1.

    Raises:
        UsageError: No steps are left to take, or no loss is to be brought down.

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
        raise UsageError(f"below= is a share of the first loss, between 0 and 1; got {below}")
    if not trial.has_loss:
        raise NotApplicableError("without loss= there is nothing to bring down")
    first = last = math.nan
    if trial.inputs and not any(x.numel() for _, x in trial.inputs):
        raise NotApplicableError("the inputs hold nothing")
    parameters = [p for p in trial.model.parameters() if p.requires_grad]
    if not parameters:
        raise NotApplicableError("no parameter requires a gradient")
    with trial.lasting():
        taken = _made(optimizer or (lambda given: torch.optim.Adam(given, 1e-2)), parameters)
        before = {name: p.detach().clone() for name, p in trial.model.named_parameters() if p.requires_grad}
        for done in range(steps + 1):
            trace = _with_gradients(trial, done)
            if trace.in_backward:
                return Break(layer=ROOT, line=f"{ROOT} cannot be trained: in step {done + 1} {trace.failure}")
            assert trace.loss is not None
            if not done:
                trial.judge(trace)
            last = trace.loss.item()
            first = first if done else last
            if not math.isfinite(last):
                return Break(
                    layer=ROOT,
                    line=f"{ROOT} has a loss of {last} after {count(done, 'step')}",
                    advice="Look for a logarithm or a division by 0, and for a step that is too long: give it another "
                    "optimizer=. assert_finite, of a run with this loss, names the layer where it begins.",
                )
            if first <= 0:
                raise NotApplicableError(f"the loss begins at {number(first)}: what share of it to reach is not known")
            if done == steps or (done and last <= below * first):
                break
            _step(taken, functools.partial(_with_gradients, trial, done))
        still = [name for name, p in trial.model.named_parameters() if name in before and torch.equal(p, before[name])]
    moved = f"; {count(len(still), 'parameter')} never moved" if still else ""
    if last <= below * first:
        names = f": {listed(still)}" if still else ""
        return f"loss {number(first)} → {number(last)} in {count(done, 'step')}{moved}{names}"
    name = still[0] if still else ROOT
    return Break(
        layer=name,
        line=f"{name} does not learn one batch: loss {number(first)} → {number(last)} in {count(steps, 'step')}{moved}",
        columns=("never moved",) if still else (),
        rows=tuple((one,) for one in still),
        advice="Look for a part that is detached or frozen, a softmax before a cross entropy, targets that do not go "
        "with the inputs; or give it more steps=, another optimizer=.",
    )


def _made(optimizer: Callable[[Any], torch.optim.Optimizer], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    try:
        made = optimizer(parameters)
    except Exception as error:
        raise UsageError(f"optimizer= raised {line_of(error)}, given a list of parameters") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(f"optimizer= returns a torch.optim.Optimizer; got {type(made).__name__}")
    return made


def _with_gradients(trial: Trial, i: int) -> Trace:
    """Return the run of a step of training, whose gradients are those of the parameters now."""
    trace = trial.run(backward=True, seed=f"step {i}", traced=i == 0)
    if trace.error is not None and not trace.in_backward:
        raise NotApplicableError(f"the model does not run on these inputs: {trace.failure}") from trace.error
    for name, p in trial.model.named_parameters():
        p.grad = trace.gradients.get(name)
    return trace


def _step(optimizer: torch.optim.Optimizer, run: Callable[[], Trace]) -> None:
    """Take a step, with a closure if the optimizer, as LBFGS, cannot do without."""
    wanted: Any = [lambda: run().loss for p in inspect.signature(optimizer.step).parameters.values() if _is_needed(p)]
    try:
        optimizer.step(*wanted)
    except (NotApplicableError, UsageError):
        raise
    except Exception as error:
        name = type(optimizer).__name__
        raise NotApplicableError(f"{name} raised {line_of(error)}: give another optimizer=") from error


def _is_needed(parameter: inspect.Parameter) -> bool:
    named = parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return named and parameter.default is inspect.Parameter.empty


@check_as_it_is
def ema_tracks(trial: Trial, *, average: nn.Module, decay: float, updates: Callable[[], object]) -> Break | str:
    """Check that an averaged model follows: each parameter by ``average += (1 - decay) (model - average)``.

    Each buffer that training changes, a BatchNorm's running statistics say, is averaged so too, or copied. With inputs
    a forward in training mode tells which those are; without, they are the running statistics of norms.

    The model's parameters and those buffers are moved, the average is updated once, and all are put back.

    Args:
        trial: The model that is averaged.
        average: The averaged one: an `AveragedModel` that was updated before, as its first update copies; or a copy.
        decay: Of the average.
        updates: Brings the average up to date.

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
    if dict(average.named_parameters()).keys().isdisjoint(dict(trial.model.named_parameters())):
        inner = getattr(average, "module", average)  # a wrapper
    parameters = dict(trial.model.named_parameters())
    buffers = _changing(trial)
    with preserved(average):
        before = {name: x.detach().clone() for name, x in (*inner.named_parameters(), *inner.named_buffers())}
        with torch.no_grad():
            for name, x in (*parameters.items(), *buffers.items()):
                x.add_(trial.randn_like(x, name) * (1 + x.abs().mean()))  # a share of it, that rounding does not hide
        try:
            updates()
        except Exception as error:
            raise UsageError(f"updates= raised {line_of(error)}") from error
        found: list[tuple[str, str]] = []
        after = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
        for name, x in (*parameters.items(), *buffers.items()):
            then, now = before.get(name), after.get(name)
            if then is None or now is None:
                found.append((name, "is not in the average"))
                continue
            if now.shape != x.shape or then.shape != x.shape:
                found.append((name, "is of another shape in the average"))
                continue
            far = change((1 - decay) * (x.detach() - then), now.detach() - then)
            if not far <= 1e-3 and not (name in buffers and change(x.detach(), now.detach()) <= 1e-3):
                found.append((name, f"takes a step in the average that is {percent(far)} off"))
    if not found:
        return count(len(parameters), "parameter") + (f", {count(len(buffers), 'buffer')}" if buffers else "")
    name, what = found[0]
    return Break(
        layer=name,
        line=f"{name} {what}",
        columns=("parameter", "what"),
        rows=tuple(found),
        advice="Look at which model the average is updated from, and when; and whether buffers are averaged or copied: "
        "AveragedModel(use_buffers=True) averages them, update_bn computes those of a BatchNorm anew.",
    )


def _changing(trial: Trial) -> dict[str, Tensor]:
    """Return the floating buffers that training changes."""
    buffers = {name: x for name, x in trial.model.named_buffers() if x.is_floating_point()}
    if not trial.inputs:
        norms = [n for n, m in trial.model.named_modules() if isinstance(m, BatchOrInstanceNorm)]
        return {name: x for name, x in buffers.items() if name.rpartition(".")[0] in norms}
    with trial.lasting():
        before = {name: x.clone() for name, x in buffers.items()}
        trial.reference(mode="train")
        changed = [name for name, x in buffers.items() if not torch.equal(x, before[name])]
    return {name: buffers[name] for name in changed}
