"""Frozen records: what a run of a model left behind, in plain numbers.

Everything here is a value. Nothing refers to a module or a tensor, so a record can be stored, sent to another
process, merged and compared without torch. What shows a record is imported when one is shown.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from pytest_modelprobe.exceptions import NothingObservedError, UnknownLayerError

if TYPE_CHECKING:
    from .selection import Selector

SCHEMA = 1
ROOT = "(root)"
NOT_DEFAULT = ", not the default"
"""Stands behind an argument that is False, as most are where they are not given, of a layer that takes another one."""

Plain = None | bool | int | float | str
"""What is recorded exactly: an argument or an attribute that is no tensor."""

Dimension = int | tuple[int, int]
"""One size, or the smallest and the largest where it varied between forwards."""


class _Numbers:
    """What holds floats: equal where all fields are equal, a NaN to a NaN."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        values = _values_of(cast(Any, type(self)))
        return bool(values(self) == values(other)) or _fields(self) == _fields(other)

    def __hash__(self) -> int:
        return hash(_fields(self))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Statistics(_Numbers):
    """Moments and counts of the elements of one tensor, or of several merged.

    Non-finite elements are counted apart; every other number is of the finite elements alone.
    """

    count: int
    """Elements, non-finite ones included."""
    nan: int = 0
    """Elements that are NaN."""
    posinf: int = 0
    """Elements that are +infinity."""
    neginf: int = 0
    """Elements that are -infinity."""
    zeros: int = 0
    """Elements equal to zero."""
    min: float | None = None
    """Smallest finite element; None where there is none. Complex tensors: of the magnitudes."""
    max: float | None = None
    """Largest finite element; None where there is none."""
    mean: float | None = None
    """Mean of the finite elements; None where there is none."""
    deviations: float = 0.0
    """Sum of (x - mean)² over the finite elements."""
    first_nan: int | None = None
    """Index, from 0, of the first forward in which a NaN was seen."""
    first_posinf: int | None = None
    """Index of the first forward in which +infinity was seen."""
    first_neginf: int | None = None
    """Index of the first forward in which -infinity was seen."""

    @property
    def nonfinite(self) -> int:
        """Elements that are NaN or infinite."""
        return self.nan + self.posinf + self.neginf

    @property
    def finite(self) -> int:
        """Elements that are finite."""
        return self.count - self.nonfinite

    @property
    def std(self) -> float | None:
        """Population standard deviation of the finite elements."""
        return None if self.mean is None else math.sqrt(self.deviations / self.finite)

    @property
    def rms(self) -> float | None:
        """Root of the mean square of the finite elements."""
        if self.mean is None:
            return None
        return math.hypot(math.sqrt(self.deviations / self.finite), self.mean)

    @property
    def norm(self) -> float:
        """Root of the sum of squares of the finite elements."""
        if self.mean is None:
            return 0.0
        finite = self.count - self.nan - self.posinf - self.neginf  # no other property: this one is asked for most
        return math.hypot(math.sqrt(self.deviations), self.mean * math.sqrt(finite))

    @property
    def all_zero(self) -> bool:
        """Whether there are elements and each of them is zero."""
        return 0 < self.count == self.zeros

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of both sets of elements together.

        The formula for the second moment is that of Chan, Golub and LeVeque (1979), which does not cancel.

        >>> a = Statistics(count=2, min=0.0, max=2.0, mean=1.0, deviations=2.0, zeros=1)
        >>> b = Statistics(count=2, min=4.0, max=6.0, mean=5.0, deviations=2.0)
        >>> both = a.merge(b)
        >>> both.mean, both.std, both.zeros
        (3.0, 2.23606797749979, 1)
        """
        if self.mean is None or other.mean is None:
            mean = other.mean if self.mean is None else self.mean
            deviations = self.deviations + other.deviations
        else:
            n, m = self.finite, other.finite
            delta = other.mean - self.mean
            mean = self.mean + delta * (m / (n + m))
            deviations = self.deviations + other.deviations + delta * delta * (n * m / (n + m))
        return Statistics(
            count=self.count + other.count,
            nan=self.nan + other.nan,
            posinf=self.posinf + other.posinf,
            neginf=self.neginf + other.neginf,
            zeros=self.zeros + other.zeros,
            min=_least(self.min, other.min),
            max=_greatest(self.max, other.max),
            mean=mean,
            deviations=deviations,
            first_nan=_least(self.first_nan, other.first_nan),
            first_posinf=_least(self.first_posinf, other.first_posinf),
            first_neginf=_least(self.first_neginf, other.first_neginf),
        )


if TYPE_CHECKING:

    class Numbers(Statistics):
        """`Statistics` with at least one finite element, so that each of these is a number."""

        min: float
        max: float
        mean: float
        std: float
        rms: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units(_Numbers):
    """The range of each unit (channel or feature) over everything else: batch, positions, calls."""

    axis: int
    """The axis of the units, counted from the end (-1 is the last)."""
    low: tuple[float, ...]
    """Smallest element of each unit; NaN where the unit has a NaN."""
    high: tuple[float, ...]
    """Largest element of each unit; NaN where the unit has a NaN."""

    def __len__(self) -> int:
        return len(self.low)

    @property
    def dead(self) -> int:
        """Units of which every element is zero."""
        return sum(low == high == 0 for low, high in zip(self.low, self.high, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading(_Numbers):
    """What is kept of one value in one direction."""

    tensors: int = 1
    """Tensors merged into it: 1, or one for each forward or backward pass."""
    statistics: Statistics | None = None
    units: Units | None = None
    fingerprint: tuple[float, ...] | None = None
    """Signed random projections of the elements in logical order, see `fingerprint`."""
    digest: str | None = None
    """Integers and bools: an exact hash of all elements in logical order, 16 hexadecimal digits."""
    noise: float | None = None
    """Change under harmless perturbations, relative to the norm (integers: share of elements); None: not measured."""
    reason: str | None = None
    """Why there are no statistics (a meta tensor, a sparse one...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor among the inputs or outputs of a call."""

    path: str
    """Where in the call: ``input``, ``input[1]``, ``mask``, ``output``, ``output.logits``."""
    shape: tuple[Dimension, ...]
    dtype: str
    device: str
    requires_grad: bool = False
    tensor: int = -1
    """Number of the tensor: values of one forward with the same number are the same tensor."""
    forward: Reading = field(default_factory=Reading)
    backward: Reading | None = None
    """The gradient of this value; None where none arrived."""
    backward_inner: Reading | None = None
    """The gradient in backward passes that ran inside a forward."""
    overwritten: bool = False
    """The value is a view that was overwritten in place: whether a gradient arrived cannot be known."""
    source: str | None = None
    """Inputs: the address of the recorded output it is equal to, such as ``conv1 output``."""

    @property
    def statistics(self) -> Numbers:
        """Of the value itself: ``record["fc"].output.statistics.rms``.

        `forward` has them as they are, also where there may be none.

        Raises:
            NothingObservedError: There are no numbers, or none is finite; the message says why.
        """
        return _numbers(self.forward, f"{self.path} of shape {self.shape} and dtype {self.dtype}")

    @property
    def gradient(self) -> Numbers:
        """Of the value's gradient; `backward` is None where none arrived.

        Raises:
            NothingObservedError: None arrived, it has no numbers, or none is finite; the message says why.
        """
        if self.backward is None:
            raise NothingObservedError(f"no gradient arrived at {self.path} of shape {self.shape}")
        return _numbers(self.backward, f"the gradient of {self.path} of shape {self.shape}")


def _numbers(reading: Reading, what: str) -> Numbers:
    statistics = reading.statistics
    if statistics is None:
        raise NothingObservedError(f"{what} has no statistics: {reading.reason or 'they were not recorded'}")
    if not statistics.count:
        raise NothingObservedError(f"{what} has no elements")
    if not statistics.finite:
        counts = f"{statistics.nan:,} NaN, {statistics.posinf:,} inf and {statistics.neginf:,} -inf"
        raise NothingObservedError(f"{what} has no finite element: {counts} among {statistics.count:,}")
    return cast("Numbers", statistics)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedTensor:
    """A tensor that the code of an isolated call handed to a child, or returned."""

    where: str
    """Where it went: ``attn input``, ``norm (call 2) input``, ``output``; names of children are relative."""
    passed: str | None = None
    """The synthetic tensor that it is, untouched: ``input``, ``norm output``; None: it was computed."""
    reading: Reading | None = None
    """Of what was computed: fingerprint or digest, and noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedResponse:
    """How one call's own code answers synthetic inputs and weights, its children replaced by stubs."""

    recipes: Mapping[str, str] = field(default_factory=dict)
    """How each synthetic tensor was made, by name: ``input``, ``norm output``, ``weight``. Responses compare only
    where these agree."""
    handed: tuple[EmittedTensor, ...] = ()
    """In the order in which it was handed on; what was returned comes last."""
    gradient: Reading | None = None
    """Of the gradients of all synthetic tensors together, each brought to norm 1; None: no backward."""
    without_gradient: tuple[str, ...] = ()
    """Synthetic floating tensors that no gradient reached, and what was computed of them and lets none through."""
    reason: str | None = None
    """Why the call could not be isolated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention(_Numbers):
    """The attention weights that a call computed, merged over its forwards."""

    shape: tuple[int, ...]
    """Batch, queries, keys."""
    entropy: tuple[float | None, ...]
    """Of each head: mean over the queries of the weights' entropy, as a share of the greatest, the logarithm of the
    number of keys that the query may attend to. None: no query has a choice of keys."""
    most: tuple[float, ...]
    """The largest weight of any head, for each of ``shape``; the last axis runs fastest."""
    kind: str = "attention"
    """``attention``: the weights were multiplied into values. ``probabilities``: they were not, and may be those of a
    vocabulary or a router. ``another axis``: a softmax over one axis was multiplied into values along another; there
    are no numbers of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call(_Numbers):
    """One execution of a layer within a forward, merged over the forwards of the same kind."""

    root: str
    """The layer whose outermost call was the forward."""
    root_training: bool
    """Whether that layer was in training mode. Forwards of other roots or modes are kept apart."""
    index: int
    """Which call of the layer within its forward, from 0."""
    forwards: int = 1
    """Forwards in which the layer was called that often."""
    started: int = -1
    """Position of its start among all starts and ends of calls in the newest of these forwards, from 0."""
    finished: int = -1
    """Position of its end; -1: it did not return."""
    training: bool = False
    """Mode of the layer itself during the call."""
    inputs: tuple[Value, ...] = ()
    inputs_known: bool = True
    """False where an argument is of a type that cannot be looked into."""
    outputs: tuple[Value, ...] = ()
    arguments: Mapping[str, Plain] = field(default_factory=dict)
    """Plain arguments of the call, by path."""
    attention: tuple[Attention, ...] = ()
    """Of each time that the call itself computed attention weights; seen under ``attention=True``."""
    grad_enabled: bool = True
    autocast: str | None = None
    """Dtype of the autocast that was active, or None."""
    random: str | None = None
    """Hash of the random generator's state at the start, where the call drew random numbers."""
    recomputed: int = 0
    """Recomputations of the call by activation checkpointing; they are counted nowhere else."""
    response: IsolatedResponse | None = None
    """Of the call alone, on synthetic inputs; None: not asked for, or the same as an earlier call's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter or buffer that a layer itself owns."""

    name: str
    """Name within the layer."""
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool = False
    tied_to: str | None = None
    """Full name of the parameter, earlier in the model, with which it shares its storage."""
    persistent: bool | None = None
    """Of a buffer: whether the ``state_dict`` has it; None: not known, as in files of before this was recorded."""
    reading: Reading = field(default_factory=Reading)
    """Of the values: of a `run` as they were before, of a watch as they are when the record is made, or, in that of its
    first forward, as that one left them."""
    after: Reading | None = None
    """Of the values that a `run` left, where it changed them: the running statistics of a BatchNorm."""
    gradient: Reading | None = None
    """Of the gradient in each backward pass, before it is added to ``.grad``; None where none arrived."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer(_Numbers):
    """One module, or one functional call watched under ``functionals=True``."""

    name: str
    type: str
    """Qualified name of the class, or the name of the function."""
    leaf: bool = True
    """Whether it has no child whose calls are recorded."""
    functional: bool = False
    training: bool = False
    attributes: Mapping[str, Plain] = field(default_factory=dict)
    """Every int, float, bool and str set on the module, such as ``eps``, ``p`` or ``num_heads``. A public tuple or list
    of at most 16 of them is text: ``stride`` is ``"(1, 1)"``. What a forward set is a result, and left out."""
    aliases: tuple[str, ...] = ()
    """Other names of the same module."""
    parameters: tuple[Parameter, ...] = ()
    buffers: tuple[Parameter, ...] = ()
    calls: tuple[Call, ...] = ()

    @property
    def type_name(self) -> str:
        """The class's name without its module."""
        return self.type.rpartition(".")[2]

    @property
    def label(self) -> str:
        """What a sentence calls the layer, see `label_of`."""
        return label_of(self.name, self.type_name)

    @property
    def output(self) -> Value:
        """The first output of the first call.

        Raises:
            LookupError: The layer was not called, or gave out no tensor.
        """
        for _, value in self.outputs:
            return value
        raise LookupError(f"{self.label} was {'called without a tensor as output' if self.calls else 'never called'}")

    @property
    def outputs(self) -> Iterator[tuple[Call, Value]]:
        """Every output value with its call."""
        return ((call, value) for call in self.calls for value in call.outputs)

    @property
    def inputs(self) -> Iterator[tuple[Call, Value]]:
        """Every input value with its call."""
        return ((call, value) for call in self.calls for value in call.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The torch operation in which something non-finite began."""

    name: str
    """As one would call it: ``torch.log``."""
    location: str | None = None
    """File and line in the model's source: ``model.py:42``."""
    detail: str = ""
    """What is worth knowing of its inputs: ``input min -0.3``."""

    def __str__(self) -> str:
        where = f" at {self.location}" if self.location else ""
        return f"{self.name}{where}" + (f", {self.detail}" if self.detail else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What optimizers did while a model was watched. All are counts, which add up over watches."""

    steps: int = 0
    """Steps of optimizers that have a parameter of the model."""
    others: int = 0
    """Steps of optimizers that have none."""
    lookalikes: int = 0
    """Of the others, those whose optimizer has parameters of the same shapes as the model's."""
    optimizers: int = 0
    """Optimizers that took ``steps``."""
    passes: int = 0
    """Backward passes that reached a parameter."""
    stale: int = 0
    """Steps with gradients to which those of an earlier step of the same optimizer still counted."""
    mixed: int = 0
    """Steps with gradients of backward passes before and after a step of another optimizer."""
    accumulated: int = 0
    """Steps with gradients of several forwards in training mode and several backward passes."""
    evaluating: int = 0
    """Steps with gradients of a forward in evaluation mode."""
    idle: int = 0
    """Steps before which, other than before others of the same optimizer, a forward in training mode ran without
    gradients; one more if such a forward ran after the last."""
    discarded: int = 0
    """Times that gradients were reset before any step was taken."""


class Rerun(Protocol):
    """Asks more of the run that made a record. Each answer is the record with more filled in."""

    def isolated(
        self,
        record: Record,
        like: Record | None = None,
        names: Mapping[str, str] | None = None,
        only: Collection[str] | None = None,
    ) -> Record:
        """Fill in each call's `IsolatedResponse`, to synthetic tensors made as in the responses of ``like``.

        That has the names of layers as they are here; ``names`` has those that they had when it was made, where they
        are others. ``only``: of these layers alone; None: of all.
        """

    def measured(self, record: Record) -> Record:
        """Fill in the noise of each reading and response."""


_RERUNS: dict[int, Rerun] = {}
"""How more can be asked of each record that lives, by its id."""


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, repr=False)
class Record:
    """Everything that was seen of a model: layers, their calls, the numbers of each value.

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
    """Forwards merged."""
    backwards: int = 0
    """Backward passes (graph tasks) that reached a watched layer."""
    device: str = "cpu"
    seed: int | None = None
    loss: str | None = None
    """How the loss came about in a ``run``: ``random``, a function's name, or None without backward."""
    notes: tuple[str, ...] = ()
    """What a reader should know: unwrapped wrappers, values without numbers, contexts."""
    origin: Operation | None = None
    """Where the first non-finite value of the forward began, if a ``run`` looked it up."""
    gradient_origin: Operation | None = None
    """Where the first NaN of the backward began, if a ``run`` looked it up."""
    training: Training | None = None
    """What optimizers did, in the record of all forwards of a watch; None: none stepped."""
    noise: str | None = None
    """How the noise came about: ``measured``, ``not repeatable``, or None: not measured."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of torch and the like; stored, never compared."""

    @property
    def rerun(self) -> Rerun | None:
        """How more can be asked of its run or watch. They are kept elsewhere: a record knows no model and no tensor."""
        return _RERUNS.get(id(self))

    def __getitem__(self, layer: str) -> Layer:
        if layer not in self.layers:
            from pytest_modelprobe.report.record import unknown_layer

            raise UnknownLayerError(unknown_layer(self, layer))
        return self.layers[layer]

    def __contains__(self, layer: object) -> bool:
        return layer in self.layers

    def __str__(self) -> str:
        from pytest_modelprobe.report.record import as_text

        return as_text(self)

    def table(self, layers: Selector = "**") -> str:
        """Return what ``print(record)`` shows, without leaving out rows.

        Args:
            layers: Which layers to show, see the documentation of ``layers=``. By default all that were called, in
                order of execution, less containers that give out what a layer inside them gave; then those that were
                not called and have parameters.

        Raises:
            SelectionError: The selector matches no layer.

        >>> layer = Layer(name="fc", type="torch.nn.modules.linear.Linear")
        >>> print(Record(model="Net", layers={"fc": layer}).table("fc"))
        Net: 1 layer, 0 parameters
        <BLANKLINE>
        layer   type     parameters
        fc      Linear            -
        """
        from pytest_modelprobe.assertions.sources import selected
        from pytest_modelprobe.report.record import as_text

        names = None if layers == "**" else [layer.name for layer in selected(self, layers)]
        return as_text(self, names, most=None)

    def _repr_html_(self) -> str:
        from pytest_modelprobe.report.record import as_html

        return as_html(self)

    def __repr__(self) -> str:
        seen = {"layer": len(self.layers), "forward": self.forwards, "backward": self.backwards}
        counts = (f"{n:,} {what}" + "s" * (n != 1) for what, n in seen.items())
        return f"<Record of {self.model}: {', '.join(counts)}>"

    @property
    def calls(self) -> list[tuple[Layer, Call]]:
        """Every call with its layer, in order of execution (by start)."""
        pairs = [(layer, call) for layer in self.layers.values() for call in layer.calls]
        return sorted(pairs, key=lambda pair: pair[1].started)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and strings that strict JSON can hold.

        >>> Record(model="Net", forwards=1).to_dict()
        {'schema': 1, 'model': 'Net', 'forwards': 1}
        """
        return {"schema": SCHEMA, **_encode(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """Return the record that `to_dict` described.

        Raises:
            ValueError: The data is of another schema, or no record.

        >>> Record.from_dict({"schema": 1, "model": "Net"})
        <Record of Net: 0 layers, 0 forwards, 0 backwards>
        """
        found: object = data.get("schema") if isinstance(data, dict) else type(data).__name__
        if found != SCHEMA:
            raise ValueError(f"not a record of schema {SCHEMA}: found {found!r}")
        try:
            return cast(Record, _decode(cls, {k: v for k, v in data.items() if k != "schema"}))
        except TypeError as error:  # a field without which there is no such thing is missing
            raise ValueError(f"not a record: {error}") from error


def label_of(where: str, type_name: str = "") -> str:
    """Return a layer's name, or an address that begins with it, as it stands in a sentence: a number says what it is.

    >>> label_of("1", "ReLU"), label_of("2 (call 3) output", "Linear"), label_of("1")
    ("layer '1' (ReLU)", "layer '2' (Linear) (call 3) output", "layer '1'")
    >>> label_of("fc1", "Linear"), label_of("2.fc1 output", "Linear"), label_of("0.weight")
    ('fc1', '2.fc1 output', '0.weight')
    """
    name, blank, rest = where.partition(" ")
    if not name.isdigit():
        return where
    return f"layer '{name}'{type_name and f' ({type_name})'}{blank}{rest}"


class Indexed(Protocol):
    """A call, recorded or just observed, that knows which of its layer's calls it is."""

    @property
    def index(self) -> int:
        """From 0."""


def qualified(layer: str, name: str) -> str:
    """Return the full name of what a layer owns: ``fc1.weight``, or ``weight`` where the layer is the root."""
    return name if layer == ROOT else f"{layer}.{name}"


def address(layer: str, call: Indexed, path: str) -> str:
    """Return where a value was seen, as messages say it: ``fc1 output``, ``fc1 (call 2) input``."""
    return f"{layer} (call {call.index + 1}) {path}" if call.index else f"{layer} {path}"


def has_numbers(record: Record) -> bool:
    """Whether a record is of more than structure; numbers of parameters alone are no behavior.

    >>> has_numbers(Record(model="Net"))
    False
    """
    return any(
        call.response is not None
        or any(is_read(r) for v in (*call.inputs, *call.outputs) for r in (v.forward, v.backward) if r is not None)
        for _, call in record.calls
    )


def is_read(reading: Reading) -> bool:
    """Whether there is anything in a reading to compare.

    >>> is_read(Reading(reason="a meta tensor")), is_read(Reading(digest="0"))
    (False, True)
    """
    return reading.statistics is not None or reading.fingerprint is not None or reading.digest is not None


def estimated_change(a: Sequence[float], b: Sequence[float], norm: float | None = None) -> float:
    """Return about how far ``a`` is from ``b``, relative to ``b``: ‖x - y‖ / ‖y‖ from the fingerprints of x and y.

    The estimate is off by 18 % (one sigma) for a generic difference and by 25 % for one that lies in a single column or
    is the same everywhere. It is 0 for equal fingerprints, and infinite where y alone is zero.

    Args:
        a: `Reading.fingerprint` of x.
        b: That of y.
        norm: ‖y‖, where it is known exactly; else it is estimated too. For the share of integers that differ see
            `estimated_share`.

    >>> y = tuple([0.25, -0.25] * 8)
    >>> estimated_change([1.01 * s for s in y], y)
    0.010000000000000009
    """
    distance = math.dist(a, b)
    if norm is None:
        norm = math.hypot(*b)
    if not distance:
        return 0.0
    return distance / norm if norm else math.inf


def estimated_share(a: Sequence[float], b: Sequence[float], count: int) -> float:
    """Return about which share of ``count`` integers differs, from two fingerprints; exact equality is in the digests.

    >>> y = tuple([0.25, -0.25] * 8)
    >>> estimated_share(y, y, 10), estimated_share([0.0] * 16, y, 10)
    (0.0, 0.05)
    """
    return min(1.0, math.dist(a, b) ** 2 / (2 * count)) if count else 0.0


def _fields(numbers: Any) -> tuple[Any, ...]:
    return tuple(_with_one_nan(getattr(numbers, f.name)) for f in dataclasses.fields(numbers))


@functools.cache
def _values_of(kind: type[Any]) -> Callable[[object], object]:
    return operator.attrgetter(*(field.name for field in dataclasses.fields(kind)))


def _with_one_nan(value: Any) -> Any:
    """Return the value with `math.nan` for every NaN: tuples and mappings take the same object for equal."""
    if isinstance(value, tuple):
        return tuple(map(_with_one_nan, value))
    if isinstance(value, Mapping):
        return {key: _with_one_nan(part) for key, part in value.items()}
    return math.nan if isinstance(value, float) and math.isnan(value) else value


def _least(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else min(a, b)


def _greatest(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else max(a, b)


def merge_dimensions(a: Dimension, b: Dimension) -> Dimension:
    """Return the size that covers both: the same integer, or a range.

    >>> merge_dimensions(4, 4), merge_dimensions(4, 2), merge_dimensions((2, 4), 7)
    (4, (2, 4), (2, 7))
    """
    low = min(a if isinstance(a, int) else a[0], b if isinstance(b, int) else b[0])
    high = max(a if isinstance(a, int) else a[1], b if isinstance(b, int) else b[1])
    return low if low == high else (low, high)


def with_rerun(record: Record, rerun: Rerun) -> Record:
    """Return the record, of which more can be asked from now on, as long as it lives."""
    if record.rerun is None:
        weakref.finalize(record, _RERUNS.pop, id(record), None).atexit = False
    _RERUNS[id(record)] = rerun
    return record


# --- plain dicts: one codec for all classes, driven by their fields -----------------------------------------------


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: _encode(v) for f, v in fields if v != _default(f)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}  # strict JSON has no NaN; a dict cannot be taken for a string
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _encode(v) for k, v in value.items()}
    return value


def _default(spec: dataclasses.Field[Any]) -> Any:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return spec.default


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(hint: Any, data: Any) -> Any:
    """Return what ``data`` stands for, of the type that ``hint`` names; ValueError where it is of another."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(data, dict):
        hints = _hints(cast(type, hint))
        unknown = data.keys() - hints.keys()
        if unknown:
            raise ValueError(f"{cast(type, hint).__name__} has no field {min(unknown)!r}")
        return cast(Any, hint)(**{k: _decode(hints[k], v) for k, v in data.items()})
    if origin in (types.UnionType, typing.Union):
        fitting = next((arg for arg in args if _fits(arg, data)), args[0])
        return _decode(fitting, data)
    if not _fits(hint, data):
        raise ValueError(f"{data!r} stands where {getattr(hint, '__name__', hint)} is expected")
    if origin is tuple:
        return tuple(_decode(args[0], v) for v in data)
    if origin is Mapping:
        return {k: _decode(args[1], v) for k, v in data.items()}
    return float(data["float"]) if isinstance(data, dict) else data


def _fits(hint: Any, data: Any) -> bool:
    """Whether plain data is of the outer kind that a hint encodes to."""
    origin = typing.get_origin(hint)
    if origin is tuple:
        return isinstance(data, list)
    if isinstance(data, dict):
        encoded_float = data.keys() == {"float"} and isinstance(data["float"], str)
        return encoded_float if hint is float else dataclasses.is_dataclass(hint) or origin is Mapping
    if hint is float:
        return type(data) in (int, float)
    return type(data) is (type(None) if hint is None else hint)
