"""The layer that cut the graph of a loss without a gradient.

Torch says only that the loss requires no gradient. The record of the forward knows for each value whether it requires
one, and so which layer was given a graph and returned none.
"""

from __future__ import annotations

from pytest_modelprobe.record import CallTree, Record, Step


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
