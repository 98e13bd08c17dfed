"""Observations → record: reductions become plain numbers here, all in one transfer for each device.

The hooks leave reductions on the device of each tensor, because reading one waits for the device. The record is made of
the part of all observations that is asked for: all forwards, one of them, or a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import without_torch_function
from pytest_modelprobe.models import (
    attributes,
    is_persistent,
    layout,
    original_class,
    own_buffers,
    own_parameters,
    sharded_parameters,
    type_name,
)
from pytest_modelprobe.record import (
    Attention,
    Call,
    ForwardKind,
    Layer,
    LayerProfile,
    Parameter,
    Profile,
    Reading,
    Record,
    Value,
    address,
    estimated_change,
    gc_paused,
    process_group,
    qualified,
    what_was_applied,
)
from pytest_modelprobe.statistics import Reduced, Reduction

from .capture import Capture
from .forwards import ObservedStep
from .observation import AttentionObservation, CallObservation, ParameterGradient, Parts, TensorObservation, Totals
from .profiler import TOTAL, Costs
from .tensors import ParameterReading, is_pointwise, named_tensors, plain_name, reducer
from .training import clamped

Which = Literal["all", "first", "last", "evaluations", "others"] | int
"""Which forwards: all, one, those of a step by its number from 0, or those that are part of no step: those that no
backward pass reached, and those whose gradients no step used."""

_REPLACED = Reading(tensors=0, reason="it was computed of another tensor in its place, as torch.func and offloading do")


def assemble(
    capture: Capture,
    which: Which = "all",
    *,
    seed: int | None = None,
    loss: str | None = None,
    before: Mapping[str, ParameterReading] | None = None,
) -> Record:
    """Return the record of all forwards merged, or of the first or the newest alone.

    Args:
        capture: What has seen them.
        which: Which forwards.
        seed: Stored in the record.
        loss: Stored in the record.
        before: What `read_parameters` returned before the forward: parameters and buffers are recorded as they were
            then, and those that changed as they are now, too. Without it they are recorded as they are; with the first
            forward as it left them.
    """
    with gc_paused(), without_torch_function():  # a mode of the user sees nothing of it
        capture.check()
        chosen = _chosen(capture, which)
        layers = _Builder(capture, which, chosen, before or {}).layers()
        parameters = [parameter for layer in layers.values() for parameter in layer.parameters]
        model = next(iter(capture.layers.modules.values()))
        # The device is that of the first parameter; of one that is offloaded between calls, that of the values.
        device = next((str(p.device) for p in nn.Module.parameters(model)), "cpu")
        if device == "meta":
            calls = (call for part in chosen.parts.values() for call in part.calls.values())
            device = next((seen.device for call in calls for _, seen in call.outputs), device)
        return Record(
            model=original_class(model).__qualname__,
            layers=layers,
            forwards=sum(part.forwards for part in chosen.parts.values()),
            backwards=chosen.backwards,
            device=device,
            seed=seed,
            loss=loss,
            notes=(*capture.all_notes, *chosen.notes),
            step=which if isinstance(which, int) else None,
            optimizers=() if chosen.step is None else tuple(chosen.step.optimizers),
            applied=None if chosen.step is None or process_group() is not None else what_was_applied(parameters),
            training=capture.training.counts if which == "all" else None,
            profile=_profile(capture, chosen.parts.values()),
            versions={"torch": str(torch.__version__), "numpy": numpy.__version__},
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chosen:
    """The part of what was seen that a record is made of."""

    parts: Parts
    backwards: int = 0
    gradients: Mapping[str, ParameterGradient] = field(default_factory=dict)
    """Of parameters by full name."""
    step: ObservedStep | None = None
    first: int = 0
    """Number of the first forward in the watch: in a record of some forwards they are numbered from 0."""
    notes: tuple[str, ...] = ()


def _chosen(capture: Capture, which: Which) -> _Chosen:
    forwards = capture.observed
    if isinstance(which, int):
        step = forwards.taken[which]
        parts = forwards.parts_of_step(step)
        newest = 0 if forwards.newest is None else forwards.newest.index
        first = newest if step.first is None else step.first
        return _Chosen(parts=parts, backwards=step.backwards, gradients=step.gradients, step=step, first=first)
    if which == "evaluations":
        return _Chosen(parts=forwards.evaluated_parts())
    if which == "others":
        return _Chosen(
            parts=forwards.unused_parts(),
            backwards=forwards.unused_backwards,
            gradients=forwards.unused_gradients(),
        )
    forward = forwards.first if which == "first" else forwards.newest
    if which == "all" or forward is None:
        training = capture.training.counts
        # As a `GradScaler` does, and SAM. Where most are reset, they are what is to be looked at.
        reset = training is not None and 0 < training.discarded <= training.steps
        notes = ["gradients that were reset before a step are left out"] if reset else []
        counts = forwards.counts
        if counts.others and training is not None and forwards.count > 1:  # else nothing was trained
            notes.append(str(counts))
        return _Chosen(
            parts=forwards.all_parts(with_unused=not reset),
            backwards=capture.gradients.count,
            gradients=forwards.all_gradients(with_unused=not reset),
            notes=tuple(notes),
        )
    in_no_step = forwards.taken and not forward.trained_by
    note = f"the {which} forward is part of no step of training: first_step and steps are those that are"
    return _Chosen(
        parts={forward.kind: Totals.of(forward)},
        backwards=len(forward.backwards),
        gradients=forward.parameters,
        first=forward.index,
        notes=(note,) if in_no_step else (),
    )


def _profile(capture: Capture, parts: Iterable[Totals]) -> Profile | None:
    """Return what the forwards cost; None where that was not measured."""
    measured = [(part.forwards, part.costs) for part in parts if part.costs is not None]
    if not measured:
        return None
    costs = Costs()
    for _, of_kind in measured:
        costs.merge_from(of_kind)
    times, modules = costs.times(), capture.layers.modules
    return Profile(
        layers={
            name: LayerProfile(
                type=capture.functionals.types.get(name) or type_name(modules[name]).rpartition(".")[2],
                calls=calls,
                wall_time=times.get(name, 0.0),
                flops=costs.flops[name],
                own_flops=costs.own_flops[name],
                activation_bytes=costs.activation_bytes[name],
                parameters=_elements(modules.get(name)),
            )
            for name, calls in costs.calls.items()
        },
        forwards=sum(forwards for forwards, _ in measured),
        wall_time=times.get(TOTAL, 0.0),
        flops=costs.flops[TOTAL],
        activation_bytes=costs.activation_bytes[TOTAL],
        parameters=_elements(next(iter(modules.values()))),
        probe_time=costs.probe_time,
    )


def _elements(module: nn.Module | None) -> int:
    parameters = () if module is None else nn.Module.parameters(module)
    return sum(parameter.numel() for parameter in parameters if not is_lazy(parameter))


class _Builder:
    def __init__(self, capture: Capture, which: Which, chosen: _Chosen, before: Mapping[str, ParameterReading]) -> None:
        self.capture = capture
        self.which = which
        self.step = chosen.step or ObservedStep()
        self.first = chosen.first
        self.backwards = chosen.backwards
        self.calls: dict[str, list[tuple[ForwardKind, CallObservation]]] = {}
        self.samples: dict[ForwardKind, str | None] = {}
        for kind, totals in chosen.parts.items():
            hashes = totals.sum_of_hashes
            self.samples[kind] = None if hashes is None else f"{int(hashes) % 2**64:016x}"
            for (layer, _), call in totals.calls.items():
                self.calls.setdefault(layer, []).append((kind, call))
        attended = [one for calls in self.calls.values() for _, call in calls for one in call.attention]
        with statistics.ambient_modes_disabled():
            self.attended = statistics.fetch([tensor for one in attended for tensor in one[:3]])
        self.gradients = {name: r for name, gradient in chosen.gradients.items() if (r := gradient.reduced) is not None}
        self.own: dict[str, tuple[Reduction, Reduction | None]] = {}
        """Parameters and buffers by full name: before the forward, and now if that may differ."""
        self.shards = sharded_parameters(capture.layers.modules.values())
        self._read_owned(which, before)
        self.ties: dict[int, str] = {}
        unique = {id(reduced): reduced for reduced in self._reduced()}
        # Numbers are collected all together, in one transfer.
        self.readings = dict(zip(unique, map(self._counted, statistics.collect(list(unique.values()))), strict=True))
        self.numbers: dict[tuple[int, int], int] = {}
        self.layouts: dict[tuple[int, int], str] = {}
        self.whole: dict[tuple[int, int], Reduction] = {}
        """Of a tensor of which some places have a part: its gradient where it is whole."""
        self._find_layouts()
        self.sources = _Sources(self.calls, self.readings)

    def layers(self) -> dict[str, Layer]:
        """Return the selected layers in the model's order, each functional one after the layer that called it."""
        found = {
            name: self._layer(name, module)
            for name, module in self.capture.layers.modules.items()
            if name in self.capture.selected
        }
        for name, function in self.capture.functionals.types.items():
            found[name] = Layer(name=name, type=function, functional=True, calls=self._calls(name))
        return found

    def _layer(self, name: str, module: nn.Module) -> Layer:
        set_by_forward = self.capture.set_attributes.found.get(name, ())
        leaf = self.capture.layers.is_leaf(name)  # a leaf with children is atomic: their parameters are its own
        return Layer(
            name=name,
            type=type_name(module),
            leaf=leaf,
            training=self.step.modes.get(name, module.training),
            attributes={k: v for k, v in attributes(module).items() if k not in set_by_forward},
            aliases=tuple(self.capture.layers.aliases.get(name, ())),
            parameters=tuple(self._parameter(name, own, tensor) for own, tensor in own_parameters(module, atomic=leaf)),
            buffers=tuple(
                self._parameter(name, own, tensor, persistent=is_persistent(module, own))
                for own, tensor in own_buffers(module, atomic=leaf)
            ),
            calls=self._calls(name),
        )

    def _parameter(self, layer: str, name: str, tensor: torch.Tensor, *, persistent: bool | None = None) -> Parameter:
        full = qualified(layer, name)
        first = self.ties.setdefault(id(tensor), full)
        tensor = self.shards.get((self.capture.layers.modules[layer], name), tensor)
        gradient = self.gradients.get(full)
        in_place = full in self.capture.parameter_hooks.replaced or (tensor.is_meta and tensor.requires_grad)
        unknown = _REPLACED if self.backwards and in_place else None
        then, now = self.own[full]
        reading = self.reading(then)
        zeros = self.capture.gradients.zeros.get(first) if self.which == "all" else None
        applied, update = self.step.applied.get(full), self.step.updates.get(full)
        return Parameter(
            name=name,
            shape=(tensor.numel(),) if tensor.is_nested else () if is_lazy(tensor) else tuple(tensor.shape),
            dtype=plain_name(tensor.dtype),
            device=str(tensor.device),
            requires_grad=tensor.requires_grad,
            tied_to=None if first == full else first,
            persistent=persistent,
            layout=layout(tensor),
            reading=reading,
            after=None if now is None or self.reading(now) == reading else self.reading(now),
            gradient=unknown if gradient is None else self.reading(gradient),
            applied=None if applied is None else self.reading(applied),
            update=None if update is None else self.reading(update),
            group=self.step.groups.get(full),
            clamped=0 if zeros is None else clamped(zeros, tensor),
            left_out=tensor.requires_grad and bool(self.step.updates) and update is None,
        )

    def _calls(self, layer: str) -> tuple[Call, ...]:
        return tuple(self._call(kind, call) for kind, call in self.calls.get(layer, ()))

    def _call(self, kind: ForwardKind, call: CallObservation) -> Call:
        return Call(
            root=kind[0],
            root_training=kind[1],
            index=call.index,
            forwards=call.forwards,
            started=call.started,
            finished=call.finished,
            training=call.training,
            inputs=tuple(self._value(path, seen, self.sources.of(kind, call, seen)) for path, seen in call.inputs),
            inputs_known=call.inputs_known,
            outputs=tuple(self._value(path, seen, None) for path, seen in call.outputs),
            arguments=call.arguments,
            attention=tuple(map(self._attention, call.attention)),
            grad_enabled=call.grad_enabled,
            autocast=call.autocast,
            random=call.random,
            samples=self.samples[kind],
            recomputed=call.recomputed,
        )

    def _attention(self, attended: AttentionObservation) -> Attention:
        entropies, queries, most = (self.attended[id(tensor)].tolist() for tensor in attended[:3])
        return Attention(
            shape=tuple(attended.most.shape),
            entropy=tuple(entropy / n if n else None for entropy, n in zip(entropies, queries, strict=True)),
            most=tuple(most),
            kind=attended.kind,
        )

    def _find_layouts(self) -> None:
        """Find the layout of each tensor: one place where it, or a DTensor with its memory, was seen may tell."""
        calls = [call for calls in self.calls.values() for _, call in calls]
        values = [seen for call in calls for _, seen in (*call.inputs, *call.outputs)]
        self.layouts = {seen.number: seen.layout for seen in values if seen.layout is not None}
        if not self.layouts:
            return
        modules = self.capture.layers.modules
        for call in (*calls, *reversed(calls)):
            if call.layer in modules and is_pointwise(modules[call.layer]) and call.inputs and call.outputs:
                one, other = call.inputs[0][1].number, call.outputs[0][1].number
                for known, unknown in ((one, other), (other, one)):
                    if known in self.layouts:
                        self.layouts.setdefault(unknown, self.layouts[known])
        for seen in values:
            if seen.backward is not None and seen.backward.reason is None:
                self.whole.setdefault(seen.number, seen.backward)

    def _value(self, path: str, seen: TensorObservation, source: str | None) -> Value:
        backward = seen.backward
        if backward is not None and backward.reason is not None:
            backward = self.whole.get(seen.number, backward)
        return Value(
            path=path,
            shape=seen.shape,
            dtype=seen.dtype,
            device=seen.device,
            requires_grad=seen.requires_grad,
            tensor=self.numbers.setdefault(seen.number, len(self.numbers)),
            forward=self.reading(seen.forward),
            # A view that was overwritten receives at most the gradient of its uses before that.
            backward=None if backward is None or seen.overwritten else self.reading(backward),
            backward_inner=None if seen.backward_inner is None else self.reading(seen.backward_inner),
            overwritten=seen.overwritten,
            layout=self.layouts.get(seen.number),
            source=seen.returned_as or source,
        )

    def reading(self, reduced: Reduction) -> Reading:
        """Return the reading of a reduction; all were collected together."""
        return self.readings[id(reduced)]

    def _counted(self, reading: Reading) -> Reading:
        if not self.first or reading.statistics is None or not reading.statistics.nonfinite:
            return reading
        return dataclasses.replace(reading, statistics=reading.statistics.counted_from(self.first))

    def _read_owned(self, which: Which, before: Mapping[str, ParameterReading]) -> None:
        after_first = self.capture.parameters if which == "first" else None
        now = reducer(self.capture.layers)
        for name, tensor in named_tensors(self.capture.layers, self.capture.selected):
            then = before.get(name)
            known = self.step.before.get(name)
            if known is not None:
                self.own[name] = self.step.buffers.get(name, known), None  # as the step left it: forwards write to it
            elif after_first is not None:
                left = after_first.get(name)
                same = left is not None and (is_lazy(tensor) or left.tensor.shape == tensor.shape)
                self.own[name] = (
                    left.reduced if left is not None and same else Reduced(reason="changed after this forward"),
                    None,
                )
            elif then is None or then.reduced.reason:  # one that was lazy had no numbers before
                self.own[name] = now(tensor), None
            else:
                self.own[name] = then.reduced, None if then.is_unchanged(tensor) else now(tensor)

    def _reduced(self) -> Iterable[Reduction]:
        for then, now in self.own.values():
            yield from (then,) if now is None else (then, now)
        for calls in self.calls.values():
            for _, call in calls:
                for _, seen in (*call.inputs, *call.outputs):
                    yield from (r for r in (seen.forward, seen.backward, seen.backward_inner) if r is not None)
        yield from self.gradients.values()
        yield from (*self.step.applied.values(), *self.step.updates.values())


class _Sources:
    """The recorded output that an input comes from: the same tensor, or a copy in another layout."""

    def __init__(
        self, observed: Mapping[str, list[tuple[ForwardKind, CallObservation]]], readings: Mapping[int, Reading]
    ) -> None:
        self._readings = readings
        self._made: dict[Hashable, list[tuple[int, str, Reading]]] = {}
        calls = ((kind, call) for calls in observed.values() for kind, call in calls)
        for kind, call in sorted(calls, key=lambda pair: pair[1].finished):  # innermost first
            for path, output in call.outputs:
                reading = readings[id(output.forward)]
                made = call.finished, address(call.layer, call, path), reading
                self._made.setdefault(output.number, []).append(made)
                self._made.setdefault((kind, _numbers(reading)), []).append(made)

    def of(self, kind: ForwardKind, call: CallObservation, seen: TensorObservation) -> str | None:
        """Return the address of the output that ``seen``, an input of ``call``, comes from."""
        for finished, where, _ in self._made.get(seen.number, ()):
            if finished < call.started:
                return where
        reading = self._readings[id(seen.forward)]
        numbers = _numbers(reading)
        for finished, where, made in self._made.get((kind, numbers), ()):
            a, b = reading.fingerprint, made.fingerprint
            if numbers is None or finished >= call.started or a is None or b is None or reading.digest != made.digest:
                continue
            if estimated_change(a, b) < 1e-5:  # of equal elements, up to the order of summation
                return where
        return None


def _numbers(reading: Reading) -> tuple[Any, ...] | None:
    """Return numbers that tensors with equal elements share exactly; None where all elements are equal."""
    numbers = reading.statistics
    if numbers is None or numbers.min == numbers.max:
        return None
    return numbers.count, numbers.min, numbers.max, numbers.zeros, numbers.nonfinite
