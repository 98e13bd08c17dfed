"""One isolated call: the own code of a layer on synthetic tensors, the arguments it passes on, and its output.

`Session` replaces weights and forwards of all layers once. `_IsolatedCall` then runs one call of a layer: the layer's
own code runs, and calls inside it return synthetic outputs. What the code hands on and returns is the response.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import BatchOrInstanceNorm, graph_task
from pytest_modelprobe.models import Flat, Layers, as_bits, flatten, flatten_call, has_dense_storage, seeding
from pytest_modelprobe.record import (
    NOT_DEFAULT,
    ROOT,
    Call,
    EmittedTensor,
    IsolatedResponse,
    NamesBefore,
    Plain,
    containers,
    gc_paused,
    relative_name,
)
from pytest_modelprobe.runs.noise import Widening, terms_of, widened

from .contexts import (
    ATOMIC,
    StateBefore,
    alias,
    attributes_restored,
    buffers_of,
    combined,
    fused_paths_disabled,
    is_equal,
    is_known,
    is_plain,
    likeness,
    only_calls_layers,
    projected,
    weights_of,
    with_arguments,
    without_hooks,
)
from .recipes import Draws, as_mask, fits, head_of, kind_of, shape_of, synthetic
from .tracing import ArgumentTemplate, CannotTellError, TensorSpec, TracedCall, Tracer, copied, line, reason_of

Key = tuple[str, int]
"""A call, as its layer and its index among the calls of the layer, from 0."""

Perturb = Callable[[Tensor, str, int], Tensor]

Within = Callable[[Key], contextlib.AbstractContextManager[object]]
"""Takes a call, and returns a context in which it runs."""

Part = Literal["all", "outputs", "gradients"]
"""What is read of each response."""

Defaults = Mapping[str, tuple[Plain, ...]]


def in_float64(tensor: Tensor, name: str, terms: int) -> Tensor:
    """Return a synthetic tensor in float64. It is a perturbation with which code computes in float64 too."""
    return tensor.to(widened(tensor.dtype, torch.float64))


class CallObserver(Protocol):
    """Sees the tensors of isolated calls."""

    def begins(self, call: TracedCall, args: tuple[Any, ...], kwargs: dict[str, Any], *, widened: bool) -> None:
        """Take a call and its synthetic arguments, before its code runs, in float32 in place of half precision."""

    def answered(self, child: str, output: Any) -> None:
        """Take the synthetic output of a call of a child, whose name is relative to the layer."""

    def computed(self, where: str, tensor: Tensor) -> None:
        """Take a tensor that the code computed, with its `EmittedTensor.where`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IsolationOptions:
    """Which layers are called alone, and on what."""

    layers: Collection[str] | None = None
    """Names of the layers to call, or `None` for all."""
    only: Collection[str] | None = None
    """Names of some of these, to skip the others. The responses are the same."""
    recipes: Mapping[Key, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """The `IsolatedResponse.recipes` of other responses. They are used where shape and dtype allow it."""
    shapes: Mapping[Key, Mapping[str, Sequence[Any]]] = dataclasses.field(default_factory=dict)
    """The shapes of the inputs of these calls in their run, by path."""
    expected: Mapping[Key, Call] = dataclasses.field(default_factory=dict)
    """Calls whose arguments replace those of the run, as far as the code has such parameters."""
    names: NamesBefore | None = None
    """What had another name when the recipes were made."""
    gradient: bool = False
    """Whether to run backward through each call too."""
    within: Within | None = None
    """The context of each call, to look at its operations."""
    observer: CallObserver | None = None
    """Sees the calls."""


@dataclasses.dataclass(eq=False)
class Session:
    """Calls layers alone, one after the other. Meanwhile `module.forward` of all layers is replaced."""

    layers: Layers
    traced: Tracer
    options: IsolationOptions
    before: StateBefore
    draws: Draws
    kinds: dict[int, str]
    """Recipes of the weights by id. Sessions on the same calls share them."""
    calls: Sequence[TracedCall]
    perturb: Perturb | None
    of: Part
    shares: bool
    """Whether layers that are alike have synthetic weights in the same memory."""

    def __post_init__(self) -> None:
        self.names = self.options.names or NamesBefore()
        self.hooked = [m for m in self.layers.modules.values() if m._forward_pre_hooks or m._forward_hooks]
        self.current: _IsolatedCall | None = None
        self.owned: dict[str, dict[str, str]] = defaultdict(dict)
        """Recipes of the weights of each layer, and of layers inside it that have no response."""
        self._weights: dict[int, nn.Parameter | Tensor] = {}
        self._made: dict[int, Hashable] = {}
        """What the synthetic weights were made from, by id."""
        self._drawn: dict[Hashable, Tensor] = {}
        """The memory of parameters by what they were made from. Blocks repeat, and so do these."""
        self._shared: dict[Hashable, statistics.Reduction] = {}
        """The numbers in memory that several parameters have."""
        self._responses: dict[Hashable, IsolatedResponse] = {}
        """The responses, by the `likeness` of the calls."""
        # The weights that a call may use, even those of a layer inside that it does not call.
        modules = {id(call.module): call.module for call in self.calls}.values()
        self._used = {id(t) for m in modules for t in (*nn.Module.parameters(m), *nn.Module.buffers(m))}
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Session:
        with self._exit, torch.no_grad(), gc_paused():
            by_layer: dict[str, dict[str, str]] = {}
            for (layer, _), recipes in self.options.recipes.items():
                by_layer.setdefault(layer, {}).update(recipes)
            for name, module in self.layers.modules.items():
                # The recipes of the weights are those of the layer itself or of the nearest called one around it,
                # because code may use the weights of a child without calling it.
                around = (name, *reversed(containers(name)))
                response_layer = next((layer for layer in around if layer in self.traced.called), None)
                inside = "" if response_layer in (None, name) else f"{relative_name(name, response_layer or ROOT)}."
                self._replace_weights(name, response_layer, inside, module, by_layer.get(response_layer or "", {}))
                attributes = vars(module)
                if "forward" in attributes:
                    self._exit.callback(attributes.__setitem__, "forward", attributes["forward"])
                else:
                    self._exit.callback(attributes.pop, "forward", None)
                attributes["forward"] = _ForwardStub(self, name, module.forward)
            self._exit = self._exit.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()
        self._weights.clear()
        self._drawn.clear()

    def has_written(self) -> bool:
        """Whether a call wrote to weights that layers share, also through ``.data``, which no version tells."""
        now = [statistics.reduce(self._drawn[source], fingerprint=False) for source in self._shared]
        return statistics.collect(list(self._shared.values())) != statistics.collect(now)

    def response(self, call: TracedCall) -> IsolatedResponse:
        """Return the response of a call."""
        if call.reason is not None or call.inputs is None:
            return IsolatedResponse(reason=call.reason or "its inputs are not known")
        expected = self.options.expected.get((call.layer, call.index)) if call.parent is not None else None
        given = expected and (dict(expected.arguments), [(v.path, v.shape, v.dtype) for v in expected.inputs])
        like = likeness(call, _own_forward(call.module), self._made, given)
        if like is not None:
            recipes = self.options.recipes.get((call.layer, call.index), {}), self.owned.get(call.layer, {})
            names = self.names.paths.get(call.layer, {})
            like = like, *(tuple(some.items()) for some in (*recipes, names))
        found = None if like is None else self._responses.get(like)
        if found is None:
            versions = None if like is None else _versions(call.module)
            found = self._response_to(call, expected)
            # If the call wrote to its weights, calls like it must write too, and so are not left out.
            if like is not None and _versions(call.module) == versions:
                self._responses[like] = found
        return found

    def _response_to(self, call: TracedCall, expected: Call | None) -> IsolatedResponse:
        alone = _IsolatedCall(self, call, expected)
        found = self._in_both_modes(alone)
        if not alone.has_other_arguments:
            return found
        own = self._in_both_modes(_IsolatedCall(self, call))
        if found.reason is not None:
            return own  # code may raise for arguments that it was not called with in the run
        return dataclasses.replace(
            found,
            arguments_matter=_tensors_differ(own, found),
            mode_matters=found.mode_matters or own.mode_matters,
            defaults=_defaults_of(call.module.forward),
        )

    def _in_both_modes(self, alone: _IsolatedCall) -> IsolatedResponse:
        """Return the response in the mode of the run, and whether that in the other mode is different."""
        found, module = self._response(alone), alone.call.module
        forward = _own_forward(module)
        if self.perturb is not None or found.reason is not None:
            return found
        if is_known(module, forward) or only_calls_layers(module, forward):
            return found
        of, self.of = self.of, "outputs"
        module.training = not module.training
        try:
            other = self._response(_IsolatedCall(self, alone.call, alone.expected))
        finally:
            module.training = not module.training
            self.of = of
        return dataclasses.replace(found, mode_matters=(other.handed, other.reason) != (found.handed, None))

    def _response(self, alone: _IsolatedCall) -> IsolatedResponse:
        self.current = alone
        try:
            with attributes_restored(alone.call.module), contextlib.ExitStack() as stack:
                if wide := torch.float64 if self.perturb is in_float64 else self.traced.is_narrow and torch.float32:
                    stack.enter_context(Widening(wide))
                for state in () if wide else alone.call.autocast:
                    stack.enter_context(torch.autocast(*state))
                if self.options.within is not None:
                    stack.enter_context(self.options.within((alone.call.layer, alone.call.index)))
                return alone.run()
        finally:
            self.current = None
            for one in self.before.written(alone.call.module).values():
                one.restore()

    def synthetic(self, kind: str, shape: Sequence[int], name: str, dtype: torch.dtype, terms: int = 1) -> Tensor:
        """Return the tensor of a recipe, on the CPU, in float32 in place of half precision."""
        perturb, dtype = self.perturb, widened(dtype)
        drawn = synthetic(kind, shape, name, dtype, draws=self.draws)
        return drawn if perturb is None or not kind.startswith(("2^", "near")) else perturb(drawn, name, terms)

    def path_before(self, layer: str, path: str) -> str:
        """Return the path that a value or a parameter of a layer had before, by which synthetic tensors are drawn."""
        return self.names.paths.get(layer, {}).get(path, path)

    def _replace_weights(
        self, layer: str, response_layer: str | None, prefix: str, module: nn.Module, recipes: Mapping[str, str]
    ) -> None:
        """Replace the parameters of the layer by synthetic ones. The real ones are not written to."""
        inside = module.named_modules() if isinstance(module, ATOMIC) else [("", module)]
        for path, owner in inside:
            # Running statistics are learned like weights. Other buffers are tables and masks, whose values matter.
            buffers = owner._buffers if isinstance(owner, BatchOrInstanceNorm) else {}
            for tensors in (owner._parameters, buffers):
                for own, tensor in list(tensors.items()):
                    if id(tensor) not in self._used or not is_replaced(tensor, integers=tensors is buffers):
                        continue
                    name = f"{path}.{own}" if path else own
                    if id(tensor) not in self._weights:
                        role, wanted = self.path_before(layer, name), recipes.get(prefix + name, "")
                        self._weights[id(tensor)] = self._weight(owner, role, tensor, wanted)
                    weight: Any = self._weights[id(tensor)]
                    if response_layer is not None:
                        self.owned[response_layer][prefix + name] = weight._modelprobe_kind
                    self._exit.callback(_put, owner, own, tensor)
                    _put(owner, own, weight)

    def _weight(self, owner: nn.Module, role: str, tensor: Tensor, wanted: str) -> Tensor:
        if not fits(wanted, tensor.dtype):
            wanted = self.kinds.get(id(tensor)) or kind_of(tensor, weight=True)
            self.kinds[id(tensor)] = wanted
        kind = wanted if tensor.is_floating_point() else "const 0"  # an integer is the number of batches of a norm
        terms = terms_of(owner, tensor)
        source = kind, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, role, terms
        is_parameter = isinstance(tensor, nn.Parameter)
        if is_parameter and source in self._drawn:
            drawn = self._drawn[source]
            if source not in self._shared:
                self._shared[source] = statistics.reduce(drawn, fingerprint=False)
        else:
            drawn = self.synthetic(kind, tensor.shape, role, tensor.dtype, terms).to(tensor.device)
            if drawn.stride() != tensor.stride():
                there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=drawn.dtype, device=tensor.device)
                drawn = there.copy_(drawn)
            if is_parameter and self.shares:
                self._drawn[source] = drawn
        weight: Any = nn.Parameter(drawn, requires_grad=tensor.requires_grad) if is_parameter else drawn
        vars(weight).update(vars(tensor))
        weight._modelprobe_kind = kind
        if all(map(is_plain, vars(tensor).values())):
            layout = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)
            self._made[id(weight)] = role, kind, layout, repr(vars(tensor))
        return weight  # type: ignore[no-any-return]


def _versions(module: nn.Module) -> list[int]:
    return [parameter._version for parameter in module._parameters.values() if parameter is not None]


def is_replaced(tensor: object, *, integers: bool = False) -> TypeGuard[Tensor]:
    """Whether a weight is replaced by a synthetic one. A shard of a distributed tensor, say, is not."""
    return (
        has_dense_storage(tensor)
        and (integers or tensor.is_floating_point())
        and type(tensor) in (Tensor, nn.Parameter)
    )


def _put(owner: nn.Module, name: str, tensor: Tensor) -> None:
    if isinstance(owner, nn.RNNBase):
        setattr(owner, name, tensor)  # an RNN has a list of its weights besides, which this keeps up to date
    elif name in owner._parameters:
        owner._parameters[name] = tensor  # type: ignore[assignment]
    else:
        owner._buffers[name] = tensor


class _ForwardStub:
    """Replaces `module.forward`. It runs it for the isolated call, and returns synthetic outputs for calls inside."""

    def __init__(self, session: Session, name: str, forward: Callable[..., Any]) -> None:
        self._session = session
        self._name = name
        self.__wrapped__ = forward  # `inspect.signature` follows it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        alone = self._session.current
        if alone is not None and sys._getframe(1).f_globals.get("__name__") == "torch.nn.modules.module":
            return alone.enter(self._name, self.__wrapped__, args, kwargs)
        # `child.forward(x)` runs no hooks. It was not traced as a call, so it counts as code of the caller.
        return self.__wrapped__(*args, **kwargs)


def _own_forward(module: nn.Module) -> Any:
    """Return the ``forward`` of a module in a session."""
    return getattr(module.forward, "__wrapped__", None)


@dataclasses.dataclass(eq=False)
class _IsolatedCall:
    """One call, run in isolation."""

    session: Session
    call: TracedCall
    expected: Call | None = None
    """The call whose arguments it gets, or `None` if it gets those of the run."""

    def __post_init__(self) -> None:
        self.has_other_arguments = False
        self._wanted = self.session.options.recipes.get((self.call.layer, self.call.index), {})
        self._recipes: dict[str, str] = dict(self.session.owned.get(self.call.layer, {}))
        self._observer = self.session.options.observer
        self._entered = False
        self._children: dict[str, list[TracedCall]] = {}
        for child in self.call.calls:
            self._children.setdefault(child.layer, []).append(child)
        self._counts: dict[str, int] = defaultdict(int)
        self._inputs: dict[int, tuple[Tensor, str, int]] = {}
        """The synthetic tensors with label and version, by id. Holding them keeps other tensors from getting the id."""
        self._emitted: list[tuple[str, str | None]] = []
        self._reduced: list[statistics.Reduction] = []
        self._seen: set[int] = set()
        self._leaves: dict[str, tuple[str, Tensor]] = {}
        """Label and tensor of each synthetic tensor that a gradient may reach, by role."""
        self._terms: list[Tensor] = []
        self._cut: list[str] = []

    def run(self) -> IsolatedResponse:
        """Run the call, and return its response."""
        try:
            for name, weight in weights_of(self.call.module):
                self._leaves.setdefault(self.session.path_before(self.call.layer, name), (name, weight))
                self._inputs[id(weight)] = weight, name, weight._version
            assert self.call.inputs is not None
            args, kwargs = self._made(self.call.inputs, self.call.layer)
            module, asked = self.call.module, None
            if self.expected is not None:
                asked = with_arguments(module.forward, args, kwargs, self.expected, self._expected_tensor)
            if asked is not None:
                (args, kwargs), self.has_other_arguments = asked, True
            buffers = {name: as_bits(buffer).clone() for name, buffer in buffers_of(module)}
            inputs = list(self._inputs.values())
            seeding.seed_everything(0)
            if self._observer is not None:
                self._observer.begins(self.call, args, kwargs, widened=self.session.traced.is_narrow)
            with without_hooks(m for m in self.session.hooked if m is not module), fused_paths_disabled(module):
                output = module(*args, **kwargs)
            returned = flatten("output", output, objects=False)
            self._emit_state(buffers, inputs, returned)
            self._emit(self.call.layer, "", "", returned)
        except Exception as error:  # noqa: BLE001 - a model may raise anything for numbers it was not made for
            return IsolatedResponse(recipes=self._recipes, reason=reason_of(error))
        return self._response()

    def enter(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call itself the first time that its layer is called, and return synthetic outputs for other calls."""
        if not self._entered and name == self.call.layer:
            self._entered = True
            return forward(*args, **kwargs)
        calls = self._children.get(name)
        if calls is None:
            raise CannotTellError(f"calls {name}, which it did not call in the run")
        again = graph_task() != -1
        if again and self._counts[name] > 1:
            raise CannotTellError(f"calls {name} again in the backward pass, for activation checkpointing")
        number = 0 if again else self._counts[name]
        child = calls[min(number, len(calls) - 1)]
        if child.outputs is None:
            raise CannotTellError(child.reason or f"what {name} gives out is not known")
        call = f" (call {number + 1}) " if number else " "
        label = relative_name(name, self.call.layer) + call
        # Outputs are drawn by name and not by order, so that a new child, or a line that moved, does not change those
        # of the other children.
        names = self.session.names.layers
        role = relative_name(names.get(name, name), names.get(self.call.layer, self.call.layer)) + call
        flat = flatten_call(args, kwargs)
        if not again:
            self._counts[name] += 1
            self._emit(name, label, role, flat, _defaults_of(forward))
        actual = tuple(flat.tensors[0][1].shape) if flat.tensors else None
        output = self._made(child.outputs, name, role, label, (child.shape, actual))
        if self._observer is not None:
            self._observer.answered(relative_name(name, self.call.layer), output)
        return output

    # --- what goes in ---------------------------------------------------------------------------------------------

    def _made(
        self, template: ArgumentTemplate, layer: str, role: str = "", label: str = "", shapes: _Shapes = None
    ) -> Any:
        def make(placeholder: Any) -> Tensor:
            spec = placeholder._modelprobe_spec
            with statistics.ambient_modes_disabled(), torch.no_grad():
                own = self.session.path_before(layer, spec.name)
                return self._tensor(spec, role + own, label + spec.name, _followed(spec.shape, shapes))

        return copied(template.value, make, {} if template.known else self.session.traced.modules)

    def _expected_tensor(self, path: str) -> Tensor | None:
        """Return the synthetic tensor of an input that only the expected call gets, or `None` if no recipe fits."""
        value = next(value for value in self.expected.inputs if value.path == path) if self.expected else None
        dtype = getattr(torch, value.dtype, None) if value is not None else None
        _, _, kind = self._wanted.get(path, "").partition(" ")
        shape = () if value is None else value.shape
        sizes = tuple(size for size in shape if isinstance(size, int))
        if value is None or not isinstance(dtype, torch.dtype) or len(sizes) != len(shape) or not fits(kind, dtype):
            return None
        device = next((tensor.device for tensor, *_ in self._inputs.values()), torch.device("cpu"))
        spec = TensorSpec(path, sizes, torch.empty(sizes, device="meta").stride(), dtype, device, kind)
        with statistics.ambient_modes_disabled(), torch.no_grad():
            return self._tensor(spec, self.session.path_before(self.call.layer, path), path, sizes)

    def _tensor(self, spec: TensorSpec, role: str, label: str, shape: tuple[int, ...]) -> Tensor:
        if spec.value is not None:
            return spec.value.clone()
        stride = spec.stride if shape == spec.shape else None
        if not spec.name:
            drawn = self.session.synthetic("2^0", shape, "inside", spec.dtype)
            return _laid_out(drawn.to(spec.device), stride)
        # The shape of its distinct elements, which is 1 along axes of stride 0, is part of the recipe, so that other
        # runs repeat elements along the same axes.
        kind, head, single = spec.kind, head_of(shape, spec.dtype), shape
        if stride is not None:
            single = tuple(n if step else min(n, 1) for n, step in zip(shape, stride, strict=True))
        wanted_head, _, wanted = self._wanted.get(label, "").partition(" ")
        wanted, _, apart = wanted.partition(" of ")
        if wanted_head == head and fits(wanted, spec.dtype, getattr(self.call.module, "num_embeddings", None)):
            kind, single = wanted, _parsed(apart, shape)
        self._recipes[label] = f"{head} {kind}" + ("" if single == shape else f" of {'x'.join(map(str, single))}")
        leaf = self.session.synthetic(kind, single, role, spec.dtype).to(spec.device)
        with torch.set_grad_enabled(self.session.options.gradient):
            if spec.dtype.is_floating_point:
                leaf.requires_grad_(self.session.options.gradient)
                self._leaves.setdefault(role, (label, leaf))
            tensor = leaf if leaf.stride() == stride else _laid_out(leaf, stride)
            if tensor is leaf and leaf.requires_grad:
                tensor = alias(leaf)  # code may write to its inputs, but not to a leaf of the graph
            if tuple(tensor.shape) != tuple(shape):
                tensor = tensor.expand(shape) if stride is not None and 0 in stride else tensor.expand(shape).clone()
        self._inputs[id(tensor)] = tensor, label, tensor._version
        vars(tensor)["_modelprobe_kind"] = kind
        return tensor

    # --- what comes out -------------------------------------------------------------------------------------------

    def _emit(self, layer: str, label: str, role: str, flat: Flat, defaults: Defaults = MappingProxyType({})) -> None:
        for path, tensor in flat.tensors:
            self._seen.add(id(tensor))
            name = self._passed(tensor)
            if name is None:
                self._computed(label + path, tensor)
            else:
                self._emitted.append((label + path, name))
            if tensor.is_floating_point() and not tensor.requires_grad:
                self._cut.append(label + path)
            self._add_term(role + self.session.path_before(layer, path), tensor)
        for path, value in flat.plain.items():
            if value is not None:
                is_default = any(default is False for default in defaults.get(path, (False,)))
                other = NOT_DEFAULT if value is False and not is_default else ""
                self._emitted.append((label + path, f"={value!r}"[:80] + other))

    def _passed(self, tensor: Tensor) -> str | None:
        """Return the name of the synthetic tensor that is equal to a tensor, or `None` if the tensor was computed."""
        given, name, version = self._inputs.get(id(tensor), (None, "", 0))
        if given is tensor:
            return name if tensor._version == version else None
        if type(tensor) is not Tensor or not has_dense_storage(tensor):
            return None
        for given, name, version in self._inputs.values():
            alike = (given.dtype, given.device, given.shape) == (tensor.dtype, tensor.device, tensor.shape)
            if alike and given._version == version and has_dense_storage(given):  # code may have freed the memory
                with statistics.ambient_modes_disabled(), torch.no_grad():
                    # A constant may be equal by chance, and says nothing.
                    if torch.equal(given, tensor) and not bool((given == given.reshape(-1)[:1]).all()):
                        return name
        return None

    def _emit_state(
        self, buffers: Mapping[str, Tensor], inputs: Iterable[tuple[Tensor, str, int]], returned: Flat
    ) -> None:
        """Emit the buffers and inputs that the code wrote to, and the buffers of layers inside."""
        for name, buffer in buffers_of(self.call.module):
            before = buffers.get(name)
            # The elements are compared, because batch_norm does not increase the version of what it writes to.
            if before is not None and not is_equal(as_bits(buffer), before):
                self._computed(f"{name} after", buffer)
        for name, one in self.session.before.written(self.call.module).items():
            if name not in buffers and has_dense_storage(one.now):
                self._computed(f"{name} after", one.now)
        seen = self._seen | {id(tensor) for _, tensor in returned.tensors}
        for tensor, label, version in inputs:
            if tensor._version != version and id(tensor) not in seen:
                self._computed(f"{label} after", tensor)

    def _computed(self, where: str, tensor: Tensor) -> None:
        if self.session.of == "gradients":
            return
        self._emitted.append((where, None))
        if self._observer is not None:
            self._observer.computed(where, tensor)
        self._reduced.append(statistics.reduce(as_mask(tensor)))

    def _add_term(self, role: str, tensor: Tensor) -> None:
        """Add a random projection to the loss at once, as the code may write to the tensor later."""
        if not self.session.options.gradient or self.session.of == "outputs":
            return
        if not (tensor.requires_grad and tensor.is_floating_point() and tensor.numel()):
            return
        with statistics.ambient_modes_disabled(), torch.enable_grad():
            scale = 1 / math.sqrt(tensor.numel())
            weights = functools.partial(self.session.draws, tensor.shape, f"response {role}", factor=scale)
            self._terms.append(projected(tensor, weights))

    def _response(self) -> IsolatedResponse:
        wanted = {role: leaf for role, (_, leaf) in self._leaves.items() if leaf.requires_grad}
        found: Sequence[Tensor | None] = ()
        roles, reason = [], None
        if self._terms and wanted:
            try:
                with torch.enable_grad():
                    loss = sum((term.to(self._terms[0].device) for term in self._terms[1:]), start=self._terms[0])
                found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
            except Exception as error:  # noqa: BLE001 - a model's own backward may raise anything
                found, reason = (None,) * len(wanted), line(f"backward: {reason_of(error)}")
            roles = [role for role, gradient in zip(wanted, found, strict=True) if gradient is not None]
            self._reduced += [statistics.reduce(gradient) for gradient in found if gradient is not None]
        computed = iter(statistics.collect(self._reduced))
        handed = tuple(
            EmittedTensor(where=where, passed=passed, reading=next(computed) if passed is None else None)
            for where, passed in self._emitted
        )
        unreached = {label: None for role, (label, _) in self._leaves.items() if role not in roles}
        return IsolatedResponse(
            recipes=self._recipes,
            handed=handed,
            gradient=combined(list(zip(roles, computed, strict=True))) if roles else None,
            without_gradient=(*unreached, *self._cut) if self.session.options.gradient and reason is None else (),
            reason=reason,
            by_names_before=self.session.options.names is not None,
        )


def _tensors_differ(a: IsolatedResponse, b: IsolatedResponse) -> bool:
    """Whether a tensor that is in both responses differs. One response may have more outputs than the other."""
    x, y = (
        {h.where: (h.passed, h.reading) for h in one.handed if not (h.passed or "").startswith("=")} for one in (a, b)
    )
    return a.reason is not None or any(x[where] != y[where] for where in x.keys() & y.keys())


_Shapes = tuple[tuple[int, ...] | None, tuple[int, ...] | None] | None
"""Shape of the first input of a child in the run, and now."""


def _followed(shape: tuple[int, ...], shapes: _Shapes) -> tuple[int, ...]:
    """Return the shape of an output of a child, which may get a different number of tokens than in the run.

    Experts do, for example.
    """
    before, now = shapes or (None, None)
    if before is None or now is None or before == now or len(before) != len(now):
        return shape
    follows = (i < len(before) and n == before[i] for i, n in enumerate(shape))
    return tuple(now[i] if follow else n for i, (n, follow) in enumerate(zip(shape, follows, strict=True)))


def _parsed(text: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in a recipe if it can be expanded to ``shape``, and else ``shape``."""
    sizes = shape_of(text)
    fit = len(sizes) == len(shape) and all(size in (1, n) for size, n in zip(sizes, shape, strict=True))
    return sizes if fit else shape


def _laid_out(tensor: Tensor, stride: Sequence[int] | None) -> Tensor:
    """Return a copy with these strides, on which kernels and ``view`` depend, or a contiguous one."""
    if stride is None:
        return tensor.clone()
    kept = [step if n > 1 or step else 1 for n, step in zip(tensor.shape, stride, strict=True)]
    dense = 1
    for step, n in sorted((step, n) for step, n in zip(kept, tensor.shape, strict=True) if n > 1):
        if step != dense:
            return tensor.clone()  # there are gaps or repeated elements, which a copy does not have
        dense *= n
    return torch.empty_strided(tensor.shape, kept, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _defaults_of(function: Callable[..., Any]) -> Defaults:
    """Return the parameters of a function, each with its default, or with nothing if it has no plain one.

    >>> _defaults_of(lambda x, is_causal=True: x)
    {'x': (), 'is_causal': (True,)}
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    plain = (bool, int, float, str, type(None))
    return {name: (p.default,) if type(p.default) in plain else () for name, p in parameters.items()}
