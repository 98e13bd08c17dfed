"""What forwards cost: counts, and times that are read when a record is made.

Times beside the CPU are events on the device. Reading one waits for the device, so no event is read while the model
runs, unless it is done already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

TOTAL = ""
"""Stands for the whole forward among names of layers. No layer has this name: the root is ``(root)``."""


class Costs:
    """What one forward cost, or several merged. Each number is kept by the name of the layer, and for `TOTAL`."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.own_flops: Counter[str] = Counter()
        self.activation_bytes: Counter[str] = Counter()
        self.probe_time = 0.0
        self._times: dict[str, float] = {}
        self._pending: list[Spans] = []

    def add_spans(self, spans: Spans) -> None:
        """Add times that can be read later."""
        self._pending.append(spans)

    def merge_from(self, other: Costs) -> None:
        """Add what other forwards cost."""
        for mine, theirs in (
            (self.calls, other.calls),
            (self.flops, other.flops),
            (self.own_flops, other.own_flops),
        ):
            mine.update(theirs)
        for name, seconds in other._times.items():
            self._times[name] = self._times.get(name, 0.0) + seconds
        self.activation_bytes |= other.activation_bytes  # the greater of both
        self.probe_time += other.probe_time
        self._pending += other._pending
        self._read(spans for spans in self._pending if spans.is_done())

    def copy(self) -> Costs:
        """Return an independent copy."""
        copy = Costs()
        copy.merge_from(self)
        return copy

    def times(self) -> dict[str, float]:
        """Return seconds by layer. This waits for the device if it is still at work."""
        for spans in self._pending:
            spans.wait()
        self._read(self._pending)
        return self._times

    def _read(self, done: Iterable[Spans]) -> None:
        read = list(done)
        for spans in read:
            for name, seconds in spans.seconds():
                self._times[name] = self._times.get(name, 0.0) + seconds
        self._pending = [spans for spans in self._pending if spans not in read]


class Spans:
    """The times of one forward: when the model ran and the probe did not, and in which layers.

    The time of a layer is the sum of the stretches in it, so that the hooks inside the layer do not count.

    Args:
        now: Returns the time: seconds, or a recorded event of a device.
    """

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now = now
        self._started: Any = None
        self._segments: list[tuple[Any, Any]] = []
        """Start and end of each stretch in which the model ran."""
        self._layers: list[tuple[str, int, int]] = []
        """Name of each call, its first segment, and the first segment after it."""

    def resume(self) -> None:
        """Begin a segment."""
        self._started = self._now()

    def pause(self) -> None:
        """End the segment."""
        if self._started is not None:
            self._segments.append((self._started, self._now()))
            self._started = None

    def mark(self) -> int:
        """Return the place between segments. To be called while paused."""
        return len(self._segments)

    def add(self, name: str, since: int) -> None:
        """Add a call that began at a mark and ends now. To be called while paused."""
        self._layers.append((name, since, len(self._segments)))

    def is_done(self) -> bool:
        """Whether the times can be read without waiting."""
        end = self._segments[-1][1] if self._segments else 0.0
        return isinstance(end, float) or bool(end.query())

    def wait(self) -> None:
        """Wait until the times can be read."""
        if not self.is_done():
            self._segments[-1][1].synchronize()

    def seconds(self) -> list[tuple[str, float]]:
        """Return the layer and the duration of each call."""
        sums = [0.0]
        for start, end in self._segments:
            sums.append(sums[-1] + _seconds(start, end))
        return [(name, sums[end] - sums[start]) for name, start, end in self._layers]


def _seconds(start: Any, end: Any) -> float:
    if isinstance(end, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1000  # devices measure in milliseconds
