"""`watched`: a watch in one word, for code that is no test.

A test has a probe, which opens and closes watches. A script or a notebook has none, so this opens one by itself, for a
block or for each call of a function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, overload

from torch import nn

from pytest_modelprobe.exceptions import UsageError

from .watch import Watch


@overload
def watched(target: nn.Module, /, **options: Any) -> Watch: ...


@overload
def watched(target: Callable[..., Any] | None = None, /, **options: Any) -> Any: ...


def watched(target: nn.Module | Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Return a watch of a model, for a ``with`` statement, or a function that watches the model it is called with.

    A decorated function observes the first model among its arguments during each call. Its attribute ``watch`` is the
    `Watch` of the newest call, even if the call raised. It is `None` before the first call.

    Args:
        target: A model, or a function to decorate. Without it, a decorator is returned.
        **options: Options of `ModelProbe.watch`: ``steps=``, ``layers=``, ``stop_on=``.

    Raises:
        UsageError: The target is neither, or the decorated function is called without a model, or it is asynchronous or
            a generator, whose call ends before it runs.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(2, 3)
    >>> with watched(model) as watch:
    ...     _ = model(torch.ones(4, 2))
    >>> watch.record.forwards
    1
    >>> @watched(layers="0")
    ... def evaluate(model, x):
    ...     return model(x).sum()
    >>> _ = evaluate(nn.Sequential(model, nn.Tanh()), torch.ones(4, 2))
    >>> list(evaluate.watch.record.layers)
    ['0']
    """
    if isinstance(target, nn.Module):
        return Watch(target, **options)
    if target is None:
        return functools.partial(_decorated, **options)
    return _decorated(target, **options)


def _decorated(function: Callable[..., Any], /, **options: Any) -> Any:
    if not callable(function) or isinstance(function, type):
        raise UsageError(f"watched takes a model or a function that is called with one; got {_name(function)}")
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise UsageError(f"{_name(function)} returns before it runs: use `with watched(model) as watch` inside it")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        model = next((value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)), None)
        if model is None:
            raise UsageError(f"{_name(function)} is called without a model: give it one as an argument")
        with Watch(model, **options) as decorated.watch:
            return function(*args, **kwargs)

    decorated: Any = called
    decorated.watch = None
    return decorated


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
