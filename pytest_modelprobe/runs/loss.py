"""The loss of a run: the user's function of the output, or a fixed random projection of it.

The projection reaches every output with its own gradient. A sum would not do: behind a softmax or a normalization it is
constant, and its gradients are only rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import torch

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import as_real, flatten, lacks_memory, parts, seeding
from pytest_modelprobe.record import CallTree, Record, Step

Loss = Callable[[Any], torch.Tensor] | Literal["random"]

_CACHE = re.compile(r"past_key_values?|(\w+_)?cache(_params)?|\w*Cache")
"""Matches names of fields, and of types, that are caches of a decoder."""


class NoGradientError(UsageError):
    """The loss of an output has no gradient."""


def check_loss(loss: object) -> None:
    """Raise `UsageError` unless ``loss`` is a function, ``"random"`` or `None`."""
    __tracebackhide__ = True
    if loss is not None and loss != "random" and not callable(loss):
        raise UsageError(f"loss is a function of the output, 'random' or None; got {loss!r}")


def loss_of(output: Any, loss: Loss, *, seed: int) -> torch.Tensor:
    """Return the loss of an output: a real scalar that requires a gradient.

    Raises:
        NoGradientError: The loss has no gradient.
        UsageError: The function did not return a scalar.

    >>> loss_of(torch.ones(2, requires_grad=True), torch.sum, seed=0).item()
    2.0
    """
    __tracebackhide__ = True
    if not callable(loss):
        projection = random_loss(output, seed=seed)
        if projection is None and not _weighed(output):
            raise NoGradientError('the model returns no floating tensor, as loss="random" needs one: run without loss=')
        if projection is None:
            raise NoGradientError(
                'no floating output requires a gradient, as loss="random" needs one: is the model frozen, or its '
                "output detached?"
            )
        return projection
    found: Any = loss(output)
    if not isinstance(found, torch.Tensor):
        raise UsageError(f"loss(output) returns a scalar tensor; got {type(found).__name__}")
    if found.numel() != 1:
        raise UsageError(
            f"loss(output) returned a tensor of shape {tuple(found.shape)}: reduce it to a scalar, with .mean() say"
        )
    if found.is_complex():
        raise UsageError("loss(output) is complex, which has no gradient: take .abs() or .real of it")
    if not found.requires_grad:
        raise NoGradientError(
            "loss(output) has no gradient: it was detached, computed under no_grad, or of a part of the output that "
            "has none, or every parameter is frozen"
        )
    return found


def random_loss(output: Any, *, seed: int) -> torch.Tensor | None:
    """Return a random projection of all floating outputs, each divided by the square root of its size.

    The weights are drawn from the position among the floating outputs, not from the path, so that the same tensors have
    the same loss in a tuple, a dict or alone. A cache is ignored if there are other outputs, since models return it on
    request only. A complex output counts as its real and imaginary parts. Returns `None` if no floating output requires
    a gradient.

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> bool(random_loss(x, seed=0) == random_loss({"logits": x, "past_key_values": (x, x)}, seed=0))
    True
    """
    total: torch.Tensor | None = None
    for position, tensor in enumerate(_weighed(output)):
        if tensor.requires_grad and tensor.numel():
            name = f"loss output[{position}]" if position else "loss output"
            weights = seeding.randn(tensor.shape, seed=seed, name=name, device=tensor.device, dtype=torch.float32)
            wide = tensor if tensor.dtype == torch.float64 else tensor.float()
            term = (wide * weights).sum() / tensor.numel() ** 0.5
            total = term if total is None else total + term.to(total.device)
    return total


def _weighed(output: Any) -> list[torch.Tensor]:
    """Return the floating outputs in order, without those of a cache unless there are no others."""
    named = parts(output) or [("", output)]
    # A cache is known by the name of its field or type.
    known = [(name.removeprefix("."), type(part).__name__, part) for name, part in named]
    kept = [part for name, kind, part in known if not (_CACHE.fullmatch(name) or _CACHE.fullmatch(kind))]
    return _floating(kept) or _floating(output)


def _floating(output: Any) -> list[torch.Tensor]:
    tensors = (as_real(x) for _, x in flatten("output", output).tensors if not lacks_memory(x))
    return [tensor for tensor in tensors if tensor.is_floating_point()]


# --- The layer that cut the graph of a loss without a gradient -------------------------------------------------------


def detaching_call(record: Record) -> Step | None:
    """Return the innermost call whose own code cut the output of the model off from what requires a gradient.

    Returns `None` if the output requires a gradient, or if nothing that it is computed of does.
    """
    step = next((step for step in CallTree(record).started if step.outermost), None)
    if step is None or not _detaches(step):
        return None
    child = step.last_child
    while child is not None and not _has_graph(child):
        if _detaches(child):
            step, child = child, child.last_child
        else:
            child = child.previous
    return step


def _has_graph(step: Step) -> bool:
    return any(value.requires_grad for value in step.call.outputs)


def _detaches(step: Step) -> bool:
    floating = any(value.is_floating for value in step.call.outputs)
    return step.call.grad_enabled and floating and not _has_graph(step) and _is_given_graph(step)


def _is_given_graph(step: Step) -> bool:
    child = step.last_child
    while child is not None:
        if _has_graph(child) or _is_given_graph(child):
            return True
        child = child.previous
    given, own = step.call.inputs, step.layer.parameters
    return any(value.requires_grad for value in given) or any(parameter.requires_grad for parameter in own)
