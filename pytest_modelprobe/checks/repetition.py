"""Whether a run can be repeated: with the same random numbers, with others, in evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe._torch import BatchNorm, Dropout
from pytest_modelprobe.models import Call, CallTracer, seeding
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.report.text import count, listed

from .agreement import Disagreement, broken, change, disagreements
from .check import check
from .outcome import Break, NotApplicableError
from .trial import Trace, Trial, plain


@check
def deterministic(trial: Trial) -> Break | str:
    """Check that two runs with the same inputs and the same random numbers agree bit for bit.

    What breaks it: a layer that draws from a generator of its own, from the clock or from uninitialized memory, and one
    that keeps something from its last forward.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> print(checks.deterministic(ModelProbe(), nn.Linear(2, 2), torch.ones(3, 2)))
    deterministic holds for Linear: 1 output in 2 runs
    """
    one = trial.reference()
    found = disagreements(one, trial.run(), tolerance=0.0, integers=True)
    if not found:
        return f"{count(len(one.outputs), 'output')} in 2 runs"
    return broken(
        found,
        "is not deterministic: {path} {changed} with one seed",
        "Look for a random generator of its own, the clock, uninitialized memory, or something kept of its last "
        "forward.",
    )


@check
def eval_stable(trial: Trial) -> Break | str:
    """Check that in evaluation mode the output does not depend on the random numbers drawn.

    What breaks it: dropout that is on in evaluation mode, as ``F.dropout(x)`` without ``self.training`` is.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> print(checks.eval_stable(ModelProbe(), nn.Dropout(0.5), torch.ones(3, 2)))
    eval_stable holds for Dropout: 1 output in 3 runs, each with other random numbers
    """
    one = trial.reference(mode="eval")
    found: list[Disagreement] = []
    for seed in ("second", "third"):
        found = found or disagreements(one, trial.run(mode="eval", seed=seed), tolerance=0.0, integers=True)
    if not found:
        return f"{count(len(one.outputs), 'output')} in 3 runs, each with other random numbers"
    return broken(
        found,
        "is random in evaluation mode: {path} {changed} with another seed",
        "Look for dropout that does not ask for self.training, or noise that is always added.",
    )


@check
def train_eval_differ(trial: Trial) -> Break | str:
    """Check that dropout is on in training mode and off in evaluation mode, and a BatchNorm goes by the batch in one.

    Each such layer has to give out something else in the other mode. A BatchNorm that stays in evaluation mode and
    whose parameters are frozen is left out: it is meant so.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> print(checks.train_eval_differ(ModelProbe(), nn.Dropout(0.5), torch.ones(3, 2)))
    train_eval_differ holds for Dropout: 1 layer
    >>> print(checks.train_eval_differ.outcome(ModelProbe(), nn.Dropout(0.0), torch.ones(3, 2)))
    train_eval_differ is not applicable to Dropout: no Dropout that drops, and no BatchNorm that keeps statistics
    """
    wanted = [name for name, module in trial.layers.modules.items() if _drops(module) or _gathers(module)]
    if not wanted:
        raise NotApplicableError("no Dropout that drops, and no BatchNorm that keeps statistics")
    with trial.lasting(), _switched(trial, wanted) as on:  # lasting: what an eval() switches off for good stays off
        evaluated = trial.reference(mode="eval")
        on_in_eval = on.copy()
        on.clear()
        train = trial.reference(mode="train")
    there = {given.where: given for given in evaluated.given}
    pairs = [(given, there[given.where]) for given in train.outputs if given.layer in wanted and given.where in there]
    if not pairs:
        raise NotApplicableError(f"{listed(wanted)} {'is' if len(wanted) == 1 else 'are'} never called")
    same = [
        one
        for one, other in pairs
        if (
            (one.layer in on and on[one.layer] == on_in_eval.get(one.layer))
            or (change(one.tensor, other.tensor) == 0 and bool(one.tensor.any()))
        )
        and not (on.get(one.layer) is False and _is_frozen(trial.layers.modules[one.layer]))
    ]
    if not same:
        return count(len({one.layer for one, _ in pairs}), "layer")
    first = same[0]
    return Break(
        layer=first.layer,
        line=f"{first.layer} does the same in training and in evaluation mode",
        columns=("layer", "type"),
        rows=tuple((one.layer, type(trial.layers.modules[one.layer]).__name__) for one in same),
        advice="Look for a train() or eval() that is overridden, and for one that is called in the forward.",
    )


@contextmanager
def _switched(trial: Trial, names: Collection[str]) -> Iterator[dict[str, bool]]:
    """Tell of layers that are called whether they are on: dropout that drops, a norm in training mode."""
    on: dict[str, bool] = {}
    given: dict[str, Tensor] = {}

    def begin(call: Call, args: Any, kwargs: Any) -> None:
        given[call.layer] = plain(args[0].detach().clone()) if args else torch.empty(0)

    def end(call: Call, args: Any, output: Any) -> None:
        name = call.layer
        if not isinstance(call.module, Dropout):
            on[name] = call.module.training
        elif bool(given[name].any()):  # of zeros nothing can be dropped
            on[name] = on.get(name, False) or change(given[name], output) > 0

    with CallTracer({name: trial.layers.modules[name] for name in names}, Call, before=begin, after=end):
        yield on


def _drops(module: nn.Module) -> bool:
    return isinstance(module, Dropout) and 0 < module.p < 1


def _gathers(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and module.track_running_stats


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


@check
def seeded(trial: Trial) -> Break | str:
    """Check that in training mode one seed gives one result, and that two seeds, as of two workers, give two.

    Two seeds may draw alike, as a dropout of 1 % does of few elements: what is compared is how far each layer moves the
    states of the random generators, besides what it gives out.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> print(checks.seeded(ModelProbe(), nn.Dropout(0.5), torch.ones(3, 20)))
    seeded holds for Dropout: 1 layer that draws random numbers
    """
    one = trial.reference(mode="train", seed="one")
    (again, states, dropped), (other, other_states, others_dropped) = (
        _followed(trial, seed) for seed in ("one", "another")
    )
    found = disagreements(one, again, tolerance=0.0, integers=True)
    if found:
        return broken(
            found,
            "does not go by the seed: {path} {changed} with one seed",
            "Look for a random generator of its own, or the clock.",
        )
    for (layer, state), (_, other_state) in zip(states, other_states, strict=False):
        if any(a == b for a, b in zip(state, other_state, strict=True)):
            return Break(
                layer=layer,
                line=f"{layer} seeds the random numbers itself: from there on ranks and workers repeat each other",
                advice="Look for torch.manual_seed, np.random.seed or random.seed in the forward.",
            )
    changed = {d.given.layer for d in disagreements(one, other, tolerance=0.0, integers=True)}
    drawing = {layer for (_, before), (layer, after) in pairwise(states) if before != after}
    dropping = [name for name, module in trial.layers.modules.items() if _drops(module)]
    called = {given.layer for given in one.outputs if bool(given.tensor.any())}
    alike = {
        name
        for name in dropped.keys() & others_dropped.keys()
        if _drop_alike(dropped[name], others_dropped[name], trial.layers.modules[name])
    }
    fixed = [name for name in dropping if name in called and name not in drawing and name not in changed - alike]
    if fixed:
        return Break(
            layer=fixed[0],
            line=f"{fixed[0]} draws the same numbers under any seed: ranks and workers repeat each other",
            columns=("layer",),
            rows=tuple((name,) for name in fixed),
            advice="Look for torch.manual_seed in the forward.",
        )
    # A generator of its own that goes by torch's seed moves no other.
    drawing = drawing or {name for name in changed if trial.layers.is_leaf(name)} or changed
    if not drawing:
        raise NotApplicableError("no layer draws random numbers: there is nothing to check")
    return f"{count(len(drawing), 'layer')} that {'draws' if len(drawing) == 1 else 'draw'} random numbers"


_Dropped = tuple[Tensor, Tensor]
"""Where a dropout was given something, and where it gave out nothing."""


def _drop_alike(one: _Dropped, other: _Dropped, module: nn.Module) -> bool:
    """Whether two runs dropped the same, and would by chance in one of ten million at most."""
    assert isinstance(module, nn.Dropout)
    if one[0].shape != other[0].shape:
        return False
    both = one[0] & other[0]
    chance = int(both.sum()) * math.log(module.p**2 + (1 - module.p) ** 2)
    return chance < -16 and torch.equal(one[1][both], other[1][both])


def _followed(trial: Trial, seed: str) -> tuple[Trace, list[tuple[str, tuple[bytes, ...]]], dict[str, _Dropped]]:
    """Return a run in training mode, the states of the generators after each piece of code, and what was dropped."""
    states: list[tuple[str, tuple[bytes, ...]]] = []
    dropped: dict[str, _Dropped] = {}

    def begin(call: Call, args: Any, kwargs: Any) -> None:
        around = ROOT if call.parent is None else call.parent.layer
        states.append((around, seeding.generator_states(trial.probe.device)))

    def end(call: Call, args: Any, output: Any) -> None:
        states.append((call.layer, seeding.generator_states(trial.probe.device)))
        if isinstance(call.module, nn.Dropout) and args and _drops(call.module):
            dropped[call.layer] = args[0] != 0, output == 0

    with CallTracer(trial.layers.modules, Call, before=begin, after=end):
        return trial.reference(mode="train", seed=seed), states, dropped
