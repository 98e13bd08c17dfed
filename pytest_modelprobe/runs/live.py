"""What is asked of a run or a watch after its record was made: isolated responses, and noise.

These take as long as several forwards, so they are computed only when a comparison or a snapshot needs them. A record
is plain data and outlives the model. So it holds its run or watch weakly, and gets a note if that is gone.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pytest_modelprobe.record import IsolatedResponse, Layer, NamesBefore, Record, with_live_run

from .isolation import Key

Place = tuple[str, bool, str, int]
"""Address of a call in a record: the root's name and mode, the layer, and the number of the call."""


@dataclass(frozen=True, slots=True)
class IsolationRequest:
    """Which responses are asked for. See `LiveRun.isolated` for what each field means."""

    like: Record
    names: NamesBefore | None = None
    only: Collection[str] | None = None
    own_arguments: bool = False


class Isolating(Protocol):
    """A run or a watch."""

    def isolated(self, record: Record, request: IsolationRequest) -> Record:
        """Fill in the isolated response of each call."""


S = TypeVar("S", bound=Isolating)


class WeakLiveRun(Generic[S]):
    """The `LiveRun` of records, which holds the run or watch that made them weakly.

    What a watch saw cannot be run again as a whole. So nothing but the responses can be asked of it.

    Args:
        source: The run or watch.
        gone: The note for a record whose source does not exist any more.
    """

    def __init__(self, source: S, gone: str) -> None:
        self._source = weakref.ref(source)
        self._gone = gone

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
            found = with_note(record, f"no layer was called alone: {self._gone}")
        else:
            found = source.isolated(record, IsolationRequest(like or record, names, only, own_arguments))
        return with_live_run(found, self)

    def measured(self, record: Record) -> Record:
        """Fill in the noise of each reading and response."""
        return record

    def repeats(self, record: Record) -> bool:
        """Return whether the same numbers come out once more."""
        return True

    def varied(self, record: Record) -> Record | None:
        """Return the record of the run with other random numbers, and without parameters that are zero."""
        return None


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
