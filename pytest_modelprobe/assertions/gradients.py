"""Gradients: not finite, missing, vanishing on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_modelprobe.exceptions import NothingObservedError, SelectionError
from pytest_modelprobe.record import Call, Layer, Parameter, Reading, Record, Statistics, address
from pytest_modelprobe.report.text import Cell, count, failure, listed, number
from pytest_modelprobe.selection import Glob, Selector, nearest

from .activations import nonfinite_counts
from .evidence import Subject, backward_of, called, returned, selected

# --- finite -------------------------------------------------------------------------------------------------------


def assert_grad_finite(subject: Subject, *, layers: Selector = "**") -> None:
    """Assert that no gradient, of an output or a parameter, is NaN or infinite; the failure names where it began.

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
    __tracebackhide__ = True
    record = backward_of(subject)
    looked_at = called(record, layers)
    names = {layer.name for layer in looked_at}
    bad = [g for g in _gradients(record) if g.statistics.nonfinite and g.layer.name in names]
    if bad:
        raise AssertionError(_finite_text(record, bad, looked_at))


@dataclass(frozen=True)
class _Gradient:
    """One gradient, with the moment of the forward at which its value was made."""

    where: str
    layer: Layer
    position: int
    statistics: Statistics
    kind: str
    """``output``, ``input`` or ``parameter``."""

    @property
    def since(self) -> int:
        firsts = (self.statistics.first_nan, self.statistics.first_posinf, self.statistics.first_neginf)
        return min((f for f in firsts if f is not None), default=0)


def _gradients(record: Record) -> list[_Gradient]:
    """Return every gradient in the order in which a backward pass meets them."""
    found: list[_Gradient] = []
    for layer in record.layers.values():
        for call in layer.calls:
            for kind, values, position in (
                ("output", call.outputs, call.finished),
                ("input", call.inputs, call.started),
            ):
                found += (
                    _Gradient(address(layer.name, call, value.path), layer, position, statistics, kind)
                    for value in values
                    for statistics in _statistics(value.backward, value.backward_inner)
                )
        started = min((call.started for call in layer.calls), default=-1)
        found += (
            _Gradient(_full_name(layer, p), layer, started, statistics, "parameter")
            for p in layer.parameters
            for statistics in _statistics(p.gradient)
        )
    return sorted(found, key=lambda g: (-g.position, g.kind == "parameter"))


def _statistics(*readings: Reading | None) -> Iterator[Statistics]:
    return (r.statistics for r in readings if r is not None and r.statistics is not None)


def _finite_text(record: Record, bad: list[_Gradient], looked_at: list[Layer]) -> str:
    everything = [g for g in _gradients(record) if g.statistics.nonfinite]
    earliest = min(g.since for g in everything)
    origin = next(g for g in everything if g.since == earliest)
    layers = {g.layer.name for g in bad}
    counts = nonfinite_counts(origin.statistics)
    rows: list[list[Cell]] = [
        [g.where, g.layer.type_name, g.statistics.min, g.statistics.max, nonfinite_counts(g.statistics)] for g in bad
    ]
    operation = f"It began in {record.gradient_origin}." if record.gradient_origin else ""
    return failure(
        f"{_origin_sentence(record, origin, counts)}; {len(layers)} of {count(len(looked_at), 'layer')} looked at",
        ["gradient of", "type", "min", "max", "not finite"],
        rows,
        operation,
        _finite_hint(origin),
    )


def _origin_sentence(record: Record, origin: _Gradient, counts: str) -> str:
    finite_after = any(
        not g.statistics.nonfinite for g in _gradients(record) if g.position > origin.position and g.kind == "output"
    )
    if origin.kind == "output" and not finite_after:
        return f"loss gives a gradient that is not finite: {counts} in that of {origin.where}"
    if origin.kind == "output":
        return f"gradient of {origin.where} is not finite: {counts}, begun after {origin.layer.name}"
    if origin.kind == "parameter":
        return f"{origin.layer.name} has a gradient that is not finite: {counts} in that of {origin.where}"
    path = origin.where.rpartition(" ")[2]
    return f"{origin.layer.name} gives a gradient that is not finite: {counts} in that of its {path}"


def _finite_hint(origin: _Gradient) -> str:
    if origin.kind == "output":
        return (
            f"The code that takes {origin.where} further has a derivative that is not finite there: sqrt or norm at 0, "
            "log at 0, a division, or torch.where around one of them."
        )
    return f"Its incoming gradient is finite: look at the backward of {origin.layer.name} for the inputs it had."


# --- presence -----------------------------------------------------------------------------------------------------


def assert_all_params_have_grad(subject: Subject, *, layers: Selector = "**", ignore: str | Iterable[str] = ()) -> None:
    """Assert that the backward gave every parameter that requires one a gradient.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        layers: Of which layers to look at the parameters.
        ignore: Globs on full parameter names that need none, such as ``"*.mask_token"``.

    Raises:
        AssertionError: A parameter has none.
        NothingObservedError: No backward was seen, or no selected layer has a parameter that requires a gradient.
        SelectionError: ``ignore`` matches no parameter.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> assert_all_params_have_grad(ModelProbe().run(nn.Linear(2, 3), torch.ones(4, 2), loss="random"))
    """
    __tracebackhide__ = True
    record = backward_of(subject)
    wanted = _trainable(record, layers, ignore)
    missing = [(layer, p) for layer, p in wanted if p.gradient is None]
    if missing:
        raise AssertionError(_missing_text(record, missing, wanted))


def _trainable(record: Record, layers: Selector, ignore: str | Iterable[str]) -> list[tuple[Layer, Parameter]]:
    every = [(layer, p) for layer in selected(record, layers) for p in layer.parameters if p.requires_grad]
    if not every:
        raise NothingObservedError(
            "no parameter of the selected layers requires a gradient: they are frozen, or have none"
        )
    names = [_full_name(layer, p) for layer, p in every]
    ignored = set()
    for glob in [ignore] if isinstance(ignore, str) else ignore:
        matched = {name for name in names if Glob(glob).matches(name)}
        if not matched:
            near = listed(nearest(glob, names)) or "none"
            raise SelectionError(f"ignore={glob!r} matches none of {len(names)} parameters; nearest: {near}")
        ignored |= matched
    return [pair for pair, name in zip(every, names, strict=True) if name not in ignored]


def _missing_text(record: Record, missing: list[tuple[Layer, Parameter]], wanted: list[tuple[Layer, Parameter]]) -> str:
    layer, parameter = missing[0]
    return failure(
        f"{_full_name(layer, parameter)} has no gradient; "
        f"{len(missing):,} of {count(len(wanted), 'parameter')} looked at have none",
        ["parameter", "layer type", "shape", "layer called"],
        [
            [_full_name(found, p), found.type_name, str(p.shape), "yes" if found.calls else "never"]
            for found, p in missing
        ],
        _missing_hint(record, layer),
    )


def _missing_hint(record: Record, layer: Layer) -> str:
    if not layer.calls:
        return f"{layer.name} was never called in the forward: is it meant to be used, or to be there at all?"
    cut = find_cut(record, layer)
    if cut:
        return cut
    return f"The loss does not depend on the output of {layer.name}: is its result used, and the right loss taken?"


def find_cut(record: Record, layer: Layer) -> str | None:
    """Return where the graph was cut after ``layer``: an input that has its numbers but no gradient."""
    started = min((call.started for call in layer.calls), default=0)
    made = {
        address(maker.name, call, value.path): (maker.name, value)
        for maker, call in returned(record)
        for value in call.outputs
    }
    for taker, call in record.calls:
        if call.started < started:
            continue
        if not call.grad_enabled and layer.calls[0].grad_enabled:
            return f"{taker.name} ran under no_grad."
        for value in call.inputs:
            maker, output = made.get(value.source or "", (None, None))
            if output is not None and output.requires_grad and not value.requires_grad:
                return f"The graph is cut between {maker} and {taker.name}: look for .detach(), .data or no_grad there."
    if any(not call.grad_enabled for call in layer.calls):
        return f"{layer.name} ran under no_grad."
    return None


def _full_name(layer: Layer, parameter: Parameter) -> str:
    return parameter.name if layer.name == "(root)" else f"{layer.name}.{parameter.name}"


# --- flow ---------------------------------------------------------------------------------------------------------


def assert_grad_flow(subject: Subject, *, layers: Selector = "**", max_ratio: float = 1e6) -> None:
    """Assert that the gradient reaches every layer with parameters, and does not fade or grow out of bounds on the way.

    The gradient of a layer is the largest rms among those of its own parameters (biases before a normalisation have
    none in exact arithmetic); where no selected layer has parameters that require one, that of its output.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        layers: Which layers to look at.
        max_ratio: How many times smaller than the largest the smallest may be.

    Raises:
        AssertionError: A layer gets no gradient, a zero one, or one beyond the ratio.
        NothingObservedError: No backward was seen, or no selected layer takes part in it.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> assert_grad_flow(ModelProbe().run(model, torch.ones(4, 2), loss=lambda out: out.sum()))
    """
    __tracebackhide__ = True
    record = backward_of(subject)
    flow = list(_flow(record, called(record, layers)))
    if not flow:
        raise NothingObservedError(
            "none of the selected layers takes part in the backward: they are frozen, or ran under no_grad"
        )
    largest = max((f.rms for f in flow if f.rms is not None), default=0.0)
    bad = [f for f in flow if f.rms is None or f.rms == 0 or largest / f.rms > max_ratio]
    if bad:
        raise AssertionError(_flow_text(record, bad, flow, largest, max_ratio))


@dataclass(frozen=True)
class _Flow:
    layer: Layer
    call: Call
    rms: float | None
    """None: no gradient arrived."""


def _flow(record: Record, looked_at: list[Layer]) -> Iterator[_Flow]:
    """Yield the gradient of each layer, in order of execution."""
    by_parameters = any(p.requires_grad for layer in looked_at for p in layer.parameters)
    for layer in sorted(looked_at, key=lambda layer: layer.calls[0].started):
        if by_parameters:
            own = [p.gradient for p in layer.parameters if p.requires_grad]
            if not own:
                continue
        else:
            own = [v.backward for _, v in layer.outputs if v.requires_grad and not v.overwritten]
            if not own:
                continue
        rms = [s.rms for s in _statistics(*own) if s.rms is not None]
        yield _Flow(layer, layer.calls[0], max(rms, default=None))


def _flow_text(record: Record, bad: list[_Flow], flow: list[_Flow], largest: float, max_ratio: float) -> str:
    bad.reverse()
    bad.sort(key=lambda f: (f.rms is not None, f.rms or 0.0))  # stable: of equals the one nearest to the loss
    first = bad[0]
    name = first.layer.name
    strongest = next((f.layer.name for f in flow if f.rms == largest), None)
    if first.rms is None:
        what, hint = f"{name} gets no gradient", _missing_hint(record, first.layer)
    elif first.rms == 0:
        what = f"{name} gets a zero gradient"
        hint = f"What comes after {name} does not depend on it, or is flat there: dead, saturated, times zero."
    else:
        times = f"{number(largest / first.rms)} times smaller than {strongest}"
        what = f"{name} gets a gradient {times}, {max_ratio:g} is allowed"
        hint = "It fades or grows on the way: look at activations, initialisation and normalisation between the two."
    rows: list[list[Cell]] = [
        [f.layer.name, f.layer.type_name, "none" if f.rms is None else f"{f.rms:.3g}", _share(f, largest)] for f in flow
    ]
    return failure(
        f"{what}; {len(bad)} of {count(len(flow), 'layer')} looked at",
        ["layer", "type", "gradient rms", "of the largest"],
        _around(rows, [flow.index(f) for f in bad]),
        hint,
    )


def _share(flow: _Flow, largest: float) -> str:
    return "-" if flow.rms is None or not largest else f"{flow.rms / largest:.1g}"


def _around(rows: list[list[Cell]], bad: list[int]) -> list[list[Cell]]:
    """Return the rows in question first, then the others, for comparison."""
    return [rows[i] for i in bad] + [row for i, row in enumerate(rows) if i not in set(bad)]
