"""Signals while something is changed that has to be put back: they wait, and are handled when all is as it was.

Python runs the handler of a signal, of Ctrl-C or of an alarm, between any two instructions of the main thread. That may
be in a ``finally:`` block, or between a change and the `try` that undoes it, and then a model would keep hooks,
gradients or weights that are not its own. So a handler of ours stands in for each handler in Python meanwhile.
"""

from __future__ import annotations

import _thread
import functools
import inspect
import itertools
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_before: dict[Any, Any] = {}
"""The handlers that ours stands in for, by number of the signal."""
_SIGNALS = tuple(sorted(signal.valid_signals(), key=lambda number: number != signal.SIGINT))
"""Ctrl-C first: it is held before the others, and until these are put back."""
_open = True
"""Whether a signal is handled at once."""
_waiting: dict[Any, None] = {}
"""Numbers of the signals that were held, and are still to be handled."""
_in_user_code = False
"""Whether a block of `interruptible` is running."""
_raised: BaseException | None = None
"""What a handler raised last, until the outermost block of `held` ends."""


def is_interrupt(error: BaseException) -> bool:
    """Whether the handler of a signal raised an exception, and not the code that it interrupted.

    A handler is called with a number and the frame that it interrupts, which is the frame that called it for Python.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, KeyboardInterrupt) or any(map(_is_of_handler, frames))


def _is_of_handler(frame: FrameType) -> bool:
    given = inspect.getargvalues(frame)
    values = [given.locals.get(name) for name in given.args] + [*given.locals.get(given.varargs or "", ())]
    return any(isinstance(a, int) and b is frame.f_back is not None for a, b in itertools.pairwise(values))


def _receive(number: int, frame: FrameType | None) -> None:
    global _open, _raised
    if not _open and not (_in_user_code and _is_of_user(frame)):
        _waiting[number] = None
        return
    _open = False  # it stays so if the handler raises: a second signal waits until all is put back
    try:
        _before[number](number, frame)
    except BaseException as error:
        _raised = error
        raise
    _open = True


def _is_of_user(frame: FrameType | None) -> bool:
    """Whether code runs that is not ours. If it catches an interrupt and goes on, it also gets the next one."""
    return frame is not None and not str(frame.f_globals.get("__name__")).startswith(__package__)


class held:
    """A context in which a signal waits for the end, or for a block of `interruptible` inside.

    Only the main thread handles signals. A signal without a handler in Python is ignored, or ends the process. If code
    of ours inside the block caught what a handler raised, as it catches what a model raises, it is raised at the end.
    """

    def __init__(self) -> None:
        self._outermost = self._was_open = False
        self._was_in_user_code: bool | None = None

    def __enter__(self) -> None:
        global _open, _in_user_code
        if threading.current_thread() is not threading.main_thread():
            return
        if any(signal.getsignal(number) is _receive for number in _before):
            self._was_open, _open = _open, False
            self._was_in_user_code, _in_user_code = _in_user_code, False
            return
        given = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
        try:
            _before.update(given)
            self._outermost = True
            _open = _in_user_code = False
            for number in given:
                signal.signal(number, _receive)
        except BaseException:  # a handler that has not been replaced yet
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        global _open, _in_user_code
        if self._was_in_user_code is not None:
            _in_user_code = self._was_in_user_code
        try:
            for number in reversed(_SIGNALS) if self._outermost else ():
                if signal.getsignal(number) is _receive:  # code of the user may have set another
                    signal.signal(number, _before[number])
        finally:
            if self._outermost or self._was_open:
                _open = True
                _handle_waiting()
        if self._outermost:
            _raise_caught()


def _handle_waiting() -> None:
    """Let Python call the handlers of the signals that waited, each also if another one raises."""
    waiting = [*_waiting]
    _waiting.clear()
    deque(map(_thread.interrupt_main, waiting), maxlen=0)  # a loop in Python would end at the first that raises


def _raise_caught() -> None:
    global _raised
    error, _raised = _raised, None
    trace = None if error is None or error is sys.exc_info()[1] else error.__traceback__
    if error is not None and trace is not None and not _is_of_user(trace.tb_frame):  # the frame that caught it
        raise error


def finished(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that undoes something and is safe to repeat: it is finished before a signal is handled."""

    @functools.wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with held():
                return function(*args, **kwargs)
        except BaseException as error:
            if is_interrupt(error):  # perhaps before it was held
                with held():
                    function(*args, **kwargs)
            raise

    return whole


class interruptible:
    """A context for code of the user inside `held`, in which a signal is handled at once."""

    def __init__(self) -> None:
        self._was_held = False

    def __enter__(self) -> None:
        global _open, _in_user_code
        if _open or threading.current_thread() is not threading.main_thread():
            return
        _open = True
        _handle_waiting()
        self._was_held = _in_user_code = True

    def __exit__(self, *error: object) -> None:
        global _open, _in_user_code
        if self._was_held:
            _open = _in_user_code = False
