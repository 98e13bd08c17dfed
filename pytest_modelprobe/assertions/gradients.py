"""Gradients: values that are not finite, gradients that are missing, that vanish or that explode.

A backward pass goes from the loss to the inputs, so the place where something began is the one nearest to the loss.
Where a parameter has no gradient, the graph was cut somewhere after it; `find_cut` looks for that place, because the
name of the parameter alone does not say what to change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import (
    CallTree,
    Layer,
    Parameter,
    Reading,
    Record,
    Selector,
    Statistics,
    Step,
    Value,
    containers,
    forward_of,
    label_of,
    selected,
)
from pytest_modelprobe.text import Cell, count, failed, failure, number, out_of, printable
from pytest_modelprobe.text import shape as shape_text

from .activations import find_nonfinite, from_forward, nonfinite_counts
from .sources import (
    LEAVE_OUT,
    Subject,
    backward_of,
    called,
    excuse_gradients,
    excuse_small_gradients,
    fail_or_hint,
    find_unreached,
    full_name,
    not_ignored,
    second_look,
    start_of,
    wider_globs,
)

__tracebackhide__ = True  # a traceback ends at the line of the test

# --- finite -------------------------------------------------------------------------------------------------------


def assert_grad_finite(subject: Subject, *, layers: Selector = "**") -> None:
    """Assert that no gradient, of an output or a parameter, is NaN or infinite; the failure names where that began.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        layers: Which layers to look at.

    Raises:
        AssertionError: A gradient is not finite.
        NothingObservedError: No backward was seen, or no selected layer was called.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> assert_grad_finite(ModelProbe().run(nn.Linear(2, 3), torch.ones(4, 2), loss=lambda out: out.sum()))
    """
    record = backward_of(subject)
    looked_at = called(record, layers)
    names = {layer.name for layer in looked_at}
    gradients = _gradients(record)
    seen = [g for g in gradients if g.layer.name in names]
    unread = next(
        (
            f"{layer.label} {path}: {reading.reason}"
            for layer in looked_at
            for path, reading in (
                *((value.path, r) for _, value in layer.outputs for r in (value.backward, value.backward_inner)),
                *((p.name, p.gradient) for p in layer.parameters),
            )
            if reading is not None and reading.statistics is None and reading.reason
        ),
        None,
    )
    if not seen and unread is None:
        raise NothingObservedError(
            f"no gradient reached {looked_at[0].label} nor any other of the {count(len(looked_at), 'layer')} looked "
            "at: they are frozen, detached, or not part of the loss"
        )
    bad = [g for g in seen if g.statistics.nonfinite]
    if bad:
        origin = min(gradients, key=lambda g: g.since)  # the first of the backward pass, of those of one forward
        hints = [
            f"It began in {record.gradient_origin}." * bool(record.gradient_origin),
            "Look there for sqrt or norm at 0, log at 0, a division by 0, or torch.where around one of them.",
        ]
        activation = find_nonfinite(record, record.layers)
        if activation is not None and activation.since <= origin.since:  # no weight that a gradient made NaN
            where = f"{activation.step.label}'s {activation.value.path}"
            hints = [f"Activations are already not finite, from {where} on: assert_finite names where that began."]
        raise failed(
            f"gradient of {label_of(origin.where, origin.layer.type_name)} is not finite"
            f"{from_forward(record, origin.since)}: {nonfinite_counts(origin.statistics)}, "
            f"{_made(origin, gradients)}; {out_of(len({g.layer.name for g in bad}), len(looked_at), 'layer')}",
            ["gradient of", "type", "min", "max", "not finite"],
            [
                [g.where, g.layer.type_name, g.statistics.min, g.statistics.max, nonfinite_counts(g.statistics)]
                for g in bad
            ],
            *hints,
        )
    if unread is not None:
        raise NothingObservedError(f"no number is known of a gradient of {printable(unread)}; {LEAVE_OUT}")


@dataclass(frozen=True, slots=True)
class _Gradient:
    """The gradient of one value or parameter."""

    layer: Layer
    step: Step | None
    """The call of the value; None of a parameter."""
    where: str
    """Its address: ``fc1 output``, ``fc1.weight``."""
    position: int
    """Its position in the forward; a backward pass goes from the highest to the lowest."""
    statistics: Statistics

    @property
    def since(self) -> float:
        """Index of the first forward whose backward had a gradient that was not finite; inf if all were finite."""
        if not self.statistics.nonfinite:
            return math.inf
        firsts = (self.statistics.first_nan, self.statistics.first_posinf, self.statistics.first_neginf)
        return min((first for first in firsts if first is not None), default=0)


def _gradients(record: Record) -> list[_Gradient]:
    """Return all gradients in the order of the backward pass."""
    found: list[_Gradient] = []
    starts: dict[str, int] = {}
    for step in CallTree(record).started:
        starts.setdefault(step.layer.name, step.call.started)
        for position, values in ((step.call.finished, step.call.outputs), (step.call.started, step.call.inputs)):
            found += (
                _Gradient(step.layer, step, f"{step.name} {value.path}", position, statistics)
                for value in values
                for statistics in _statistics(value.backward, value.backward_inner)
            )
    for layer in record.layers.values():
        found += (
            _Gradient(layer, None, full_name(layer, p.name), starts.get(layer.name, -1), statistics)
            for p in layer.parameters
            for statistics in _statistics(p.gradient)
        )
    return sorted(found, key=lambda g: (-g.position, g.step is None))


def _statistics(*readings: Reading | None) -> Iterator[Statistics]:
    return (r.statistics for r in readings if r is not None and r.statistics is not None)


def _made(origin: _Gradient, gradients: list[_Gradient]) -> str:
    """Return where the first gradient that is not finite was made."""
    step = origin.step
    if step is None:
        return "those around it are finite"
    if origin.position == step.call.started:
        return f"made in the backward of {step.label}"
    later = [(g, g.step) for g in gradients if g.step is not None and g.position > origin.position]
    if all(g.since <= origin.since for g, _ in later):
        return "made by the loss"
    taker = next((one for _, one in reversed(later) if one.previous is step), None)
    place = f"between {step.label} and {taker.label}" if taker else f"after {step.label}"
    return f"made {place}{forward_of(step.parent)}"


# --- presence -----------------------------------------------------------------------------------------------------


def assert_all_params_have_grad(subject: Subject, *, layers: Selector = "**", ignore: str | Iterable[str] = ()) -> None:
    """Assert that every parameter that requires a gradient has one after the backward.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        layers: Layers whose parameters are checked.
        ignore: Globs of full names of parameters to exclude, such as ``"**.mask_token"``.

    Raises:
        AssertionError: A parameter has no gradient.
        NothingObservedError: No backward was seen, or no selected layer has a parameter that requires a gradient.
        SelectionError: ``ignore`` matches no parameter.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> assert_all_params_have_grad(ModelProbe().run(nn.Linear(2, 3), torch.ones(4, 2), loss="random"))
    """
    record = backward_of(subject)
    every = [(layer, p) for layer in selected(record, layers) for p in layer.parameters if p.requires_grad]
    if not every:
        raise NothingObservedError(
            "no parameter of the selected layers requires a gradient: they are frozen, or have none"
        )
    left = not_ignored([full_name(layer, p.name) for layer, p in every], ignore)
    wanted = [(layer, p) for layer, p in every if full_name(layer, p.name) in left]
    missing = [(layer, p) for layer, p in wanted if p.gradient is None]
    if missing:
        raise AssertionError(_missing_text(record, missing, wanted, ignore))
    for layer, p in wanted:
        if p.gradient is not None and not p.gradient.tensors:
            raise NothingObservedError(
                f"no gradient of {full_name(layer, p.name)} was seen: {printable(p.gradient.reason or '')}; {LEAVE_OUT}"
            )


def _missing_text(
    record: Record,
    missing: list[tuple[Layer, Parameter]],
    wanted: list[tuple[Layer, Parameter]],
    ignore: str | Iterable[str] = (),
) -> str:
    layer, parameter = missing[0]
    name = full_name(layer, parameter.name)
    return failure(
        f"{name} has no gradient; {out_of(len(missing), len(wanted), 'parameter')} have none",
        ["parameter", "layer type", "shape", "layer called"],
        [
            [full_name(found, p.name), found.type_name, shape_text(p.shape), "yes" if found.calls else "never"]
            for found, p in missing
        ],
        _missing_hint(record, layer, name),
        wider_globs(ignore, (full_name(found, p.name) for found, p in missing)),
    )


def _missing_hint(record: Record, layer: Layer, what: str) -> str:
    if not layer.calls:
        return f"{layer.label} was never called in the forward: should it be used, or removed?"
    if any(v.backward is not None for _, v in layer.outputs):
        return f"The output of {layer.label} has a gradient: does its forward use {what}, and not a detached copy?"
    return find_cut(record, layer) or (
        f"The loss does not depend on the output of {layer.label}: is its result used, and is it the right loss?"
    )


def find_cut(record: Record, layer: Layer) -> str | None:
    """Return a sentence on where the graph was cut after the first call of ``layer``; None if it was not."""
    tree = CallTree(record)
    first = next((step for step in tree.started if step.layer is layer), None)
    if first is None:
        return None
    if not (first.call.grad_enabled or any(v.requires_grad for v in first.call.outputs)):
        return f"{layer.label} ran under no_grad."
    for step in tree.started:
        if step.place[:2] != first.place[:2] or step.call.started <= first.call.started:
            continue
        if not step.call.grad_enabled and first.call.grad_enabled:
            return f"{step.label} ran under no_grad."
        cut = _cut_before(tree, step)
        if cut:
            return f"The graph is cut {cut}: look for .detach(), .data, .item() or no_grad there."
    for step in tree.returned:
        if step.call.finished < first.call.finished or not any(value.is_floating for value in step.call.outputs):
            continue
        last = step.last_child
        if last is None:
            weights = any(parameter.requires_grad for parameter in step.layer.parameters)
            used = step.call.grad_enabled and (weights or _requires(step.call.inputs))
        else:
            used = _requires(last.call.outputs)
        if used and not _requires(step.call.outputs):
            where = f"in {step.label}" if last is None else f"after {last.label}{forward_of(step)}"
            return f"The graph is cut {where}: look for .detach() or .data there."
    return None


def _cut_before(tree: CallTree, step: Step) -> str | None:
    """Return where the graph was cut before a call: its inputs require no gradient, the output they come from does."""
    entered = [value for value in step.call.inputs if value.is_floating]
    if not entered or _requires(entered):
        return None
    made = tree.producer(step, entered[0])
    if made is not None:
        return f"between {made[0].label} and {step.label}" if made[1].requires_grad else None
    given = step.parent is not None and any(v.tensor == entered[0].tensor for v in step.parent.call.inputs)
    cut = not given and step.previous is not None and _requires(step.previous.call.outputs)
    return step.between() if cut else None


def _requires(values: Iterable[Value]) -> bool:
    return any(value.requires_grad for value in values)


# --- flow ---------------------------------------------------------------------------------------------------------


def assert_grad_flow(subject: Subject, *, layers: Selector = "**", max_ratio: float = 1e6) -> None:
    """Assert that the gradient reaches every layer with parameters, and does not vanish or explode.

    The gradient of a layer is the largest rms among the gradients of its own parameters, or the rms of its output's
    gradient if no selected layer has parameters that require one. Layers whose gradient cannot be read (a sparse one)
    are left out.

    Gradients vanish at a layer if its gradient, and those of all layers called before it (or of all layers called
    after it), are more than ``max_ratio`` times smaller than the largest. A single layer with a small gradient (a key
    projection, a scaled residual branch) may be up to ``max_ratio`` squared times smaller: the gradient reaches the
    layers before it on another path.

    Gradients of activations can explode while those of weights do not: a weight's gradient is a product of both, and
    activations may grow from layer to layer as their gradients grow on the way back. So the norm of the gradient of
    each output is compared with that of the model's last output: it may be 100 times ``max_ratio`` times larger. (A
    normalization over a row of zeros alone makes it up to 1e6 times larger.)

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        layers: Which layers to look at.
        max_ratio: How many times smaller than the largest gradient those up to a layer, or from it on, may be. The
            limit for a single layer is its square.

    Raises:
        AssertionError: The gradient of a layer is missing, zero, not finite, or vanishing; or the gradients of outputs
            explode. Zeros are looked at twice, and may be a `HintWarning`, see `assert_no_dead_layers`. Experts in one
            parameter of which some get no gradient in several backwards fail where there were 16 tokens or more for
            each. A parameter that has none, though others of its layer have, is a `HintWarning`.
        NothingObservedError: No backward was seen, no selected layer takes part in it, or no gradient can be read.
        UsageError: ``max_ratio`` is not above 1.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> assert_grad_flow(ModelProbe().run(model, torch.ones(4, 2), loss=lambda out: out.sum()))
    """
    if not max_ratio > 1:
        raise UsageError(f"max_ratio is how many times smaller a gradient may be, a number above 1; got {max_ratio!r}")
    record = backward_of(subject)
    looked_at = called(record, layers)
    flow = list(_layer_gradients(looked_at))
    if not flow:
        raise NothingObservedError(
            "none of the selected layers takes part in the backward with a gradient that can be read: they are frozen, "
            "or ran under no_grad"
        )

    def out_of_bounds(one: Record) -> list[_LayerGradient]:
        gradients = flow if one is record else list(_layer_gradients(called(one, layers)))
        known = [f.known for f in gradients]
        before = accumulate(known, max)
        after = reversed(list(accumulate(reversed(known), max)))
        largest = max(known)
        small = [
            f
            for f, up_to, on in zip(gradients, before, after, strict=True)
            if not f.known or largest > max_ratio * min(up_to, on) or largest / f.known > max_ratio**2
        ]
        # Those without a gradient, then the smallest; of equals the one nearest to the loss.
        small.reverse()
        return sorted(small, key=lambda f: (f.rms is not None, f.known))

    def excuse(found: list[_LayerGradient]) -> str:
        zero, small = [f for f in found if f.rms == 0], [f for f in found if f.known]
        if len(zero) + len(small) < len(found):  # there is none, or it is not finite
            return ""
        why = excuse_gradients(subject) if zero else ""
        if small and (why or not zero):
            share = max_ratio * min(f.known for f in small) / max(f.known for f in flow)
            start = start_of(subject)
            why = excuse_small_gradients(subject, (p for f in small for p in start[f.layer.name].parameters), share)
        return why

    bad, why = second_look(record, out_of_bounds, lambda found: found.layer.name, excuse)
    if bad:
        fail_or_hint(_flow_text(record, bad, flow, max_ratio), why)
    unreached = list(find_unreached(looked_at)) if record.backwards > 1 else []
    if unreached:
        raise failed(
            f"{unreached[0]} in {count(record.backwards, 'backward')}",
            ["parameter", "layer type", "shape", "no gradient"],
            [
                [one.name, one.layer.type_name, shape_text(one.parameter.shape), f"{len(one.slices):,}/{one.of:,}"]
                for one in unreached
            ],
            "Those slices along its first axis get nothing: look at the router, at which experts it may choose, and at "
            "what is added up.",
        )
    trained = [(layer, p) for layer in looked_at for p in layer.parameters if p.requires_grad]
    without = [(layer, p) for layer, p in trained if p.gradient is None and any(o.gradient for o in layer.parameters)]
    if without:
        why = "A hint, as other parameters of its layer have one: assert_all_params_have_grad fails here."
        fail_or_hint(_missing_text(record, without, trained), why)
    limit = _GROWTH_FACTOR * max_ratio
    growth = _growth_of_calls(record, {layer.name for layer in looked_at})
    exploding = sorted((g for g in growth if g[0] > limit), key=lambda g: -g[0])
    if exploding:
        times, step, last, _ = exploding[0]
        raise failed(
            f"{step.label} gets a gradient of its output {number(times)} times larger than {last.label}, {limit:g} is "
            f"allowed; {out_of(len({g[1].layer.name for g in exploding}), len(looked_at), 'layer')}",
            ["layer", "type", "gradient norm", "times larger", "output rms"],
            [row for *_, row in exploding],
            "Exploding gradients: look at the initialization, and at a missing norm or residual.",
        )


_GROWTH_FACTOR = 100
"""Factor of ``max_ratio`` by which the gradient of an output may grow: healthy models reach 5e5 times."""


def _growth_of_calls(record: Record, names: set[str]) -> Iterator[tuple[float, Step, Step, list[Cell]]]:
    """Yield how many times larger the gradient is at each call of the layers ``names`` than at the last call with one.

    With it come the call, that last call, and the row of the table. Scalars are left out: they may be a loss, whose
    gradient is 1.
    """
    last: dict[tuple[str, bool], tuple[Step, float]] = {}
    counted: set[int] = set()  # a container returns the output of its last child
    for step in reversed(CallTree(record).returned):
        arrived = [(v.backward.statistics, v) for v in step.call.outputs if v.backward is not None]
        found = [(g.norm, value) for g, value in arrived if g is not None and g.count > 1 and g.norm]
        if found:
            norm, value = max(found, key=lambda pair: pair[0])
            end, base = last.setdefault(step.place[:2], (step, norm))
            if step.layer.name in names and (step.layer.leaf or value.tensor not in counted):
                numbers = value.forward.statistics
                rms = None if numbers is None else numbers.rms
                yield norm / base, step, end, [step.name, step.layer.type_name, norm, norm / base, rms]
            counted.add(value.tensor)


@dataclass(frozen=True, eq=False)
class _LayerGradient:
    layer: Layer
    rms: float | None
    """The root mean square. It is NaN if the gradient is not finite, and None if there is no gradient."""

    @property
    def known(self) -> float:
        """The rms, 0 where there is none."""
        return self.rms if self.rms is not None and math.isfinite(self.rms) else 0.0


def _layer_gradients(looked_at: list[Layer]) -> Iterator[_LayerGradient]:
    """Yield the gradient of each layer that can be read, in order of execution."""
    by_parameters = any(p.requires_grad for layer in looked_at for p in layer.parameters)
    for layer in sorted(looked_at, key=lambda layer: layer.calls[0].started):
        outputs = [v.backward for _, v in layer.outputs if v.requires_grad and not v.overwritten]
        own = (
            [p.gradient for p in layer.parameters if p.requires_grad and 0 not in p.shape] if by_parameters else outputs
        )
        if not own or (layer.leaf and all(0 in value.shape for _, value in layer.outputs)):
            continue  # frozen, or an expert without tokens
        if not layer.leaf and not any(own):
            own = outputs  # an embedding that this forward did not use: the gradient passes it
        known = [s for s in _statistics(*own) if s.count]
        if any(s.nonfinite for s in known):
            yield _LayerGradient(layer, math.nan)
        elif all(reading is None or reading.statistics is not None for reading in own):
            yield _LayerGradient(layer, max((s.rms or 0.0 for s in known), default=None))


def _flow_text(record: Record, bad: list[_LayerGradient], flow: list[_LayerGradient], max_ratio: float) -> str:
    first, strongest = bad[0], max(flow, key=lambda f: f.known)
    name = first.layer.label
    if first.rms is None:
        what, hint = f"{name} gets no gradient", _missing_hint(record, first.layer, "its parameters")
    elif first.rms != first.known:
        what, hint = f"{name} gets a gradient that is not finite", "assert_grad_finite names where that began."
    elif first.rms == 0:
        inside = [layer for layer in record.layers.values() if first.layer.name in containers(layer.name)]
        # Those of a list of parameters, which is never called, are inside too.
        if any(s.rms for layer in inside for p in layer.parameters for s in _statistics(p.gradient)):
            name = next((full_name(first.layer, p.name) for p in first.layer.parameters if p.gradient), name)
        what = f"{name} gets a zero gradient"
        hint = (
            f"The layers after {name} do not depend on it, or have a zero derivative there: dead, saturated, "
            "zero-initialized, times zero."
        )
    else:
        times = f"{number(strongest.known / first.known)} times smaller than {strongest.layer.label}"
        what = f"{name} gets a gradient {times}, {max_ratio:g} is allowed"
        hint = "Vanishing or exploding gradients: look at activations, initialization and norms between the two layers."
    rows: list[list[Cell]] = []
    for f in dict.fromkeys([*bad, *flow]):  # the others for comparison
        share = f"{f.known / strongest.known:.1g}" if f.rms is not None and strongest.known else "-"
        rows.append([f.layer.name, f.layer.type_name, "none" if f.rms is None else f"{f.rms:.3g}", share])
    columns = ["layer", "type", "gradient rms", "of the largest"]
    return failure(f"{what}; {out_of(len(bad), len(flow), 'layer')}", columns, rows, hint)
