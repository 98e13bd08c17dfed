"""The arguments of the expected call in place of those of the run, so that both answer the same question.

Two versions of a model may call a child with different arguments. With the arguments of the expected call, a difference
between the responses is one of the child's own code, and not of its caller's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pytest_modelprobe.models import flatten_call
from pytest_modelprobe.record import Call

_PLAIN = (bool, int, float, type(None))
_POSITION = re.compile(r"input\[(\d+)\]")


def with_arguments(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    expected: Call,
    make: Callable[[str], Tensor | None] = lambda path: None,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a call with those that the expected one gets, as far as the function takes them.

    Plain values are the expected ones. Tensors that the expected call does not get are left out, and those that only
    the expected call gets are made. Arguments that the function has no parameter for are left out. Returns `None` if
    nothing differs, or if that cannot be done.

    Args:
        function: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        expected: The expected call.
        make: Returns the tensor at a path of the expected call, or `None` if there is none.

    >>> call = Call(root="f", root_training=False, index=0, arguments={"input": 0.5, "scale": 2, "old": 1})
    >>> with_arguments(lambda x, scale=1, flag=None: x, (0.5,), {"flag": True}, call)
    ((0.5,), {'scale': 2})
    """
    flat = flatten_call(args, kwargs)
    tensors, given = {path for path, _ in flat.tensors}, {value.path for value in expected.inputs}
    now, then = flat.plain, expected.arguments
    came, gone = sorted(tensors - given), sorted(given - tensors)
    plain = [path for path in {**now, **then} if path in came or not _is_same(now.get(path), then.get(path))]
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    named = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    found = {**dict(zip(named, args, strict=False)), **kwargs} if len(args) <= len(named) else {}

    def name_of(path: str) -> str:
        """Return the name of the parameter at a path, which for an element of a container is that of the container."""
        position = _POSITION.match(path)
        number = int(position[1]) if position else 0 if path == "input" and len(args) == 1 else len(named)
        return named[number] if number < len(named) else re.split(r"[.\[]", path)[0]

    if not (plain or came or gone):
        return None
    # A tensor cannot be left out of a container that has others.
    if len(args) > len(named) or any(name_of(path) in map(name_of, tensors & given) for path in came):
        return None
    changed: dict[str, Any] = {}
    for path in (path for path in plain if path in then):
        value = then[path]
        # Neither text is replaced, nor an element of a container of tensors.
        if type(value) not in _PLAIN or name_of(path) in map(name_of, tensors & given):
            return None
        changed[path] = value
    for path in (path for path in (*came, *plain) if path not in then and path not in gone):
        parameter = parameters.get(name_of(path))
        if name_of(path) not in found or (parameter is not None and parameter.default is parameter.empty):
            return None  # a parameter without a default cannot be left out
        del found[name_of(path)]
    for path in gone:
        if (made := make(path)) is None:
            return None
        changed[path] = made
    for path, value in changed.items():
        if name_of(path) in parameters or (takes_any and path.isidentifier()):
            found[name_of(path)] = value
        elif not path.isidentifier() and not _POSITION.match(path):
            return None
    # Arguments behind the first one that was left out are passed by keyword.
    by_position = 0
    while by_position < len(args) and named[by_position] in found:
        by_position += 1
    return tuple(found.pop(name) for name in named[:by_position]), found


def _is_same(a: object, b: object) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))
