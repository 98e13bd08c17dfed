"""`Run`: one forward of a model, and a backward, that can be repeated and leaves no trace.

A snapshot asks for more than one run: noise is measured by repeats on perturbed numbers, and each layer is called
alone. All of these must start from the same state, which `_prepared` sets up and restores. What a repeat needs is kept
here. The model itself is referenced weakly, so that a probe does not keep a model alive that the test has dropped.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import nn

from pytest_modelprobe import statistics
from pytest_modelprobe.capture import Capture, Options, ParameterReading, assemble, content_key, read_parameters
from pytest_modelprobe.exceptions import UnsupportedModelError, UsageError
from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.models import (
    Layers,
    ModelState,
    Offloaded,
    attributes,
    autocast_states,
    changing_hooks,
    check_not_lazy,
    detached_copy,
    flatten,
    flatten_call,
    has_dense_storage,
    map_tensors,
    preserved,
    seeding,
    unseen,
    wake_zeros,
    widest,
)
from pytest_modelprobe.progress import Parts, progress
from pytest_modelprobe.record import (
    GIVEN,
    Call,
    IsolatedResponse,
    Layer,
    NamesBefore,
    Record,
    has_nonfinite,
    is_narrow,
    qualified,
    with_live_run,
)

from . import noise
from .isolation import (
    CallObserver,
    IsolationOptions,
    Key,
    TracedCalls,
    Within,
    doubtful,
    in_float64,
    noisy,
    traced,
    with_known_noise,
)
from .loss import Loss, NoGradientError, detaching_call, loss_of
from .noise import InFloat32
from .origin import find_gradient_origin, find_origin

Mode = Literal["train", "eval"]

Move = noise.Perturbation | InFloat32
"""How a repeat differs from the run."""

_NEAR = [noise.Perturbation(f"repeat {i}", far=False) for i in range(3)]
"""The perturbed repeats for the noise of the forward, which is the largest change. Fewer are enough where they agree.

Three predict the changes by threads, memory formats and instruction sets, to within a factor of 1.7 on every layer of
a ResNet and of a GPT-2.
"""

_FAR = [noise.Perturbation(f"repeat {i}", far=True) for i in range(2)]
"""The perturbed repeats for the noise of gradients. As these perturb 84 times as much as rounding, two are enough."""


@dataclass(slots=True, eq=False)
class _Start:
    """What everything that is repeated begins with."""

    obstacle: str | None = None
    """Why nothing can be repeated, or `None`."""
    state: ModelState | None = None
    parameters: dict[str, ParameterReading] | None = None
    """Parameters and buffers by full name, before anything is perturbed."""


class Run:
    """One `ModelProbe.run`: a forward, and a backward, that can be repeated. The model is restored after each.

    It references its model weakly. Only the probe keeps the run, and with it the inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
        loss: Loss | None,
        mode: Mode | None,
        *,
        device: torch.device,
        seed: int,
        isolate: bool = False,
    ) -> None:
        check_not_lazy(model)
        offloaded = Offloaded(model.modules())
        if any(parameter.is_meta and parameter not in offloaded for parameter in nn.Module.parameters(model)):
            raise UnsupportedModelError(
                "the model is on the meta device and has no numbers: use modelprobe.architecture(model, ...), or "
                "give it memory with model.to_empty(device=...) and weights"
            )
        self.args, self.kwargs, self.loss, self.mode = args, kwargs, loss, mode
        self.device, self.seed = device, seed
        self.options, self.isolate = options, isolate
        self._model = weakref.ref(model)
        # Repeats happen later, maybe in other contexts, and have to use those of the first run.
        self._grad_enabled = torch.is_grad_enabled()
        self._autocast = autocast_states((device.type, "cpu"))
        self._settings: list[Any] = []
        self._notes: dict[str, None] = {}

    @property
    def model(self) -> nn.Module:
        """The model, which the caller keeps alive."""
        model = self._model()
        assert model is not None
        return model

    def record(self) -> tuple[Record, Mapping[str, list[Any]]]:
        """Return the record and the tensors kept."""
        __tracebackhide__ = True
        record, kept = self._observed(self.options)
        # The origin of values that are not finite is found by running once more.
        values = [value for layer in record.layers.values() for _, value in (*layer.inputs, *layer.outputs)]
        forward = any(has_nonfinite(value.forward) for value in values)
        gradients = [value.backward for value in values] + [parameter.gradient for parameter in record.parameters]
        if forward or any(map(has_nonfinite, gradients)):
            with self._prepared(), interruptible():
                if forward:
                    record = dataclasses.replace(record, origin=find_origin(self._forward) or GIVEN)
                else:
                    record = dataclasses.replace(record, gradient_origin=find_gradient_origin(self._loss))
        self._settings = self._settings_now()
        return record, kept

    # --- repeated for a record ------------------------------------------------------------------------------------

    def isolated(self, record: Record, request: IsolationRequest) -> Record:
        """Fill in the `IsolatedResponse` of each call; see `LiveRun`."""
        if not self.isolate:
            return record
        # If only some layers are asked for, no noise is measured. Then the real weights do not matter, and reading them
        # all would take longest.
        with self._started(None if request.only else record) as start:
            if start.obstacle is not None:
                return with_note(record, f"no layer was called alone: {start.obstacle}")
            with self._alone(record, request, start) as alone:
                responses = alone() if request.within is None else alone(in_float64, "outputs")
            if request.within is None and self._is_exact and (only := doubtful(responses, responses_of(request.like))):
                some = dataclasses.replace(request, only=only)
                # models may fail in another dtype
                with contextlib.suppress(Exception), self._alone(record, some, start) as alone:
                    exact = alone(in_float64)
                    responses |= noisy({key: responses[key] for key in exact if key in responses}, [], exact)
            # What a run in half precision differs by from another one may be its own rounding.
            if is_narrow(record) and record.noise is None and not request.only:
                with contextlib.suppress(Exception):  # models may fail in another dtype
                    record = self._with_rounding(record, start)
        return with_responses_of_one_forward(record, responses)

    def measured(self, record: Record, like: Record | None = None) -> Record:
        """Fill in the noise of each reading, and each response with its noise; see `LiveRun` and `noise`."""
        request = IsolationRequest(like) if like is not None and self.isolate else None
        with self._started(record) as start:
            if start.obstacle is not None:
                if request is not None:
                    record = with_note(record, f"no layer was called alone: {start.obstacle}")
                return with_note(record, f"no noise was measured: {start.obstacle}")
            parts = (len(_NEAR) + len(_FAR)) * (1 if request is None else 2)
            with progress("measuring noise: run", parts) as each:
                try:
                    if request is not None:
                        with self._alone(record, request, start, writes=True) as alone:
                            responses = alone()
                            record = with_responses_of_one_forward(record, responses)
                            responses = self._noisy(record, responses, alone, each)
                        record = with_responses_of_one_forward(record, responses)
                    return self._measured(record, start, each)
                except Exception as error:  # noqa: BLE001 - models may fail on perturbed numbers
                    reason = f"a repeat raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return with_note(record, f"no noise was measured: {reason}")

    def repeats(self, record: Record) -> bool:
        """Return whether the same numbers come out once more; see `LiveRun`."""
        with self._started(record) as start:
            if start.obstacle is not None:
                return True
            try:
                again = self._repeated(repeat=1, start=start)
            except Exception:  # noqa: BLE001 - whatever a model raises that counts its forwards
                return True
        return noise.first_difference(noise.readings(record), noise.readings(again)) is None

    def again(self, record: Record, within: Callable[[nn.Module], AbstractContextManager[object]]) -> None:
        """Run the forward once more, if it can be; see `LiveRun`."""
        with self._started(record) as start:
            if start.obstacle is None:
                with self._prepared(start=start), within(self.model), interruptible():
                    self._forward()

    def varied(self, record: Record) -> Record | None:
        """Return the record of the step with other random numbers, and numbers for parameters that are zero.

        What is zero by initialization, or was dropped by chance, is not zero there. See `LiveRun`.
        """
        with self._started(record) as start:
            if start.obstacle is not None:
                return None
            other = copy.copy(self)
            other.seed = seeding.derive(self.seed, "again")
            return other._repeated(start=start, woken=True)

    def _measured(self, record: Record, start: _Start, each: Parts) -> Record:
        # The first repeat is unperturbed. If it differs, the run is not repeatable, and that is what perturbed repeats
        # would measure.
        base = noise.readings(record)
        again = noise.readings(self._repeated(repeat=1, start=start))
        if where := noise.first_difference(base, again):
            repeats = [again, *(noise.readings(self._repeated(repeat=i, start=start)) for i in (2, 3))]
            why = f"not repeatable: {where} differs when the run is repeated with the same seed"
            return with_note(noise.with_noise(record, repeats, repeats, "not repeatable"), why)
        if is_narrow(record):
            return self._with_rounding(record, start)
        near, far = (self._perturbed(base, moves, start, each) for moves in (_NEAR, _FAR))
        return noise.with_noise(record, near, far)

    def _perturbed(
        self, base: noise.Readings, moves: Sequence[noise.Perturbation], start: _Start, each: Parts
    ) -> list[noise.Readings]:
        """Return the readings of the step with as many of some perturbations as it takes to bound their noise."""
        of_kind = {key: one for key, one in base.items() if noise.is_far(key, one) == moves[0].far}
        repeats: list[noise.Readings] = []
        for move in each(moves):
            if noise.is_noise_bounded(of_kind, repeats):
                break
            repeats.append(noise.readings(self._repeated(move, start=start)))
        return repeats

    def _with_rounding(self, record: Record, start: _Start) -> Record:
        """Return a record in half precision with the distance of each reading to that of a run in float32 as noise."""
        in_float32 = [noise.readings(self._repeated(InFloat32(), start=start))]
        return noise.with_noise(record, in_float32, in_float32)

    def _noisy(
        self, record: Record, responses: Mapping[Key, IsolatedResponse], alone: TracedCalls, each: Parts
    ) -> dict[Key, IsolatedResponse]:
        """Return the responses of a record with their noise."""
        # Calls of one class with equal responses have equal noise, because a synthetic tensor does not depend on the
        # layer.
        first: dict[tuple[object, ...], Key] = {}
        alike = {key: first.setdefault((record.layers[key[0]].type, repr(r)), key) for key, r in responses.items()}
        modules, found = Layers(self.model).modules, {}
        for key in first.values():
            known = with_known_noise(responses[key], modules[key[0]]) if self.device.type == "cpu" else None
            if known is not None:
                found[key] = known
        distinct = {key: responses[key] for key in first.values() if key not in found}
        exact = alone(in_float64, only=distinct) if self._is_exact else {}
        near, far = ((move.in_place for move in each(moves)) for moves in (_NEAR, _FAR))
        outputs = noisy(distinct, alone.repeated(distinct, near, "outputs"), exact)
        gradients = noisy(distinct, alone.repeated(distinct, far, "gradients"), exact)
        found |= {key: dataclasses.replace(one, gradient=gradients[key].gradient) for key, one in outputs.items()}
        return {key: found[alike[key]] for key in responses}

    @property
    def _is_exact(self) -> bool:
        """Whether the device computes in float64."""
        return widest(self.device) == torch.float64

    @contextmanager
    def _alone(
        self, record: Record, request: IsolationRequest, start: _Start, *, writes: bool = False
    ) -> Iterator[TracedCalls]:
        """Trace the calls of the model, to be repeated alone.

        Args:
            record: The record, whose layers are called.
            request: What is asked for.
            start: The state to which the model returns.
            writes: Whether the responses are written, with their noise: to the arguments of the run, and repeated.
        """
        like = request.like
        options = IsolationOptions(
            layers=modules_of(record),
            only=request.only,
            **made_like(like.calls),
            expected={} if writes else {(layer.name, call.index): call for layer, call in like.calls},
            names=request.names,
            gradient=self.loss is not None,
            within=request.within,
            observer=request.observer,
        )
        with self._prepared(start=start), traced(self.model, self._forward, options, repeats=writes) as alone:
            yield alone

    @contextmanager
    def _started(self, record: Record | None) -> Iterator[_Start]:
        """Keep the state of the model, to which all that is repeated within the block returns.

        Given a record, nothing is repeated if parameters have changed since. Without one, they may have.
        """
        model = self._model()  # held until the end of the block
        if model is None:
            yield _Start("the model is gone: keep it in a variable until the record is compared")
            return
        start = _Start(state=ModelState(model, unwritten=_gradients(model)))
        same = self._settings == self._settings_now()
        if same and record is not None:
            with self._prepared(start=start) if self._is_elsewhere else nullcontext():
                start.parameters = read_parameters(Layers(model), modules_of(record))
            # They are compared by their readings, because ``.data`` changes no version.
            reduced = {id(one.reduced): one.reduced for one in start.parameters.values()}
            found = dict(zip(reduced, statistics.collect(list(reduced.values())), strict=True))
            now = {name: found[id(one.reduced)] for name, one in start.parameters.items()}
            same = now == {
                qualified(layer.name, one.name): one.reading
                for layer in record.layers.values()
                for one in (*layer.parameters, *layer.buffers)
            }
        if not same:
            start.obstacle = "the model or an input was changed after the run: compare the record before that"
        yield start

    @property
    def _is_elsewhere(self) -> bool:
        """Whether a parameter is on another device than that of the run."""
        some = nn.Module.parameters(self.model)
        return any(not (p.is_meta or is_same_device(p.device, self.device)) for p in some)

    def _settings_now(self) -> list[Any]:
        """Return all that determines the run, except the contents of parameters and buffers."""
        inputs = (*flatten("args", self.args).tensors, *flatten("kwargs", self.kwargs).tensors)
        return [
            [(id(tensor), content_key(tensor)) for _, tensor in inputs],
            [(id(m), type(m), self.mode is None and m.training, attributes(m)) for m in self.model.modules()],
            [(id(p), p.requires_grad) for p in nn.Module.parameters(self.model)],
            changing_hooks(self.model.modules()),
        ]

    # --- the step -------------------------------------------------------------------------------------------------

    def _repeated(self, move: Move | None = None, *, start: _Start, repeat: int = 0, woken: bool = False) -> Record:
        """Return the record of the step once more.

        It leaves out what is not compared: kept tensors, costs and histograms.
        """
        options = dataclasses.replace(self.options, keep=(), profile=False, histograms=False)
        return self._observed(options, move, repeat=repeat, start=start, woken=woken)[0]

    def _observed(
        self,
        options: Options,
        move: Move | None = None,
        *,
        repeat: int = 0,
        start: _Start | None = None,
        woken: bool = False,
    ) -> tuple[Record, Mapping[str, list[Any]]]:
        """Return the record of one step, perturbed by ``move``, and the tensors kept.

        In each ``repeat``, the model's own random generators start in a different state, as in another process.
        """
        __tracebackhide__ = True
        with self._prepared(repeat, start=start) as state, Capture(Layers(self.model), options) as capture:
            capture.notes.update(dict.fromkeys(state.notes))
            if woken:
                wake_zeros(capture.layers, self.seed)
            if start is None or woken:
                capture.read_parameters()
            else:
                capture.parameters = start.parameters
            if move is not None:
                # Samples are known by their inputs, so these must not be the perturbed ones.
                capture.sample_inputs = flatten_call(self.args, self.kwargs)
            try:
                with interruptible(), nullcontext() if move is None else move.applied(self.model):
                    self._step(move)
            except NoGradientError as error:
                if torch.is_inference_mode_enabled():
                    raise NoGradientError(
                        "loss= needs gradients, which torch.inference_mode() does not record: call run outside of it, "
                        "or without loss="
                    ) from error
                cut = detaching_call(assemble(capture))
                if cut is None:
                    raise
                raise NoGradientError(
                    f"{cut.label} detaches its output from what it is computed of, so the loss has no gradient: look "
                    "for .detach(), .data, .item(), a comparison or torch.no_grad() in its forward, and for layers "
                    "whose outputs it does not use, or run without loss="
                ) from error
            capture.notes.update(self._notes)
            capture.set_attributes.update()  # once more, because a hook of the backward may set some too
            loss = getattr(self.loss, "__name__", type(self.loss).__name__) if callable(self.loss) else self.loss
            record = assemble(capture, seed=self.seed, loss=loss, before=capture.parameters)
        kept = capture.kept
        vars(capture).clear()  # its parts refer to each other, and all that they hold would stay for long
        return record, kept

    @contextmanager
    def _prepared(self, repeat: int = 0, *, start: _Start | None = None) -> Iterator[ModelState]:
        """Prepare the model for a run: seed, contexts, mode, device, no gradients. Restore everything afterwards.

        Args:
            repeat: How many numbers are drawn from the model's own random generators first.
            start: The state to which the model returns. `None` means the state in which it is now.
        """
        __tracebackhide__ = True
        with ExitStack() as contexts:
            kept = start.state if start is not None else None
            state = contexts.enter_context(kept or preserved(self.model, unwritten=_gradients(self.model)))
            # A run restores the model's own generators, so repeats would begin alike, and a run that draws from them
            # would pass for repeatable.
            for _ in range(repeat):
                state.draw()
            contexts.enter_context(seeding.seeded(seeding.derive(self.seed, "run")))
            contexts.enter_context(torch.set_grad_enabled(self._grad_enabled))
            for autocast in self._autocast:
                contexts.enter_context(torch.autocast(*autocast))
            if self.mode is not None:
                self.model.train(self.mode == "train")
            if self._is_elsewhere:
                self.model.to(self.device)
            for parameter in nn.Module.parameters(self.model):
                parameter.grad = None
            yield state

    def _forward(self, move: Move | None = None) -> Any:
        __tracebackhide__ = True
        number = itertools.count()

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                raise UsageError("an input is on the meta device and has no numbers: give modelprobe.randn(...), say")
            copy = detached_copy(tensor)
            if copy is None:
                what = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
                self._notes[f"an input, {what}, cannot be copied: the model got the tensor itself"] = None
                return tensor.detach()
            if move is not None:
                copy = move.input(copy, f"input {next(number)}")
            return copy.to(self.device).requires_grad_(tensor.requires_grad)

        args, kwargs = map_tensors(copied, (self.args, self.kwargs))
        output = self.model(*args, **kwargs)
        if hidden := unseen(flatten("output", output)):
            raise UsageError(hidden)
        return output

    def _step(self, move: Move | None = None) -> None:
        __tracebackhide__ = True
        if self.loss is None:
            self._forward(move)
        elif move is None or move.far:
            self._loss(move).backward()
        else:  # so small a perturbation is for the noise of the forward alone
            with torch.enable_grad():
                self._forward(move)

    def _loss(self, move: Move | None = None) -> torch.Tensor:
        __tracebackhide__ = True
        assert self.loss is not None
        with torch.enable_grad():
            output = self._forward(move)
            if move is not None:
                move.gradients(tensor for _, tensor in flatten("output", output).tensors)
            return loss_of(output, self.loss, seed=self.seed)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of parameters to which nothing else refers, such as the bucket of a distributed model.

    A run sets them to `None`, and so writes to none of them.
    """
    with torch.inference_mode(False):
        alone = torch.zeros(1, requires_grad=True)
        alone.grad = torch.zeros(1)
    found = [p.grad for p in (*nn.Module.parameters(model), alone) if p.is_leaf]
    counts = [sys.getrefcount(gradient) for gradient in found]
    sole = (g for g, count in zip(found, counts, strict=True) if count == counts[-1])
    return [g for g in sole if has_dense_storage(g) and g.untyped_storage().nbytes() == g.nbytes]


def is_same_device(a: torch.device, b: torch.device) -> bool:
    """Whether two devices are the same. As ``b``, ``cuda`` without an index is any of these devices."""
    return a.type == b.type and (b.index is None or a.index == b.index)


# --- what is asked after a record was made: isolated responses, and noise ---------------------------------------------
#
# These take as long as several forwards, so they are computed only when a comparison or a snapshot needs them. A record
# is plain data and outlives the model. So it holds its run or watch weakly, and gets a note if that is gone.

Place = tuple[str, bool, str, int]
"""Address of a call in a record: the root's name and mode, the layer, and the number of the call."""


@dataclass(frozen=True, slots=True)
class IsolationRequest:
    """Which responses are asked for. See `LiveRun.isolated` for what each field means."""

    like: Record
    names: NamesBefore | None = None
    only: Collection[str] | None = None
    within: Within | None = None
    observer: CallObserver | None = None


class Isolating(Protocol):
    """A run or a watch."""

    def isolated(self, record: Record, request: IsolationRequest) -> Record:
        """Fill in the isolated response of each call."""


S = TypeVar("S", bound=Isolating)


class WeakLiveRun(Generic[S]):
    """The `LiveRun` of records, which holds the run or watch that made them weakly.

    What a watch saw cannot be run again as a whole. So nothing but the responses can be asked of it.

    Args:
        source: The run or watch.
        gone: The note for a record whose source does not exist any more.
    """

    def __init__(self, source: S, gone: str) -> None:
        self._source = weakref.ref(source)
        self._gone = gone

    def isolated(
        self,
        record: Record,
        like: Record | None = None,
        names: NamesBefore | None = None,
        only: Collection[str] | None = None,
        *,
        within: Within | None = None,
        observer: CallObserver | None = None,
    ) -> Record:
        """Fill in the isolated response of each call."""
        source = self._source()
        if source is None:
            found = with_note(record, f"no layer was called alone: {self._gone}")
        else:
            request = IsolationRequest(like or record, names, only, within, observer)
            found = source.isolated(record, request)
        return with_live_run(found, self)

    def again(self, record: Record, within: Callable[[nn.Module], AbstractContextManager[object]]) -> None:
        """Run the forward once more, if it can be."""

    def measured(self, record: Record, like: Record | None = None) -> Record:
        """Fill in each response. What a watch saw has no noise."""
        return record if like is None else self.isolated(record, like)

    def repeats(self, record: Record) -> bool:
        """Return whether the same numbers come out once more."""
        return True

    def varied(self, record: Record) -> Record | None:
        """Return the record of the run with other random numbers, and without parameters that are zero."""
        return None


class LiveRunOfRun(WeakLiveRun[Run]):
    """The `LiveRun` of the record of a run."""

    def again(self, record: Record, within: Callable[[nn.Module], AbstractContextManager[object]]) -> None:
        """Run the forward once more, if it can be."""
        if (run := self._source()) is not None:
            run.again(record, within)

    def measured(self, record: Record, like: Record | None = None) -> Record:
        """Fill in the noise of each reading, and each response with its noise."""
        run = self._source()
        if run is None:
            return with_note(super().measured(record, like), f"no noise was measured: {self._gone}")
        return with_live_run(run.measured(record, like), self)

    def repeats(self, record: Record) -> bool:
        """Return whether the same numbers come out once more."""
        run = self._source()
        return run is None or run.repeats(record)

    def varied(self, record: Record) -> Record | None:
        """Return the record of the run with other random numbers, and without parameters that are zero."""
        run = self._source()
        return None if run is None else run.varied(record)


def responses_of(record: Record) -> dict[Key, IsolatedResponse]:
    """Return the responses of a record of one forward."""
    return {(layer.name, call.index): call.response for layer, call in record.calls if call.response is not None}


def made_like(calls: Iterable[tuple[Layer, Call]]) -> dict[str, Any]:
    """Return the options by which responses are made from the same tensors as those of some calls of one forward."""
    found: dict[str, Any] = {"recipes": {}, "shapes": {}}
    for layer, call in calls:
        if call.response is not None:
            key = layer.name, call.index
            found["recipes"][key] = call.response.recipes
            found["shapes"][key] = {value.path: value.shape for value in call.inputs}
    return found


def with_responses(record: Record, found: Mapping[Place, IsolatedResponse]) -> Record:
    """Return the record with these responses, by call, in place of its own."""

    def layer(one: Layer) -> Layer:
        places = ((call, (call.root, call.root_training, one.name, call.index)) for call in one.calls)
        calls = (dataclasses.replace(call, response=found.get(place)) for call, place in places)
        return dataclasses.replace(one, calls=tuple(calls))

    return dataclasses.replace(record, layers={name: layer(one) for name, one in record.layers.items()})


def with_responses_of_one_forward(record: Record, found: Mapping[Key, IsolatedResponse]) -> Record:
    """Return a record of one forward with these responses in place of its own."""
    places = {(call.root, call.root_training, layer.name, call.index) for layer, call in record.calls}
    return with_responses(record, {place: found[place[2:]] for place in places if place[2:] in found})


def modules_of(record: Record) -> list[str]:
    """Return the layers that are modules, which can be called."""
    return [name for name, layer in record.layers.items() if not layer.functional]


def with_note(record: Record, note: str) -> Record:
    """Return the record with a note added, once."""
    return record if note in record.notes else dataclasses.replace(record, notes=(*record.notes, note))
