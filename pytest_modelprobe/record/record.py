"""Records: everything that was seen of a model, in plain numbers.

Nothing in a record refers to a module or a tensor, so it can be stored, sent to another process, merged and compared
without torch. What runs its model again is therefore kept beside it, in `_LIVE_RUNS`, and what shows it as a page is
found by its name, `PAGES`, when it is shown.
"""

from __future__ import annotations

import dataclasses
import importlib
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

from pytest_modelprobe import extension
from pytest_modelprobe.exceptions import UnknownLayerError, UsageError
from pytest_modelprobe.text import count

from . import codec
from .codec import decode, encode
from .layer import HALF, Call, Layer, Parameter, Plain, Profile
from .selection import Selector, selected
from .tensor_statistics import is_read
from .text import record_text, unknown_layer

SCHEMA = 2
"""Number of the form of `Record.to_dict`. A record with another number is refused."""

PAGES = "pytest_modelprobe.report.html"
"""The name of the module that shows a record: `record_page` there returns it as text, and `display` shows it in a
notebook. Nothing here imports it, because it stands above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The torch operation that made the first non-finite value."""

    name: str
    """The function as one would call it: ``torch.log``."""
    location: str | None = None
    """File and line in the model's source: ``model.py:42``."""
    detail: str = ""
    """A fact about its inputs, such as ``input min -0.3``."""

    def __str__(self) -> str:
        where = f" at {self.location}" if self.location else ""
        return f"{self.name}{where}" + (f", {self.detail}" if self.detail else "")


GIVEN = Operation(name="given")
"""The origin of what no operation made: of a constant, as in ``masked_fill(mask, -inf)``, a buffer or an input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """A group of parameters of an optimizer as it was when it stepped. `Parameter.group` says which are in it."""

    optimizer: str
    """Class name of the optimizer."""
    options: Mapping[str, Plain] = field(default_factory=dict)
    """Its hyperparameters, such as ``lr``. A tuple is recorded as text: ``betas`` is ``"(0.9, 0.999)"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What optimizers did while a model was watched. All fields are counts, which add up over watches."""

    steps: int = 0
    """Steps of optimizers that have a parameter of the model."""
    others: int = 0
    """Steps of optimizers that have no parameter of the model."""
    lookalikes: int = 0
    """How many of the ``others`` have parameters of the same shapes as the model: they may hold those of a copy."""
    optimizers: int = 0
    """Number of optimizers that took the ``steps``."""
    passes: int = 0
    """Backward passes that reached a parameter."""
    stale: int = 0
    """Steps whose gradients still contained those of an earlier step of the same optimizer."""
    mixed: int = 0
    """Steps with gradients from backward passes both before and after a step of another optimizer."""
    accumulated: int = 0
    """Steps with gradients of several forwards in training mode and several backward passes."""
    evaluating: int = 0
    """Steps with gradients of a forward in evaluation mode."""
    idle: int = 0
    """Steps before which a forward in training mode ran without gradients, although none did before other steps of the
    same optimizer. One more if such a forward ran after the last step."""
    emptied: int = 0
    """Steps before which all gradients of the optimizer were set to None or zero after they had arrived.

    Beside the CPU, zeros are looked for in the steps that are kept alone.
    """
    rescheduled: int = 0
    """Steps between whose backward passes a hyperparameter of the optimizer changed: its learning rate, weight decay,
    momentum or betas. What the first step of an optimizer had is not known."""
    switched: int = 0
    """Steps with gradients of forwards of the same layer in both modes, training and evaluation."""
    discarded: int = 0
    """How often gradients were reset before any step was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesBefore:
    """What has another name now than when another record was made."""

    layers: Mapping[str, str] = field(default_factory=dict)
    """Current name of a layer → its name before."""
    paths: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Current name of a layer → current path → path before: paths of inputs, outputs and parameters."""


class LiveRun(Protocol):
    """Runs the model of a record again."""

    def isolated(
        self,
        record: Record,
        like: Record | None = None,
        names: NamesBefore | None = None,
        only: Collection[str] | None = None,
        *,
        within: Callable[[tuple[str, int]], AbstractContextManager[object]] | None = None,
        observer: Any = None,
    ) -> Record:
        """Fill in each call's `IsolatedResponse`, to synthetic tensors made as in the responses of ``like``.

        Args:
            record: The record to fill in.
            like: A record with the same names of layers, or `None` if there is nothing to compare with.
            names: What had another name when ``like`` was made.
            only: Names of the layers to run. By default all are run.
            within: Takes the layer and the index of a call, and returns a context in which it runs, in float64.
            observer: Sees the tensors of the calls: a ``runs.isolation.CallObserver``.
        """

    def again(self, record: Record, within: Callable[[Any], AbstractContextManager[object]]) -> None:
        """Run the forward once more, if it can be, in a context that ``within`` makes for the model."""

    def measured(self, record: Record, like: Record | None = None) -> Record:
        """Fill in the noise of each reading.

        Given ``like``, as for `isolated`, each response and its noise are filled in too, as they are written: plain
        arguments are those of the run instead of those of ``like``.
        """

    def repeats(self, record: Record) -> bool:
        """Return whether the same numbers come out once more. True where that cannot be tried."""

    def varied(self, record: Record) -> Record | None:
        """Return the record of the same run with other random numbers, or `None` if it cannot be repeated.

        Small random numbers stand in the place of parameters that are all zero.
        """


_LIVE_RUNS: dict[int, LiveRun] = {}
"""The live run of each record, by the record's id, as long as the record lives. Not an attribute: it refers to the
model and its inputs, and a record must not keep these alive or be sent with them."""


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, repr=False)
class Record:
    """Everything that was seen of a model: layers, their calls, the numbers of each value.

    >>> from pytest_modelprobe.record import Reading, Statistics, Value
    >>> call = Call(
    ...     root="fc",
    ...     root_training=False,
    ...     index=0,
    ...     outputs=(
    ...         Value(
    ...             path="output",
    ...             shape=(4, 2),
    ...             dtype="float32",
    ...             device="cpu",
    ...             forward=Reading(statistics=Statistics(count=8, mean=0.5)),
    ...         ),
    ...     ),
    ... )
    >>> record = Record(model="Net", layers={"fc": Layer(name="fc", type="Linear", calls=(call,))}, forwards=1)
    >>> record
    <Record of Net: 1 layer, 1 forward, 0 backwards>
    >>> record["fc"].output.shape, record["fc"].output.statistics.mean
    ((4, 2), 0.5)
    """

    model: str
    """Class name of the model."""
    layers: Mapping[str, Layer] = field(default_factory=dict)
    """By name, in the order of ``named_modules()``."""
    forwards: int = 0
    """Number of forwards merged."""
    backwards: int = 0
    """Number of backward passes (graph tasks) that reached a watched layer."""
    device: str = "cpu"
    seed: int | None = None
    loss: str | None = None
    """The loss of a ``run``: ``random``, or a function's name. `None` if there was no backward."""
    notes: tuple[str, ...] = ()
    """Remarks on what a reader has to know, such as wrappers that were skipped or values without numbers."""
    origin: Operation | None = None
    """The operation that made the first non-finite value of the forward, or `GIVEN`, if a ``run`` looked for it."""
    gradient_origin: Operation | None = None
    """The operation that made the first NaN of the backward, if a ``run`` looked for it."""
    step: int | None = None
    """Number of the step of training, from 0, whose forwards these are. `None` if they are not those of one step."""
    optimizers: tuple[OptimizerGroup, ...] = ()
    """In the record of a step, the groups of the optimizers that took it, in the order in which they stepped."""
    applied: str | None = None
    """In the record of a step, what became of the gradients on their way to the optimizer: ``as they arrived``,
    ``reset``, ``scaled by 0.01``, ``others``. `None` if it is not known."""
    training: Training | None = None
    """In the record of all forwards of a watch, what optimizers did. `None` if none stepped. Of several ranks, each
    count is the largest."""
    profile: Profile | None = field(default=None, compare=False)
    """What each layer costs, with ``profile=True``. It is never compared, and is not in snapshots."""
    noise: str | None = None
    """It is ``measured`` or ``not repeatable``, or `None` if noise was not measured."""
    ranks: int | None = field(default=None, compare=False)
    """Number of ranks whose records were merged. `None` if this is the record of one process."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of torch and the like. They are stored and never compared."""

    @property
    def live_run(self) -> LiveRun | None:
        """What runs the model of the record again, or `None`. It is kept elsewhere: a record refers to no model."""
        return _LIVE_RUNS.get(id(self))

    def __getitem__(self, layer: str) -> Layer:
        if layer not in self.layers:
            raise UnknownLayerError(unknown_layer(self, layer))
        return self.layers[layer]

    def __contains__(self, layer: object) -> bool:
        return layer in self.layers

    def __str__(self) -> str:
        return record_text(self)

    def table(self, layers: Selector = "**") -> str:
        """Return what ``print(record)`` shows, without leaving out rows.

        Args:
            layers: Which layers to show, see the documentation of ``layers=``. By default these are all that were
                called, in order of execution, without containers that return the output of a layer inside them. Then
                come those that were not called and have parameters.

        Raises:
            SelectionError: The selector matches no layer.

        >>> layer = Layer(name="fc", type="torch.nn.modules.linear.Linear")
        >>> print(Record(model="Net", layers={"fc": layer}).table("fc"))
        Net: 1 layer, 0 parameters
        <BLANKLINE>
        layer   type     parameters
        fc      Linear            -
        """
        names = None if layers == "**" else [layer.name for layer in selected(self, layers)]
        return record_text(self, names, most=None)

    def to_html(self) -> str:
        """Return an HTML page that needs no network: charts and the table of layers.

        >>> Record(model="Net").to_html().startswith("<!doctype html>")
        True
        """
        return str(importlib.import_module(PAGES).record_page(self))

    def show(self) -> None:
        """Display the page of `to_html` in a notebook, and print the record elsewhere."""
        importlib.import_module(PAGES).display(self)

    def __repr__(self) -> str:
        seen = count(len(self.layers), "layer"), count(self.forwards, "forward"), count(self.backwards, "backward")
        return f"<Record of {self.model}: {', '.join(seen)}>"

    @property
    def parameters(self) -> list[Parameter]:
        """Every parameter, by layer."""
        return [parameter for layer in self.layers.values() for parameter in layer.parameters]

    @property
    def calls(self) -> list[tuple[Layer, Call]]:
        """Every call with its layer, in order of execution (by start)."""
        pairs = [(layer, call) for layer in self.layers.values() for call in layer.calls]
        return sorted(pairs, key=lambda pair: pair[1].started)

    if TYPE_CHECKING:  # of an extra

        @staticmethod
        def merge(records: Sequence[Record], *, mean_loss: bool = True) -> Record: ...  # noqa: D102

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and strings that strict JSON can hold.

        >>> Record(model="Net", forwards=1).to_dict()
        {'schema': 2, 'model': 'Net', 'forwards': 1}
        """
        return {"schema": SCHEMA, **encode(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """Return the record that `to_dict` described.

        Raises:
            ValueError: The data has another schema, or is not that of a record.

        >>> Record.from_dict({"schema": 2, "model": "Net"})
        <Record of Net: 0 layers, 0 forwards, 0 backwards>
        """
        found: object = data.get("schema") if isinstance(data, dict) else type(data).__name__
        if found != SCHEMA:
            raise ValueError(f"not a record of schema {SCHEMA}: found {found!r}")
        try:
            return cast(Record, decode(cls, {k: v for k, v in data.items() if k != "schema"}))
        except TypeError as error:  # a required field is missing
            raise ValueError(f"not a record: {error}") from error

    def save(self, path: str | PathLike[str]) -> None:
        """Write the record into a file, which `load` reads in another process or on another machine.

        The file is strict JSON, compressed if the name ends in ``.gz``. It replaces an old file only when it is
        complete. The model and its inputs are not in it: see `load`. Its size grows with the number
        of layers and not with theirs: a forward of GPT-2 with 12 blocks, 164 layers in all, takes 1.5 MB, compressed
        0.35 MB. Of a run in half precision, the noise is measured first and each layer is called alone in float32, as
        else a later comparison could not tell a change from rounding.

        Args:
            path: The file, such as ``"trained.json.gz"``. Its folder is made.

        Raises:
            UsageError: The file cannot be written.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Record(model="Net", forwards=1).save(f"{folder}/net.json")
        ...     Record.load(f"{folder}/net.json") == Record(model="Net", forwards=1)
        True
        """
        record, live_run = self, self.live_run
        if live_run is not None and self.noise is None and is_narrow(self):
            record = live_run.measured(self, self)
        codec.write(Path(path), record.to_dict())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Record:
        """Return the record that `save` wrote: equal to the saved one but for what it measured of half precision.

        It has no `live_run`, because the model is elsewhere. So no noise can be measured and no layer can be called
        alone, but for what `save` measured of half precision: `assert_same_behavior` compares with fixed tolerances,
        and names the first layer whose numbers differ.

        Args:
            path: The file.

        Raises:
            UsageError: There is no such file, it is cut short or no record, or another version wrote it.
        """
        where, data = Path(path), codec.read(Path(path))
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise UsageError(
                f"{where} is no record that this version reads ({error}): give a file that record.save wrote, upgrade "
                "pytest-modelprobe here, or save the record again"
            ) from None


extension.attach(Record, "record")


def has_numbers(record: Record) -> bool:
    """Whether a record has numbers of values, or isolated responses. Numbers of parameters alone do not count.

    >>> has_numbers(Record(model="Net"))
    False
    """
    return any(
        call.response is not None
        or any(is_read(r) for v in (*call.inputs, *call.outputs) for r in (v.forward, v.backward) if r is not None)
        for _, call in record.calls
    )


def is_narrow(record: Record) -> bool:
    """Whether some of a run is in half precision.

    >>> is_narrow(Record(model="Net"))
    False
    """
    return any(
        call.autocast in HALF or any(value.dtype in HALF for value in (*call.inputs, *call.outputs))
        for _, call in record.calls
    )


def with_live_run(record: Record, live_run: LiveRun) -> Record:
    """Return the record, with ``live_run`` as its `Record.live_run` as long as it lives."""
    # Ids are used again once an object is gone, so the entry has to go with its record. At the end of the process there
    # is nothing to clean up.
    if record.live_run is None:
        weakref.finalize(record, _LIVE_RUNS.pop, id(record), None).atexit = False
    _LIVE_RUNS[id(record)] = live_run
    return record


def with_applied_gradients(record: Record) -> Record:
    """Return the record of a step with the gradients of parameters as the optimizer had them, and any other as it is.

    >>> with_applied_gradients(Record(model="Net"))
    <Record of Net: 0 layers, 0 forwards, 0 backwards>
    """
    if record.step is None:
        return record

    def layer(one: Layer) -> Layer:
        own = (dataclasses.replace(p, gradient=p.applied or p.gradient, applied=None) for p in one.parameters)
        return dataclasses.replace(one, parameters=tuple(own))

    applied = dataclasses.replace(record, layers={name: layer(one) for name, one in record.layers.items()})
    return applied if record.live_run is None else with_live_run(applied, record.live_run)


class NamedRecord(NamedTuple):
    """A run or watch of a test."""

    name: str
    kind: Literal["run", "watch"]
    record: Record | None
    """The record, or `None` if it could not be made."""
    error: str = ""
    """Why the record could not be made."""
    steps: Sequence[Record] = ()
    """The records of the steps of training, if it is a watch that keeps several."""
    forwards: str = ""
    """How many forwards of a watch are part of steps and of evaluations, if a step was taken."""
