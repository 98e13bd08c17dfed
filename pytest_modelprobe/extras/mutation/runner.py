"""Tries faults on tests: a test runs again, with all its fixtures, first without a fault and then with one.

A test is used only if it passes when it is run again, because only then a failure tells of the fault. It is judged by
what its models return: if they differ from run to run without a fault, nothing can be told.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_modelprobe._pytest import fixtures_of, run_again, tear_down_before
from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.models import derive, preserved, seeded

from .plan import Mutant, Planned, Verdict
from .planting import Observer
from .seen import Planted, Seen
from .selection import FAULTS

_TIMES, _MORE_CALLS = 10, 1000
"""A test hangs if it makes ten times as many calls of layers as without the fault, and a thousand more."""


@dataclass(frozen=True)
class _Run:
    """A test that ran again."""

    failed: bool
    skipped: bool
    message: str
    """First line of the failure."""
    seconds: float
    seen: dict[str, Seen]
    """What the test did, under an empty name, and what the fixtures of wider scope did that were set up for it."""


@dataclass
class _Reference:
    """A test that ran again without a fault."""

    seen: Seen
    seconds: float
    is_usable: bool = True
    repeats: bool | None = None
    """Whether models return the same bits in each run, or `None` if that is not known yet."""


class MutantRunner:
    """Tries mutants in this process.

    Args:
        observer: The observer, installed.
        items: The tests by node id.
        left_out: Tests that cannot be used.
        tell: A function that is called with ``"runs"`` before each run of a test, and with ``"left out"`` if one cannot
            be used. With ``"runs"`` goes the time that the test takes without a fault, or `None` if it has none now.
    """

    def __init__(
        self,
        observer: Observer,
        items: Mapping[str, pytest.Item],
        left_out: Collection[str],
        tell: Callable[[str, object], None],
    ) -> None:
        self._observer, self._items, self._tell = observer, items, tell
        self._references = {test: _Reference(Seen(), 0.0, is_usable=False) for test in left_out}
        self._of_fixtures: dict[str, Seen] = {}
        """Key of a fixture of wider scope → what it did without a fault."""
        self._of_run: dict[str, Seen] = {}
        self._set_up_with: Mutant | None = None

    # --- one mutant ---------------------------------------------------------------------------------------------------

    def verdict(self, one: Planned) -> Verdict:
        """Return what the tests say of a mutant. The first test that fails decides."""
        effect = tried = reached = False
        try:
            for test in one.tests:
                reference = self._reference(test)
                if not reference.is_usable:
                    continue
                if self._set_up_with != one.mutant and self._shares_models(test):
                    tear_down_before(self._items[test], None)
                self._set_up_with = one.mutant
                planted = Planted(one.mutant.place, FAULTS[one.mutant.operator])
                run = self._run(test, planted, reference)
                tried, reached = True, reached or planted.fired
                if run.failed:
                    return Verdict("timed out" if self._observer.hangs else "noticed", test)
                effect = effect or self._has_effect(test, run, planted, reference)
        finally:
            if self._set_up_with == one.mutant and any(map(self._shares_models, one.tests)):
                tear_down_before(self._items[one.tests[0]], None)
        if not tried:
            return Verdict("not tried")
        return Verdict("survived" if effect else "no effect" if reached else "not reached")

    def _reference(self, test: str) -> _Reference:
        """Return how a test ran again without a fault, all its fixtures set up anew."""
        found = self._references.get(test)
        if found is None:
            found = self._references[test] = _Reference(Seen(), 0.0)
            if test in self._items:
                # Twice: some tests cannot run again, and a model that outlives its test may change in the first run.
                self._run(test)
                run = self._run_without_fault(test)
                self._of_fixtures |= {key: seen for key, seen in run.seen.items() if key}
                found.seen, found.seconds = run.seen[""], run.seconds
                if run.failed or run.skipped:
                    self._leave_out(test, f"failed: {run.message}" if run.failed else "was skipped")
            else:
                self._leave_out(test, "was not collected")
        return found

    def _leave_out(self, test: str, why: str) -> None:
        self._references[test].is_usable = False
        self._tell("left out", (test, why))

    def _run_without_fault(self, test: str) -> _Run:
        self._set_up_with = None
        tear_down_before(self._items[test], None)
        return self._run(test)

    def _shares_models(self, test: str) -> bool:
        """Return whether a fixture of wider scope makes or runs a model: it is then set up anew for each fault."""
        found = (self._of_fixtures.get(key) for key in wide_fixtures(self._items[test]))
        return any(seen.has_models for seen in found if seen is not None)

    def _has_effect(self, test: str, run: _Run, planted: Planted, reference: _Reference) -> bool:
        """Whether a fault that the test did not notice changed what models return, or a gradient that it computes."""
        before = self._all_before(test, reference)
        if planted.operator.of_gradient and planted.fired:
            return any(planted.place.model in seen.backward for seen in before.values())
        changed = any(seen.differs(before[key]) for key, seen in run.seen.items() if key in before)
        if changed and reference.repeats is None:
            again = self._run_without_fault(test)
            reference.repeats = not (again.failed or again.seen[""].differs(reference.seen))
            if not reference.repeats:
                self._leave_out(test, "computed something else, so that no fault can be told from chance")
        return changed and bool(reference.repeats)

    def _all_before(self, test: str, reference: _Reference) -> dict[str, Seen]:
        """Return what a test, under an empty name, and its fixtures of wider scope did without a fault."""
        known = {key: self._of_fixtures[key] for key in wide_fixtures(self._items[test]) if key in self._of_fixtures}
        return {"": reference.seen, **known}

    # --- one run ------------------------------------------------------------------------------------------------------

    def _run(self, test: str, planted: Planted | None = None, reference: _Reference | None = None) -> _Run:
        """Run a test. Its fixtures of wider scope that were torn down are set up for it."""
        self._tell("runs", (test, None if reference is None else reference.seconds))
        started = time.monotonic()
        item, observer, own = self._items[test], self._observer, Seen()
        self._of_run = {"": own}
        with contextlib.ExitStack() as stack:
            if not self._shares_models(test):  # those of a module of tests are made once
                is_of_model = planted is not None and not planted.place.is_call
                for model in observer.models(planted.place.model if planted is not None and is_of_model else None):
                    stack.enter_context(preserved(model))
            stack.enter_context(seeded(derive(0, test)))
            stack.enter_context(observer.observing(own, planted))
            if reference is not None:
                calls = sum(seen.calls for seen in self._all_before(test, reference).values())
                observer.most_calls = calls * _TIMES + _MORE_CALLS
            tear_down_before(item, item.parent)
            with interruptible():
                reports = run_again(item)
        failed = next((report for report in reports if report.failed), None)
        return _Run(
            failed=failed is not None,
            skipped=any(report.skipped for report in reports),
            message="" if failed is None else _first_line(failed),
            seconds=time.monotonic() - started,
            seen=self._of_run,
        )

    def set_up(self, fixture: str) -> Generator[None, Any, Any]:
        """Set up a fixture of wider scope, with random numbers of its own."""
        self._of_run[fixture] = seen = Seen()
        with self._observer.writing_to(seen), seeded(derive(0, fixture)):
            return (yield)


def wide_fixtures(item: pytest.Item) -> list[str]:
    """Return the keys of the fixtures of wider scope than a test that it depends on."""
    return sorted(key_of(one) for one in fixtures_of(item) if getattr(one, "scope", "function") != "function")


def key_of(fixturedef: Any) -> str:
    """Return a name of a fixture that is the same in all processes."""
    return f"fixture {fixturedef.baseid}::{fixturedef.argname}"


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext if crash is None else crash.message
    return next(iter(text.strip().splitlines()), "")
