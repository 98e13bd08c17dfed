"""What ``package.module:make_model`` names: a function or a class that makes a model."""

from __future__ import annotations

import functools
import importlib
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.record import nearest

from .inputs import required
from .tiny import tiny

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

    A class of transformers is made of its default configuration, with random weights. ``hf-tiny:CLASS`` shrinks this
    configuration, and ``timm:NAME`` is a model of timm; neither downloads anything.

    Raises:
        UsageError: There is no such module or attribute; it makes no model, or not without arguments.

    >>> load("torch.nn:Identity").make()
    Identity()
    """
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise UsageError(f"{name!r} names no model: write package.module:make_model")
    make: Callable[[], Any]
    if module_name in ("hf-tiny", "timm"):
        make = _tiny(path) if module_name == "hf-tiny" else _of_timm(path)
        return Target(name, functools.partial(_made, name, make), __name__, "load", f'load("{name}").make()')
    try:
        if module_name.startswith("."):  # a path, as ./module.py, which Python takes for a name inside a package
            raise ModuleNotFoundError(name=module_name)
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"there is no module {error.name!r}: is it installed, or below the current folder?") from None
    try:
        made = operator.attrgetter(path)(module)
    except AttributeError:
        raise UsageError(f"{module_name} has no {path}{_meant(path, dir(module), n=1)}") from None
    except ImportError as error:  # of a package that imports its parts when they are asked for
        raise UsageError(f"{name} cannot be imported: {error}") from error
    expression = f"{path}()"
    if isinstance(made, type) and hasattr(made, "config_class"):
        make = functools.partial(_of_default_config, made)
        expression = f"{path}({path}.config_class())"
    else:
        make = made
        _check_callable(name, made)
    return Target(name, functools.partial(_made, name, make), module_name, path.partition(".")[0], expression)


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


def _tiny(name: str) -> Callable[[], nn.Module]:
    transformers = _imported("transformers", f"hf-tiny:{name}")
    kind = getattr(transformers, name, None) if name in dir(transformers) else None
    if getattr(kind, "config_class", None) is None:
        known = (one for one in dir(transformers) if one.endswith("Model") or "For" in one)
        raise UsageError(f"transformers has no model {name}{_meant(name, known)}")
    return functools.partial(tiny, kind)


def _of_timm(name: str) -> Callable[[], nn.Module]:
    timm = _imported("timm", f"timm:{name}")
    if not timm.is_model(name):
        raise UsageError(f"timm has no model {name}{_meant(name, timm.list_models())}")
    make: Callable[[], nn.Module] = functools.partial(timm.create_model, name, pretrained=False)
    return make


def _imported(package: str, asked: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UsageError(f"{asked} needs {package}: pip install {package}") from None


def _meant(name: str, known: Iterable[str], n: int = 3) -> str:
    near = nearest(name, known, n=n)
    return f": is {' or '.join(near)} meant?" if near else ""


def _of_default_config(kind: Any) -> nn.Module:
    config = kind.config_class()
    with torch.device("meta"):
        parameters = sum(math.prod(p.shape) for p in nn.Module.parameters(kind(config)))
    if parameters > _MOST:
        raise UsageError(
            f"{kind.__name__} has {parameters:,} parameters by its default configuration: name a function that makes "
            "a smaller one"
        )
    model: nn.Module = kind(kind.config_class())
    return model
