"""Calls of a layer: the tensors that went in and out, attention weights, the isolated response.

A call is recorded, and not only a layer, because a shared module computes something else at each place where it is
called. All classes here are frozen and made of plain numbers, so that a record can be compared and stored as it is.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from pytest_modelprobe.exceptions import NothingObservedError

from .construction import NanEqual, quickly_made
from .tensor_statistics import Reading

if TYPE_CHECKING:
    from .tensor_statistics import FiniteStatistics

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
