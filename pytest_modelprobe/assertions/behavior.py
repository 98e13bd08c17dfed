"""Compare two records: a port and its reference, a model before and after a refactoring.

Numbers alone say that something differs, not what. So where both models are still alive, each layer is called alone on
equal inputs, and the failure names the code or the weights instead of every layer behind them. Where data differ, all
layers after the first differ too, so distributions are compared in order of execution.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pytest_modelprobe import comparison
from pytest_modelprobe.comparison import (
    Comparison,
    Difference,
    Tolerance,
    begins,
    changes_code,
    compare,
    diagnose,
    explained,
    layers_behind_zeros,
)
from pytest_modelprobe.comparison.text import percent, text
from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import (
    Layer,
    Reading,
    Record,
    Selector,
    Statistics,
    Value,
    is_narrow,
    selected,
)
from pytest_modelprobe.text import Cell, failed, number, out_of, printable

from .sources import Subject, called, numbers, record_of, reject_unread_values

__tracebackhide__ = True  # a traceback ends at the line of the test


def assert_same_behavior(
    actual: Subject,
    expected: Subject,
    *,
    rename: Mapping[str, str] | None = None,
    layers: Selector = "**",
    structure: bool = True,
    weights: bool = True,
    pair: Literal["names", "structure"] = "names",
    tolerance: Tolerance = None,
) -> None:
    """Assert that two models compute the same, layer by layer; the failure names the code or weights that differ.

    The tolerance of a value is a small multiple of the expected value's noise, which is measured by running the model
    again with 1-ulp perturbations, if the record is that of a `run` and its model still exists. Otherwise the
    tolerance is fixed: 1e-4 of the norm forward, 2e-2 backward.

    Args:
        actual: A record, a watch, or a probe with one run or watch: the port.
        expected: The same for the reference.
        rename: Dict of glob of the actual names → glob of the expected names, for layers with other names; layers
            inside them are included. ``{"blocks.*": "transformer.h.*"}``
        layers: Which layers of ``actual`` to compare.
        structure: Whether to compare types, attributes and shapes of parameters too; False for another implementation.
        weights: Whether to compare weights, structure and gradients too; False after a change that keeps the function,
            such as a merged adapter or a folded norm. Then only the outputs of the model count; the failure names the
            first layer of both records from which a difference reaches them.
        pair: ``"structure"`` pairs the layers of another implementation by the values that flow through them where no
            names agree, and compares the outputs of the pairs; the failure has the pairing as a ``rename``.
        tolerance: Factor by which every tolerance is multiplied: a number, or a dict of glob of layers → number.

    Raises:
        AssertionError: They differ.
        SelectionError: ``rename``, ``layers`` or ``tolerance`` matches no layer.
        NothingObservedError: One of the two was never called, or no layer could be paired.
        UsageError: ``pair`` is neither of the two, or is with an option that it does not take.

    >>> import torch
    >>> from pytest_modelprobe import ModelProbe
    >>> probe = ModelProbe()
    >>> x = probe.randn(4, 8)
    >>> old, new = (probe.build(lambda: torch.nn.Sequential(torch.nn.LayerNorm(8))) for _ in range(2))
    >>> assert_same_behavior(probe.run(new, x), probe.run(old, x))
    >>> new[0].eps = 1e-3
    >>> assert_same_behavior(probe.run(new, x), probe.run(old, x))
    Traceback (most recent call last):
    AssertionError: 0.eps 1e-05 → 0.001: ...
    """
    mine, theirs = record_of(actual), record_of(expected)
    if pair not in ("names", "structure"):
        raise UsageError(f'pair is "names" or "structure"; got {pair!r}')
    if pair == "structure":
        if layers != "**" or isinstance(tolerance, Mapping):
            raise UsageError(
                'pair="structure" compares all pairs: leave out layers=, and give one number as tolerance='
            )
        if theirs.noise is None and theirs.live_run is not None:
            theirs = theirs.live_run.measured(theirs)
        message = comparison.port_failure(comparison.pair(mine, theirs, rename), tolerance or 1.0)
        if message:
            raise AssertionError(message)
        return

    def compared(mine: Record, theirs: Record) -> Comparison:
        found = compare(
            mine,
            theirs,
            rename=rename,
            layers=[layer.name for layer in selected(mine, layers)],
            tolerance=tolerance,
            parts="all" if structure and weights else "behavior",
        )
        return found if weights else _of_outputs(found)

    # Measuring the noise takes several runs: skipped if the records are equal without it.
    again = theirs.live_run if theirs.noise is None else None
    if again is not None and not compared(mine, dataclasses.replace(theirs, noise="measured")).same:
        theirs = again.measured(theirs)
    found = compared(mine, theirs)
    if not weights:
        if not found.same:
            raise _other_outputs(found)
        return
    now, then = mine.live_run, theirs.live_run
    if now is not None and (then is not None or any(call.response is not None for _, call in theirs.calls)):

        def alone(only: Collection[str] | None = None) -> Comparison:
            before = found.names_before
            reference = theirs
            if then is not None:
                those = None if only is None else [before.layers.get(name, name) for name in only]
                reference = then.isolated(theirs, only=those)
            like = compared(mine, reference).expected
            return compared(now.isolated(mine, like=like, names=before, only=only), reference)

        told = found.same and not is_narrow(theirs)  # half precision rounds away what code alone shows
        behind_zeros = layers_behind_zeros(mine) if told else []
        if not told or (behind_zeros and changes_code(diagnose(alone(behind_zeros)))):
            found = alone()
            if not found.same and then is not None and is_narrow(theirs):  # float32 rounds too, which is measured now
                theirs, then = then.measured(theirs, theirs), None
                found = alone()
    diagnosis = diagnose(found)
    if not diagnosis.same:
        steps = explained("diagnosis", diagnosis, mine, theirs)
        steps += ["Look at the first cause; `keep=` with its layer in both runs gives the tensors to look at."]
        if structure:
            steps.append(
                "Another implementation of the same? structure=False compares numbers alone, rename= maps names."
            )
        error = AssertionError(text(diagnosis, steps))
        vars(error)["diagnosis"] = diagnosis  # for extras
        raise error


def _of_outputs(found: Comparison) -> Comparison:
    """Return what differs in the inputs and outputs of the model, and the layers where that begins."""
    forwards = [pair for pair in found.calls if pair.outermost]
    roots = {pair.layer for pair in forwards}
    given = [d for d in found.found if d.kind in ("seed", "forwards") or (d.kind == "input" and d.layer in roots)]
    fewer = [pair.layer for pair in forwards if len(pair.actual.outputs) != len(pair.expected.outputs)]
    outputs = [Difference(layer=layer, kind="output", what="number of outputs", change=math.inf) for layer in fewer]
    outputs += [d for d in found.found if d.kind == "output"]
    outputs.sort(key=lambda d: found.actual[d.layer].calls[d.call].finished)
    differing = dict.fromkeys(d.layer for d in outputs)
    same = {layer for (layer, _, side, _), change in found.changes.items() if side == "output" and change.same}
    takers: dict[str, set[str]] = {}
    for layer, call in found.actual.calls:
        for value in call.inputs:
            takers.setdefault(str(value.source).partition(" ")[0], set()).add(layer.name)
    kept = begins(differing, same - differing.keys(), takers) if given or roots & differing.keys() else ()
    return dataclasses.replace(found, found=(*given, *(d for d in outputs if d.layer in kept)))


def _other_outputs(found: Comparison) -> AssertionError:
    """Return the failure of a model that returns something else, at the first layer that does."""
    rows: list[list[Cell]] = []
    for d in found.differences:
        by = f"{d.expected} → {d.actual}" if d.change is None else percent(d.change)
        rows.append([found.actual[d.layer].label, d.what, by])
    verb = "returns" if found.differences[0].kind == "output" else "is given"
    said = f"{rows[0][0]} {verb} another {rows[0][1]}: changed by {rows[0][2]}"
    if len(rows) > 1:
        said += f"; {rows[-1][0]} by {rows[-1][2]}"
    advice = "weights=False compares outputs alone: look at what became of the weights of this layer."
    return failed(said, ["layer", "value", "changed by"], rows, advice)


# --- distributions ----------------------------------------------------------------------------------------------------


def assert_same_distribution(a: Subject, b: Subject, *, layers: Selector = "**", max_shift: float = 0.25) -> None:
    """Assert that layers see the same distribution in two records: of train and test data, a model and its twin.

    The *shift* of a layer is that of the mean and standard deviation of all its outputs together, in standard
    deviations: ``sqrt((mean_a - mean_b)² + (std_a - std_b)²) / sqrt((std_a² + std_b²) / 2)``, the 2-Wasserstein
    distance of normal distributions over their pooled standard deviation. It is of the finite elements: `assert_finite`
    looks at the others. Layers are paired by name; the inputs of the model are looked at first.

    Args:
        a: A record, a watch, or a probe with one run or watch.
        b: The other.
        layers: Which layers of ``a`` to look at.
        max_shift: The largest shift allowed.

    Raises:
        AssertionError: A layer sees another distribution. The first in order of execution is named first.
        NothingObservedError: No selected layer is in both records with numbers.

    >>> import torch
    >>> from pytest_modelprobe import ModelProbe
    >>> probe, model = ModelProbe(), torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> train, test = (probe.run(model, probe.randn(1024, 2, name=name)) for name in ("train", "test"))
    >>> assert_same_distribution(train, test)
    """
    mine, theirs = record_of(a), record_of(b)
    pairs = list(_pairs(mine, theirs, called(mine, layers)))
    if all(pair.side == "it" for pair in pairs):  # the inputs alone say nothing of the layers
        raise NothingObservedError(
            f"{printable(mine.model)} and {printable(theirs.model)} have no layer of the same name with floating-point "
            "outputs among those selected: nothing was looked at"
        )
    moved = [pair for pair in pairs if not pair.shift <= max_shift]
    if not moved:
        for name in (layer.name for layer in called(mine, layers) if layer.name in theirs):
            for layer in (mine[name], theirs[name]):
                reject_unread_values(layer, (value for _, value in layer.outputs))
        return
    first = moved[0]
    advice = "The data differ before the first layer: compare how they are read, normalized and augmented."
    if first.side != "it":
        at = pairs.index(first)
        before = f"; {pairs[at - 1].label} moved by {pairs[at - 1].shift:.3g}" if at else ""
        advice = (
            f"What came before is within the limits{before}: look at what {first.label} does with it. "
            "modelprobe.plot_distributions(a, b) draws both."
        )
    rows: list[list[Cell]] = []
    for pair in moved:
        (mean, std), (other_mean, other_std) = _moments(pair.a), _moments(pair.b)
        columns = [number(value) for value in (mean, other_mean, std, other_std)]
        rows.append([pair.label, pair.type, f"{pair.shift:.3g}", *columns])
    raise failed(
        f"{first.label} is the first with another distribution: {first.side} moved by {first.shift:.3g} standard "
        f"deviations, more than {max_shift:g}; "
        f"{out_of(len(moved), len(pairs), 'value')} moved",
        ["value", "type", "shift", "mean of a", "mean of b", "std of a", "std of b"],
        rows,
        advice,
    )


@dataclass(frozen=True)
class _Pair:
    """The outputs of a layer, or the inputs of the model, in both records."""

    label: str
    side: str
    type: str
    a: Reading
    b: Reading

    @functools.cached_property
    def shift(self) -> float:
        mean, std, other_mean, other_std = _moments(self.a) + _moments(self.b)
        a, b = (one.statistics is None or not one.statistics.nonfinite for one in (self.a, self.b))
        if math.isnan(mean + other_mean) or a != b:
            return math.inf  # one has no finite element, or elements that mean and std leave out
        return in_pooled_deviations(math.hypot(mean - other_mean, std - other_std), std, other_std)


def in_pooled_deviations(distance: float, std: float, other_std: float) -> float:
    """Return a distance in standard deviations of two distributions together.

    >>> in_pooled_deviations(3.0, 1.0, 1.0), in_pooled_deviations(0.0, 0.0, 0.0)
    (3.0, 0.0)
    """
    scale = math.sqrt((std**2 + other_std**2) / 2)
    return distance / scale if scale else 0.0 if distance == 0 else math.inf


def _pairs(a: Record, b: Record, layers: Iterable[Layer]) -> Iterator[_Pair]:
    """Yield the inputs of the model, and the outputs of the layers in order of execution."""
    roots = [layer for layer, call in a.calls[:1] if layer.name == call.root and layer.name in b]
    for root in roots:
        mine, theirs = (_merged(value for _, value in record[root.name].inputs) for record in (a, b))
        if mine is not None and theirs is not None:
            yield _Pair("the input of the model", "it", root.type_name, mine, theirs)
    for layer in sorted(layers, key=lambda one: one.calls[0].finished):
        mine = _merged(value for _, value in layer.outputs)
        theirs = _merged(value for _, value in b[layer.name].outputs) if layer.name in b else None
        if mine is not None and theirs is not None:
            yield _Pair(layer.label, "its output", layer.type_name, mine, theirs)


def _merged(values: Iterable[Value]) -> Reading | None:
    """Return the numbers of all floating-point values together, or None if there is no such value."""
    found = [value.forward for value in values if value.is_floating and numbers(value) is not None]
    if not found:
        return None
    merged = functools.reduce(Statistics.merge, (one.statistics for one in found if one.statistics is not None))
    return Reading(statistics=merged)


def _moments(reading: Reading) -> tuple[float, float]:
    assert reading.statistics is not None
    mean, std = reading.statistics.mean, reading.statistics.std
    return (math.nan, math.nan) if mean is None or std is None else (mean, std)
