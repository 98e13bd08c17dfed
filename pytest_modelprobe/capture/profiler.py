"""What each layer costs while a forward runs: wall time, floating-point operations, memory of outputs.

The clock of the model stops while a hook of the probe runs, so that what the probe costs is not counted. Beside the CPU
the times are events on the device, because the host only hands out work there. Reading one waits for the device, so no
event is read while the model runs, unless it is done already. Operations are counted by the formulas of
`torch.utils.flop_counter`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from pytest_modelprobe._torch import (
    FLASH_ATTENTION_ON_CPU,
    DispatchMode,
    WeakStorage,
    dispatch_modes_now,
    run_composite,
    set_dispatch_modes,
)
from pytest_modelprobe.models import current_stream

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
        self.calls.update(other.calls)
        self.flops.update(other.flops)
        self.own_flops.update(other.own_flops)
        self.activation_bytes |= other.activation_bytes  # the greater of both
        self.probe_time += other.probe_time
        self._pending += other._pending
        self._add(other._times.items())
        self._read()

    def copy(self) -> Costs:
        """Return an independent copy."""
        copy = Costs()
        copy.merge_from(self)
        return copy

    def times(self) -> dict[str, float]:
        """Return seconds by layer. This waits for the device if it is still at work."""
        self._read(wait=True)
        return self._times

    def _read(self, *, wait: bool = False) -> None:
        pending, self._pending = self._pending, []
        for spans in pending:
            if wait or spans.is_done():
                self._add(spans.seconds())
            else:
                self._pending.append(spans)

    def _add(self, times: Iterable[tuple[str, float]]) -> None:
        for name, seconds in times:
            self._times[name] = self._times.get(name, 0.0) + seconds


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

    def seconds(self) -> list[tuple[str, float]]:
        """Return the layer and the duration of each call. This waits for the device if it is still at work."""
        if not self.is_done():
            self._segments[-1][1].synchronize()
        sums = [0.0]
        for start, end in self._segments:
            # Devices measure in milliseconds.
            sums.append(sums[-1] + (end - start if isinstance(end, float) else start.elapsed_time(end) / 1000))
        return [(name, sums[end] - sums[start]) for name, start, end in self._layers]


def _event(device: torch.device, *others: torch.device) -> Any:
    """Return an event on a device that is there once all devices have done what they were handed so far."""
    event = torch.get_device_module(device).Event(enable_timing=True)
    stream = current_stream(device)
    for other in others:
        stream.wait_event(current_stream(other).record_event())
    event.record(*([] if stream is None else [stream]))
    return event


@dataclass(slots=True)
class CallStart:
    """What had been measured of a forward when a call began."""

    segment: int
    flops: int
    activation_bytes: int
    inside: int = 0
    """Operations of the calls inside, so far."""


class Profiler:
    """Fills the `Costs` of each forward."""

    def __init__(self) -> None:
        self._mode: _FlopMode | None = None
        self._costs = Costs()
        self._spans = Spans(perf_counter)
        self._bytes = 0
        self._seen: set[int] = set()
        """Keys of the storages that were counted in this forward, or that are no activations."""
        self._held: list[Any] = []
        """Weak references to these storages. While a storage is held weakly, its key is not used again."""
        self._depth = 0
        self._entered = 0.0

    def begin(
        self, inputs: Iterable[torch.Tensor], model_storages: Iterable[int], devices: Sequence[torch.device] = ()
    ) -> Costs:
        """Begin a forward, and return its costs, which are filled while it runs.

        Args:
            inputs: Inputs of the forward, which are no activations.
            model_storages: Keys of the storages of parameters and buffers, which are no activations either.
            devices: Devices beside the CPU that the model and its inputs are on. Times are measured on the first.
        """
        self.end()  # a forward whose first hook failed is still open
        self._costs, self._spans = Costs(), Spans(functools.partial(_event, *devices) if devices else perf_counter)
        self._seen, self._held, self._bytes = set(model_storages), [], 0
        for tensor in inputs:
            self._is_new(tensor)
        self._mode = _FlopMode(None if devices else self)
        # Below the modes of the user: a `with` block pops whatever is on top, and after an interruption that would be
        # ours.
        set_dispatch_modes((self._mode, *dispatch_modes_now()))
        return self._costs

    def end(self) -> None:
        """End the forward, if one runs."""
        if self._mode is not None:
            set_dispatch_modes(tuple(mode for mode in dispatch_modes_now() if mode is not self._mode))
            self._costs.flops[TOTAL], self._costs.activation_bytes[TOTAL] = self._mode.flops, self._bytes
            self._mode = None
            self._spans.pause()
            self._spans.add(TOTAL, 0)
            self._costs.add_spans(self._spans)
            self._held.clear()

    def start_call(self, name: str) -> CallStart:
        """Return what has been measured when a call begins."""
        self._costs.calls[name] += 0  # so that layers stand in the order in which they begin
        return CallStart(self._spans.mark(), 0 if self._mode is None else self._mode.flops, self._bytes)

    def finish_call(
        self, name: str, start: CallStart, outer: CallStart | None, outputs: Iterable[torch.Tensor], *, leaf: bool
    ) -> None:
        """Add a call inside an outer one. The memory of outputs counts only if the call is of a leaf."""
        costs = self._costs
        costs.calls[name] += 1
        self._spans.add(name, start.segment)
        flops = 0 if self._mode is None else self._mode.flops - start.flops
        costs.flops[name] += flops
        costs.own_flops[name] += flops - start.inside
        if outer is not None:
            outer.inside += flops
        if leaf:
            self._bytes += sum(map(self._is_new, outputs))
        costs.activation_bytes[name] += self._bytes - start.activation_bytes

    def _is_new(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor's storage, or 0 if it was counted before."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a sparse tensor, or one of a `torch.func` transform
            return 0
        held = WeakStorage(storage)
        if held.cdata in self._seen:
            return 0
        self._seen.add(held.cdata)
        self._held.append(held)
        return storage.nbytes()

    def pause(self) -> None:
        """Stop the time of the model: the probe computes."""
        self._depth += 1
        if self._depth == 1:
            if self._mode is not None:
                self._spans.pause()
            self._entered = perf_counter()

    def resume(self) -> None:
        """Let the time of the model go on."""
        self._depth -= 1
        if self._depth == 0:
            self._costs.probe_time += perf_counter() - self._entered
            if self._mode is not None:
                self._spans.resume()


class _FlopMode(DispatchMode):
    """Counts the operations of a forward, as `FlopCounterMode` does.

    That mode itself runs an LSTM in inference mode, and both branches of a condition, by other code than the model does
    alone, so that the model would return other numbers.

    Args:
        clock: Stops while an operation is looked at. None on another device, which would be waited for.
    """

    supports_higher_order_operators = True

    def __init__(self, clock: Profiler | None) -> None:
        super().__init__()
        from torch.utils import flop_counter  # imported here, because it imports Triton if that is installed

        self.flops = 0
        self._pause, self._resume = (clock.pause, clock.resume) if clock else (_nothing, _nothing)
        self._formulas = dict(flop_counter.flop_registry)
        # It has none for the fused attention on the CPU.
        if FLASH_ATTENTION_ON_CPU not in self._formulas:
            self._formulas[FLASH_ATTENTION_ON_CPU] = lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(
                q.shape, k.shape, v.shape
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, output = kwargs or {}, NotImplemented
        self._pause()
        try:
            formula = self._formulas.get(getattr(func, "overloadpacket", func))
            # In inference mode a composite operation arrives as a whole, and its parts would not be counted. Operations
            # on a tensor subclass are left to the subclass.
            whole = formula is None and not types and hasattr(func, "decompose")
            self._resume()
            try:
                if whole and func is not torch.ops.prim.device.default:
                    with self:
                        output = run_composite(func, args, kwargs)
                if output is NotImplemented:
                    output = func(*args, **kwargs)
            finally:
                self._pause()
            if formula is not None:
                self.flops += int(formula(*args, **kwargs, out_val=output))
        finally:
            self._resume()
        return output


def _nothing() -> None:
    """Stop no clock."""
