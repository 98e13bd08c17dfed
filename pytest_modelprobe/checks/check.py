"""A check as it is called: as an assertion, or for its outcome as a value."""

from __future__ import annotations

import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import nn

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.runs import Loss

from .nonfinite import check_finite
from .outcome import Break, NotApplicableError, Outcome, said
from .trial import Judge, Trial

Property = Callable[..., "Break | str"]
"""Takes a trial and the options of the check; returns where the property breaks, or what was looked at."""

P = ParamSpec("P")
T = TypeVar("T")


def in_order(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function, or a method of `Check`, say in one sentence in which order its arguments go."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        named, given = (args[0], args[1:]) if args and isinstance(args[0], Check) else (function, args)
        if len(given) < 2 or not isinstance(given[0], ModelProbe):
            name = f"checks.{named.__name__}"
            got = ", ".join(type(one).__name__ for one in given) or "neither"
            raise UsageError(f"{name} takes the probe, then the model: {name}(modelprobe, model, *inputs); got {got}")
        return function(*args, **kwargs)

    return called


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

    def __init__(self, function: Property, *, wake: bool = True, judge: Judge | None = check_finite) -> None:
        functools.update_wrapper(self, function)
        self.__name__: str
        self._function = function
        self._trial = functools.partial(Trial, wake=wake, judge=judge)
        self._kinds = typing.get_type_hints(function)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        self.options = frozenset(p.name for p in parameters)
        """Keyword arguments of the check itself; all others go to the model."""
        self._needed = [p.name for p in parameters if p.default is p.empty]
        self.__signature__ = _called_with(parameters)

    def __get__(self, instance: object, owner: type | None = None) -> Check:
        """Return the check itself. `help()` shows the signature of what has this method, as of any routine."""
        return self

    @in_order
    def __call__(
        self,
        probe: ModelProbe,
        model: nn.Module,
        /,
        *inputs: Any,
        loss: Loss | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Outcome:
        """Assert that the property holds, and return the outcome.

        Raises:
            AssertionError: The property is broken; the message names the first layer at which it is.
            UsageError: The check is not applicable to this model or these inputs, or an option is not what it takes;
                the message says why.
        """
        __tracebackhide__ = True
        found = self.outcome(probe, model, *inputs, loss=loss, kwargs=kwargs, **options)
        if found.verdict == "broken":
            raise AssertionError(str(found))
        if found.verdict == "not applicable":
            raise UsageError(str(found))
        return found

    @in_order
    def outcome(
        self,
        probe: ModelProbe,
        model: nn.Module,
        /,
        *inputs: Any,
        loss: Loss | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Outcome:
        """Return what the check says of the model: the property holds, is broken, or means nothing for it.

        Args:
            probe: Gives the device and the seed.
            model: The model; it is left as it was.
            *inputs: Its positional arguments.
            loss: Of the output, for checks that run backward; None: a fixed random projection. Targets that it holds
                itself go with the whole batch alone: checks that cut the batch want them as inputs.
            kwargs: Keyword arguments for the model whose names the check uses itself.
            **options: Options of the check by their names; all others are keyword arguments for the model.

        Raises:
            UsageError: An option is not what the check takes, or the loss is none; the message says what is.
        """
        __tracebackhide__ = True
        own = {name: value for name, value in options.items() if name in self.options}
        model_kwargs = {name: value for name, value in options.items() if name not in self.options}
        self._check_options(own)
        trial = self._trial(probe, model, inputs, {**(kwargs or {}), **model_kwargs}, loss=loss)
        try:
            with trial:
                found = self._function(trial, **own)
        except NotApplicableError as reason:
            return Outcome(check=self.__name__, model=trial.name, verdict="not applicable", text=str(reason))
        if isinstance(found, Break):
            module = trial.layers.modules.get(found.layer)
            text = said(found, "" if module is None else type(module).__name__)
            return Outcome(check=self.__name__, model=trial.name, verdict="broken", text=text, layer=found.layer)
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


def _called_with(options: list[inspect.Parameter]) -> inspect.Signature:
    """Return the signature of a check with these options, as a user calls it.

    >>> from pytest_modelprobe import checks
    >>> inspect.signature(checks.batch_independent)
    <Signature (probe, model, /, *inputs, axis=0, tolerance=None, loss=None, kwargs=None, **model_kwargs)>
    """
    probe, model, inputs, *of_all, others = list(inspect.signature(Check.outcome).parameters.values())[1:]
    parameters = [probe, model, inputs, *options, *of_all, others.replace(name="model_kwargs")]
    return inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters])


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


def check_numbers(function: Property) -> Check:
    """Make a check that sees the model as it is and all that it gives out, finite or not."""
    return Check(function, wake=False, judge=None)
