"""What the optimizers of several ranks did, as one: their steps are the same steps, so most of it has to be equal.

A parameter has the same optimizer and hyperparameters in all ranks. Ranks that have other layers, as the stages of a
pipeline, may have other groups. Of the counts of a training loop the largest stands, because what happened in one rank
happened in the run; a note says which ranks differ.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .layer import Layer, Parameter, qualified
from .together import demand_equal

if TYPE_CHECKING:
    from .record import OptimizerGroup, Record, Training

_SAME_OPTIMIZER = (
    "All ranks should train a parameter alike: look at what each gives to its optimizer, and at its scheduler"
)
_SAME_STEPS = "All ranks take their steps together: look at how many batches each is given, and at what skips a step"
_SAME_STEP = "Merge the same step in every rank"


class Stepping:
    """Puts the optimizers of ranks together.

    Args:
        records: Of each rank, in order.

    Raises:
        AssertionError: Ranks took other numbers of steps, or the records are of other steps.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._groups = [record.optimizers for record in records]
        self._numbers: list[list[int]] = []
        self.optimizers: list[OptimizerGroup] = []
        """The groups of all ranks: those of the first, and what others have beside them."""
        for groups in self._groups:
            self._numbers.append([self._number(place, group) for place, group in enumerate(groups)])
        of_step = [(rank, record.step) for rank, record in enumerate(records) if record.step is not None]
        if of_step:
            demand_equal(of_step, "the record", "step", lambda step: step, _SAME_STEP)
        self.step = of_step[0][1] if of_step else None
        without = [rank for rank, record in enumerate(records) if record.step is None]
        self.training, self.notes = _training([record.training for record in records])
        if of_step and without:
            self.notes.append(f"[rank {without[0]}] took no step: all its forwards are merged with step {self.step}")

    def demand_alike(self, have: Sequence[tuple[int, Layer]]) -> None:
        """Raise AssertionError where ranks train a parameter of a layer in other ways."""
        layer = have[0][1]
        for place, first in enumerate(layer.parameters):
            name = qualified(layer.name, first.name)
            groups = [(rank, self._group(rank, one.parameters[place])) for rank, one in have]
            demand_equal(groups, name, "optimizer", _class, _SAME_OPTIMIZER)
            for key in dict.fromkeys(key for _, group in groups if group is not None for key in group.options):
                what = f"the optimizer of {name}"
                demand_equal(groups, what, key, functools.partial(_option, key), _SAME_OPTIMIZER)

    def numbered(self, layer: Layer, rank: int) -> Layer:
        """Return a layer of a rank with the numbers that its groups have in `optimizers`."""
        numbers = self._numbers[rank]
        own = (p if p.group is None else dataclasses.replace(p, group=numbers[p.group]) for p in layer.parameters)
        return dataclasses.replace(layer, parameters=tuple(own)) if numbers else layer

    def _number(self, place: int, group: OptimizerGroup) -> int:
        if place < len(self.optimizers) and self.optimizers[place] == group:
            return place
        self.optimizers.append(group)
        return len(self.optimizers) - 1

    def _group(self, rank: int, parameter: Parameter) -> OptimizerGroup | None:
        groups = self._groups[rank]
        return None if parameter.group is None or parameter.group >= len(groups) else groups[parameter.group]


def _class(group: OptimizerGroup | None) -> str:
    return "none" if group is None else group.optimizer


def _option(key: str, group: OptimizerGroup | None) -> object:
    return None if group is None else group.options.get(key)


def _training(of_ranks: Sequence[Training | None]) -> tuple[Training | None, list[str]]:
    """Return the largest count of all ranks, and a note on those that differ."""
    have = [(rank, training) for rank, training in enumerate(of_ranks) if training is not None]
    if not have:
        return None, []
    stepped = [(rank, training) for rank, training in have if training.steps]
    if stepped:  # a stage whose parameters are all frozen has no optimizer
        demand_equal(stepped, "the training", "number of steps", lambda training: training.steps, _SAME_STEPS)
    largest, differing = {}, []
    for field in dataclasses.fields(have[0][1]):
        counts = [0 if training is None else getattr(training, field.name) for training in of_ranks]
        largest[field.name] = max(counts)
        if min(counts) < max(counts):
            most, least = (counts.index(number) for number in (max(counts), min(counts)))
            differing.append(f"{field.name} {max(counts):,} in [rank {most}], {min(counts):,} in [rank {least}]")
    note = [f"ranks differ in what their training did: {'; '.join(differing)}"] if differing else []
    return dataclasses.replace(have[0][1], **largest), note
