"""What each layer costs while a forward runs: wall time, floating-point operations, memory of outputs.

The clock of the model stops while a hook of the probe runs, so that what the probe costs is not counted. Beside the CPU
the times are events on the device, because the host only hands out work there. Operations are counted by the formulas
of `torch.utils.flop_counter`, for all layers that run at that moment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from types import TracebackType
from typing import Any

import torch

from pytest_modelprobe._torch import (
    FLASH_ATTENTION_ON_CPU,
    TorchDispatchMode,
    WeakStorage,
    dispatch_modes_now,
    run_composite,
    set_dispatch_modes,
)
from pytest_modelprobe.capture.hooks.guard import HookGuard
from pytest_modelprobe.capture.observed.running_calls import RunningCall, RunningCalls
from pytest_modelprobe.models import current_stream

from .costs import TOTAL, Costs, Spans


def _event(device: torch.device, *others: torch.device) -> Any:
    """Return an event on a device that is there once all devices have done what they were handed so far."""
    event = torch.get_device_module(device).Event(enable_timing=True)
    stream = current_stream(device)
    for other in others:
        stream.wait_event(current_stream(other).record_event())
    event.record(*([] if stream is None else [stream]))
    return event


class Profiler:
    """Fills the `Costs` of each forward.

    Args:
        running: The calls that run.
    """

    def __init__(self, running: RunningCalls) -> None:
        self._running = running
        self._by_events = False
        self._mode: Any = None
        self._costs = Costs()
        self._spans = Spans(perf_counter)
        self._seen: set[int] = set()
        """Keys of the storages that were counted in this forward, or that are no activations."""
        self._held: list[Any] = []
        """Weak references to these storages. While a storage is held weakly, its key is not used again."""
        self._depth = 0
        self._entered = 0.0

    # --- the forward ----------------------------------------------------------------------------------------------

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
        self._by_events = bool(devices)
        self._costs, self._spans = Costs(), Spans(functools.partial(_event, *devices) if devices else perf_counter)
        self._seen, self._held = set(model_storages), []
        for tensor in inputs:
            self._is_new(tensor)
        self._mode = _FlopMode(self)
        # Below the modes of the user: a `with` block pops whatever is on top, and after an interruption that would be
        # ours.
        set_dispatch_modes((self._mode, *dispatch_modes_now()))
        return self._costs

    def end(self) -> None:
        """End the forward, if one runs."""
        if self._mode is not None:
            set_dispatch_modes(tuple(mode for mode in dispatch_modes_now() if mode is not self._mode))
            self._mode = None
            self._spans.pause()
            self._spans.add(TOTAL, 0)
            self._costs.add_spans(self._spans)
            self._held.clear()

    def start_call(self, call: RunningCall) -> None:
        """Note where the time of a call begins."""
        call.mark = self._spans.mark()
        self._costs.calls[call.name] += 0  # so that layers stand in the order in which they begin

    def finish_call(self, call: RunningCall, outputs: Iterable[torch.Tensor], *, leaf: bool) -> None:
        """Add a call, which is off the stack already. The memory of outputs counts only if the call is of a leaf."""
        self._costs.calls[call.name] += 1
        if call.mark is not None:
            self._spans.add(call.name, call.mark)
        new = sum(filter(None, map(self._is_new, outputs))) if leaf else 0
        for name in {TOTAL, call.name, *self._running.names} if new else ():
            self._costs.activation_bytes[name] += new

    def count(self, flops: int) -> None:
        """Add operations to all layers that run, and to the innermost one as its own."""
        names = self._running.names
        for name in {TOTAL, *names}:
            self._costs.flops[name] += flops
        self._costs.own_flops[names[-1] if names else TOTAL] += flops

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

    # --- the probe's own time -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop the time of the model."""
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

    @contextmanager
    def paused(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Stop the time of the model in an operation. The context that is yielded lets it go on.

        On another device this does nothing. It does not wait for what the host does around an operation, but it would
        have to wait for the events.
        """
        if self._by_events:
            yield nullcontext
            return
        self.pause()
        try:
            yield self._running_model
        finally:
            self.resume()

    @contextmanager
    def _running_model(self) -> Iterator[None]:
        self.resume()
        try:
            yield
        finally:
            self.pause()


class TimedGuard(HookGuard):
    """A guard that stops the time of the model while a hook runs."""

    profiler: Profiler

    def __enter__(self) -> None:
        self.profiler.pause()
        super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            return super().__exit__(kind, error, trace)
        finally:
            self.profiler.resume()


# --- floating-point operations ----------------------------------------------------------------------------------------


def _formulas() -> dict[Any, Callable[..., Any]]:
    """Return the formulas of `torch.utils.flop_counter`, and one for the fused attention on the CPU, which it lacks."""
    from torch.utils import flop_counter  # imported here, because it imports Triton if that is installed

    formulas = dict(flop_counter.flop_registry)
    if FLASH_ATTENTION_ON_CPU is not None:
        formulas.setdefault(FLASH_ATTENTION_ON_CPU, _attention_flops)
    return formulas


def _attention_flops(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    from torch.utils import flop_counter

    return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))


class _FlopMode(TorchDispatchMode):  # type: ignore[misc]
    """Counts the operations of a forward, as `FlopCounterMode` does, by the layers that run."""

    supports_higher_order_operators = True

    def __init__(self, profiler: Profiler) -> None:
        super().__init__()
        self._profiler = profiler
        self._formulas = _formulas()

    def receive(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operation, and count it."""
        with self._profiler.paused() as running:
            return self._counted(running, func, types, args, kwargs or {})

    def _counted(self, running: Any, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        packet = getattr(func, "overloadpacket", func)
        formula = self._formulas.get(packet)
        # In inference mode a composite operation arrives as a whole, and its parts would not be counted. Operations on
        # a tensor subclass are left to the subclass.
        if formula is None and not types and hasattr(func, "decompose") and func is not torch.ops.prim.device.default:
            with self, running():
                parts = run_composite(func, args, kwargs)
            if parts is not NotImplemented:
                return parts
        with running():
            output = func(*args, **kwargs)
        if formula is not None:
            self._profiler.count(int(formula(*args, **kwargs, out_val=output)))
        return output


# Set here because torch wraps a method of this name in the body of a class for torch.compile, and the wrapper imports
# all of torch.compile in its first call.
_FlopMode.__torch_dispatch__ = _FlopMode.receive
