"""The calls of a real run, with recipes of their tensors, and copies of a watch's inputs, to run its forwards again.

No tensor of the run is kept, since that would take the memory of all activations. Each is replaced by a placeholder on
the meta device that says how to make a synthetic one. If something cannot be replaced, the call is not repeated alone,
and that is the reason.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import BatchOrInstanceNorm, is_wrapped
from pytest_modelprobe.models import (
    Autocast,
    CallTracer,
    Flat,
    Layers,
    ModuleCall,
    active_autocast,
    changing_hooks,
    detached_copy,
    flatten,
    flatten_call,
    has_dense_storage,
    map_tensors,
    preserved,
    seeding,
    version,
)
from pytest_modelprobe.record import ForwardKind
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
        made: dict[int, Tensor] = {}

        def placeholder_for(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = self._placeholder(tensor, names.get(id(tensor), ""))
            return made[id(tensor)]

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
            raise CannotTellError(f"a {_tensor_type(tensor)}")
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


def _tensor_type(tensor: Tensor) -> str:
    if type(tensor) not in (Tensor, nn.Parameter):
        return type(tensor).__name__
    if tensor.is_meta:
        return "meta tensor"
    return "quantized tensor" if tensor.is_quantized else f"{str(tensor.layout).removeprefix('torch.')} tensor"


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


# --- forwards of a watch ----------------------------------------------------------------------------------------------
#
# A watch sees what the test runs, and cannot make it run again. To call layers alone later, it needs the inputs of a
# forward, the modes, and the tensors that layers keep as they were. All of these are copied. If an input cannot be
# copied, the forward is not run again, and a note says why.

_MOST_BYTES = 1 << 26
"""Most bytes of kept tensors that are copied: some models keep quantized weights in buffers."""


@dataclasses.dataclass(slots=True, eq=False)
class KeptForward:
    """What is needed to run a forward again."""

    kind: ForwardKind
    inputs: Any
    """Copies of its positional and keyword arguments."""
    modes: tuple[bool, ...]
    """Whether each layer is in training mode, in the order of the layers."""
    autocast: tuple[Autocast, ...]
    changes: tuple[int, ...] = ()
    """The hooks that changed what layers compute; see `models.changing_hooks`."""
    reason: str | None = None
    """Why it cannot be run again, or `None`."""


class KeptForwards:
    """Copies the inputs of the first forward of each kind.

    Args:
        layers: The layers of the model.

    >>> model = nn.Linear(2, 2)
    >>> forwards = KeptForwards(Layers(model))
    >>> x = torch.ones(1, 2)
    >>> forwards.begins(("(root)", True), (x,), {})
    >>> _ = x.zero_()
    >>> (again,) = forwards.kept.values()
    >>> with forwards.prepared(model, again):
    ...     torch.equal(forwards.run(again), model(torch.ones(1, 2)))
    True
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self.kept: dict[ForwardKind, KeptForward] = {}
        self._before: list[tuple[dict[str, Any], str, Tensor]] = []
        """Copies of tensors before the first forward, each with the dict that has it, and its name there."""

    def begins(self, kind: ForwardKind, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the inputs of a forward that is about to run, if it is new."""
        if not self.kept:
            self._copy_kept_tensors()
        if kind not in self.kept:
            self.kept[kind] = self._kept_forward(kind, args, kwargs)

    def run(self, again: KeptForward) -> object:
        """Run a forward again. To be called within `prepared`."""
        if again.changes != changing_hooks(self._layers.modules.values()):
            again.reason = "an intervention began or ended since: compare the record within its block"
            raise CannotTellError(again.reason)
        args, kwargs = self._copied(again.inputs)
        with contextlib.ExitStack() as stack:
            for state in again.autocast:
                stack.enter_context(torch.autocast(*state))
            return self._layers.modules[again.kind[0]](*args, **kwargs)

    @contextlib.contextmanager
    def prepared(self, model: nn.Module, again: KeptForward) -> Iterator[None]:
        """Set the modes of a forward, and the tensors that layers keep as before the first one. Restore all afterwards.

        Writes to parameters and buffers within the block are not undone, as `isolate` restores these.
        """
        with preserved(model, values=False), seeding.seeded(0):
            for module, training in zip(self._layers.modules.values(), again.modes, strict=True):
                module.training = training
            for owner, name, tensor in self._before:
                if name in owner:
                    owner[name] = tensor.clone()
            yield

    def _copy_kept_tensors(self) -> None:
        """Copy buffers, those of norms aside, which are synthetic in an isolated call, and tensors in attributes."""
        found = [
            (owner, name, tensor)
            for module in self._layers.modules.values()
            for owner in (vars(module), {} if isinstance(module, BatchOrInstanceNorm) else module._buffers)
            for name, tensor in owner.items()
            if has_dense_storage(tensor) and tensor.is_floating_point()
        ]
        if sum(tensor.nbytes for _, _, tensor in found) <= _MOST_BYTES:
            with statistics.ambient_modes_disabled(), torch.no_grad():
                self._before = [(owner, name, tensor.detach().clone()) for owner, name, tensor in found]

    def _kept_forward(self, kind: ForwardKind, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> KeptForward:
        modes = tuple(module.training for module in self._layers.modules.values())
        again = KeptForward(kind, None, modes, active_autocast(), changing_hooks(self._layers.modules.values()))
        try:
            again.inputs = self._copied((args, dict(kwargs)))
        except Exception as error:  # noqa: BLE001 - the `__deepcopy__` of an input may raise anything
            again.reason = f"an input cannot be copied: {reason_of(error)}"
        return again

    def _copied(self, inputs: Any) -> Any:
        """Return a deep copy, detached from graphs, except for modules of the model.

        Unlike `map_tensors`, it copies every object, because the model may change a cache before the forward is run
        again.
        """
        root = next(iter(self._layers.modules.values()))
        known: dict[int, Any] = {id(module): module for module in root.modules()}
        with statistics.ambient_modes_disabled(), torch.no_grad():
            for _, tensor in flatten_call(*inputs, objects=True).tensors:
                one = detached_copy(tensor) if has_dense_storage(tensor) and not is_wrapped(tensor) else None
                if one is None:
                    raise CannotTellError("it is inside a transform, or has no memory of its own")
                known[id(tensor)] = one.requires_grad_(tensor.requires_grad)
            return copy.deepcopy(inputs, known)
