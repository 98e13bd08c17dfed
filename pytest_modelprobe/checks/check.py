"""A check as it is called: as an assertion, or for its outcome as a value."""

from __future__ import annotations

import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.probe import ModelProbe

from .outcome import Break, NotApplicableError, Outcome, said
from .trial import Loss, Trial

Property = Callable[..., "Break | str"]
"""Takes a trial and the options of the check; returns where the property breaks, or what was looked at."""


class Check:
    """A property that a model has or has not. Made of a function by `check`.

    Called, it asserts: it returns the `Outcome` of a property that holds. `outcome` returns whatever it is.

    >>> from pytest_modelprobe import checks
    >>> probe, model = ModelProbe(), nn.Softmax(dim=0)
    >>> print(checks.deterministic(probe, model, probe.randn(4, 3)))
    deterministic holds for Softmax: 1 output in 2 runs
    >>> outcome = checks.batch_independent.outcome(probe, model, probe.randn(4, 3))
    >>> outcome.verdict, outcome.layer
    ('broken', '(root)')
    """

    def __init__(self, function: Property, *, wake: bool = True) -> None:
        functools.update_wrapper(self, function)
        self.__name__: str
        self._function = function
        self._wake = wake
        self._kinds = typing.get_type_hints(function)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        self.options = frozenset(p.name for p in parameters)
        """Keyword arguments of the check itself; all others go to the model."""
        self._needed = [p.name for p in parameters if p.default is p.empty]

    def __call__(
        self,
        probe: ModelProbe,
        model: nn.Module,
        /,
        *args: Any,
        loss: Loss | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Outcome:
        """Assert that the property holds, and return the outcome.

        Raises:
            AssertionError: The property is broken; the message names the first layer at which it is.
            UsageError: The check is not applicable to this model or these inputs, or an option is not what it takes;
                the message says why.
        """
        __tracebackhide__ = True
        found = self.outcome(probe, model, *args, loss=loss, kwargs=kwargs, **more)
        if found.verdict == "broken":
            raise AssertionError(str(found))
        if found.verdict == "not applicable":
            raise UsageError(str(found))
        return found

    def outcome(
        self,
        probe: ModelProbe,
        model: nn.Module,
        /,
        *args: Any,
        loss: Loss | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Outcome:
        """Return what the check says of the model: the property holds, is broken, or means nothing for it.

        Args:
            probe: Gives the device and the seed.
            model: The model; it is left as it was.
            *args: Its positional arguments.
            loss: Of the output, for checks that run backward; None: a fixed random projection. Targets that it holds
                itself go with the whole batch alone: checks that cut the batch want them as inputs.
            kwargs: Keyword arguments for the model whose names the check uses itself.
            **more: Options of the check by their names; all others are keyword arguments for the model.

        Raises:
            UsageError: An option is not what the check takes, or the loss is none; the message says what is.
        """
        __tracebackhide__ = True
        if not isinstance(probe, ModelProbe):
            raise UsageError(
                f"{self.__name__} takes the probe first: checks.{self.__name__}(modelprobe, model, ...); "
                f"got {type(probe).__name__}"
            )
        options = {name: value for name, value in more.items() if name in self.options}
        passed_on = {name: value for name, value in more.items() if name not in self.options}
        self._check_options(options)
        trial = Trial(probe, model, args, {**(kwargs or {}), **passed_on}, loss=loss, wake=self._wake)
        try:
            with trial:
                found = self._function(trial, **options)
        except NotApplicableError as reason:
            return Outcome(check=self.__name__, model=trial.name, verdict="not applicable", text=str(reason))
        if isinstance(found, Break):
            return Outcome(check=self.__name__, model=trial.name, verdict="broken", text=said(found), layer=found.layer)
        return Outcome(check=self.__name__, model=trial.name, verdict="holds", text=found)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        __tracebackhide__ = True
        for name in self._needed:
            if name not in options:
                raise UsageError(f"{self.__name__} needs {name}=, {_said(self._kinds[name])}")
        for name, value in options.items():
            wanted = f"{name}= of {self.__name__} is {_said(self._kinds[name])}"
            plain = value if isinstance(value, (bool, int, float, str)) else None
            if not _is(value, self._kinds[name]):
                got = type(value).__name__ if plain is None else repr(plain)
                raise UsageError(f"{wanted}; got {got}: what the model itself calls {name} goes into kwargs=")
            if isinstance(value, numbers.Real) and name != "axis" and not float(value) >= 0:
                raise UsageError(f"{wanted}, not negative; got {value}")

    def __repr__(self) -> str:
        return f"<check {self.__name__}>"


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of the kind that a signature names."""
    if isinstance(kind, types.UnionType):
        return any(_is(value, one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is Callable:
        return callable(value) and not isinstance(value, nn.Module)
    if typing.get_origin(kind) is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str)
    number = {int: numbers.Integral, float: numbers.Real}.get(kind)
    return isinstance(value, number or kind) and not (number and isinstance(value, bool))


def _said(kind: Any) -> str:
    """Return the kind that a signature names, as messages say it.

    >>> _said(float | None), _said(Callable[[], nn.Module])
    ('a number or None', 'a function that returns a torch.nn.Module')
    """
    if isinstance(kind, types.UnionType):
        return " or ".join(_said(one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is Callable:
        returned = typing.get_args(kind)[-1]
        return "a function" + ("" if returned in (object, Any) else f" that returns {_said(returned)}")
    if typing.get_origin(kind) is Sequence:
        return "a sequence of integers"
    names = {int: "an integer", float: "a number", str: "a string", types.NoneType: "None"}
    room = ".".join(kind.__module__.split(".")[:2])  # torch.nn.modules.module.Module
    return names.get(kind, f"a {room}.{kind.__name__}")


def check(function: Property) -> Check:
    """Make a check of a function that takes a trial."""
    return Check(function)


def check_as_it_is(function: Property) -> Check:
    """Make a check that sees the model as it is: layers that start from zero are left at zero."""
    return Check(function, wake=False)
