"""Layers with their parameters, calls and cost, and their names as messages write them.

A layer has the parameters and buffers that its module itself owns, not those of the layers inside it. Attributes of the
module that are plain numbers or text are recorded too, so that a changed ``eps`` or ``stride`` can be named as such.

A training loop may clip gradients, unscale them, reset them too early, or replace them. The record of a step has each
gradient as it arrived and as the optimizer had it. If a gradient came in several passes, the readings of what arrived
add up as the gradient itself does, so the two can be compared. They are compared by fingerprints: these are sums, so
the fingerprint of a scaled gradient is the scaled fingerprint.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from pytest_modelprobe.exceptions import NothingObservedError
from pytest_modelprobe.text import Cell, count, significant, table

from .tensor_statistics import NanEqual, Reading, proportion, quickly_made

if TYPE_CHECKING:
    from .tensor_statistics import FiniteStatistics

# --- names and addresses ----------------------------------------------------------------------------------------------

ROOT = "(root)"
"""The name of the outermost module, which ``named_modules()`` calls the empty string."""

NOT_DEFAULT = ", not the default"
"""Suffix of an argument that is False in a call although the default of the layer is another value."""


def label_of(where: str, type_name: str = "") -> str:
    """Return a layer's name, or an address that begins with it, as it stands in a sentence.

    A name that is a number, as in `nn.Sequential`, gets quotation marks and its type.

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
    """A call, recorded or just observed."""

    @property
    def index(self) -> int:
        """Which call of its layer it is within the forward, from 0."""


def qualified(layer: str, name: str) -> str:
    """Return the full name of a parameter, buffer or child: ``fc1.weight``, or ``weight`` of the root."""
    return name if layer == ROOT else f"{layer}.{name}"


def relative_name(name: str, container: str) -> str:
    """Return a name relative to a container, as its code calls the layer.

    >>> relative_name("blocks.0.fc", "blocks.0"), relative_name("fc", "(root)")
    ('fc', 'fc')
    """
    return name if container == ROOT else name.removeprefix(f"{container}.")


def parent(name: str) -> str:
    """Return the name of the layer that holds a layer.

    >>> parent("blocks.0.fc"), parent("fc")
    ('blocks.0', '(root)')
    """
    return name.rpartition(".")[0] or ROOT


def containers(name: str) -> list[str]:
    """Return the names of the layers around one, the outermost first.

    >>> containers("blocks.0.fc")
    ['(root)', 'blocks', 'blocks.0']
    """
    parts = name.split(".")
    return [] if name == ROOT else [ROOT, *(".".join(parts[:i]) for i in range(1, len(parts)))]


def address(layer: str, call: Indexed, path: str) -> str:
    """Return where a value was seen, for messages: ``fc1 output``, ``fc1 (call 2) input``."""
    return f"{call_name(layer, call)} {path}"


def call_name(layer: str, call: Indexed) -> str:
    """Return the name of a layer, with the number of the call from the second one on: ``fc1 (call 2)``."""
    return f"{layer} (call {call.index + 1})" if call.index else layer


# --- calls ------------------------------------------------------------------------------------------------------------

Plain = None | bool | int | float | str
"""The type of an argument or attribute that is not a tensor. Its value is recorded exactly."""

Dimension = int | tuple[int, int]
"""One size, or the smallest and the largest if the size varied between forwards."""


@quickly_made
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
    """Number of the tensor. Values of one forward with the same number are the same tensor."""
    forward: Reading = field(default_factory=Reading)
    backward: Reading | None = None
    """The gradient of this value, or `None` if none arrived."""
    backward_inner: Reading | None = None
    """The gradient in backward passes that ran inside a forward."""
    overwritten: bool = False
    """Whether the value is a view that was overwritten in place. Autograd then calls no hook on it, so that it is not
    known whether a gradient arrived."""
    layout: str | None = field(default=None, compare=False)
    """What each rank has of the value.

    In a record merged over ranks it is ``batch`` if each rank had a part of the samples, or ``replicated`` if all had
    the same. Under tensor parallelism it says what this rank has: ``replicated``, ``shard(1)`` for a part along that
    dimension, or ``partial`` for a term of the sum. It is `None` if no DTensor tells.
    """
    source: str | None = None
    """For an input, the address of the recorded output that it is equal to, such as ``conv1 output``. For an input of a
    forward, the output of an earlier forward that it is, such as a state that a loop hands on."""

    @property
    def statistics(self) -> FiniteStatistics:
        """The statistics of the value itself, such as ``record["fc"].output.statistics.rms``.

        Each is a number. `forward` has the same statistics, and there they may be missing.

        Raises:
            NothingObservedError: There are no numbers, or none is finite. The message says why.
        """
        return _numbers(self.forward, f"{self.path} of shape {self.shape} and dtype {self.dtype}")

    @property
    def gradient(self) -> FiniteStatistics:
        """The statistics of the value's gradient. `backward` is `None` if no gradient arrived.

        Raises:
            NothingObservedError: No gradient arrived, it has no numbers, or none is finite. The message says why.
        """
        if self.backward is None:
            raise NothingObservedError(f"no gradient arrived at {self.path} of shape {self.shape}")
        return _numbers(self.backward, f"the gradient of {self.path} of shape {self.shape}")

    @property
    def without_gradient(self) -> float | None:
        """The share of positions without a gradient, if the axes are batch, positions and features.

        A position is all elements along the last axis. `None` if there are other axes, if no gradient arrived, or if
        elements of it are zero that are not all those of a position. It is large in healthy models too, whose loss
        takes a class token, masked tokens or matched boxes.
        """
        statistics = None if self.backward is None else self.backward.statistics
        width = self.shape[-1] if len(self.shape) == 3 else None
        if statistics is None or not isinstance(width, int) or not statistics.count or statistics.zeros % width:
            return None
        return statistics.zeros / statistics.count

    @property
    def is_floating(self) -> bool:
        """Whether its dtype is a floating-point or complex one."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


def _numbers(reading: Reading, what: str) -> FiniteStatistics:
    statistics = reading.statistics
    if statistics is None:
        raise NothingObservedError(f"{what} has no statistics: {reading.reason or 'they were not recorded'}")
    if not statistics.count:
        raise NothingObservedError(f"{what} has no elements")
    if not statistics.finite:
        counts = f"{statistics.nan:,} NaN, {statistics.posinf:,} inf and {statistics.neginf:,} -inf"
        raise NothingObservedError(f"{what} has no finite element: {counts} among {statistics.count:,}")
    return cast("FiniteStatistics", statistics)


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedTensor:
    """A tensor that the code of an isolated call passed to a child, or returned."""

    where: str
    """Its destination: ``attn input``, ``norm (call 2) input``, ``output``; names of children are relative."""
    passed: str | None = None
    """The synthetic tensor that it is, unchanged, as in ``norm output``. `None` if it was computed."""
    reading: Reading | None = None
    """What was computed: its fingerprint or digest, and its noise."""


HALF = frozenset({"float16", "bfloat16"})
"""The dtypes in half precision."""


ROUNDING_OF_RESPONSES = 1e-5
"""The most that float32 may round in one layer, beside float64. Half precision and TensorFloat-32 round by more."""


def response_dtype(call: Call) -> str:
    """Return the dtype of the numbers in the response of a call: float32 in place of half precision.

    >>> response_dtype(Call(root="", root_training=False, index=0))
    'float32'
    """
    dtype = next((value.dtype for value in call.outputs), "float32")
    return "float32" if dtype in HALF else dtype


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedResponse:
    """What one call's own code computes from synthetic inputs and weights, its children replaced by stubs.

    What it computes in half precision is computed in float32, so that the responses of any dtype can be compared.
    """

    recipes: Mapping[str, str] = field(default_factory=dict)
    """How each synthetic tensor was made, by name: ``input``, ``norm output``, ``weight``. Two responses can only be
    compared if these agree."""
    handed: tuple[EmittedTensor, ...] = ()
    """The tensors that the code passed to children, in that order, and then those that it returned."""
    gradient: Reading | None = None
    """The gradients of all synthetic tensors together, each scaled to norm 1. `None` if there was no backward."""
    without_gradient: tuple[str, ...] = ()
    """Synthetic floating tensors that no gradient reached, and tensors computed from them that stop the gradient."""
    reason: str | None = None
    """Why the call could not be isolated."""
    mode_matters: bool = field(default=False, compare=False)
    """Whether the response is different in the other mode, training or evaluation, as that of dropout is."""
    arguments_matter: bool | None = field(default=None, repr=False, compare=False)
    """Whether the plain arguments of the call change the response. The response here is to the plain arguments of the
    expected call; True if that to the call's own arguments is different. `None` if this is the response to the call's
    own arguments. Not stored in files."""
    defaults: Mapping[str, tuple[Plain, ...]] = field(default_factory=dict, repr=False, compare=False)
    """The parameters of the code, if its plain arguments are not the expected ones: each with its default, or with
    nothing if it has no plain one. Not stored in files."""
    by_names_before: bool = field(default=False, repr=False, compare=False)
    """Whether its synthetic tensors were drawn by the names of the expected call. Not stored in files."""


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention(NanEqual):
    """The attention weights that a call computed, merged over its forwards."""

    shape: tuple[int, ...]
    """Batch, queries, keys."""
    entropy: tuple[float | None, ...]
    """The entropy of each head's weights, as a mean over the queries. Its unit is the greatest possible entropy, the
    logarithm of the number of keys that the query may attend to. `None` if no query has a choice of keys."""
    most: tuple[float, ...]
    """The largest weight of any head, for each element of ``shape``. The last axis runs fastest."""
    kind: str = "attention"
    """It is ``attention`` if the weights were multiplied into values. It is ``probabilities`` if they were not: they
    may be those of a vocabulary or a router. It is ``another axis`` if a softmax over one axis was multiplied into
    values along another, and then there are no numbers."""


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call(NanEqual):
    """One execution of a layer within a forward, merged over the forwards of the same kind."""

    root: str
    """The layer whose outermost call was the forward."""
    root_training: bool
    """Whether that layer was in training mode. Forwards of other roots or modes are kept apart."""
    index: int
    """Which call of the layer within its forward, from 0."""
    forwards: int = 1
    """Number of forwards in which the layer was called that often."""
    started: int = -1
    """Position of its start among all starts and ends of calls in the newest of these forwards, from 0."""
    finished: int = -1
    """Position of its end among the same, or -1 if it did not return."""
    training: bool = False
    """Mode of the layer itself during the call."""
    inputs: tuple[Value, ...] = ()
    inputs_known: bool = True
    """False if an argument is of a type whose contents are not recorded. Then equal inputs prove nothing."""
    outputs: tuple[Value, ...] = ()
    arguments: Mapping[str, Plain] = field(default_factory=dict)
    """Plain arguments of the call, by path."""
    attention: tuple[Attention, ...] = ()
    """One entry for each time that the call itself computed attention weights, with ``attention=True``."""
    grad_enabled: bool = True
    autocast: str | None = None
    """Dtype of the autocast that was active, or `None` if there was none."""
    random: str | None = None
    """Hash of the random generator's state at the start, if the call drew random numbers."""
    samples: str | None = None
    """The sum of the hashes of the samples in these forwards, of which the signs of fingerprints are made, as 16
    hexadecimal digits. The fingerprints of two calls can be compared if it is the same. `None` if there is no batch."""
    recomputed: int = 0
    """How often activation checkpointing computed the call again. No other count includes these."""
    response: IsolatedResponse | None = None
    """Response of the call alone to synthetic inputs. `None` if it was not computed, or is that of an earlier call."""


def merge_dimensions(a: Dimension, b: Dimension) -> Dimension:
    """Return the size that covers both: the same integer, or a range.

    >>> merge_dimensions(4, 4), merge_dimensions(4, 2), merge_dimensions((2, 4), 7)
    (4, (2, 4), (2, 7))
    """
    low = min(a if isinstance(a, int) else a[0], b if isinstance(b, int) else b[0])
    high = max(a if isinstance(a, int) else a[1], b if isinstance(b, int) else b[1])
    return low if low == high else (low, high)


def batch_sizes(size: int, inner: Iterable[int]) -> frozenset[int]:
    """Return the sizes that dimension 0 may have in values with the batch in it, alone or flattened with the next ones.

    Args:
        size: Number of samples in the batch.
        inner: The other dimensions of the first input of the model.

    >>> sorted(batch_sizes(8, (32,)))
    [8, 256]
    """
    return frozenset(itertools.accumulate(inner, operator.mul, initial=size))


@quickly_made
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
    """Full name of an earlier parameter of the model with which it shares its storage, or `None`."""
    persistent: bool | None = None
    """Whether the ``state_dict`` has the buffer. `None` if that is not known, as in files older than this field."""
    layout: str | None = field(default=None, compare=False)
    """Which part of it this rank has: ``shard(0)``, ``replicated``, ``partial``. `None` if the rank has all of it."""
    reading: Reading = field(default_factory=Reading)
    """The values. A `run` reads them before its forward. A watch reads them when the record is made; in the record of
    its first forward they are as that forward left them."""
    after: Reading | None = None
    """The values after a `run`, if it changed them, as it does the running statistics of a BatchNorm."""
    gradient: Reading | None = None
    """The gradient in each backward pass, before it is added to ``.grad``. `None` if none arrived."""
    applied: Reading | None = None
    """In the record of a step, the gradient as the optimizer had it: averaged over ranks, unscaled and clipped. `None`
    if it had none, or if it keeps its gradients elsewhere, as ZeRO does."""
    update: Reading | None = None
    """In the record of a step, what the optimizer added to the values; `reading` has the values before it. `None` if no
    optimizer that stepped holds the parameter."""
    group: int | None = None
    """In the record of a step, the number of its group in `Record.optimizers`."""
    clamped: int = field(default=0, compare=False)
    """In the record of all forwards, how many elements had a gradient of zero in every backward pass and are the
    largest or the smallest of their row, while others of it learned, as behind a clamp of weights. It is 0 beside the
    CPU, where nothing looks for it."""
    left_out: bool = False
    """In the record of a step, whether it requires a gradient although no optimizer that stepped holds it."""


def elements(parameters: Iterable[Parameter]) -> int:
    """Return the number of elements. Tied parameters count once, where they come first."""
    return sum(math.prod(parameter.shape) for parameter in parameters if parameter.tied_to is None)


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer(NanEqual):
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
    of at most 16 of them is text: ``stride`` is ``"(1, 1)"``. Attributes that a forward sets are left out."""
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
        """The layer's name in a sentence, see `label_of`."""
        return label_of(self.name, self.type_name)

    @property
    def output(self) -> Value:
        """The first output of the first call.

        Raises:
            LookupError: The layer was not called, or returned no tensor.
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


# --- cost -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """What the calls of one layer cost, including the layers inside it."""

    type: str
    """Name of the class without its module, or of the function."""
    calls: int = 0
    wall_time: float = 0.0
    """Seconds between the start and the end of the calls, without what the probe itself took."""
    flops: int = 0
    """Floating-point operations of matrix products, convolutions and attention."""
    own_flops: int = 0
    """The operations that belong to no layer inside it."""
    activation_bytes: int = 0
    """Memory of the outputs of leaves in the forward with the most. A storage counts once."""
    parameters: int = 0
    """Elements of the parameters. Tied ones count once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What the forwards of a model cost, and each layer in them.

    Times, calls and operations are sums over the forwards of the record, without backward passes. Numbers of operations
    and bytes are the same in each run on one device, but times are not. ``print`` shows a table.

    >>> print(Profile(forwards=1, flops=96, layers={"fc": LayerProfile(type="Linear", calls=1, flops=96)}))
    1 forward: 96 FLOPs, 0 bytes of activations, 0.000 ms; the probe took 0.000 ms more
    <BLANKLINE>
    layer   type     calls   parameters   activations   FLOPs      ms   time
    fc      Linear       1            0             0      96   0.000      -
    """

    layers: Mapping[str, LayerProfile] = field(default_factory=dict)
    """The layers that were called, by name, in the order of the record."""
    forwards: int = 0
    wall_time: float = 0.0
    """Seconds in the outermost call, without what the probe itself took."""
    flops: int = 0
    """Floating-point operations, as `torch.utils.flop_counter` counts them."""
    activation_bytes: int = 0
    """Memory of the outputs of the recorded leaves in the forward with the most."""
    parameters: int = 0
    """Elements of the parameters of the model. Tied ones count once."""
    probe_time: float = 0.0
    """Seconds in the hooks of the probe, including those in backward passes."""

    def __str__(self) -> str:
        return as_text(self)


def as_text(profile: Profile) -> str:
    """Return a profile as a table of the layers that were called, each with what is inside it."""
    first = (
        f"{count(profile.forwards, 'forward')}: {count(profile.flops, 'FLOP')}, "
        f"{count(profile.activation_bytes, 'byte')} of activations, {_milliseconds(profile.wall_time)} ms; "
        f"the probe took {_milliseconds(profile.probe_time)} ms more"
    )
    columns = ["layer", "type", "calls", "parameters", "activations", "FLOPs", "ms", "time"]
    rows = [_row(name, layer, profile) for name, layer in profile.layers.items()]
    return "\n".join([first, *["", *table(columns, rows, most=len(rows))] * bool(rows)])


def _row(name: str, layer: LayerProfile, profile: Profile) -> list[Cell]:
    share = f"{layer.wall_time / profile.wall_time:.0%}" if profile.wall_time else "-"
    numbers = [layer.calls, layer.parameters, layer.activation_bytes, layer.flops]
    return [name, layer.type, *numbers, _milliseconds(layer.wall_time), share]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.3f}"


# --- gradients between the backward pass and the optimizer ------------------------------------------------------------

AS_THEY_ARRIVED = "as they arrived"
RESET = "reset"
SCALED = "scaled"
OTHERS = "others"

_EXACT = 1e-3
"""Gradients count as multiples if no more than this share of the norm is left. Rounding and the precision of a
fingerprint leave far less."""


def what_was_applied(parameters: Iterable[Parameter]) -> str | None:
    """Return what optimizers had of the gradients that arrived at their parameters; `None` if it is not known.

    Args:
        parameters: The parameters in the record of a step of one process. With several ranks the gradients that arrive
            differ from those that are applied, because ranks average them.

    >>> what_was_applied([])
    """
    found = [one for parameter in parameters if (one := _applied(parameter)) is not None]
    if not found:
        return None
    others = sum(not is_multiple for _, is_multiple in found)
    if others:
        return f"{OTHERS} by {others} of {len(found)} parameters"
    factors = sorted(factor for factor, _ in found)
    factor = factors[len(factors) // 2]  # the median
    if any(abs(one - factor) > _EXACT * abs(factor) for one in factors):
        return f"{SCALED} by {significant(factors[0])} to {significant(factors[-1])}"
    if abs(factor - 1) <= _EXACT:
        return AS_THEY_ARRIVED
    return RESET if not factor else f"{SCALED} by {_factor_text(factor)}"


def _applied(parameter: Parameter) -> tuple[float, bool] | None:
    """Return how many times what arrived a gradient is that the optimizer had, and whether no other term is left."""
    arrived, applied = parameter.gradient, parameter.applied
    if parameter.group is None or arrived is None or arrived.fingerprint is None or arrived.statistics is None:
        return None
    # Zero is every multiple of zero, and a norm that leaves out elements does not tell how large the gradient was.
    if not arrived.statistics.norm or not math.isfinite(arrived.statistics.norm) or arrived.statistics.nonfinite:
        return None
    if applied is None:  # a gradient arrived, and the optimizer found none
        return 0.0, True
    if applied.fingerprint is None:
        return None
    factor, left = proportion(applied.fingerprint, arrived.fingerprint)
    return factor, left <= _EXACT * max(math.hypot(*applied.fingerprint), arrived.statistics.norm * abs(factor))


def _factor_text(factor: float) -> str:
    """Return a factor and its likely cause: a gradient scaler divides by a power of two, and clipping makes smaller."""
    inverse = 1 / factor
    power = round(math.log2(inverse)) if inverse > 1 else 0
    if power and abs(inverse - 2**power) <= _EXACT * inverse:
        return f"1/{2**power} (unscaled)"
    return f"{significant(factor)}{' (clipped)' if 0 < factor < 1 else ''}"
