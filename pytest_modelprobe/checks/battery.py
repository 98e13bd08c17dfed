"""All checks that ask nothing but a model and inputs: at once, or each as a test of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.report.text import count, listed
from pytest_modelprobe.selection import nearest

from .batch import any_batch_size, batch_independent
from .check import Check
from .outcome import Outcome
from .parity import checkpoint_parity, dtype_parity, layout_parity
from .registration import copy_and_pickle, initialised, registered, state_dict_round_trip
from .repetition import deterministic, eval_stable, seeded, train_eval_differ
from .sequence import padding_invariant
from .state import inputs_unchanged_by_forward, state_unchanged_by_forward
from .training import gradient_accumulation, overfits_batch
from .trial import Loss

STANDARD: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        registered, initialised, deterministic, eval_stable, seeded, train_eval_differ,
        batch_independent, any_batch_size, padding_invariant,
        state_unchanged_by_forward, inputs_unchanged_by_forward, state_dict_round_trip, copy_and_pickle,
        layout_parity, dtype_parity, checkpoint_parity, gradient_accumulation, overfits_batch,
    )
}  # fmt: skip
"""Name → check, of those that `standard` runs: what a model is expected to be unless it is meant to be otherwise."""

Inputs = Any
"""A tensor, a tuple of positional arguments, or a mapping of keyword arguments."""


class Outcomes(tuple[Outcome, ...]):
    """What each check said; ``str`` is a list of them, the broken ones in full."""

    __slots__ = ()

    @property
    def broken(self) -> tuple[Outcome, ...]:
        """The outcomes of properties that are broken."""
        return tuple(outcome for outcome in self if outcome.verdict == "broken")

    def __str__(self) -> str:
        verdicts = [outcome.verdict for outcome in self]
        counts = f"{verdicts.count('holds')} hold, {verdicts.count('not applicable')} are not applicable"
        first = f"{count(len(self.broken), 'check')} of {len(self)} broken; {counts}"
        if self.broken:
            first = f"{self.broken[0].text.partition(chr(10))[0]}; {first}"
        whole = [f"--- {outcome.check} ---\n{outcome}" for outcome in self.broken]
        return "\n\n".join([first, *whole])


def standard(
    model: nn.Module,
    inputs: Inputs = (),
    *,
    loss: Loss | None = None,
    skip: Collection[str] = (),
    only: Collection[str] = (),
    probe: ModelProbe | None = None,
) -> Outcomes:
    """Assert all that is expected of a model unless it is meant to be otherwise, and return what each check said.

    Args:
        model: The model; it is left as it was.
        inputs: A tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        loss: Of the output, for the checks of training. Targets that it holds itself go with the whole batch alone:
            `gradient_accumulation` wants them as inputs, of a model that gives out its loss.
        skip: Names of checks to leave out.
        only: Names of the only checks to run; empty: all.
        probe: Gives the device and the seed.

    Raises:
        AssertionError: A property is broken; all that are, each with the first layer where it is.
        UsageError: There is no such check.

    >>> import torch
    >>> from pytest_modelprobe import checks
    >>> outcomes = checks.standard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(3, 4))
    >>> sorted({outcome.verdict for outcome in outcomes})
    ['holds', 'not applicable']
    """
    __tracebackhide__ = True
    args, kwargs = _arguments(inputs)
    probe = probe or ModelProbe()
    names = _chosen(skip, only)
    outcomes = Outcomes(STANDARD[name].outcome(probe, model, *args, loss=loss, kwargs=kwargs) for name in names)
    if outcomes.broken:
        raise AssertionError(str(outcomes))
    return outcomes


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model to be checked, made when its test runs."""

    name: str
    factory: Callable[[], nn.Module]
    inputs: Callable[[ModelProbe], Inputs]
    """Makes the inputs, from a probe: ``lambda probe: probe.randn(4, 8)``."""
    loss: Loss | None = None
    xfail: Mapping[str, str] = field(default_factory=dict)
    """Name of a check → why the model is not expected to have that property."""
    marks: Collection[Any] = ()
    """Markers for all tests of it."""


class CaseCheck:
    """One check of one case, as a test calls it: ``check(modelprobe)``."""

    def __init__(self, case: Case, name: str) -> None:
        self.case, self.name = case, name

    def __call__(self, probe: ModelProbe) -> Outcome:
        """Assert that the property holds; skip the test where it means nothing."""
        __tracebackhide__ = True
        import pytest

        args, kwargs = _arguments(self.case.inputs(probe))
        model = probe.build(self.case.factory)
        check = STANDARD[self.name]
        options = {"factory": self.case.factory} if "factory" in check.options else {}
        outcome = check.outcome(probe, model, *args, loss=self.case.loss, kwargs=kwargs, **options)
        if outcome.verdict == "not applicable":
            pytest.skip(str(outcome))
        if outcome.verdict == "broken":
            raise AssertionError(str(outcome))
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
        UsageError: There is no such check, or two cases have one name.

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
        _chosen((), tuple(case.xfail))  # misspelt
        for name in _chosen(skip, only):
            marks = [*case.marks]
            if name in case.xfail:
                marks.append(pytest.mark.xfail(reason=case.xfail[name], raises=AssertionError, strict=True))
            parameters.append(pytest.param(CaseCheck(case, name), id=f"{case.name}-{name}", marks=marks))
    return pytest.mark.parametrize("check", parameters)


def _chosen(skip: Collection[str], only: Collection[str]) -> list[str]:
    """Return the names of the checks to run."""
    for given in ("skip", skip), ("only", only):
        what, names = given
        for name in [names] if isinstance(names, str) else names:
            if name not in STANDARD:
                near = nearest(name, STANDARD, n=1)
                hint = f": is {near[0]} meant?" if near else f": there are {', '.join(STANDARD)}"
                raise UsageError(f"{what}= names a check {name!r} that the battery has not{hint}")
    skip, only = ([names] if isinstance(names, str) else names for names in (skip, only))
    return [name for name in STANDARD if name not in skip and (not only or name in only)]


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), inputs
    plain = isinstance(inputs, tuple) and not hasattr(inputs, "_fields")  # a PackedSequence is one argument
    return (inputs, {}) if plain else ((inputs,), {})
