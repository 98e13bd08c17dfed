"""What surrounds an isolated call: without hooks and warnings, with a fixed seed, the layer's own state restored.

Each call begins in the same state. Otherwise its response would depend on the calls before it.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from pytest_modelprobe._torch import BatchOrInstanceNorm
from pytest_modelprobe.models import GENERATORS, as_bits, has_dense_storage, holds_elements, own_buffers, seeding

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


def is_ours(hook: Any) -> bool:
    """Whether a hook belongs to an open watch."""
    return getattr(hook, "is_modelprobe", False)


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


@contextlib.contextmanager
def without_warnings(gradient: bool) -> Iterator[None]:
    """Run code on synthetic numbers, without the warnings that these cause."""
    with warnings.catch_warnings(action="ignore"), torch.inference_mode(False), torch.set_grad_enabled(gradient):
        yield


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
            for path, inner in module.named_modules()
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
    if getattr(module, "max_norm", None) is not None:  # an embedding, which renormalizes its weight as it is called
        tensors += [p for _, p in weights_of(module)]
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


def fixed_seed() -> Callable[[], None]:
    """Return a function that sets all random generators to one state. That is cheaper than seeding them each time."""
    seeding.seed_everything(0)
    states = [(one, state) for one in GENERATORS if (state := one.get()) is not None]

    def seed() -> None:
        for one, state in states:
            one.set(state)

    return seed
