"""Outputs that are the same for every row of a batch, although the inputs are not.

The ranges of units show it: where the smallest and the largest element of each unit are equal, no row differs from
another.
"""

from __future__ import annotations

from pytest_modelprobe.record import CallTree, Record, Step, Value

from .sources import numbers
from .zeros import has_zero_parameters


def find_constant(record: Record) -> tuple[Step, Step] | None:
    """Return a forward whose outputs are the same for all rows, and the call after the last output that varies.

    Outputs of a model with a layer of zeros are left out, as a head that begins with zeros gives them; so are those of
    inputs that are one number, or integers, of whose rows nothing is known.

    >>> find_constant(Record(model="Net")) is None
    True
    """
    if any(layer.calls and has_zero_parameters(layer) for layer in record.layers.values()):
        return None
    tree = CallTree(record)
    for forward in (step for step in tree.returned if step.outermost):
        given = [numbers(value) for value in forward.call.inputs if _has_rows(value)]
        if _is_constant(forward) and any(one is not None and one.min != one.max for one in given):
            steps = [one for one in tree.returned if one.place[:2] == forward.place[:2] and one.layer.leaf]
            last = max((i for i, one in enumerate(steps) if _varies(one)), default=-1)
            if last >= 0:
                return forward, next((one for one in steps[last + 1 :] if _is_constant(one)), forward)
    return None


def _is_constant(step: Step) -> bool:
    """Whether no output of a call with an axis of rows varies."""
    rows = [value for value in step.call.outputs if _has_rows(value)]
    return bool(rows) and all(_ranges(value) == "equal" for value in rows)


def _varies(step: Step) -> bool:
    return any(_has_rows(value) and _ranges(value) == "wide" for value in step.call.outputs)


def _has_rows(value: Value) -> bool:
    size = value.shape[0] if len(value.shape) > 1 else 0
    return value.is_floating and (size if isinstance(size, int) else size[0]) > 1


def _ranges(value: Value) -> str:
    units = value.forward.units
    if units is None or not len(units):
        return "not known"
    return "equal" if units.low == units.high else "wide"
