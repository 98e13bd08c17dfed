"""A check as it is called: as an assertion, or for its outcome as a value.

The options of a check and the keyword arguments of the model share one call. The signature of the function says which
names are options; a keyword of the model that has the same name as an option goes into ``kwargs=``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

from torch import nn

from pytest_modelprobe.checks.outcome import NotApplicableError, Outcome, Violation, message_of
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.models import seeding, settings_preserved
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.progress import progress
from pytest_modelprobe.record import ROOT, label_of
from pytest_modelprobe.runs import Loss
from pytest_modelprobe.text import listed

from .nonfinite import check_finite
from .prepared import PreparedModel, ReferenceCheck

Property = Callable[..., "Violation | str"]
"""Takes a prepared model and the options of the check; returns where the property breaks, or a summary."""

P = ParamSpec("P")
T = TypeVar("T")


def in_order(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function, or a method of `Check`, explain the order of its arguments when they are wrong."""

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
    """A property of models. Made from a function by `check`.

    A call asserts the property and returns its `Outcome`. `outcome` returns the outcome in any case.

    >>> from pytest_modelprobe import checks
    >>> probe, model = ModelProbe(), nn.Softmax(dim=0)
    >>> print(checks.deterministic(probe, model, probe.randn(4, 3)))
    deterministic holds for Softmax: 1 output in 2 runs
    >>> outcome = checks.batch_independent.outcome(probe, model, probe.randn(4, 3))
    >>> outcome.verdict, outcome.layer
    ('broken', '(root)')
    """

    def __init__(
        self,
        function: Property,
        *,
        randomize_zeros: bool = True,
        check_reference: ReferenceCheck | None = check_finite,
        native: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self.__name__: str
        self.function = function
        """The property itself, to call it for a prepared model that another check has prepared."""
        self._prepared = functools.partial(
            PreparedModel, randomize_zeros=randomize_zeros, check_reference=check_reference, native=native
        )
        self._kinds = typing.get_type_hints(function)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        self.options = frozenset(p.name for p in parameters)
        """Keyword arguments of the check; all others are passed to the model."""
        self._needed = [p.name for p in parameters if p.default is p.empty]
        self.__signature__ = _called_with(parameters)

    def __get__(self, instance: object, owner: type | None = None) -> Check:
        """Return the check itself: `help()` shows the signature of objects with this method."""
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
        """Assert that the property holds, and return the outcome. A hint is a `HintWarning`.

        Raises:
            AssertionError: The property is broken; the message names the first layer at which it is.
            UsageError: The check is not applicable to this model or these inputs, or an option is invalid; the message
                says why.
        """
        __tracebackhide__ = True
        found = self.outcome(probe, model, *inputs, loss=loss, kwargs=kwargs, **options)
        return found.asserted(stacklevel=5)

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
        """Return whether the property holds, is broken, or is not applicable to the model.

        Args:
            probe: Gives the device and the seed.
            model: The model; it is restored.
            *inputs: Its positional arguments.
            loss: A function of the output, for checks that run a backward. By default it is a fixed random projection.
                Targets that it holds fit only the whole batch: for checks that slice the batch, pass them as inputs.
            kwargs: Keyword arguments for the model whose names are options of the check.
            **options: Options of the check by their names; all others are keyword arguments for the model.

        Raises:
            UsageError: An option or the loss is invalid; the message says what is accepted.
        """
        __tracebackhide__ = True
        own = {name: value for name, value in options.items() if name in self.options}
        model_kwargs = {name: value for name, value in options.items() if name not in self.options}
        self._check_options(own)
        prepared = self._prepared(probe, model, inputs, {**(kwargs or {}), **model_kwargs}, loss=loss)
        found = self._found(prepared, own)
        probe.note_check(found.model, len(prepared.layers.modules), found.verdict)
        return found

    def _found(self, prepared: PreparedModel, own: Mapping[str, Any]) -> Outcome:
        __tracebackhide__ = True
        try:
            with progress(self.__name__), prepared, interruptible():
                found = self.function(prepared, **own)
        except NotApplicableError as reason:
            return Outcome(check=self.__name__, model=prepared.name, verdict="not applicable", text=str(reason))
        if isinstance(found, Violation):
            module = prepared.layers.modules.get(found.layer)
            text = message_of(found, "" if module is None else type(module).__name__)
            return Outcome(check=self.__name__, model=prepared.name, verdict=found.level, text=text, layer=found.layer)
        if prepared.numbers:
            found += f"; not looked at, as numbers of Python: {listed(list(prepared.numbers))}"
        return Outcome(check=self.__name__, model=prepared.name, verdict="holds", text=found)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        __tracebackhide__ = True
        for name in self._needed:
            if name not in options:
                raise UsageError(f"{self.__name__} needs {name}=, {_type_text(self._kinds[name])}")
        for name, value in options.items():
            wanted = f"{name}= of {self.__name__} is {_type_text(self._kinds[name])}"
            plain = value if isinstance(value, (bool, int, float, str)) else None
            if not _is(value, self._kinds[name]):
                got = type(value).__name__ if plain is None else repr(plain)
                raise UsageError(f"{wanted}; got {got}: what the model itself calls {name} goes into kwargs=")
            if isinstance(value, numbers.Real) and name != "axis" and not float(value) >= 0:
                raise UsageError(f"{wanted}, not negative; got {value}")

    def __repr__(self) -> str:
        return f"<check {self.__name__}>"


class StateCheck(Generic[P]):
    """A check of what makes a state, trains it or loads it, instead of a model and its inputs.

    A call asserts the property and returns its `Outcome`; `outcome` returns the outcome in any case.
    """

    def __init__(self, function: Callable[P, Outcome]) -> None:
        functools.update_wrapper(self, function)
        self.__name__: str
        self.function = function
        self._order = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Outcome:
        """Assert that the property holds."""
        __tracebackhide__ = True
        found = self.outcome(*args, **kwargs)
        return found.asserted(stacklevel=4)

    def outcome(self, *args: P.args, **kwargs: P.kwargs) -> Outcome:
        """Return whether the property holds, is broken, or is not applicable. Random states stay as they were.

        Raises:
            UsageError: An argument is invalid; the message says what is accepted.
        """
        __tracebackhide__ = True
        given = {**dict(zip(self._order, args, strict=False)), **kwargs}
        probe, first = (given.get(name) for name in self._order[:2])
        if not isinstance(probe, ModelProbe):
            called = f"{self.__name__}({', '.join(['modelprobe', *self._order[1:]])})"
            raise UsageError(f"checks.{self.__name__} takes the probe first: {called}; got {type(probe).__name__}")
        try:
            with progress(self.__name__), settings_preserved(), seeding.forked_rng():
                return self.function(*args, **kwargs)
        except NotApplicableError as reason:
            made = type(first) if isinstance(first, nn.Module) else first
            name = made.__name__ if isinstance(made, type) else "the model"
            return Outcome(check=self.__name__, model=name, verdict="not applicable", text=str(reason))

    def __get__(self, instance: object, owner: type | None = None) -> StateCheck[P]:
        """Return the check itself: `help()` shows the signature of objects with this method."""
        return self

    def __repr__(self) -> str:
        return f"<check {self.__name__}>"


@contextlib.contextmanager
def noted(where: str, by: str) -> Iterator[None]:
    """Say in the traceback of an error of the user's code where it was raised, and which check called it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised {where}, which checks.{by} called")
        raise


def _called_with(options: list[inspect.Parameter]) -> inspect.Signature:
    """Return the signature of a check with these options.

    >>> from pytest_modelprobe import checks
    >>> inspect.signature(checks.batch_independent)
    <Signature (probe, model, /, *inputs, axis=0, tolerance=None, loss=None, kwargs=None, **model_kwargs)>
    """
    probe, model, inputs, *of_all, others = list(inspect.signature(Check.outcome).parameters.values())[1:]
    parameters = [probe, model, inputs, *options, *of_all, others.replace(name="model_kwargs")]
    return inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters])


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of the type in a signature."""
    if isinstance(kind, types.UnionType):
        return any(_is(value, one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is Callable:
        return callable(value) and not isinstance(value, nn.Module)
    if typing.get_origin(kind) is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str)
    number = {int: numbers.Integral, float: numbers.Real}.get(kind)
    return isinstance(value, number or kind) and not (number and isinstance(value, bool))


def _type_text(kind: Any) -> str:
    """Return a type of a signature, in words.

    >>> _type_text(float | None), _type_text(Callable[[], nn.Module])
    ('a number or None', 'a function that returns a torch.nn.Module')
    """
    if isinstance(kind, types.UnionType):
        return " or ".join(_type_text(one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is Callable:
        returned = typing.get_args(kind)[-1]
        return "a function" + ("" if returned in (object, Any) else f" that returns {_type_text(returned)}")
    if typing.get_origin(kind) is Sequence:
        return f"a sequence of {'strings' if typing.get_args(kind) == (str,) else 'integers'}"
    names = {bool: "True or False", int: "an integer", float: "a number", str: "a string", types.NoneType: "None"}
    package = ".".join(kind.__module__.split(".")[:2])  # torch.nn.modules.module.Module
    return names.get(kind, f"a {package}.{kind.__name__}")


def check(function: Property) -> Check:
    """Make a check from a function that takes a prepared model."""
    return Check(function)


def check_native(function: Property) -> Check:
    """Make a check that says itself in which precision a model runs."""
    return Check(function, native=True)


def check_unmodified(function: Property) -> Check:
    """Make a check on the unmodified model: parameters that are all zero stay so, and half precision what it is."""
    return Check(function, randomize_zeros=False, native=True)


def check_nonfinite(function: Property) -> Check:
    """Make a check on the unmodified model that accepts outputs that are not finite."""
    return Check(function, randomize_zeros=False, check_reference=None, native=True)


def from_assertion(name: str, function: Callable[..., Any]) -> Check:
    """Make a check from a function that takes probe, model and inputs, and raises AssertionError."""

    def asserted(prepared: PreparedModel) -> Violation | str:
        __tracebackhide__ = True
        args, kwargs = prepared.copied_inputs()
        try:
            said = function(prepared.probe, prepared.model, *args, **kwargs)
        except AssertionError as error:
            line, _, rest = (str(error).strip() or "AssertionError").partition("\n")
            named = (
                layer for layer in prepared.layers.modules if line.startswith((f"{layer} ", f"{label_of(layer)} "))
            )
            return Violation(layer=max(named, key=len, default=ROOT), line=line, advice=rest.strip("\n"))
        return said if isinstance(said, str) else ""

    asserted.__name__, asserted.__doc__ = name, function.__doc__
    return check_unmodified(asserted)


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return positional and keyword arguments: of a tensor, a tuple of several or a mapping of keyword arguments.

    >>> arguments_of((1, 2)), arguments_of({"x": 1}), arguments_of([1, 2])
    (((1, 2), {}), ((), {'x': 1}), (([1, 2],), {}))
    """
    if isinstance(inputs, Mapping):
        return (), inputs
    plain = isinstance(inputs, tuple) and not hasattr(inputs, "_fields")  # a PackedSequence is one argument
    return (inputs, {}) if plain else ((inputs,), {})
