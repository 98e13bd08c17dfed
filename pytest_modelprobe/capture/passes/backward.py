"""Backward passes: gradients of observed tensors and of parameters, reduced as they arrive.

Torch says when a gradient arrives, and not to which pass or forward it belongs. A pass is told by the number of the
graph task that runs. The forward is told by the observation that the hooked tensor holds. A large gradient that a sum
hands to several tensors is reduced once.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import WeakStorage, graph_task
from pytest_modelprobe.capture.hooks.tensor_hooks import HookedViews
from pytest_modelprobe.capture.observed.observation import Forward, ParameterGradient, TensorObservation
from pytest_modelprobe.capture.observed.running_calls import RunningCalls
from pytest_modelprobe.capture.observed.tensors import ContentKey, content_key
from pytest_modelprobe.capture.special.stop import StopCheck
from pytest_modelprobe.statistics import WHOLE, Reduction, Samples

from .observed_forwards import ObservedForwards, ObservedPasses
from .steps import Steps

_index = operator.attrgetter("index")
_LARGE = 1 << 13  # elements above which to look whether a gradient was seen before is cheaper than to read it again


@dataclass(eq=False)
class BackwardPasses:
    """Counts backward passes, and receives their gradients."""

    forwards: ObservedForwards
    running: RunningCalls
    views: HookedViews
    steps: Steps
    stop: StopCheck | None
    histograms: bool

    def __post_init__(self) -> None:
        self._current = -1
        self._newest_task = -1
        self._reached = -1  # the newest pass that reached an observed tensor
        # Gradients of the newest backward pass, by index of the forward and content key.
        self._cache: dict[tuple[int, int | None, ContentKey], tuple[Reduction, Any]] = {}
        self.count = 0
        """Passes, those inside a forward left out."""
        self.recomputed: tuple[Forward, int] | None = None
        """Forward and start of the newest call that was recomputed, if no gradient has arrived since."""

    def enter(self) -> bool:
        """Count the pass that runs if it is new; return whether it runs inside a forward."""
        inner = bool(self.running.stack) and self.running.drop_abandoned()
        task = graph_task()
        if task > self._newest_task:
            self._newest_task = task
            self._cache.clear()
            if self.recomputed is None:  # else it is the backward of a segment, inside that of the whole
                self._current = task
                if not inner:
                    self.count += 1
                    self.views.mark_overwritten()
        return inner

    def current(self) -> int:
        """Return the number of the pass that runs, counting it if it is new."""
        self.enter()
        return self._current

    def receive(self, observed: Mapping[Forward, list[TensorObservation]], gradient: torch.Tensor) -> None:
        """Take the whole gradient of a tensor that was observed, in one forward or several."""
        inner = self.enter()
        self.recomputed = None
        forwards = list(observed.items())
        newest = forwards[0][0]
        for forward, _ in forwards[1:]:
            newest = max(newest, forward, key=_index)
        reduced = self._reduced(gradient, newest.index, newest.samples)
        for forward, places in forwards:
            for seen in places:
                seen.receive(reduced, inner=inner)
            if not inner:
                self._reached = self._current
                forward.backwards.add(self._current)
                forward.trained_by.add(self._current)
                if not forward.kind[1]:
                    self.steps.reached_in_evaluation()
        if self.stop is not None:
            self.stop.gradient(observed, reduced)

    def receive_parameter(
        self, names: list[str], gradient: torch.Tensor, into: ObservedPasses, axis: int | None = None
    ) -> None:
        """Take the gradient of a parameter, before it is added to ``.grad``; ``axis`` is that of its units."""
        first, newest = self.forwards.first, self.forwards.newest
        reduced = self._reduced(gradient, 0 if newest is None else newest.index, WHOLE, axis)
        into.reached_by(self._current)
        receiving = [into.gradients]
        # The first and the newest forward have records of their own: those that the pass reached. It may have reached
        # no hooked value.
        if newest is not None and self._reached != self._current:
            newest.trained_by.add(self._current)
            receiving.append(newest.parameters)
        elif newest is not None:
            if self._current in newest.backwards:
                receiving.append(newest.parameters)
            if first is not None and first is not newest and self._current in first.backwards:
                receiving.append(first.parameters)
        for gradients in receiving:
            for name in names:
                held = gradients.get(name)
                if held is None:
                    gradients[name] = ParameterGradient(reduced, self._current)
                else:
                    held.receive(reduced, self._current)
        if self.stop is not None:
            self.stop.parameter(names[0], gradient, reduced)

    def clear(self) -> None:
        """Forget the gradients of the newest pass, which are kept to be recognized."""
        self._cache.clear()

    def _reduced(self, gradient: torch.Tensor, index: int, samples: Samples, axis: int | None = None) -> Reduction:
        """Reduce a gradient: a large one once in a pass, though a sum hands it to each of its terms."""
        key = content_key(gradient) if gradient.numel() > _LARGE else None
        known = None if key is None else self._cache.get((index, axis, key))
        if known is not None:
            return known[0]
        reduced = statistics.reduce(gradient, axis=axis, index=index, samples=samples, histogram=self.histograms)
        if key is not None:
            # While the storage is held weakly its address is not used again.
            self._cache[index, axis, key] = reduced, WeakStorage(gradient.untyped_storage())
        return reduced
