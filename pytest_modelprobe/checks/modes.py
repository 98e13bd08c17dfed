"""Training and evaluation mode: equal outputs without randomness, equal means with it.

Dropout and batch norms make the two modes differ on purpose. They are made to act alike, so that what still differs is
an error. Dropout that a layer has written itself is measured over many calls.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.models import (
    CallTracer,
    Flat,
    ModuleCall,
    flatten,
    flatten_call,
    map_tensors,
    seeding,
)
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.runs import Mode
from pytest_modelprobe.text import count, listed

from .check import check
from .machinery.agreement import changed, check_repeats
from .machinery.rounding import limit, plain, relative_error
from .outcome import NotApplicableError, Violation
from .session import PreparedModel, copy_of, set_mode

_ADVICE = (
    "Look at how its forward, train() or eval() depends on self.training: merged weights, a scale, a branch of one "
    "mode."
)


class _AsInEvaluation(TorchFunctionMode):
    """Calls the functions of torch that have a training mode, dropout and norms, in evaluation mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        switch = _SWITCHES.get(func)
        if switch is not None:
            args, kwargs = switch(args, kwargs)
        return func(*args, **kwargs)


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _setting(function: Callable[..., Any], **values: Any) -> Callable[[Any, Any], _Arguments]:
    """Return a function that sets arguments; those of norms only if there are running statistics."""
    names = list(inspect.signature(function).parameters)

    def switched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        given = dict(zip(names, args, strict=False)) | kwargs
        if "running_mean" in names and given.get("running_mean") is None:
            return args, kwargs
        return (), given | values

    return switched


def _without_dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """Return the arguments of `scaled_dot_product_attention`, which has no signature, without its dropout."""
    return (*args[:4], *(0.0 for _ in args[4:5]), *args[5:]), kwargs | ({"dropout_p": 0.0} if len(args) < 5 else {})


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu")

_SWITCHES: dict[Any, Callable[[Any, Any], _Arguments]] = {
    **{getattr(F, name): _setting(getattr(F, name), training=False) for name in _DROPOUTS},
    F.multi_head_attention_forward: _setting(F.multi_head_attention_forward, dropout_p=0.0),
    F.batch_norm: _setting(F.batch_norm, training=False),
    F.instance_norm: _setting(F.instance_norm, use_input_stats=False),
    F.scaled_dot_product_attention: _without_dropout,
}


_Key = tuple[str, int]
"""A layer, and the index of the call."""


@dataclass(slots=True, eq=False)
class _Run:
    """Inputs and outputs of each call of each layer, in the order in which they returned."""

    inputs: dict[_Key, Flat] = field(default_factory=dict)
    outputs: dict[_Key, Any] = field(default_factory=dict)
    excluded: set[str] = field(default_factory=set)
    """Layers whose own code drew random numbers or wrote into their parameters or buffers."""
    losses: dict[str, None] = field(default_factory=dict)
    """Outputs of one number that is 0 in the run that stands in: a loss that exists in training alone."""

    @property
    def calls(self) -> Counter[str]:
        """Number of calls of each layer."""
        return Counter(name for name, _ in self.outputs)


@check
def modes_agree(prepared: PreparedModel, *, tolerance: float | None = None) -> Violation | str:
    """Check that a forward in training mode returns the same as in evaluation mode, apart from randomness.

    Dropout of torch is off in both, and a BatchNorm uses its running statistics. The output of a layer that draws
    random numbers in other ways, or updates statistics of its own, is replaced by its output in evaluation mode.
    So is a single number that is 0 in evaluation mode, which is a loss of training.
    A layer is compared where its inputs are the same in both modes and its output has the same structure. A difference
    that the code around a layer compensates, as for a weight that is merged for evaluation, is only mentioned. Then
    eval() is called twice in a row, and eval() and train(): neither may change the output.

    Args:
        prepared: The model and its inputs.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe, model = ModelProbe(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    >>> print(checks.modes_agree(probe, model, probe.randn(4, 3)))
    modes_agree holds for Sequential: 4 layers
    """
    evaluated = _run(prepared, "eval")
    train = _run(prepared, "train", stand_in=evaluated)
    found, looked_at, inside = _differences(evaluated, train, tolerance)
    if found:
        return _broken(prepared, found, "in training mode than in evaluation mode, without randomness")
    if not looked_at:
        raise NotApplicableError(
            f"{listed(sorted(train.excluded)) or 'each layer'} cannot be compared between the modes"
        )
    orders: list[tuple[list[Mode], _Run]] = [(["eval", "eval"], evaluated), (["train", "eval", "train"], train)]
    for modes, before in orders:
        with prepared.keep_changes():
            for mode in modes[:-1]:
                set_mode(prepared.model, mode)
            again = _run(prepared, modes[-1], stand_in=evaluated)
        found, _, _ = _differences(before, again, tolerance)
        if found:
            order = ", ".join(f"{mode}()" for mode in modes)
            return _broken(prepared, found, f"after {order} than after {modes[-1]}() alone")
    excluded = sorted(train.excluded & {name for name, _ in train.outputs})
    left = f"; left out: {listed(excluded)}, random or with statistics of their own" if excluded else ""
    called = dict.fromkeys(name for name, _ in train.outputs)
    others = [name for name in called if name not in looked_at and name not in excluded]
    left += f"; not compared: {listed(others)}, called otherwise or with other outputs" if others else ""
    left += f"; not compared: {listed(list(train.losses))}, 0 in evaluation mode" if train.losses else ""
    return f"{count(len(looked_at), 'layer')}{left}{_inside_note(inside)}"


def _inside_note(inside: list[_Difference]) -> str:
    """Return the end of a sentence about layers that agree while others inside them differ."""
    if not inside:
        return ""
    layer, path, far = inside[0]
    return f"; layers inside differ, but those around them agree: first {layer} {path}, {changed(far)}"


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


def _differences(
    one: _Run, other: _Run, tolerance: float | None
) -> tuple[list[_Difference], set[str], list[_Difference]]:
    """Return the differences for equal inputs, the layers compared, and differences that code around compensates."""
    found: list[_Difference] = []
    excluded = one.excluded | other.excluded
    calls, others_calls = one.calls, other.calls
    compared, alike = Counter[str](), Counter[str]()
    for key, output in other.outputs.items():
        layer = key[0]
        if layer in excluded or calls[layer] != others_calls[layer] or not _same(one.inputs[key], other.inputs[key]):
            continue
        before, now = (
            {path: plain(x) for path, x in flatten("output", given).tensors} for given in (one.outputs[key], output)
        )
        common = [path for path in before if path in now and now[path].is_floating_point()]
        if not common or any(before[path].shape != now[path].shape for path in common):
            continue
        changes = [(layer, path, relative_error(before[path], now[path])) for path in common]
        differ = [(layer, path, by) for layer, path, by in changes if not by <= limit(before[path], tolerance)]
        found += differ
        compared[layer] += 1
        alike[layer] += not differ and before.keys() == now.keys()
    # A layer with a replaced output inside it shows nothing about the others.
    sound = {layer for layer in alike if alike[layer] == calls[layer] and not any(_within(n, layer) for n in excluded)}
    inside = [one for one in found if any(_within(one[0], layer) for layer in sound)]
    return [one for one in found if one not in inside], set(compared), inside


def _within(name: str, layer: str) -> bool:
    """Whether a layer is another, or inside it."""
    return layer == ROOT or name == layer or name.startswith(f"{layer}.")


def _same(one: Flat, other: Flat) -> bool:
    """Whether two calls had equal arguments, up to rounding."""
    if one.plain != other.plain or [path for path, _ in one.tensors] != [path for path, _ in other.tensors]:
        return False
    pairs = [(x, y) for (_, x), (_, y) in zip(one.tensors, other.tensors, strict=True)]
    return all(relative_error(x, y) <= (limit(x) if x.is_floating_point() else 0.0) for x, y in pairs)


def _run(prepared: PreparedModel, mode: Mode, *, stand_in: _Run | None = None) -> _Run:
    """Return a run without dropout of torch and with the running statistics of norms.

    Args:
        prepared: The model and its inputs.
        mode: Mode of the model.
        stand_in: A run whose outputs replace those of layers that are random in another way.
    """
    run = _Run()
    watcher = _DrawDetector(prepared)

    def begin(call: _RandomCall, args: Any, kwargs: Any) -> None:
        given = flatten_call(args, kwargs)
        originals = [x for _, x in given.tensors]
        given.tensors = [(path, copy_of(x)) for path, x in given.tensors]
        call.arguments = originals, given
        watcher.drew(call.parent)

    def end(call: _RandomCall, args: Any, output: Any) -> Any:
        watcher.drew(call)
        name = call.layer
        originals, given = call.arguments
        key = name, run.calls[name]
        if call.drew or watcher.written(call.module):
            run.excluded.add(name)
        replaced = stand_in is not None and name in run.excluded and key in stand_in.outputs
        if stand_in is not None and replaced:
            output = stand_in.outputs[key]
            for x, (_, before) in zip(originals, given.tensors, strict=True):
                if not torch.equal(x, before):  # noise that is added in place
                    x.copy_(before)
        elif stand_in is not None and key in stand_in.outputs:
            before = dict(flatten("output", stand_in.outputs[key]).tensors)
            now = {path: x for path, x in flatten("output", output).tensors if path in before and x.numel() == 1}
            zeros = {
                id(x): before[path]
                for path, x in now.items()
                if before[path].numel() == 1 and x.any() and not before[path].any()
            }
            run.losses.update((f"{name} {path}", None) for path, x in now.items() if id(x) in zeros)
            output, replaced = map_tensors(lambda x: zeros.get(id(x), x), output), bool(zeros)
        run.inputs[key] = given
        run.outputs[key] = map_tensors(copy_of, output)
        return map_tensors(torch.clone, output) if replaced else None

    # Before all other hooks, of which some write into a weight, and after eval(), which may too.
    handle = prepared.layers.modules[ROOT].register_forward_pre_hook(
        lambda *_: watcher.note_versions(prepared.model), prepend=True
    )
    try:
        with CallTracer(prepared.layers.modules, _RandomCall, before=begin, after=end), _AsInEvaluation():
            prepared.reference(mode=mode)
    finally:
        handle.remove()
    return run


@dataclass(slots=True, eq=False)
class _RandomCall(ModuleCall):
    """A call, with whether it draws random numbers."""

    parent: _RandomCall | None
    arguments: Any = None
    drew: bool = False
    """Whether its own code drew random numbers."""
    inside: int = 0
    """Number of calls that began inside it so far."""


class _DrawDetector:
    """Finds the running calls whose own code draws random numbers, by the states of the generators."""

    def __init__(self, prepared: PreparedModel) -> None:
        self._device = prepared.probe.device
        self._states = seeding.generator_states(self._device)
        self._versions: dict[int, int] = {}

    def note_versions(self, model: nn.Module) -> None:
        """Note the versions of the tensors of a model before its forward."""
        self._versions = {id(t): t._version for t in (*nn.Module.parameters(model), *nn.Module.buffers(model))}

    def written(self, module: nn.Module) -> bool:
        """Whether one of the module's own floating parameters and buffers was written to since."""
        own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        return any(self._versions.get(id(t)) != t._version for t in own if t.is_floating_point())

    def drew(self, running: _RandomCall | None) -> bool:
        """Return whether the own code of the running call drew since the last question, and note it in the call."""
        before, self._states = self._states, seeding.generator_states(self._device)
        drew = running is not None and before != self._states
        if running is not None:
            running.drew |= drew
        return drew
