"""What an activation checkpoint runs again in the backward pass has to be what ran in the forward.

A layer that draws other random numbers, or keeps state, computes something else the second time. Then the gradients are
wrong and no error is raised.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import defaultdict
from typing import Any

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from pytest_modelprobe._torch import graph_task
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import CallTracer, ModuleCall, flatten, flatten_call, seeding
from pytest_modelprobe.record import ROOT

from .agreement import Disagreement, violation_of
from .outcome import NotApplicableError, Violation
from .rounding import is_rounded, limit, plain, relative_error
from .session import LayerTensor, PreparedModel, copy_of, set_mode


def other_recomputation(prepared: PreparedModel) -> Violation | None:
    """Return where a model that checkpoints its layers in training computes something else in the backward.

    The model trains for one step. What a layer takes and returns in the backward, after the random state has moved, has
    to be what it took and returned in a call of the forward. A backward that draws nothing may call layers for other
    reasons, as an adjoint method does.
    """
    seen = _Seen(prepared)

    def step() -> None:
        args, kwargs = prepared.copied_inputs()
        loss = prepared.loss(prepared.model(*args, **kwargs))
        seen.states = seeding.generator_states(prepared.probe.device)
        loss.backward()

    def run() -> None:
        tracer = CallTracer(prepared.layers.modules, ModuleCall, before=seen.begin, after=seen.end)
        # Without early stops: else a layer ends by an exception as soon as all that the backward needs is there.
        quiet = warnings.catch_warnings(action="ignore")
        with torch.enable_grad(), set_checkpoint_early_stop(False), tracer, quiet:
            step()

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
