"""`Watch`: observes a model that the test runs itself.

A watch cannot repeat what the test did. It keeps the inputs of the first forwards instead, so that layers can be called
alone later. Records are made when they are asked for, and made again once a hook or an optimizer has run since.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pytest_modelprobe import extension, statistics
from pytest_modelprobe._torch import BatchOrInstanceNorm, is_wrapped, next_hook
from pytest_modelprobe.capture import Capture, ForwardCounts, Options, Which, assemble
from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.interrupts import finished, held
from pytest_modelprobe.models import (
    Autocast,
    Layers,
    active_autocast,
    changing_hooks,
    detached_copy,
    flatten_call,
    has_dense_storage,
    original_class,
    preserved,
    seeding,
    version,
)
from pytest_modelprobe.record import (
    ForwardKind,
    IsolatedResponse,
    Record,
    Selector,
    with_live_run,
)

from .isolation import CannotTellError, IsolationOptions, Key, in_float64, reason_of, traced
from .run import IsolationRequest, Place, WeakLiveRun, made_like, modules_of, with_note, with_responses

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
        tokens: Which tokens each forward has, see `ModelProbe.run`.
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
        tokens: statistics.Requests | None = None,
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
            tokens=tokens,
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
                with_live_run(record, WeakLiveRun(self, _GONE))
            self._records[which] = now, record
        return record

    def isolated(self, record: Record, request: IsolationRequest) -> Record:
        """Fill in the `IsolatedResponse` of each call in the kept forwards, with the model as it is now."""
        assert self._forwards is not None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            reason = f"the model is one of {dist.get_world_size()}, which may wait for each other in a forward"
            return with_note(record, f"no layer was called alone: {reason}")
        found: dict[Place, IsolatedResponse] = {}
        kinds = {(call.root, call.root_training) for _, call in record.calls}
        for kind in (kind for kind in self._forwards.kept if kind in kinds):
            like = [pair for pair in request.like.calls if (pair[1].root, pair[1].root_training) == kind]
            options = IsolationOptions(
                layers=modules_of(record),
                only=request.only,
                **made_like(like),
                names=request.names,
                gradient=bool(record.backwards),
                within=request.within,
                observer=request.observer,
            )
            try:
                responses = self._forwards.isolated(self.model, kind, options)
            except Exception as error:  # noqa: BLE001 - whatever a model does that is not as it was
                what = str(error) if isinstance(error, CannotTellError) else f"it raised {reason_of(error)}"
                record = with_note(record, f"no layer was called alone in the forward of {kind[0]}: {what}")
                continue
            found |= {(*kind, *key): response for key, response in responses.items()}
        return with_responses(record, found)


@dataclass(slots=True, eq=False)
class _KeptForward:
    """What is needed to run a forward again."""

    modes: tuple[bool, ...]
    """Whether each layer is in training mode, in the order of the layers."""
    autocast: tuple[Autocast, ...]
    changes: tuple[int, ...]
    """The hooks that changed what layers compute; see `models.changing_hooks`."""
    inputs: Any = None
    """Copies of its positional and keyword arguments."""
    obstacle: str = ""
    """Why it cannot be run again."""


class KeptForwards:
    """Copies the inputs of the first forward of each kind, to call layers alone later as in that forward.

    The modes are kept too, and the tensors that layers keep, as they were before the first forward of all. If an input
    cannot be copied, the forward is not run again.

    Args:
        layers: The layers of the model.

    >>> import torch
    >>> model = nn.Linear(2, 2)
    >>> forwards = KeptForwards(Layers(model))
    >>> forwards.begins(("(root)", True), (torch.ones(1, 2),), {})
    >>> list(forwards.isolated(model, ("(root)", True), IsolationOptions()))
    [('(root)', 0)]
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self.kept: dict[ForwardKind, _KeptForward] = {}
        self._before: list[tuple[dict[str, Any], str, Tensor]] = []
        """Copies of buffers and of tensors in attributes before the first forward, each with its dict and name."""

    def begins(self, kind: ForwardKind, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the inputs of a forward that is about to run, if it is new."""
        if kind in self.kept:
            return
        modules = self._layers.modules.values()
        if not self.kept:
            with statistics.ambient_modes_disabled(), torch.no_grad():
                self._before = [
                    (owner, name, one)
                    for module in modules
                    # Those of norms are synthetic in an isolated call.
                    for owner in (vars(module), {} if isinstance(module, BatchOrInstanceNorm) else module._buffers)
                    for name, tensor in owner.items()
                    if has_dense_storage(tensor) and tensor.is_floating_point()
                    if (one := detached_copy(tensor)) is not None
                ]
        modes = tuple(module.training for module in modules)
        self.kept[kind] = again = _KeptForward(modes, active_autocast(), changing_hooks(modules))
        try:
            again.inputs = self._copied((args, dict(kwargs)))
        except Exception as error:  # noqa: BLE001 - the `__deepcopy__` of an input may raise anything
            again.obstacle = f"an input cannot be copied: {reason_of(error)}"

    def isolated(self, model: nn.Module, kind: ForwardKind, options: IsolationOptions) -> dict[Key, IsolatedResponse]:
        """Return the responses of the calls in the kept forward of a kind. The model is restored.

        Raises:
            CannotTellError: It cannot be run again.
        """
        again, modules = self.kept[kind], self._layers.modules
        if again.changes != changing_hooks(modules.values()):
            raise CannotTellError("an intervention began or ended since: compare the record within its block")
        if again.obstacle:
            raise CannotTellError(again.obstacle)

        def forward() -> object:
            args, kwargs = self._copied(again.inputs)
            with contextlib.ExitStack() as stack:
                for state in again.autocast:
                    stack.enter_context(torch.autocast(*state))
                return modules[kind[0]](*args, **kwargs)

        with preserved(model), seeding.seeded(0):
            for module, training in zip(modules.values(), again.modes, strict=True):
                module.training = training
            for owner, name, tensor in self._before:
                if name in owner:
                    owner[name] = detached_copy(tensor)
            with traced(model, forward, options) as alone:
                return alone() if options.within is None else alone(in_float64, "outputs")

    def _copied(self, inputs: Any) -> Any:
        """Return a deep copy, detached from graphs, except for modules of the model.

        Unlike `map_tensors`, it copies every object, because the model may change a cache before the forward is run
        again.
        """
        root = next(iter(self._layers.modules.values()))
        known: dict[int, Any] = {id(module): module for module in root.modules()}
        with statistics.ambient_modes_disabled(), torch.no_grad():
            for _, tensor in flatten_call(*inputs, objects=True).tensors:
                one = detached_copy(tensor) if has_dense_storage(tensor) and not is_wrapped(tensor) else None
                if one is None:
                    raise CannotTellError("it is inside a transform, or has no memory of its own")
                known[id(tensor)] = one.requires_grad_(tensor.requires_grad)
            return copy.deepcopy(inputs, known)


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
