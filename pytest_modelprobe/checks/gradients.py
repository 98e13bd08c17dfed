"""What the gradient of a loss reaches: labels that are ignored train nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_modelprobe.models import CallTracer, ModuleCall, flatten, has_dense_storage
from pytest_modelprobe.runs import Loss, loss_of
from pytest_modelprobe.text import count

from .machinery.check import check
from .machinery.prepared import PreparedModel
from .outcome import NotApplicableError, Violation

_IGNORED = -100
"""The default of ignore_index= of torch's losses."""


def _is_trained(x: Tensor) -> bool:
    return x.is_floating_point() and x.requires_grad and has_dense_storage(x) and x.numel() > 0


def _loss_at(prepared: PreparedModel, path: str) -> Loss:
    """Return a loss that is a random projection of one output alone."""

    def loss(output: Any) -> Tensor:
        tensors = dict(flatten("output", output).tensors)
        if path not in tensors:
            raise NotApplicableError(f"{path} is not returned for other parameters")
        return loss_of(tensors[path], "random", seed=prepared.probe.seed)

    return loss


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
