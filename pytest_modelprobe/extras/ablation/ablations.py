"""Which layers a metric depends on: each is ablated in turn.

If the output of a layer can be replaced by zeros without a change of the metric, the layer is not used, or not needed.
Each ablation starts from the same random state and the same weights, so that a difference comes from the layer alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.interventions import Change, faults, forward, intervene
from pytest_modelprobe.models import Layers, derive, preserved, seeded, settings_preserved
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.progress import progress
from pytest_modelprobe.record import ROOT, Selector, label_of, select
from pytest_modelprobe.text import Cell, failed, number, out_of, table

Metric = Callable[[Any], "float | Tensor"]
"""A function from the output of the model to a number."""


@dataclass(frozen=True, kw_only=True)
class Ablated:
    """The result of ablating one layer."""

    layer: str
    type: str
    """Name of the layer's class."""
    metric: float
    """The metric of the model without it."""
    change: float
    """How much larger the metric is without it than for the whole model."""

    @property
    def label(self) -> str:
        """The layer's name in a sentence."""
        return label_of(self.layer, self.type)


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What `ModelProbe.ablation` returns: the metric without each layer."""

    model: str
    metric: float
    """The metric of the whole model."""
    rows: tuple[Ablated, ...] = field(repr=False)
    """One for each layer, the largest change first."""

    def __str__(self) -> str:
        lines = table(["layer", "type", "metric without it", "change"], map(_cells, self.rows), len(self.rows))
        return "\n".join([f"{self.model}: metric {number(self.metric)}", "", *lines])


def ablation(
    model: nn.Module,
    inputs: Any,
    metric: Metric,
    *,
    layers: Selector = "**",
    by: Change = faults.zero,
    seed: int = 0,
) -> Ablation:
    """Return how a metric of the model changes when the output of each layer is ablated, one at a time.

    Each ablation takes one forward without gradients, in the mode of the model and from the same random state. The
    model is restored afterwards, as by `ModelProbe.run`.

    Args:
        model: The model.
        inputs: Its input, a tuple of positional arguments, or a dict of keyword arguments.
        metric: Takes the output of the model and returns a number, such as a loss or an accuracy.
        layers: Which layers to ablate. The root and layers that are not called are left out.
        by: A fault or a function that returns what replaces the output.
        seed: The seed of the random state.

    Raises:
        NothingObservedError: None of the layers is called.
        SelectionError: ``layers`` matches nothing.
        UsageError: The metric is not a number, or is not finite for the whole model.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.ReLU()).eval()
    >>> result = ablation(model, torch.ones(1, 2), lambda output: output.sum(), by=lambda tensor: tensor + 1)
    >>> len(result.rows), result.rows[0].change > 0
    (3, True)
    """
    found = Layers(model)
    root = type(next(iter(found.modules.values()))).__name__
    names = [name for name in select(found.modules, layers) if name != ROOT]
    rows = []
    with preserved(model) as state, progress("layer ablated", len(names)) as each:

        def measured() -> float:
            with seeded(derive(seed, "run")), settings_preserved(), torch.no_grad(), interruptible():
                value = float(metric(forward(model, inputs)))
            state.restore()
            return value

        whole = measured()
        if not math.isfinite(whole):
            raise UsageError(f"the metric of the whole model is {whole}: no change of it can be told")
        for name in each(names):
            planted = intervene(model, name, output=by).__enter__()
            try:
                without = measured()
            finally:
                planted.close()  # and not left as a `with` block, which would raise for a layer that is not called
            if planted.fired:
                kind = type(found.modules[name]).__name__
                rows.append(Ablated(layer=name, type=kind, metric=without, change=without - whole))
    if not rows:
        raise NothingObservedError("no layer was ablated: select layers that the forward calls")
    return Ablation(model=root, metric=whole, rows=tuple(sorted(rows, key=lambda row: -_size(row.change))))


def ablation_of_probe(
    probe: ModelProbe,
    model: nn.Module,
    inputs: Any,
    metric: Metric,
    *,
    layers: Selector = "**",
    by: Change = faults.zero,
) -> Ablation:
    """Return how a metric of the model changes when each layer is ablated; see `ablation`.

    >>> probe = ModelProbe()
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> sorted(row.layer for row in probe.ablation(model, torch.ones(4, 2), lambda output: output.sum()).rows)
    ['0', '1']
    """
    return ablation(model, inputs, metric, layers=layers, by=by, seed=probe.seed)


def assert_layer_matters(result: Ablation, layers: Selector = "**", *, min_change: float = 0.0) -> None:
    """Assert that the metric changes by more than ``min_change``, in either direction, without each layer.

    Args:
        result: What `ablation` returned.
        layers: Which of its layers to look at.
        min_change: In units of the metric.

    Raises:
        AssertionError: A layer may be left out.
        SelectionError: ``layers`` matches no layer that was ablated.
        UsageError: ``min_change`` is negative.

    >>> model = nn.Sequential(nn.Identity(), nn.ReLU())
    >>> assert_layer_matters(ablation(model, torch.ones(1, 2), lambda output: output.sum()), "0")
    """
    __tracebackhide__ = True
    if not min_change >= 0:
        raise UsageError(f"min_change is a number, 0 or more; got {min_change!r}")
    types = {row.layer: row.type for row in result.rows}  # the result has names of classes, not modules
    names = set(select(types, layers, is_instance=lambda kind, cls: kind == cls.__name__, type_name=lambda kind: kind))
    looked_at = [row for row in result.rows if row.layer in names]
    idle = sorted((row for row in looked_at if _size(row.change) <= min_change), key=lambda row: _size(row.change))
    if idle:
        first = idle[0]
        more = f", a change of not more than {min_change:g}" if min_change else ""
        raise failed(
            f"{first.label} does not matter: without it the metric is {number(first.metric)}, with it "
            f"{number(result.metric)}{more}; {out_of(len(idle), len(looked_at), 'row')}",
            ["layer", "type", "metric without it", "change"],
            map(_cells, idle),
            "Look at whether its output is used, and whether a later layer makes it constant.",
        )


# --- telling --------------------------------------------------------------------------------------------------------


def _size(change: float) -> float:
    return math.inf if math.isnan(change) else abs(change)  # a metric that became NaN changed the most


def _cells(row: Ablated) -> list[Cell]:
    return [row.label, row.type, number(row.metric), number(row.change)]
