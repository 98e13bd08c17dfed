"""`ModelProbe`: runs and watches models. Works with and without pytest.

The probe gives all runs one device and one seed, and keeps the newest of them so that a snapshot can run them again.
The fixture only makes one; `runs` has the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from . import extension, interventions, runs
from .exceptions import NothingObservedError, UsageError
from .models import check_supported, initialization, seeding, version
from .record import Record, Selector, with_live_run
from .runs import (
    LiveRunOfRun,
    Loss,
    Mode,
    Options,
    Requests,
    Run,
    Watch,
    architecture,
    check_loss,
    is_same_device,
)

if TYPE_CHECKING:
    from .extras.ablation import ablations as _ablations
    from .extras.pictures import drawing as _drawing
    from .extras.ports import precision as _precision
    from .extras.ranks import merging as _exchange

__all__ = ["Loss", "Mode", "ModelProbe", "Watch"]

M = TypeVar("M", bound=nn.Module)

_MODELS = 2  # kept alive for `Record.live_run` if the test keeps none: run(build(Net), x) == snapshot
_FIGURES = 8
_REMEMBERED = 8  # newest runs and watches, whose inputs are kept for `Record.live_run`
_FORGOTTEN = (
    f"the probe of the record is closed or gone, or made {_REMEMBERED} runs since: compare the record before that"
)


Checked: TypeAlias = tuple[str, int, str]
"""A model that a check ran, the number of its layers, and the verdict."""


class Recorder(Protocol):
    """Is told of all that a probe records."""

    def recorded(self, kind: str, record: Record, model: nn.Module) -> None:
        """Take the record of a ``run`` or an ``architecture``."""

    def watched(self, watch: Watch) -> None:
        """Take a watch, which has just begun."""


class Built(NamedTuple):
    """What made a model."""

    factory: Callable[[], nn.Module]
    versions: dict[str, int | None]
    """How often each parameter and buffer was written to, when it was made."""


class ModelProbe:
    """Runs and watches models on a device with a seed; the fixture ``modelprobe`` is one.

    Args:
        device: Device of runs and generated inputs: ``"cpu"``, ``"cuda"``, a `torch.device`.
        seed: Seed of all random numbers of the probe.
        device_required: Whether to reject watches of models on other devices. Set if the user named the device.
        histograms: The default of the option of `run` and `watch`. Set if a report is asked for.
        recorder: Is told of all that is recorded.

    >>> from torch import nn
    >>> with ModelProbe(seed=0) as probe:
    ...     model = probe.build(lambda: nn.Linear(8, 2))
    ...     record = probe.run(model, probe.randn(4, 8), loss=lambda out: out.pow(2).mean())
    >>> record.layers["(root)"].calls[0].outputs[0].shape, record.backwards
    ((4, 2), 1)
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        seed: int = 0,
        *,
        device_required: bool = False,
        histograms: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        if type(seed) is not int:
            raise UsageError(f"a seed is an integer; got {seed!r}")
        try:
            self.device = torch.device(device)
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0].partition(",")[0]
            raise UsageError(f"device {str(device)!r} cannot be used here: {reason}") from None
        self.seed = seed
        self.kept: Mapping[str, list[Any]] = {}
        """Outputs of the layers in ``keep=`` of the newest `run`."""
        self.built: WeakKeyDictionary[nn.Module, Built] = WeakKeyDictionary()
        """What made each model of `build`, while the model is alive."""
        self._device_required = device_required
        self._histograms = histograms
        self._recorder = recorder
        self._sources: deque[tuple[str, Watch | Record]] = deque(maxlen=_REMEMBERED)
        self._seen = 0
        self._reported = 0
        self._checked: list[Checked] = []
        self.shows_layers = False
        """Whether the summary shows the table of a run: then standard checks make a run too."""
        self._open: list[Watch] = []
        self._runs: deque[Run] = deque(maxlen=_REMEMBERED)
        self._models: deque[nn.Module] = deque(maxlen=_MODELS)
        self.figures: deque[Callable[[], dict[str, str] | None]] = deque(maxlen=_FIGURES)
        """What draws the newest figures; None where that is not possible here."""

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
        profile: bool = False,
        isolate: bool = True,
        histograms: bool | None = None,
        tokens: Requests | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **model_kwargs: Any,
    ) -> Record:
        """Run the model once on the device, with a backward if there is a loss, and return the record.

        The run starts without gradients, with the seed of the probe, on copies of the inputs. Afterwards parameters,
        buffers, gradients, mode, device, random states, the settings of the process that the documentation names, and
        everything that attributes of the model refer to are restored. The notes of the record name what cannot be
        restored.

        Args:
            model: The model.
            *args: Its positional arguments; tensors in them are copied to the device.
            loss: A function from the output to a scalar, or ``"random"``: a fixed random projection of every
                floating-point output except caches. Unlike a sum, it is not constant behind a normalization. By default
                there is no backward.
            mode: ``"train"`` or ``"eval"``. By default the model stays in its own mode.
            layers: Which layers to record.
            keep: Which layers' output tensors to keep, in `kept`.
            functionals: Whether to record functional calls (``F.relu``) as layers too.
            attention: Whether to record attention weights, for `assert_attention_mask` and the like. Weights of fused
                attention are recomputed.
            profile: Whether to measure what each layer costs, in `Record.profile`.
            isolate: Whether a snapshot of the record may also call each layer alone, on synthetic inputs, to find whose
                own code changed. The run itself takes no longer.
            histograms: Whether to record the histogram of each value and gradient, in `Reading.histogram`. By
                default they are recorded if a report of the run of pytest is asked for.
            tokens: Which tokens there are, for a comparison with a model that has them in another layout: a mask, as of
                padding, or the lengths of the requests that are packed in one row: a list, or a dict of the number of a
                request → its length where the order is another. Of a value with a place for each token the record has
                the numbers of these.
            kwargs: Keyword arguments for the model whose names are options of `run`.
            **model_kwargs: Keyword arguments for the model.

        Raises:
            UnsupportedModelError: No module, or one that cannot be probed.
            SelectionError: ``layers`` or ``keep`` matches nothing.
            UsageError: The loss is not scalar or has no gradient; ``mode`` is neither train nor eval; no value has a
                place for each of the ``tokens``.

        >>> from torch import nn
        >>> probe = ModelProbe()
        >>> record = probe.run(nn.Linear(3, 2), torch.ones(5, 3), loss="random")
        >>> record.layers["(root)"].parameters[0].gradient.statistics.count
        6
        """
        __tracebackhide__ = True
        check_supported(model)
        check_mode(mode)
        check_loss(loss)
        options = Options(
            layers=layers,
            keep=keep,
            functionals=functionals,
            attention=attention,
            profile=profile,
            histograms=self._histograms if histograms is None else histograms,
            tokens=tokens,
        )
        all_kwargs = {**(kwargs or {}), **model_kwargs}
        run = Run(model, args, all_kwargs, options, loss, mode, device=self.device, seed=self.seed, isolate=isolate)
        record, self.kept = run.record()
        with_live_run(record, LiveRunOfRun(run, _FORGOTTEN))
        self._runs.append(run)
        self._models.append(model)
        self._remember(record.model, record)
        if self._recorder is not None:
            self._recorder.recorded("run", record, model)
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
        profile: bool = False,
        isolate: bool = True,
        histograms: bool | None = None,
        steps: int = 1,
        tokens: Requests | None = None,
    ) -> Watch:
        """Observe the model until the watch or the probe is closed.

        Args:
            model: The model.
            layers: Which layers to record.
            name: Name in messages; the class of the model by default.
            keep: Which layers' output tensors of the newest forward to keep, in `Watch.kept`.
            functionals: As in `run`.
            attention: As in `run`.
            profile: As in `run`.
            isolate: As in `run`. This copies the inputs of the first forwards.
            histograms: As in `run`.
            steps: How many steps of training to keep in `Watch.steps`.
            tokens: As in `run`; those of each forward.

        Raises:
            UnsupportedModelError: No module, or one that cannot be probed.
            SelectionError: ``layers`` or ``keep`` matches nothing.
            UsageError: The model is not on the required device, or ``steps`` is no number of steps.

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
            profile=profile,
            isolate=isolate,
            histograms=self._histograms if histograms is None else histograms,
            steps=steps,
            tokens=tokens,
            seed=self.seed,
        )
        self._open = [other for other in self._open if not other.closed]
        self._open.append(watch)
        self._remember(watch.name, watch)
        if self._recorder is not None:
            self._recorder.watched(watch)
        return watch

    intervene = staticmethod(interventions.intervene)
    """`pytest_modelprobe.intervene`, at hand in a test."""

    if TYPE_CHECKING:  # of extras
        ablation = _ablations.ablation_of_probe
        feature_maps = _drawing.feature_maps
        grad_cam = _drawing.grad_cam
        plot_distributions = _drawing.plot_distributions
        plot_gradients = _drawing.plot_gradients
        merged = _exchange.merged_by_probe
        precision = _precision.precision_of

    def architecture(self, model: nn.Module, /, *args: Any, compiled: bool = False, **kwargs: Any) -> Record:
        """Return the structure of a model without computing: layers, parameters, and with inputs the shapes.

        With inputs, one forward runs on fake tensors, which have shapes but no contents; the model may be on the meta
        device. If this fails, the record has the structure alone and a note with the reason.

        >>> from torch import nn
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(10_000, 20_000), nn.ReLU())
        >>> record = ModelProbe().architecture(model, torch.empty(4, 10_000))
        >>> record.layers["1"].calls[0].outputs[0].shape
        (4, 20000)

        Args:
            model: The model.
            *args: Its positional arguments.
            compiled: Whether to run a forward that is compiled too, and to say where it breaks the graph. The first
                layer with each code has the attribute ``graph_breaks``: ``"none"``, or function, line and reason.
            **kwargs: Keyword arguments for the model.
        """
        record = architecture(model, *args, **kwargs)
        if compiled:
            record = runs.with_graph_breaks(record, model, args, kwargs)
        self._remember(record.model, record)
        if self._recorder is not None:
            self._recorder.recorded("architecture", record, model)
        return record

    def take_figures(self) -> list[dict[str, str]]:
        """Return the newest figures, each with its title, media type and base64 data, and forget them."""
        drawn = [draw() for draw in self.figures]
        self.figures.clear()
        return [figure for figure in drawn if figure is not None]

    # --- models and inputs from the seed --------------------------------------------------------------------------

    def build(self, factory: Callable[[], M], *, rename: Mapping[str, str] | None = None) -> M:
        """Return the model of ``factory`` on the device, each weight seeded by its name.

        The model does not depend on the order of tests, and an added layer does not change the weights of others.

        >>> from torch import nn
        >>> a = ModelProbe().build(lambda: nn.Sequential(nn.Linear(2, 2)))
        >>> b = ModelProbe().build(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        >>> torch.equal(a[0].weight, b[0].weight)
        True

        Args:
            factory: Returns the model; called once.
            rename: Glob of layers → glob of their former names, by which their weights are drawn.
        """
        model = initialization.build(factory, seed=self.seed, rename=rename)
        if not any(p.is_meta for p in nn.Module.parameters(model)):
            model = model.to(self.device)
        tensors = (*model.named_parameters(), *model.named_buffers())
        self.built[model] = Built(factory, {name: version(tensor) for name, tensor in tensors})
        return model

    def randn(self, *shape: int | Sequence[int], name: str = "x") -> torch.Tensor:
        """Return normally distributed numbers on the device, drawn from ``name``, the shape and the seed.

        Two calls with one name and shape give the same numbers: name the inputs of a model that takes several.

        >>> probe = ModelProbe()
        >>> torch.equal(probe.randn(2, 3), probe.randn((2, 3))), torch.equal(probe.randn(2), probe.randn(2, name="y"))
        (True, False)
        """
        return seeding.randn(_sizes(shape), seed=self.seed, name=name, device=self.device)

    def randint(self, low: int, high: int, shape: int | Sequence[int], name: str = "ids") -> torch.Tensor:
        """Return integers from ``low`` to ``high`` - 1 on the device, drawn from ``name``, the shape and the seed.

        Two calls with one name and shape give the same numbers, as with `randn`.

        >>> ids = ModelProbe().randint(0, 100, (2, 16))
        >>> ids.shape, ids.dtype
        (torch.Size([2, 16]), torch.int64)
        """
        return seeding.randint(low, high, _sizes([shape]), seed=self.seed, name=name, device=self.device)

    # --- results --------------------------------------------------------------------------------------------------

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

    @property
    def notes(self) -> list[str]:
        """The notes of the runs and watches, each once."""
        return list(dict.fromkeys(note for _, source in self._sources for note in source.notes))

    def take_unreported(self) -> list[tuple[str, Watch | Record]]:
        """Return the newest runs and watches that no earlier call returned, each with its name."""
        new = list(self._sources)[-(self._seen - self._reported) :] if self._seen > self._reported else []
        self._reported = self._seen
        return new

    def note_check(self, model: str, layers: int, verdict: str) -> None:
        """Note what a check found of a model, for the summary."""
        self._checked.append((model, layers, verdict))

    def take_checked(self) -> list[Checked]:
        """Return what was noted since the last call."""
        taken, self._checked = self._checked, []
        return taken

    def close(self) -> None:
        """Close all watches, and release the models and inputs of runs. Safe to repeat."""
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
        elsewhere = {str(p.device) for p in nn.Module.parameters(model) if not is_same_device(p.device, self.device)}
        if elsewhere:
            raise UsageError(
                f"{self.device} was asked for, but the model is on {', '.join(sorted(elsewhere))}, and a watch does "
                "not move it: call model.to(modelprobe.device) first"
            )


extension.attach(ModelProbe, "probe")


def check_mode(mode: object) -> None:
    """Raise `UsageError` for a mode that is none."""
    if mode not in (None, "train", "eval"):
        raise UsageError(f"mode is 'train', 'eval' or None for the model's own; got {mode!r}")


def _sizes(shape: Iterable[int | Sequence[int]]) -> list[int]:
    sizes = [n for size in shape for n in (size if isinstance(size, (tuple, list)) else [size])]
    if not all(isinstance(n, int) for n in sizes):
        raise UsageError(f"a shape is integers, randn(2, 3) or randn((2, 3)); got {tuple(shape)!r}")
    return cast("list[int]", sizes)
