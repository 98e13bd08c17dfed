"""One run or watch as plain data, and how much each step of training changed its layers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from pytest_modelprobe.assertions.activations import find_dead
from pytest_modelprobe.assertions.findings import findings, hints
from pytest_modelprobe.comparison import Diagnosis
from pytest_modelprobe.record import CallTree, Layer, Record, elements

from .dataflow import dataflow
from .layers import costs, layers_data
from .values import number, text

Kind = Literal["run", "watch"]


def run_data(
    record: Record,
    *,
    name: str | None = None,
    kind: Kind = "run",
    diagnosis: Diagnosis | None = None,
    expected: Record | None = None,
    steps: Iterable[Record] = (),
    others: Iterable[str] = (),
) -> dict[str, Any]:
    """Return what was recorded in one run or watch, in builtin types.

    Args:
        record: The record.
        name: The name of the run, or `None` for that of the model.
        kind: Whether the record is of a run or of a watch.
        diagnosis: The causes, if the record differs from its snapshot.
        expected: The record in that snapshot, with the current names of layers.
        steps: The records of the steps of training.
        others: The findings of other plugins.

    >>> run_data(Record(model="Net", forwards=1))["name"]
    'Net'
    """
    dead, profile, tree = find_dead(record, record.layers), record.profile, CallTree(record)
    return {
        "name": text(name or record.model),
        "kind": kind,
        "model": text(record.model),
        "device": record.device,
        "seed": record.seed,
        "loss": None if record.loss is None else text(record.loss),
        "forwards": record.forwards,
        "backwards": record.backwards,
        "parameters": elements(record.parameters),
        "trainable": elements(parameter for parameter in record.parameters if parameter.requires_grad),
        "notes": [text(note) for note in record.notes],
        "findings": [text(finding) for finding in (*findings(record, dead), *others)],
        "hints": [text(hint) for hint in hints(record, dead)],
        "error": None,
        "versions": {name: text(version) for name, version in record.versions.items()},
        "profile": None if profile is None else {**costs(profile), "probe_time": profile.probe_time},
        "steps": steps_data(steps),
        "layers": layers_data(record, tree, dead, diagnosis, expected),
        "flow": dataflow(record, tree),
    }


def failed_run(name: str, kind: Kind, error: str) -> dict[str, Any]:
    """Return the data of a run or watch whose record could not be made."""
    return {**run_data(Record(model=name), kind=kind), "error": text(error)}


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
        if own.update is None or was is None or was.nonfinite or not was.norm:
            continue
        if own.update.statistics is None or own.update.statistics.nonfinite:
            return None
        changes.append(own.update.statistics.norm)
        norms.append(was.norm)
    return math.hypot(*changes) / math.hypot(*norms) if norms else None
