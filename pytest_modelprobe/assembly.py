"""Capture → record: the one place where what the hooks wrote becomes plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from . import statistics
from .capture import Capture
from .layers import attributes, own_buffers, own_parameters, type_name
from .observation import Forward, Kind, Observed, ObservedCall, Totals
from .record import ROOT, Call, Layer, Parameter, Reading, Record, Value, address
from .statistics import Reduced

Which = Literal["all", "first", "last"]


def assemble(
    capture: Capture,
    which: Which = "all",
    *,
    model: nn.Module,
    device: str,
    seed: int | None = None,
    loss: str | None = None,
) -> Record:
    """Return the record of all forwards merged, or of the first or the newest alone."""
    capture.check()
    builder = _Builder(capture, _parts(capture, which))
    return Record(
        model=type(model).__qualname__,
        layers=builder.layers(),
        forwards=sum(part.forwards for part in builder.parts.values()),
        backwards=capture.backwards,
        device=device,
        seed=seed,
        loss=loss,
        notes=tuple(capture.layers.notes),
        versions={"torch": str(torch.__version__), "numpy": numpy.__version__},
    )


def _parts(capture: Capture, which: Which) -> dict[Kind, Totals]:
    """Return what to tell of, by kind of forward. Totals are copied: a preview must not stay in them."""
    parts: dict[Kind, Totals] = {}
    if which == "all":
        parts = {kind: totals.copy() for kind, totals in capture.totals.items()}
    forward: Forward | None = capture.first if which == "first" else capture.newest
    if forward is not None:
        parts.setdefault(forward.kind, Totals()).absorb(forward, final=False)
    return parts


class _Builder:
    def __init__(self, capture: Capture, parts: dict[Kind, Totals]) -> None:
        self.capture = capture
        self.parts = parts
        self.calls: dict[str, list[tuple[Kind, ObservedCall]]] = {}
        for kind, totals in parts.items():
            for (layer, _), call in totals.calls.items():
                self.calls.setdefault(layer, []).append((kind, call))
        self.own: dict[int, Reduced] = {}
        self.ties: dict[int, str] = {}
        self.readings = self._collect()
        self.numbers: dict[int, int] = {}
        self.sources = _Sources(self)

    def layers(self) -> dict[str, Layer]:
        """Return the selected layers in the model's order, each functional one after the layer that called it."""
        found = {
            name: self._layer(name, module)
            for name, module in self.capture.layers.modules.items()
            if name in self.capture.selected
        }
        for name, function in self.capture.functional_types.items():
            found[name] = Layer(name=name, type=function, functional=True, calls=self._calls(name))
        return found

    def _layer(self, name: str, module: nn.Module) -> Layer:
        leaf = self.capture.layers.is_leaf(name)
        atomic = leaf and bool(module._modules)
        return Layer(
            name=name,
            type=type_name(module),
            leaf=leaf,
            training=module.training,
            attributes=attributes(module),
            aliases=tuple(self.capture.layers.aliases.get(name, ())),
            parameters=tuple(
                self._parameter(name, own, tensor) for own, tensor in own_parameters(module, atomic=atomic)
            ),
            buffers=tuple(self._parameter(name, own, tensor) for own, tensor in own_buffers(module, atomic=atomic)),
            calls=self._calls(name),
        )

    def _parameter(self, layer: str, name: str, tensor: torch.Tensor) -> Parameter:
        full = name if layer == ROOT else f"{layer}.{name}"
        first = self.ties.setdefault(id(tensor), full)
        gradients = [part.parameters[full] for part in self.parts.values() if full in part.parameters]
        gradient = None
        for reduced in gradients:
            gradient = reduced if gradient is None else statistics.merge(gradient, reduced)
        return Parameter(
            name=name,
            shape=_shape(tensor),
            dtype=_plain(tensor.dtype),
            device=str(tensor.device),
            requires_grad=tensor.requires_grad,
            tied_to=None if first == full else first,
            reading=self.readings[id(self.own[id(tensor)])],
            gradient=None if gradient is None else self._reading(gradient),
        )

    def _calls(self, layer: str) -> tuple[Call, ...]:
        return tuple(self._call(kind, call) for kind, call in self.calls.get(layer, ()))

    def _call(self, kind: Kind, call: ObservedCall) -> Call:
        root, root_training = kind
        return Call(
            root=root,
            root_training=root_training,
            index=call.index,
            forwards=call.forwards,
            started=call.started,
            finished=call.finished,
            training=call.training,
            inputs=tuple(self._value(path, seen, self.sources.of(call, seen)) for path, seen in call.inputs),
            inputs_known=call.inputs_known,
            outputs=tuple(self._value(path, seen, None) for path, seen in call.outputs),
            arguments=call.arguments,
            grad_enabled=call.grad_enabled,
            autocast=call.autocast,
            random=call.random,
            recomputed=call.recomputed,
        )

    def _value(self, path: str, seen: Observed, source: str | None) -> Value:
        return Value(
            path=path,
            shape=seen.shape,
            dtype=seen.dtype,
            device=seen.device,
            requires_grad=seen.requires_grad,
            tensor=self.numbers.setdefault(id(seen), len(self.numbers)),
            forward=self._reading(seen.forward),
            backward=None if seen.backward is None else self._reading(seen.backward),
            backward_inner=None if seen.backward_inner is None else self._reading(seen.backward_inner),
            overwritten=seen.overwritten,
            source=source,
        )

    # --- numbers: everything in one transfer ----------------------------------------------------------------------

    def _reading(self, reduced: Reduced) -> Reading:
        found = self.readings.get(id(reduced))
        return statistics.collect([reduced])[0] if found is None else found

    def _collect(self) -> dict[int, Reading]:
        for name in self.capture.selected:
            module = self.capture.layers.modules[name]
            atomic = self.capture.layers.is_leaf(name)
            for _, tensor in (*own_parameters(module, atomic=atomic), *own_buffers(module, atomic=atomic)):
                if id(tensor) not in self.own:
                    self.own[id(tensor)] = statistics.reduce(tensor)
        unique = {id(reduced): reduced for reduced in (*self.own.values(), *self._reduced())}
        return dict(zip(unique, statistics.collect(list(unique.values())), strict=True))

    def _reduced(self) -> Iterable[Reduced]:
        for calls in self.calls.values():
            for _, call in calls:
                for _, seen in (*call.inputs, *call.outputs):
                    yield from (r for r in (seen.forward, seen.backward, seen.backward_inner) if r is not None)
        for part in self.parts.values():
            yield from part.parameters.values()


class _Sources:
    """Which recorded output an input comes from: the same tensor, or one equal in its numbers, as layouts copy."""

    def __init__(self, builder: _Builder) -> None:
        self._builder = builder
        self._same: dict[int, str] = {}
        self._equal: dict[Any, list[tuple[int, str, Reading]]] = {}
        calls = (call for calls in builder.calls.values() for _, call in calls)
        for call in sorted(calls, key=lambda c: c.finished):  # the innermost layer that made it comes first
            for path, seen in call.outputs:
                where = _address(call, path)
                self._same.setdefault(id(seen), where)
                reading = builder._reading(seen.forward)
                self._equal.setdefault(_numbers(reading), []).append((call.finished, where, reading))

    def of(self, call: ObservedCall, seen: Observed) -> str | None:
        """Return the address of the output that ``seen``, an input of ``call``, comes from."""
        if id(seen) in self._same:
            return self._same[id(seen)]
        reading = self._builder._reading(seen.forward)
        key = _numbers(reading)
        if key is None:
            return None
        for _, where, other in self._equal.get(key, ()):
            if _agree(reading, other):
                return where
        return None


def _numbers(reading: Reading) -> tuple[Any, ...] | None:
    """Return what equal tensors share to the last bit; None where it would say little."""
    numbers = reading.statistics
    if numbers is None or numbers.min == numbers.max:
        return None
    return numbers.count, numbers.min, numbers.max, numbers.zeros, numbers.nonfinite


def _agree(a: Reading, b: Reading) -> bool:
    """Whether means agree as they do for one set of numbers summed in two orders."""
    if a.statistics is None or b.statistics is None:
        return False
    if a.statistics.mean is None or b.statistics.mean is None:
        return a.statistics.mean is b.statistics.mean
    tolerance = 1e-6 * (a.statistics.rms or 1.0)
    return math.isclose(a.statistics.mean, b.statistics.mean, abs_tol=tolerance)


def _address(call: ObservedCall, path: str) -> str:
    named = Call(root="", root_training=False, index=call.index)
    return address(call.layer, named, path)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if is_lazy(tensor) else tuple(tensor.shape)


def _plain(value: Any) -> str:
    return str(value).removeprefix("torch.")
