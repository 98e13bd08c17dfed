"""The context in which every hook runs. It keeps errors of hooks from the model.

A watch must not change what the model does. An error in our own code is therefore kept until a record is made, and the
model goes on. Only an error that ``stop_on=`` asks for reaches the model, and what the handler of a signal raises. One
lock serves all hooks, because a model may run in several threads.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from types import ModuleType, TracebackType

from pytest_modelprobe._torch import Context, tracing_state, without_torch_function
from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.interrupts import is_interrupt
from pytest_modelprobe.models import is_captured

TOO_DEEP = "the model used up Python's stack (RecursionError) in a forward or backward, where calls were not seen"
CAPTURED = "what ran while a CUDA graph was captured is not recorded, and no replay of a graph is"
_OWN_FRAMES = 100
"""A RecursionError this many frames deep in our own code is our own error. With fewer, the model used up the stack."""


class HookGuard:
    """Keeps the first error of a hook.

    If the model itself used up Python's stack, that is no error of a hook. Then it only adds a note.
    """

    def __init__(self, notes: dict[str, None]) -> None:
        self.active = False
        """Whether the hooks observe: from `Capture.attach` to `Capture.detach`."""
        self.lock = threading.RLock()
        """Held while a hook runs, so that one thread at a time changes the stack of calls and the forwards."""
        self.entered = 0
        """How many hooks ran."""
        self.notes = notes
        self.let_through: BaseException | None = None
        """An error that is meant for the user's code, and is not kept."""
        self._failure: Exception | None = None

    def observes(self) -> bool:
        """Whether a hook observes now: while the watch is open, and where torch computes what it is told."""
        if not self.active or tracing_state() is not None:
            return False
        if is_captured():
            self.notes[CAPTURED] = None
            return False
        return True

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not isinstance(error, Exception) or is_interrupt(error):  # nearly always None
            return False
        if error is self.let_through:
            self.let_through = None  # its traceback has frames with the watch, which would never be freed
            return False
        if isinstance(error, RecursionError):
            own = 0  # counted without a call, which might itself exceed the stack
            while trace is not None:
                own, trace = own + 1, trace.tb_next
            if own < _OWN_FRAMES:
                self.notes[TOO_DEEP] = None
                return True
        if self._failure is None:
            self._failure = _without_frames(error)
        return True

    def check(self) -> None:
        """Raise the error that was kept, if there is one."""
        if isinstance(self._failure, ModelProbeError):
            raise type(self._failure)(*self._failure.args)
        if self._failure is not None:
            raise ModelProbeError(
                f"a hook of the probe failed, so that the record is incomplete: {self._failure!r}"
            ) from self._failure


def hidden() -> contextlib.AbstractContextManager[object]:
    """Return a context in which neither a function mode nor TorchLens sees what a hook computes."""
    lens = sys.modules.get("torchlens._state")  # TorchLens wraps torch's functions, so leaving modes is not enough
    return without_torch_function() if lens is None else _unlogged(lens)


@contextlib.contextmanager
def _unlogged(lens: ModuleType) -> Iterator[None]:
    pause: Context = getattr(lens, "pause_logging", contextlib.nullcontext)
    with without_torch_function(), pause():
        yield


def _without_frames(error: Exception) -> Exception:
    """Return the error with its traceback as text. The frames of a traceback would keep the watch alive."""
    if not isinstance(error, ModelProbeError):
        error.add_note("".join(traceback.format_exception(error)))
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
