"""Mutable accumulators that the hooks fill: tensors, calls, forwards; and how forwards merge.

A forward that is over merges into the totals, so that memory grows with the number of layers and not with the number of
forwards. A fingerprint of a value without a batch gets other signs there, which the number of forwards before it
chooses: with the same signs, a value that is equal in all forwards would add up to many times its size. The fingerprint
of a batch keeps its signs, because they come from its samples and differ already.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from pytest_modelprobe import statistics
from pytest_modelprobe.capture.special.costs import Costs
from pytest_modelprobe.models import together
from pytest_modelprobe.record import Dimension, ForwardKind, Plain, merge_dimensions
from pytest_modelprobe.statistics import Reduction, Samples

from .tensors import ContentKey, plain_name, shape_of

Merge = Callable[[Reduction, Reduction], Reduction]
Sign = Callable[[Reduction], Reduction]


class TensorObservation:
    """A tensor among the inputs or outputs of a call: its reduction, and that of its gradient when it arrives.

    If the output of one call is the input of the next, both have the same observation.
    """

    __slots__ = (
        "axis", "backward", "backward_inner", "device", "dtype", "forward", "layout", "number", "overwritten",
        "requires_grad", "returned_as", "shape", "targets", "whole",
    )  # fmt: skip

    def __init__(
        self, tensor: torch.Tensor, number: tuple[int, int], forward: Reduction, *, whole: bool = True
    ) -> None:
        self.number = number
        """Index of the forward, and number of the tensor in it. It is the same wherever the tensor was seen."""
        self.shape = tuple(tensor.shape) if not tensor.is_nested else shape_of(tensor)
        self.dtype = plain_name(tensor.dtype)
        self.device = plain_name(tensor.device)
        self.requires_grad = tensor.requires_grad
        self.axis = forward.axis
        self.forward = forward
        self.layout: str | None = None
        """Which part of the value this rank has. `None` without tensor parallelism."""
        self.backward: Reduction | None = None
        self.backward_inner: Reduction | None = None
        self.overwritten = False
        self.whole = whole
        """Whether it is one whole, with no batch of samples in dimension 0."""
        self.returned_as: str | None = None
        """Of an input of a forward, the address of the output of an earlier one that it is."""
        self.targets: tuple[tuple[TensorObservation, int], ...] = ()
        """Observations into which this one was merged, each with the number that chooses its signs there. A gradient
        that arrives later is added to them too."""

    def receive(self, gradient: Reduction, *, inner: bool) -> None:
        """Add the gradient of one backward pass."""
        if inner:
            self.backward_inner = merged(self.backward_inner, gradient)
        else:
            self.backward = gradient if self.backward is None else merged(self.backward, gradient)
        for target, number in self.targets:
            target.receive(statistics.with_signs_of(number, gradient) if self.whole else gradient, inner=inner)

    def merge_from(self, other: TensorObservation, merge: Merge) -> None:
        """Merge the observation in the same place of another forward, which has its signs for the totals already."""
        self.number = other.number
        if self.layout != other.layout:
            self.layout = None
        if self.device == "meta":  # a forward on meta tensors has no numbers, and the other one's stay
            self.device = other.device
        if self.shape != other.shape:
            self.shape = _merged_shape(self.shape, other.shape)
        self.forward = merge(self.forward, other.forward)
        if other.backward is not None:
            self.backward = other.backward if self.backward is None else merge(self.backward, other.backward)
        if other.backward_inner is not None:
            self.backward_inner = merged(self.backward_inner, other.backward_inner, merge)
        self.overwritten |= other.overwritten
        self.returned_as = self.returned_as or other.returned_as
        self.requires_grad |= other.requires_grad

    def signed(self, sign: Sign) -> TensorObservation:
        """Return a whole with the signs that it has in totals. A batch keeps its own."""
        found = self.copy()
        found.forward = sign(self.forward)
        found.backward = None if self.backward is None else sign(self.backward)
        found.backward_inner = None if self.backward_inner is None else sign(self.backward_inner)
        return found

    def copy(self) -> TensorObservation:
        """Return an independent copy. It shares the reductions, which never change."""
        copy = object.__new__(TensorObservation)
        copy.number, copy.shape, copy.dtype, copy.device = self.number, self.shape, self.dtype, self.device
        copy.requires_grad, copy.overwritten, copy.axis = self.requires_grad, self.overwritten, self.axis
        copy.forward, copy.backward, copy.backward_inner = self.forward, self.backward, self.backward_inner
        copy.layout, copy.targets, copy.whole, copy.returned_as = self.layout, (), self.whole, self.returned_as
        return copy


Values = list[tuple[str, TensorObservation]]
"""Tensors seen, each with its path."""


class AttentionObservation(NamedTuple):
    """What is kept of attention weights that were computed once in a call. The tensors stay on their device."""

    entropy: Tensor
    """Shape (heads,): the entropy as a share of the greatest possible, summed over queries with two or more keys."""
    queries: Tensor
    """Shape (heads,): how many such queries there are."""
    most: Tensor
    """Shape (batch, queries, keys): the largest weight of any head."""
    kind: str = "attention"
    """As in `record.Attention.kind`."""

    def merge(self, other: AttentionObservation) -> AttentionObservation:
        """Return both merged, or the newer one, ``other``, if their shapes differ."""
        if self.most.shape != other.most.shape or self.entropy.shape != other.entropy.shape:
            return other
        return AttentionObservation(
            torch.add(*together(self.entropy, other.entropy)),
            torch.add(*together(self.queries, other.queries)),
            torch.maximum(*together(self.most, other.most)),
            other.kind,
        )


class CallObservation:
    """One execution of a layer within one forward, or several merged."""

    __slots__ = (
        "arguments", "attention", "autocast", "finished", "forwards", "grad_enabled", "index", "inputs", "inputs_known",
        "layer", "outputs", "random", "recomputed", "started", "total", "training",
    )  # fmt: skip

    def __init__(self, layer: str, index: int) -> None:
        self.layer = layer
        self.index = index
        self.forwards = 1
        self.started = -1
        self.finished = -1
        self.training = False
        self.inputs: Values = []
        self.inputs_known = True
        self.outputs: Values = []
        self.arguments: dict[str, Plain] = {}
        self.attention: list[AttentionObservation] = []
        """One entry for each time that weights were computed in the call itself."""
        self.grad_enabled = True
        self.autocast: str | None = None
        self.random: str | None = None
        self.recomputed = 0
        self.total: CallObservation | None = None
        """The call into which this one was merged."""

    def run_again(self) -> None:
        """Count a recomputation."""
        self.recomputed += 1
        if self.total is not None:
            self.total.run_again()

    def merge_from(self, other: CallObservation, merge: Merge, sign: Sign, number: int, *, final: bool) -> None:
        """Merge the same call of another forward; see `Totals.merge_from`."""
        if final:
            other.total = self
        self.forwards += other.forwards
        self.recomputed += other.recomputed
        self.inputs_known &= other.inputs_known
        # These cannot be merged. They are those of the newest forward.
        self.started, self.finished = other.started, other.finished
        self.training, self.grad_enabled, self.autocast = other.training, other.grad_enabled, other.autocast
        self.random, self.arguments = other.random, other.arguments
        if other.attention:
            together = itertools.zip_longest(self.attention, other.attention)
            self.attention = [b if a is None else a if b is None else a.merge(b) for a, b in together]
        for mine, theirs in ((self.inputs, other.inputs), (self.outputs, other.outputs)):
            for i, (path, seen) in enumerate(theirs):
                # It is hardly ever in another place, and then there are other values before it.
                target = mine[i][1] if i < len(mine) and mine[i][0] == path else dict(mine).get(path)
                found = seen.signed(sign) if number and seen.whole else seen
                if target is not None:
                    target.merge_from(found, merge)
                else:
                    target = found.copy()
                    mine.append((path, target))
                if final:
                    seen.targets += ((target, number),)

    def copy(self) -> CallObservation:
        """Return an independent copy."""
        copy = object.__new__(CallObservation)
        for name in CallObservation.__slots__:
            setattr(copy, name, getattr(self, name))
        copy.inputs = [(path, seen.copy()) for path, seen in self.inputs]
        copy.outputs = [(path, seen.copy()) for path, seen in self.outputs]
        copy.total = None
        return copy


class ParameterGradient:
    """The gradient of a parameter, one reading for each backward pass.

    Within one pass it may come in parts, as that of a layer in two checkpointed segments does. Each reading is the sum
    so far, so only the last one of a pass counts.
    """

    __slots__ = ("_backward", "_before", "_newest")

    def __init__(self, newest: Reduction | None = None, backward: int = -1) -> None:
        self._backward = backward
        self._before: Reduction | None = None
        self._newest = newest

    def receive(self, gradient: Reduction, backward: int) -> None:
        """Take the gradient of a pass as it is now."""
        if backward != self._backward and self._newest is not None:
            self._before = merged(self._before, self._newest)
        self._backward, self._newest = backward, gradient

    def merge_from(self, other: ParameterGradient, number: int) -> None:
        """Merge the gradient of another step, with the signs of its number."""
        theirs = other.reduced
        if theirs is not None:
            theirs = statistics.with_signs_of(number, theirs)
        self._before, self._newest, self._backward = merged(self.reduced, theirs), None, -1

    @property
    def reduced(self) -> Reduction | None:
        """The gradients of all passes, merged."""
        return self._newest if self._before is None else merged(self._before, self._newest)


KnownReduction = tuple[tuple[int, int], Reduction, Any]
"""Number of a tensor, its reduction, and its storage. While the storage is held weakly, its key is not used again."""


class Forward:
    """One outermost call of a watched module, and everything that was called in it."""

    forwards = 1

    def __init__(self, index: int, kind: ForwardKind, samples: Samples, devices: tuple[torch.device, ...] = ()) -> None:
        self.index = index
        self.devices = devices
        """Devices beside the CPU that the model and its inputs are on."""
        self.kind = kind
        self.samples = samples
        self.calls: dict[tuple[str, int], CallObservation] = {}
        self.counts: dict[str, int] = {}
        self.backwards: set[int] = set()
        """Numbers of the backward passes that reached it."""
        self.trained_by: set[int] = set()
        """These, and the passes that reached no hooked value while this was the newest forward."""
        self.parameters: dict[str, ParameterGradient] = {}
        """Gradients of the passes that ran while this was the newest forward, or that reached it, by full name."""
        self._tensors = itertools.count()
        self._events = itertools.count()
        self.costs: Costs | None = None
        """What the calls cost, or `None` if costs are not measured."""
        self.reductions: dict[ContentKey, KnownReduction] = {}
        """What is known of the tensors seen in this forward, by their contents, so that none is read twice."""
        self.own: set[Reduction] = set()
        """Reductions of what the model was given, with the signs of that input alone."""

    def begin_call(self, layer: str) -> CallObservation:
        """Return a new call of ``layer``."""
        index = self.counts.get(layer, 0)
        self.counts[layer] = index + 1
        call = self.calls[layer, index] = CallObservation(layer, index)
        call.started = next(self._events)
        return call

    def end_call(self, call: CallObservation) -> None:
        """Note that ``call`` has returned."""
        call.finished = next(self._events)

    @property
    def sum_of_hashes(self) -> Tensor | None:
        """Sum of the hashes of its samples, see `record.Call.samples`. It stays on their device."""
        return self.samples.sum()

    def next_number(self) -> tuple[int, int]:
        """Return the number for a tensor not seen before."""
        return self.index, next(self._tensors)

    def calls_of(self, layer: str) -> list[CallObservation]:
        """Return the calls of a layer, in order."""
        return [self.calls[layer, index] for index in range(self.counts.get(layer, 0))]


class DoneForward:
    """What is kept, until it is merged, of a forward that is not the newest.

    The `Forward` itself is held only by its graph. When the graph is gone, no gradient can arrive any more.
    """

    __slots__ = ("_graph", "calls", "costs", "index", "kind", "samples", "trained_by")
    forwards = 1

    def __init__(self, forward: Forward) -> None:
        self.index, self.kind, self.calls, self.costs = forward.index, forward.kind, forward.calls, forward.costs
        self.trained_by = forward.trained_by
        self.samples = forward.samples
        self._graph = ref(forward)

    @property
    def sum_of_hashes(self) -> Tensor | None:
        """Sum of the hashes of its samples."""
        return self.samples.sum()

    @property
    def may_be_trained(self) -> bool:
        """Whether a backward pass may reach it still."""
        return self._graph() is not None


class Totals:
    """The forwards of one kind, merged."""

    def __init__(self) -> None:
        self.forwards = 0
        self.calls: dict[tuple[str, int], CallObservation] = {}
        self.costs: Costs | None = None
        self.sum_of_hashes: Tensor | None = None

    def merge_from(
        self, forward: Forward | DoneForward | Totals, number: int | None = None, *, final: bool = True
    ) -> None:
        """Merge a forward, or several.

        Args:
            forward: What is merged.
            number: Chooses the signs that its values without a batch get here. `None` means the number of forwards
                merged before.
            final: Whether gradients that it receives later are added too.
        """
        number = self.forwards if number is None else number
        # Cached because one tensor is seen in several places, with the same reduction.
        merge = functools.cache(statistics.merge)
        sign = functools.cache(functools.partial(statistics.with_signs_of, number))
        self.forwards += forward.forwards
        self.sum_of_hashes = statistics.sum_of_hashes(self.sum_of_hashes, forward.sum_of_hashes)
        if forward.costs is not None:
            self.costs = self.costs or Costs()
            self.costs.merge_from(forward.costs)
        for key, call in forward.calls.items():
            total = self.calls.get(key)
            if total is None:
                total = self.calls[key] = CallObservation(*key)
                total.forwards = 0
            total.merge_from(call, merge, sign, number, final=final)

    @classmethod
    def of(cls, forward: Forward | DoneForward) -> Totals:
        """Return one forward as totals. They must be read at once, as its calls are not copied and may still change."""
        totals = cls()
        totals.forwards, totals.calls, totals.costs = 1, forward.calls, forward.costs
        totals.sum_of_hashes = forward.sum_of_hashes
        return totals

    def drop_gradients(self) -> None:
        """Forget the gradients of all values."""
        for call in self.calls.values():
            for _, seen in (*call.inputs, *call.outputs):
                seen.backward = seen.backward_inner = None

    def copy(self) -> Totals:
        """Return an independent copy."""
        copy = Totals()
        copy.forwards = self.forwards
        copy.calls = {key: call.copy() for key, call in self.calls.items()}
        copy.costs = None if self.costs is None else self.costs.copy()
        copy.sum_of_hashes = self.sum_of_hashes
        return copy


def merged(a: Reduction | None, b: Reduction | None, merge: Merge = statistics.merge) -> Reduction | None:
    """Return two reductions merged, or the one that is not `None`."""
    return b if a is None else a if b is None else merge(a, b)


def _merged_shape(a: tuple[Dimension, ...], b: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    if len(a) != len(b):  # no ranges can be made of another number of dimensions, so the newest stands for both
        return b
    return tuple(map(merge_dimensions, a, b))


Parts = dict[ForwardKind, Totals]
"""Forwards merged, by kind."""


def merge_into(parts: Parts, forward: Forward | DoneForward, *, final: bool = True) -> None:
    """Merge a forward into those of its kind."""
    parts.setdefault(forward.kind, Totals()).merge_from(forward, final=final)
