"""The same values under other names: arguments by keyword or by position, outputs in a tuple or not.

How a call is written changes nothing that is computed. So the expected record gets the current paths before the two
are compared, and what was renamed is a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_modelprobe.record import Call, Layer, NamesBefore, Plain, Record, with_paths

from .differences import Difference
from .pairing import is_same, paired_values

_FORMER = "former_"
"""Prefix of the path of a value that is gone, where another has its path now."""


def with_current_paths(
    actual: Record, expected: Record, layers: Mapping[str, str]
) -> tuple[Record, NamesBefore, list[Difference]]:
    """Return the expected record with the paths of the actual one, what they were before, and a difference for each.

    It is of the kind ``path`` for an output of the model itself, which whoever uses the model sees, else ``name``.

    Args:
        actual: The new record.
        expected: The record that it is compared with, whose layers have their current names.
        layers: Current name → name before, of the layers that were renamed.
    """
    both = [(layer, expected.layers[name]) for name, layer in actual.layers.items() if name in expected.layers]
    paths = {a.name: found for a, e in both if (found := _of_calls(a, e))}
    seen = {
        layer.name: {v.path for call in layer.calls if call.root == layer.name for v in call.outputs}
        for layer, _ in both
    }
    differences = [
        Difference(layer=name, kind="path" if now in seen[name] else "name", what=now, actual=now, expected=before)
        for name, found in paths.items()
        for now, before in found.items()
        if not now.startswith(_FORMER)
    ]
    known = with_paths(expected, NamesBefore(paths=paths))
    for a, e in both:
        if weights := dict(_of_parameters(a, e)):
            paths[a.name] = paths.get(a.name, {}) | weights
    return known, NamesBefore(layers=layers, paths=paths), differences


def _of_calls(a: Layer, e: Layer) -> dict[str, str]:
    """Return current path → path before, of what each call of a layer takes and gives under another one."""
    before = {call.index: call for call in e.calls}
    found = [dict(_of_call(call, before[call.index])) for call in a.calls if call.index in before]
    # Where calls are written in different ways, one name stands for several.
    return found[0] if found and all(here == found[0] for here in found) else {}


def _of_call(a: Call, e: Call) -> Iterator[tuple[str, str]]:
    inputs, _, gone = paired_values(a.inputs, e.inputs)
    for value, other in inputs:
        # Of two keywords with other values, one came and one went.
        written = any(map(_is_positional, (value.path, other.path)))
        if value.path != other.path and (written or is_same(value.forward, other.forward)):
            yield value.path, other.path
    outputs, _, lost = paired_values(a.outputs, e.outputs)
    yield from ((value.path, other.path) for value, other in outputs if value.path != other.path)
    yield from _of_arguments(a.arguments, e.arguments)
    taken = {value.path for value in (*a.inputs, *a.outputs)}
    yield from ((f"{_FORMER}{value.path}", value.path) for value in (*gone, *lost) if value.path in taken)


def _of_arguments(actual: Mapping[str, Plain], expected: Mapping[str, Plain]) -> Iterator[tuple[str, str]]:
    """Yield equal arguments that are given by keyword in one call and by position in the other."""
    left = [path for path in expected if path not in actual]
    for path, value in actual.items():
        if path in expected or value is None or value is False:
            continue
        alike = (
            other
            for other in left
            if _is_positional(path) != _is_positional(other)
            and type(expected[other]) is type(value)
            and expected[other] == value
        )
        if (other := next(alike, None)) is not None:
            left.remove(other)
            yield path, other


def _is_positional(path: str) -> bool:
    return path == "input" or path.startswith("input[")


def _of_parameters(a: Layer, e: Layer) -> Iterator[tuple[str, str]]:
    """Yield parameters of a layer that have the values of one with another name."""
    came = [p for p in a.parameters if all(p.name != other.name for other in e.parameters)]
    gone = [p for p in e.parameters if all(p.name != other.name for other in a.parameters)]
    for parameter in came:
        alike = (p for p in gone if (p.shape, p.dtype) == (parameter.shape, parameter.dtype))
        if (same := next((p for p in alike if is_same(parameter.reading, p.reading)), None)) is not None:
            gone.remove(same)
            yield parameter.name, same.name
