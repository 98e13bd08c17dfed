"""What is noted of the real run: of each call what went in and out, and whose call it was."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from pytest_modelprobe._torch import any_autocast, graph_task
from pytest_modelprobe.models import Flat, Layers, flatten, flatten_call, has_bytes, map_tensors

from .reasons import CannotTellError, line
from .recipes import kind_of

_MOST_CALLS = 4
"""Calls of one layer that differ in shapes or arguments and are each looked at: a decoder makes one at each length."""

_AUTOCAST = ("cpu", "cuda", "mps", "xpu")


@dataclasses.dataclass(slots=True, eq=False)
class TensorSpec:
    """Where a tensor stood in a call, and what it was like."""

    name: str
    """Path in the call; empty where it lay inside an object that cannot be looked into."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kind: str
    value: Tensor | None = None
    """Of integers inside such objects: lengths and positions, which have to be right."""


@dataclasses.dataclass(slots=True, eq=False)
class ArgumentTemplate:
    """A nested value with a placeholder for each tensor; everything else in it is a copy."""

    value: Any
    known: bool


@dataclasses.dataclass(slots=True, eq=False)
class TracedCall:
    """One call of the real run."""

    layer: str
    index: int
    module: nn.Module
    parent: TracedCall | None
    shape: tuple[int, ...] | None
    """Of its first tensor."""
    alone: bool
    """Whether to call it again."""
    autocast: tuple[tuple[str, torch.dtype], ...]
    error: BaseException | None
    """What was being handled when it began."""
    inputs: ArgumentTemplate | None = None
    outputs: ArgumentTemplate | None = None
    reason: str | None = None
    calls: list[TracedCall] = dataclasses.field(default_factory=list)


class CallTracer:
    """Hooks that note each call, until `finish`."""

    def __init__(self, layers: Layers, selected: Collection[str] | None, only: Collection[str] | None = None) -> None:
        self.layers = layers
        self.modules: dict[int, Any] = {id(m): m for root in layers.modules.values() for m in root.modules()}
        """By id: an object that holds one is copied, the module is not."""
        self.called: set[str] = set()
        """Layers that can be called alone."""
        self._only = only
        self._selected = layers.modules.keys() if selected is None else frozenset(selected)
        self._calls: list[TracedCall] = []
        self._stack: list[TracedCall] = []
        self._counts: dict[str, int] = defaultdict(int)
        self._seen: dict[str, set[object]] = defaultdict(set)
        self._kinds = WeakIdKeyDictionary()
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> CallTracer:
        graph_task()  # a torch that cannot answer is refused here, not in the hooks
        for name, module in self.layers.modules.items():
            if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                # First of all hooks: the user's run again when the layer is called alone.
                before, after = functools.partial(self._before, name), self._after
                pre = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
                post = module.register_forward_hook(after, with_kwargs=True, prepend=True, always_call=True)
                self._exit.callback(pre.remove)
                self._exit.callback(post.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def finish(self) -> list[TracedCall]:
        """Note no more, and return the calls."""
        self._exit.close()
        self._kinds = WeakIdKeyDictionary()
        return self._calls

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if graph_task() != -1:
            return  # recomputed by activation checkpointing: no call of its own
        flat = flatten_call(args, kwargs)
        parent = self._stack[-1] if self._stack else None
        new = name in self._selected and self._is_new(name, module, flat)
        if new:
            self.called.add(name)
        call = TracedCall(
            layer=name,
            index=self._counts[name],
            module=module,
            parent=parent,
            shape=tuple(flat.tensors[0][1].shape) if flat.tensors else None,
            alone=new and (self._only is None or name in self._only),
            autocast=active_autocast(),
            error=sys.exc_info()[1],
        )
        self._counts[name] += 1
        self._calls.append(call)
        self._stack.append(call)
        if parent is not None:
            parent.calls.append(call)
        if call.alone:
            call.inputs = self._template(call, "takes", (args, kwargs), flat)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if graph_task() != -1:
            return
        while self._stack:  # calls that ended without a hook
            call = self._stack.pop()
            if call.module is module:
                break
        else:
            return
        if sys.exc_info()[1] is not call.error:
            call.reason = call.reason or f"{call.layer} raised in the run"
        elif call.parent is not None and call.parent.alone:
            call.outputs = self._template(call, "gets", output, flatten("output", output, objects=False))

    def _is_new(self, name: str, module: nn.Module, flat: Flat) -> bool:
        tensors = tuple((path, tensor.shape, tensor.dtype) for path, tensor in flat.tensors)
        like = module.training, tensors, tuple(flat.plain.items())
        seen = self._seen[name]
        if like in seen or len(seen) == _MOST_CALLS:
            return False
        seen.add(like)
        return True

    def _template(self, call: TracedCall, does: str, value: Any, flat: Flat) -> ArgumentTemplate | None:
        names = {id(tensor): path for path, tensor in reversed(flat.tensors)}
        made: dict[int, Tensor] = {}

        def noted(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = self._placeholder(tensor, names.get(id(tensor), ""))
            return made[id(tensor)]

        try:
            value = map_tensors(noted, value)
            return ArgumentTemplate(value if flat.known else copied(value, noted, self.modules), flat.known)
        except CannotTellError as error:
            what = str(error)
        except Exception as error:  # noqa: BLE001 - whatever objects do that do not like to be copied
            what = f"an object that cannot be copied ({type(error).__name__}: {error})"
        if does == "takes":
            call.reason = line(f"takes {what}")
        elif call.reason is None:
            call.reason = line(f"{call.layer} gives out {what}")
        return None

    def _placeholder(self, tensor: Tensor, name: str) -> Tensor:
        if hasattr(tensor, "_modelprobe_slot"):
            return tensor
        if type(tensor) not in (Tensor, nn.Parameter) or not has_bytes(tensor) or tensor.is_quantized:
            raise CannotTellError(f"a {_tensor_type(tensor)}")
        floating = tensor.is_floating_point() or tensor.is_complex()
        slot = TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            kind=self._kind(tensor) if name else "2^0",
            value=None if name or floating else tensor.detach().clone(),
        )
        placeholder: Any = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device="meta")
        placeholder._modelprobe_slot = slot
        return placeholder  # type: ignore[no-any-return]

    def _kind(self, tensor: Tensor) -> str:
        version = None if tensor.is_inference() else tensor._version
        known, kind = self._kinds.get(tensor, (None, ""))
        if version is None or known != version:
            kind = kind_of(tensor)
            self._kinds[tensor] = version, kind
        return str(kind)


class _Replacing(TorchFunctionMode):
    """Lets `copy.deepcopy` put something else in the place of each tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return self._function(args[0])
        return func(*args, **(kwargs or {}))


def copied(value: Any, function: Callable[[Tensor], Tensor], kept: Mapping[int, Any]) -> Any:
    """Return a deep copy, ``function`` applied to each tensor; ``kept`` holds objects, by id, that are not copied."""
    with _Replacing(function):
        return copy.deepcopy(value, dict(kept))


def active_autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the devices under autocast, each with its dtype."""
    if not any_autocast():
        return ()
    devices = (d for d in _AUTOCAST if torch.amp.is_autocast_available(d) and torch.is_autocast_enabled(d))
    return tuple((device, torch.get_autocast_dtype(device)) for device in devices)


def _tensor_type(tensor: Tensor) -> str:
    if type(tensor) not in (Tensor, nn.Parameter):
        return type(tensor).__name__
    if tensor.is_meta:
        return "meta tensor"
    return "quantized tensor" if tensor.is_quantized else f"{str(tensor.layout).removeprefix('torch.')} tensor"
