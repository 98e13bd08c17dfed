"""Forwards by what they are part of: steps of training, evaluations, or others, whose gradients no step used.

Whether a forward belongs to a step is known late: a backward pass has to reach it, and an optimizer has to step with
the gradients. Until then it is undecided. Each forward counts once: those of steps, evaluations and others are all.
What is decided merges into totals, so that memory grows with the number of layers and not of forwards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor

from pytest_modelprobe import statistics
from pytest_modelprobe.record import ForwardKind, OptimizerGroup
from pytest_modelprobe.statistics import Reduction, SeenSamples
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


class ObservedPasses:
    """Forwards, and the gradients of the backward passes that reached them."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        """Chooses the signs with which it is merged into others."""
        self.forwards: list[DoneForward] = []
        """Those not merged yet: the first, which has nothing to be merged with."""
        self.parts: Parts = {}
        self.gradients: dict[str, ParameterGradient] = {}
        """Of parameters by full name, as they arrived."""
        self.first: int | None = None
        """Number of its first forward in the watch; None: that is not over."""
        self.backwards = 0
        """Backward passes that reached a parameter."""
        self.passes: set[int] = set()
        """Numbers of the passes that were put here as a whole."""
        self._newest_pass = -1

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

    def merge_from(self, other: ObservedPasses) -> None:
        """Merge the forwards and gradients of another step, or of passes after which none was taken."""
        for kind, totals in other.parts.items():
            self.parts.setdefault(kind, Totals()).merge_from(totals, other.number)
        for forward in other.forwards:  # one, while nothing is merged: its signs are those of the step
            self.parts.setdefault(forward.kind, Totals()).merge_from(forward, other.number)
        _merge_gradients(self.gradients, other.gradients, other.number)
        self.backwards += other.backwards

    def join(self, other: ObservedPasses) -> None:
        """Add passes to those of the same step."""
        for kind, totals in other.parts.items():
            if kind in self.parts:
                self.parts[kind].merge_from(totals)
            else:
                self.parts[kind] = totals
        for forward in other.forwards:
            self.add(forward)
        for name, gradient in other.gradients.items():
            if name not in self.gradients:
                self.gradients[name] = gradient
            elif gradient.reduced is not None:
                self.gradients[name].receive(gradient.reduced, other._newest_pass)
        if other.first is not None:
            self.first = other.first if self.first is None else min(self.first, other.first)
        self.backwards += other.backwards
        self.passes |= other.passes
        self._newest_pass = max(self._newest_pass, other._newest_pass)

    def has_gradient_other_than_zero(self, names: Iterable[str]) -> bool:
        """Whether the gradient of one of the parameters is known and not zero; this reads it from its device."""
        reduced = [self.gradients[name].reduced for name in names if name in self.gradients]
        readings = statistics.collect([one for one in reduced if one is not None])
        return any(one.statistics is not None and not one.statistics.all_zero for one in readings)

    @property
    def reduced(self) -> list[Reduction]:
        """The gradients of all parameters."""
        return [one for gradient in self.gradients.values() if (one := gradient.reduced) is not None]


class PendingPasses(ObservedPasses):
    """Passes that reached the same parameters, and whose gradients no step has used yet."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[GradientState, None] = {}
        """The gradients to which they were added, less those that were reset since."""


@dataclass(slots=True, eq=False)
class GradientState:
    """What the ``.grad`` of one parameter consists of."""

    parameter: ref[torch.nn.Parameter]
    names: list[str]
    """Full names of the parameter."""
    passes: int = 0
    """Backward passes added up since a reset or a step."""
    used: int = 0
    """Number of the newest step that was taken with these gradients, from 1; 0: there was none."""
    owner: int = 0
    """Number of the optimizer that stepped with the parameter, from 1; 0: none did."""
    stale: bool = False
    """Whether a pass was added to gradients with which a step had been taken."""
    mixed: bool = False
    """Whether passes before and after a step of another optimizer, which may have used them, were added up."""
    total: int = 0
    """Steps of all optimizers when the newest pass arrived."""
    others: int = 0
    """Those of optimizers that have no parameter of the model."""
    pending: list[PendingPasses] = field(default_factory=list)
    """The passes since a reset or a step, until a step uses one of their gradients."""


class ObservedStep(ObservedPasses):
    """The forwards and gradients since the step before, and how a step of an optimizer changed the parameters."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)  # how many steps, taken or thrown away, there were before
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


_MOST_THROWN = 32
"""How many passes may be reset before their gradients are read, all at once: a device is waited for once."""


class ObservedForwards:
    """The first forward, the newest, and all that are over merged, each with what it is part of.

    A forward that a backward pass reached is part of the step that an optimizer takes with a gradient of that pass. If
    all of them are reset before that, or if no such step was taken yet, it is one of the others. One that no pass can
    reach any more is an evaluation, or the call of a part of the model.

    Args:
        most_steps: How many steps are kept; those after them are merged.
    """

    def __init__(self, most_steps: int = 0) -> None:
        self.first: Forward | None = None
        self.newest: Forward | None = None
        self.count = 0
        self.alive: WeakSet[Forward] = WeakSet()
        """Those whose graph lives."""
        self.steps: list[ObservedStep] = []
        """The first steps, less the newest."""
        self.step = ObservedStep()
        """The step that is not over."""
        self.pending: list[PendingPasses] = []
        """The passes whose gradients no step has used yet."""
        self.skipped = self.lost = 0
        """Passes that were reset before a step was taken: those with gradients that were not finite, and the others."""
        self.first_is_unused = False
        """Whether the gradients of the first forward were reset before a step was taken."""
        self._most_steps = most_steps
        self._later_steps = 0
        self._later = ObservedPasses()
        """The steps that were taken and are not kept, merged."""
        self._unused = ObservedPasses()
        """Passes with finite gradients that were reset before a step was taken, merged."""
        self._skipped = ObservedPasses()
        """The same with gradients that were not finite: a step was skipped for them."""
        self._thrown: list[ObservedPasses] = []
        """Passes that were reset, while it is not known yet whether their gradients are finite."""
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
                self.step.seen[forward.kind].add(forward.samples)
                self._owner(forward).add(forward)
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
        samples = statistics.samples_of(inputs, self.step.seen.get(kind) if trains else None)
        self.newest = Forward(self.count, kind, samples, devices)
        self._kinds[kind] += 1
        self.first = self.first or self.newest
        self.count += 1
        self.alive.add(self.newest)

    def is_new(self, kind: ForwardKind) -> bool:
        """Whether no forward before the newest is of that kind."""
        return self._kinds[kind] < 2

    def use(self, passes: PendingPasses) -> None:
        """Note that the step that begins is taken with a gradient of passes."""
        self._decide_on(passes)
        self.step.join(passes)

    def discard(self, passes: PendingPasses) -> None:
        """Note that all gradients of passes were reset before a step was taken."""
        for forward in [one for one in self._undecided if one.trained_by and one.trained_by <= passes.passes]:
            self._undecided.remove(forward)
            passes.add(forward)
        self._decide_on(passes)
        self.first_is_unused |= passes.first == 0
        self._throw_away(passes)

    def discard_gradient(self, passes: PendingPasses, held: GradientState) -> None:
        """Note that one gradient of passes was reset before a step was taken, and not those of others."""
        del passes.holders[held]
        held.pending.remove(passes)
        thrown = ObservedPasses()
        thrown.gradients = {name: passes.gradients.pop(name) for name in held.names if name in passes.gradients}
        self._throw_away(thrown)

    def _decide_on(self, passes: PendingPasses) -> None:
        if passes in self.pending:
            self.pending.remove(passes)
        for held in passes.holders:
            if passes in held.pending:
                held.pending.remove(passes)

    def _throw_away(self, passes: ObservedPasses) -> None:
        passes.number = self.step.number
        self.step.number += not self.step.taken
        self._thrown.append(passes)
        if len(self._thrown) == _MOST_THROWN:
            self.sort_thrown()

    def sort_thrown(self) -> None:
        """Merge the passes that were reset, by whether their gradients are finite. That is read from their device."""
        thrown, self._thrown = self._thrown, []
        for passes, skipped in zip(thrown, statistics.any_nonfinite([one.reduced for one in thrown]), strict=True):
            (self._skipped if skipped else self._unused).merge_from(passes)
            if skipped:
                self.skipped += bool(passes.passes)  # else these are single gradients, without their passes
            else:
                self.lost += len(passes.passes)

    def parts_of_step(self, step: ObservedPasses) -> Parts:
        """Return the forwards of a step, merged into copies."""
        alone = [*step.forwards, *(f for f in self._unmerged if f.trained_by and self._owner(f) is step)]
        return _merged(step.parts, alone)

    def evaluated_parts(self) -> Parts:
        """Return the forwards that no backward pass reached, merged into copies."""
        return _merged(self._evaluations, [forward for forward in self._unmerged if not forward.trained_by])

    def unused_parts(self) -> Parts:
        """Return the forwards that a backward pass reached, and whose gradients no step used, merged into copies."""
        _, _, *pending = self._without_step
        parts = [(self.step.number, self.parts_of_step(one)) for one in pending]
        return _together([(0, self._unused.parts), (0, self._skipped.parts), *parts])

    def unused_gradients(self) -> Mapping[str, ParameterGradient]:
        """Return the gradients of parameters by full name that no step used."""
        return _gradients_of(self._without_step)

    @property
    def unused_backwards(self) -> int:
        """Passes that reached a parameter and whose gradients no step used."""
        return sum(step.backwards for step in self._without_step)

    def all_parts(self, *, with_skipped: bool) -> Parts:
        """Return all forwards, merged into copies.

        Args:
            with_skipped: Whether with the gradients that a step was skipped for.
        """
        skipped = self._skipped.parts
        if not with_skipped:
            skipped = {kind: totals.copy() for kind, totals in skipped.items()}
            for totals in skipped.values():
                totals.drop_gradients()
        steps = [(step.number, self.parts_of_step(step)) for step in (*self.steps, self.step)]
        steps += [(self.step.number, self.parts_of_step(passes)) for passes in self.pending]
        signed = self._later.parts, self._unused.parts, skipped, self.evaluated_parts()
        return _together([*steps, *((0, parts) for parts in signed)])

    def all_gradients(self, *, with_skipped: bool) -> Mapping[str, ParameterGradient]:
        """Return the gradients of parameters by full name, of all passes; see `all_parts`."""
        skipped = [self._skipped] if with_skipped else []
        return _gradients_of([*self.steps, self._later, self._unused, self.step, *self.pending, *skipped])

    @property
    def gradients(self) -> Mapping[str, ParameterGradient]:
        """The gradients of parameters by full name that have arrived for the step that is not over."""
        return _gradients_of([self.step, *self.pending])

    @property
    def _without_step(self) -> list[ObservedPasses]:
        """Passes after which no step was taken, so far."""
        return [self._unused, self._skipped, *self._thrown, *self.pending, *([] if self.step.taken else [self.step])]

    def _owner(self, forward: Forward | DoneForward) -> ObservedPasses:
        """Return what a forward that was reached is part of: the step that is not over, or passes without one."""
        if forward.trained_by & self.step.passes:
            return self.step
        return next((one for one in self.pending if forward.trained_by & one.passes), self.step)

    @property
    def _unmerged(self) -> list[Forward | DoneForward]:
        return [*self._undecided, *([] if self.newest is None else [self.newest])]


def _count(parts: Parts) -> int:
    return sum(totals.forwards for totals in parts.values())


def _gradients_of(steps: Iterable[ObservedPasses]) -> Mapping[str, ParameterGradient]:
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
