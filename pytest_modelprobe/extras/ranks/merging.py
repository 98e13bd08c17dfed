"""Records of the ranks of one run → the record that one process would have made.

With it, a test of a distributed run can be compared with a snapshot of a run in one process. A merged number is given
only if it is exact: moments and fingerprints of the parts of a batch add up, and replicas have to be equal. For
everything else the reading says why there is no number.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_modelprobe._torch import default_store
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.probe import ModelProbe, Watch
from pytest_modelprobe.record import (
    Call,
    Dimension,
    Histogram,
    Layer,
    Parameter,
    Reading,
    Record,
    Statistics,
    Units,
    Value,
    address,
    batch_sizes,
    has_nonfinite,
    process_group,
    qualified,
    this_rank,
)

if TYPE_CHECKING:
    from pytest_modelprobe.record import OptimizerGroup, Training

T = TypeVar("T")

# --- readings of several ranks as one, and what has to be equal in all of them ----------------------------------------

SAME_START = "All ranks should have the same: look at the seed, at the weights that each loads, and at what is frozen"
NOT_REDUCED = (
    "Gradients were not reduced over the ranks before the optimizer's step: call the model that "
    "DistributedDataParallel wraps through the wrapper, and outside no_sync()"
)
OTHER_STEP = "The gradients are the same: look at each rank's optimizer, its hyperparameters and its state"


def demand_equal(
    have: Sequence[tuple[int, T]], name: str, what: str, of: Callable[[T], Any], advice: str = SAME_START
) -> None:
    """Raise `AssertionError` if a rank differs from the first in what all should have in common."""
    rank, first = have[0]
    for other, one in have[1:]:
        if of(one) != of(first):
            here, there = _shown(of(one)), _shown(of(first))
            if here == there:  # six digits do not show the difference
                here, there = str(of(one)), str(of(first))
            raise AssertionError(
                f"ranks disagree: {name} has another {what} in [rank {other}] than in [rank {rank}]: "
                f"{here}, not {there}. {advice}"
            )


def demand_alike(have: Sequence[tuple[int, Layer]]) -> None:
    """Raise `AssertionError` if a layer does not have the same class and parameters in all ranks."""
    label = have[0][1].label
    demand_equal(have, label, "class", lambda layer: layer.type)
    demand_equal(have, label, "parameters", lambda layer: [(p.name, p.shape) for p in layer.parameters])


def mean(reading: Reading | None) -> float | None:
    """Return the mean, or `None` if there is none."""
    return None if reading is None or reading.statistics is None else reading.statistics.mean


def rms(reading: Reading | None) -> float | None:
    """Return the root mean square, or `None` if there is none."""
    return None if reading is None or reading.statistics is None else reading.statistics.rms


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def together(readings: Sequence[Reading | None], *, adds_up: bool = False, of_step: bool = False) -> Reading | None:
    """Return the reading of the parts of all ranks together, or `None` if no rank has one.

    Args:
        readings: The reading of each rank.
        adds_up: Whether the parts are those of a batch, so that their fingerprints add up.
        of_step: Whether microbatches count as one batch.
    """
    have = [reading for reading in readings if reading is not None]
    if not have:
        return None
    unread = next((r for r in have if r.statistics is None and r.reason), None)
    if unread is not None:  # the numbers of the other ranks would pass for those of the whole
        return Reading(tensors=have[0].tensors, reason=unread.reason)
    statistics = [r.statistics for r in have if r.statistics is not None and r.statistics.count]
    histograms = [r.histogram for r in have if r.histogram is not None]
    return Reading(
        tensors=1 if of_step and adds_up else have[0].tensors,
        statistics=functools.reduce(Statistics.merge, statistics) if statistics else have[0].statistics,
        fingerprint=_sum_of_fingerprints(have) if adds_up else None,
        digest=added([reading.digest for reading in have]) if adds_up else None,
        units=_units([r.units for r in have]),
        reason=next((r.reason for r in have if r.reason), None),
        histogram=functools.reduce(Histogram.merge, histograms) if histograms else None,
    )


def _sum_of_fingerprints(readings: Sequence[Reading]) -> tuple[float, ...] | None:
    all_have = [reading.fingerprint for reading in readings if reading.fingerprint is not None]
    return tuple(map(math.fsum, zip(*all_have, strict=True))) if len(all_have) == len(readings) else None


def added(digests: Sequence[str | None]) -> str | None:
    """Return the digest of parts together, or `None` if one has none. A digest is a sum of hashes in 64 bits."""
    all_have = [int(digest, 16) for digest in digests if digest is not None]
    return f"{sum(all_have) % 2**64:016x}" if len(all_have) == len(digests) else None


def once(reading: Reading) -> Reading:
    """Return the reading of a value that is the same in every microbatch as if it had been read in one of them."""
    s, times = reading.statistics, reading.tensors
    # If the microbatches are not equally large, what one of them had is not known.
    if s is None or times == 1 or s.count % times:
        return reading
    counts = {name: getattr(s, name) // times for name in ("count", "zeros", "nan", "posinf", "neginf")}
    return dataclasses.replace(
        reading, tensors=1, statistics=dataclasses.replace(s, **counts, deviations=s.deviations / times)
    )


def _units(units: Sequence[Units | None]) -> Units | None:
    have = [one for one in units if one is not None]
    if len(have) < len(units) or len({(one.axis, len(one)) for one in have}) != 1:
        return None
    lows, highs = zip(*(one.low for one in have), strict=True), zip(*(one.high for one in have), strict=True)
    return Units(axis=have[0].axis, low=tuple(map(min, lows)), high=tuple(map(max, highs)))


def scaled(reading: Reading, factor: float) -> Reading:
    """Return the reading of the same tensor times a positive factor, without units and histogram."""
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


# --- what the optimizers of all ranks did -----------------------------------------------------------------------------

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
            demand_equal(groups, name, "optimizer", lambda group: group.optimizer if group else "none", _SAME_OPTIMIZER)
            for key in dict.fromkeys(key for _, group in groups if group is not None for key in group.options):
                what = f"the optimizer of {name}"
                of_each = [(rank, None if group is None else group.options.get(key)) for rank, group in groups]
                demand_equal(of_each, what, key, lambda value: value, _SAME_OPTIMIZER)

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


_PARTS_UNKNOWN = ("tensor parallel", "several kinds of parallelism")
"""Beginnings of the notes in records of which the parts are not known."""

_UNMERGED = (
    "records are not merged under tensor parallelism, alone or beside FSDP2 or DDP: which part of the whole a rank has "
    "is not known. Assert on the watch in each rank"
)
_REDUCED = "whether gradients are reduced over the ranks, as DistributedDataParallel does"
_SAME_INPUTS = "all ranks were given the same inputs, and not each its part of a batch"
_NOT_AVERAGED = "each rank has its own, before averaging: merge the record of a step"


def _merge(records: Sequence[Record], *, mean_loss: bool) -> Record:
    if not records:
        raise UsageError("there is no record to merge: give one of each rank")
    if any(note.startswith(_PARTS_UNKNOWN) for record in records for note in record.notes):
        raise UsageError(_UNMERGED)
    stepping = Stepping(records)
    merging = _Merging(records, mean_loss=mean_loss)
    merging.is_step = stepping.step is not None
    layers = {}
    for name in dict.fromkeys(name for record in records for name in record.layers):
        have = [(rank, record.layers[name]) for rank, record in enumerate(records) if name in record.layers]
        demand_alike(have)
        stepping.demand_alike(have)
        layers[name] = stepping.numbered(merging.layer(have), have[0][0])
    notes = dict.fromkeys(note for record in records for note in record.notes)
    return dataclasses.replace(
        records[0],
        forwards=1 if merging.is_step else records[0].forwards,
        backwards=min(records[0].backwards, 1) if merging.is_step else records[0].backwards,
        layers=layers,
        notes=(
            *(text for _, text in sorted(merging.nonfinite)[:1]),
            *notes,
            *((_SAME_INPUTS,) if merging.same_inputs else ()),
            *stepping.notes,
        ),
        step=stepping.step,
        optimizers=tuple(stepping.optimizers),
        applied=records[0].applied if len({record.applied for record in records}) == 1 else None,
        training=stepping.training,
        profile=None,
        ranks=len(records),
    )


class _Merging:
    """Merges what several ranks have of a layer, each with the number of its rank.

    Args:
        records: The records.
        mean_loss: See `Record.merge`.
    """

    def __init__(self, records: Sequence[Record], *, mean_loss: bool) -> None:
        self._mean_loss = mean_loss
        self._batches = _batches(records)
        inputs = [[value.forward for value in _inputs(record)] for record in records]
        self.same_inputs = len(records) > 1 and bool(inputs[0]) and all(one == inputs[0] for one in inputs)
        self.is_step = records[0].step is not None
        """Whether the forwards are those of one step. They are microbatches then, which make up one batch."""
        self._same_start = f"{SAME_START}; in the steps before, at {_REDUCED}" if records[0].step else SAME_START
        self.nonfinite: list[tuple[int, str]] = []
        """What is not finite in some ranks only, each with the place of its call in the order of computation."""

    def layer(self, have: list[tuple[int, Layer]]) -> Layer:
        """Return the layer of all ranks that have it."""
        first = have[0][1]
        # Only the ranks that have the layer count: under pipeline parallelism the others have no part of its batch.
        scale = 1 / len(have) if self._mean_loss else 1.0
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
        demand_equal(have, name, "requires_grad", lambda p: p.requires_grad)
        merged: dict[str, Any] = {"applied": None, "layout": None}
        is_applied = all(own.applied is not None for _, own in have)
        advice = {"reading": self._same_start, "gradient": NOT_REDUCED}
        # In the order of cause and effect, so that the advice of the first that differs is the right one.
        for field in ("reading", "gradient", "update", "after"):
            readings = [own.applied or own.gradient if field == "gradient" else getattr(own, field) for _, own in have]
            merged[field] = readings[0]
            if (first.layout or "").startswith("shard"):
                merged[field] = together(readings)
            elif field == "gradient" and not is_applied:
                if any(reading != readings[0] for reading in readings):
                    merged[field] = Reading(reason=_NOT_AVERAGED)
            else:
                what = f"the gradient of {name}" if field == "gradient" else name
                numbered = [(rank, reading) for (rank, _), reading in zip(have, readings, strict=True)]
                demand_equal(numbered, what, "mean", mean, advice.get(field, OTHER_STEP))
                demand_equal(numbered, what, "rms", rms, advice.get(field, OTHER_STEP))
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
            samples=have[0].samples if self.same_inputs else added([call.samples for call in have]),
            random=have[0].random if all(call.random == have[0].random for call in have) else None,
            response=None,
        )

    def _find_nonfinite(self, layer: str, numbered: list[tuple[int, Call]]) -> None:
        """Note an output of a call that is finite in some ranks and not in others."""
        ranks = {True: [], False: []}  # type: dict[bool, list[int]]
        for rank, call in numbered:
            ranks[any(has_nonfinite(value.forward) for value in call.outputs)].append(rank)
        if ranks[True] and ranks[False]:
            where, call = address(layer, numbered[0][1], "output"), numbered[0][1]
            text = f"{where} is not finite in [rank {ranks[True][0]}], and is finite in [rank {ranks[False][0]}]"
            self.nonfinite.append((call.finished, text))

    def _values(self, of_all: Iterable[Value], scale: float) -> tuple[Value, ...]:
        by_path: dict[str, list[Value]] = {}
        for value in of_all:
            by_path.setdefault(value.path, []).append(value)
        return tuple(self._value(have, scale) for have in by_path.values())

    def _value(self, have: list[Value], scale: float) -> Value:
        first = have[0]
        sized = [(value.shape[:1], sizes) for value, sizes in zip(have, self._batches, strict=False)]
        # The same input in all ranks is not a batch in parts, whatever the sizes are.
        batch = not self.same_inputs and all(size and size[0] in sizes for size, sizes in sized)
        # A table that all share may have the size of one sample that is flattened.
        may_be_table = not batch or any(1 in sizes and size != (1,) for size, sizes in sized)
        if may_be_table and all(value.forward.statistics == first.forward.statistics for value in have):
            return self._replicated(have)
        of_all = functools.partial(together, adds_up=batch, of_step=self.is_step)
        of_mean = functools.partial(scaled, factor=scale)
        return dataclasses.replace(
            first,
            shape=_shape([_shape_of_step(value) if self.is_step and batch else value.shape for value in have]),
            forward=of_all([value.forward for value in have]) or first.forward,
            backward=_map(of_mean, of_all([value.backward for value in have])),
            backward_inner=_map(of_mean, of_all([value.backward_inner for value in have])),
            layout="batch",
        )

    def _replicated(self, have: list[Value]) -> Value:
        first = have[0]
        if self.is_step:
            first = dataclasses.replace(first, forward=once(first.forward), backward=_map(once, first.backward))
            have = [dataclasses.replace(value, backward=_map(once, value.backward)) for value in have]
        # All ranks used the value, so that its gradient is the sum over them, and each has its own term of it only.
        if any(value.backward != first.backward for value in have):
            reason = "gradient of a value that all ranks have: each has a term of it, and not the sum"
            first = dataclasses.replace(first, backward=Reading(reason=reason))
        return dataclasses.replace(
            first,
            forward=dataclasses.replace(first.forward, fingerprint=None, digest=None),
            backward=_map(lambda r: dataclasses.replace(r, fingerprint=None), first.backward),
            layout="replicated",
        )


def _map(function: Callable[[Reading], Reading], reading: Reading | None) -> Reading | None:
    return None if reading is None else function(reading)


def _batches(records: Sequence[Record]) -> list[frozenset[Dimension]]:
    """Return for each rank which sizes of dimension 0 are the batch, told by the first input of the outermost call."""
    shapes = (next((value.shape for value in _inputs(record) if value.shape), ()) for record in records)
    return [_sizes(shape) for shape in shapes]


def _sizes(shape: tuple[Dimension, ...]) -> frozenset[Dimension]:
    whole = [size for size in shape if isinstance(size, int)]
    return batch_sizes(whole[0], whole[1:]) if whole and len(whole) == len(shape) else frozenset(shape[:1])


def _inputs(record: Record) -> Sequence[Value]:
    return next((call.inputs for layer, call in record.calls if call.root == layer.name), ())


def _shape_of_step(value: Value) -> tuple[Dimension, ...]:
    """Return the shape that a value would have if all microbatches of a step were one batch."""
    size, *inner = value.shape
    times = value.forward.tensors
    return (size * times, *inner) if isinstance(size, int) else value.shape


def _shape(shapes: Sequence[tuple[Dimension, ...]]) -> tuple[Dimension, ...]:
    first = shapes[0]
    sizes = [shape[0] for shape in shapes if shape]
    whole = [size for size in sizes if isinstance(size, int)]
    if not first or len(whole) < len(shapes) or any(shape[1:] != first[1:] for shape in shapes):
        return first
    return sum(whole), *first[1:]


def _merge_of_record(records: Sequence[Record], *, mean_loss: bool = True) -> Record:
    """Return the record that one process would have made of what several ranks did, each with its part.

    Activations are those of the batches of all ranks together, and their gradients those of the mean of the ranks'
    losses. Shards of parameters are put together, and replicas have to be equal. The parameters' gradients are
    those that an optimizer applied, so give records of a step. A layer that only some ranks have, as under pipeline
    parallelism, comes from these ranks. In the record of a step, microbatches count as one batch. A value gets a
    fingerprint only if its dimension 0 is the batch.

    Args:
        records: One record of each rank, in order.
        mean_loss: Whether each rank's loss is a mean over its part of the batch. False if it is a sum.

    Raises:
        AssertionError: Ranks disagree on what they should have in common. The message names the layer and the rank.
        UsageError: There are no records, or the model is tensor parallel.

    >>> from pytest_modelprobe.record import Record
    >>> merged = Record.merge([Record(model="Net", forwards=1), Record(model="Net", forwards=1)])
    >>> merged.forwards, merged.ranks
    (1, 2)
    """
    return _merge(records, mean_loss=mean_loss)


merge_of_record = staticmethod(_merge_of_record)


# --- in all ranks -----------------------------------------------------------------------------------------------------

_turns = itertools.count()
"""Numbers the exchanges of this process. Every rank makes the same ones in the same order, so the numbers agree."""


def merged_by_probe(probe: ModelProbe, subject: Watch | Record, /, *, mean_loss: bool = True) -> Record:
    """Return one record of what all ranks did, as one process would have made it of the whole batch.

    Every rank has to call it; each returns the same. The records go through the store of the process group, and no
    collective is called. Without a process group, or in one of one rank, it is the record alone, made alike.

    Args:
        subject: A watch: its first step, or all forwards where no optimizer stepped. Or a record of this rank.
        mean_loss: Whether each rank's loss is a mean over its part of the batch; False: a sum.

    Raises:
        AssertionError: Ranks disagree on what they should have in common; names the layer and the rank.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> probe = ModelProbe()
    >>> probe.merged(probe.run(nn.Linear(4, 2), probe.randn(3, 4))).ranks
    1
    """
    if isinstance(subject, Watch):
        subject = subject.first_step if len(subject.steps) else subject.record
    mine = this_rank()
    if process_group() is None or mine.world_size == 1:
        return Record.merge([subject], mean_loss=mean_loss)
    store, turn = default_store(), next(_turns)

    def give(name: str, data: dict[str, Any]) -> None:
        store.set(f"modelprobe/{turn}/{name}", zlib.compress(json.dumps(data).encode()))

    def take(name: str) -> dict[str, Any]:
        key = f"modelprobe/{turn}/{name}"
        store.wait([key], datetime.timedelta(seconds=60))
        data: dict[str, Any] = json.loads(zlib.decompress(store.get(key)))
        return data

    give(str(mine.rank), subject.to_dict())
    if not mine.rank:
        records = [Record.from_dict(take(str(other))) for other in range(mine.world_size)]
        try:
            found: dict[str, Any] = {"record": Record.merge(records, mean_loss=mean_loss).to_dict()}
        except (AssertionError, UsageError) as error:  # every rank raises it
            found = {type(error).__name__: str(error)}
        give("merged", found)
    found = take("merged")
    for kind in (UsageError, AssertionError):
        if kind.__name__ in found:
            raise kind(found[kind.__name__])
    return Record.from_dict(found["record"])
