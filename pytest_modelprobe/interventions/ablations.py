"""Which layers and heads a metric depends on: each is ablated in turn.

If the output of a layer can be replaced by zeros without a change of the metric, the layer is not used, or not needed.
Each ablation starts from the same random state and the same weights, so that a difference comes from the layer alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.models import Layers, derive, map_tensors, preserved, seeded, settings_preserved
from pytest_modelprobe.progress import progress
from pytest_modelprobe.record import ROOT, Selector, label_of, select
from pytest_modelprobe.text import Cell, failed, number, out_of, table

from . import faults
from .intervention import Change, Intervention, intervene, weights_changed

Metric = Callable[[Any], "float | Tensor"]
"""A function from the output of the model to a number."""


@dataclass(frozen=True, kw_only=True)
class Ablated:
    """The result of ablating one layer, or one head of it."""

    layer: str
    type: str
    """Name of the layer's class."""
    head: int | None
    """Which head, from 0, or `None` if the whole layer was ablated."""
    metric: float
    """The metric of the model without it."""
    change: float
    """How much larger the metric is without it than for the whole model."""

    @property
    def label(self) -> str:
        """The layer's or head's name in a sentence."""
        label = label_of(self.layer, self.type)
        return label if self.head is None else f"{label} head {self.head}"


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What `ModelProbe.ablation` returns: the metric without each layer."""

    model: str
    metric: float
    """The metric of the whole model."""
    rows: tuple[Ablated, ...] = field(repr=False)
    """One for each layer or head, the largest change first."""

    def __str__(self) -> str:
        lines = table(["layer", "type", "metric without it", "change"], map(_cells, self.rows), len(self.rows))
        return "\n".join([f"{self.model}: metric {number(self.metric)}", "", *lines])


def ablation(
    model: nn.Module,
    inputs: Any,
    metric: Metric,
    *,
    layers: Selector = "**",
    heads: Mapping[str, int] | None = None,
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
        heads: Which heads to ablate instead: glob of layers → number of heads. The layers are output projections, whose
            head k is the k-th equal part of the last dimension of their input, or `torch.nn.MultiheadAttention`.
        by: A fault or a function that returns what replaces the output, or the part of a head.
        seed: The seed of the random state.

    Raises:
        NothingObservedError: None of the layers is called.
        SelectionError: ``layers`` or ``heads`` matches nothing.
        UsageError: The metric is not a number, or is not finite for the whole model, or the heads do not fit.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.ReLU()).eval()
    >>> result = ablation(model, torch.ones(1, 2), lambda output: output.sum(), by=lambda tensor: tensor + 1)
    >>> len(result.rows), result.rows[0].change > 0
    (3, True)
    """
    found = Layers(model)
    root = type(next(iter(found.modules.values()))).__name__
    if heads is None:
        names = [name for name in select(found.modules, layers) if name != ROOT]
        targets: list[tuple[str, int | None, _Plant]] = [(name, None, _of_layer(model, name, by)) for name in names]
    else:
        targets = list(_of_heads(model, found, heads, by))
    rows = []
    with preserved(model) as state, progress("layer ablated", len(targets)) as each:

        def measured() -> float:
            with seeded(derive(seed, "run")), settings_preserved(), torch.no_grad(), interruptible():
                value = float(metric(forward(model, inputs)))
            state.restore()
            return value

        whole = measured()
        if not math.isfinite(whole):
            raise UsageError(f"the metric of the whole model is {whole}: no change of it can be told")
        for name, head, plant in each(targets):
            with contextlib.ExitStack() as stack:
                planted = plant(stack)
                # Closed, and not left as a `with` block, which would raise for a layer that is not called.
                stack.callback(planted.close)
                planted.__enter__()
                without = measured()
            if planted.fired:
                kind = type(found.modules[name]).__name__
                rows.append(Ablated(layer=name, type=kind, head=head, metric=without, change=without - whole))
    if not rows:
        raise NothingObservedError("no layer was ablated: select layers that the forward calls")
    return Ablation(model=root, metric=whole, rows=tuple(sorted(rows, key=lambda row: -_size(row.change))))


def assert_layer_matters(result: Ablation, layers: Selector = "**", *, min_change: float = 0.0) -> None:
    """Assert that the metric changes by more than ``min_change``, in either direction, without each layer.

    Args:
        result: What `ablation` returned.
        layers: Which of its layers to look at.
        min_change: In units of the metric.

    Raises:
        AssertionError: A layer, or a head of it, may be left out.
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


# --- planting -------------------------------------------------------------------------------------------------------

_Plant = Callable[[contextlib.ExitStack], Intervention]
"""A function that ablates until the stack ends. The intervention that it returns tells whether the layer was called."""


def _of_layer(model: nn.Module, layer: str, by: Change) -> _Plant:
    return lambda stack: intervene(model, layer, output=by)


def _of_heads(
    model: nn.Module, found: Layers, heads: Mapping[str, int], by: Change
) -> Iterator[tuple[str, int, _Plant]]:
    """Yield each head with its layer."""
    for glob, of in heads.items():
        if type(of) is not int or of < 1:
            raise UsageError(f"heads= is the number of heads, 1 or more, by glob of layers; got {of!r} for {glob!r}")
        for name in select(found.modules, glob):
            module = found.modules[name]
            fused = isinstance(module, nn.MultiheadAttention)
            if fused and (by is not faults.zero or of != module.num_heads):
                raise UsageError(f"{name} has {module.num_heads} heads, and only faults.zero replaces one of them")
            for head in range(of):
                yield name, head, _of_head(model, name, module, head, of, by)


def _of_head(model: nn.Module, name: str, module: nn.Module, head: int, of: int, by: Change) -> _Plant:
    def changed(tensor: Tensor) -> Tensor:
        size, rest = divmod(tensor.shape[-1], of)
        if rest:
            raise UsageError(f"{name}: {tensor.shape[-1]} is not a multiple of {of} heads")
        part = slice(head * size, (head + 1) * size)
        result, new = tensor.clone(), by(tensor[..., part])
        if not isinstance(new, Tensor):
            raise UsageError(f"{name}: by= returned {type(new).__name__}: return the tensor to use instead")
        result[..., part] = new
        return result

    def plant(stack: contextlib.ExitStack) -> Intervention:
        if not isinstance(module, nn.MultiheadAttention):
            return intervene(model, name, input=changed)
        # It does not call its output projection, so no hook there would fire. The columns of the weight belong to the
        # heads in the same way. The output is passed on unchanged, to know whether the layer was called.
        columns = {f"{name}.out_proj.weight": module.out_proj.weight}
        stack.enter_context(weights_changed(columns, lambda _, weight: changed(weight)))
        return intervene(model, name, output=lambda tensor: tensor)

    return plant


def forward(model: nn.Module, inputs: Any) -> Any:
    """Return the output of the model for an input, a tuple of positional arguments, or a dict of keyword arguments."""
    inputs = map_tensors(lambda tensor: tensor.clone(), inputs)  # a model may write to its input
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


# --- telling --------------------------------------------------------------------------------------------------------


def _size(change: float) -> float:
    return math.inf if math.isnan(change) else abs(change)  # a metric that became NaN changed the most


def _cells(row: Ablated) -> list[Cell]:
    return [row.label, row.type, number(row.metric), number(row.change)]
