"""What an activation checkpoint runs again in the backward pass has to be what ran in the forward.

A layer that draws other random numbers, or keeps state, computes something else the second time. Then the gradients are
wrong and no error is raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from pytest_modelprobe._torch import graph_task
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import (
    CallTracer,
    Layers,
    ModuleCall,
    flatten,
    flatten_call,
    seeding,
)
from pytest_modelprobe.record import ROOT, containers
from pytest_modelprobe.text import count

from .agreement import (
    Disagreement,
    check_repeats,
    violation_of,
)
from .check import check
from .outcome import NotApplicableError, Violation, line_of
from .parity import ELSEWHERE, agreeing, other_gradients
from .rounding import is_rounded, limit, plain, relative_error
from .session import LayerTensor, PreparedModel, Trace, copy_of, set_mode

_CHECKPOINT = (
    "A checkpointed layer runs again in the backward. Look for state that the layers write to: a cache (pass "
    "use_cache=False), a counter, a hidden state; for an input that is changed in place (inplace=True, x += ...); and "
    "for code that depends on whether gradients are enabled."
)


def other_recomputation(prepared: PreparedModel) -> Violation | None:
    """Return where a model that checkpoints its layers in training computes something else in the backward.

    The model trains for one step. What a layer takes and returns in the backward, after the random state has moved, has
    to be what it took and returned in a call of the forward. A backward that draws nothing may call layers for other
    reasons, as an adjoint method does.
    """
    seen = _Seen(prepared)

    def run() -> None:
        tracer = CallTracer(prepared.layers.modules, ModuleCall, before=seen.begin, after=seen.end)
        # Without early stops: else a layer ends by an exception as soon as all that the backward needs is there.
        quiet = warnings.catch_warnings(action="ignore")
        with torch.enable_grad(), set_checkpoint_early_stop(False), tracer, quiet:
            args, kwargs = prepared.copied_inputs()
            loss = prepared.loss(prepared.model(*args, **kwargs))
            seen.states = seeding.generator_states(prepared.probe.device)
            loss.backward()

    with prepared.keep_changes():
        set_mode(prepared.model, "train")
        try:
            failed = prepared.trace_call(run).error is not None
        except (NotApplicableError, UsageError):  # of the loss in training mode
            failed = True
    if failed or not seen.found:
        return None
    return violation_of(
        seen.found,
        "computes something else when a checkpoint runs it again, so gradients are wrong: {path} {changed}",
        "Look for preserve_rng_state=False, which is for code without randomness; for random numbers of numpy, of "
        "random or of a generator of its own, which no checkpoint draws again; and for state that the layers write to.",
    )


class _Seen:
    """What layers took and returned in the forward, and what of it is another value in the backward."""

    def __init__(self, prepared: PreparedModel) -> None:
        self.states: tuple[bytes, ...] | None = None
        """The random states before the backward; None once they moved."""
        self.found: list[Disagreement] = []
        self._first: dict[tuple[str, str], list[LayerTensor]] = defaultdict(list)
        self._device = prepared.probe.device

    def begin(self, call: ModuleCall, args: Any, kwargs: Any) -> None:
        """Look at what a layer takes: the own code around it computed that."""
        around = ROOT if call.parent is None else call.parent.layer
        for path, x in flatten_call(args, kwargs).tensors:
            self._look((call.layer, path), LayerTensor(around, call.index, f"{path} of {call.layer}", x, inside=True))

    def end(self, call: ModuleCall, args: Any, output: Any) -> None:
        """Look at what a layer returns."""
        for path, x in flatten("output", output).tensors:
            self._look((call.layer, path), LayerTensor(call.layer, call.index, path, x))

    def _look(self, place: tuple[str, str], given: LayerTensor) -> None:
        if not is_rounded(given.tensor):
            return
        given = dataclasses.replace(given, tensor=plain(copy_of(given.tensor)))  # not saved for the backward
        first = self._first[place]
        if graph_task() == -1:
            first.append(given)
        elif first and self._moved():
            changes = [relative_error(one.tensor, given.tensor) for one in first]
            if not min(changes) <= limit(given.tensor):
                self.found.append(Disagreement(first[0], min(changes)))

    def _moved(self) -> bool:
        if self.states is not None and self.states != seeding.generator_states(self._device):
            self.states = None
        return self.states is None


@check
def checkpoint_parity(prepared: PreparedModel, *, tolerance: float | None = None) -> Violation | str:
    """Check that under activation checkpointing, reentrant and not, the loss and all gradients are the same.

    Each child of the model that has children itself and returns a tensor or a tuple of tensors is checkpointed: for a
    `ModuleList`, each of its modules; for a child that returns something else, which reentrant checkpoints do not
    support, its own children. If there are none, single layers are checkpointed, or the whole model if one of them
    works in place. They run again in the backward and write to their state twice. Therefore a model of transformers
    runs without its cache of keys and values, as when it checkpoints itself, unless ``use_cache=True`` is given. Where
    a part takes tensors inside a tuple, as an `LSTMCell` does, nothing is checkpointed in the reentrant way, which does
    not see these.

    If something differs, each part is checkpointed alone, and the first with which it differs is named.

    A model that checkpoints itself in training is looked at first: what runs again in its backward has to draw the same
    random numbers. The message names the layer that returns something else. What no layer takes or returns is not seen.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.checkpoint_parity(probe, nn.Sequential(nn.Linear(3, 3), nn.ReLU()), probe.randn(4, 3)))
    checkpoint_parity holds for Sequential: 2 parameters, 2 modules checkpointed, reentrant and not
    """
    if other := other_recomputation(prepared):
        return other
    wanted = True
    try:
        one = prepared.reference(backward=True, input_gradients=True, model=_stopped(prepared)[0])
    except NotApplicableError:  # it may reject inputs that require a gradient
        wanted = False
        one = prepared.reference(backward=True, model=_stopped(prepared)[0])
    model, stopped = _stopped(prepared)
    parts = _parts(prepared, model)
    if not parts:
        raise NotApplicableError("the model has no children that could be checkpointed")

    def differs(names: list[str], *, reentrant: bool) -> Violation | None:
        """Return how the model differs if these parts are checkpointed."""
        how = f"({'reentrant' if reentrant else 'not reentrant'})"
        again, _ = _stopped(prepared)
        root = Layers(again).modules[ROOT]
        for name in names:
            module = root.get_submodule(name)
            module.forward = functools.partial(_checkpointed, module.forward, use_reentrant=reentrant)
        with warnings.catch_warnings(action="ignore"):
            try:
                two = prepared.run(backward=True, input_gradients=wanted, model=again)
            except NotApplicableError:  # no gradient is left
                two = Trace()
        if reentrant and (_TAKES_GRADIENTS in two.failure or isinstance(two.error, _NotReentrantError)):
            raise _NotReentrantError
        if two.in_backward:
            return Violation.at(ROOT, f"cannot be checkpointed {how}: {line_of(two.error)}", advice=_CHECKPOINT)
        if two.error is not None:
            return Violation(layer=two.raised_in, line=f"{two.failure}, when checkpointed {how}", advice=_CHECKPOINT)
        under = f"under checkpointing {how}"
        found = agreeing(one, two, under, tolerance, _CHECKPOINT, least=ELSEWHERE) if two.tensors else None
        return found if isinstance(found, Violation) else other_gradients(one, two, tolerance, under, _CHECKPOINT)

    how = "not reentrant"
    with contextlib.suppress(_NotReentrantError):
        for reentrant in (False, True):
            if found := differs(parts, reentrant=reentrant):
                check_repeats(prepared)
                each = ((name, differs([name], reentrant=reentrant)) for name in parts)
                return next((_of_part(name, alone) for name, alone in each if alone), found)
        how = "reentrant and not"
    told = f"{count(len(one.gradients), 'parameter')}, {count(len(parts), 'module')} checkpointed, {how}"
    return "; ".join([told, *stopped])


_TAKES_GRADIENTS = "incompatible with .grad()"


class _NotReentrantError(Exception):
    """Reentrant checkpoints refuse the model, whose forward may take gradients itself, or do not see what it takes."""


def _of_part(part: str, found: Violation) -> Violation:
    """Return how the model differs with one part checkpointed: that part is named, if what differs is not inside it."""
    part = part or ROOT
    if part in (found.layer, *containers(found.layer)):
        return found
    said = found.line.removeprefix(f"{ROOT} ")
    if not said.startswith("cannot"):
        said = f"computes something else when a checkpoint runs it again: {found.line}"
    return dataclasses.replace(found, layer=part, line=f"{part} {said}")


def _stopped(prepared: PreparedModel) -> tuple[nn.Module, list[str]]:
    """Return a copy of the model without known state that a second forward would write to again, and what was stopped.

    This state is intended and is never combined with checkpoints. Other state is left for the check to find.
    """
    model = prepared.copied()
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in caching:
        with contextlib.suppress(AttributeError):  # a dataclass that is frozen
            config.use_cache = False
    return model, ["without a cache (config.use_cache)"] if any(not config.use_cache for config in caching) else []


def _checkpointed(forward: Any, *args: Any, use_reentrant: bool, **kwargs: Any) -> Any:
    given = (*args, *kwargs.values())  # reentrant checkpoints see gradients of positional arguments alone

    def call(*again: Any) -> Any:
        return forward(*again[: len(args)], **dict(zip(kwargs, again[len(args) :], strict=True)))

    trained = [x for _, x in flatten_call(args, kwargs, objects=True).tensors if x.requires_grad]
    if use_reentrant and not trained:
        return forward(*args, **kwargs)  # an embedding, which is never checkpointed: its ids have no gradient
    if use_reentrant and not {id(x) for x in trained} <= {id(x) for x in given}:
        raise _NotReentrantError  # such a checkpoint does not see what is inside a tuple
    return checkpoint(call, *given, use_reentrant=use_reentrant)


def _parts(prepared: PreparedModel, model: nn.Module) -> list[str]:
    """Return the names of the outermost modules that can be checkpointed."""
    modules = Layers(model).modules
    simple: dict[nn.Module, bool] = {}
    given: dict[nn.Module, list[tuple[Tensor, int]]] = {}
    in_place = False

    def begin(call: ModuleCall, args: Any, kwargs: Any) -> None:
        given[call.module] = [(x, x._version) for _, x in flatten_call(args, kwargs).tensors if not x.is_inference()]

    def end(call: ModuleCall, args: Any, output: Any) -> None:
        nonlocal in_place
        tensors = (output,) if isinstance(output, Tensor) else output
        plain = (
            type(tensors) is tuple
            and all(isinstance(x, Tensor) or not flatten("", x).tensors for x in tensors)
            and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
        )
        simple[call.module] = simple.get(call.module, True) and plain
        in_place |= any(x._version != version for x, version in given[call.module])

    with CallTracer(modules, ModuleCall, before=begin, after=end):
        prepared.reference(backward=True, model=model)

    def parts(name: str, module: nn.Module, *, single: bool) -> list[str]:
        if name and simple.get(module) and (single or [*module.children()]):
            return [name]
        if hasattr(module, "parametrizations"):
            return []
        children = ((f"{name}.{key}" if name else key, child) for key, child in module.named_children())
        return [part for key, child in children for part in parts(key, child, single=single)]

    root = modules[ROOT]  # without a wrapper, as of torch.compile
    if found := parts("", root, single=False):
        return found
    if in_place:  # the output of a checkpointed layer may not be written to
        return [""] if simple.get(root) else []
    return parts("", root, single=True)
