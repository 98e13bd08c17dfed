"""How much each step of training changed the layers, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pytest_modelprobe.record import Layer, Record, estimated_change

from .values import number, text


def steps_data(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the update ratios of each step, those of layers whose parameters it could change.

    Args:
        records: Of the steps, as `Watch.steps` has them.
    """
    return [
        {
            "step": record.step,
            "update_ratios": {
                text(name): number(ratio)
                for name, layer in record.layers.items()
                if (ratio := update_ratio(layer)) is not None
            },
        }
        for record in records
    ]


def update_ratio(layer: Layer) -> float | None:
    """Return ‖w' − w‖ / ‖w‖ of all parameters of a layer in the record of a step.

    Parameters that were all zero before the step are left out. None if no others were in the optimizer, or one of them
    is not finite.

    >>> update_ratio(Layer(name="fc", type="Linear"))
    """
    changes, norms = [], []
    for own in layer.parameters:
        was = own.reading.statistics
        if own.updated is None or was is None or was.nonfinite or not was.norm:
            continue
        if own.updated.statistics is None or own.updated.statistics.nonfinite:
            return None
        if own.reading.fingerprint is not None and own.updated.fingerprint is not None:
            changes.append(was.norm * estimated_change(own.updated.fingerprint, own.reading.fingerprint, was.norm))
            norms.append(was.norm)
    return math.hypot(*changes) / math.hypot(*norms) if norms else None
