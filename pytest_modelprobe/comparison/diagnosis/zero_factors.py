"""Layers whose own code may not affect the run: their result may be multiplied by zero, as by a gate at zero.

A layer with LoRA adds nothing at first, and a residual branch may begin with a factor of zero. The run is then the same
whatever this code computes, so it has to be asked alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from pytest_modelprobe.record import CallTree, Parameter, Record, Step, Value


def layers_behind_zeros(record: Record) -> list[str]:
    """Return the layers outside torch with an all-zero parameter, buffer, input or child output.

    Of leaf layers with the same type, attributes and shapes only the first is returned.

    >>> layers_behind_zeros(Record(model="Net"))
    []
    """
    steps = [step for step in CallTree(record).started if not step.layer.functional]
    giving_zeros = {id(step.parent) for step in steps if step.parent and _any_zero(step.call.outputs)}
    calling = {id(step.parent) for step in steps}
    kinds: set[Hashable] = set()
    found: dict[str, None] = {}
    for step in steps:
        layer = step.layer
        zeros = id(step) in giving_zeros or _any_zero((*layer.parameters, *layer.buffers, *step.call.inputs))
        if zeros and not layer.type.startswith("torch.nn."):
            kind = layer.name if id(step) in calling else _kind(step)
            if kind not in kinds:
                kinds.add(kind)
                found[layer.name] = None
    return list(found)


def _any_zero(some: Iterable[Parameter | Value]) -> bool:
    """Whether one of the tensors is all zero."""
    for one in some:
        reading = one.reading if isinstance(one, Parameter) else one.forward
        if reading.digest is None and reading.statistics is not None and reading.statistics.all_zero:
            return True
    return False


def _kind(step: Step) -> Hashable:
    layer = step.layer
    return (
        layer.type,
        tuple(layer.attributes.items()),
        tuple((own.name, own.shape) for own in (*layer.parameters, *layer.buffers)),
        tuple((value.path, value.shape) for value in step.call.inputs),
        tuple(step.call.arguments.items()),
    )
