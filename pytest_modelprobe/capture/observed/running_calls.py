"""The calls that run now, outermost first.

A hook sees only one call begin or end. This stack knows which call is inside which. It belongs to one thread.

Torch runs no forward hooks after a `KeyboardInterrupt` or `pytest.fail`, which are no `Exception`. A call that ended so
would stay on the stack for ever. It is found because its Python frame is on no thread's stack any more.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

import torch

from pytest_modelprobe.models import Flat
from pytest_modelprobe.record import Dimension

from .observation import CallObservation, Forward
from .tensors import ContentKey, content_key, shape_of

InputKeys = list[tuple[int, ContentKey | None]]


class RunningCall:
    """A call that has begun and has not ended."""

    __slots__ = (
        "attended", "error_before", "forward", "frame", "input_keys", "inputs", "mark", "name", "observation",
        "random_states", "unit_axes",
    )  # fmt: skip

    def __init__(self, name: str, frame: FrameType, forward: Forward, inputs: Flat) -> None:
        self.name = name
        self.frame = frame
        self.forward = forward
        self.inputs = inputs
        self.observation: CallObservation | None = None
        """What is recorded of the call, or `None` if the layer is not selected."""
        self.unit_axes: dict[tuple[Dimension, ...], int | None] = {}
        """Unit axis of the outputs of the calls inside, by shape. The newest of each shape counts."""
        self.random_states: tuple[bytes, ...] = ()
        """States of the random generators when the call began, or empty if it cannot draw."""
        self.input_keys: InputKeys | None = None
        """Keys of the inputs as they were read. Set only if another hook runs after ours, which may change them."""
        self.attended = False
        """Whether attention weights were seen in the call."""
        self.mark: int | None = None
        """Where the time of the call begins, or `None` if it is not profiled."""
        # A forward that is called in an `except` block sees the error of that block, which is none of its own.
        self.error_before = sys.exc_info()[1]

    def is_over(self, thread: int, here: FrameType) -> bool:
        """Whether a call that began in ``thread`` has ended, so that its Python frame is neither there nor ``here``."""
        if _is_on_stack(self.frame, here):
            return False
        elsewhere = None if thread == threading.get_ident() else sys._current_frames().get(thread)
        return not _is_on_stack(self.frame, elsewhere)

    def inherited_axis(self, output: torch.Tensor) -> int | None:
        """Return the unit axis of a value of the shape of an output: of one made inside, else of an input."""
        shape = shape_of(output) if output.is_nested else tuple(output.shape)
        inside = self.unit_axes.get(shape) if self.unit_axes else None
        if inside is None and self.observation is not None:
            for _, seen in self.observation.inputs:
                if seen.shape == shape:
                    return seen.axis
        return inside


class RunningCalls:
    """The stack of the calls that run, all in one thread.

    Args:
        on_abandoned: Called when the outermost call turns out to have ended without a hook.
    """

    def __init__(self, on_abandoned: Callable[[], None]) -> None:
        self.stack: list[RunningCall] = []
        """The calls, for others to read and not to change."""
        self._thread = 0
        self._on_abandoned = on_abandoned

    @property
    def names(self) -> list[str]:
        """Names of the layers that run, outermost first."""
        return [running.name for running in self.stack]

    def innermost_here(self) -> RunningCall | None:
        """Return the innermost call, if it still runs."""
        running = self.stack[-1] if self.stack else None
        return None if running is None or running.is_over(self._thread, sys._getframe()) else running

    def is_elsewhere(self) -> bool:
        """Whether the calls run in another thread than this."""
        return self._thread != threading.get_ident()

    def push(self, running: RunningCall) -> None:
        """Add the innermost call."""
        if not self.stack:
            self._thread = threading.get_ident()
        self.stack.append(running)

    def pop(self, name: str, frame: FrameType) -> RunningCall | None:
        """Remove a call with all inside it, and return it.

        Returns `None` if the call was never added, since another hook raised before ours ran.
        """
        for i in range(len(self.stack) - 1, -1, -1):
            # The name is compared too, because a functional call has the frame of the layer around it.
            if self.stack[i].frame is frame and self.stack[i].name == name:
                running = self.stack[i]
                del self.stack[i:]
                return running
        return None

    def remove(self, running: RunningCall) -> None:
        """Remove a call with all inside it, if it is there."""
        if running in self.stack:
            del self.stack[self.stack.index(running) :]

    def drop_abandoned(self, here: FrameType | None = None) -> bool:
        """Remove calls that ended although no hook ran, and return whether a call still runs.

        Args:
            here: A frame inside all calls that run in this thread. `None` means the frame of the caller.
        """
        stack = self.stack
        here = here or sys._getframe()
        while stack and not _is_on_stack(stack[-1].frame, here) and stack[-1].is_over(self._thread, here):
            stack.pop()
            if not stack:
                self._on_abandoned()
        return bool(stack)

    def clear(self) -> None:
        """Remove all calls."""
        self.stack.clear()

    def attend(self) -> None:
        """Mark all running calls: attention weights were computed in all of them."""
        for running in self.stack:
            running.attended = True


def input_keys(inputs: Flat) -> InputKeys:
    """Return the identity and the content key of each tensor."""
    return [(id(tensor), content_key(tensor)) for _, tensor in inputs.tensors]


def _is_on_stack(frame: FrameType, innermost: FrameType | None) -> bool:
    """Whether a frame is on the stack that ends with ``innermost``. The walk is short if it is."""
    while innermost is not None:
        if innermost is frame:
            return True
        innermost = innermost.f_back
    return False
