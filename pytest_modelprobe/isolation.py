"""Each layer called alone, on synthetic tensors: what its own code does, whatever the layers around it do.

The model runs once, and of each call is noted what went in and out: structure, shapes and a coarse *recipe* of the
numbers, no tensor. Then each call runs again by itself. Its inputs and its weights are synthetic; the calls that it
makes are answered by synthetic outputs. What its code hands to those calls, and what it returns, is its response.

A synthetic tensor depends on its recipe, its shape and its place in the call (``input``, the second call's output, the
parameter's own name), never on the name of a layer or on real numbers. So two models respond alike where their code
is alike, whatever their weights and inputs are.

Recipes, behind the shape and a dtype that is not the usual one (``2x16x64 2^-3``, ``4x8:bfloat16 2^0+``):

=====================  ==============================================================================================
``2^-3``               normal numbers of that root mean square; ``2^-3+`` and ``2^-3-`` their magnitudes with that
                       sign, ``2^-3+ to 1`` none above 1
``near 1``             parameters that are all equal: normal numbers about it
``const 1``            all elements equal
``mask -inf``          zeros and that number, for attention masks
``0 or 1``             floats that are a mask
``0..511``             integers, evenly; ``0..63 sorted`` in order; ``-100 or 0..511`` with a mark among them
``bool``, ``true``...  coins; all true; all false
=====================  ==============================================================================================
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import random
import re
import sys
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from . import seeding, statistics
from .flatten import Flat, flatten, flatten_call, map_tensors
from .layers import Layers, own_buffers
from .memory import has_bytes
from .noise import change
from .record import ROOT, Handed, Reading, Response, Statistics
from .restoring import preserved

Key = tuple[str, int]
"""Which call: its layer, and its index among the layer's calls, from 0."""

Perturb = Callable[[Tensor, str], Tensor]

_MOST_CALLS = 4
"""Calls of one layer that differ in shapes or arguments and are each looked at: a decoder makes one at each length."""

_LONGEST = 200

_AUTOCAST = ("cpu", "cuda", "mps", "xpu")


def isolate(
    model: nn.Module,
    forward: Callable[[], object],
    *,
    layers: Collection[str] | None = None,
    recipes: Mapping[Key, Mapping[str, str]] | None = None,
    gradient: bool = False,
    perturb: Perturb | None = None,
) -> dict[Key, Response]:
    """Return how each called layer responds to synthetic tensors; of a layer called again alike, the first call only.

    It costs a few forwards. The model is left as it was, bit for bit, and so are the random states; whoever calls puts
    back what ``forward`` does elsewhere.

    Args:
        model: The model, in the mode in which it is to be judged.
        forward: Runs it once.
        layers: Names of those to call; None: all.
        recipes: How synthetic tensors were made for other responses, `Response.recipes`: they are made alike where
            shape and dtype allow it.
        gradient: Whether to run backward through each call too.
        perturb: Takes a synthetic tensor and its name, returns it a little moved; to see how much of a response is
            rounding. Masks, integers and the like are left alone.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> responses = isolate(model, lambda: model(torch.ones(2, 4)))
    >>> sorted(responses)
    [('(root)', 0), ('0', 0), ('1', 0)]
    >>> [(handed.where, handed.passed) for handed in responses["(root)", 0].handed]
    [('0 input', 'input'), ('1 input', '0 output'), ('output', '1 output')]
    >>> nn.init.zeros_(model[0].weight).sum().item()
    0.0
    >>> isolate(
    ...     model, lambda: model(torch.ones(2, 4)), recipes={k: r.recipes for k, r in responses.items()}
    ... ) == responses
    True
    """
    found = Layers(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved(model))
        stack.enter_context(seeding.forked_rng())
        stack.enter_context(_without_hooks(model.modules(), _is_ours))
        if found.compiled or "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        notes = stack.enter_context(_Notes(found, layers))
        with torch.set_grad_enabled(gradient):
            forward()
        calls = notes.finish()
        stack.enter_context(_quietly(gradient))
        session = stack.enter_context(_Session(found, notes, recipes or {}, gradient=gradient, perturb=perturb))
        return {(call.layer, call.index): session.response(call) for call in calls if call.alone}


def noisy(responses: Mapping[Key, Response], repeats: Sequence[Mapping[Key, Response]]) -> dict[Key, Response]:
    """Return the responses with the noise of each reading: the most that it moved in any of the repeats.

    >>> model = nn.Linear(4, 4)
    >>> def respond(perturb=None):
    ...     return isolate(model, lambda: model(torch.ones(2, 4)), perturb=perturb)
    >>> (response,) = noisy(respond(), [respond(lambda tensor, name: tensor * 1.001)]).values()
    >>> 0.001 < response.handed[0].reading.noise < 0.01
    True
    """
    return {key: _with_noise(response, [repeat.get(key) for repeat in repeats]) for key, response in responses.items()}


def _with_noise(response: Response, repeats: Sequence[Response | None]) -> Response:
    others = [{} if r is None else {h.where: h.reading for h in r.handed} for r in repeats]

    def measured(reading: Reading | None, again: Iterable[Reading | None]) -> Reading | None:
        known = [c for c in (change(reading, other) for other in again) if c is not None] if reading else []
        return dataclasses.replace(reading, noise=max(known)) if reading and known else reading

    handed = (
        dataclasses.replace(h, reading=measured(h.reading, [o.get(h.where) for o in others])) for h in response.handed
    )
    gradient = measured(response.gradient, [None if r is None else r.gradient for r in repeats])
    return dataclasses.replace(response, handed=tuple(handed), gradient=gradient)


# --- what is noted of the real run --------------------------------------------------------------------------------


class _CannotTellError(Exception):
    """A call that cannot be looked at alone; its text is the reason."""


@dataclasses.dataclass(slots=True, eq=False)
class _Slot:
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
class _Template:
    """A nested value with a placeholder for each tensor; everything else in it is a copy."""

    value: Any
    known: bool


@dataclasses.dataclass(slots=True, eq=False)
class _Noted:
    """One call of the real run."""

    layer: str
    index: int
    module: nn.Module
    parent: _Noted | None
    ordinal: int
    """Which of its parent's calls, from 1."""
    shape: tuple[int, ...] | None
    """Of its first tensor."""
    alone: bool
    """Whether to call it again."""
    autocast: tuple[tuple[str, torch.dtype], ...]
    error: BaseException | None
    """What was being handled when it began."""
    inputs: _Template | None = None
    outputs: _Template | None = None
    reason: str | None = None
    calls: list[_Noted] = dataclasses.field(default_factory=list)


class _Notes:
    """Hooks that note each call. They stay on, silent, while layers are called alone: fused paths look for hooks."""

    def __init__(self, layers: Layers, selected: Collection[str] | None) -> None:
        self.layers = layers
        self.modules: dict[int, Any] = {id(m): m for root in layers.modules.values() for m in root.modules()}
        """By id: an object that holds one is copied, the module is not."""
        self.called: set[str] = set()
        """Layers that are to be called alone."""
        self._selected = layers.modules.keys() if selected is None else frozenset(selected)
        self._calls: list[_Noted] = []
        self._stack: list[_Noted] = []
        self._counts: dict[str, int] = defaultdict(int)
        self._seen: dict[str, set[object]] = defaultdict(set)
        self._kinds = WeakIdKeyDictionary()
        self._noting = True
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> _Notes:
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

    def finish(self) -> list[_Noted]:
        """Note no more, and return the calls."""
        self._noting = False
        self._kinds = WeakIdKeyDictionary()
        return self._calls

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._noting or torch._C._current_graph_task_id() != -1:
            return  # recomputed by activation checkpointing: no call of its own
        flat = flatten_call(args, kwargs)
        parent = self._stack[-1] if self._stack else None
        call = _Noted(
            layer=name,
            index=self._counts[name],
            module=module,
            parent=parent,
            ordinal=len(parent.calls) + 1 if parent else 1,
            shape=tuple(flat.tensors[0][1].shape) if flat.tensors else None,
            alone=name in self._selected and self._is_new(name, module, flat),
            autocast=_autocast(),
            error=sys.exc_info()[1],
        )
        self._counts[name] += 1
        self._calls.append(call)
        self._stack.append(call)
        if parent is not None:
            parent.calls.append(call)
        if call.alone:
            self.called.add(name)
            call.inputs = self._template(call, "takes", (args, kwargs), flat)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._noting or torch._C._current_graph_task_id() != -1:
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
            call.outputs = self._template(call, "gets", output, flatten("output", output))

    def _is_new(self, name: str, module: nn.Module, flat: Flat) -> bool:
        tensors = tuple((path, tensor.shape, tensor.dtype) for path, tensor in flat.tensors)
        like = module.training, tensors, tuple(flat.plain.items())
        seen = self._seen[name]
        if like in seen or len(seen) == _MOST_CALLS:
            return False
        seen.add(like)
        return True

    def _template(self, call: _Noted, does: str, value: Any, flat: Flat) -> _Template | None:
        names = {id(tensor): path for path, tensor in reversed(flat.tensors)}
        made: dict[int, Tensor] = {}

        def noted(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = self._placeholder(tensor, names.get(id(tensor), ""))
            return made[id(tensor)]

        try:
            value = map_tensors(noted, value)
            return _Template(value if flat.known else _copied(value, noted, self.modules), flat.known)
        except _CannotTellError as error:
            what = str(error)
        except Exception as error:  # noqa: BLE001 - whatever objects do that do not like to be copied
            what = f"an object that cannot be copied ({type(error).__name__}: {error})"
        if does == "takes":
            call.reason = _line(f"takes {what}")
        elif call.reason is None:
            call.reason = _line(f"{call.layer} gives out {what}")
        return None

    def _placeholder(self, tensor: Tensor, name: str) -> Tensor:
        if hasattr(tensor, "_modelprobe_slot"):
            return tensor
        if type(tensor) not in (Tensor, nn.Parameter) or not has_bytes(tensor) or tensor.is_quantized:
            raise _CannotTellError(f"a {_tensor_type(tensor)}")
        floating = tensor.is_floating_point() or tensor.is_complex()
        slot = _Slot(
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


def _copied(value: Any, function: Callable[[Tensor], Tensor], kept: Mapping[int, Any]) -> Any:
    """Return a deep copy, ``function`` applied to each tensor; ``kept`` holds objects, by id, that are not copied."""
    with _Replacing(function):
        return copy.deepcopy(value, dict(kept))


# --- one call alone -----------------------------------------------------------------------------------------------


class _Session:
    """Calls layers alone, one after the other, with doors before all of them."""

    def __init__(
        self,
        layers: Layers,
        notes: _Notes,
        recipes: Mapping[Key, Mapping[str, str]],
        *,
        gradient: bool,
        perturb: Perturb | None,
    ) -> None:
        self.layers = layers
        self.modules = notes.modules
        self.called = notes.called
        self.hooked = [m for m in layers.modules.values() if m._forward_pre_hooks or m._forward_hooks]
        self.recipes = recipes
        self.gradient = gradient
        self.perturb = perturb
        self.draws = _Draws()
        self.current: _Alone | None = None
        self.seed = _seeder()
        self.owned: dict[str, dict[str, str]] = defaultdict(dict)
        """Recipes of each layer's own weights, and of those below it that have no response of their own."""
        self._weights: dict[int, nn.Parameter | Tensor] = {}
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> _Session:
        with self._exit, torch.no_grad():
            by_layer: dict[str, dict[str, str]] = {}
            for (layer, _), recipes in self.recipes.items():
                by_layer.setdefault(layer, {}).update(recipes)
            for name, module in self.layers.modules.items():
                if not isinstance(module, torch.jit.ScriptModule):
                    home = self._home(name)
                    inside = "" if home in (None, name) else f"{_relative(name, home or ROOT)}."
                    self._give_weights(home, inside, module, by_layer.get(home or "", {}))
                    self._put_door(name, module)
            self._exit = self._exit.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def response(self, call: _Noted) -> Response:
        """Return how the call responds."""
        if call.reason is not None or call.inputs is None:
            return Response(reason=call.reason or "its inputs are not known")
        self.current = alone = _Alone(self, call)
        try:
            with _left_as_it_was(call.module), contextlib.ExitStack() as stack:
                for device, dtype in call.autocast:
                    stack.enter_context(torch.autocast(device, dtype))
                return alone.run()
        finally:
            self.current = None

    def synthetic(self, kind: str, shape: Sequence[int], name: str, dtype: torch.dtype) -> Tensor:
        """Return the tensor of a recipe, on the CPU."""
        tensor = synthetic(kind, shape, name, dtype, draw=self.draws)
        if self.perturb is not None and kind.startswith(("2^", "near")):
            tensor = self.perturb(tensor, name)
        return tensor

    def _home(self, layer: str) -> str | None:
        """Return the layer whose response tells of the weights of ``layer``: itself, or the nearest that is called.

        Code may use the weights of a child without calling it.
        """
        above = layer.split(".")
        names = (".".join(above[:n]) for n in range(len(above), 0, -1))
        return next((name for name in (*names, ROOT) if name in self.called), None)

    def _give_weights(self, home: str | None, prefix: str, module: nn.Module, recipes: Mapping[str, str]) -> None:
        """Put synthetic parameters in the place of the layer's own: the real ones are not even written to."""
        inside = module.named_modules() if isinstance(module, _ATOMIC) else [("", module)]
        for path, owner in inside:
            # Running statistics are learnt too; other buffers are tables and masks, which have to be right.
            buffers = owner._buffers if isinstance(owner, nn.modules.batchnorm._NormBase) else {}
            for tensors in (owner._parameters, buffers):
                for own, tensor in list(tensors.items()):
                    if not has_bytes(tensor) or not (tensor.is_floating_point() or tensors is buffers):
                        continue
                    if type(tensor) not in (Tensor, nn.Parameter):
                        continue  # a shard of a whole that no process has
                    name = f"{path}.{own}" if path else own
                    if id(tensor) not in self._weights:
                        self._weights[id(tensor)] = self._weight(name, tensor, recipes.get(prefix + name, ""))
                    weight: Any = self._weights[id(tensor)]
                    if home is not None:
                        self.owned[home][prefix + name] = weight._modelprobe_kind
                    self._exit.callback(_put, owner, own, tensor)
                    _put(owner, own, weight)

    def _weight(self, name: str, tensor: Tensor, wanted: str) -> Tensor:
        kind = wanted if fits(wanted, tensor.dtype) else kind_of(tensor, weight=True)
        kind = kind if tensor.is_floating_point() else "const 0"  # batches counted
        drawn = self.synthetic(kind, tensor.shape, name, tensor.dtype).to(tensor.device)
        weight: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        weight.copy_(drawn)
        if isinstance(tensor, nn.Parameter):
            weight = nn.Parameter(weight, requires_grad=tensor.requires_grad)
        vars(weight).update(vars(tensor))
        weight._modelprobe_kind = kind
        return weight  # type: ignore[no-any-return]

    def _put_door(self, name: str, module: nn.Module) -> None:
        attributes = vars(module)
        door = _Door(self, name, module.forward)
        if "forward" in attributes:
            self._exit.callback(attributes.__setitem__, "forward", attributes["forward"])
        else:
            self._exit.callback(attributes.pop, "forward", None)
        attributes["forward"] = door


_ATOMIC = (nn.MultiheadAttention, nn.RNNBase)


def _put(owner: nn.Module, name: str, tensor: Tensor) -> None:
    if isinstance(owner, nn.RNNBase):
        setattr(owner, name, tensor)  # it has a list of them besides
    elif name in owner._parameters:
        owner._parameters[name] = tensor  # type: ignore[assignment]
    else:
        owner._buffers[name] = tensor


class _Door:
    """Stands before a layer's ``forward``, and decides who answers: the layer itself, or we in its place."""

    def __init__(self, session: _Session, name: str, forward: Callable[..., Any]) -> None:
        self._session = session
        self._name = name
        self.__wrapped__ = forward  # whoever looks at the signature finds this one's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        alone = self._session.current
        if alone is not None and sys._getframe(1).f_globals.get("__name__") == "torch.nn.modules.module":
            return alone.enter(self._name, self.__wrapped__, args, kwargs)
        return self.__wrapped__(*args, **kwargs)  # `child.forward(x)` is no call: it was not noted as one


@dataclasses.dataclass(slots=True, eq=False)
class _Leaf:
    """A synthetic tensor that a gradient may reach."""

    label: str
    tensor: Tensor


class _Alone:
    """One call, run alone."""

    def __init__(self, session: _Session, call: _Noted) -> None:
        self._session = session
        self._call = call
        self._wanted = session.recipes.get((call.layer, call.index), {})
        self._recipes: dict[str, str] = dict(session.owned.get(call.layer, {}))
        self._entered = False
        self._children: dict[str, list[_Noted]] = {}
        for child in call.calls:
            self._children.setdefault(child.layer, []).append(child)
        self._counts: dict[str, int] = defaultdict(int)
        self._ordinal = 0
        # By id, with what keeps the id its own.
        self._given: dict[int, tuple[Tensor, str, int, _Leaf | None]] = {}
        self._handed: list[tuple[str, str | None]] = []
        self._reduced: list[statistics.Reduced] = []
        self._seen: set[int] = set()
        self._leaves: dict[str, _Leaf] = {}
        self._terms: list[Tensor] = []

    def run(self) -> Response:
        """Call it, and return how it responds."""
        try:
            for name, weight in _own_weights(self._call.module):
                self._give(weight, name, self._leaf(name, name, weight))
            assert self._call.inputs is not None
            args, kwargs = self._made(self._call.inputs, "", "", None)
            buffers = {name: buffer.detach().clone() for name, buffer in _own_buffers(self._call.module)}
            inputs = list(self._given.values())
            self._session.seed()
            with _without_hooks(m for m in self._session.hooked if m is not self._call.module):
                output = self._call.module(*args, **kwargs)
            returned = flatten("output", output)
            self._hand_state(buffers, inputs, returned)
            self._hand("", "", returned)
        except Exception as error:  # noqa: BLE001 - whatever a model does with numbers it was not made for
            return Response(recipes=self._recipes, reason=_reason(error))
        return self._response()

    def enter(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call itself, the first time that its layer is called; answer the calls that it makes."""
        if not self._entered and name == self._call.layer:
            self._entered = True
            return forward(*args, **kwargs)
        noted = self._children.get(name)
        if noted is None:
            raise _CannotTellError(f"calls {name}, which it did not call in the run")
        again = torch._C._current_graph_task_id() != -1
        if again and self._counts[name] > 1:
            raise _CannotTellError(f"calls {name} again in the backward pass, for activation checkpointing")
        number = 0 if again else self._counts[name]
        child = noted[min(number, len(noted) - 1)]
        if child.outputs is None:
            raise _CannotTellError(child.reason or f"what {name} gives out is not known")
        label = _relative(name, self._call.layer) + (f" (call {number + 1})" if number else "")
        flat = flatten_call(args, kwargs)
        if not again:
            self._counts[name] += 1
            self._ordinal += 1
            self._hand(f"{label} ", f"child {self._ordinal} ", flat)
        actual = tuple(flat.tensors[0][1].shape) if flat.tensors else None
        beyond = f" again {number}" if number >= len(noted) else ""
        return self._made(child.outputs, f"child {child.ordinal}{beyond} ", f"{label} ", (child.shape, actual))

    # --- what goes in ---------------------------------------------------------------------------------------------

    def _made(self, template: _Template, role: str, label: str, shapes: _Shapes) -> Any:
        def make(placeholder: Any) -> Tensor:
            slot = placeholder._modelprobe_slot
            with statistics.plainly(), torch.no_grad():
                return self._tensor(slot, role + slot.name, label + slot.name, _followed(slot.shape, shapes))

        return _copied(template.value, make, {} if template.known else self._session.modules)

    def _tensor(self, slot: _Slot, role: str, label: str, shape: tuple[int, ...]) -> Tensor:
        if slot.value is not None:
            return slot.value.clone()
        stride = slot.stride if shape == slot.shape else None
        if not slot.name:
            drawn = self._session.synthetic("2^0", shape, "inside", slot.dtype)
            return _laid_out(drawn.to(slot.device), stride)
        kind = self._recipe(slot, label, shape)
        # Along an axis of stride 0 all elements are one.
        single = shape if stride is None else [1 if step == 0 else n for n, step in zip(shape, stride, strict=True)]
        leaf = self._session.synthetic(kind, single, role, slot.dtype).to(slot.device)
        with torch.set_grad_enabled(self._session.gradient):
            entry = None
            if slot.dtype.is_floating_point:
                leaf.requires_grad_(self._session.gradient)
                entry = self._leaf(role, label, leaf)
            # Code may write into what it gets, but not into a leaf of the graph.
            tensor = _laid_out(leaf, stride) if leaf.requires_grad or leaf.stride() != stride else leaf
            tensor = tensor.expand(shape) if tuple(tensor.shape) != tuple(shape) else tensor
        self._give(tensor, label, entry)
        return tensor

    def _recipe(self, slot: _Slot, label: str, shape: tuple[int, ...]) -> str:
        head = _head(shape, slot.dtype)
        wanted_head, _, wanted = self._wanted.get(label, "").partition(" ")
        most = getattr(self._call.module, "num_embeddings", None)
        kind = wanted if wanted_head == head and fits(wanted, slot.dtype, most) else slot.kind
        self._recipes[label] = f"{head} {kind}"
        return kind

    def _leaf(self, role: str, label: str, tensor: Tensor) -> _Leaf:
        return self._leaves.setdefault(role, _Leaf(label, tensor))

    def _give(self, tensor: Tensor, label: str, leaf: _Leaf | None) -> None:
        self._given[id(tensor)] = tensor, label, tensor._version, leaf

    # --- what comes out -------------------------------------------------------------------------------------------

    def _hand(self, label: str, role: str, flat: Flat) -> None:
        for path, tensor in flat.tensors:
            self._seen.add(id(tensor))
            name = self._passed(tensor)
            if name is None:
                self._computed(label + path, tensor)
            else:
                self._handed.append((label + path, name))
            self._add_term(role + path, tensor)
        self._handed += [(label + path, f"={value!r}"[:80]) for path, value in flat.plain.items() if value is not None]

    def _passed(self, tensor: Tensor) -> str | None:
        """Return which synthetic tensor another one is, or a view or a copy of, untouched; None if it was computed."""
        given, name, version, _ = self._given.get(id(tensor), (None, "", 0, None))
        if given is tensor:
            return name if tensor._version == version else None
        if type(tensor) is not Tensor or not has_bytes(tensor):
            return None
        for given, name, version, _ in self._given.values():
            alike = (given.dtype, given.device, given.shape) == (tensor.dtype, tensor.device, tensor.shape)
            if alike and given._version == version:
                with statistics.plainly(), torch.no_grad():
                    # A constant is equal to others by chance.
                    if torch.equal(given, tensor) and not bool((given == given.reshape(-1)[:1]).all()):
                        return name
        return None

    def _hand_state(
        self,
        buffers: Mapping[str, Tensor],
        inputs: Iterable[tuple[Tensor, str, int, _Leaf | None]],
        returned: Flat,
    ) -> None:
        """Take what the code leaves behind for what it hands on: buffers and inputs that it wrote into."""
        for name, buffer in _own_buffers(self._call.module):
            before = buffers.get(name)
            if before is not None and not _same(buffer, before):  # batch_norm writes without a new version
                self._computed(f"{name} after", buffer)
        seen = self._seen | {id(tensor) for _, tensor in returned.tensors}
        for tensor, label, version, _ in inputs:
            if tensor._version != version and id(tensor) not in seen:
                self._computed(f"{label} after", tensor)

    def _computed(self, where: str, tensor: Tensor) -> None:
        self._handed.append((where, None))
        self._reduced.append(statistics.reduce(tensor))

    def _add_term(self, role: str, tensor: Tensor) -> None:
        """Add to the loss a random projection, now: the code may yet write into the tensor."""
        if not (self._session.gradient and tensor.requires_grad and tensor.is_floating_point() and tensor.numel()):
            return
        with statistics.plainly(), torch.enable_grad():
            weights = self._session.draws(tensor.shape, f"response {role}").to(tensor.device)
            project: Any = _Projection.apply
            self._terms.append(project(tensor, weights / math.sqrt(tensor.numel())))

    def _response(self) -> Response:
        roles, gradients, reason = self._gradients()
        readings = statistics.collect([*self._reduced, *map(statistics.reduce, gradients)])
        computed = iter(readings)
        handed = tuple(
            Handed(where=where, passed=passed, reading=next(computed) if passed is None else None)
            for where, passed in self._handed
        )
        unreached = {leaf.label: None for role, leaf in self._leaves.items() if role not in roles}
        return Response(
            recipes=self._recipes,
            handed=handed,
            gradient=_combined(list(zip(roles, computed, strict=True))) if roles else None,
            without_gradient=tuple(unreached) if self._session.gradient and reason is None else (),
            reason=reason,
        )

    def _gradients(self) -> tuple[list[str], list[Tensor], str | None]:
        """Return the names of what a gradient reached, the gradients, and why there are none."""
        wanted = {role: leaf.tensor for role, leaf in self._leaves.items() if leaf.tensor.requires_grad}
        if not self._terms or not wanted:
            return [], [], None
        try:
            with torch.enable_grad():
                loss = sum((term.to(self._terms[0].device) for term in self._terms[1:]), start=self._terms[0])
            found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        except Exception as error:  # noqa: BLE001 - whatever a model's own backward does
            return [], [], _line(f"backward: {_reason(error)}")
        reached = [(role, gradient) for role, gradient in zip(wanted, found, strict=True) if gradient is not None]
        return [role for role, _ in reached], [gradient for _, gradient in reached], None


class _Projection(torch.autograd.Function):
    """The sum of a tensor times weights. It saves no tensor where activation checkpointing counts those saved."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weights: Tensor) -> Tensor:
        ctx.weights, ctx.dtype = weights, tensor.dtype
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        return torch.dot(tensor.to(wide).reshape(-1), weights.to(wide).reshape(-1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return (gradients[0] * ctx.weights).to(ctx.dtype), None


def _combined(gradients: Sequence[tuple[str, Reading]]) -> Reading:
    """Return one reading for all gradients, in which none drowns: of each norm only the fourth root is left."""
    fingerprint: list[float] | None = None
    deviations, count, nonfinite = 0.0, 0, 0
    for role, reading in gradients:
        numbers = reading.statistics
        if numbers is None or reading.fingerprint is None:
            continue
        norm = (numbers.rms or 0.0) * math.sqrt(numbers.finite)
        scale = norm**-0.75 if norm else 0.0
        signs = seeding.derive(0, f"gradient {role}")
        terms = [scale * x * (1 if signs >> k & 1 else -1) for k, x in enumerate(reading.fingerprint)]
        fingerprint = terms if fingerprint is None else [a + b for a, b in zip(fingerprint, terms, strict=True)]
        deviations += (scale * norm) ** 2
        count += numbers.count
        nonfinite += numbers.nonfinite
    return Reading(
        tensors=len(gradients),
        statistics=Statistics(
            count=count, nan=nonfinite, mean=0.0 if count > nonfinite else None, deviations=deviations
        ),
        fingerprint=None if fingerprint is None else tuple(fingerprint),
    )


_Shapes = tuple[tuple[int, ...] | None, tuple[int, ...] | None] | None
"""Of a child's first tensor: in the run, and now."""


def _followed(shape: tuple[int, ...], shapes: _Shapes) -> tuple[int, ...]:
    """Return the shape of a child's output where it gets other tokens than in the run, as an expert does."""
    before, now = shapes or (None, None)
    if before is None or now is None or before == now or len(before) != len(now):
        return shape
    follows = (i < len(before) and n == before[i] for i, n in enumerate(shape))
    return tuple(now[i] if follow else n for i, (n, follow) in enumerate(zip(shape, follows, strict=True)))


def _laid_out(tensor: Tensor, stride: Sequence[int] | None) -> Tensor:
    """Return a copy with these strides, or contiguous: kernels and ``view`` depend on them."""
    if stride is None:
        return tensor.clone()
    kept = [step if n > 1 or step else 1 for n, step in zip(tensor.shape, stride, strict=True)]
    copied = torch.empty_strided(tensor.shape, kept, dtype=tensor.dtype, device=tensor.device)
    if torch._debug_has_internal_overlap(copied):
        return tensor.clone()
    return copied.copy_(tensor)


def _own_weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters(recurse=isinstance(module, _ATOMIC)):
        if parameter.is_floating_point() and has_bytes(parameter):
            yield name, parameter


def _own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    found = own_buffers(module, atomic=isinstance(module, _ATOMIC))
    return [(name, buffer) for name, buffer in found if has_bytes(buffer) and not buffer.is_inference()]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _relative(name: str, container: str) -> str:
    return name if container == ROOT else name.removeprefix(f"{container}.")


# --- recipes ------------------------------------------------------------------------------------------------------


_EXTREME = -1e4
"""Floats from here down are what masks are made of."""

_FLOATS = re.compile(
    r"2\^(?P<exponent>-?\d{1,3})(?P<sign>[+-]?)(?P<capped>(?<=\+) to 1)?"
    r"|(?P<how>near|const|mask) (?P<value>-?(?:inf|\d+(?:\.\d+)?(?:e[+-]\d+)?))"
    r"|(?P<either>0 or 1)"
)
_INTEGERS = re.compile(
    r"(?:(?P<mark>-\d{1,18}) or )?(?P<low>-?\d{1,18})\.\.(?P<high>-?\d{1,18})(?P<sorted> sorted)?"
    r"|const (?P<value>-?\d{1,18})"
)
_BOOLS = ("bool", "true", "false")


def kind_of(tensor: Tensor, *, weight: bool = False) -> str:
    """Return the recipe for numbers like those of a tensor: coarse, so that other numbers of the kind have the same.

    Args:
        tensor: Any tensor of floats, complex numbers, integers or bools.
        weight: Whether it is a parameter, of which no element is to be the same as the others.

    >>> kind_of(torch.randn(100) / 9), kind_of(torch.rand(100)), kind_of(torch.arange(8)), kind_of(torch.ones(3))
    ('2^-3', '2^-1+ to 1', '0..7 sorted', 'const 1')
    >>> kind_of(torch.tensor([0, -torch.inf])), kind_of(torch.tensor([17, 900, 34]))
    ('mask -inf', '0..511')
    """
    with statistics.plainly(), torch.no_grad():
        x = tensor.detach()
        if x.is_complex():
            x = x.abs()
        if x.dtype == torch.bool:
            return "true" if x.all() else "bool" if x.any() else "false"
        if not x.is_floating_point():
            return _kind_of_integers(x.to(torch.int64)) if x.numel() else "0..0"
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        return _kind_of_floats(wide, torch.finfo(x.dtype).min / 2, weight) if x.numel() else "2^0"


def _kind_of_floats(x: Tensor, least: float, weight: bool) -> str:
    low, high = (bound.item() for bound in x.aminmax())
    if not (low > _EXTREME and high < math.inf):  # a NaN is not either
        masked = x <= _EXTREME
        if masked.any() and not x[~masked].any():
            return f"mask {low:.9g}"
        x = x[x.isfinite() & (x > least)]
        if not x.numel():
            return "2^0"
        low, high = (bound.item() for bound in x.aminmax())
    scale = max(-low, high)
    if scale == 0:
        return "2^0"  # zero by chance of the weights, as a gate is at the start
    if low == high and x.numel() > 1:
        return f"{'near' if weight else 'const'} {low:.3g}"
    if low == 0 and high == 1 and not weight and bool(((x == 0) | (x == 1)).all()):
        return "0 or 1"
    if not 1e-15 < scale < 1e15:
        x = x / scale  # its squares leave the dtype
    else:
        scale = 1.0
    rms = torch.linalg.vector_norm(x).item() / math.sqrt(x.numel())
    exponent = round(math.log2(scale) + math.log2(rms))
    sign = ("+ to 1" if high <= 1 else "+") if low >= 0 else "-" if high <= 0 else ""
    return f"2^{exponent}{sign}"


def _kind_of_integers(x: Tensor) -> str:
    low, high = (int(bound) for bound in x.aminmax())
    if low == high:
        return f"const {low}"
    if x.dim() and x.shape[-1] > 2 and bool((x.diff(dim=-1) >= 0).all()):
        return f"{low}..{high} sorted"
    mark = ""
    if low < 0 <= high:
        negative = x[x < 0]
        if bool((negative == low).all()):
            mark, low = f"{low} or ", 0
    if 0 <= 2 * low <= high:
        low, high = 0, (1 << (high + 1).bit_length() - 1) - 1
    return f"{mark}{low}..{high}"


def fits(kind: str, dtype: torch.dtype, most: int | None = None) -> bool:
    """Whether a recipe, from a file perhaps, is one for tensors of this dtype.

    Args:
        kind: The recipe.
        dtype: Of the tensor to be made.
        most: Integers have to be smaller than this.

    >>> (
    ...     fits("2^-3+", torch.float16),
    ...     fits("2^-3", torch.int64),
    ...     fits("0..9", torch.int64, 8),
    ...     fits("rm -rf", torch.bool),
    ... )
    (True, False, False, False)
    """
    if dtype == torch.bool:
        return kind in _BOOLS
    if dtype.is_floating_point or dtype.is_complex:
        found = _FLOATS.fullmatch(kind)
        return found is not None and (found["exponent"] is None or abs(int(found["exponent"])) <= 127)
    match = _INTEGERS.fullmatch(kind)
    if match is None:
        return False
    bounds = [int(match[name]) for name in ("mark", "low", "high", "value") if match[name] is not None]
    limits = torch.iinfo(dtype)
    in_order = match["low"] is None or int(match["low"]) <= int(match["high"])
    return in_order and all(limits.min <= n <= limits.max and (most is None or n < most) for n in bounds)


Draw = Callable[[Sequence[int], str], Tensor]


def synthetic(kind: str, shape: Sequence[int], name: str, dtype: torch.dtype, *, draw: Draw | None = None) -> Tensor:
    """Return the tensor of a recipe, on the CPU; it depends on the arguments alone.

    Args:
        kind: The recipe; one that `fits`.
        shape: Of the tensor.
        name: Its place in the call.
        dtype: Of the tensor.
        draw: Where normal numbers come from, by shape and name.

    >>> synthetic("const 3", (2,), "input", torch.float32)
    tensor([3., 3.])
    >>> synthetic("0..3 sorted", (4,), "input", torch.int64)
    tensor([0, 1, 2, 3])
    """
    draw = draw or _drawn
    if dtype == torch.bool:
        return _coins(draw(shape, name)) if kind == "bool" else torch.full(tuple(shape), kind == "true")
    if dtype.is_complex:
        numbers = synthetic(kind, [*shape, 2], name, torch.float32, draw=draw)
        return torch.view_as_complex(numbers).to(dtype)
    if dtype.is_floating_point:
        return _floats(kind, shape, name, draw).to(dtype)
    return _integers(kind, shape, name, draw).to(dtype)


def _floats(kind: str, shape: Sequence[int], name: str, draw: Draw) -> Tensor:
    match = _FLOATS.fullmatch(kind)
    assert match is not None, kind
    if match["either"]:
        return _coins(draw(shape, name)).float()
    if match["exponent"]:
        numbers = draw(shape, name) * 2.0 ** int(match["exponent"])
        if match["sign"]:
            numbers = numbers.abs() if match["sign"] == "+" else -numbers.abs()
        return numbers.clamp(max=1) if match["capped"] else numbers
    value = float(match["value"])
    if match["how"] == "const":
        return torch.full(tuple(shape), value, dtype=torch.float64)
    if match["how"] == "near":
        return value * (1 + draw(shape, name) / 8)
    # The least number of a dtype, rounded to the digits of a recipe, is beyond it.
    return torch.where(_coins(draw(shape, name)), 0.0, torch.tensor(value, dtype=torch.float64))


def _integers(kind: str, shape: Sequence[int], name: str, draw: Draw) -> Tensor:
    match = _INTEGERS.fullmatch(kind)
    assert match is not None, kind
    if match["value"]:
        return torch.full(tuple(shape), int(match["value"]))
    low, high = int(match["low"]), int(match["high"])
    if match["sorted"] and len(shape):
        steps = torch.linspace(low, high, shape[-1], dtype=torch.float64).round().long()
        return steps.expand(tuple(shape)).contiguous()
    if (low, high) == (0, 1) and not match["mark"]:
        return _coins(draw(shape, name)).long()
    numbers = seeding.randint(low, high + 1, shape, seed=0, name=name, device="cpu")
    if match["mark"]:
        numbers[draw(shape, name) > 0.5] = int(match["mark"])
    return numbers


def _coins(numbers: Tensor) -> Tensor:
    """Return coins, of which the first in each row is true and the second false: no row of a mask is empty."""
    coins = numbers > 0
    if coins.dim():
        coins[..., :1] = True
        coins[..., 1:2] = False
    return coins


class _Draws:
    """Normal numbers by shape and name, not to be written to: layers of one kind ask for the same ones."""

    _MOST = 1 << 28  # bytes

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._bytes = 0

    def __call__(self, shape: Sequence[int], name: str) -> Tensor:
        key = name, *shape
        if key not in self._kept:
            drawn = _drawn(shape, name)
            if self._bytes + drawn.nbytes > self._MOST:
                self._kept.clear()
                self._bytes = 0
            self._bytes += drawn.nbytes
            self._kept[key] = drawn
        return self._kept[key]


def _drawn(shape: Sequence[int], name: str) -> Tensor:
    return seeding.randn(shape, seed=0, name=name, device="cpu", dtype=torch.float32)


def _head(shape: Sequence[int], dtype: torch.dtype) -> str:
    usual = dtype in (torch.float32, torch.int64, torch.bool)
    return ("x".join(map(str, shape)) or "scalar") + ("" if usual else f":{str(dtype).removeprefix('torch.')}")


# --- contexts -----------------------------------------------------------------------------------------------------


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "is_modelprobe", False)


@contextlib.contextmanager
def _without_hooks(modules: Iterable[nn.Module], which: Callable[[Any], bool] = lambda hook: True) -> Iterator[None]:
    """Take hooks off meanwhile: those of open watches, as what is run here is no use of the model; those of stubs."""
    removed = []
    for module in modules:
        hooks: Any
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            if any(map(which, hooks.values())):
                removed.append((hooks, hooks.copy()))
                for key in [key for key, hook in hooks.items() if which(hook)]:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, before in removed:
            hooks.clear()
            hooks.update(before)


@contextlib.contextmanager
def _quietly(gradient: bool) -> Iterator[None]:
    """Run code on numbers it was not made for: what it warns of is no news."""
    with warnings.catch_warnings(), torch.inference_mode(False), torch.set_grad_enabled(gradient):
        warnings.simplefilter("ignore")
        yield


_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)


@contextlib.contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Put back a module's own attributes, what they contain, and its own tensors: caches, running statistics."""
    attributes = vars(module)
    before = attributes.copy()
    contents = [(value, value.copy()) for value in before.values() if type(value) in _CONTAINERS]
    weights = [(p, p._version) for _, p in _own_weights(module)]
    own = [*(b for _, b in _own_buffers(module)), *(v for v in before.values() if has_bytes(v))]
    tensors = [(tensor, tensor.detach().clone()) for tensor in own if not tensor.is_inference()]
    kept = [(p, p.detach().clone()) for p, _ in weights] if getattr(module, "max_norm", None) is not None else []
    try:
        yield
    finally:
        for key in attributes.keys() - before.keys():
            del attributes[key]
        attributes.update(before)
        for container, content in contents:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        with torch.no_grad():
            for tensor, content in (*tensors, *kept):
                if not _same(tensor, content):
                    tensor.copy_(content)


def _seeder() -> Callable[[], None]:
    """Return what seeds all generators alike each time: by their states, for a seed is dear and CUDA queues them up."""
    seeding.seed_everything(0)
    states = [
        functools.partial(random.setstate, random.getstate()),
        functools.partial(np.random.set_state, np.random.get_state()),  # noqa: NPY002 - what models may draw from
        functools.partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    if torch.cuda.is_initialized():
        states.append(functools.partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if torch.backends.mps.is_available():
        states.append(functools.partial(torch.mps.set_rng_state, torch.mps.get_rng_state()))

    def seed() -> None:
        for put_back in states:
            put_back()

    return seed


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    if not torch._C._is_any_autocast_enabled():
        return ()
    devices = (d for d in _AUTOCAST if torch.amp.is_autocast_available(d) and torch.is_autocast_enabled(d))
    return tuple((device, torch.get_autocast_dtype(device)) for device in devices)


# --- words --------------------------------------------------------------------------------------------------------


def _reason(error: Exception) -> str:
    return _line(str(error) if isinstance(error, _CannotTellError) else f"{type(error).__name__}: {error}")


def _line(text: str) -> str:
    first = text.strip().partition("\n")[0]
    shown = "".join(c if c.isprintable() else "?" for c in first)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 3] + "..."


def _tensor_type(tensor: Tensor) -> str:
    if type(tensor) not in (Tensor, nn.Parameter):
        return type(tensor).__name__
    if tensor.is_meta:
        return "meta tensor"
    return "quantised tensor" if tensor.is_quantized else f"{str(tensor.layout).removeprefix('torch.')} tensor"
