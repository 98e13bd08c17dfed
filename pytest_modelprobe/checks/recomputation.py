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
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from pytest_modelprobe._torch import graph_task
from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import (
    CallTracer,
    Layers,
    ModuleCall,
    flatten,
    flatten_call,
    seeding,
)
from pytest_modelprobe.record import ROOT, containers, label_of, parent
from pytest_modelprobe.text import count

from .agreement import (
    Disagreement,
    changed,
    check_repeats,
    violation_of,
)
from .check import check
from .outcome import NotApplicableError, Violation, line_of
from .parity import ELSEWHERE, agreeing, other_gradients
from .rounding import is_rounded, limit, plain, relative_error, same
from .session import LayerTensor, PreparedModel, Trace, copy_of, set_mode

_CHECKPOINT = (
    "A checkpointed layer runs again in the backward. Look for state that the layers write to: a cache (pass "
    "use_cache=False), a counter, a hidden state; for an input that is changed in place (inplace=True, x += ...); and "
    "for code that depends on whether gradients are enabled."
)


_OTHER = (
    "Look for preserve_rng_state=False, which is for code without randomness; for random numbers of numpy, of random "
    "or of a generator of its own, which no checkpoint draws again; and for state that the layers write to."
)

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of a BatchNorm, which are known to be updated twice under activation checkpointing."""

_WRITTEN = "Write state outside of what is checkpointed, as in the module that calls the checkpoint."


def other_recomputation(prepared: PreparedModel) -> tuple[Violation | None, bool]:
    """Return where a model that checkpoints its layers computes something else in the backward, and whether it does so.

    The model trains for one step. What a layer takes and returns in the backward, after the random state has moved, has
    to be what it took and returned in a call of the forward. A backward that draws nothing may call layers for other
    reasons, as an adjoint method does.

    Buffers have to be the same before and after the backward. One that the forward wrote, and that is written again
    where layers run on the same inputs, breaks this. Any other is a hint, as a hook may be meant to write it.
    """
    seen = _Seen(prepared)
    model = prepared.layers.modules[ROOT]
    before: list[dict[str, Tensor]] = []

    def run() -> None:
        tracer = CallTracer(prepared.layers.modules, ModuleCall, before=seen.begin, after=seen.end)
        # Without early stops: else a layer ends by an exception as soon as all that the backward needs is there.
        quiet = warnings.catch_warnings(action="ignore")
        with torch.enable_grad(), set_checkpoint_early_stop(False), tracer, quiet:
            args, kwargs = prepared.copied_inputs()
            before.append(_buffers(model))
            loss = prepared.loss(prepared.model(*args, **kwargs))
            before.append(_buffers(model))
            seen.states = seeding.generator_states(prepared.probe.device)
            loss.backward()

    with prepared.keep_changes():
        set_mode(prepared.model, "train")
        try:
            failed = prepared.trace_call(run).error is not None
        except (NotApplicableError, UsageError):  # of the loss in training mode
            failed = True
        after = _buffers(model)
    if failed:
        return None, False
    if seen.found:
        said = "computes something else when a checkpoint runs it again, so gradients are wrong: {path} {changed}"
        return violation_of(seen.found, said, _OTHER), True
    in_backward = _changes(before[1], after)
    twice = _changes(before[0], before[1]).keys() & in_backward.keys() if seen.runs_again else ()
    if twice:
        again = {name: by for name, by in in_backward.items() if name in twice}
        said = "is written a second time when a checkpoint runs {of} again: {by}"
        return _written(model, again, said, _WRITTEN), True
    advice = "Look for hooks that write to it, and for layers that the backward calls. Statistics of gradients may."
    return _written(model, in_backward, "is written by the backward: {by}", advice, hint=True), seen.runs_again


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers by name, without the statistics of a BatchNorm."""
    named = ((name, x) for name, x in model.named_buffers() if name.rpartition(".")[2] not in _STATISTICS)
    return {name: copy_of(x) for name, x in named}


def _changes(one: Mapping[str, Tensor], two: Mapping[str, Tensor], *, least: float = 0.0) -> dict[str, float]:
    """Return the relative error of each buffer that differs, beyond rounding."""
    both = ((name, x, two[name]) for name, x in one.items() if name in two and not same(x, two[name]))
    errors = ((name, relative_error(x, y), limit(x, least=least) if is_rounded(x) else 0.0) for name, x, y in both)
    return {name: error for name, error, most in errors if error > most}


def _written(
    model: nn.Module, changes: Mapping[str, float], said: str, advice: str, *, hint: bool = False
) -> Violation | None:
    """Return the violation at the first buffer that was written to, if there is one.

    Args:
        model: The model.
        changes: The relative change of each buffer.
        said: The sentence after the name of the buffer: ``{of}`` stands for its module, ``{by}`` for its change.
        advice: Where to look.
        hint: Whether a healthy model may look so too.
    """
    if not changes:
        return None
    modules = Layers(model).modules
    owners = {name: parent(name) for name in changes}
    rows = [(name, type(modules[owners[name]]).__name__, percent(by)) for name, by in changes.items()]
    name, kind, _ = rows[0]
    return Violation.first_of(
        rows,
        said.format(of=label_of(owners[name], kind), by=changed(changes[name])),
        columns=("buffer", "of", "changed by"),
        advice=advice,
        level="hint" if hint else "broken",
    )


class _Seen:
    """What layers took and returned in the forward, and what of it is another value in the backward."""

    def __init__(self, prepared: PreparedModel) -> None:
        self.states: tuple[bytes, ...] | None = None
        """The random states before the backward; None once they moved."""
        self.runs_again = False
        """Whether a layer takes in the backward just what it took in the forward, as under a checkpoint."""
        self.found: list[Disagreement] = []
        self._first: dict[tuple[str, str], list[LayerTensor]] = defaultdict(list)
        self._device = prepared.probe.device

    def begin(self, call: ModuleCall, args: Any, kwargs: Any) -> None:
        """Look at what a layer takes: the own code around it computed that."""
        around = ROOT if call.parent is None else call.parent.layer
        for path, x in flatten_call(args, kwargs).tensors:
            given = LayerTensor(around, call.index, f"{path} of {call.layer}", x, inside=True)
            self.runs_again |= 0.0 in self._look((call.layer, path), given)

    def end(self, call: ModuleCall, args: Any, output: Any) -> None:
        """Look at what a layer returns."""
        for path, x in flatten("output", output).tensors:
            self._look((call.layer, path), LayerTensor(call.layer, call.index, path, x))

    def _look(self, place: tuple[str, str], given: LayerTensor) -> list[float]:
        """Return the relative error of a tensor of the backward, by that of each call in the forward."""
        if not is_rounded(given.tensor):
            return []
        given = dataclasses.replace(given, tensor=plain(copy_of(given.tensor)))  # not saved for the backward
        first = self._first[place]
        if graph_task() == -1:
            first.append(given)
            return []
        changes = [relative_error(one.tensor, given.tensor) for one in first]
        if changes and self._moved() and not min(changes) <= limit(given.tensor):
            self.found.append(Disagreement(first[0], min(changes)))
        return changes

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
    random numbers, and to write no buffer a second time, as a counter of tokens; statistics of a BatchNorm are known to
    be updated twice. The message names the layer that returns something else, or the buffer. What no layer takes or
    returns is not seen.

    A buffer that a backward without a checkpoint writes is a hint, and so is one that is written twice if the check
    checkpoints the parts of a model that does not do so itself.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.checkpoint_parity(probe, nn.Sequential(nn.Linear(3, 3), nn.ReLU()), probe.randn(4, 3)))
    checkpoint_parity holds for Sequential: 2 parameters, 2 modules checkpointed, reentrant and not
    """
    hint, itself = other_recomputation(prepared)
    if hint and hint.level == "broken":
        return hint
    wanted = True
    once, _ = _stopped(prepared)
    try:
        one = prepared.reference(backward=True, input_gradients=True, model=once)
    except NotApplicableError:  # it may reject inputs that require a gradient
        wanted = False
        once, _ = _stopped(prepared)
        one = prepared.reference(backward=True, model=once)
    model, stopped = _stopped(prepared)
    parts = _parts(prepared, model)
    if not parts and hint is None:
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
        if isinstance(found, Violation) or (found := other_gradients(one, two, tolerance, under, _CHECKPOINT)):
            return found
        if itself:
            return None
        changes = _changes(_buffers(Layers(once).modules[ROOT]), _buffers(root), least=ELSEWHERE)
        return _written(root, changes, f"is written a second time {under}: {{by}}", _WRITTEN, hint=True)

    how = "not reentrant"
    with contextlib.suppress(_NotReentrantError):
        for reentrant in (False, True):
            found = differs(parts, reentrant=reentrant)
            if found and found.level == "hint":
                hint = hint or found
            elif found:
                check_repeats(prepared)
                each = ((name, differs([name], reentrant=reentrant)) for name in parts)
                return next((_of_part(name, alone) for name, alone in each if alone and alone.level == "broken"), found)
        how = "reentrant and not"
    if hint:
        return hint
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
