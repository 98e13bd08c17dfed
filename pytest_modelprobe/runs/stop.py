"""``stop_on=``: the condition, and the error that says which value met it.

`capture` shows each value as it arrives. Here it is judged, and the message is written, which depends on where the
value comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pytest_modelprobe.capture import SeenValue
from pytest_modelprobe.exceptions import StoppedError, UsageError
from pytest_modelprobe.record import Statistics, label_of
from pytest_modelprobe.text import Cell, count, failure, number, shape

StopOn = Literal["nonfinite"] | Callable[[Statistics], object]


def check_stop_on(stop_on: object) -> None:
    """Raise `UsageError` unless ``stop_on`` is a condition or `None`."""
    if stop_on is not None and stop_on != "nonfinite" and not callable(stop_on):
        raise UsageError(
            f"stop_on is 'nonfinite', a callable that takes the statistics of a value, or None; got {stop_on!r}"
        )


def is_met(stop_on: StopOn, statistics: Statistics) -> bool:
    """Return whether to stop at a value with these statistics."""
    return bool(statistics.nonfinite) if stop_on == "nonfinite" else bool(stop_on(statistics))


def stopped_at(seen: SeenValue, type_name: str, stop_on: StopOn) -> StoppedError:
    """Return the error for a value at which the condition is met."""
    s, value = seen.statistics, f"the gradient of its {seen.path}" if seen.is_gradient else f"its {seen.path}"
    label = label_of(seen.layer, type_name)
    if stop_on == "nonfinite":
        first = f"{label}: {s.nonfinite:,} of {count(s.count, 'element')} of {value} are NaN or infinite"
    else:
        first = f"{label}: {value} meets stop_on={getattr(stop_on, '__qualname__', repr(stop_on))}"
    if seen.call:
        first += f", in call {seen.call} (from 0)"
    rows: list[list[Cell]] = [
        [path, shape(dimensions), t.nan, t.posinf + t.neginf, *map(number, (t.min, t.max, t.rms))]
        for path, dimensions, t in seen.others
    ]
    columns = ["value", "shape", "NaN", "infinite", "min", "max", "rms"]
    return StoppedError(failure(first, columns, rows, _next_step(seen, type_name, stop_on)))


def _next_step(seen: SeenValue, type_name: str, stop_on: StopOn) -> str:
    if seen.is_gradient:
        return "No gradient before it in the backward pass does: look at what uses this value, at last the loss."
    if any(is_met(stop_on, s) for path, _, s in seen.others if path.startswith("input")):
        return "An input does too, and no recorded layer returned it: look at the code before this call."
    return f"No output of a layer before it does, nor an input: look at the forward of {type_name}."
