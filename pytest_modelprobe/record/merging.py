"""Records of the ranks of one run → the record that one process would have made."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from pytest_modelprobe.exceptions import UsageError

from .batches import batch_sizes
from .calls import Call, Dimension, Value
from .layer import Layer, Parameter
from .naming import address, qualified
from .record import Record
from .tensor_statistics import Histogram, Reading, Statistics, Units, has_nonfinite

T = TypeVar("T")

_NOT_AVERAGED = "each rank has its own, before averaging: merge the record of a step"


def merge(records: Sequence[Record], *, mean_loss: bool) -> Record:
    """See `Record.merge`."""
    if not records:
        raise UsageError("there is no record to merge: give one of each rank")
    if any(note.startswith("tensor parallel") for record in records for note in record.notes):
        raise UsageError(
            "records under tensor parallelism are not merged: a value may be a shard along any dimension. Assert on "
            "the watch in each rank"
        )
    names = dict.fromkeys(name for record in records for name in record.layers)
    merging = _Merging(records, mean_loss=mean_loss)
    layers = {}
    for name in names:
        have = [(rank, record.layers[name]) for rank, record in enumerate(records) if name in record.layers]
        layers[name] = merging.layer(have)
    return dataclasses.replace(
        records[0],
        forwards=1 if merging.is_step else records[0].forwards,
        backwards=min(records[0].backwards, 1) if merging.is_step else records[0].backwards,
        layers=layers,
        notes=(*dict.fromkeys(note for record in records for note in record.notes), *merging.notes()),
        profile=None,
        ranks=len(records),
    )


class _Merging:
    """Merges what several ranks have of a layer, each with the number of its rank."""

    def __init__(self, records: Sequence[Record], *, mean_loss: bool) -> None:
        self._mean_loss = mean_loss
        self._batches = _batches(records)
        self._same_inputs = len(records) > 1 and _have_same_inputs(records)
        self.is_step = records[0].step is not None
        """Whether the forwards are those of one step: microbatches, that make up a batch."""
        self._nonfinite: list[tuple[int, str]] = []
        """What is not finite in some ranks alone, each with the place of its call in the order of computation."""

    def notes(self) -> Iterable[str]:
        """Yield remarks on the merging itself."""
        if self._nonfinite:
            yield min(self._nonfinite)[1]
        if self._same_inputs:
            yield "all ranks were given the same inputs, and not each its part of a batch"

    def layer(self, have: list[tuple[int, Layer]]) -> Layer:
        """Return one layer."""
        first = have[0][1]
        scale = 1 / len(have) if self._mean_loss else 1.0  # ranks that have another stage have no part in its batch
        self._demand(have, first.label, "class", lambda layer: layer.type)
        self._demand(have, first.label, "parameters", lambda layer: [(p.name, p.shape) for p in layer.parameters])
        calls: dict[tuple[str, bool, int], list[tuple[int, Call]]] = {}
        for rank, layer in have:
            for call in layer.calls:
                calls.setdefault((call.root, call.root_training, call.index), []).append((rank, call))
        return dataclasses.replace(
            first,
            parameters=tuple(
                self._parameter(first, [(rank, layer.parameters[i]) for rank, layer in have])
                for i in range(len(first.parameters))
            ),
            buffers=tuple(
                self._buffer([layer.buffers[i] for _, layer in have if i < len(layer.buffers)])
                for i in range(len(first.buffers))
            ),
            calls=tuple(self._call(first.name, found, scale) for found in calls.values()),
        )

    def _parameter(self, layer: Layer, have: list[tuple[int, Parameter]]) -> Parameter:
        first = have[0][1]
        name = qualified(layer.name, first.name)
        self._demand(have, name, "requires_grad", lambda p: p.requires_grad)
        merged: dict[str, Any] = {"applied": None, "layout": None}
        is_applied = all(own.applied is not None for _, own in have)
        for field in ("reading", "after", "updated", "gradient"):
            readings = [own.applied or own.gradient if field == "gradient" else getattr(own, field) for _, own in have]
            merged[field] = readings[0]
            if (first.layout or "").startswith("shard"):
                merged[field] = _together(readings)
            elif field == "gradient" and not is_applied:
                if any(reading != readings[0] for reading in readings):
                    merged[field] = Reading(reason=_NOT_AVERAGED)
            else:
                what = f"the gradient of {name}" if field == "gradient" else name
                numbered = [(rank, reading) for (rank, _), reading in zip(have, readings, strict=True)]
                self._demand(numbered, what, "mean", _mean)
                self._demand(numbered, what, "rms", _rms)
        return dataclasses.replace(first, **merged)

    def _buffer(self, have: list[Parameter]) -> Parameter:
        if all(own.reading == have[0].reading for own in have):
            return have[0]
        return dataclasses.replace(have[0], reading=Reading(reason="each rank has its own"), after=None)

    def _call(self, layer: str, numbered: list[tuple[int, Call]], scale: float) -> Call:
        self._find_nonfinite(layer, numbered)
        have = [call for _, call in numbered]
        return dataclasses.replace(
            have[0],
            forwards=1 if self.is_step else have[0].forwards,
            inputs=self._values([v for call in have for v in call.inputs], scale),
            outputs=self._values([v for call in have for v in call.outputs], scale),
            attention=(),
            random=have[0].random if all(call.random == have[0].random for call in have) else None,
            response=None,
        )

    def _find_nonfinite(self, layer: str, numbered: list[tuple[int, Call]]) -> None:
        """Find an output of a call that is finite in some ranks and not in others."""
        ranks = {True: [], False: []}  # type: dict[bool, list[int]]
        for rank, call in numbered:
            ranks[any(has_nonfinite(value.forward) for value in call.outputs)].append(rank)
        if ranks[True] and ranks[False]:
            where, call = address(layer, numbered[0][1], "output"), numbered[0][1]
            text = f"{where} is not finite in [rank {ranks[True][0]}], and is finite in [rank {ranks[False][0]}]"
            self._nonfinite.append((call.finished, text))

    def _values(self, of_all: Iterable[Value], scale: float) -> tuple[Value, ...]:
        by_path: dict[str, list[Value]] = {}
        for value in of_all:
            by_path.setdefault(value.path, []).append(value)
        return tuple(self._value(have, scale) for have in by_path.values())

    def _value(self, have: list[Value], scale: float) -> Value:
        first = have[0]
        batch = not self._same_inputs and all(
            bool(value.shape) and value.shape[0] in sizes for value, sizes in zip(have, self._batches, strict=False)
        )
        if not batch and all(value.forward.statistics == first.forward.statistics for value in have):
            return self._replicated(have)
        together = functools.partial(_together, adds_up=batch, of_step=self.is_step)
        scaled = functools.partial(_scaled, factor=scale)
        return dataclasses.replace(
            first,
            shape=_shape([_shape_of_step(value) if self.is_step and batch else value.shape for value in have]),
            forward=together([value.forward for value in have]) or first.forward,
            backward=_map(scaled, together([value.backward for value in have])),
            backward_inner=_map(scaled, together([value.backward_inner for value in have])),
            layout="batch",
        )

    def _replicated(self, have: list[Value]) -> Value:
        first = have[0]
        if self.is_step:
            first = dataclasses.replace(first, forward=_once(first.forward), backward=_map(_once, first.backward))
            have = [dataclasses.replace(value, backward=_map(_once, value.backward)) for value in have]
        if any(value.backward != first.backward for value in have):
            reason = "gradient of a value that all ranks have: each has a term of it, and not the sum"
            first = dataclasses.replace(first, backward=Reading(reason=reason))
        return dataclasses.replace(
            first,
            forward=dataclasses.replace(first.forward, fingerprint=None, digest=None),
            backward=_map(lambda r: dataclasses.replace(r, fingerprint=None), first.backward),
            layout="replicated",
        )

    @staticmethod
    def _demand(have: Sequence[tuple[int, T]], name: str, what: str, of: Callable[[T], Any]) -> None:
        """Raise AssertionError where a rank differs from the first in what all should have in common."""
        rank, first = have[0]
        for other, one in have[1:]:
            if of(one) != of(first):
                raise AssertionError(
                    f"ranks disagree: {name} has another {what} in [rank {other}] than in [rank {rank}]: "
                    f"{_shown(of(one))}, not {_shown(of(first))}. All ranks should have the same: look at the seed, at "
                    "the weights that each loads, and at what is frozen"
                )


def _mean(reading: Reading | None) -> float | None:
    return None if reading is None or reading.statistics is None else reading.statistics.mean


def _rms(reading: Reading | None) -> float | None:
    return None if reading is None or reading.statistics is None else reading.statistics.rms


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _map(function: Callable[[Reading], Reading], reading: Reading | None) -> Reading | None:
    return None if reading is None else function(reading)


def _batches(records: Sequence[Record]) -> list[frozenset[Dimension]]:
    """Return which sizes of dimension 0 are the batch, of each rank: from the first input of the outermost call."""
    shapes = (next((value.shape for value in _inputs(record) if value.shape), ()) for record in records)
    return [_sizes(shape) for shape in shapes]


def _sizes(shape: tuple[Dimension, ...]) -> frozenset[Dimension]:
    whole = [size for size in shape if isinstance(size, int)]
    return batch_sizes(whole[0], whole[1:]) if whole and len(whole) == len(shape) else frozenset(shape[:1])


def _have_same_inputs(records: Sequence[Record]) -> bool:
    of_each = [[value.forward for value in _inputs(record)] for record in records]
    return bool(of_each[0]) and all(inputs == of_each[0] for inputs in of_each)


def _inputs(record: Record) -> Sequence[Value]:
    return next((call.inputs for layer, call in record.calls if call.root == layer.name), ())


def _together(readings: Sequence[Reading | None], *, adds_up: bool = False, of_step: bool = False) -> Reading | None:
    """Return the reading of the parts of all ranks together; None where none has one.

    Args:
        readings: Of each rank.
        adds_up: Whether the parts are those of a batch, so that their fingerprints add up.
        of_step: Whether microbatches count as one batch.
    """
    have = [reading for reading in readings if reading is not None]
    if not have:
        return None
    unread = next((r for r in have if r.statistics is None and r.reason), None)
    if unread is not None:  # the numbers of the others are not those of the whole
        return Reading(tensors=have[0].tensors, reason=unread.reason)
    statistics = [r.statistics for r in have if r.statistics is not None and r.statistics.count]
    histograms = [r.histogram for r in have if r.histogram is not None]
    return Reading(
        tensors=1 if of_step and adds_up else have[0].tensors,
        statistics=functools.reduce(Statistics.merge, statistics) if statistics else have[0].statistics,
        fingerprint=_sum_of_fingerprints(have) if adds_up else None,
        digest=_sum_of_digests(have) if adds_up else None,
        units=_units([r.units for r in have]),
        reason=next((r.reason for r in have if r.reason), None),
        histogram=functools.reduce(Histogram.merge, histograms) if histograms else None,
    )


def _sum_of_fingerprints(readings: Sequence[Reading]) -> tuple[float, ...] | None:
    all_have = [reading.fingerprint for reading in readings if reading.fingerprint is not None]
    return tuple(map(math.fsum, zip(*all_have, strict=True))) if len(all_have) == len(readings) else None


def _sum_of_digests(readings: Sequence[Reading]) -> str | None:
    all_have = [int(reading.digest, 16) for reading in readings if reading.digest is not None]
    return f"{sum(all_have) % 2**64:016x}" if len(all_have) == len(readings) else None


def _once(reading: Reading) -> Reading:
    """Return the reading of a value that every microbatch has, as if it had been read in one."""
    s, times = reading.statistics, reading.tensors
    if s is None or times == 1 or s.count % times:
        return reading
    counts = {name: getattr(s, name) // times for name in ("count", "zeros", "nan", "posinf", "neginf")}
    return dataclasses.replace(
        reading, tensors=1, statistics=dataclasses.replace(s, **counts, deviations=s.deviations / times)
    )


def _shape_of_step(value: Value) -> tuple[Dimension, ...]:
    """Return the shape of a value of all microbatches of a step together."""
    size, *inner = value.shape
    times = value.forward.tensors
    return (size * times, *inner) if isinstance(size, int) else value.shape


def _units(units: Sequence[Units | None]) -> Units | None:
    have = [one for one in units if one is not None]
    if len(have) < len(units) or len({(one.axis, len(one)) for one in have}) != 1:
        return None
    lows, highs = zip(*(one.low for one in have), strict=True), zip(*(one.high for one in have), strict=True)
    return Units(axis=have[0].axis, low=tuple(map(min, lows)), high=tuple(map(max, highs)))


def _scaled(reading: Reading, factor: float) -> Reading:
    s = reading.statistics
    if s is None or s.mean is None or s.min is None or s.max is None:
        return reading
    scaled = dataclasses.replace(
        s,
        min=s.min * factor,
        max=s.max * factor,
        mean=s.mean * factor,
        deviations=s.deviations * factor * factor,
    )
    fingerprint = None if reading.fingerprint is None else tuple(factor * x for x in reading.fingerprint)
    return dataclasses.replace(reading, statistics=scaled, units=None, fingerprint=fingerprint, histogram=None)


def _shape(shapes: Sequence[tuple[Dimension, ...]]) -> tuple[Dimension, ...]:
    first = shapes[0]
    sizes = [shape[0] for shape in shapes if shape]
    whole = [size for size in sizes if isinstance(size, int)]
    if not first or len(whole) < len(shapes) or any(shape[1:] != first[1:] for shape in shapes):
        return first
    return sum(whole), *first[1:]
