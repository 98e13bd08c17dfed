"""Records of the ranks of one run → the record that one process would have made.

With it, a test of a distributed run can be compared with a snapshot of a run in one process. A merged number is given
only if it is exact: moments and fingerprints of the parts of a batch add up, and replicas have to be equal. For
everything else the reading says why there is no number. A function here merges some layers at a time, because the
processes of a run share that work.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_modelprobe.exceptions import UsageError

from .layer import Call, Dimension, Layer, Parameter, Value, address, batch_sizes, qualified
from .stepping import Stepping
from .tensor_parallel import MIXED, TENSOR_PARALLEL, Joining
from .tensor_statistics import Reading, has_nonfinite
from .together import (
    NOT_REDUCED,
    OTHER_STEP,
    SAME_START,
    added,
    demand_alike,
    demand_equal,
    mean,
    once,
    rms,
    scaled,
    together,
)

if TYPE_CHECKING:
    from .record import Record

_MIXED = (
    "records are not merged where ranks have their parts in several ways, as under tensor parallelism beside FSDP2 or "
    "DDP: which part of the whole a rank has is not known. Assert on the watch in each rank"
)
_REDUCED = "whether gradients are reduced over the ranks, as DistributedDataParallel does"
_SAME_INPUTS = "all ranks were given the same inputs, and not each its part of a batch"
_NOT_AVERAGED = "each rank has its own, before averaging: merge the record of a step"


@dataclass(frozen=True, slots=True)
class Merged:
    """Some layers, merged, and what has to be said when all layers are."""

    record: Record
    problem: tuple[str, int, str] | None = None
    """Why there is no record: its kind, the place of the layer, and the text. Ranks disagree, or cannot be merged. The
    first by kind and place is the one that is raised."""
    nonfinite: tuple[tuple[int, str], ...] = ()
    """The first output that is not finite in some ranks only, with its place in the order of computation."""


def merge(records: Sequence[Record], *, mean_loss: bool) -> Record:
    """Merge the records of all ranks, see `Record.merge`."""
    if not records:
        raise UsageError("there is no record to merge: give one of each rank")
    names = dict.fromkeys(name for record in records for name in record.layers)
    return assembled([merge_layers(records, {name: place for place, name in enumerate(names)}, mean_loss=mean_loss)])


def merge_layers(records: Sequence[Record], places: Mapping[str, int], *, mean_loss: bool) -> Merged:
    """Merge some layers.

    Args:
        records: One of each rank. Besides these layers they need the outermost one, for the model's input.
        places: The place of each layer in the merged record.
        mean_loss: See `Record.merge`.
    """
    if any(note.startswith(MIXED) for record in records for note in record.notes):
        return Merged(records[0], ("usage", 0, _MIXED))
    # Tensor-parallel ranks are given the same batch: they are joined to one rank first, which is then merged alone.
    is_joined = any(note.startswith(TENSOR_PARALLEL) for record in records for note in record.notes)
    try:
        stepping = Stepping(records)
    except AssertionError as error:
        return Merged(records[0], ("structure", -1, str(error)))
    joining = Joining()
    merging = _Merging(records[:1] if is_joined else records, mean_loss=mean_loss, is_joined=is_joined)
    merging.is_step = stepping.step is not None
    layers = {}
    for name, place in sorted(places.items(), key=operator.itemgetter(1)):
        have = [(rank, record.layers[name]) for rank, record in enumerate(records) if name in record.layers]
        try:
            demand_alike(have)
            stepping.demand_alike(have)
            merged = merging.layer([(0, joining.layer(have))] if is_joined else have)
            layers[name] = stepping.numbered(merged, have[0][0])
        except AssertionError as error:
            return Merged(records[0], ("structure", place, str(error)))
    notes = dict.fromkeys(note for record in records for note in record.notes)
    record = dataclasses.replace(
        records[0],
        forwards=1 if merging.is_step else records[0].forwards,
        backwards=min(records[0].backwards, 1) if merging.is_step else records[0].backwards,
        layers=layers,
        notes=(
            *(note for note in notes if not note.startswith(TENSOR_PARALLEL)),
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
    problem = ("value", *min(joining.different)) if joining.different else None
    return Merged(record, problem, tuple(sorted(merging.nonfinite)[:1]))


def assembled(parts: Sequence[Merged]) -> Record:
    """Return the record of all layers, each merged in a part.

    Raises:
        AssertionError: Ranks disagree; it names the first layer.
        UsageError: The records cannot be merged.
    """
    problems = [part.problem for part in parts if part.problem is not None]
    if problems:
        kind, _, text = min(problems)
        raise UsageError(text) if kind == "usage" else AssertionError(text)
    nonfinite = min((found for part in parts for found in part.nonfinite), default=None)
    notes = parts[0].record.notes
    return dataclasses.replace(
        parts[0].record,
        layers={name: layer for part in parts for name, layer in part.record.layers.items()},
        notes=notes if nonfinite is None else (nonfinite[1], *notes),
    )


class _Merging:
    """Merges what several ranks have of a layer, each with the number of its rank.

    Args:
        records: The records, as for `merge_layers`.
        mean_loss: See `Record.merge`.
        is_joined: Whether the ranks of a tensor-parallel model are joined to one already. The layouts then are those
            of the DTensors, and `None` stays "not known".
    """

    def __init__(self, records: Sequence[Record], *, mean_loss: bool, is_joined: bool) -> None:
        self._mean_loss = mean_loss
        self._is_joined = is_joined
        self._batches = _batches(records)
        self.same_inputs = len(records) > 1 and _have_same_inputs(records)
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
            layout=first.layout if self._is_joined else "batch",
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
            layout=first.layout if self._is_joined else "replicated",
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


def _have_same_inputs(records: Sequence[Record]) -> bool:
    of_each = [[value.forward for value in _inputs(record)] for record in records]
    return bool(of_each[0]) and all(inputs == of_each[0] for inputs in of_each)


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
