"""The changed part of a model as a Mermaid graph, which GitHub and GitLab draw in Markdown.

Names are untrusted, so a label has all but letters, digits and a few signs as codes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pytest_modelprobe.gate import SnapshotChange
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.text import count, printable

MOST_NODES = 40
"""How many layers a graph has; the rest is counted."""

_LONGEST = 60
_STYLES = (
    "classDef cause stroke:#b3261e,stroke-width:3px",
    "classDef added stroke:#1a7f37,stroke-width:3px",
    "classDef removed stroke:#57606a,stroke-dasharray:4",
    "classDef moved stroke:#9a6700",
)


def graph(change: SnapshotChange, most: int = MOST_NODES) -> list[str]:
    """Return the lines of a graph of the layers that changed and their neighbors, or no lines if no edge is drawn.

    Edges are tensors that one layer returns and another takes. Layers with a cause come first, then those that were
    added or removed, those that moved, and the neighbors.
    """
    if change.comparison is None or change.before is None:
        return []
    now, before = change.comparison.actual, change.before.record
    marked = _marked(change)
    # A renamed layer has its former name in the edges of before. They are left out, and it is drawn by its name now.
    removed = [edge for edge in change.connections_before if all(name in marked or name in now.layers for name in edge)]
    edges = dict.fromkeys([*removed, *change.connections])
    near = dict.fromkeys(name for edge in edges if not marked.keys().isdisjoint(edge) for name in edge)
    names = [*marked, *(name for name in near if name not in marked)]
    shown = {name: f"n{i}" for i, name in enumerate(names[:most])}
    drawn = [f"  {shown[a]} --> {shown[b]}" for a, b in edges if a in shown and b in shown]
    if not drawn:
        return []
    lines = ["```mermaid", "flowchart TD"]
    for name, node in shown.items():
        layer = now.layers.get(name) or before.layers.get(name)
        kind = "" if layer is None else f": {layer.type_name}"
        mark = f":::{marked[name]}" if name in marked else ""
        lines.append(f'  {node}["{_label(name + kind)}"]{mark}')
    lines += drawn
    if len(names) > most:
        lines.append(f'  rest["{count(len(names) - most, "layer")} more"]')
    return [*lines, *(f"  {style}" for style in _STYLES), "```", ""]


def _marked(change: SnapshotChange) -> Mapping[str, str]:
    """Return layer → how it changed."""
    diagnosis, comparison = change.diagnosis, change.comparison
    found: dict[str, str] = {}
    for cause in diagnosis.causes if diagnosis else ():
        found.setdefault(cause.layer, "cause")
    for difference in comparison.differences if comparison else ():
        if difference.kind in ("layer added", "layer removed"):
            found[difference.layer] = difference.kind.removeprefix("layer ")
    for layer in diagnosis.moved if diagnosis else ():
        if layer != ROOT:
            found.setdefault(layer, "moved")
    return found


def _label(text: str) -> str:
    """Return text for a label of Mermaid.

    >>> _label('fc|"1"')
    'fc#124;#34;1#34;'
    """
    shown = printable(text)
    shown = shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
    return re.sub(r"[^\w.,:() …-]", lambda sign: f"#{ord(sign[0])};", shown)
