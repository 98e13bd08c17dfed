"""Stops the model when a value meets a condition, by an error raised in the hook, at the user's call of the layer.

Other hooks leave numbers on their device until a record is made. Here each number is read as it arrives, and on CUDA
that waits for the device. The frames of torch and of this package are hidden, so that a debugger stands in the user's
code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType

from torch import Tensor

from pytest_modelprobe import statistics
from pytest_modelprobe.capture.hooks.guard import HookGuard
from pytest_modelprobe.capture.observed.observation import CallObservation, Forward, TensorObservation
from pytest_modelprobe.capture.observed.tensors import shape_of
from pytest_modelprobe.record import ROOT, Dimension, Statistics
from pytest_modelprobe.statistics import Reduction

_OURS = ("torch", "pytest_modelprobe")
_BACKWARD = "torch.autograd.graph"
"""Module in which a thread waits for a backward pass that runs in another thread, as it does on CUDA."""


Rows = tuple[tuple[str, tuple[Dimension, ...], Statistics], ...]


@dataclass(frozen=True, slots=True)
class SeenValue:
    """A value that was just seen, and the other values of its call, to judge it by."""

    layer: str
    call: int
    """Index of the call, from 0."""
    path: str
    """``output``, ``output[1]``, ``input`` or the name of a parameter."""
    is_gradient: bool
    statistics: Statistics
    others: Rows
    """Path, shape and statistics of this value and of the others of the call."""


Judge = Callable[[SeenValue], BaseException | None]
"""Returns the error to raise at a value, or `None`."""


@dataclass(frozen=True, slots=True, eq=False)
class StopCheck:
    """Shows each output and gradient to a judge as it arrives."""

    judge: Judge
    guard: HookGuard

    def outputs(self, call: CallObservation) -> None:
        """Judge what a call returned."""
        seen = [(path, value.shape, _numbers(value.forward)) for path, value in (*call.inputs, *call.outputs)]
        others = tuple((path, shape, numbers) for path, shape, numbers in seen if numbers is not None)
        for path, _, numbers in seen[len(call.inputs) :]:
            if numbers is not None:
                self._show(call.layer, call.index, path, False, numbers, others)

    def gradient(self, observed: Mapping[Forward, Iterable[TensorObservation]], reduced: Reduction) -> None:
        """Judge the gradient of a tensor that was observed."""
        numbers = _numbers(reduced)
        if numbers is None:
            return
        # A tensor is seen in several places. It is named as an output rather than an input, of the call that ended
        # first.
        call, path, seen = min(
            (place for forward, places in observed.items() for place in _places(forward, list(places))),
            key=lambda place: (place[1].startswith("input"), place[0].finished),
        )
        rows = ((f"gradient of {path}", numbers), (path, _numbers(seen.forward)))
        others = tuple((name, seen.shape, of) for name, of in rows if of is not None)
        self._show(call.layer, call.index, path, True, numbers, others)

    def parameter(self, name: str, gradient: Tensor, reduced: Reduction) -> None:
        """Judge the gradient of a parameter, given the full name."""
        numbers = _numbers(reduced)
        if numbers is not None:
            layer, _, own = name.rpartition(".")
            others = ((f"gradient of {own}", shape_of(gradient), numbers),)
            self._show(layer or ROOT, 0, own, True, numbers, others)

    def _show(
        self,
        layer: str,
        call: int,
        path: str,
        is_gradient: bool,
        numbers: Statistics,
        others: Rows,
    ) -> None:
        try:
            error = self.judge(SeenValue(layer, call, path, is_gradient, numbers, others))
        except Exception as raised:  # noqa: BLE001 - an error of the user's condition, which goes to the user
            error = raised
        if error is not None:
            self.guard.let_through = error  # else the guard would keep it, as an error of our own
            _hide_frames()
            raise error


def _numbers(reduced: Reduction) -> Statistics | None:
    return statistics.collect([reduced])[0].statistics


def _places(
    forward: Forward, observed: list[TensorObservation]
) -> Iterable[tuple[CallObservation, str, TensorObservation]]:
    for call in forward.calls.values():
        for path, seen in (*call.outputs, *call.inputs):
            if any(seen is one for one in observed):
                yield call, path, seen


def _hide_frames() -> None:
    """Hide the frames of torch and of this package, so that a debugger stands at the call in the user's code."""
    waiting = (f for f in sys._current_frames().values() if f.f_globals.get("__name__") == _BACKWARD)
    for top in (sys._getframe(), *waiting):
        frame: FrameType | None = top
        while frame is not None:
            if str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS:
                frame.f_locals["__tracebackhide__"] = True
            frame = frame.f_back
