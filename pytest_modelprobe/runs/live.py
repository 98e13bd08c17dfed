"""What is asked of a run or a watch after its record was made: isolated responses, and noise.

These take as long as several forwards, so they are computed only when a comparison or a snapshot needs them. A record
is plain data and outlives the model. So it holds its run or watch weakly, and gets a note if that is gone.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from pytest_modelprobe.record import IsolatedResponse, Layer, NamesBefore, Record, with_live_run

from .isolation import Key

S = TypeVar("S")

Place = tuple[str, bool, str, int]
"""Address of a call in a record: the root's name and mode, the layer, and the number of the call."""


@dataclass(frozen=True, slots=True)
class IsolationRequest:
    """Which responses are asked for. See `LiveRun.isolated` for what each field means."""

    like: Record
    names: NamesBefore | None = None
    only: Collection[str] | None = None
    own_arguments: bool = False


class WeakLiveRun(Generic[S]):
    """The `LiveRun` of records, which holds the run or watch that made them weakly.

    Args:
        source: The run or watch.
        gone: The note for a record whose source does not exist any more.
        isolated: Takes the source, a record and a request, and returns the record with isolated responses.
        measured: Takes the source and a record, and returns the record with noise. `None` if noise cannot be measured.
        repeats: Takes the source and a record, and returns whether the same numbers come out once more. `None` if that
            cannot be tried.
        varied: Takes the source and a record, and returns the record of a run with other random numbers and without
            parameters that are zero. `None` if there is no such run.
    """

    def __init__(
        self,
        source: S,
        gone: str,
        isolated: Callable[[S, Record, IsolationRequest], Record],
        measured: Callable[[S, Record], Record] | None = None,
        repeats: Callable[[S, Record], bool] | None = None,
        varied: Callable[[S, Record], Record | None] | None = None,
    ) -> None:
        self._source = weakref.ref(source)
        self._gone = gone
        self._isolated, self._measured, self._repeats, self._varied = isolated, measured, repeats, varied

    def isolated(
        self,
        record: Record,
        like: Record | None = None,
        names: NamesBefore | None = None,
        only: Collection[str] | None = None,
        *,
        own_arguments: bool = False,
    ) -> Record:
        """Fill in the isolated response of each call."""
        source = self._source()
        if source is None:
            return with_live_run(with_note(record, f"no layer was called alone: {self._gone}"), self)
        found = self._isolated(source, record, IsolationRequest(like or record, names, only, own_arguments))
        return with_live_run(found, self)

    def measured(self, record: Record) -> Record:
        """Fill in the noise of each reading and response."""
        if self._measured is None:
            return record
        source = self._source()
        if source is None:
            return with_live_run(with_note(record, f"no noise was measured: {self._gone}"), self)
        return with_live_run(self._measured(source, record), self)

    def repeats(self, record: Record) -> bool:
        """Return whether the same numbers come out once more."""
        source = self._source()
        return self._repeats is None or source is None or self._repeats(source, record)

    def varied(self, record: Record) -> Record | None:
        """Return the record of the run with other random numbers, and without parameters that are zero."""
        source = self._source()
        return None if self._varied is None or source is None else self._varied(source, record)


def responses_of(record: Record) -> dict[Key, IsolatedResponse]:
    """Return the responses of a record of one forward."""
    return {(layer.name, call.index): call.response for layer, call in record.calls if call.response is not None}


def with_responses(record: Record, found: Mapping[Place, IsolatedResponse]) -> Record:
    """Return the record with these responses, by call, in place of its own."""

    def layer(one: Layer) -> Layer:
        places = ((call, (call.root, call.root_training, one.name, call.index)) for call in one.calls)
        calls = (dataclasses.replace(call, response=found.get(place)) for call, place in places)
        return dataclasses.replace(one, calls=tuple(calls))

    return dataclasses.replace(record, layers={name: layer(one) for name, one in record.layers.items()})


def with_responses_of_one_forward(record: Record, found: Mapping[Key, IsolatedResponse]) -> Record:
    """Return a record of one forward with these responses in place of its own."""
    places = {(call.root, call.root_training, layer.name, call.index) for layer, call in record.calls}
    return with_responses(record, {place: found[place[2:]] for place in places if place[2:] in found})


def modules_of(record: Record) -> list[str]:
    """Return the layers that are modules, which can be called."""
    return [name for name, layer in record.layers.items() if not layer.functional]


def with_note(record: Record, note: str) -> Record:
    """Return the record with a note added, once."""
    return record if note in record.notes else dataclasses.replace(record, notes=(*record.notes, note))
