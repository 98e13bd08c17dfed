"""Ctrl-C while something is changed that has to be put back: it is held, and raised when all is as it was.

Python runs the handler of a signal between any two instructions of the main thread, so also in a ``finally:`` block, or
between a change and the `try` that undoes it.
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
"""The handler that ours stands for."""
_open = True
"""Whether an interrupt is raised at once."""
_waiting = False
"""Whether one was held."""
_in_user_code = False
"""Whether a block of `interruptible` runs."""


def _receive(number: int, frame: FrameType | None) -> None:
    global _open, _waiting
    if not _open and not (_in_user_code and _is_of_user(frame)):
        _waiting = True
        return
    _open = False  # before it is raised: nothing comes between what follows and its end
    _before(number, frame)
    _open = True


def _is_of_user(frame: FrameType | None) -> bool:
    """Whether other code than ours runs: if it catches an interrupt and goes on, it gets the next one too."""
    return frame is not None and not str(frame.f_globals.get("__name__")).startswith(__package__)


def _raise_waiting() -> None:
    global _waiting
    if _waiting:
        _waiting = False
        _receive(_number, None)


class held:
    """A context in which an interrupt waits for the end, or for a block of `interruptible` inside.

    Only the main thread gets interrupts. A process that ignores them, or that one ends, has nothing to hold.
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
    """Decorate what undoes something, and is safe to repeat: an interrupt in it is raised when it is done."""

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
    """A context for code of the user inside `held`: an interrupt is raised at once."""

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
