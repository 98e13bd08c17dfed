"""Mutable accumulators that the hooks fill: tensors, calls, forwards; and how forwards merge.

A forward that is over merges into the totals, so that memory grows with the number of layers and not with the number of
forwards. A fingerprint of a value without a batch gets other signs there, which the number of forwards before it
chooses: with the same signs, a value that is equal in all forwards would add up to many times its size. The fingerprint
of a batch keeps its signs, because they come from its samples and differ already.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from pytest_modelprobe import statistics
from pytest_modelprobe.models import Flat, Layers, attributes, together
from pytest_modelprobe.record import ROOT, Dimension, ForwardKind, Plain, merge_dimensions
from pytest_modelprobe.statistics import Reduction, Samples

from .profiler import CallStart, Costs
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
            # No ranges can be made of another number of dimensions, so the newest stands for both.
            alike = len(self.shape) == len(other.shape)
            self.shape = tuple(map(merge_dimensions, self.shape, other.shape)) if alike else other.shape
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


@dataclass(slots=True, eq=False)
class CallObservation:
    """One execution of a layer within one forward, or several merged."""

    layer: str
    index: int
    forwards: int = 1
    started: int = -1
    finished: int = -1
    training: bool = False
    inputs: Values = field(default_factory=list)
    inputs_known: bool = True
    outputs: Values = field(default_factory=list)
    arguments: dict[str, Plain] = field(default_factory=dict)
    attention: list[AttentionObservation] = field(default_factory=list)
    """One entry for each time that weights were computed in the call itself."""
    grad_enabled: bool = True
    autocast: str | None = None
    random: str | None = None
    recomputed: int = 0
    total: CallObservation | None = None
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
        inputs = [(path, seen.copy()) for path, seen in self.inputs]
        outputs = [(path, seen.copy()) for path, seen in self.outputs]
        return replace(self, inputs=inputs, outputs=outputs, total=None)


@dataclass(slots=True, eq=False)
class ParameterGradient:
    """The gradient of a parameter, one reading for each backward pass.

    Within one pass it may come in parts, as that of a layer in two checkpointed segments does. Each reading is the sum
    so far, so only the last one of a pass counts.
    """

    _newest: Reduction | None = None
    _backward: int = -1
    _before: Reduction | None = None

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


@dataclass(eq=False)
class Forward:
    """One outermost call of a watched module, and everything that was called in it."""

    index: int
    kind: ForwardKind
    samples: Samples
    devices: tuple[torch.device, ...] = ()
    """Devices beside the CPU that the model and its inputs are on."""
    forwards: int = 1
    calls: dict[tuple[str, int], CallObservation] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """How many calls each layer has."""
    backwards: set[int] = field(default_factory=set)
    """Numbers of the backward passes that reached it."""
    trained_by: set[int] = field(default_factory=set)
    """These, and the passes that reached no hooked value while this was the newest forward."""
    parameters: dict[str, ParameterGradient] = field(default_factory=dict)
    """Gradients of the passes that ran while this was the newest forward, or that reached it, by full name."""
    costs: Costs | None = None
    """What the calls cost, or `None` if costs are not measured."""
    reductions: dict[ContentKey, KnownReduction] = field(default_factory=dict)
    """What is known of the tensors seen in this forward, by their contents, so that none is read twice."""
    own: set[Reduction] = field(default_factory=set)
    """Reductions of what the model was given, with the signs of that input alone."""
    _tensors: Iterator[int] = field(default_factory=itertools.count)
    _events: Iterator[int] = field(default_factory=itertools.count)

    def begin_call(self, layer: str) -> CallObservation:
        """Return a new call of ``layer``."""
        index = self.counts[layer]
        self.counts[layer] += 1
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
        return [self.calls[layer, index] for index in range(self.counts[layer])]


class DoneForward:
    """What is kept, until it is merged, of a forward that is not the newest.

    The `Forward` itself is held only by its graph. When the graph is gone, no gradient can arrive any more.
    """

    __slots__ = ("calls", "costs", "graph", "index", "kind", "samples", "trained_by")
    forwards = 1

    def __init__(self, forward: Forward) -> None:
        self.index, self.kind, self.calls, self.costs = forward.index, forward.kind, forward.calls, forward.costs
        self.trained_by = forward.trained_by
        self.samples = forward.samples
        self.graph = ref(forward)

    @property
    def sum_of_hashes(self) -> Tensor | None:
        """Sum of the hashes of its samples."""
        return self.samples.sum()


@dataclass(slots=True, eq=False)
class Totals:
    """The forwards of one kind, merged."""

    forwards: int = 0
    calls: dict[tuple[str, int], CallObservation] = field(default_factory=dict)
    costs: Costs | None = None
    sum_of_hashes: Tensor | None = None

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
                total = self.calls[key] = CallObservation(*key, forwards=0)
            total.merge_from(call, merge, sign, number, final=final)

    @classmethod
    def of(cls, forward: Forward | DoneForward) -> Totals:
        """Return one forward as totals. They must be read at once, as its calls are not copied and may still change."""
        return cls(1, forward.calls, forward.costs, forward.sum_of_hashes)

    def drop_gradients(self) -> None:
        """Forget the gradients of all values."""
        for call in self.calls.values():
            for _, seen in (*call.inputs, *call.outputs):
                seen.backward = seen.backward_inner = None

    def copy(self) -> Totals:
        """Return an independent copy."""
        calls = {key: call.copy() for key, call in self.calls.items()}
        return replace(self, calls=calls, costs=self.costs and self.costs.copy())


def merged(a: Reduction | None, b: Reduction | None, merge: Merge = statistics.merge) -> Reduction | None:
    """Return two reductions merged, or the one that is not `None`."""
    return b if a is None else a if b is None else merge(a, b)


Parts = dict[ForwardKind, Totals]
"""Forwards merged, by kind."""


def merge_into(parts: Parts, forward: Forward | DoneForward, *, final: bool = True) -> None:
    """Merge a forward into those of its kind."""
    parts.setdefault(forward.kind, Totals()).merge_from(forward, final=final)


# --- the calls that run now -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class RunningCall:
    """A call that has begun and has not ended."""

    name: str
    frame: FrameType
    forward: Forward
    inputs: Flat
    observation: CallObservation | None = None
    """What is recorded of the call, or `None` if the layer is not selected."""
    unit_axes: dict[tuple[Dimension, ...], int | None] = field(default_factory=dict)
    """Unit axis of the outputs of the calls inside, by shape. The newest of each shape counts."""
    random_states: tuple[bytes, ...] = ()
    """States of the random generators when the call began, or empty if it cannot draw."""
    start: CallStart | None = None
    """What was measured when the call began, or `None` if it is not profiled."""
    error_before: BaseException | None = field(default_factory=lambda: sys.exc_info()[1])
    """A forward that is called in an `except` block sees the error of that block, which is none of its own."""

    def is_over(self, thread: int, here: FrameType) -> bool:
        """Whether a call that began in ``thread`` has ended, so that its Python frame is neither there nor ``here``."""
        if _is_on_stack(self.frame, here):
            return False
        elsewhere = None if thread == threading.get_ident() else sys._current_frames().get(thread)
        return not _is_on_stack(self.frame, elsewhere)

    def inherited_axis(self, output: torch.Tensor) -> int | None:
        """Return the unit axis of a value of the shape of an output: of one made inside, else of an input."""
        shape = shape_of(output) if output.is_nested else tuple(output.shape)
        inside = self.unit_axes.get(shape) if self.unit_axes else None
        if inside is None and self.observation is not None:
            for _, seen in self.observation.inputs:
                if seen.shape == shape:
                    return seen.axis
        return inside


class RunningCalls:
    """The stack of the calls that run, all in one thread.

    Args:
        on_abandoned: Called when the outermost call turns out to have ended without a hook.
    """

    def __init__(self, on_abandoned: Callable[[], None]) -> None:
        self.stack: list[RunningCall] = []
        """The calls, for others to read and not to change."""
        self._thread = 0
        self._on_abandoned = on_abandoned

    def innermost_here(self) -> RunningCall | None:
        """Return the innermost call, if it still runs."""
        running = self.stack[-1] if self.stack else None
        return None if running is None or running.is_over(self._thread, sys._getframe()) else running

    def is_elsewhere(self) -> bool:
        """Whether the calls run in another thread than this."""
        return self._thread != threading.get_ident()

    def push(self, running: RunningCall) -> None:
        """Add the innermost call."""
        if not self.stack:
            self._thread = threading.get_ident()
        self.stack.append(running)

    def pop(self, name: str, frame: FrameType) -> RunningCall | None:
        """Remove a call with all inside it, and return it.

        Returns `None` if the call was never added, since another hook raised before ours ran.
        """
        for i in range(len(self.stack) - 1, -1, -1):
            # The name is compared too, because a functional call has the frame of the layer around it.
            if self.stack[i].frame is frame and self.stack[i].name == name:
                running = self.stack[i]
                del self.stack[i:]
                return running
        return None

    def remove(self, running: RunningCall) -> None:
        """Remove a call with all inside it, if it is there."""
        if running in self.stack:
            del self.stack[self.stack.index(running) :]

    def drop_abandoned(self, here: FrameType | None = None) -> bool:
        """Remove calls that ended although no hook ran, and return whether a call still runs.

        Args:
            here: A frame inside all calls that run in this thread. `None` means the frame of the caller.
        """
        stack = self.stack
        here = here or sys._getframe()
        while stack and not _is_on_stack(stack[-1].frame, here) and stack[-1].is_over(self._thread, here):
            stack.pop()
            if not stack:
                self._on_abandoned()
        return bool(stack)


def _is_on_stack(frame: FrameType, innermost: FrameType | None) -> bool:
    """Whether a frame is on the stack that ends with ``innermost``. The walk is short if it is."""
    while innermost is not None and innermost is not frame:
        innermost = innermost.f_back
    return innermost is frame


# --- attributes -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class SetAttributes:
    """Compares the attributes of the selected layers before and after the first forward of each kind."""

    layers: Layers
    selected: Collection[str]
    found: dict[str, set[str]] = field(default_factory=dict)
    """Names of the attributes that a forward set, by layer."""
    _before: dict[str, tuple[type, dict[str, Plain]]] = field(default_factory=dict)

    def begin(self, root: str) -> None:
        """Read the attributes of a layer and all inside it."""
        self._before = {
            name: (type(module), attributes(module))
            for name, module in self.layers.modules.items()
            if name in self.selected and (root in (ROOT, name) or name.startswith(f"{root}."))
        }

    def update(self) -> None:
        """Add the attributes that were set since `begin`."""
        for name, (kind, before) in self._before.items():
            module = self.layers.modules[name]
            if type(module) is not kind:
                continue  # a lazy module became another class, and its attributes are settings
            for key, now in attributes(module).items():
                then = before.get(key)
                # Identity, as a forward may set what is equal by chance this time: a number that was computed again is
                # another object. Text is compared by value, because `attributes` makes it anew of a sequence.
                if now is not then and not (type(now) is str and now == then):
                    self.found.setdefault(name, set()).add(key)

    def clear(self) -> None:
        """Compare nothing until the next `begin`."""
        self._before = {}
