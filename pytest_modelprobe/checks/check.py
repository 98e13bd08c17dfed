"""A check as it is called: as an assertion, or for its outcome as a value.

The options of a check and the keyword arguments of the model share one call. The signature of the function says which
names are options; a keyword of the model that has the same name as an option goes into ``kwargs=``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, ParamSpec

from torch import nn

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.models import seeding, settings_preserved
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.progress import progress
from pytest_modelprobe.record import ROOT, label_of
from pytest_modelprobe.runs import Loss
from pytest_modelprobe.text import listed

from .agreement import check_finite
from .outcome import NotApplicableError, Outcome, Violation, message_of
from .session import PreparedModel

Property = Callable[..., "Violation | str"]
"""Takes a prepared model and the options of the check; returns where the property breaks, or a summary."""

P = ParamSpec("P")


def check_order(name: str, probe: object, *others: object) -> None:
    """Raise `UsageError` with the order of the arguments if the first one is no probe."""
    __tracebackhide__ = True
    if not isinstance(probe, ModelProbe):
        got = ", ".join(type(one).__name__ for one in (probe, *others))
        raise UsageError(
            f"checks.{name} takes the probe, then the model: checks.{name}(modelprobe, model, *inputs); got {got}"
        )


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
    >>> inspect.signature(checks.batch_independent)
    <Signature (probe, model, /, *inputs, axis=0, tolerance=None, loss=None, kwargs=None, **model_kwargs)>
    """

    def __init__(
        self, function: Property, *, unmodified: bool = False, native: bool = False, nonfinite: bool = False
    ) -> None:
        functools.update_wrapper(self, function)
        self.__name__: str
        self.function = function
        """The property itself, to call it for a prepared model that another check has prepared."""
        self._ready = {"unmodified": unmodified, "native": native}
        self._check_reference = None if nonfinite else check_finite
        parameters = list(inspect.signature(function).parameters.values())[1:]
        self.options = frozenset(p.name for p in parameters)
        """Keyword arguments of the check; all others are passed to the model."""
        before = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self._before_inputs = [p.name for p in before]
        """Options that may also be given by position, before the inputs."""
        first, model, inputs, *of_all, others = list(inspect.signature(Check.outcome).parameters.values())[1:]
        own = (*before, inputs, *parameters[len(before) :])
        every = [first, model, *own, *of_all, others.replace(name="model_kwargs")]
        self.__signature__ = inspect.Signature([one.replace(annotation=inspect.Parameter.empty) for one in every])

    def __get__(self, instance: object, owner: type | None = None) -> Check:
        """Return the check itself: `help()` shows the signature of objects with this method."""
        return self

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
            UsageError: The loss is invalid; the message says what is accepted.
        """
        __tracebackhide__ = True
        check_order(self.__name__, probe, model, *inputs)
        before = [name for name in self._before_inputs if name not in options]
        own = {name: value for name, value in options.items() if name in self.options}
        own |= zip(before, inputs, strict=False)
        inputs = inputs[len(before) :]
        model_kwargs = {name: value for name, value in options.items() if name not in self.options}
        return self.judge(PreparedModel(probe, model, inputs, {**(kwargs or {}), **model_kwargs}, loss=loss), own)

    def judge(self, session: PreparedModel, options: Mapping[str, Any] = types.MappingProxyType({})) -> Outcome:
        """Return the outcome for a session, which other checks may share."""
        __tracebackhide__ = True
        found = self._found(session, options)
        session.probe.note_check(found.model, len(session.layers.modules), found.verdict)
        return found

    def _found(self, session: PreparedModel, options: Mapping[str, Any]) -> Outcome:
        __tracebackhide__ = True
        said = functools.partial(Outcome, check=self.__name__, model=session.name)
        try:
            with progress(self.__name__), session.ready(self._check_reference, **self._ready), interruptible():
                found = self.function(session, **options)
        except NotApplicableError as reason:
            return said(verdict="not applicable", text=str(reason))
        if isinstance(found, Violation):
            module = session.layers.modules.get(found.layer)
            text = message_of(found, "" if module is None else type(module).__name__)
            return said(verdict=found.level, text=text, layer=found.layer)
        if session.numbers:
            found += f"; not looked at, as numbers of Python: {listed(list(session.numbers))}"
        return said(verdict="holds", text=found)

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


check = Check
"""Makes a check from a function that takes a prepared model."""
check_native = functools.partial(Check, native=True)
"""Makes a check that says itself in which precision a model runs."""
check_unmodified = functools.partial(Check, unmodified=True, native=True)
"""Makes a check on the unmodified model: parameters that are all zero stay so, and half precision what it is."""
check_nonfinite = functools.partial(Check, unmodified=True, native=True, nonfinite=True)
"""Makes a check on the unmodified model that accepts outputs that are not finite."""


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
    return Check(asserted, unmodified=True, native=True)


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return positional and keyword arguments: of a tensor, a tuple of several or a mapping of keyword arguments.

    >>> arguments_of((1, 2)), arguments_of({"x": 1}), arguments_of([1, 2])
    (((1, 2), {}), ((), {'x': 1}), (([1, 2],), {}))
    """
    if isinstance(inputs, Mapping):
        return (), inputs
    plain = isinstance(inputs, tuple) and not hasattr(inputs, "_fields")  # a PackedSequence is one argument
    return (inputs, {}) if plain else ((inputs,), {})
