"""Calls that run again in a backward pass, for activation checkpointing.

The second run is no new call: it computes the same tensors once more, so that gradients can be computed of them. A hook
knows it by the backward pass that runs at that moment. Which call runs again has to be guessed, by its inputs and by
its place in the segment, because torch does not tell. The reentrant kind of checkpoint runs the first time without
gradients. There gradients arrive at the tensors of the second run, and count for the observations of the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from pytest_modelprobe import statistics
from pytest_modelprobe.capture.hooks.tensor_hooks import TensorObserver
from pytest_modelprobe.capture.observed.observation import CallObservation, Forward, Values
from pytest_modelprobe.capture.observed.tensors import content_key
from pytest_modelprobe.capture.passes.backward import BackwardPasses
from pytest_modelprobe.capture.passes.observed_forwards import ObservedForwards
from pytest_modelprobe.models import Flat, flatten

_Original = tuple[Forward, CallObservation]


@dataclass(slots=True, eq=False)
class Recomputation:
    """Finds the call that runs again, and lets the gradients of the second run go to the observations of the first."""

    forwards: ObservedForwards
    tensors: TensorObserver
    backward: BackwardPasses
    running: dict[FrameType, _Original] = field(default_factory=dict)
    """The calls that run, in any thread, by their Python frame."""

    def begin_call(self, name: str, inputs: Flat, frame: FrameType) -> None:
        """Take the inputs of a call that runs again."""
        self.backward.enter()
        with statistics.ambient_modes_disabled():
            found = self._original(name, inputs)
        if found is not None:
            forward, call = found
            call.run_again()
            self.running[frame] = found
            self.backward.recomputed = forward, call.started
            self._observe_again(forward, call, call.inputs, inputs)

    def end_call(self, frame: FrameType, output: Any) -> bool:
        """Take the output of a call that ran again. Returns False if no call that ran again is in that frame."""
        found = self.running.pop(frame, None)
        if found is None:
            return False
        forward, call = found
        self._observe_again(forward, call, call.outputs, flatten("output", output))
        return True

    def clear(self) -> None:
        """Forget the calls that run."""
        self.running.clear()

    def _original(self, name: str, inputs: Flat) -> _Original | None:
        """Find the call that runs again: one with the same input, else the next in the segment, else the last one."""
        keys = [key for _, tensor in inputs.tensors if (key := content_key(tensor)) is not None]
        segment, position = self.backward.recomputed or (None, -1)

        def likelihood(candidate: _Original) -> tuple[int, ...]:
            forward, call = candidate
            known = [forward.reductions[key][1] for key in keys if key in forward.reductions]
            same = any(seen.forward is reduced for _, seen in call.inputs for reduced in known)
            follows = forward is segment and call.started > position
            # Segments run again from the last to the first, but the calls in a segment in their order. Within a segment
            # the nearest call after the position is likeliest, and else the latest call.
            return same, follows, -call.recomputed, forward.index, -call.started if follows else call.started

        return max(
            ((forward, call) for forward in self.forwards.alive for call in forward.calls_of(name)),
            key=likelihood,
            default=None,
        )

    def _observe_again(self, forward: Forward, call: CallObservation, values: Values, flat: Flat) -> None:
        """Let the values of the second run stand for those of the first.

        Only the reentrant kind needs it, whose first run is without gradients.
        """
        if call.grad_enabled:
            return
        originals = dict(values)
        with statistics.ambient_modes_disabled():
            for path, tensor in flat.tensors:
                seen = originals.get(path)
                if seen is not None:
                    self.tensors.observe_again(forward, tensor, seen)
