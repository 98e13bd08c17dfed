"""The layout that both files share: strict JSON with one entry of the header, or one layer, on each line.

Git compares and merges by lines, so a change in one layer is a change of one line. The names of all fields stand here,
and so do the values that a line leaves out: writing and reading both take them from here, and cannot disagree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Literal, NamedTuple

from pytest_modelprobe.record import ROOT

SCHEMA = 5
"""The version of the format. The version before is read too, by the gate and by an update, which writes it anew."""
LAYERS = "layers"
RESPONSES = "responses"
DECLARATION = ("reason", "supersedes")
"""The reason for the change of the architecture, and the digests of earlier ones."""


ComparedParts = Literal["all", "architecture", "behavior"]
"""The part of a snapshot that its test compares."""

COLUMNS = ["mean", "std", "min", "max", "fingerprint", "noise", "zeros"]
GRADIENT_COLUMNS = ["rms", "fingerprint", "noise", "zeros"]

OWN, INPUT, OUTPUT = ".", "<", ">"
ALONE, RANDOM, SAMPLES = "alone", "random", "samples"
HANDED = "~"
RECIPES, GRADIENT, UNREACHED, REASON, BY_MODE = "given", "gradient", "unreached", "reason", "by mode"
KEYS = {
    ".": "own parameter or buffer: numbers, gradient, what the run left, what the optimizer added",
    "<": "input: numbers and gradient, or which value it is",
    ">": "output; 2> of the second call",
    "alone": "which response",
    "samples": "a digest of the samples, by which fingerprints are made",
    "~": "what the code alone handed on",
}
"""The meaning of the keys, for readers of the file."""
ARROW = " -> "
MODES = {"train": True, "eval": False}
ABSENT: dict[str, str] = {}
"""The value of an attribute that most layers have and this one does not."""
EMPTY = "[[]]"
"""The entry of a value without numbers."""


def usual_layer(header: Mapping[str, Any], *, has_children: bool) -> dict[str, Any]:
    """Return the usual values of a layer's fields. A line leaves out a field that has its usual value."""
    return {
        "functional": False,
        "leaf": not has_children,
        "training": MODES[header["mode"]],
        "aliases": [],
        "attributes": {},
        "parameters": {},
        "buffers": {},
        "calls": [],
    }


def usual_call(header: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
    """Return the usual values of the fields of a call in a layer of this mode."""
    return {
        "root": header.get("root", ROOT),
        "mode": header["mode"],
        "forwards": header.get("forwards", 1),
        "training": training,
        "grad_enabled": header.get("grad_enabled", True),
        "autocast": header.get("autocast"),
        "recomputed": 0,
        "inputs": {},
        "inputs_known": True,
        "arguments": {},
        "outputs": {},
    }


class Texts(NamedTuple):
    """The contents of the two files."""

    architecture: str
    numbers: str | None
    """``None`` if the record has the structure alone."""


def laid_out(
    header: Mapping[str, Any], layers: Iterable[tuple[str, str]], responses: Iterable[tuple[str, str]] = ()
) -> str:
    """Return the text of a file with a header, responses and layers, one entry a line.

    >>> print(laid_out({"modelprobe": 1}, [("fc1", '{"type": "Linear"}')]), end="")
    {
    "modelprobe": 1,
    "layers": {
    "fc1": {"type": "Linear"}
    }
    }
    """
    entries = [f"{quoted(key)}: {json.dumps(value, allow_nan=False)}" for key, value in header.items()]
    return joined_lines(entries, [f"{quoted(k)}: {v}" for k, v in responses], [f"{quoted(k)}: {v}" for k, v in layers])


def joined_lines(header: Sequence[str], responses: Sequence[str], layers: Sequence[str]) -> str:
    """Return the file of these lines. The lines are given without a comma at their end."""
    sections = [*header]
    for name, lines in ((RESPONSES, responses), (LAYERS, layers)):
        if lines or name == LAYERS:
            content = ",\n".join(lines)
            sections.append(f'"{name}": {{\n{content}\n}}' if lines else f'"{name}": {{}}')
    content = ",\n".join(sections)
    return f"{{\n{content}\n}}\n"


def digest_of(data: Mapping[str, Any]) -> str:
    """Return the digest of a parsed architecture. It is independent of white space and of the order of attributes."""
    header = {k: v for k, v in data.items() if k not in (*DECLARATION, LAYERS)}
    layers = data.get(LAYERS)
    lines = list(layers.items()) if isinstance(layers, dict) else layers  # their order is that of the calls
    text = json.dumps([header, lines], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]
