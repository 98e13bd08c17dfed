"""Under what a layer is called alone: without hooks, quietly, from the same seed, and left as it was."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from pytest_modelprobe.models import has_bytes, seeding

from .own import buffers_of, same, weights_of


def is_ours(hook: Any) -> bool:
    """Whether a hook is one of an open watch."""
    return getattr(hook, "is_modelprobe", False)


@contextlib.contextmanager
def without_hooks(modules: Iterable[nn.Module], which: Callable[[Any], bool] = lambda hook: True) -> Iterator[None]:
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
def unfused(module: nn.Module) -> Iterator[None]:
    """Put a hook on that does nothing: torch's fused paths, which call no child, are not for modules with hooks."""
    handle = module.register_forward_pre_hook(lambda module, args: None)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def quietly(gradient: bool) -> Iterator[None]:
    """Run code on numbers it was not made for: what it warns of is no news."""
    with warnings.catch_warnings(), torch.inference_mode(False), torch.set_grad_enabled(gradient):
        warnings.simplefilter("ignore")
        yield


_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)


@contextlib.contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Put back a module's own attributes, what they contain, and its own tensors: caches, running statistics."""
    attributes = vars(module)
    before = attributes.copy()
    contents = [(value, value.copy()) for value in before.values() if type(value) in _CONTAINERS]
    weights = [(p, p._version) for _, p in weights_of(module)]
    own = [*(b for _, b in buffers_of(module)), *(v for v in before.values() if has_bytes(v))]
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
                if not same(tensor, content):
                    tensor.copy_(content)


def seeder() -> Callable[[], None]:
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
