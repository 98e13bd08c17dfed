"""What the gradient of an output reaches: each trains something, and labels that are ignored train nothing.

Both are hints, because a healthy model may do so on purpose.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_modelprobe.models import CallTracer, ModuleCall, flatten, has_dense_storage
from pytest_modelprobe.runs import Loss, graph_nodes, loss_of
from pytest_modelprobe.text import count, listed

from .machinery.agreement import negligible
from .machinery.check import check
from .machinery.prepared import PreparedModel, Trace
from .outcome import NotApplicableError, Violation

_MOST = 8
"""Outputs that are looked at, the smallest first: each takes a forward and a backward."""

_DRAWS = 3
"""Random numbers for which an output has to be constant: a clamp or a hinge has no gradient for some."""

_ROUNDING = 1e-6
"""Largest gradient, beside the loss, that may be a rounding error."""

_STEPS = ("Ceil", "Floor", "Round", "Sign", "Trunc")
"""Operations whose gradient is zero by definition."""

_IGNORED = -100
"""The default of ignore_index= of torch's losses."""


@check
def outputs_train(prepared: PreparedModel) -> Violation | str:
    """Check that each output that requires a gradient gives one to some parameter, in training mode.

    An auxiliary loss that is a constant, as the mean of a softmax is, has a gradient of zero, or of rounding errors. It
    is a hint. Outputs that are rounded or zero are left out, and all but the smallest eight.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.outputs_train(probe, nn.Linear(4, 3), probe.randn(2, 4)))
    outputs_train holds for Linear: 1 output
    """
    one = prepared.reference(mode="train", backward=True, loss="random")
    sizes = {path: x.numel() for path, x in flatten("output", one.output).tensors if _is_trained(x)}
    paths = sorted(sizes, key=lambda path: sizes[path])
    found = [path for path in paths[:_MOST] if all(_trains_nothing(prepared, path, draw) for draw in range(_DRAWS))]
    if found:
        return Violation.first_of(
            ((path,) for path in found),
            "trains nothing: it requires a gradient, which is zero for every parameter",
            columns=("output",),
            advice="Look for what is constant whatever the weights are: a sum or a mean over a softmax, a "
            "normalization over one element. If it is only for display, detach it.",
            level="hint",
        )
    left = f"; not looked at: {listed(paths[_MOST:])}" if paths[_MOST:] else ""
    return count(len(paths[:_MOST]), "output") + left


def _is_trained(x: Tensor) -> bool:
    return x.is_floating_point() and x.requires_grad and has_dense_storage(x) and x.numel() > 0


def _trains_nothing(prepared: PreparedModel, path: str, draw: int) -> bool:
    """Whether no parameter gets more than a rounding error, with other parameters in each draw."""
    with prepared.keep_changes():
        if draw:
            prepared.multiply_parameters(f"draw {draw}", mean=0.0, std=4.0)
        trace = prepared.run(mode="train", backward=True, loss=_loss_at(prepared, path), seed=f"draw {draw}")
    arrived = [gradient.norm().item() for gradient in trace.arrived]
    if trace.error is not None or trace.loss is None or not trace.loss.item() or not arrived:
        return False
    most = min(negligible(trace), _ROUNDING * abs(trace.loss.item()))  # a small factor makes both small
    return max(arrived) <= most and not _has_steps(trace)


def _loss_at(prepared: PreparedModel, path: str) -> Loss:
    """Return a loss that is a random projection of one output alone."""

    def loss(output: Any) -> Tensor:
        tensors = dict(flatten("output", output).tensors)
        if path not in tensors:
            raise NotApplicableError(f"{path} is not returned for other parameters")
        return loss_of(tensors[path], "random", seed=prepared.probe.seed)

    return loss


def _has_steps(trace: Trace) -> bool:
    assert trace.loss is not None
    return any(node.name().startswith(_STEPS) for node in graph_nodes(trace.loss.grad_fn))


@check
def labels_ignored(prepared: PreparedModel) -> Violation | str:
    """Check that positions whose label is -100 have no part in the loss that a model returns.

    The gradient of the loss at the last layer with an output for each label has to be zero at these positions, or at
    those that predict them, one earlier. It is a hint, as a model may have another loss there on purpose.

    Args:
        prepared: The model and its inputs: integers with -100 among them, and a scalar among the outputs.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.head = nn.Linear(4, 3)
    ...
    ...     def forward(self, x, labels):
    ...         return nn.functional.cross_entropy(self.head(x), labels)
    >>> probe = ModelProbe()
    >>> print(checks.labels_ignored(probe, Model(), probe.randn(3, 4), torch.tensor([2, -100, 0])))
    labels_ignored holds for Model: 1 ignored label, at head
    """
    one = prepared.reference(mode="train", backward=True, loss="random")
    labels = next((x for _, x in prepared.dense if _has_ignored(x)), None)
    if labels is None:
        raise NotApplicableError("no input of integers has -100 among others")
    losses = [path for path, x in flatten("output", one.output).tensors if _is_trained(x) and x.numel() == 1]
    if not losses:
        raise NotApplicableError("the model returns no loss")
    last = _last_gradient(prepared, losses[0], labels)
    if last is None:
        raise NotApplicableError("no layer has an output for each label that a gradient of the loss reaches")
    layer, readings = last
    ignored = (labels == _IGNORED).to(readings[0].device)
    earlier = torch.cat([ignored[..., 1:], torch.ones_like(ignored[..., :1])], -1)
    if any(not (there & off).any() for there in readings for off in (ignored, earlier)):
        return f"{count(int(ignored.sum()), 'ignored label')}, at {layer}"
    return Violation.at(
        layer,
        f"gets a gradient of {losses[0]} at {int((readings[0] & ignored).sum()):,} of "
        f"{int(ignored.sum()):,} positions whose label is {_IGNORED}",
        advice="Look for a part of the loss that takes in all positions, such as label smoothing, and for a mean over "
        "positions before those are left out.",
        level="hint",
    )


def _has_ignored(x: Tensor) -> bool:
    ignored = x == _IGNORED
    return x.dim() > 0 and not x.is_floating_point() and bool(ignored.any()) and not bool(ignored.all())


def _last_gradient(prepared: PreparedModel, path: str, labels: Tensor) -> tuple[str, list[Tensor]] | None:
    """Return the last layer with scores for each label, and at which labels a gradient of an output reaches it."""
    found: list[tuple[str, list[Tensor]]] = []

    def end(call: ModuleCall, args: Any, output: Any) -> None:
        for _, x in flatten("output", output).tensors:
            if _is_trained(x):
                x.register_hook(lambda arrived: found.append((call.layer, _at_labels(arrived, labels))))

    with CallTracer(prepared.layers.modules, ModuleCall, after=end):
        prepared.variation(mode="train", backward=True, loss=_loss_at(prepared, path))
    reached = ((layer, readings) for layer, readings in found if readings and readings[0].any())
    return next(reached, None)  # the last layer is the first that a gradient reaches


def _at_labels(x: Tensor, labels: Tensor) -> list[Tensor]:
    """Return at which labels scores are not zero, for each way in which their shape has a place for each label."""
    flat = x.dim() == 2 and len(x) == labels.numel()
    ways = (x.unflatten(0, labels.shape) if flat else x, x.movedim(1, -1)) if x.dim() > 1 else ()
    return [scores.detach().ne(0).any(-1) for scores in ways if scores.shape[:-1] == labels.shape]
