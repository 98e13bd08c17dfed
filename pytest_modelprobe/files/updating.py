"""Updates that change as few lines as possible, for a diff that shows what changed and nothing else.

A new run rounds some numbers differently although nothing changed. Lines of such layers keep their old text, and lines
of layers that changed are taken from the new one. The result is read back before it is used; if the old files cannot be
mixed with the new ones, the new ones are taken as they are.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from pytest_modelprobe.exceptions import SnapshotError

from .decoding import decode
from .layout import ALONE, DECLARATION, LAYERS, RANDOM, RESPONSES, SAMPLES, Texts, digest_of, joined_lines

# Fields of the header that the lines of layers depend on: if one changes, the same line says something else.
_LEFT_OUT = ("root", "mode", "forwards", "dtype", "requires_grad", "grad_enabled", "autocast", "attributes")


def rewritten(new: Texts, old: Texts, changed: Collection[str]) -> Texts:
    """Return the old texts with the lines of some layers taken from the new ones; the rest stays byte for byte.

    Lines of layers whose structure differs are taken from the new texts too. If the old texts cannot be used, the new
    ones are returned.

    Args:
        new: What `encode` returned for the record that is kept from now on.
        old: What the files hold.
        changed: Layers with values beyond their tolerance.
    """
    try:
        mixed = _mixed(new, old, changed)
        if mixed not in (new, old):
            decode(*mixed, where="the update")
    except (ValueError, SnapshotError):  # the old files are not laid out as ours, or do not fit together
        return new
    return mixed


class _Line(NamedTuple):
    text: str
    data: Any


class _File(NamedTuple):
    """The lines of a file by their keys, without commas."""

    header: dict[str, _Line]
    responses: dict[str, _Line]
    layers: dict[str, _Line]


def _split(text: str) -> _File:
    """Return the lines of a file that is laid out as ours; ValueError if it is not."""
    found = _File({}, {}, {})
    section = found.header
    sections = {RESPONSES: found.responses, LAYERS: found.layers}
    lines = text.split("\n")
    if lines[:1] != ["{"] or lines[-2:] != ["}", ""]:
        raise ValueError("another layout")
    for line in lines[1:-2]:
        if line in ("}", "},"):
            section = found.header
            continue
        key, end = json.JSONDecoder().raw_decode(line)
        rest = line[end + 2 :]
        if rest == "{" and key in sections:
            section = sections[key]
        elif rest != "{}":
            section[key] = _Line(line.removesuffix(","), json.loads(rest.removesuffix(",")))
    return found


def _mixed(new: Texts, old: Texts, changed: Collection[str]) -> Texts:
    a, b = _split(new.architecture), _split(old.architecture)
    architecture = _architecture(new, old, a, b)
    if new.numbers is None or old.numbers is None:
        return Texts(architecture, new.numbers)
    numbers = _split(new.numbers), _split(old.numbers)
    same_signs = _data(numbers[0].header, SAMPLES) == _data(numbers[1].header, SAMPLES)
    if not same_signs or any(_data(a.header, key) != _data(b.header, key) for key in _LEFT_OUT):
        return Texts(architecture, new.numbers)
    same = {name for name, line in a.layers.items() if name in b.layers and line.data == b.layers[name].data}
    return Texts(architecture, _numbers(*numbers, same - set(changed)))


def _architecture(new: Texts, old: Texts, a: _File, b: _File) -> str:
    declared = any(key in a.header for key in DECLARATION)
    if not declared and digest_of(json.loads(new.architecture)) == digest_of(json.loads(old.architecture)):
        return old.architecture
    return joined_lines(_kept(a.header, b.header), [], _kept(a.layers, b.layers))


def _kept(new: Mapping[str, _Line], old: Mapping[str, _Line]) -> list[str]:
    """Return the new lines. A line with the same content keeps its old text."""
    return [old[k].text if k in old and old[k].data == line.data else line.text for k, line in new.items()]


def _numbers(new: _File, old: _File, same: Collection[str]) -> str:
    kept = {
        name
        for name, line in new.layers.items()
        if name in same and name in old.layers and _form(line.data) == _form(old.layers[name].data)
    }
    layers = {name: (old if name in kept else new).layers[name] for name in new.layers}
    header = new.header
    if kept == new.layers.keys() == old.layers.keys():  # the header of a run belongs to its numbers
        told = {key: new.header[key] for key in ("architecture", "compared") if key in new.header}
        header = {key: line for key, line in old.header.items() if key != "compared"} | told
    responses: dict[str, _Line] = {}
    for name, line in layers.items():
        table = (old if name in kept else new).responses
        for key, value in line.data.items():
            if key.lstrip("0123456789") != ALONE:
                continue
            if responses.setdefault(value, table[value]).data != table[value].data:
                raise ValueError("one key for two responses")
    return joined_lines(
        _kept(header, old.header), [line.text for line in responses.values()], [line.text for line in layers.values()]
    )


def _form(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a line has besides numbers: which values it has, and which it refers to."""
    return {key: _form_of(key, value) for key, value in line.items()}


def _form_of(key: str, value: Any) -> Any:
    if type(value) is list:
        return [part is None for part in value]
    return None if key.lstrip("0123456789") in (ALONE, RANDOM) else value


def _data(lines: Mapping[str, _Line], key: str) -> Any:
    return lines[key].data if key in lines else None
