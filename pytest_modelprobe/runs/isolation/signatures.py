"""Default values of the arguments of a layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def defaults_of(function: Callable[..., Any]) -> Mapping[str, object]:
    """Return the defaults of a function's parameters by name; empty if it has no signature.

    >>> defaults_of(lambda x, is_causal=True: x)
    {'is_causal': True}
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty}
