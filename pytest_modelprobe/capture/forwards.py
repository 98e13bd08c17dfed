"""Forwards by what they are part of: steps of training, evaluations, or others, whose gradients no step used.

Whether a forward belongs to a step is known late: a backward pass has to reach it, and an optimizer has to step with
the gradients. Until then it is undecided. Each forward counts once: those of steps, evaluations and others are all.
What is decided merges into totals, so that memory grows with the number of layers and not of forwards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from pytest_modelprobe import statistics
from pytest_modelprobe.record import ForwardKind, OptimizerGroup
from pytest_modelprobe.statistics import Reduction, Samples, SeenSamples
from pytest_modelprobe.text import count

from .observation import DoneForward, Forward, ParameterGradient, Parts, Totals, merge_into


class ForwardCounts(NamedTuple):
    """How many forwards of a watch are part of what. Each is part of one: their sum is `Record.forwards`.

    >>> print(ForwardCounts(in_steps=4, evaluations=1, others=0, steps=2))
    4 forwards in 2 steps, 1 in evaluations
    """

    in_steps: int
    """Forwards of all steps, kept or not."""
    evaluations: int
    """Forwards that no backward pass reached."""
    others: int
    """Forwards that a backward pass reached, and whose gradients no step used."""
    steps: int
    """Steps of training, kept or not."""

    def __str__(self) -> str:
        parts = [
            (self.in_steps, f"in {count(self.steps, 'step')}"),
            (self.evaluations, "in evaluations"),
            (self.others, "with gradients that no step used"),
        ]
        (number, what), *more = [part for part in parts if part[0]] or [(0, "")]
        first = f"{count(number, 'forward')} {what}".rstrip()
        return ", ".join([first, *(f"{number:,} {what}" for number, what in more)])


class ObservedStep:
    """The forwards and gradients since the step before, and how a step of an optimizer changed the parameters."""

    def __init__(self, number: int = 0, since: int = -1) -> None:
        self.number = number
        """Chooses the signs with which it is merged into others: how many steps, taken or not, there were before."""
        self.since = since
        """Number of its first backward pass, if the gradients of those before were reset."""
        self.forwards: list[DoneForward] = []
        """Those not merged yet: the first, which has nothing to be merged with."""
        self.parts: Parts = {}
        self.gradients: dict[str, ParameterGradient] = {}
        """Of parameters by full name, as they arrived."""
        self.first: int | None = None
        """Number of its first forward in the watch; None: that is not over."""
        self.backwards = 0
        """Backward passes that reached a parameter."""
        self._newest_pass = -1
        self.taken = False
        """Whether an optimizer has stepped."""
        self.applied: dict[str, Reduction] = {}
        """Gradients of parameters by full name, as the optimizer had them."""
        self.before: dict[str, Reduction] = {}
        """Parameters and buffers by full name before the optimizer stepped."""
        self.updates: dict[str, Reduction] = {}
        """What was added to each of the parameters that the optimizers hold."""
        self.buffers: dict[str, Reduction] = {}
        """All buffers after it."""
        self.optimizers: list[OptimizerGroup] = []
        self.groups: dict[str, int] = {}
        """Of parameters by full name, the number of the group that holds them."""
        self.modes: dict[str, bool] = {}
        """Whether each layer was in training mode as the optimizer stepped."""
        self.seen: defaultdict[ForwardKind, SeenSamples] = defaultdict(SeenSamples)
        """Samples of its forwards."""

    @property
    def count(self) -> int:
        """Forwards added."""
        return _count(self.parts) + len(self.forwards)

    def add(self, forward: DoneForward) -> None:
        """Add a forward."""
        self.first = forward.index if self.first is None else min(self.first, forward.index)
        self.forwards.append(forward)
        if self.parts or len(self.forwards) > 1:
            self.merge()

    def reached_by(self, backward: int) -> None:
        """Count a backward pass that reached a parameter."""
        self.backwards += backward != self._newest_pass
        self._newest_pass = backward

    def merge(self) -> None:
        """Merge the forwards, so that memory does not grow with their number."""
        for forward in self.forwards:
            merge_into(self.parts, forward)
        self.forwards.clear()

    def merge_from(self, other: ObservedStep) -> None:
        """Merge the forwards and gradients of another step."""
        for kind, totals in other.parts.items():
            self.parts.setdefault(kind, Totals()).merge_from(totals, other.number)
        for forward in other.forwards:  # one, while nothing is merged: its signs are those of the step
            self.parts.setdefault(forward.kind, Totals()).merge_from(forward, other.number)
        _merge_gradients(self.gradients, other.gradients, other.number)
        self.backwards += other.backwards


class ObservedForwards:
    """The first forward, the newest, and all that are over merged, each with what it is part of.

    A forward that a backward pass reached is part of the next step of an optimizer. If all gradients are reset before
    that, or if no such step was taken yet, it is one of the others. One that no pass can reach any more is an
    evaluation, or the call of a part of the model.

    Args:
        most_steps: How many steps are kept; those after them are merged.
        tokens: The samples of each forward; by default they are told by what the model is given.
    """

    def __init__(self, most_steps: int = 0, tokens: Samples | None = None) -> None:
        self._tokens = tokens
        self.first: Forward | None = None
        self.newest: Forward | None = None
        self.count = 0
        self.alive: WeakSet[Forward] = WeakSet()
        """Those whose graph lives."""
        self.steps: list[ObservedStep] = []
        """The first steps, less the newest."""
        self.step = ObservedStep()
        """The step that is not over."""
        self._most_steps = most_steps
        self._later_steps = 0
        self._later = ObservedStep()
        """The steps that were taken and are not kept, merged."""
        self._unused = ObservedStep()
        """Forwards and gradients that were reset before a step was taken, merged."""
        self._evaluations: Parts = {}
        self._undecided: list[DoneForward] = []
        self._kinds: Counter[ForwardKind] = Counter()

    @property
    def keeps_step(self) -> bool:
        """Whether the step that is not over will be kept."""
        return len(self.steps) < self._most_steps

    @property
    def taken(self) -> list[ObservedStep]:
        """The steps that were kept, in order."""
        return [*self.steps, self.step] if self.step.taken and self.keeps_step else self.steps

    @property
    def counts(self) -> ForwardCounts:
        """How many forwards are part of what, so far."""
        reached = [self._owner(forward) for forward in self._unmerged if forward.trained_by]
        evaluations = _count(self._evaluations) + len(self._unmerged) - len(reached)
        others = sum(one.count + reached.count(one) for one in self._without_step)
        steps = len(self.steps) + self._later_steps + self.step.taken
        return ForwardCounts(self.count - evaluations - others, evaluations, others, steps)

    def begin(
        self,
        kind: ForwardKind,
        inputs: Iterable[Tensor],
        devices: tuple[torch.device, ...] = (),
        *,
        accumulates: Callable[[], bool],
    ) -> None:
        """Begin another forward; a step that was taken is over then.

        Args:
            kind: Of the forward.
            inputs: What tells its samples apart.
            devices: Devices beside the CPU that the model and its inputs are on.
            accumulates: Returns whether a parameter has a gradient, to which that of this forward would be added. It
                is asked only where the step has forwards already.
        """
        if self.newest is not None:
            self._undecided.append(DoneForward(self.newest))
            self.newest = None
        undecided, self._undecided = self._undecided, []
        for forward in undecided:
            if forward.trained_by:
                owner = self._owner(forward)
                owner.add(forward)
                if owner is self.step:
                    owner.seen[forward.kind].add(forward.samples)
            elif forward.graph() is not None:  # a backward pass may reach it still
                self._undecided.append(forward)
            else:
                merge_into(self._evaluations, forward)
        if self.step.taken:
            if self.keeps_step:
                self.step.merge()
                self.steps.append(self.step)
            else:
                self._later.merge_from(self.step)
                self._later_steps += 1
            self.step = ObservedStep(self.step.number + 1)
        trains = torch.is_grad_enabled()
        if trains and self.step.seen and not accumulates():  # equal samples of earlier passes are no part of this batch
            self.step.seen.clear()
        samples = self._tokens or statistics.samples_of(inputs, self.step.seen.get(kind) if trains else None)
        self.newest = Forward(self.count, kind, samples, devices)
        self._kinds[kind] += 1
        self.first = self.first or self.newest
        self.count += 1
        self.alive.add(self.newest)

    def is_new(self, kind: ForwardKind) -> bool:
        """Whether no forward before the newest is of that kind."""
        return self._kinds[kind] < 2

    def discard(self, backward: int) -> None:
        """Note that all gradients since the step before were reset as a backward pass began."""
        self._unused.merge_from(self.step)
        self.step = ObservedStep(self.step.number + 1, since=backward)

    def parts_of_step(self, step: ObservedStep) -> Parts:
        """Return the forwards of a step, merged into copies."""
        alone = [*step.forwards, *(f for f in self._unmerged if f.trained_by and self._owner(f) is step)]
        return _merged(step.parts, alone)

    def evaluated_parts(self) -> Parts:
        """Return the forwards that no backward pass reached, merged into copies."""
        return _merged(self._evaluations, [forward for forward in self._unmerged if not forward.trained_by])

    def unused_parts(self) -> Parts:
        """Return the forwards that a backward pass reached, and whose gradients no step used, merged into copies."""
        return _together((step.number, self.parts_of_step(step)) for step in self._without_step)

    def unused_gradients(self) -> Mapping[str, ParameterGradient]:
        """Return the gradients of parameters by full name that no step used."""
        return _gradients_of(self._without_step)

    @property
    def unused_backwards(self) -> int:
        """Passes that reached a parameter and whose gradients no step used."""
        return sum(step.backwards for step in self._without_step)

    def all_parts(self, *, with_unused: bool) -> Parts:
        """Return all forwards, merged into copies.

        Args:
            with_unused: Whether with the gradients that were reset before a step was taken.
        """
        unused = self.parts_of_step(self._unused)
        if not with_unused:
            unused = {kind: totals.copy() for kind, totals in unused.items()}
            for totals in unused.values():
                totals.drop_gradients()
        steps = [(step.number, self.parts_of_step(step)) for step in (*self.steps, self.step)]
        return _together([*steps, *((0, parts) for parts in (self._later.parts, unused, self.evaluated_parts()))])

    def all_gradients(self, *, with_unused: bool) -> Mapping[str, ParameterGradient]:
        """Return the gradients of parameters by full name, of all passes; see `all_parts`."""
        return _gradients_of([*self.steps, self._later, *([self._unused] if with_unused else []), self.step])

    @property
    def _without_step(self) -> list[ObservedStep]:
        """What no step was taken with, so far."""
        return [self._unused, *([] if self.step.taken else [self.step])]

    def _owner(self, forward: Forward | DoneForward) -> ObservedStep:
        """Return what a forward that was reached and is not merged is part of."""
        return self.step if max(forward.trained_by) >= self.step.since else self._unused

    @property
    def _unmerged(self) -> list[Forward | DoneForward]:
        return [*self._undecided, *([] if self.newest is None else [self.newest])]


def _count(parts: Parts) -> int:
    return sum(totals.forwards for totals in parts.values())


def _gradients_of(steps: Iterable[ObservedStep]) -> Mapping[str, ParameterGradient]:
    found: dict[str, ParameterGradient] = {}
    for step in steps:
        _merge_gradients(found, step.gradients, step.number)
    return found


def _merge_gradients(into: dict[str, ParameterGradient], others: Mapping[str, ParameterGradient], number: int) -> None:
    for name, gradient in others.items():
        known = into.get(name)
        if known is None:
            known = into[name] = ParameterGradient()
        known.merge_from(gradient, number)


def _together(units: Iterable[tuple[int, Parts]]) -> Parts:
    """Return units merged into copies, each with the signs of its number; what is merged already has its own, of 0."""
    given = [(number, parts) for number, parts in units if parts]
    if len(given) == 1 and not given[0][0]:
        return given[0][1]
    together: Parts = {}
    for number, some in given:
        for kind, totals in some.items():
            together.setdefault(kind, Totals()).merge_from(totals, number, final=False)
    return together


def _merged(merged: Parts, forwards: Sequence[Forward | DoneForward]) -> Parts:
    """Return all together, and leave them as they are."""
    if not merged and len(forwards) == 1:
        return {forwards[0].kind: Totals.of(forwards[0])}
    parts = {kind: totals.copy() for kind, totals in merged.items()} if forwards else merged
    for forward in forwards:
        merge_into(parts, forward, final=False)
    return parts
