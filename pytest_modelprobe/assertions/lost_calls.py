"""Calls whose output is thrown away: no gradient arrives at it, though one does at another call of the same layer."""

from __future__ import annotations

from pytest_modelprobe.record import CallTree, ForwardKind, Record, Step, Value, containers


def find_lost_calls(record: Record) -> list[Step]:
    """Return the calls at whose output no gradient arrives, of layers with another call at which one does.

    Of those inside each other it is the outermost. The one nearest to the loss comes first: those that only feed it are
    lost too.

    >>> find_lost_calls(Record(model="Net"))
    []
    """
    lost: list[Step] = []
    reached: set[tuple[ForwardKind, str]] = set()
    lost_or_inside: set[int] = set()
    for step in CallTree(record).started:
        values = [value for value in step.call.outputs if _takes_gradient(value)]
        if any(value.backward is not None for value in values):
            reached.add(_layer(step))
        if id(step.parent) in lost_or_inside:
            lost_or_inside.add(id(step))
        elif values and all(value.backward is None for value in values):
            lost_or_inside.add(id(step))
            lost.append(step)
    trained = _with_parameters(record)
    found = [step for step in lost if _layer(step) in reached and step.layer.name in trained]
    return sorted(found, key=lambda step: -step.call.finished)


def _takes_gradient(value: Value) -> bool:
    """Whether a gradient should arrive at a value, and would be seen."""
    return value.requires_grad and not value.overwritten and 0 not in value.shape


def _layer(step: Step) -> tuple[ForwardKind, str]:
    """Return the kind of forward and the layer: a model may be trained in one kind of forward and used in another."""
    return step.place[:2], step.layer.name


def _with_parameters(record: Record) -> set[str]:
    """Return the names of layers with a parameter that requires a gradient, in them or in a layer inside them."""
    own = [layer.name for layer in record.layers.values() if any(p.requires_grad for p in layer.parameters)]
    return {*own, *(name for one in own for name in containers(one))}
