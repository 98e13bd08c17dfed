"""What surrounds an isolated call: without hooks and warnings, with a fixed seed, the layer's own state restored.

Each call begins in the same state. Otherwise its response would depend on the calls before it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import re
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import BatchOrInstanceNorm
from pytest_modelprobe.models import (
    as_bits,
    flatten_call,
    has_dense_storage,
    holds_elements,
    own_buffers,
    seeding,
)
from pytest_modelprobe.record import Call, Reading, Statistics

from .tracing import TracedCall

ATOMIC = (nn.MultiheadAttention, nn.RNNBase)
"""Layers that are treated as one with the modules inside them."""


def weights_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the floating parameters of a layer itself, with their names."""
    for name, parameter in module.named_parameters(recurse=isinstance(module, ATOMIC)):
        if parameter.is_floating_point() and has_dense_storage(parameter):
            yield name, parameter


def buffers_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers of a layer itself that its code may write to, with their names."""
    found = own_buffers(module, atomic=isinstance(module, ATOMIC))
    return [(name, buffer) for name, buffer in found if has_dense_storage(buffer) and not buffer.is_inference()]


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every element."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


@contextlib.contextmanager
def without_hooks(modules: Iterable[nn.Module], which: Callable[[Any], bool] = lambda hook: True) -> Iterator[None]:
    """Remove some hooks of the modules within the block."""
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
def fused_paths_disabled(module: nn.Module) -> Iterator[None]:
    """Disable the fused paths of torch, which call no children, by a hook that does nothing.

    Torch does not take them for a module with hooks.
    """
    handle = module.register_forward_pre_hook(lambda module, args: None)
    try:
        yield
    finally:
        handle.remove()


class StateBefore:
    """Buffers, and the tensors and numbers among the attributes, of all layers, as they were before the run.

    Isolated calls begin with them, because what the run writes there depends on other layers, as an average of inputs
    does. Left out are the buffers of norms, which are synthetic in an isolated call. What was `None` keeps what it got.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers: dict[int, list[_KeptTensor]] = {}
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._tensors: list[_KeptTensor] = []
        for module in model.modules():
            attributes = vars(module)
            kept = {key: v for key, v in attributes.items() if isinstance(v, int | float) or _can_be_kept(v)}
            self._attributes.append((attributes, kept))
            self._tensors += [_KeptTensor(attributes, key) for key, v in kept.items() if isinstance(v, Tensor)]
            if not isinstance(module, BatchOrInstanceNorm):
                names = [name for name, buffer in module._buffers.items() if _can_be_kept(buffer)]
                if names:
                    self._buffers[id(module)] = [_KeptTensor(module._buffers, name) for name in names]

    def restore(self) -> None:
        """Put everything back after the run."""
        for attributes, kept in self._attributes:
            attributes.update(kept)
        for tensor in (*self._tensors, *itertools.chain.from_iterable(self._buffers.values())):
            tensor.restore()

    def written(self, module: nn.Module) -> dict[str, _KeptTensor]:
        """Return the buffers of a layer, and of those inside it, that an isolated call wrote to, by path."""
        return {
            f"{path}.{one.name}" if path else one.name: one
            for path, inner in (module.named_modules() if self._buffers else ())
            for one in self._buffers.get(id(inner), ())
            if one.is_written
        }


class _KeptTensor:
    """A tensor in a dict, its elements, and how often it was written to."""

    def __init__(self, owner: dict[str, Any], name: str) -> None:
        self.name, self._owner = name, owner
        self._tensor: Tensor = owner[name]
        self._elements, self._version = as_bits(self._tensor).clone(), self._tensor._version

    @property
    def now(self) -> Any:
        """What is at its place now."""
        return self._owner.get(self.name)

    @property
    def is_written(self) -> bool:
        """Whether it was written to or replaced since."""
        return self.now is not self._tensor or self._tensor._version != self._version

    def restore(self) -> None:
        """Put it back with its elements, in the same memory."""
        self._owner[self.name] = self._tensor
        _put_back(self._tensor, self._elements)
        self._version = self._tensor._version


def _can_be_kept(value: object) -> TypeGuard[Tensor]:
    return has_dense_storage(value) and not value.is_inference()


def _put_back(tensor: Tensor, elements: Tensor) -> None:
    """Write elements back to a tensor if they changed."""
    here = as_bits(tensor)
    if holds_elements(here) and not is_equal(here, elements):
        here.copy_(elements)
        torch.autograd.graph.increment_version(tensor)


_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)


@contextlib.contextmanager
def attributes_restored(module: nn.Module) -> Iterator[None]:
    """Restore a module's own attributes, their direct contents, and its own tensors: caches, running statistics.

    `models.ModelState` also follows objects and children, which takes too long for each isolated call. It restores the
    model once, after all of them.
    """
    attributes = vars(module)
    before = attributes.copy()
    contents = [(value, value.copy()) for value in before.values() if type(value) in _CONTAINERS]
    own = [*(b for _, b in buffers_of(module)), *(v for v in before.values() if has_dense_storage(v))]
    tensors = [tensor for tensor in own if not tensor.is_inference()]
    bits = [(tensor, as_bits(tensor).clone()) for tensor in tensors]
    try:
        yield
    finally:
        for key in attributes.keys() - before.keys():
            del attributes[key]
        attributes.update(before)
        for container, content in contents:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        for tensor, elements in bits:
            _put_back(tensor, elements)


# --- arguments --------------------------------------------------------------------------------------------------------
#
# Two versions of a model may call a child with different arguments. With the arguments of the expected call in place of
# those of the run, a difference between the responses is one of the child's own code, and not of its caller's.

_NUMBERS = (bool, int, float, type(None))
_POSITION = re.compile(r"input\[(\d+)\]")


def with_arguments(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    expected: Call,
    make: Callable[[str], Tensor | None] = lambda path: None,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a call with those that the expected one gets, as far as the function takes them.

    Plain values are the expected ones. Tensors that the expected call does not get are left out, and those that only
    the expected call gets are made. Arguments that the function has no parameter for are left out. Returns `None` if
    nothing differs, or if that cannot be done.

    Args:
        function: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        expected: The expected call.
        make: Returns the tensor at a path of the expected call, or `None` if there is none.

    >>> call = Call(root="f", root_training=False, index=0, arguments={"input": 0.5, "scale": 2, "old": 1})
    >>> with_arguments(lambda x, scale=1, flag=None: x, (0.5,), {"flag": True}, call)
    ((0.5,), {'scale': 2})
    """
    flat = flatten_call(args, kwargs)
    tensors, given = {path for path, _ in flat.tensors}, {value.path for value in expected.inputs}
    now, then = flat.plain, expected.arguments
    came, gone = sorted(tensors - given), sorted(given - tensors)
    plain = [path for path in {**now, **then} if path in came or not _is_same(now.get(path), then.get(path))]
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    named = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    found = {**dict(zip(named, args, strict=False)), **kwargs} if len(args) <= len(named) else {}

    def name_of(path: str) -> str:
        """Return the name of the parameter at a path, which for an element of a container is that of the container."""
        position = _POSITION.match(path)
        number = int(position[1]) if position else 0 if path == "input" and len(args) == 1 else len(named)
        return named[number] if number < len(named) else re.split(r"[.\[]", path)[0]

    if not (plain or came or gone):
        return None
    # A tensor cannot be left out of a container that has others.
    if len(args) > len(named) or any(name_of(path) in map(name_of, tensors & given) for path in came):
        return None
    changed: dict[str, Any] = {}
    for path in (path for path in plain if path in then):
        value = then[path]
        # Neither text is replaced, nor an element of a container of tensors.
        if type(value) not in _NUMBERS or name_of(path) in map(name_of, tensors & given):
            return None
        changed[path] = value
    for path in (path for path in (*came, *plain) if path not in then and path not in gone):
        parameter = parameters.get(name_of(path))
        if name_of(path) not in found or (parameter is not None and parameter.default is parameter.empty):
            return None  # a parameter without a default cannot be left out
        del found[name_of(path)]
    for path in gone:
        if (made := make(path)) is None:
            return None
        changed[path] = made
    for path, value in changed.items():
        if name_of(path) in parameters or (takes_any and path.isidentifier()):
            found[name_of(path)] = value
        elif not path.isidentifier() and not _POSITION.match(path):
            return None
    # Arguments behind the first one that was left out are passed by keyword.
    by_position = 0
    while by_position < len(args) and named[by_position] in found:
        by_position += 1
    return tuple(found.pop(name) for name in named[:by_position]), found


def _is_same(a: object, b: object) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))


# --- calls that compute the same --------------------------------------------------------------------------------------
#
# Blocks repeat: most of their layers have equal code, attributes, synthetic weights and inputs, and so equal responses.
# One call is enough. If anything about a layer is not known to be plain, the layer is called itself.

_MODULE = frozenset(vars(nn.Module()))
"""Attributes of every module."""

_TABLES = frozenset({"_parameters", "_buffers", "forward"})
"""Attributes of every module that are compared in their own way."""

PRODUCTS = frozenset({nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d})
"""Layers of torch that add up products with their weight."""

_CHOICES = frozenset({nn.Embedding, nn.Identity, nn.ReLU, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.Flatten})
"""Layers of torch that choose among the numbers that they get, or that their weight has."""

_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


class _UnknownError(Exception):
    """There is a value, and it is not known what code does with it."""


def likeness(call: TracedCall, forward: Any, weights: Mapping[int, Hashable], expected: object) -> Hashable | None:
    """Return what determines the response of a call. It is equal for calls that compute the same.

    Returns `None` if that is not known. It is not known of layers with children, hooks, ``__slots__``, a ``forward`` of
    their own, objects that are not plain among their attributes and arguments, or tensors that are not synthetic.

    Args:
        call: The call.
        forward: The ``forward`` of its layer.
        weights: What each synthetic weight was made from, by id of the weight.
        expected: The arguments that it gets in place of its own.
    """
    module, attributes = call.module, vars(call.module)
    if call.calls or call.inputs is None or not call.inputs.known or not is_leaf_of_its_class(module, forward):
        return None
    if any(vars(kind).get("__slots__") for kind in type(module).__mro__):
        return None  # it has attributes that `vars` does not show
    own = {key: v for key, v in attributes.items() if key not in _TABLES and (key not in _MODULE or key == "training")}
    tensors = [(name, x) for name, x in (*module._parameters.items(), *module._buffers.items()) if x is not None]
    if any(id(tensor) not in weights for _, tensor in tensors):
        return None
    made = tuple((name, weights[id(tensor)], tensor._version) for name, tensor in tensors)
    try:
        return id(type(module)), made, call.autocast, *map(plain, (own, call.inputs.value, expected))
    except _UnknownError:
        return None


def is_known(module: nn.Module, forward: Any) -> bool:
    """Whether a layer is one of torch that adds up products or chooses among numbers, in either mode alike.

    Args:
        module: The layer.
        forward: Its ``forward``.

    >>> [is_known(layer, layer.forward) for layer in (nn.Linear(2, 2), nn.ReLU(), nn.GELU())]
    [True, True, False]
    """
    return type(module) in PRODUCTS | _CHOICES and is_leaf_of_its_class(module, forward)


def only_calls_layers(module: nn.Module, forward: Any) -> bool:
    """Whether the code of a layer does nothing but call layers inside it, and apply operators: in either mode alike.

    No other name stands in it: neither ``training``, nor a function that may ask for it.

    Args:
        module: The layer.
        forward: Its ``forward``.

    >>> [only_calls_layers(layer, layer.forward) for layer in (nn.Sequential(nn.ReLU()), nn.Dropout())]
    [True, False]
    """
    kind, code = type(module), getattr(forward, "__code__", None)
    if not _has_forward_of_its_class(module, forward) or code is None or code.co_freevars:
        return False
    overrides = any(getattr(kind, name) is not getattr(nn.Module, name) for name in ("__call__", "__getattr__"))
    if overrides or any(isinstance(constant, types.CodeType) for constant in code.co_consts):
        return False
    names = {*code.co_names}
    is_of_layers = module._modules.keys() >= names and names.isdisjoint((*dir(kind), *forward.__globals__))
    return kind is nn.Sequential or (bool(names) and is_of_layers)


def is_leaf_of_its_class(module: nn.Module, forward: Any) -> bool:
    """Whether a layer has the forward of its class, and neither children nor hooks."""
    return not module._modules and _has_forward_of_its_class(module, forward)


def _has_forward_of_its_class(module: nn.Module, forward: Any) -> bool:
    """Whether a layer has the forward of its class, and no hooks."""
    if getattr(forward, "__func__", None) is not type(module).forward:
        return False
    hooks = _MODULE - _TABLES - {"training", "_modules"}
    return not any(value for key, value in vars(module).items() if key in hooks)


def is_plain(value: object) -> bool:
    """Whether a value is a number, a text or the like."""
    return type(value) in _PLAIN


def plain(value: Any) -> Hashable:
    """Return what is equal for values that are alike to code: plain ones, containers of these, and placeholders."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, repr(value)  # as text, in which -0.0 differs from 0.0
    if kind in (tuple, list, torch.Size):
        return kind, tuple(map(plain, value))
    if kind is dict:
        return kind, tuple((plain(key), plain(v)) for key, v in value.items())
    if isinstance(value, _FUNCTIONS):
        return kind, id(value)
    spec = getattr(value, "_modelprobe_spec", None) if isinstance(value, Tensor) else None
    if spec is None or spec.value is not None:
        raise _UnknownError
    return spec.name, spec.shape, spec.stride, spec.dtype, spec.device, spec.kind


# --- gradients: those of one call add up to one reading, each with signs that its role chooses ------------------------


def projected(tensor: Tensor, weights: Callable[[], Tensor]) -> Tensor:
    """Return a term of a loss by which the gradient of a tensor is its weights.

    The term itself is zero: nothing reads the loss.
    """
    project: Any = _Projection.apply
    return project(tensor, weights)  # type: ignore[no-any-return]


class _Projection(torch.autograd.Function):
    """The function of `projected`. It saves no tensor, because activation checkpointing counts the saved ones."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weights: Callable[[], Tensor]) -> Tensor:
        ctx.weights, ctx.dtype = weights, tensor.dtype
        return tensor.new_zeros((), dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        with statistics.ambient_modes_disabled():
            return ctx.weights().to(gradients[0].device, ctx.dtype), None


def alias(leaf: Tensor) -> Tensor:
    """Return a tensor in the memory of a leaf, to which code may write, other than to the leaf.

    >>> leaf = torch.ones(2, requires_grad=True)
    >>> alias(leaf).mul_(2).sum().backward()
    >>> leaf.grad
    tensor([2., 2.])
    """
    return _Alias.apply(leaf)  # type: ignore[no-any-return]


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def combined(gradients: Sequence[tuple[str, Reading]]) -> Reading:
    """Return one reading for all gradients. Each is scaled to the fourth root of its norm, so that small ones count."""
    fingerprint: list[float] | None = None
    deviations, count, nonfinite = 0.0, 0, 0
    for role, reading in gradients:
        numbers = reading.statistics
        if numbers is None or reading.fingerprint is None:
            continue
        norm = (numbers.rms or 0.0) * math.sqrt(numbers.finite)
        if math.isinf(norm):
            # The squares of its elements are too large for a float, so the fingerprint estimates the norm.
            norm = math.hypot(*reading.fingerprint)
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
