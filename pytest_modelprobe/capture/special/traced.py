"""Hooks that `torch.compile` traces into its graphs: they reduce into buffers, in the forward and in the backward.

A record of compiled code cannot come from Python hooks, because a compiled graph calls none. These hooks contain tensor
operations alone, so dynamo compiles them with the model, and the sums are read once a record is made. Only sums and
ranges can be kept this way, which is why such a record has no inputs, no fingerprints and no single forwards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pytest_modelprobe._torch import compile_only_inside, graph_task
from pytest_modelprobe.capture.observed.observation import Forward, TensorObservation
from pytest_modelprobe.capture.observed.tensors import plain_name
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import Layers, ModuleHook
from pytest_modelprobe.record import COMPILED_INSIDE, ROOT, ForwardKind
from pytest_modelprobe.statistics import NO_ELEMENT, WHOLE, Reduced

MOST_OUTPUTS = 4
"""How many output tensors of one layer are recorded. Their buffers are made before it is known how many there are."""

_COLUMNS = 9
"""Numbers of a tensor that add up over calls. Two more, the least and the greatest element, do not."""
_MODES = (False, True)
"""Whether the model is in training mode: evaluation first."""


class TracedHooks:
    """Puts a hook on each layer that dynamo can trace, so that no Python runs while the model does.

    The calls of a layer within a forward are added up as one call, and so are all forwards since `take`.

    Args:
        layers: The layers of the model.
        selected: Names of the layers to record.
    """

    def __init__(self, layers: Layers, selected: Collection[str]) -> None:
        self._root_name, root = next(iter(layers.modules.items()))
        devices = dict.fromkeys(tensor.device for tensor in (*nn.Module.parameters(root), *nn.Module.buffers(root)))
        if len(devices) > 1:
            raise UsageError(
                f'the model is on {" and ".join(map(str, devices))}, and compiled="inside" adds up on one device: '
                "leave this option out, and the model runs eagerly while it is watched"
            )
        device = next(iter(devices), torch.device("cpu"))
        chosen = {name: layers.modules[name] for name in layers.modules if name in selected or name == self._root_name}
        self._selected = frozenset(selected)
        self._modules = chosen
        clock = torch.zeros(1, dtype=_wide(device), device=device)
        self._hooks = {name: _TracedHook(module, root, clock) for name, module in chosen.items()}
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Put the hooks on, and let what was compiled without them be compiled again."""
        for name, hook in self._hooks.items():
            self._handles.append(self._modules[name].register_forward_hook(hook))
        torch.compiler.reset()
        # `torch.compile(model)` calls the hooks of the model itself outside of its graph. Without this, each such call
        # would be compiled to a graph of its own.
        compile_only_inside([_TracedHook.__call__, _floating, _add_gradient, _add, _count])

    def detach(self) -> None:
        """Remove the hooks. A graph with them is guarded by them, so it is not used again."""
        while self._handles:
            self._handles.pop().remove()

    def take(self, index: int) -> list[Forward]:
        """Return what was seen since, one entry for each mode of the model, and begin again.

        Args:
            index: Index of the first of these forwards.
        """
        found = []
        numbers = self._read()
        for training in _MODES:
            forward = self._forward(index, (self._root_name, training), numbers)
            if forward is not None:
                found.append(forward)
                index += forward.forwards
        return found

    def notes(self) -> Iterator[str]:
        """Yield what is not recorded."""
        yield COMPILED_INSIDE
        for name, hook in self._hooks.items():
            if hook.more:
                yield f"{name}: of its outputs only the first {MOST_OUTPUTS} floating-point tensors are recorded"
            if hook.unknown is not None:
                yield f"{name}: output cannot be looked into ({hook.unknown}) inside a compiled graph"

    def _read(self) -> dict[int, list[float]]:
        """Return the numbers of each buffer by its `id`, read in one transfer, and set all to zero."""
        buffers = [
            buffer
            for hook in self._hooks.values()
            for by_mode in hook.slots
            for slot in by_mode
            if slot.path is not None
            for buffer in (slot.values, slot.gradients)
        ]
        buffers += [count for hook in self._hooks.values() for count in hook.calls]
        with torch.no_grad():
            flat = torch.cat(buffers).cpu().split([len(buffer) for buffer in buffers]) if buffers else ()
            for buffer in buffers:
                buffer.zero_()
        return {id(buffer): part.tolist() for buffer, part in zip(buffers, flat, strict=True)}

    def _forward(self, index: int, kind: ForwardKind, numbers: dict[int, list[float]]) -> Forward | None:
        forward = Forward(index, kind, WHOLE)
        calls = {name: numbers[id(hook.calls[kind[1]])] for name, hook in self._hooks.items()}
        forward.forwards = int(calls[self._root_name][0])
        seen: dict[str, list[tuple[str, TensorObservation]]] = {}
        for name in self._selected:
            values = [
                (str(slot.path), slot.observation(numbers[id(slot.values)], numbers[id(slot.gradients)]))
                for slot in self._hooks[name].slots[kind[1]]
                if slot.path is not None
            ]
            if calls[name][0] or any(value.backward is not None for _, value in values):
                seen[name] = values
        self._call_all(forward, seen, {name: calls[name][1] for name in seen})
        if any(value.backward is not None for values in seen.values() for _, value in values):
            forward.trained_by.add(0)
        return forward if forward.calls or forward.forwards else None

    def _call_all(
        self, forward: Forward, seen: dict[str, list[tuple[str, TensorObservation]]], finished: dict[str, float]
    ) -> None:
        """Fill in the calls in the order in which they ended. By its name, a layer began before those inside it."""
        children: dict[str | None, list[str]] = {}
        for name in sorted(seen, key=finished.__getitem__):
            children.setdefault(_parent(name, seen), []).append(name)

        numbers: dict[Hashable, tuple[int, int]] = {}

        def call(name: str) -> None:
            one = forward.begin_call(name)
            one.forwards, one.training, one.inputs_known = forward.forwards, self._modules[name].training, False
            for inside in children.get(name, ()):
                call(inside)
            for path, value in seen[name]:
                # A container often returns what a layer inside it returned. No storage tells that of compiled code, so
                # equal numbers do.
                same = (
                    value.shape,
                    value.dtype,
                    value.forward.computed().row,
                    value.backward and value.backward.computed().row,
                )
                value.number = numbers.setdefault(same, forward.next_number())
                one.outputs.append((path, value))
            one.grad_enabled = any(value.requires_grad for _, value in seen[name])
            forward.end_call(one)

        for name in children.get(None, ()):
            call(name)


class _Slot:
    """Buffers for one output of a layer, and what a record says of it besides its numbers."""

    __slots__ = ("device", "dtype", "gradients", "path", "requires_grad", "shape", "values")

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(_COLUMNS + 2, dtype=_wide(device), device=device)
        self.gradients = torch.zeros_like(self.values)
        self.path: str | None = None
        self.shape: tuple[int, ...] = ()
        self.dtype = torch.float32
        self.device = device
        self.requires_grad = False

    def observation(self, values: list[float], gradients: list[float]) -> TensorObservation:
        """Return what was seen of the output and its gradient."""
        seen: TensorObservation = object.__new__(TensorObservation)
        seen.number, seen.shape = (0, 0), tuple(map(int, self.shape))
        seen.dtype, seen.device = plain_name(self.dtype), plain_name(self.device)
        seen.requires_grad, seen.axis, seen.overwritten, seen.targets = self.requires_grad, None, False, ()
        seen.forward = _reduced(values)
        seen.backward = _reduced(gradients) if gradients[0] else None
        seen.backward_inner, seen.layout, seen.whole, seen.returned_as = None, None, False, None
        return seen


class _TracedHook(ModuleHook):
    """A hook that dynamo traces.

    It reads no dict and keeps no counter in Python. Dynamo would guard the graph by their values, and compile again for
    each new one.
    """

    is_modelprobe = True

    def __init__(self, module: nn.Module, root: nn.Module, clock: Tensor) -> None:
        super().__init__(module)
        self.root = root
        self.clock = clock
        self.slots = [[_Slot(clock.device) for _ in range(MOST_OUTPUTS)] for _ in _MODES]
        self.calls = [torch.zeros(2, dtype=clock.dtype, device=clock.device) for _ in _MODES]
        """For each mode, the number of calls, and the tick of the clock that all layers share when the last ended."""
        self.more = False
        self.unknown: str | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling() and graph_task() != -1:
            return  # activation checkpointing runs a part again, which is no new call
        mode = 1 if self.root.training else 0
        calls = self.calls[mode]
        self.clock.add_(1)
        calls.copy_(torch.cat([calls[:1] + 1, self.clock]))
        slots = self.slots[mode]
        found, unknown = _floating("output", output)
        if unknown is not None:
            self.unknown = unknown
        if len(found) > MOST_OUTPUTS:
            self.more = True
        for slot, (path, tensor) in zip(slots, found, strict=False):
            slot.path, slot.shape, slot.dtype, slot.device = path, tuple(tensor.shape), tensor.dtype, tensor.device
            slot.requires_grad = tensor.requires_grad
            _add(slot.values, tensor)
            if tensor.requires_grad:
                _add_gradient(slot.gradients, tensor)


def _floating(path: str, output: Any) -> tuple[list[tuple[str, Tensor]], str | None]:
    """Return the floating-point tensors of an output with their paths, and the type of a part that is not known."""
    if isinstance(output, Tensor):
        return ([(path, output)] if output.is_floating_point() else []), None
    if output is None or isinstance(output, (bool, int, float, str)):
        return [], None
    if isinstance(output, dict):
        parts = [(f"{path}.{key}", value) for key, value in output.items()]
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        parts = [(f"{path}.{key}", getattr(output, key)) for key in output._fields]
    elif isinstance(output, (tuple, list)):
        parts = [(f"{path}[{i}]", value) for i, value in enumerate(output)]
    else:
        return [], type(output).__name__
    found: list[tuple[str, Tensor]] = []
    unknown: str | None = None
    for where, part in parts:
        inside, other = _floating(where, part)
        found = found + inside
        unknown = unknown or other
    return found, unknown


def _add_gradient(buffer: Tensor, tensor: Tensor) -> None:
    def add(gradient: Tensor) -> None:
        _add(buffer, gradient)

    tensor.register_hook(add)


def _add(buffer: Tensor, tensor: Tensor) -> None:
    """Add the sums of a tensor to a buffer, and widen the range by its elements.

    Rows are summed in float32 (float64 stays), where a compiler fuses this with what computes the row. Their moments
    are about the mean of the row, and the rows are added up in the dtype of the buffer.
    """
    if tensor.numel() == 0:
        return
    wide = buffer.dtype
    x = tensor.detach()
    if x.dtype != wide:
        x = x.to(torch.float32)
    if x.dim() == 0:
        x = x.reshape(1)
    dims = (-2, -1) if x.dim() > 3 else (-1,)
    size = x.shape[-1] * x.shape[-2] if x.dim() > 3 else x.shape[-1]
    bad = (x - x) != 0
    finite = torch.where(bad, 0, x)
    others = _count(bad, x, dims)
    count = size - others
    total = finite.sum(dims, keepdim=True)
    mean = total / count.clamp(min=1)
    deviations = torch.where(bad, 0, x - mean).square().sum(dims, keepdim=True)
    zeros, nan, posinf = _count(x == 0, x, dims), _count(x != x, x, dims), _count(x == math.inf, x, dims)
    columns = torch.stack([count, others, nan, posinf, zeros, total, deviations]).flatten(1).to(wide)
    between = (columns[5].square() / columns[0].clamp(min=1)).sum()
    low = torch.where(bad, math.inf, x).amin().to(wide)
    high = torch.where(bad, -math.inf, x).amax().to(wide)
    low = torch.where(buffer[0] > 0, torch.minimum(low, buffer[_COLUMNS]), low)
    high = torch.where(buffer[0] > 0, torch.maximum(high, buffer[_COLUMNS + 1]), high)
    sums = torch.cat([torch.ones_like(between)[None], columns.sum(1), between[None]])
    # Dynamo forbids hooks on tensors to change what they are given, which it tells by version counters. `.data` has a
    # counter of its own.
    buffer.data.copy_(torch.cat([buffer[:_COLUMNS] + sums, low[None], high[None]]))


def _count(mask: Tensor, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return mask.to(x.dtype).sum(dims, keepdim=True)


def _reduced(numbers: list[float]) -> Reduced:
    tensors, count, others, nan, posinf, zeros, total, deviations, between, low, high = numbers
    if not count + others:
        return Reduced(int(tensors), row=NO_ELEMENT)
    mean = total / count if count else 0.0
    deviations = max(0.0, deviations + between - (total * mean if count else 0.0))
    never = math.inf
    row = (
        int(count), int(nan), int(posinf), int(others - nan - posinf), int(zeros), never, never, never,
        low, high, mean, deviations,
    )  # fmt: skip
    return Reduced(int(tensors), row=row)


def _parent(name: str, among: Collection[str]) -> str | None:
    """Return the nearest layer around another, by its name."""
    outer = name
    while "." in outer:
        outer = outer.rpartition(".")[0]
        if outer in among:
            return outer
    return ROOT if name != ROOT and ROOT in among else None


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
