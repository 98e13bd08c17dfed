"""What the hooks write into: tensors seen, calls, forwards; and how forwards merge.

Mutable while the model runs, read once when the record is made. A forward that is over merges into the totals, so
that memory grows with the number of layers and not with the number of forwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import statistics
from .record import Dimension, Plain, merge_dimensions
from .statistics import Reduced

Kind = tuple[str, bool]
"""What keeps forwards apart: the layer whose outermost call it is, and its training mode."""


class Observed:
    """One tensor that went into or came out of a call: its numbers, and its gradient's when that arrives."""

    __slots__ = (
        "axis", "backward", "backward_inner", "device", "dtype", "forward", "number", "overwritten", "requires_grad",
        "shape", "storage", "targets",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor, number: int, forward: Reduced) -> None:
        self.number = number
        self.shape: tuple[Dimension, ...] = tuple(tensor.shape)
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.device = str(tensor.device)
        self.requires_grad = tensor.requires_grad
        self.axis = forward.axis
        self.forward = forward
        self.backward: Reduced | None = None
        self.backward_inner: Reduced | None = None
        self.overwritten = False
        self.storage: StorageWeakRef | None = None
        """While it is held the storage's address is not used again, so that an address is an identity."""
        self.targets: list[Observed] = []
        """Where this one has merged into: a gradient that comes late goes there too."""

    def hold_storage(self, tensor: torch.Tensor) -> None:
        """Hold the tensor's storage weakly."""
        self.storage = StorageWeakRef(tensor.untyped_storage())

    def receive(self, gradient: Reduced, *, inner: bool) -> None:
        """Take in the gradient of one backward pass."""
        if inner:
            self.backward_inner = _merged(self.backward_inner, gradient)
        else:
            self.backward = _merged(self.backward, gradient)
        for target in self.targets:
            target.receive(gradient, inner=inner)

    def merge(self, other: Observed) -> None:
        """Take in the same value of another forward."""
        self.shape = _merged_shape(self.shape, other.shape)
        self.forward = statistics.merge(self.forward, other.forward)
        self.backward = _merged(self.backward, other.backward)
        self.backward_inner = _merged(self.backward_inner, other.backward_inner)
        self.overwritten |= other.overwritten
        self.requires_grad |= other.requires_grad

    def copy(self) -> Observed:
        """Return an independent copy: a `Reduced` is never changed, so that sharing it is safe."""
        copy = object.__new__(Observed)
        for name in Observed.__slots__:
            if hasattr(self, name):
                setattr(copy, name, getattr(self, name))
        copy.storage, copy.targets = None, []
        return copy


def _merged(a: Reduced | None, b: Reduced | None) -> Reduced | None:
    return b if a is None else a if b is None else statistics.merge(a, b)


def _merged_shape(a: tuple[Dimension, ...], b: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    if a == b or len(a) != len(b):  # another rank altogether: the newest is as good as the oldest
        return b
    return tuple(map(merge_dimensions, a, b))


class ObservedCall:
    """One execution of a layer within one forward."""

    __slots__ = (
        "arguments", "autocast", "finished", "forwards", "grad_enabled", "index", "inputs", "inputs_known", "layer",
        "outputs", "random", "recomputed", "started", "training",
    )  # fmt: skip

    def __init__(self, layer: str, index: int, started: int, training: bool) -> None:
        self.layer = layer
        self.index = index
        self.forwards = 1
        self.started = started
        self.finished = -1
        self.training = training
        self.inputs: list[tuple[str, Observed]] = []
        self.inputs_known = True
        self.outputs: list[tuple[str, Observed]] = []
        self.arguments: dict[str, Plain] = {}
        self.grad_enabled = True
        self.autocast: str | None = None
        self.random: str | None = None
        self.recomputed = 0


class Forward:
    """One outermost call of a watched module, and everything that was called in it."""

    def __init__(self, index: int, kind: Kind) -> None:
        self.index = index
        self.kind = kind
        self.calls: dict[tuple[str, int], ObservedCall] = {}
        self.counts: dict[str, int] = {}
        self.events = 0
        self.tensors = 0
        self.by_storage: dict[Hashable, Observed] = {}
        """Tensors already reduced, by the identity of their contents."""
        self.views: dict[int, list[tuple[Observed, int]]] = {}
        """By storage: views that carry a tensor hook, and their version when it was put there."""
        self.parameters: dict[str, Reduced] = {}
        """Gradients of parameters by full name, each as it stood after accumulation."""

    def begin_call(self, layer: str, training: bool) -> ObservedCall:
        """Return a new call of ``layer``."""
        index = self.counts.get(layer, 0)
        self.counts[layer] = index + 1
        call = ObservedCall(layer, index, self._event(), training)
        self.calls[layer, index] = call
        return call

    def end_call(self, call: ObservedCall) -> None:
        """Note that ``call`` has returned."""
        call.finished = self._event()

    def _event(self) -> int:
        self.events += 1
        return self.events - 1


class Totals:
    """The forwards of one kind, merged."""

    def __init__(self) -> None:
        self.forwards = 0
        self.calls: dict[tuple[str, int], ObservedCall] = {}
        self.parameters: dict[str, Reduced] = {}

    def absorb(self, forward: Forward, *, final: bool = True) -> None:
        """Merge a forward in. If ``final`` its late gradients will follow; else it is a preview."""
        self.forwards += 1
        done: set[tuple[int, int]] = set()  # containers share a child's output: merge it once
        copies: dict[int, Observed] = {}
        for key, call in forward.calls.items():
            total = self.calls.get(key)
            if total is None:
                self.calls[key] = _copied(call, copies)
                done.update((id(seen), id(copies[id(seen)])) for _, seen in _values(call))
                continue
            _merge_call(total, call, done, copies)
        if final:
            self._forward_late_gradients(forward)
        for name, gradient in forward.parameters.items():
            merged = _merged(self.parameters.get(name), gradient)
            assert merged is not None
            self.parameters[name] = merged

    def _forward_late_gradients(self, forward: Forward) -> None:
        for key, call in forward.calls.items():
            total = self.calls[key]
            for mine, theirs in ((total.inputs, call.inputs), (total.outputs, call.outputs)):
                targets = dict(mine)
                for path, seen in theirs:
                    target = targets.get(path)
                    if target is not None and not any(t is target for t in seen.targets):
                        seen.targets.append(target)

    def copy(self) -> Totals:
        """Return an independent copy."""
        copy = Totals()
        copies: dict[int, Observed] = {}
        copy.forwards = self.forwards
        copy.calls = {key: _copied(call, copies) for key, call in self.calls.items()}
        copy.parameters = dict(self.parameters)
        return copy


def _values(call: ObservedCall) -> Iterator[tuple[str, Observed]]:
    yield from call.inputs
    yield from call.outputs


def _copied(call: ObservedCall, copies: dict[int, Observed]) -> ObservedCall:
    copy = ObservedCall(call.layer, call.index, call.started, call.training)
    for name in ObservedCall.__slots__:
        setattr(copy, name, getattr(call, name))
    for _, seen in _values(call):
        if id(seen) not in copies:
            copies[id(seen)] = seen.copy()
    copy.inputs = [(path, copies[id(seen)]) for path, seen in call.inputs]
    copy.outputs = [(path, copies[id(seen)]) for path, seen in call.outputs]
    copy.arguments = dict(call.arguments)
    return copy


def _merge_call(
    total: ObservedCall, call: ObservedCall, done: set[tuple[int, int]], copies: dict[int, Observed]
) -> None:
    total.forwards += call.forwards
    total.recomputed += call.recomputed
    total.inputs_known &= call.inputs_known
    for name in ("started", "finished", "training", "grad_enabled", "autocast", "random", "arguments"):
        setattr(total, name, getattr(call, name))  # of the newest
    for mine, theirs in ((total.inputs, call.inputs), (total.outputs, call.outputs)):
        targets = dict(mine)
        for path, seen in theirs:
            target = targets.get(path)
            if target is None:
                copy = copies.setdefault(id(seen), seen.copy())
                mine.append((path, copy))
                done.add((id(seen), id(copy)))
            elif (id(seen), id(target)) not in done:
                target.merge(seen)
                done.add((id(seen), id(target)))


def identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what tells the contents of a tensor, as long as its storage lives; None where nothing does.

    Inference tensors count no versions; a storage that cannot be had (sparse, functorch) tells nothing.
    """
    try:
        if tensor.is_inference():
            return None
        storage = tensor.untyped_storage()._cdata
        return storage, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride()
    except (RuntimeError, NotImplementedError):
        return None
