"""What ``package.module:make_model`` names: a function or a class that makes a model."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.record import nearest

_MOST = 1_500_000_000
"""Parameters of a model that is made of a default configuration; it takes 6 GB."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model that can be made, and the code that makes it."""

    name: str
    """As it was given: ``package.module:make_model``."""
    make: Callable[[], nn.Module]
    module: str
    attribute: str
    """What is imported from the module."""
    expression: str
    """What makes the model there: ``make_model()``."""


def load(name: str) -> Target:
    """Return the target of ``module:attribute``: a function without arguments, or a class of models.

    A class of transformers is made of its default configuration, with random weights.

    Raises:
        UsageError: There is no such module or attribute; it makes no model, or not without arguments.

    >>> load("torch.nn:Identity").make()
    Identity()
    """
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise UsageError(f"{name!r} names no model: write package.module:make_model")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"there is no module {error.name!r}: is it installed, or below the current folder?") from None
    try:
        made = operator.attrgetter(path)(module)
    except AttributeError:
        near = nearest(path, dir(module), n=1)
        hint = f": is {near[0]} meant?" if near else ""
        raise UsageError(f"{module_name} has no {path}{hint}") from None
    except ImportError as error:  # of a package that imports its parts when they are asked for
        raise UsageError(f"{name} cannot be imported: {error}") from error
    expression = f"{path}()"
    if isinstance(made, type) and hasattr(made, "config_class"):
        make: Callable[[], Any] = functools.partial(_of_default_config, made)
        expression = f"{path}({path}.config_class())"
    else:
        make = made
        _check_callable(name, made)
    return Target(name, functools.partial(_made, name, make), module_name, path.partition(".")[0], expression)


def required(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a function cannot do without.

    >>> required(lambda x, *more, scale=1: x)
    ['x']
    """
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _check_callable(name: str, made: Any) -> None:
    if isinstance(made, nn.Module):
        raise UsageError(f"{name} is a model already: name a function that makes it, with weights by the seed")
    if not callable(made):
        raise UsageError(f"{name} is {type(made).__name__}, not a function or a class that makes a model")
    try:
        needed = required(made)
    except (TypeError, ValueError):  # written in C
        return
    if needed:
        raise UsageError(f"{name} needs arguments ({', '.join(needed)}): name a function without, which calls it")


def _made(name: str, make: Callable[[], Any]) -> nn.Module:
    model = make()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _of_default_config(kind: Any) -> nn.Module:
    config = kind.config_class()
    with torch.device("meta"):
        parameters = sum(math.prod(p.shape) for p in kind(config).parameters())
    if parameters > _MOST:
        raise UsageError(
            f"{kind.__name__} has {parameters:,} parameters by its default configuration: name a function that makes "
            "a smaller one"
        )
    model: nn.Module = kind(kind.config_class())
    return model
