"""Whether a run is finite, can be repeated, and what the mode of the model changes.

A result that cannot be repeated cannot be compared, and workers that draw the same numbers train on less than it seems.
Dropout and batch norms make training and evaluation differ on purpose: `modes_agree` makes them act alike, so that what
still differs is an error.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from pytest_modelprobe._torch import BatchNorm, Dropout
from pytest_modelprobe.comparison import explained
from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.models import (
    CallTracer,
    Flat,
    ModuleCall,
    flatten,
    flatten_call,
    has_dense_storage,
    map_tensors,
    seeding,
    version,
)
from pytest_modelprobe.record import ROOT, Operation, containers
from pytest_modelprobe.runs import Mode, find_gradient_origin
from pytest_modelprobe.text import count, listed

from .agreement import Disagreement, changed, check_repeats, disagreements, not_finite, violation_of
from .check import check, check_nonfinite
from .outcome import NotApplicableError, Violation
from .rounding import limit, plain, relative_error, same
from .session import PreparedModel, Trace, copy_of, set_mode

_MODES: tuple[tuple[Literal["eval", "train"], str], ...] = (("eval", "evaluation"), ("train", "training"))


@check_nonfinite
def finite(prepared: PreparedModel) -> Violation | str:
    """Check that outputs and gradients of parameters are finite, in evaluation and in training mode.

    NaN breaks it, and an infinity that the model computes. Other infinities are accepted: a constant, as in
    ``masked_fill(mask, -inf)``, one in a buffer or an input, and the logarithm of a mask of zeros and ones. Values
    inside the model that do not reach the output may be NaN or infinite.

    Every other check is not applicable to a model that breaks it, because NaN agrees with NaN.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> print(checks.finite(ModelProbe(), nn.Linear(2, 2), torch.ones(3, 2)))
    finite holds for Linear: 1 output and 2 gradients in evaluation and training mode
    >>> print(checks.finite.outcome(ModelProbe(), nn.Threshold(9.0, float("nan")), torch.ones(3, 2)).layer)
    (root)
    """
    looked_at, refused, gradients = [], [], 0
    outputs = 0
    for mode, said in _MODES:
        try:
            trace = prepared.reference(mode=mode)
        except NotApplicableError as reason:
            refused.append(reason)
            continue
        found = not_finite(prepared, trace, {"mode": mode})
        if found is not None:
            return found
        try:
            backward = prepared.reference(mode=mode, backward=True)
        except NotApplicableError:  # frozen, say
            backward = trace
        found = not_finite(prepared, backward, {"mode": mode, "backward": True})
        if found is not None:
            origin = _gradient_origin(prepared, mode) if found.layer in backward.gradients else None
            return dataclasses.replace(found, line=f"{found.line}, from {origin}") if origin else found
        looked_at.append(said)
        outputs, gradients = len(trace.final), max(gradients, len(backward.arrived))
    if not looked_at:
        raise refused[0]
    found_in = f"{count(outputs, 'output')} and {count(gradients, 'gradient')} in {listed(looked_at)} mode"
    return f"{found_in}; {refused[0]}" if refused else found_in


def _gradient_origin(prepared: PreparedModel, mode: Literal["eval", "train"]) -> Operation | None:
    """Return the operation whose backward first returned a value that is not finite, if it can be reproduced."""

    def make_loss() -> Tensor:
        args, kwargs = prepared.copied_inputs()
        return prepared.loss(prepared.model.train(mode == "train")(*args, **kwargs))

    seeds = seeding.seeded(seeding.derive(prepared.probe.seed, "check run"))
    try:
        with prepared.keep_changes(), seeds, torch.enable_grad():
            return find_gradient_origin(make_loss)
    except RuntimeError:  # a graph that cannot be looked into, as of reentrant checkpoints
        return None


_NOT_SEEDED = "Look for a random generator of its own, the clock, uninitialized memory, or state of its last forward."


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
        " ".join([*explained("run", prepared.run), _NOT_SEEDED]),
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

    Each such layer has to be active in training alone: a dropout drops, a norm is in training mode. A BatchNorm that
    stays in evaluation mode and whose parameters are frozen is left out, as this is intended.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> print(checks.train_eval_differ(ModelProbe(), nn.Dropout(0.5), torch.ones(3, 2)))
    train_eval_differ holds for Dropout: 1 layer
    >>> print(checks.train_eval_differ.outcome(ModelProbe(), nn.Dropout(0.0), torch.ones(3, 2)))
    train_eval_differ is not applicable to Dropout: no Dropout with 0 < p < 1, and no BatchNorm with running statistics
    """
    wanted = [
        name
        for name, module in prepared.layers.modules.items()
        if (isinstance(module, Dropout) and 0 < module.p < 1)
        or (isinstance(module, BatchNorm) and module.track_running_stats)
    ]
    if not wanted:
        raise NotApplicableError("no Dropout with 0 < p < 1, and no BatchNorm with running statistics")
    # A model whose eval() switches something off for good is to stay so.
    with prepared.keep_changes(), _switched(prepared, wanted) as on:
        prepared.reference(mode="eval")
        on_in_eval = on.copy()
        on.clear()
        prepared.reference(mode="train")
    looked_at = [name for name in on if name in on_in_eval]
    if not looked_at:
        raise NotApplicableError(f"{listed(wanted)} {'is' if len(wanted) == 1 else 'are'} never called, or with zeros")
    same = []
    for name in looked_at:
        parameters = list(nn.Module.parameters(prepared.layers.modules[name]))
        frozen = bool(parameters) and not any(p.requires_grad for p in parameters)
        if on[name] == on_in_eval[name] and (on[name] or not frozen):
            same.append(name)
    if not same:
        return count(len(looked_at), "layer")
    return Violation.first_of(
        ((name, type(prepared.layers.modules[name]).__name__) for name in same),
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
    drawing = {layer for (_, before), (layer, after) in pairwise(states) if before != after}
    fixed = []
    for name in [name for name in dropped if name in others_dropped and name not in drawing]:
        (given, zero), (other_given, other_zero) = dropped[name], others_dropped[name]
        if given.shape == other_given.shape and torch.equal(zero[both := given & other_given], other_zero[both]):
            p = float(cast(nn.Dropout, prepared.layers.modules[name]).p)
            if (p * p + (1 - p) ** 2) ** int(both.sum()) < _BY_CHANCE:
                fixed.append(name)
    if fixed:
        return Violation.first_of(
            ((name,) for name in fixed),
            "draws the same numbers under every seed: ranks and workers draw the same numbers",
            columns=("layer",),
            advice="Look for torch.manual_seed in the forward.",
        )
    # A generator of its own that is seeded from torch's seed does not advance the global ones.
    drawing = drawing or {d.layer_tensor.layer for d in disagreements(one, other, tolerance=0.0, integers=True)}
    if not drawing:
        raise NotApplicableError("no layer draws random numbers: there is nothing to check")
    return f"{count(len(drawing), 'layer')} that {'draws' if len(drawing) == 1 else 'draw'} random numbers"


_Dropped = tuple[Tensor, Tensor]
"""Masks of the nonzero inputs, and of the zero outputs, of a dropout that dropped something."""


_BY_CHANCE = 1e-7
"""The probability below which two dropouts that drop the same elements do not so by chance."""


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
        if isinstance(call.module, nn.Dropout) and 0 < call.module.p < 1 and args and has_dense_storage(args[0]):
            given, zero = args[0] != 0, output == 0
            if (given & zero).any():
                dropped[call.layer] = given, zero

    with CallTracer(prepared.layers.modules, ModuleCall, before=begin, after=end):
        return prepared.reference(mode=mode, seed=seed), states, dropped


_ADVICE = (
    "Look at how its forward, train() or eval() depends on self.training: merged weights, a scale, a branch of one "
    "mode."
)


class _Run:
    """A run: what each call took and returned.

    Args:
        prepared: The model and its inputs.
        mode: Mode of the model.
        stand_in: A run whose outputs replace those of layers that are random, or use statistics of the batch.
    """

    def __init__(self, prepared: PreparedModel, mode: Mode, stand_in: _Run | None = None) -> None:
        self.inputs: dict[tuple[str, int], Flat] = {}
        """By layer and number of the call, in the order in which they returned."""
        self.outputs: dict[tuple[str, int], Any] = {}
        self.excluded: set[str] = set()
        """Layers whose own code drew random numbers or wrote into their parameters or buffers."""
        self._stand_in = {} if stand_in is None else stand_in.outputs
        self._model, self._device = prepared.model, prepared.probe.device
        self._states = seeding.generator_states(self._device)
        self._before: dict[int, Tensor] = {}
        with CallTracer(prepared.layers.modules, _RandomCall, before=self._begin, after=self._end):
            prepared.reference(mode=mode)

    def _note_draws(self, running: _RandomCall | None) -> None:
        """Note in the running call whether its own code drew since the last time."""
        before, self._states = self._states, seeding.generator_states(self._device)
        if running is not None:
            running.drew |= before != self._states

    def _begin(self, call: _RandomCall, args: Any, kwargs: Any) -> None:
        if call.parent is None:  # after eval(), which may write too
            tensors = (*nn.Module.parameters(self._model), *nn.Module.buffers(self._model))
            self._before = {id(t): t.detach().clone() for t in tensors}
        given = flatten_call(args, kwargs)
        call.originals = [(x, version(x)) for _, x in given.tensors]
        given.tensors = [(path, copy_of(x)) for path, x in given.tensors]
        call.given = given
        self._note_draws(call.parent)

    def _end(self, call: _RandomCall, args: Any, output: Any) -> Any:
        self._note_draws(call)
        name, key = call.layer, (call.layer, call.index)
        own = [t for t in (*call.module._parameters.values(), *call.module._buffers.values()) if t is not None]
        if call.drew or any(not same(t, self._before.get(id(t))) for t in own if t.is_floating_point()):
            self.excluded.add(name)
        replaced = key in self._stand_in and name in self.excluded
        if replaced:
            output = self._stand_in[key]
            for (x, before), (_, copy) in zip(call.originals, call.given.tensors, strict=True):
                if version(x) != before:  # noise that is added in place
                    x.copy_(copy)
        self.inputs[key] = call.given
        self.outputs[key] = map_tensors(copy_of, output)
        return map_tensors(torch.clone, output) if replaced else None


@dataclass(slots=True, eq=False)
class _RandomCall(ModuleCall):
    """A call, with what it was given."""

    parent: _RandomCall | None
    given: Any = None
    originals: Any = ()
    drew: bool = False
    """Whether its own code drew random numbers."""


@check
def modes_agree(prepared: PreparedModel, *, tolerance: float | None = None) -> Violation | str:
    """Check that a forward in training mode returns the same as in evaluation mode, apart from randomness.

    The output of a layer that draws random numbers, as dropout does, or that updates statistics, as a BatchNorm does,
    is replaced by its output in evaluation mode; the outcome names these layers. The others are compared where their
    inputs are the same in both modes and their output has the same structure. Single numbers that are 0 in evaluation
    mode are left out, as a loss of training alone is. Then eval() is called twice in a row, and eval() and train():
    neither may change the output.

    Args:
        prepared: The model and its inputs.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe, model = ModelProbe(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    >>> print(checks.modes_agree(probe, model, probe.randn(4, 3)))
    modes_agree holds for Sequential: 2 layers; left out: 1 and 2, random or with statistics of their own
    """
    evaluated = _Run(prepared, "eval")
    train = _Run(prepared, "train", evaluated)
    found, looked_at = _differences(evaluated, train, tolerance)
    whole = looked_at - {name for name, *_ in found}
    whole -= {around for name in train.excluded for around in containers(name)}
    if any(whole.isdisjoint(containers(name)) for name, *_ in found):
        return _broken(prepared, found, "in training mode than in evaluation mode, without randomness")
    excluded = sorted(train.excluded)
    if not looked_at:
        raise NotApplicableError(f"{listed(excluded) or 'each layer'} cannot be compared between the modes")
    orders: list[tuple[list[Mode], _Run]] = [(["eval", "eval"], evaluated), (["train", "eval", "train"], train)]
    for modes, before in orders:
        with prepared.keep_changes():
            for mode in modes[:-1]:
                set_mode(prepared.model, mode)
            again = _Run(prepared, modes[-1], evaluated)
        later, _ = _differences(before, again, tolerance)
        if later:
            order = ", ".join(f"{mode}()" for mode in modes)
            return _broken(prepared, later, f"after {order} than after {modes[-1]}() alone")
    left = f"; left out: {listed(excluded)}, random or with statistics of their own" if excluded else ""
    called = dict.fromkeys(name for name, _ in train.outputs)
    others = [name for name in called if name not in looked_at and name not in excluded]
    left += f"; not compared: {listed(others)}, called otherwise or with other outputs" if others else ""
    if found:
        layer, path, far = found[0]
        left += f"; layers inside differ, but those around them agree: first {layer} {path}, {changed(far)}"
    return f"{count(len(looked_at), 'layer')}{left}"


_Difference = tuple[str, str, float]
"""A layer, the path of an output, and its relative error."""


def _broken(prepared: PreparedModel, found: list[_Difference], when: str) -> Violation:
    for mode in ("eval", "train"):
        check_repeats(prepared, mode)
    layer, path, far = found[0]
    return Violation.at(
        layer,
        f"computes something else from the same inputs {when}: {path} {changed(far)}",
        columns=("tensor", "changed by"),
        rows=tuple((f"{name} {where}", percent(by)) for name, where, by in found),
        advice=_ADVICE,
    )


def _differences(one: _Run, other: _Run, tolerance: float | None) -> tuple[list[_Difference], set[str]]:
    """Return the differences for equal inputs, and the layers compared."""
    found: list[_Difference] = []
    looked_at: set[str] = set()
    calls, others_calls = (Counter(name for name, _ in run.outputs) for run in (one, other))
    for key, output in other.outputs.items():
        layer = key[0]
        excluded = layer in one.excluded | other.excluded or calls[layer] != others_calls[layer]
        if excluded or not _same(one.inputs[key], other.inputs[key]):
            continue
        before, now = (
            {path: plain(x) for path, x in flatten("output", given).tensors} for given in (one.outputs[key], output)
        )
        common = [path for path in before if path in now and now[path].is_floating_point()]
        common = [path for path in common if before[path].numel() > 1 or before[path].any()]
        if not common or any(before[path].shape != now[path].shape for path in common):
            continue
        looked_at.add(layer)
        changes = [(layer, path, relative_error(before[path], now[path])) for path in common]
        found += [(layer, path, by) for layer, path, by in changes if not by <= limit(before[path], tolerance)]
    return found, looked_at


def _same(one: Flat, other: Flat) -> bool:
    """Whether two calls had equal arguments, up to rounding."""
    if one.plain != other.plain or [path for path, _ in one.tensors] != [path for path, _ in other.tensors]:
        return False
    pairs = [(x, y) for (_, x), (_, y) in zip(one.tensors, other.tensors, strict=True)]
    return all(relative_error(x, y) <= (limit(x) if x.is_floating_point() else 0.0) for x, y in pairs)
