"""`ModelProbe` and `Watch`: what a test calls. Works with and without pytest."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from ._torch import next_hook
from .capture import Capture, Which, assemble, content_key, read_parameters
from .exceptions import NothingObservedError, UnsupportedModelError, UsageError
from .models import (
    Layers,
    ModelState,
    attributes,
    check_supported,
    flatten,
    has_lazy,
    map_tensors,
    preserved,
    seeding,
    unseen,
)
from .models import initialization as initialization
from .record import IsolatedResponse, Layer, Reading, Record, Selector, nearest, select, with_rerun
from .runs import (
    Again,
    Forwards,
    Key,
    find_gradient_origin,
    find_origin,
    isolate,
    merged,
    noise,
    noisy,
    random_loss,
    recipes_of,
)
from .runs import architecture as _architecture

M = TypeVar("M", bound=nn.Module)
Loss = Callable[[Any], torch.Tensor] | Literal["random"]
Mode = Literal["train", "eval"]

_Place = tuple[str, bool, str, int]
"""Of a call: the forward's kind, the layer, and the number of the call."""

_MODELS = 2  # kept for `Record.rerun` where the test keeps none: run(build(Net), x) == snapshot
_REPEATS = 3
_REMEMBERED = 8  # sources kept for `record` and the summary, inputs for `Record.rerun`: a test may run a thousand times
_FORGOTTEN = (
    f"the probe of the record is closed or gone, or made {_REMEMBERED} runs since: compare the record before that"
)


class Watch:
    """Observes whatever is done with a model until it is closed.

    It never moves or changes the model, and closes itself when it is forgotten. Made by `ModelProbe.watch`.

    Args:
        model: The model; its wrappers (DDP, compiled modules) are looked through.
        layers: Which layers to record, see `selection`.
        name: What messages call it; the model's class by default.
        keep: Which layers' output tensors of the newest forward to keep.
        functionals: Whether to record functional calls (``F.relu``) too.
        attention: Whether to look at attention weights.
        isolate: Whether a snapshot of a record may also call each layer alone, on synthetic inputs, to tell whose own
            code changed. For that the inputs of the first forwards are copied.
        seed: Stored in the record.

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
        isolate: bool = True,
        seed: int | None = None,
    ) -> None:
        found = Layers(model)
        self.model = model
        self.name = name or type(next(iter(found.modules.values()))).__name__
        self.closed = False
        self.first_hook = next_hook()
        """Number of the first hook that torch gave out since the watch began; None where it cannot be told."""
        self._seed = seed
        self._loss: str | None = None
        self._records: dict[Which, tuple[Hashable, Record]] = {}
        self._forwards = Forwards(found) if isolate else None
        self._capture = Capture(
            found,
            select(found.modules, layers),
            keep=() if _is_empty(keep) else select(found.modules, keep),
            functionals=functionals,
            attention=attention,
            on_forward=self._forwards.begins if self._forwards else None,
        )
        self._capture.attach()
        self._finalizer = weakref.finalize(self, self._capture.detach)

    @property
    def record(self) -> Record:
        """All forwards so far, merged."""
        return self._record("all")

    @property
    def first(self) -> Record:
        """The first forward alone, with the gradients that reached it, and parameters and buffers as it left them.

        They are read before the first step of an optimizer. What had changed by then, or without one, has no numbers.
        """
        return self._record("first")

    @property
    def last(self) -> Record:
        """The newest forward alone, with the gradients that reached it."""
        return self._record("last")

    @property
    def kept(self) -> Mapping[str, list[Any]]:
        """Outputs of the layers in ``keep=`` in the newest forward, one entry a call; detached copies.

        None stands for tensors inside a `torch.func` transform.
        """
        return self._capture.kept

    def close(self) -> None:
        """Take every hook off. What was recorded stays. Safe to repeat."""
        self.closed = True
        self._finalizer()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<Watch {self.name}: {self._capture.forwards} forwards, {state}>"

    def _record(self, which: Which) -> Record:
        # Writing into a parameter is a change too, as an optimizer's step does, and putting another in its place.
        tensors = (*self.model.parameters(), *self.model.buffers())
        now = self._capture.changes, tuple((id(t), not t.is_inference() and t._version) for t in tensors)
        then, record = self._records.get(which, (None, None))
        if record is None or then != now:
            record = assemble(self._capture.observations(), which, seed=self._seed, loss=self._loss)
            if self._forwards is not None:
                with_rerun(record, _Watched(self, which))
            self._records[which] = now, record
        return record

    def isolated(
        self, record: Record, which: Which, like: Record, names: Mapping[str, str] | None, only: Collection[str] | None
    ) -> Record:
        """Call each layer alone, in the forwards that are kept, as the model is by now."""
        assert self._forwards is not None
        one = {"first": self._forwards.first, "last": self._forwards.newest}
        kept = self._forwards.kept.values() if which == "all" else [[again] for again in [one[which]] if again]
        reason = self._forwards.obstacle() if kept else "only the first two forwards of a kind can be run again"
        if reason is not None:
            return _noted(record, f"no layer was called alone: {reason}")
        found: dict[_Place, dict[int, IsolatedResponse]] = {}
        for number, again in (pair for forwards in kept for pair in enumerate(forwards, 1)):
            recipes = {
                (layer.name, call.index): recipes_of(call.response, number)
                for layer, call in like.calls
                if call.response is not None and (call.root, call.root_training) == again.kind
            }
            try:
                responses = self._alone(again, record, recipes, names, only)
            except Exception as error:  # noqa: BLE001 - whatever a model does that is not as it was
                what = again.reason or f"it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                record = _noted(record, f"no layer was called alone in forward {number} of {again.kind[0]}: {what}")
                continue
            for key, response in responses.items():
                found.setdefault((*again.kind, *key), {})[number] = response
        return _with_responses(record, {place: merged(numbered) for place, numbered in found.items()})

    def _alone(
        self,
        again: Again,
        record: Record,
        recipes: Mapping[Key, Mapping[str, str]],
        names: Mapping[str, str] | None,
        only: Collection[str] | None,
    ) -> dict[Key, IsolatedResponse]:
        assert self._forwards is not None
        changed = self._forwards.changed()
        with self._forwards.prepared(self.model, again):
            responses = isolate(
                self.model,
                functools.partial(self._forwards.run, again),
                layers=_modules(record),
                only=only,
                recipes=recipes,
                names=names,
                gradient=bool(record.backwards),
            )
        return {
            key: IsolatedResponse(reason="tensors that it keeps were changed since") if key[0] in changed else response
            for key, response in responses.items()
        }


class ModelProbe:
    """Runs and watches models on a device, under a seed; the fixture ``modelprobe`` is one.

    Args:
        device: Where `run` runs and the inputs are made: ``"cpu"``, ``"cuda"``, a `torch.device`.
        seed: Base of every random number that the probe draws.
        device_required: Refuse to watch a model that is elsewhere. Set where the device was asked for by name.

    >>> from torch import nn
    >>> with ModelProbe(seed=0) as probe:
    ...     model = probe.build(lambda: nn.Linear(8, 2))
    ...     record = probe.run(model, probe.randn(4, 8), loss=lambda out: out.pow(2).mean())
    >>> record.layers["(root)"].calls[0].outputs[0].shape, record.backwards
    ((4, 2), 1)
    """

    def __init__(self, device: str | torch.device = "cpu", seed: int = 0, *, device_required: bool = False) -> None:
        if type(seed) is not int:
            raise UsageError(f"a seed is an integer; got {seed!r}")
        self.device = _device(device)
        self.seed = seed
        self.kept: Mapping[str, list[Any]] = {}
        """Outputs of the layers in ``keep=`` of the newest `run`."""
        self._device_required = device_required
        self._sources: deque[tuple[str, Watch | Record]] = deque(maxlen=_REMEMBERED)
        self._seen = 0
        self._told = 0
        self._open: list[Watch] = []
        self._runs: deque[_Run] = deque(maxlen=_REMEMBERED)
        self._models: deque[nn.Module] = deque(maxlen=_MODELS)

    # --- running and watching -------------------------------------------------------------------------------------

    def run(
        self,
        model: nn.Module,
        /,
        *args: Any,
        loss: Loss | None = None,
        mode: Mode | None = None,
        layers: Selector = "**",
        keep: Selector = (),
        functionals: bool = False,
        attention: bool = False,
        isolate: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        **model_kwargs: Any,
    ) -> Record:
        """Run the model once on the device, backward too if there is a loss, and return what was seen.

        It leaves no trace: it starts without gradients, from the probe's seed, on copies of the inputs; afterwards
        parameters, buffers, gradients, mode, device and random states are what they were, and so are the settings of
        torch and all that the model's attributes lead to. What cannot be put back stands in the record's notes.

        Args:
            model: The model.
            *args: Its positional arguments; tensors in them are moved to the device.
            loss: Takes the output, returns a scalar; or ``"random"``, a fixed random projection of every floating
                output but a cache, which no normalization makes constant. None: no backward.
            mode: ``"train"`` or ``"eval"``; None: as the model is.
            layers: Which layers to record.
            keep: Which layers' output tensors to keep, in `kept`.
            functionals: Whether to record functional calls (``F.relu``) as layers too.
            attention: Whether to look at attention weights too, for `assert_attention_mask` and the like. Those of
                fused attention are computed again.
            isolate: Whether a snapshot of the record may also call each layer alone, on synthetic inputs, to tell whose
                own code changed. The run itself costs the same.
            kwargs: Keyword arguments for the model whose names `run` uses itself.
            **model_kwargs: Keyword arguments for the model.

        Raises:
            UnsupportedModelError: No module, or one that cannot be probed.
            SelectionError: ``layers`` or ``keep`` matches nothing.
            UsageError: The loss is not scalar or has no gradient; ``mode`` is neither train nor eval.

        >>> from torch import nn
        >>> probe = ModelProbe()
        >>> record = probe.run(nn.Linear(3, 2), torch.ones(5, 3), loss="random")
        >>> record.layers["(root)"].parameters[0].gradient.statistics.count
        6
        """
        __tracebackhide__ = True
        check_supported(model)
        if mode not in (None, "train", "eval"):
            raise UsageError(f"mode is 'train', 'eval' or None for the model's own; got {mode!r}")
        if loss is not None and loss != "random" and not callable(loss):
            raise UsageError(f"loss is a function of the output, 'random' or None; got {loss!r}")
        run = _Run(
            model,
            args,
            {**(kwargs or {}), **model_kwargs},
            loss,
            mode,
            device=self.device,
            seed=self.seed,
            layers=layers,
            functionals=functionals,
            attention=attention,
            isolate=isolate,
        )
        record, self.kept = run.record(keep)
        with_rerun(record, _Asked(run))
        self._runs.append(run)
        self._models.append(model)
        self._remember(record.model, record)
        return record

    def watch(
        self,
        model: nn.Module,
        /,
        *,
        layers: Selector = "**",
        name: str | None = None,
        keep: Selector = (),
        functionals: bool = False,
        attention: bool = False,
        isolate: bool = True,
    ) -> Watch:
        """Observe whatever the test does with the model, until the watch or the probe is closed.

        Raises:
            UnsupportedModelError: No module, or one that cannot be probed.
            SelectionError: ``layers`` or ``keep`` matches nothing.
            UsageError: The model is not on the device that was asked for.

        >>> from torch import nn
        >>> with ModelProbe() as probe:
        ...     model = nn.Linear(3, 2)
        ...     watch = probe.watch(model)
        ...     for _ in range(3):
        ...         _ = model(torch.ones(5, 3))
        >>> watch.record.forwards
        3
        """
        check_supported(model)
        self._check_device(model)
        watch = Watch(
            model,
            layers=layers,
            name=name,
            keep=keep,
            functionals=functionals,
            attention=attention,
            isolate=isolate,
            seed=self.seed,
        )
        self._open = [other for other in self._open if not other.closed]
        self._open.append(watch)
        self._remember(watch.name, watch)
        return watch

    def architecture(self, model: nn.Module, /, *args: Any, **kwargs: Any) -> Record:
        """Return the structure of a model without computing: layers, parameters, and with inputs the shapes.

        With inputs, one forward runs on fake tensors, which have shapes but no contents: a model on the meta device
        will do. Where that cannot be done the record tells the structure alone, and why.

        >>> from torch import nn
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(10_000, 20_000), nn.ReLU())
        >>> record = ModelProbe().architecture(model, torch.empty(4, 10_000))
        >>> record.layers["1"].calls[0].outputs[0].shape
        (4, 20000)
        """
        record = _architecture.architecture(model, *args, **kwargs)
        self._remember(record.model, record)
        return record

    # --- models and inputs from the seed --------------------------------------------------------------------------

    def build(self, factory: Callable[[], M], *, rename: Mapping[str, str] | None = None) -> M:
        """Return the model that ``factory`` makes, each weight seeded by its own name, on the device.

        The model is the same in every run and order of tests, and a layer added leaves the others' weights alone.

        >>> from torch import nn
        >>> a = ModelProbe().build(lambda: nn.Sequential(nn.Linear(2, 2)))
        >>> b = ModelProbe().build(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        >>> torch.equal(a[0].weight, b[0].weight)
        True

        Args:
            factory: Makes the model; called once.
            rename: Glob of layers → glob of the names that they had: their weights are drawn by these, and stay.
        """
        model = initialization.build(factory, seed=self.seed, rename=rename)
        if any(p.is_meta for p in model.parameters()):
            return model
        return model.to(self.device)

    def randn(self, *shape: int | Sequence[int], name: str = "x") -> torch.Tensor:
        """Return normally distributed numbers that depend on ``name``, the shape and the seed alone, on the device.

        Two calls with one name and shape give the same numbers: name the inputs of a model that takes several.

        >>> probe = ModelProbe()
        >>> torch.equal(probe.randn(2, 3), probe.randn((2, 3))), torch.equal(probe.randn(2), probe.randn(2, name="y"))
        (True, False)
        """
        return seeding.randn(_sizes(shape), seed=self.seed, name=name, device=self.device)

    def randint(self, low: int, high: int, shape: int | Sequence[int], name: str = "ids") -> torch.Tensor:
        """Return integers from ``low`` to ``high`` - 1 that depend on ``name``, the shape and the seed alone.

        Two calls with one name and shape give the same numbers, as with `randn`.

        >>> ids = ModelProbe().randint(0, 100, (2, 16))
        >>> ids.shape, ids.dtype
        (torch.Size([2, 16]), torch.int64)
        """
        return seeding.randint(low, high, _sizes([shape]), seed=self.seed, name=name, device=self.device)

    # --- what was seen --------------------------------------------------------------------------------------------

    @property
    def record(self) -> Record:
        """The record of the only run or watch.

        Raises:
            NothingObservedError: There was none.
            UsageError: There were several: assert on the record or watch itself.
        """
        __tracebackhide__ = True
        source = self.source
        return source.record if isinstance(source, Watch) else source

    @property
    def source(self) -> Watch | Record:
        """The only watch, or the record of the only run; raises as `record` does."""
        __tracebackhide__ = True
        if not self._seen:
            raise NothingObservedError(
                "nothing was observed: call modelprobe.run(model, ...), or modelprobe.watch(model) before using it"
            )
        if self._seen > 1:
            raise UsageError(
                f"{self._seen} runs and watches were made ({', '.join(name for name, _ in self._sources)}): "
                "say which, by asserting on the record that run returned or on the watch"
            )
        return self._sources[0][1]

    def take_unreported(self) -> list[tuple[str, Watch | Record]]:
        """Return the newest runs and watches that were not told before, each with its name."""
        new = list(self._sources)[-(self._seen - self._told) :] if self._seen > self._told else []
        self._told = self._seen
        return new

    def close(self) -> None:
        """Close every watch, and let go of the models and inputs of runs. Safe to repeat."""
        for watch in self._open:
            watch.close()
        self._open.clear()
        self._runs.clear()
        self._models.clear()

    def __enter__(self) -> ModelProbe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        seen = ", ".join(name for name, _ in self._sources) or "nothing yet"
        return f"<ModelProbe on {self.device}, seed {self.seed}: {seen}>"

    def _remember(self, name: str, source: Watch | Record) -> None:
        self._seen += 1
        self._sources.append((name, source))

    def _check_device(self, model: nn.Module) -> None:
        if not self._device_required:
            return
        elsewhere = {str(p.device) for p in model.parameters() if not _same_device(p.device, self.device)}
        if elsewhere:
            raise UsageError(
                f"{self.device} was asked for, but the model is on {', '.join(sorted(elsewhere))}, and a watch does "
                "not move it: call model.to(modelprobe.device) first"
            )


class _Watched:
    """Asks more of a `Watch`, which it does not keep: it is the `Rerun` of its records."""

    def __init__(self, watch: Watch, which: Which) -> None:
        self._watch = weakref.ref(watch)
        self._which = which

    def isolated(
        self,
        record: Record,
        like: Record | None = None,
        names: Mapping[str, str] | None = None,
        only: Collection[str] | None = None,
    ) -> Record:
        watch = self._watch()
        if watch is None:
            gone = "the watch is gone: keep it in a variable until the record is compared"
            return with_rerun(_noted(record, f"no layer was called alone: {gone}"), self)
        return with_rerun(watch.isolated(record, self._which, like or record, names, only), self)

    def measured(self, record: Record) -> Record:
        return record  # weights have changed: no other run would be like it


class _Asked:
    """Asks more of a `_Run` while its probe keeps it, and keeps nothing itself: it is the `Rerun` of its records."""

    def __init__(self, run: _Run) -> None:
        self._run = weakref.ref(run)

    def isolated(
        self,
        record: Record,
        like: Record | None = None,
        names: Mapping[str, str] | None = None,
        only: Collection[str] | None = None,
    ) -> Record:
        run = self._run()
        if run is None:
            return self._answer(_noted(record, f"no layer was called alone: {_FORGOTTEN}"))
        return self._answer(run.isolated(record, like or record, names, only))

    def measured(self, record: Record) -> Record:
        run = self._run()
        if run is None:
            return self._answer(_noted(record, f"no noise was measured: {_FORGOTTEN}"))
        return self._answer(run.measured(record))

    def _answer(self, record: Record) -> Record:
        return with_rerun(record, self)  # of what was filled in more can be asked too


class _Run:
    """One `ModelProbe.run`: the same step, repeatable, that leaves no trace.

    It knows its model weakly. The probe alone keeps it, and so the inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Loss | None,
        mode: Mode | None,
        *,
        device: torch.device,
        seed: int,
        layers: Selector,
        functionals: bool,
        attention: bool,
        isolate: bool,
    ) -> None:
        if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            raise UnsupportedModelError(
                "the model is on the meta device and has no numbers: use modelprobe.architecture(model, ...), or "
                "give it memory with model.to_empty(device=...) and weights"
            )
        self.args, self.kwargs, self.loss, self.mode = args, kwargs, loss, mode
        self.device, self.seed = device, seed
        self.layers, self.functionals, self.attention, self.isolate = layers, functionals, attention, isolate
        self._model = weakref.ref(model)
        self._contexts = _contexts(device)
        self._settings: list[Any] = []

    @property
    def model(self) -> nn.Module:
        """The model; whoever runs it holds it."""
        model = self._model()
        assert model is not None
        return model

    def record(self, keep: Selector) -> tuple[Record, Mapping[str, list[Any]]]:
        """Return the record and the tensors kept."""
        __tracebackhide__ = True
        record, kept = self._observed(keep=keep)
        record = self._with_origins(record)
        self._settings = self._settings_now()
        return record, kept

    # --- asked of the record later --------------------------------------------------------------------------------

    def isolated(
        self, record: Record, like: Record, names: Mapping[str, str] | None, only: Collection[str] | None
    ) -> Record:
        """Fill in the `IsolatedResponse` of each call, see `Rerun`."""
        if not self.isolate:
            return record
        model = self._model()  # held until the end
        # Of a few layers no noise is measured, and weights do not matter: to read them all would be most of the time.
        reason = self._obstacle(None if only else record, model)
        if reason is not None:
            return _noted(record, f"no layer was called alone: {reason}")
        return _of_one_forward(record, self._isolate(record, _responses(like), names=names, only=only))

    def measured(self, record: Record) -> Record:
        """Fill in the noise of each reading and response; see `noise`."""
        model = self._model()
        reason = self._obstacle(record, model)
        if reason is None:
            try:
                return self._measured(record)
            except Exception as error:  # noqa: BLE001 - whatever a model does with numbers it was not made for
                reason = f"a repeat raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return _noted(record, f"no noise was measured: {reason}")

    def _measured(self, record: Record) -> Record:
        again, _ = self._observed(repeat=1)
        where = noise.first_difference(record, again)
        if where is not None:
            repeats = [again, *(self._observed(repeat=i)[0] for i in range(2, _REPEATS + 1))]
            return _noted(
                noise.with_nondeterminism(record, repeats),
                f"not repeatable: {where} differs when the run is repeated with the same seed",
            )
        near, far = ([noise.Perturbation(f"repeat {i}", far=far) for i in range(_REPEATS)] for far in (False, True))
        measured = noise.with_noise(
            record, near=[self._observed(move)[0] for move in near], far=[self._observed(move)[0] for move in far]
        )
        responses = _responses(record)
        if not responses:
            return measured
        handed, gradients = (
            noisy(responses, [self._isolate(record, responses, move) for move in moves]) for moves in (near, far)
        )
        return _of_one_forward(
            measured, {key: dataclasses.replace(handed[key], gradient=gradients[key].gradient) for key in responses}
        )

    def _isolate(
        self,
        record: Record,
        like: Mapping[Key, IsolatedResponse],
        move: noise.Perturbation | None = None,
        names: Mapping[str, str] | None = None,
        only: Collection[str] | None = None,
    ) -> dict[Key, IsolatedResponse]:
        with self._prepared(values=False):
            return isolate(
                self.model,
                self._forward,
                layers=_modules(record),
                only=only,
                recipes={key: response.recipes for key, response in like.items()},
                names=names,
                gradient=self.loss is not None,
                perturb=move,
            )

    def _obstacle(self, record: Record | None, model: nn.Module | None) -> str | None:
        """Return why the run cannot be repeated, if so; without a record, but for what parameters are now."""
        if model is None:
            return "the model is gone: keep it in a variable until the record is compared"
        if self._settings != self._settings_now() or not (record is None or self._has_parameters_of(record)):
            return "the model or an input was changed after the run: compare the record before that"
        return None

    def _settings_now(self) -> list[Any]:
        """Return what would make another run of it, all but the contents of parameters and buffers."""
        inputs = (*flatten("args", self.args).tensors, *flatten("kwargs", self.kwargs).tensors)
        return [
            [(id(tensor), content_key(tensor)) for _, tensor in inputs],
            [(id(m), type(m), self.mode is None and m.training, attributes(m)) for m in self.model.modules()],
            [(id(p), p.requires_grad) for p in self.model.parameters()],
        ]

    def _has_parameters_of(self, record: Record) -> bool:
        """Whether parameters and buffers are those that the record was made with: read again, for ``.data`` is mute."""
        with self._prepared(values=False), self._watch() as watch:
            now = assemble(watch._capture.observations())
        return all(
            [p.reading for p in (*layer.parameters, *layer.buffers)]
            == [p.reading for p in (*now.layers[name].parameters, *now.layers[name].buffers)]
            for name, layer in record.layers.items()
            if not layer.functional
        )

    # --- the step -------------------------------------------------------------------------------------------------

    def _observed(
        self, move: noise.Perturbation | None = None, keep: Selector = (), *, repeat: int = 0
    ) -> tuple[Record, Mapping[str, list[Any]]]:
        """Return the record of one step, its numbers moved by ``move``, and the tensors kept.

        A ``repeat`` begins with the model's own random generators in another state: what draws from them does not
        repeat from process to process, though each run puts them back.
        """
        __tracebackhide__ = True
        with self._prepared(repeat) as state, self._watch(keep) as watch:
            watch._capture.notes.update(dict.fromkeys(state.notes))
            before = read_parameters(watch._capture.layers, watch._capture.selected)
            if move is not None:
                move.parameters(self.model)
            self._step(move)
            watch._capture.note_set_attributes()  # again: a hook of the backward may set some too
            record = assemble(watch._capture.observations(), seed=self.seed, loss=_loss_name(self.loss), before=before)
        return record, watch.kept

    def _watch(self, keep: Selector = ()) -> Watch:
        return Watch(
            self.model,
            layers=self.layers,
            keep=keep,
            functionals=self.functionals,
            attention=self.attention,
            isolate=False,
            seed=self.seed,
        )

    @contextmanager
    def _prepared(self, repeat: int = 0, *, values: bool = True) -> Iterator[ModelState]:
        """The model as a run finds it, from the seed; everything is put back afterwards.

        Without ``values``, but for what parameters and buffers hold: for what does not change it, or puts it back.
        """
        __tracebackhide__ = True
        with ExitStack() as contexts:
            state = contexts.enter_context(preserved(self.model, values=values))
            for _ in range(repeat):
                state.draw()
            contexts.enter_context(self._seeded())
            for context in self._contexts():
                contexts.enter_context(context)
            if self.mode is not None:
                self.model.train(self.mode == "train")
            if any(not _same_device(p.device, self.device) for p in self.model.parameters()):
                self.model.to(self.device)
            if has_lazy(self.model):
                self._give_shapes()
            for parameter in self.model.parameters():
                parameter.grad = None
            yield state

    def _seeded(self) -> contextlib.AbstractContextManager[None]:
        return seeding.seeded(seeding.derive(self.seed, "run"))

    def _give_shapes(self) -> None:
        """Show lazy modules an input, so that the step finds a model like any other; nothing else stays of it."""
        with preserved(self.model, lazy=False), self._seeded(), torch.no_grad():
            self.model.eval()
            with contextlib.suppress(Exception):  # the step will raise it again, and say in which layer
                self._forward()

    def _forward(self, move: noise.Perturbation | None = None) -> Any:
        __tracebackhide__ = True
        copies: dict[int, torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                raise UsageError("an input is on the meta device and has no numbers: give modelprobe.randn(...), say")
            if id(tensor) not in copies:
                copy = tensor.detach().clone()
                if move is not None:
                    copy = move.input(copy, f"input {len(copies)}")
                copies[id(tensor)] = copy.to(self.device).requires_grad_(tensor.requires_grad)
            return copies[id(tensor)]

        args, kwargs = map_tensors(copied, self.args), map_tensors(copied, self.kwargs)
        try:
            output = self.model(*args, **kwargs)
        except TypeError as error:
            self._note_misspelt(error)
            raise
        if hidden := unseen(flatten("output", output)):
            raise UsageError(hidden)
        return output

    def _note_misspelt(self, error: TypeError) -> None:
        """Tell on the model's own error if a keyword that it does not know looks like one of `ModelProbe.run`."""
        options = ("loss", "mode", "layers", "keep", "functionals", "attention", "isolate", "kwargs")
        for name in self.kwargs:
            if f"unexpected keyword argument '{name}'" in str(error) and (near := nearest(name, options, n=1)):
                error.add_note(f"{name}= went to the model: is run's own {near[0]}= meant?")

    def _step(self, move: noise.Perturbation | None = None) -> None:
        __tracebackhide__ = True
        if self.loss is None:
            self._forward(move)
        elif move is None or move.far:
            self._loss(move).backward()
        else:  # for gradients it is too little
            with torch.enable_grad():
                self._forward(move)

    def _loss(self, move: noise.Perturbation | None = None) -> torch.Tensor:
        __tracebackhide__ = True
        with torch.enable_grad():
            output = self._forward(move)
            if callable(self.loss):
                return _check_loss(self.loss(output))
            loss = random_loss(output, seed=self.seed)
            if loss is None:
                raise UsageError(
                    'loss="random" needs a floating output that requires grad, and there is none: is the model frozen, '
                    "or its output detached?"
                )
            return loss

    def _with_origins(self, record: Record) -> Record:
        """Look up the operation where something non-finite began, by running once more."""
        __tracebackhide__ = True
        forward, backward = _nonfinite(record)
        if not (forward or backward):
            return record
        with self._prepared():
            if forward:
                return dataclasses.replace(record, origin=find_origin(self._forward))
            return dataclasses.replace(record, gradient_origin=find_gradient_origin(self._loss))


def _contexts(device: torch.device) -> Callable[[], list[Any]]:
    """Return a function that makes again what is active now: grad mode and autocast."""
    grad = torch.is_grad_enabled()
    kinds = [kind for kind in dict.fromkeys((device.type, "cpu")) if torch.amp.is_autocast_available(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    def again() -> list[Any]:
        return [
            torch.set_grad_enabled(grad),
            *(torch.autocast(kind, dtype=dtype, enabled=enabled) for kind, dtype, enabled in casts),
        ]

    return again


def _responses(record: Record) -> dict[Key, IsolatedResponse]:
    """Return the responses of a record of one forward."""
    return {(layer.name, call.index): call.response for layer, call in record.calls if call.response is not None}


def _with_responses(record: Record, found: Mapping[_Place, IsolatedResponse]) -> Record:
    def layer(one: Layer) -> Layer:
        places = ((call, (call.root, call.root_training, one.name, call.index)) for call in one.calls)
        calls = (dataclasses.replace(call, response=found.get(place)) for call, place in places)
        return dataclasses.replace(one, calls=tuple(calls))

    return dataclasses.replace(record, layers={name: layer(one) for name, one in record.layers.items()})


def _of_one_forward(record: Record, found: Mapping[Key, IsolatedResponse]) -> Record:
    places = {(call.root, call.root_training, layer.name, call.index) for layer, call in record.calls}
    return _with_responses(record, {place: found[place[2:]] for place in places if place[2:] in found})


def _modules(record: Record) -> list[str]:
    """Return the layers that are modules, which can be called."""
    return [name for name, layer in record.layers.items() if not layer.functional]


def _noted(record: Record, note: str) -> Record:
    return record if note in record.notes else dataclasses.replace(record, notes=(*record.notes, note))


def _nonfinite(record: Record) -> tuple[bool, bool]:
    """Return whether an activation, and whether a gradient, is not finite."""
    values = [value for layer in record.layers.values() for _, value in (*layer.inputs, *layer.outputs)]
    gradients = [value.backward for value in values]
    gradients += [p.gradient for layer in record.layers.values() for p in layer.parameters]

    def bad(reading: Reading | None) -> bool:
        return reading is not None and reading.statistics is not None and reading.statistics.nonfinite > 0

    return any(bad(value.forward) for value in values), any(map(bad, gradients))


def _sizes(shape: Iterable[int | Sequence[int]]) -> list[int]:
    sizes = [n for size in shape for n in (size if isinstance(size, (tuple, list)) else [size])]
    if not all(isinstance(n, int) for n in sizes):
        raise UsageError(f"a shape is integers, randn(2, 3) or randn((2, 3)); got {tuple(shape)!r}")
    return cast("list[int]", sizes)


def _check_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise UsageError(f"loss(output) returns a scalar tensor; got {type(loss).__name__}")
    if loss.numel() != 1:
        raise UsageError(
            f"loss(output) returned a tensor of shape {tuple(loss.shape)}: reduce it to a scalar, with .mean() say"
        )
    if loss.is_complex():
        raise UsageError("loss(output) is complex, which has no gradient: take .abs() or .real of it")
    if not loss.requires_grad:
        raise UsageError(
            "loss(output) has no gradient: it was detached, computed under no_grad, or every parameter is frozen"
        )
    return loss


def _loss_name(loss: Loss | None) -> str | None:
    if loss is None or isinstance(loss, str):
        return loss
    return getattr(loss, "__name__", type(loss).__name__)


def _device(device: str | torch.device) -> torch.device:
    """Return the device; UsageError where torch does not know it or cannot reach it."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].partition(",")[0]
        raise UsageError(f"device {str(device)!r} cannot be used here: {reason}") from None
    return found


def _same_device(a: torch.device, b: torch.device) -> bool:
    """Whether two devices are one: ``cuda`` means any of them, by name."""
    return a.type == b.type and (b.index is None or a.index == b.index)


def _is_empty(selector: Selector) -> bool:
    return isinstance(selector, (tuple, list)) and not selector
