"""The plain arguments of the expected call in place of those of the run, so that both answer the same question."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pytest_modelprobe.models import flatten_call
from pytest_modelprobe.record import Plain

_PLAIN = (bool, int, float, type(None))


def with_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], expected: Mapping[str, Plain]
) -> dict[str, Any] | None:
    """Return the keyword arguments of a call with the plain ones that are expected.

    One that the function does not take is left out. None if nothing differs, or not by keyword.

    Args:
        function: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        expected: The plain arguments expected, by name.

    >>> with_arguments(lambda x, scale=1, flag=None: x, (0.5,), {"flag": True}, {"input": 0.5, "scale": 2, "old": 1})
    {'scale': 2}
    """
    now = flatten_call(args, kwargs).plain
    differing = [name for name in {**now, **expected} if not _is_same(now.get(name), expected.get(name))]
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    by_position = [*parameters][: len(args)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    found = dict(kwargs)
    for name in differing:
        parameter = parameters.get(name)
        given = name in kwargs and name not in now  # a tensor, where a plain value is expected
        if name in by_position or given or type(expected.get(name)) not in _PLAIN:
            return None
        if name not in expected:
            if name not in kwargs or (parameter is not None and parameter.default is parameter.empty):
                return None
            del found[name]
        elif parameter is not None or (takes_any and name.isidentifier()):
            found[name] = expected[name]
        elif not name.isidentifier():
            return None
    return found if differing else None


def _is_same(a: Plain, b: Plain) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))
