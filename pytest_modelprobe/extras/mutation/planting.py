"""Sees which layers run in a test, digests what models return, and plants a fault.

Tests make their models themselves, so nobody hands them over. That is why the hooks are those of torch for all modules
at once. A fault that changes no bit of an output and stops no gradient has no effect, and is not held against a test.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from torch.utils.hooks import unserializable_hook

from pytest_modelprobe._pytest import run_again, tear_down_before, wide_fixtures
from pytest_modelprobe._torch import remove_global_hook, tracing_state, without_torch_function
from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.models import derive, flatten, preserved, seeded
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.text import listed

from .operators import FAULTS, OPERATORS, LayerCall, Operator
from .program import Program, digest
from .results import Mutant, Place, Planned, Planted, Seen, Verdict


class Observer:
    """Hooks on all modules while `installed`: they write to `seen`, and plant `planted`."""

    def __init__(self) -> None:
        self._seen: Seen | None = None
        self._planted: Planted | None = None
        self.sources: dict[str, set[str]] = defaultdict(set)
        """Name of each model → files of the classes of its modules, except those of torch."""
        self._roots: dict[int, tuple[ref[nn.Module], str]] = {}
        self._names: dict[int, tuple[ref[nn.Module], str, str]] = {}
        self._running: list[nn.Module] = []
        self._planting = contextlib.ExitStack()
        self._thread = threading.get_ident()
        self._program = Program(self._current)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """See all modules within the block."""
        with contextlib.ExitStack() as stack:
            for handle in (
                hooks_of_all.register_module_forward_pre_hook(self._before),
                hooks_of_all.register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
                hooks_of_all.register_module_parameter_registration_hook(self._registered),
            ):
                stack.callback(remove_global_hook, handle)
            stack.enter_context(self._program.installed())
            yield

    @property
    def is_observing(self) -> bool:
        """Whether somebody asks what is seen."""
        return self._seen is not None

    @contextlib.contextmanager
    def observing(self, seen: Seen, planted: Planted | None = None) -> Iterator[None]:
        """Write what is seen within the block to ``seen``, and plant a fault."""
        self._end_forward()
        self._planted = planted
        try:
            with self.writing_to(seen):
                yield
        finally:
            self._end_forward()
            self._planted = None

    @contextlib.contextmanager
    def writing_to(self, seen: Seen) -> Iterator[None]:
        """Write what is seen within the block to ``seen``."""
        before, self._seen = self._seen, seen
        try:
            yield
        finally:
            self._seen = before

    def models(self, name: str | None) -> list[nn.Module]:
        """Return the models of a name, or all, that were called and are still there."""
        found = {key: (there(), of) for key, (there, of) in self._roots.items()}
        self._roots = {key: self._roots[key] for key, (model, _) in found.items() if model is not None}
        return [model for model, of in found.values() if model is not None and name in (None, of)]

    def _end_forward(self) -> None:
        """Forget a forward that an error ended."""
        self._planting.close()
        self._running.clear()

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _is_off(self) -> bool:
        # torch.compile takes this condition for a constant, so it does not compile the rest into the graph.
        if torch.compiler.is_compiling():
            return True
        return self._seen is None or threading.get_ident() != self._thread or tracing_state() is not None

    def _current(self) -> tuple[Seen, Planted | None] | None:
        return None if self._seen is None or self._is_off() else (self._seen, self._planted)

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if not torch.compiler.is_compiling() and self._seen is not None:
            self._seen.makes_models = True

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._is_off():
            return
        assert self._seen is not None
        self._seen.calls += 1
        if not self._running:
            self._begin_forward(module)
        self._running.append(module)

    def _after(self, module: nn.Module, args: tuple[Any, ...], *given: Any) -> Any:
        kwargs, output = ({}, *given)[-2:]  # After an error, torch leaves the keyword arguments out.
        if self._is_off() or not any(module is other for other in self._running):
            return None
        call = LayerCall(module, args, kwargs, output)
        with without_torch_function():
            changed = self._changed(call)
            self._note(call)
            while self._running.pop() is not module:
                pass
            if not self._running:
                self._planting.close()
                with contextlib.suppress(Exception):  # An output that cannot be read is no error of the test.
                    self._digest(module, output if changed is None else changed)
        return changed

    # --- names --------------------------------------------------------------------------------------------------------

    def _begin_forward(self, root: nn.Module) -> None:
        self._planting.close()
        known = self._names.get(id(root))
        # A layer of a known model that is called by itself stays a layer of that model.
        if known is None or known[0]() is not root:
            model = _name_of_model(root)
            self._roots[id(root)] = ref(root), model
            for name, module in root.named_modules():
                self._names[id(module)] = ref(module), model, name or ROOT
                file = getattr(sys.modules.get(type(module).__module__), "__file__", None)
                if file and not type(module).__module__.startswith("torch."):
                    self.sources[model].add(file)
        planted = self._planted
        if planted is not None and isinstance(planted.operator, Operator) and planted.operator.plant is not None:
            for module in root.modules():
                if self._place(module) == planted.place:
                    with contextlib.suppress(Exception):  # A layer that cannot be changed so is left as it is.
                        self._planting.enter_context(planted.operator.plant(module))

    def _place(self, module: nn.Module) -> Place | None:
        known = self._names.get(id(module))
        if known is None or known[0]() is not module:  # The module was made during the forward.
            return None
        return Place(known[1], known[2], type(module).__name__)

    # --- what is noted ------------------------------------------------------------------------------------------------

    def _changed(self, call: LayerCall) -> Any:
        planted = self._planted
        if planted is None or not isinstance(planted.operator, Operator):
            return None
        if call.output is None or self._place(call.module) != planted.place:
            return None
        planted.fired = True
        if planted.operator.output is None:
            return None
        try:
            return planted.operator.output(call)
        except Exception:  # noqa: BLE001 - an error of the operator is not one that a test noticed
            return None

    def _note(self, call: LayerCall) -> None:
        place = self._place(call.module)
        if self._planted is not None or place is None or call.output is None:
            return
        assert self._seen is not None
        fitting = self._seen.places[place]
        for name, operator in OPERATORS.items():
            if name not in fitting:
                with contextlib.suppress(Exception):
                    if operator.fits(call):
                        fitting.add(name)

    def _digest(self, root: nn.Module, output: Any) -> None:
        seen = self._seen
        assert seen is not None
        place = self._place(root)
        for path, tensor in flatten("output", output).tensors:
            seen.outputs.update(f"{path} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}".encode())
            digest(seen, tensor)
            if tensor.grad_fn is not None and place is not None:
                tensor.register_hook(unserializable_hook(functools.partial(_note_gradient, seen, place.model)))


def _note_gradient(seen: Seen, model: str, gradient: Tensor) -> None:
    # Another loss changes no output. Where no optimizer steps, it is seen here alone.
    seen.backward.add(model)
    digest(seen, gradient)


def without_warning_of_hooks() -> None:
    """Let a compiled model run without torch's warning that it does not see our hooks.

    No fault is planted inside such a model.
    """
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")


def _name_of_model(root: nn.Module) -> str:
    cls = type(root)
    if not cls.__module__.startswith("torch."):
        return f"{cls.__module__}:{cls.__qualname__}"
    # A container of torch, such as nn.Sequential, is what its children make of it: its class is no name of a model.
    children = [type(child).__name__ for child in root.children()]
    return f"torch:{cls.__qualname__}" + (f"({listed(children)})" if children else "")


# --- trying a fault on a test -----------------------------------------------------------------------------------------


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
                    return Verdict("noticed", test)
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
        found = (self._of_fixtures.get(key) for key in wide_keys(self._items[test]))
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
        known = {key: self._of_fixtures[key] for key in wide_keys(self._items[test]) if key in self._of_fixtures}
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


def wide_keys(item: pytest.Item) -> list[str]:
    """Return the keys of the fixtures of wider scope than a test that it depends on."""
    return sorted(map(key_of, wide_fixtures(item)))


def key_of(fixturedef: Any) -> str:
    """Return a name of a fixture that is the same in all processes."""
    return f"fixture {fixturedef.baseid}::{fixturedef.argname}"


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext if crash is None else crash.message
    return next(iter(text.strip().splitlines()), "")
