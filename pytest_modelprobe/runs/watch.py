"""`Watch`: observes a model that the test runs itself.

A watch cannot repeat what the test did. It keeps the inputs of the first forwards instead, so that layers can be called
alone later. Records are made when they are asked for, and made again once a hook or an optimizer has run since.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from pytest_modelprobe import extension
from pytest_modelprobe._torch import next_hook
from pytest_modelprobe.capture import Capture, ForwardCounts, Options, Which, assemble
from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.interrupts import finished, held
from pytest_modelprobe.models import Layers, original_class, version
from pytest_modelprobe.record import (
    IsolatedResponse,
    Record,
    Selector,
    with_live_run,
)

from .isolation import IsolationOptions, KeptForwards, isolate
from .live import IsolationRequest, Place, WeakLiveRun, modules_of, with_note, with_responses

_GONE = "the watch is gone: keep it in a variable until the record is compared"

if TYPE_CHECKING:
    from pytest_modelprobe.extras.training_state.invariants import Invariants


class Watch:
    """Observes the forwards and backwards of a model until it is closed.

    It never moves or changes the model, and closes itself when it is garbage collected. In tests `ModelProbe.watch`
    makes one.

    Args:
        model: The model; wrappers (DDP, compiled modules) are removed.
        layers: Which layers to record, see `selection`.
        name: Name in messages; the class of the model by default.
        keep: Which layers' output tensors of the newest forward to keep.
        functionals: Whether to record functional calls (``F.relu``) too.
        attention: Whether to record attention weights.
        profile: Whether to measure what each layer costs.
        isolate: Whether a snapshot of a record may also call each layer alone, on synthetic inputs, to find whose own
            code changed. This copies the inputs of the first forwards.
        histograms: Whether to record the histogram of each value and gradient.
        steps: How many steps of training to keep, each in a record of its own.
        seed: Stored in the record.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with Watch(model) as watch:
    ...     _ = model(torch.ones(4, 2))
    >>> watch.record.layers["1"].calls[0].outputs[0].shape
    (4, 3)
    """

    def __init__(
        self,
        model: nn.Module,
        /,
        *,
        layers: Selector = "**",
        name: str | None = None,
        keep: Selector = (),
        functionals: bool = False,
        attention: bool = False,
        profile: bool = False,
        isolate: bool = True,
        histograms: bool = False,
        steps: int = 1,
        seed: int | None = None,
    ) -> None:
        options = Options(
            layers=layers,
            keep=keep,
            functionals=functionals,
            attention=attention,
            profile=profile,
            histograms=histograms,
            steps=steps,
        )
        if not isinstance(steps, int) or steps < 0:
            raise UsageError(f"steps is how many steps of training to keep, 0 or more; got {steps!r}")
        found = Layers(model)
        self.model = model
        self.name = name or original_class(next(iter(found.modules.values()))).__name__
        self.first_hook = next_hook()
        """Id of the first hook that torch assigned since the watch began; None if it is not known."""
        self._seed = seed
        self._records: dict[Which, tuple[Hashable, Record]] = {}
        self._forwards = KeptForwards(found) if isolate else None
        self._capture = Capture(
            found,
            options,
            on_forward=self._forwards.begins if self._forwards else None,
        )
        try:
            with held():
                self._capture.attach()
                self._finalizer = weakref.finalize(self, self._capture.detach)
        except BaseException:
            self._capture.detach()
            raise

    @property
    def closed(self) -> bool:
        """Whether its hooks are gone."""
        return not self._capture.guard.active

    @property
    def notes(self) -> tuple[str, ...]:
        """As in `Record.notes`, so far."""
        return tuple(self._capture.notes)

    @property
    def record(self) -> Record:
        """All forwards so far, merged."""
        return self._record("all")

    @property
    def first(self) -> Record:
        """The first forward alone, with the gradients that reached it, and parameters and buffers as it left them."""
        return self._record("first")

    @property
    def last(self) -> Record:
        """The newest forward alone, with the gradients that reached it."""
        return self._record("last")

    @property
    def counts(self) -> ForwardCounts:
        """How many forwards are part of steps, how many of evaluations, and how many of neither, so far.

        Each forward counts once, so the three add up to ``record.forwards``. Steps that are not kept count too.
        """
        return self._capture.observed.counts

    @property
    def steps(self) -> Sequence[Record]:
        """The first steps of training, as many as ``steps=`` says, each with all its forwards and gradients.

        A step is taken by an optimizer that holds a parameter of the model. Its forwards are those that a backward pass
        reached since the step before: one, or several where gradients are accumulated. Where all gradients were reset
        before the step, the forwards from before that are not among them: see `others`.
        """
        return _StepRecords(self)

    @property
    def first_step(self) -> Record:
        """The first step of training alone: its forwards, gradients as they arrived and as they were applied.

        Raises:
            NothingObservedError: No optimizer that holds a parameter of the model has stepped, or no step is kept.
        """
        if not self._capture.observed.taken:
            counts = self.counts
            if counts.steps:
                raise NothingObservedError(
                    f"no step of {self.name} is kept, of {counts.steps:,} that were taken: watch it with steps=1"
                )
            seen = f" It saw {counts}." if counts.others or counts.evaluations else ""
            raise NothingObservedError(
                f"no optimizer with a parameter of {self.name} has stepped while it was watched: read first_step after "
                f"the first step, and keep the watch open while the model is trained.{seen}"
            )
        return self._record(0)

    @property
    def evaluations(self) -> Record:
        """All forwards that no backward pass reached, merged: evaluations, and calls of parts of the model."""
        return self._record("evaluations")

    @property
    def others(self) -> Record:
        """All forwards that a backward pass reached, and whose gradients no step of an optimizer used, merged.

        The gradients were reset before a step, as those of the first of SAM's two passes are; or the optimizer did not
        step, because a ``GradScaler`` skipped the step or parameters were changed by hand; or it has not stepped yet.
        """
        return self._record("others")

    if TYPE_CHECKING:  # of an extra

        @property
        def invariants(self) -> Invariants: ...  # noqa: D102

    @property
    def kept(self) -> Mapping[str, list[Any]]:
        """Outputs of the layers in ``keep=`` in the newest forward, one entry a call; detached copies.

        For a tensor that torch cannot copy, or not out of a `torch.func` transform such as ``vmap``, there is `None`.
        """
        return self._capture.kept

    def reread(self) -> None:
        """Read parameters and buffers again for the next record: writes through ``.data`` change no version."""
        self._records.clear()

    @finished
    def close(self) -> None:
        """Remove all hooks. The record stays. Safe to repeat."""
        self._finalizer()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<Watch {self.name}: {self.counts}, {state}>"

    def _record(self, which: Which) -> Record:
        # A parameter that was written to, as by an optimizer, or replaced makes the record outdated too.
        tensors = (*nn.Module.parameters(self.model), *nn.Module.buffers(self.model))
        now = self._capture.guard.entered, tuple((id(t), version(t)) for t in tensors)
        then, record = self._records.get(which, (None, None))
        if record is None or then != now:
            record = assemble(self._capture, which, seed=self._seed)
            if self._forwards is not None:
                with_live_run(record, WeakLiveRun(self, _GONE, functools.partial(Watch.isolated, which=which)))
            self._records[which] = now, record
        return record

    def isolated(self, record: Record, request: IsolationRequest, *, which: Which) -> Record:
        """Fill in the `IsolatedResponse` of each call in the kept forwards, with the model as it is now."""
        assert self._forwards is not None
        one = {"first": self._forwards.first, "last": self._forwards.newest}
        alone = one.get(which) if which in one else None
        kept = [alone] if alone else [] if which in one else self._forwards.kept.values()
        reason = self._forwards.obstacle() if kept else "only the first forward of a kind can be run again"
        if reason is not None:
            return with_note(record, f"no layer was called alone: {reason}")
        found: dict[Place, IsolatedResponse] = {}
        for again in kept:
            recipes = {
                (layer.name, call.index): call.response.recipes
                for layer, call in request.like.calls
                if call.response is not None and (call.root, call.root_training) == again.kind
            }
            changed = self._forwards.changed()
            options = IsolationOptions(
                layers=modules_of(record),
                only=request.only,
                recipes=recipes,
                names=request.names,
                gradient=bool(record.backwards),
            )
            try:
                with self._forwards.prepared(self.model, again):
                    responses = isolate(self.model, functools.partial(self._forwards.run, again), options)
            except Exception as error:  # noqa: BLE001 - whatever a model does that is not as it was
                what = again.reason or f"it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                record = with_note(record, f"no layer was called alone in the forward of {again.kind[0]}: {what}")
                continue
            for key, response in responses.items():
                if key[0] in changed:
                    response = IsolatedResponse(reason="tensors that it keeps were changed since")
                found[*again.kind, *key] = response
        return with_responses(record, found)


class _StepRecords(Sequence[Record]):
    """Makes the record of a step when it is asked for."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __len__(self) -> int:
        return len(self._watch._capture.observed.taken)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        numbers = range(len(self))[index]
        return [self._watch._record(n) for n in numbers] if isinstance(numbers, range) else self._watch._record(numbers)


extension.attach(Watch, "watch")
