"""The calls of a real run, with recipes of their tensors.

No tensor of the run is kept, since that would take the memory of all activations. Each is replaced by a placeholder on
the meta device that says how to make a synthetic one. If something cannot be replaced, the call is not repeated alone,
and that is the reason.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from pytest_modelprobe.models import (
    Autocast,
    CallTracer,
    Flat,
    Layers,
    ModuleCall,
    active_autocast,
    flatten,
    flatten_call,
    has_dense_storage,
    map_tensors,
    version,
)
from pytest_modelprobe.runs.noise import NARROW

from .recipes import kind_of

_MOST_CALLS = 4
"""At most so many calls of a layer are isolated. They differ in shapes or arguments, as the steps of a decoder do."""


@dataclasses.dataclass(slots=True, eq=False)
class TensorSpec:
    """Name, layout and recipe of a tensor in a call."""

    name: str
    """Path in the call. It is empty inside an object that cannot be flattened."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kind: str
    value: Tensor | None = None
    """A copy of integers inside such objects, which are lengths and positions, whose values matter."""


@dataclasses.dataclass(slots=True, eq=False)
class ArgumentTemplate:
    """A copy of a nested value with a placeholder for each tensor."""

    value: Any
    known: bool


@dataclasses.dataclass(slots=True, eq=False)
class TracedCall(ModuleCall):
    """One call of the real run, with what is needed to call the layer again."""

    parent: TracedCall | None
    shape: tuple[int, ...] | None = None
    """Shape of its first input."""
    alone: bool = False
    """Whether to call it alone."""
    autocast: tuple[Autocast, ...] = ()
    inputs: ArgumentTemplate | None = None
    outputs: ArgumentTemplate | None = None
    reason: str | None = None
    """Why it cannot be called alone, or why its output cannot be made again."""
    calls: list[TracedCall] = dataclasses.field(default_factory=list)
    """The calls that its own code made."""


class Tracer:
    """Notes each call of a run: the structure, shapes and recipes of its arguments and its output.

    The hooks are attached within a `with` block until `finish`.

    Args:
        layers: The layers of the model.
        selected: Names of the layers that can be called alone, or `None` for all.
        only: Names of some of these. Of the others, no more than their calls is noted.
    """

    def __init__(self, layers: Layers, selected: Collection[str] | None, only: Collection[str] | None = None) -> None:
        self.modules: dict[int, Any] = {id(m): m for root in layers.modules.values() for m in root.modules()}
        """The modules by id. If an object that holds a module is copied, the module itself is not."""
        self.called: set[str] = set()
        """Layers that can be called alone."""
        self.is_narrow = False
        """Whether something was computed in half precision."""
        self._only = only
        self._selected = layers.modules.keys() if selected is None else frozenset(selected)
        self._calls: list[TracedCall] = []
        self._seen: dict[str, set[object]] = defaultdict(set)
        self._kinds = WeakIdKeyDictionary()
        # Ours come before all other hooks, because the user's run again when the layer is called alone, and would
        # change the inputs twice.
        self._hooks = CallTracer(
            layers.modules,
            TracedCall,
            before=self._before,
            after=self._after,
            failed=self._failed,
            prepend=True,
            skip_recomputed=True,
        )

    def __enter__(self) -> Tracer:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def finish(self) -> list[TracedCall]:
        """Remove the hooks, and return the calls."""
        self._hooks.close()
        self._kinds = WeakIdKeyDictionary()
        return self._calls

    def _before(self, call: TracedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        flat = flatten_call(args, kwargs)
        new = call.layer in self._selected and self._is_new(call, flat)
        if new:
            self.called.add(call.layer)
        call.shape = tuple(flat.tensors[0][1].shape) if flat.tensors else None
        call.alone = new and (self._only is None or call.layer in self._only)
        call.autocast = active_autocast()
        own = (parameter for parameter in call.module._parameters.values() if parameter is not None)
        dtypes = (*(x.dtype for x in (*own, *(x for _, x in flat.tensors))), *(dtype for _, dtype, _ in call.autocast))
        self.is_narrow = self.is_narrow or not NARROW.isdisjoint(dtypes)
        self._calls.append(call)
        if call.parent is not None:
            call.parent.calls.append(call)
        if call.alone:
            call.inputs = self._template(call, "takes", (args, kwargs), flat)

    def _after(self, call: TracedCall, args: tuple[Any, ...], output: Any) -> None:
        if call.parent is not None and call.parent.alone:
            call.outputs = self._template(call, "gets", output, flatten("output", output, objects=False))

    def _failed(self, call: TracedCall) -> None:
        call.reason = call.reason or f"{call.layer} raised in the run"

    def _is_new(self, call: TracedCall, flat: Flat) -> bool:
        tensors = tuple((path, None if x.is_nested else x.shape, x.dtype) for path, x in flat.tensors)
        like = call.module.training, tensors, tuple(flat.plain.items())
        seen = self._seen[call.layer]
        if like in seen or len(seen) == _MOST_CALLS:
            return False
        seen.add(like)
        return True

    def _template(self, call: TracedCall, does: str, value: Any, flat: Flat) -> ArgumentTemplate | None:
        names = {id(tensor): path for path, tensor in reversed(flat.tensors)}
        made: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor: as long as it lives, no other gets its id

        def placeholder_for(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = tensor, self._placeholder(tensor, names.get(id(tensor), ""))
            return made[id(tensor)][1]

        try:
            value = map_tensors(placeholder_for, value)
            return ArgumentTemplate(value if flat.known else copied(value, placeholder_for, self.modules), flat.known)
        except CannotTellError as error:
            what = str(error)
        except Exception as error:  # noqa: BLE001 - a `__deepcopy__` may raise anything
            what = f"an object that cannot be copied ({type(error).__name__}: {error})"
        if does == "takes":
            call.reason = line(f"takes {what}")
        elif call.reason is None:
            call.reason = line(f"{call.layer} gives out {what}")
        return None

    def _placeholder(self, tensor: Tensor, name: str) -> Tensor:
        if hasattr(tensor, "_modelprobe_spec"):
            return tensor
        if type(tensor) not in (Tensor, nn.Parameter) or not has_dense_storage(tensor) or tensor.is_quantized:
            raise CannotTellError(f"a tensor that is not dense ({type(tensor).__name__}, {tensor.layout})")
        floating = tensor.is_floating_point() or tensor.is_complex()
        spec = TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            kind=self._kind(tensor) if name else "2^0",
            value=None if name or floating else tensor.detach().clone(),
        )
        placeholder: Any = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        placeholder._modelprobe_spec = spec
        return placeholder  # type: ignore[no-any-return]

    def _kind(self, tensor: Tensor) -> str:
        now = version(tensor)
        then, kind = self._kinds.get(tensor, (None, ""))
        if now is None or then != now:
            kind = kind_of(tensor)
            self._kinds[tensor] = now, kind
        return str(kind)


class _Replacing(TorchFunctionMode):
    """Lets `copy.deepcopy` replace each tensor by the result of a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return self._function(args[0])
        return func(*args, **(kwargs or {}))


def copied(value: Any, function: Callable[[Tensor], Tensor], kept: Mapping[int, Any]) -> Any:
    """Return a deep copy with ``function`` applied to each tensor. Objects in ``kept``, by id, are not copied."""
    with _Replacing(function):
        return copy.deepcopy(value, dict(kept))


_LONGEST = 200
"""Most characters of a reason, which is one line of a note."""


class CannotTellError(Exception):
    """A call cannot be isolated. The text is the reason."""


def reason_of(error: Exception) -> str:
    """Return the message of an error, with its type unless it is a `CannotTellError`."""
    return line(str(error) if isinstance(error, CannotTellError) else f"{type(error).__name__}: {error}")


def line(text: str) -> str:
    """Return the first line of a text, printable and not too long."""
    first = text.strip().partition("\n")[0]
    shown = "".join(c if c.isprintable() else "?" for c in first)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 3] + "..."
