"""Progress of long work: what is being done, and how many of its parts are done.

Checks and runs tell their progress, and the plugin shows it. They must not know of each other, so the listener stands
here. Without the plugin nobody listens, and nothing is told.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")
Listener = Callable[[str], None]
"""Takes what is being done, in words. An empty text says that the work has ended."""

_listener: Listener | None = None
_running: list[str] = []
"""What is being done: each entry is a part of the entry before it."""


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` the progress of all work that begins inside."""
    global _listener, _running
    before = _listener, _running
    _listener, _running = listener, []
    try:
        yield
    finally:
        _listener, _running = before


class Parts(Protocol):
    """Yields the parts that it is given, and tells after each that one more is done."""

    def __call__(self, parts: Iterable[T], /) -> Iterator[T]:
        """Yield the parts."""


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Parts]:
    """Tell the progress of the work in the block. It yields a function to put around the ``total`` parts of the work.

    Work inside other work is told after it. Only the main thread tells.

    >>> with listening(print), progress("checks", 2) as each:
    ...     for check in each(["finite", "overfits_batch"]):
    ...         with progress(check):
    ...             pass
    checks 0 of 2
    checks 0 of 2, finite
    checks 0 of 2
    checks 1 of 2
    checks 1 of 2, overfits_batch
    checks 1 of 2
    checks 2 of 2
    <BLANKLINE>
    """
    if _listener is None or threading.current_thread() is not threading.main_thread():
        yield iter
        return
    done, depth = 0, len(_running)

    def tell() -> None:
        _running[depth:] = [what if total is None else f"{what} {done:,} of {total:,}"]
        _tell()

    def each(parts: Iterable[T]) -> Iterator[T]:
        nonlocal done
        for part in parts:
            yield part
            done += 1
            tell()

    tell()
    try:
        yield each
    finally:
        del _running[depth:]
        _tell()


def _tell() -> None:
    if _listener is not None:
        _listener(", ".join(_running))
