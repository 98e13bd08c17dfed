"""Whether a run can be repeated: with the same seed, with other seeds, in evaluation mode.

A result that cannot be repeated cannot be compared, and workers that draw the same numbers train on less than it seems.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe._torch import BatchNorm, Dropout
from pytest_modelprobe.models import CallTracer, ModuleCall, has_dense_storage, seeding
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.runs import Mode
from pytest_modelprobe.text import count, listed

from .check import check
from .machinery.agreement import Disagreement, disagreements, violation_of
from .machinery.rounding import plain, relative_error
from .outcome import NotApplicableError, Violation
from .session import PreparedModel, Trace, copy_of


@check
def deterministic(prepared: PreparedModel) -> Violation | str:
    """Check that two runs with the same inputs and the same random numbers agree bit for bit.

    It is broken by a layer that uses a generator of its own, the clock or uninitialized memory, or that keeps state of
    its last forward.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> print(checks.deterministic(ModelProbe(), nn.Linear(2, 2), torch.ones(3, 2)))
    deterministic holds for Linear: 1 output in 2 runs
    """
    one = prepared.reference()
    found = disagreements(one, prepared.run(), tolerance=0.0, integers=True)
    if not found:
        return f"{count(len(one.outputs), 'output')} in 2 runs"
    return violation_of(
        found,
        "is not deterministic: {path} {changed} between two runs with the same seed",
        "Look for a random generator of its own, the clock, uninitialized memory, or state that it keeps of its last "
        "forward.",
    )


_MORE_SEEDS = 50
"""Three runs rarely show a path that is dropped with a probability of 5 %. So many show it in all but 1 of 13 cases."""


@check
def eval_stable(prepared: PreparedModel) -> Violation | str:
    """Check that in evaluation mode the output does not depend on the random numbers drawn.

    It is broken by dropout that is active in evaluation mode, as in ``F.dropout(x)`` without ``self.training``. A model
    that draws random numbers runs with up to 50 more seeds: a path that is dropped rarely may stay in the first ones.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> print(checks.eval_stable(ModelProbe(), nn.Dropout(0.5), torch.ones(3, 2)))
    eval_stable holds for Dropout: 1 output in 3 runs, each with other random numbers
    """
    one = prepared.reference(mode="eval")
    seeds = ["second", "third"]
    _, states, _ = _followed(prepared, "run", "eval")
    if any(state != states[0][1] for _, state in states):  # it draws
        seeds += [f"further {i}" for i in range(_MORE_SEEDS)]
    found: list[Disagreement] = []
    for seed in seeds:
        found = found or disagreements(one, prepared.run(mode="eval", seed=seed), tolerance=0.0, integers=True)
    if not found:
        return f"{count(len(one.outputs), 'output')} in {len(seeds) + 1} runs, each with other random numbers"
    return violation_of(
        found,
        "is random in evaluation mode: {path} {changed} with another seed",
        "Look for dropout that ignores self.training, or noise that is always added.",
    )


@check
def train_eval_differ(prepared: PreparedModel) -> Violation | str:
    """Check that dropout and batch statistics are used in training mode and not in evaluation mode.

    Each such layer has to return another output in the other mode. A BatchNorm that stays in evaluation mode and whose
    parameters are frozen is left out, as this is intended.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> print(checks.train_eval_differ(ModelProbe(), nn.Dropout(0.5), torch.ones(3, 2)))
    train_eval_differ holds for Dropout: 1 layer
    >>> print(checks.train_eval_differ.outcome(ModelProbe(), nn.Dropout(0.0), torch.ones(3, 2)))
    train_eval_differ is not applicable to Dropout: no Dropout with 0 < p < 1, and no BatchNorm with running statistics
    """
    wanted = [name for name, module in prepared.layers.modules.items() if _drops(module) or _gathers(module)]
    if not wanted:
        raise NotApplicableError("no Dropout with 0 < p < 1, and no BatchNorm with running statistics")
    # A model whose eval() switches something off for good is to stay so.
    with prepared.keep_changes(), _switched(prepared, wanted) as on:
        evaluated = prepared.reference(mode="eval")
        on_in_eval = on.copy()
        on.clear()
        train = prepared.reference(mode="train")
    there = {given.where: given for given in evaluated.tensors}
    pairs = [(given, there[given.where]) for given in train.outputs if given.layer in wanted and given.where in there]
    if not pairs:
        raise NotApplicableError(f"{listed(wanted)} {'is' if len(wanted) == 1 else 'are'} never called")
    same = [
        one
        for one, other in pairs
        if (
            (one.layer in on and on[one.layer] == on_in_eval.get(one.layer))
            or (relative_error(one.tensor, other.tensor) == 0 and bool(one.tensor.any()))
        )
        and not (on.get(one.layer) is False and _is_frozen(prepared.layers.modules[one.layer]))
    ]
    if not same:
        return count(len({one.layer for one, _ in pairs}), "layer")
    return Violation.first_of(
        ((one.layer, type(prepared.layers.modules[one.layer]).__name__) for one in same),
        "does the same in training and in evaluation mode",
        columns=("layer", "type"),
        advice="Look for an overridden train() or eval(), and for calls of them in the forward.",
    )


@contextmanager
def _switched(prepared: PreparedModel, names: Collection[str]) -> Iterator[dict[str, bool]]:
    """Record which of the called layers are active: dropout that drops, a norm in training mode."""
    on: dict[str, bool] = {}
    given: dict[str, Tensor] = {}

    def begin(call: ModuleCall, args: Any, kwargs: Any) -> None:
        given[call.layer] = plain(copy_of(args[0])) if args else torch.empty(0)

    def end(call: ModuleCall, args: Any, output: Any) -> None:
        name = call.layer
        if not isinstance(call.module, Dropout):
            on[name] = call.module.training
        elif bool(given[name].any()):  # in zeros no dropout can be seen
            on[name] = on.get(name, False) or relative_error(given[name], output) > 0

    with CallTracer({name: prepared.layers.modules[name] for name in names}, ModuleCall, before=begin, after=end):
        yield on


def _drops(module: nn.Module) -> bool:
    return isinstance(module, Dropout) and 0 < module.p < 1


def _gathers(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and module.track_running_stats


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(nn.Module.parameters(module))
    return bool(parameters) and not any(p.requires_grad for p in parameters)


@check
def seeded(prepared: PreparedModel) -> Violation | str:
    """Check that in training mode equal seeds give equal outputs, and different seeds, as of two workers, do not.

    Two seeds may draw alike, as with a dropout of 1 % on few elements. Therefore the states of the random generators
    after each layer are compared too.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> print(checks.seeded(ModelProbe(), nn.Dropout(0.5), torch.ones(3, 20)))
    seeded holds for Dropout: 1 layer that draws random numbers
    """
    one = prepared.reference(mode="train", seed="one")
    (again, states, dropped), (other, other_states, others_dropped) = (
        _followed(prepared, seed, "train") for seed in ("one", "another")
    )
    found = disagreements(one, again, tolerance=0.0, integers=True)
    if found:
        return violation_of(
            found,
            "ignores the seed: {path} {changed} between two runs with the same seed",
            "Look for a random generator of its own, or the clock.",
        )
    for (layer, state), (_, other_state) in zip(states, other_states, strict=False):
        if any(a == b for a, b in zip(state, other_state, strict=True)):
            return Violation.at(
                layer,
                "sets the random seed itself: ranks and workers then draw the same numbers",
                advice="Look for torch.manual_seed, np.random.seed or random.seed in the forward.",
            )
    changed = {d.layer_tensor.layer for d in disagreements(one, other, tolerance=0.0, integers=True)}
    drawing = {layer for (_, before), (layer, after) in pairwise(states) if before != after}
    dropping = [name for name, module in prepared.layers.modules.items() if _drops(module)]
    called = {given.layer for given in one.outputs if bool(given.tensor.any())}
    alike = {
        name
        for name in dropped.keys() & others_dropped.keys()
        if _drop_alike(dropped[name], others_dropped[name], prepared.layers.modules[name])
    }
    fixed = [name for name in dropping if name in called and name not in drawing and name not in changed - alike]
    if fixed:
        return Violation.first_of(
            ((name,) for name in fixed),
            "draws the same numbers under every seed: ranks and workers draw the same numbers",
            columns=("layer",),
            advice="Look for torch.manual_seed in the forward.",
        )
    # A generator of its own that is seeded from torch's seed does not advance the global ones.
    drawing = drawing or {name for name in changed if prepared.layers.is_leaf(name)} or changed
    if not drawing:
        raise NotApplicableError("no layer draws random numbers: there is nothing to check")
    return f"{count(len(drawing), 'layer')} that {'draws' if len(drawing) == 1 else 'draw'} random numbers"


_Dropped = tuple[Tensor, Tensor]
"""Masks of the nonzero inputs, and of the zero outputs, of a dropout."""


def _drop_alike(one: _Dropped, other: _Dropped, module: nn.Module) -> bool:
    """Whether two runs dropped the same elements, which has a probability of at most one in ten million by chance."""
    assert isinstance(module, nn.Dropout)
    if one[0].shape != other[0].shape:
        return False
    both = one[0] & other[0]
    chance = int(both.sum()) * math.log(module.p**2 + (1 - module.p) ** 2)
    return chance < -16 and torch.equal(one[1][both], other[1][both])


def _followed(
    prepared: PreparedModel, seed: str, mode: Mode
) -> tuple[Trace, list[tuple[str, tuple[bytes, ...]]], dict[str, _Dropped]]:
    """Return a run, the generator states at each begin and end of a call, and what was dropped."""
    states: list[tuple[str, tuple[bytes, ...]]] = []
    dropped: dict[str, _Dropped] = {}

    def begin(call: ModuleCall, args: Any, kwargs: Any) -> None:
        around = ROOT if call.parent is None else call.parent.layer
        states.append((around, seeding.generator_states(prepared.probe.device)))

    def end(call: ModuleCall, args: Any, output: Any) -> None:
        states.append((call.layer, seeding.generator_states(prepared.probe.device)))
        if isinstance(call.module, nn.Dropout) and args and _drops(call.module) and has_dense_storage(args[0]):
            dropped[call.layer] = args[0] != 0, output == 0

    with CallTracer(prepared.layers.modules, ModuleCall, before=begin, after=end):
        return prepared.reference(mode=mode, seed=seed), states, dropped
