"""Layers that only hand on what they get, such as an identity, or a container around layers that were there before.

Where one came or went, everything behind it gets another tensor when the code is run alone, because each child returns
a synthetic tensor of its own. That is no change of the code, so a diagnosis has to see through such layers.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence

from pytest_modelprobe.comparison.differences import CallPair
from pytest_modelprobe.comparison.pairing import child_of, children, split_place
from pytest_modelprobe.record import IsolatedResponse, Layer, Record, Step

StepsByRoot = Mapping[str, Sequence[Step]]
"""Root → its calls, in the order in which they started."""


def returns_its_input(layer: Layer) -> bool:
    """Whether each output of a layer is one of its inputs."""
    return passes_on(layer, {})


def returned_its_input(record: Record, name: str) -> bool:
    """Whether a layer without parameters, itself or inside it, returned its inputs in the run."""
    inside = (layer for other, layer in record.layers.items() if f"{other}.".startswith(f"{name}."))
    return returns_its_input(record.layers[name]) and not any(layer.parameters for layer in inside)


def passes_on(layer: Layer, steps: StepsByRoot) -> bool:
    """Whether each output of a layer is one of its inputs, or an output of one of these calls inside it."""
    for call in layer.calls:
        known = {v.forward.fingerprint for v in call.inputs}
        others = steps.get(call.root, ())
        start = bisect.bisect_right(others, call.started, key=_started)
        for step in others[start : bisect.bisect_left(others, call.finished, start, key=_started)]:
            if step.call.finished < call.finished:
                known.update(v.forward.fingerprint for v in step.call.outputs)
        if any(v.forward.fingerprint is None or v.forward.fingerprint not in known for v in call.outputs):
            return False
    return True


def by_root(steps: Iterable[Step]) -> StepsByRoot:
    """Return root → its calls."""
    found: dict[str, list[Step]] = {}
    for step in sorted(steps, key=_started):
        found.setdefault(step.call.root, []).append(step)
    return found


def handed_on(pair: CallPair, response: IsolatedResponse, record: Record) -> dict[str, str | None]:
    """Return which synthetic tensor goes where; of children that return their input it is the one that they got.

    None: a tensor that was computed.
    """
    names = {called: child_of(pair, called) for called in children(response) if called}
    passing = {called for called, name in names.items() if name in record.layers and returned_its_input(record, name)}
    given = {
        f"{called} output": h.passed for called in passing for h in response.handed if h.where == f"{called} input"
    }

    def source(passed: str | None) -> str | None:
        while passed in given:
            passed = given[passed]
        return passed

    return {h.where: source(h.passed) for h in response.handed if split_place(h.where)[0] not in passing}


def _started(step: Step) -> int:
    return step.call.started
