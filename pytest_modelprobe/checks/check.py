"""A check as it is called: as an assertion, or for its outcome as a value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
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
    """

    def __init__(self, function: Property, *, wake: bool = True) -> None:
        functools.update_wrapper(self, function)
        self.__name__: str
        self._function = function
        self._wake = wake
        parameters = list(inspect.signature(function).parameters.values())
        self.options = frozenset(p.name for p in parameters[1:])
        """Keyword arguments of the check itself; all others go to the model."""

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
            UsageError: The check is not applicable to this model or these inputs; the message says why.
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
        """
        __tracebackhide__ = True
        options = {name: value for name, value in more.items() if name in self.options}
        passed_on = {name: value for name, value in more.items() if name not in self.options}
        trial = Trial(probe, model, args, {**(kwargs or {}), **passed_on}, loss=loss, wake=self._wake)
        try:
            with trial:
                found = self._function(trial, **options)
        except NotApplicableError as reason:
            return Outcome(check=self.__name__, model=trial.name, verdict="not applicable", text=str(reason))
        if isinstance(found, Break):
            return Outcome(check=self.__name__, model=trial.name, verdict="broken", text=said(found), layer=found.layer)
        return Outcome(check=self.__name__, model=trial.name, verdict="holds", text=found)

    def __repr__(self) -> str:
        return f"<check {self.__name__}>"


def check(function: Property) -> Check:
    """Make a check of a function that takes a trial."""
    return Check(function)


def check_as_it_is(function: Property) -> Check:
    """Make a check that sees the model as it is: layers that start from zero are left at zero."""
    return Check(function, wake=False)
