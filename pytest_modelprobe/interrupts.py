"""Ctrl-C while something is changed that has to be put back: it is held, and raised when all is as it was.

Python runs the handler of a signal between any two instructions of the main thread. That may be in a ``finally:``
block, or between a change and the `try` that undoes it, and then a model would keep hooks or weights that are not its
own. So a handler of ours stands in for the other one meanwhile.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_number = signal.SIGINT
_before: Any = None
"""The handler that ours stands in for."""
_open = True
"""Whether an interrupt is raised at once."""
_waiting = False
"""Whether an interrupt was held, and is still to be raised."""
_in_user_code = False
"""Whether a block of `interruptible` is running."""


def _receive(number: int, frame: FrameType | None) -> None:
    global _open, _waiting
    if not _open and not (_in_user_code and _is_of_user(frame)):
        _waiting = True
        return
    _open = False  # it stays so if the handler raises: a second interrupt waits until all is put back
    _before(number, frame)
    _open = True


def _is_of_user(frame: FrameType | None) -> bool:
    """Whether code runs that is not ours. If it catches an interrupt and goes on, it also gets the next one."""
    return frame is not None and not str(frame.f_globals.get("__name__")).startswith(__package__)


def _raise_waiting() -> None:
    global _waiting
    if _waiting:
        _waiting = False
        _receive(_number, None)


class held:
    """A context in which an interrupt waits for the end, or for a block of `interruptible` inside.

    Only the main thread gets interrupts. If the process ignores them, or is ended by one, there is nothing to hold.
    """

    def __init__(self) -> None:
        self._outermost = self._was_open = False
        self._was_in_user_code: bool | None = None

    def __enter__(self) -> None:
        global _before, _open, _waiting, _in_user_code
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(_number)
        if handler is _receive:
            self._was_open, _open = _open, False
            self._was_in_user_code, _in_user_code = _in_user_code, False
        elif callable(handler):
            _before, _open, _waiting = handler, False, False
            self._outermost = True
            signal.signal(_number, _receive)

    def __exit__(self, *error: object) -> None:
        global _open, _in_user_code
        if self._was_in_user_code is not None:
            _in_user_code = self._was_in_user_code
        if self._outermost:
            signal.signal(_number, _before)
        if self._outermost or self._was_open:
            _open = True
            _raise_waiting()


def finished(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that undoes something and is safe to repeat: it is finished before an interrupt is raised."""

    @functools.wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with held():
                return function(*args, **kwargs)
        except KeyboardInterrupt:  # perhaps before it was held
            with held():
                function(*args, **kwargs)
            raise

    return whole


class interruptible:
    """A context for code of the user inside `held`, in which an interrupt is raised at once."""

    def __init__(self) -> None:
        self._was_held = False

    def __enter__(self) -> None:
        global _open, _in_user_code
        if _open or threading.current_thread() is not threading.main_thread():
            return
        self._was_held = _open = _in_user_code = True
        _raise_waiting()

    def __exit__(self, *error: object) -> None:
        global _open, _in_user_code
        if self._was_held:
            _open = _in_user_code = False
