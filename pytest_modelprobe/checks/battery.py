"""The checks of what any model is expected to be: at once, or each as a test of its own.

A check is standard if any model is expected to pass it. All others are named with the reason why they are called by
themselves.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from pytest_modelprobe import extension
from pytest_modelprobe.exceptions import HintWarning, ModelProbeError, UsageError
from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.progress import progress
from pytest_modelprobe.record import nearest
from pytest_modelprobe.runs import Loss
from pytest_modelprobe.text import count, listed

from .batch import any_batch_size, batch_independent
from .check import Check, arguments_of, check_order, from_assertion
from .gradients import gradients_agree
from .incremental import incremental_where_meant
from .inputs import inputs_used, parameters_used
from .modes import deterministic, eval_stable, finite, modes_agree, seeded, train_eval_differ
from .outcome import NotApplicableError, Outcome
from .parity import dtype_parity, layout_parity
from .recomputation import checkpoint_parity
from .registration import (
    copy_and_pickle,
    initialized,
    inputs_unchanged_by_forward,
    registered,
    state_dict_round_trip,
    state_unchanged_by_forward,
)
from .sequence import causal_where_meant, padding_invariant
from .session import PreparedModel
from .training import gradient_accumulation, overfits_batch

_standard: ChainMap[str, Check] = ChainMap({}, {
    check.__name__: check
    for check in (
        finite, registered, initialized, deterministic, eval_stable, seeded, train_eval_differ,
        modes_agree, batch_independent, any_batch_size, causal_where_meant, incremental_where_meant, padding_invariant,
        inputs_used, parameters_used, state_unchanged_by_forward, inputs_unchanged_by_forward, state_dict_round_trip,
        copy_and_pickle, layout_parity, dtype_parity, checkpoint_parity,
        gradients_agree, gradient_accumulation, overfits_batch,
    )
})  # fmt: skip
"""What was added in this run of pytest, or without one in this process, and what there always is."""
STANDARD: Mapping[str, Check] = MappingProxyType(_standard)
"""Name → check, of those that `standard` runs: what a model is expected to be unless it is meant to be otherwise."""

APART: Mapping[str, str] = {
    "permutation_equivariant": "as only some models are meant to be so",
    "permutation_invariant": "as only some models are meant to be so",
    "gradcheck": "as it runs the model twice for each parameter",
    "device_parity": "as it needs another device",
    "optimizer_covers": "as it needs the optimizer",
    "ema_tracks": "as it needs the average",
    **extension.reasons(),
}
"""Name of each other check → why `standard` leaves it to be called by itself."""


def add_standard(functions: Mapping[str, Callable[..., Any]]) -> Callable[[], None]:
    """Add checks to the standard ones, and return a function that removes them.

    A plugin of pytest implements the hook ``pytest_modelprobe_checks`` instead.

    Args:
        functions: By name, what asserts a property: called with the probe, the model and its inputs. It raises
            `NotApplicableError` if the property means nothing for the model; text that it returns is shown where it
            holds.

    Raises:
        UsageError: There is a check of that name already, a value is no function, or there are no names.

    >>> from pytest_modelprobe import assert_param_count, checks
    >>> def small(probe, model, *inputs, **kwargs):
    ...     assert_param_count(model, (0, 100))
    >>> remove = checks.add_standard({"small": small})
    >>> print(checks.standard(ModelProbe(), nn.Linear(2, 2), only="small"))
    0 checks of 1 broken; 1 hold, 0 are not applicable
    >>> remove()
    """
    if not isinstance(functions, Mapping):
        raise UsageError(f"checks are given by name, as a dict of functions; got {type(functions).__name__}")
    for name, function in functions.items():
        if name in _standard or name in APART:
            raise UsageError(f"there is a check {name!r} already: give yours another name")
        if not callable(function) or isinstance(function, type | nn.Module):
            raise UsageError(
                f"the check {name!r} is a function of probe, model and inputs; got {type(function).__name__}"
            )
    added = _standard.maps[0]
    added.update({name: from_assertion(name, function) for name, function in functions.items()})

    def remove() -> None:
        for name in functions:
            added.pop(name, None)

    return remove


def start_run() -> Callable[[], None]:
    """Leave what was added so far to the run of pytest around this one; return a function that ends this one."""
    outer, _standard.maps[0] = _standard.maps[0], {}

    def end() -> None:
        _standard.maps[0] = outer

    return end


Inputs = Any
"""A tensor, a tuple of positional arguments, or a mapping of keyword arguments."""


class Outcomes(tuple[Outcome, ...]):
    """The outcomes of checks; ``str`` lists the broken ones in full, then the hints.

    >>> one = Outcome(check="seeded", model="Net", verdict="holds")
    >>> print(Outcomes([one]))
    0 checks of 1 broken; 1 hold, 0 are not applicable
    >>> Outcomes([one]).broken
    ()
    """

    __slots__ = ()

    @property
    def broken(self) -> tuple[Outcome, ...]:
        """The outcomes of properties that are broken."""
        return tuple(outcome for outcome in self if outcome.verdict == "broken")

    @property
    def hints(self) -> tuple[Outcome, ...]:
        """The outcomes of properties that do not hold of models that may be healthy."""
        return tuple(outcome for outcome in self if outcome.verdict == "hint")

    def __str__(self) -> str:
        verdicts = [outcome.verdict for outcome in self]
        counts = f"{verdicts.count('holds')} hold, {verdicts.count('not applicable')} are not applicable"
        names = f": {listed([one.check for one in self.broken], len(self))}" if len(self.broken) > 1 else ""
        hints = f", {count(len(self.hints), 'hint')}" if self.hints else ""
        first = f"{count(len(self.broken), 'check')} of {len(self)} broken{names}{hints}; {counts}"
        found = (*self.broken, *self.hints)
        if found:
            first = f"{found[0].text.partition(chr(10))[0]}; {first}"
        broken = [f"--- {outcome.check} ---\n{outcome}" for outcome in self.broken]
        return "\n\n".join([first, *broken, *(f"--- {hint.check}, a hint ---\n{hint}" for hint in self.hints)])


def standard(
    probe: ModelProbe,
    model: nn.Module,
    /,
    *inputs: Any,
    loss: Loss | None = None,
    skip: Collection[str] = (),
    only: Collection[str] = (),
    kwargs: Mapping[str, Any] | None = None,
    **model_kwargs: Any,
) -> Outcomes:
    """Run the standard checks, assert that none is broken, and return their outcomes. Hints are a `HintWarning`.

    `STANDARD` has their names. Among them, `causal` is not applicable unless something says that the model is meant to
    be so. `APART` has the other checks, each with the reason why it is called by itself.

    Args:
        probe: Gives the device and the seed.
        model: The model; it is restored.
        *inputs: Its positional arguments.
        loss: Function of the output, for the checks of training, which are not applicable without. Targets that it
            holds fit the whole batch alone: for `gradient_accumulation`, pass them as inputs to a model that returns
            its loss.
        skip: Names of checks to leave out.
        only: Names of the only checks to run; empty: all.
        kwargs: Keyword arguments for the model whose names are options of `standard`.
        **model_kwargs: All other keyword arguments for the model.

    Raises:
        AssertionError: Properties are broken; the message has each with the first layer where it is broken.
        UsageError: The model does not run on these inputs, or returns no tensor; a name is no check, or no check is
            left.

    >>> import torch
    >>> from pytest_modelprobe import checks
    >>> outcomes = checks.standard(ModelProbe(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(3, 4))
    >>> sorted({outcome.verdict for outcome in outcomes})
    ['holds', 'not applicable']
    """
    __tracebackhide__ = True
    check_order("standard", probe, model, *inputs)
    names = _chosen(skip, only)
    given = {**(kwargs or {}), **model_kwargs}
    session = PreparedModel(probe, model, inputs, given, loss=loss)
    with progress("check", len(names)) as each:
        outcomes = Outcomes(STANDARD[name].judge(session) for name in each(names))
    if any(outcome.verdict == "not applicable" for outcome in outcomes):
        check_runs(probe, model, inputs, given)
    if outcomes.broken:
        raise AssertionError(str(outcomes))
    if probe.shows_layers:
        with contextlib.suppress(ModelProbeError):
            probe.run(model, *inputs, kwargs=given)
    if outcomes.hints:
        warnings.warn(HintWarning(str(outcomes)), stacklevel=3)
    return outcomes


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model to be checked, built when its test runs.

    Raises:
        UsageError: A field is invalid, or ``xfail`` names no check.

    >>> case = Case(
    ...     name="tiny",
    ...     factory=lambda: nn.Linear(8, 2),
    ...     inputs=lambda probe: {"input": probe.randn(4, 8)},
    ...     loss=lambda output: output.square().mean(),
    ...     xfail={"any_batch_size": "it was exported for a batch of 4"},
    ... )
    """

    name: str
    factory: Callable[[], nn.Module]
    inputs: Callable[[ModelProbe], Inputs]
    """Returns the inputs, given a probe: a tensor, a tuple of several or a mapping of keyword arguments:
    ``lambda probe: probe.randn(4, 8)``."""
    loss: Loss | None = None
    xfail: Mapping[str, str] = field(default_factory=dict)
    """Name of a check → why the model is not expected to pass it."""
    marks: Collection[Any] = ()
    """Markers for all its tests."""

    def __post_init__(self) -> None:
        for name in self.xfail:
            _check_name(name, f"xfail= of the case {self.name!r}")


class CaseCheck:
    """One check of one case, as a test calls it: ``check(modelprobe)``."""

    def __init__(self, case: Case, name: str) -> None:
        self.case, self.name = case, name

    def __call__(self, probe: ModelProbe) -> Outcome:
        """Assert that the property holds; skip the test where it means nothing.

        Raises:
            UsageError: The model does not run on its inputs.
        """
        __tracebackhide__ = True
        import pytest

        args, kwargs = arguments_of(self.case.inputs(probe))
        model = probe.build(self.case.factory)
        check = STANDARD[self.name]
        options = {"factory": self.case.factory} if "factory" in check.options else {}
        outcome = check.outcome(probe, model, *args, loss=self.case.loss, kwargs=kwargs, **options)
        if outcome.verdict == "not applicable":
            check_runs(probe, model, args, kwargs)
            pytest.skip(str(outcome))
        if outcome.verdict == "broken":
            raise AssertionError(str(outcome))
        outcome.warn(stacklevel=3)
        return outcome

    def __repr__(self) -> str:
        return f"<{self.name} of {self.case.name}>"


def parametrize_with_checks(
    cases: Iterable[Case], *, skip: Collection[str] = (), only: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes of a test with the argument ``check`` one for each case and check.

    Args:
        cases: The models.
        skip: Names of checks to leave out.
        only: Names of the only checks to run; empty: all.

    Raises:
        UsageError: There is no such check, or none is left; two cases have one name.

    >>> from torch import nn
    >>> from pytest_modelprobe import checks
    >>> tiny = checks.Case(name="tiny", factory=lambda: nn.Linear(8, 2), inputs=lambda probe: probe.randn(4, 8))
    >>> @checks.parametrize_with_checks([tiny])
    ... def test_standard(modelprobe, check):
    ...     check(modelprobe)
    """
    import pytest

    cases = list(cases)
    names = [case.name for case in cases]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UsageError(f"two cases have the name {listed(twice)}: snapshots and reports could not tell them apart")
    parameters = []
    for case in cases:
        for name in _chosen(skip, only):
            marks = [*case.marks]
            if name in case.xfail:
                marks.append(pytest.mark.xfail(reason=case.xfail[name], raises=AssertionError, strict=True))
            parameters.append(pytest.param(CaseCheck(case, name), id=f"{case.name}-{name}", marks=marks))
    return pytest.mark.parametrize("check", parameters)


def _chosen(skip: Collection[str], only: Collection[str]) -> list[str]:
    """Return the names of the checks to run."""
    skip, only = ([names] if isinstance(names, str) else names for names in (skip, only))
    for what, names in ("skip=", skip), ("only=", only):
        for name in names:
            _check_name(name, what)
    left = [name for name in STANDARD if name not in skip and (not only or name in only)]
    if not left:
        raise UsageError(f"skip= and only= leave no check to run: {listed(list(only or STANDARD))} is skipped")
    return left


def _check_name(name: str, what: str) -> None:
    if name in STANDARD:
        return
    if name in APART:
        raise UsageError(
            f"{what} names {name}, which is no part of the standard checks, {APART[name]}: call checks.{name} itself"
        )
    near = nearest(name, [*STANDARD, *APART], n=1)
    hint = f"is {near[0]} meant?" if near else f"there are {', '.join(STANDARD)}"
    raise UsageError(f"{what} names a check {name!r} that there is not: {hint}")


def check_runs(probe: ModelProbe, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `UsageError` if the model returns a tensor for these inputs in neither mode: no check can judge it."""
    __tracebackhide__ = True
    try:
        with PreparedModel(probe, model, args, kwargs).ready() as prepared, interruptible():
            with contextlib.suppress(NotApplicableError):
                train = prepared.run(mode="train")
                if train.error is None and train.final:
                    return
            prepared.reference(mode="eval")
    except NotApplicableError as reason:
        raise UsageError(str(reason)) from reason
