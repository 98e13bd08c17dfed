"""Calls of a layer: the tensors that went in and out, attention weights, the isolated response."""

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
"""An argument or an attribute that is no tensor: it is recorded exactly."""

Dimension = int | tuple[int, int]
"""One size, or the smallest and the largest where it varied between forwards."""


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
    """Number of the tensor: values of one forward with the same number are the same tensor."""
    forward: Reading = field(default_factory=Reading)
    backward: Reading | None = None
    """The gradient of this value; None where none arrived."""
    backward_inner: Reading | None = None
    """The gradient in backward passes that ran inside a forward."""
    overwritten: bool = False
    """The value is a view that was overwritten in place: whether a gradient arrived cannot be known."""
    layout: str | None = field(default=None, compare=False)
    """In a record merged over ranks, what each had: ``batch``, a part of the samples, or ``replicated``, the same.

    Under tensor parallelism what this rank has: ``replicated``, ``shard(1)``, a part along that dimension, or
    ``partial``, a term of the sum; None where no DTensor tells.
    """
    source: str | None = None
    """Inputs: the address of the recorded output it is equal to, such as ``conv1 output``."""

    @property
    def statistics(self) -> FiniteStatistics:
        """Of the value itself: ``record["fc"].output.statistics.rms``.

        `forward` has them as they are, also where there may be none.

        Raises:
            NothingObservedError: There are no numbers, or none is finite; the message says why.
        """
        return _numbers(self.forward, f"{self.path} of shape {self.shape} and dtype {self.dtype}")

    @property
    def gradient(self) -> FiniteStatistics:
        """Of the value's gradient; `backward` is None where none arrived.

        Raises:
            NothingObservedError: None arrived, it has no numbers, or none is finite; the message says why.
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
    """The synthetic tensor that it is, unchanged: ``input``, ``norm output``; None: it was computed."""
    reading: Reading | None = None
    """Of what was computed: fingerprint or digest, and noise."""


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedResponse:
    """What one call's own code computes from synthetic inputs and weights, its children replaced by stubs."""

    recipes: Mapping[str, str] = field(default_factory=dict)
    """How each synthetic tensor was made, by name: ``input``, ``norm output``, ``weight``. Responses compare only
    where these agree."""
    handed: tuple[EmittedTensor, ...] = ()
    """In the order in which they were passed; those returned come last."""
    gradient: Reading | None = None
    """Of the gradients of all synthetic tensors together, each brought to norm 1; None: no backward."""
    without_gradient: tuple[str, ...] = ()
    """Synthetic floating tensors that no gradient reached, and tensors computed from them that stop the gradient."""
    reason: str | None = None
    """Why the call could not be isolated."""
    arguments_matter: bool | None = field(default=None, repr=False, compare=False)
    """Whether this, the answer to the plain arguments of the expected call, differs from that to the call's own. None:
    it is the answer to the call's own. In no file."""
    defaults: Mapping[str, object] = field(default_factory=dict, repr=False, compare=False)
    """The parameters of the code and their defaults, where its plain arguments are not those expected. In no file."""
    by_names_before: bool = field(default=False, repr=False, compare=False)
    """Whether its synthetic tensors were drawn by the names of the expected call. In no file."""


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention(NanEqual):
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
    vocabulary or a router. ``another axis``: a softmax over one axis was multiplied into values along another; then
    there are no numbers."""


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
    """Forwards in which the layer was called that often."""
    started: int = -1
    """Position of its start among all starts and ends of calls in the newest of these forwards, from 0."""
    finished: int = -1
    """Position of its end; -1: it did not return."""
    training: bool = False
    """Mode of the layer itself during the call."""
    inputs: tuple[Value, ...] = ()
    inputs_known: bool = True
    """False where an argument is of a type whose contents are not recorded."""
    outputs: tuple[Value, ...] = ()
    arguments: Mapping[str, Plain] = field(default_factory=dict)
    """Plain arguments of the call, by path."""
    attention: tuple[Attention, ...] = ()
    """One entry for each time that the call itself computed attention weights, with ``attention=True``."""
    grad_enabled: bool = True
    autocast: str | None = None
    """Dtype of the autocast that was active, or None."""
    random: str | None = None
    """Hash of the random generator's state at the start, where the call drew random numbers."""
    recomputed: int = 0
    """Recomputations of the call by activation checkpointing; no other count includes them."""
    response: IsolatedResponse | None = None
    """Response of the call alone, on synthetic inputs; None: not computed, or the same as an earlier call's."""


def merge_dimensions(a: Dimension, b: Dimension) -> Dimension:
    """Return the size that covers both: the same integer, or a range.

    >>> merge_dimensions(4, 4), merge_dimensions(4, 2), merge_dimensions((2, 4), 7)
    (4, (2, 4), (2, 7))
    """
    low = min(a if isinstance(a, int) else a[0], b if isinstance(b, int) else b[0])
    high = max(a if isinstance(a, int) else a[1], b if isinstance(b, int) else b[1])
    return low if low == high else (low, high)


def batch_sizes(size: int, inner: Iterable[int]) -> frozenset[int]:
    """Return the sizes of dimension 0 of values that have the batch there, alone or flattened with what comes next.

    A batch of one sample cannot be told from what else is flattened.

    Args:
        size: Samples in the batch.
        inner: The other dimensions of the first input of the model.

    >>> sorted(batch_sizes(8, (32,))), sorted(batch_sizes(1, (32,)))
    ([8, 256], [1])
    """
    return frozenset(itertools.accumulate(inner, operator.mul, initial=size) if size > 1 else [size])
