"""The layers of a model as a graph by dataflow, drawn as SVG: boxes in boxes, from top to bottom.

The tree of module names gives the boxes; each is laid out alone, and then is a node of the box around it. So lines
never cross a box, and the layout of a large model is many small ones. Siblings that repeat are one box with ``×12``.
A layer that is called again is a node for each call, as one node would join what its calls keep apart.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_modelprobe.record import ROOT
from pytest_modelprobe.text import count, printable, shape

from .elements import STATUSES, Child, Markup, coordinate, is_cause, status_of, tag

MOST_NODES = 150
"""If there are more nodes, boxes without a status are drawn as one node each."""

_OPEN_NODES = 30
"""If there are more nodes, and some have a cause, only those are unfolded."""

_MOST_PARTS = 24
"""How many parts of a name make boxes: deeper modules share one."""

_MOST_CHARACTERS = 26

GUESS = "a guess: code computed the input, from outputs before it that no other layer takes"
"""What a dotted line is."""

_CHARACTER = 6.63
"""Width of a character of the graph's font, in pixels."""

_NODE, _GAP, _ABOVE, _PADDING, _TITLE, _LANE = 24.0, 12.0, 18.0, 10.0, 22.0, 9.0


@dataclass(eq=False)
class Box:
    """A layer, or a module with layers in it, or several that are alike."""

    label: str
    path: tuple[str, ...] = ()
    layer: dict[str, Any] | None = None
    again: str = ""
    """Which call of the layer it is, if not the first: ``call 2``."""
    children: dict[str, Box] = field(default_factory=dict)
    links: set[tuple[str, str]] = field(default_factory=set)
    """Names of children: the first feeds the second."""
    guesses: set[tuple[str, str]] = field(default_factory=set)
    """Names of children: code computed an input of the second after the first had run."""
    times: int = 1
    hidden: int = 0
    """How many layers in it are not drawn."""
    statuses: set[str] = field(default_factory=set)
    """The words of the status of those layers."""
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    edges: list[tuple[Box, Box, bool]] = field(default_factory=list)
    """The box that an edge starts at, the box that it ends at, and whether the record knows this source."""

    @property
    def status(self) -> list[str]:
        """The words of the layer, or of a node whose layers are not drawn, the worst of them."""
        if self.hidden and not self.children:
            return sorted(self.statuses, key=[*STATUSES, *self.statuses].index)[:1]
        return list(self.layer["status"]) if self.layer else []

    def layers(self) -> Iterator[dict[str, Any]]:
        """Yield the layer and those in it."""
        if self.layer is not None:
            yield self.layer
        for child in self.children.values():
            yield from child.layers()

    @property
    def nodes(self) -> int:
        """How many are drawn, repeated ones once."""
        return sum(child.nodes for child in self.children.values()) or 1


def graph(layers: list[dict[str, Any]], flow: list[dict[str, Any]], anchor: Callable[[str], str | None]) -> Markup:
    """Return the graph of layers in order of execution.

    Args:
        layers: As in the results.
        flow: As in the results: the calls, and which feeds which.
        anchor: Name of a layer → the id of its row in the table.
    """
    root = _tree(layers, flow)
    _close_innocent(root)
    _fold(root)
    _merge_innocent(root)
    _shrink(root)
    _arrange(root)
    drawn = [tag("g", _drawn(root, anchor, inner=True))]
    size = {"width": root.width, "height": root.height}
    box = f"0 0 {coordinate(root.width)} {coordinate(root.height)}"
    return tag("svg", drawn, class_="graph", viewBox=box, **size, role="group", aria_label="Graph of the layers")


# --- the tree and its links ---------------------------------------------------------------------------------------


def _tree(layers: list[dict[str, Any]], flow: list[dict[str, Any]]) -> Box:
    root, by_name = Box(""), {layer["name"]: layer for layer in layers}
    paths = {name: () if name == ROOT else tuple(name.split(".", _MOST_PARTS)) for name in by_name}
    inside = {path[:n] for path in paths.values() for n in range(len(path))}
    places = []
    for call in flow:
        path, number, more = paths[call["layer"]], call["call"], call["more"]
        again = f"calls {number:,} to {number + more:,}" if more else f"call {number:,}" if number > 1 else ""
        places.append((*path[:-1], f"{path[-1]} ({again})") if again and path else path)
        box = _add(root, places[-1])
        box.layer, box.again = by_name[call["layer"]], again
    for name, layer in by_name.items():
        if layer["calls"] or layer["parameters"] or layer["status"] or paths[name] in inside:
            _add(root, paths[name]).layer = layer
    for call, to in zip(flow, places, strict=True):
        for source in call["from"]:
            _join(root, places[source], to, guessed=False)
        if call["after"] is not None:
            _join(root, places[call["after"]], to, guessed=True)
    return root


def _add(root: Box, path: tuple[str, ...]) -> Box:
    for part in path:
        root = root.children.setdefault(part, Box(part, (*root.path, part)))
    return root


def _join(root: Box, start: tuple[str, ...], end: tuple[str, ...], *, guessed: bool) -> None:
    """Link what stands for two calls in the innermost box around both."""
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(start, end, strict=False)))
    if common < min(len(start), len(end)):
        around = _add(root, start[:common])
        (around.guesses if guessed else around.links).add((start[common], end[common]))


# --- folding ------------------------------------------------------------------------------------------------------


def _close_innocent(root: Box) -> None:
    """Draw what has no cause in it as one node each, if a large model has causes."""
    if root.nodes > _OPEN_NODES and _has_cause(root):
        for box in list(_within(root)):
            if box.children and not _has_cause(box):
                _close(box)


def _within(box: Box) -> Iterator[Box]:
    for child in box.children.values():
        yield child
        yield from _within(child)


def _has_cause(box: Box) -> bool:
    return any(is_cause(word) for layer in box.layers() for word in layer["status"])


def _fold(box: Box) -> None:
    """Make repeated children one, and a module whose only child is a module one with it, from the inside out."""
    for name, child in list(box.children.items()):
        _fold(child)
        only = next(iter(child.children.values()), None)
        if only is not None and len(child.children) == 1 and not child.status and child.times == 1:
            only.label = f"{child.label}.{only.label}"
            box.children[name] = only
    owner: dict[str, str] = {}
    kept: dict[str, Box] = {}
    for _, group in itertools.groupby(
        box.children.items(), lambda item: (re.sub(r"\d+", "#", item[1].label), _structure(item[1]))
    ):
        same = list(group)
        first, representative = same[0]
        least = 2 if representative.children or representative.hidden else 3
        if len(same) >= least and representative.times == 1:
            representative.times = len(same)
            representative.label += f" … {same[-1][1].again or same[-1][1].label}"
            owner |= {name: first for name, _ in same}
            kept[first] = representative
        else:
            kept |= dict(same)
    box.children = kept
    _relink(box, owner)


def _structure(box: Box) -> object:
    """Return what repeated siblings have in common, beside the pattern of their names."""
    layer = box.layer
    own = () if layer is None else (layer["type"], layer["calls"], layer["parameters"], layer["status"])
    inside = tuple((child.label, _structure(child)) for child in box.children.values())
    return own, box.times, box.hidden, box.statuses, inside


def _merge_innocent(root: Box) -> None:
    """Draw runs of children without a cause as one node each, if a large model has causes; their neighbors stay."""
    if root.nodes > _OPEN_NODES and _has_cause(root):
        for box in [root, *_within(root)]:
            causes = list(map(_has_cause, box.children.values()))
            near = [any(causes[max(0, i - 1) : i + 2]) for i in range(len(causes))]
            _merge_runs(box, len(causes), {name for name, stays in zip(box.children, near, strict=True) if stays})


def _shrink(root: Box) -> None:
    """Draw less until few enough nodes are left: boxes without a status as one node each, then runs, then all boxes."""
    _close_innermost(root, with_status=False)
    for box in [root, *_within(root)]:
        if root.nodes > MOST_NODES:
            alone = {name for name, child in box.children.items() if _words([child])}
            _merge_runs(box, max(2, 2 * len(box.children) // MOST_NODES), alone)
    _close_innermost(root, with_status=True)
    if root.nodes > MOST_NODES:
        _merge_runs(root, math.ceil(2 * len(root.children) / MOST_NODES), set())


def _close_innermost(root: Box, *, with_status: bool) -> None:
    while root.nodes > MOST_NODES:
        boxes = [box for box in _innermost(root) if with_status or not _words([box])]
        if not boxes:
            break
        deepest = max(len(box.path) for box in boxes)
        for box in [box for box in boxes if len(box.path) == deepest]:
            _close(box)


def _innermost(box: Box) -> Iterator[Box]:
    for child in box.children.values():
        if child.children and not any(inner.children for inner in child.children.values()):
            yield child
        else:
            yield from _innermost(child)


def _close(box: Box) -> None:
    box.hidden, box.statuses = _hidden([*box.children.values()]), _words([box])
    box.children, box.links, box.guesses = {}, set(), set()


def _hidden(boxes: Sequence[Box]) -> int:
    """Return how many layers there are, one that is called again counted once."""
    return len({layer["name"] for box in boxes for layer in box.layers()}) + sum(box.hidden for box in boxes)


def _words(boxes: Sequence[Box]) -> set[str]:
    """Return the words of the status of all layers in boxes, drawn or not."""
    words = (word for box in boxes for layer in box.layers() for word in layer["status"])
    return {*words, *(word for box in boxes for word in box.statuses)}


def _merge_runs(box: Box, length: int, alone: set[str]) -> None:
    """Draw runs of up to so many children as one node each: a long chain of layers that do not repeat."""
    children = box.children
    runs: list[list[str]] = []
    for name, child in children.items():
        last = runs[-1][0] if runs else name
        same = _is_called(children[last]) == _is_called(child) and not alone & {last, name}
        if runs and same and len(runs[-1]) < length:
            runs[-1].append(name)
        else:
            runs.append([name])
    for run in runs:
        boxes = [children.pop(name) for name in run]
        label = f"{boxes[0].label} … {boxes[-1].label}"
        alike = Box(label, boxes[0].path, hidden=_hidden(boxes), statuses=_words(boxes))
        children[run[0]] = alike if len(run) > 1 else boxes[0]
    _relink(box, {name: run[0] for run in runs for name in run})


def _relink(box: Box, owner: dict[str, str]) -> None:
    """Let the links of children be those of the children that stand for them now."""
    box.links, box.guesses = (
        {(a, b) for x, y in pairs if (a := owner.get(x, x)) != (b := owner.get(y, y))}
        for pairs in (box.links, box.guesses)
    )


# --- layout -------------------------------------------------------------------------------------------------------


def _arrange(box: Box, inner: bool = False) -> None:
    """Set the size of a box, and the places of what is in it."""
    if not box.children:
        box.width, box.height = 2.0 * math.ceil(len(_title(box)) * _CHARACTER / 2) + 20, _NODE
        return
    children = list(box.children.values())
    for child in children:
        _arrange(child, inner=True)
    box.edges = _edges(box)
    levels = _levels(children, box.edges)
    widths = [sum(c.width for c in level) + _GAP * (len(level) - 1) for level in levels]
    widest = max(*widths, 2.0 * math.ceil(len(_title(box)) * _CHARACTER / 2) if inner else 0.0)
    y = (_TITLE if inner else 0.0) + _PADDING
    for level, width in zip(levels, widths, strict=True):
        x = _PADDING + (widest - width) / 2
        tallest = max(c.height for c in level)
        for child in level:
            child.x, child.y = x, y + (tallest - child.height) / 2
            x += child.width + _GAP
        y += tallest + _ABOVE
    lanes = sum(1 for a, b, _ in box.edges if _passes(a, b, children))
    box.width = widest + 2 * _PADDING + lanes * _LANE
    box.height = y - _ABOVE + _PADDING


def _edges(box: Box) -> list[tuple[Box, Box, bool]]:
    """Return the edges between children: the recorded ones, and guesses where code made the input of a child.

    A guess starts at the children that had run by then and whose output no other child takes. Children that take the
    same tensor start at the same. A child that a recorded edge reaches has no guess.
    """
    order = {name: i for i, name in enumerate(box.children)}
    kinds = (box.links, box.guesses)
    links, guesses = (sorted((order[a], order[b]) for a, b in kind if a in order and b in order) for kind in kinds)
    children = list(box.children.values())
    edges = [(i, j, True) for i, j in links if i < j]
    fed, used = {j for _, j, _ in edges}, {i for i, _, _ in edges}
    starts: dict[int, list[int]] = {}
    for j, last in sorted({j: i for i, j in guesses if i < j and j not in fed}.items()):
        if last not in starts:
            starts[last] = [i for i in range(last + 1) if i not in used and _is_called(children[i])] or [last]
        edges += [(i, j, False) for i in starts[last]]
        used.update(starts[last])
    return [(children[i], children[j], known) for i, j, known in edges]


def _is_called(box: Box) -> bool:
    return any(layer["calls"] for layer in box.layers()) or bool(box.hidden)


def _levels(children: list[Box], edges: list[tuple[Box, Box, bool]]) -> list[list[Box]]:
    """Return children by the longest path to them. Those that nothing feeds stand just above what they feed."""
    level = {id(child): 0 for child in children}
    for child in children:  # in order of execution, which edges follow
        level[id(child)] = max((level[id(a)] + 1 for a, b, _ in edges if b is child), default=0)
    for child in reversed(children):
        fed = [level[id(b)] for a, b, _ in edges if a is child]
        if fed and not any(b is child for _, b, _ in edges):
            level[id(child)] = min(fed) - 1
    below = max(level.values())
    for child in children:
        if not _is_called(child):
            level[id(child)] = below + 1
    return [same for n in range(below + 2) if (same := [c for c in children if level[id(c)] == n])]


def _passes(a: Box, b: Box, children: list[Box]) -> bool:
    """Whether another child is between two in height, so that an edge has to go around it."""
    return any(a.y + a.height < c.y + c.height / 2 < b.y for c in children)


# --- drawing ------------------------------------------------------------------------------------------------------


def _drawn(box: Box, anchor: Callable[[str], str | None], *, inner: bool = False) -> Iterator[Markup]:
    """Yield what is in a box: lines first, so that nodes are above them."""
    children = list(box.children.values())
    lane = box.width - _PADDING / 2
    lines = {True: "", False: ""}
    for a, b, known in box.edges:
        if _passes(a, b, children):
            lines[known] += _around(a, b, lane)
            lane -= _LANE
        else:
            lines[known] += _line(a, b)
    if lines[True]:
        yield tag("path", class_="edge", d=lines[True])
    if lines[False]:
        yield tag("g", tag("title", GUESS), tag("path", class_="edge likely", d=lines[False]))
    for child in children:
        yield _node(child, anchor)


def _line(a: Box, b: Box) -> str:
    x, y, to_x, to_y = a.x + a.width / 2, a.y + a.height, b.x + b.width / 2, b.y
    if abs(x - to_x) < 0.5:
        return _path_text("M", x, y, "V", to_y)
    middle = (y + to_y) / 2
    return _path_text("M", x, y, "C", x, middle, to_x, middle, to_x, to_y)


def _around(a: Box, b: Box, lane: float) -> str:
    x, y, to_x, to_y = a.x + a.width / 2, a.y + a.height, b.x + b.width / 2, b.y
    out, back = y + _ABOVE, to_y - _ABOVE
    curve = _path_text("M", x, y, "C", x, out, lane, y, lane, out, "V", back)
    return curve + _path_text("C", lane, to_y, to_x, back, to_x, to_y)


def _path_text(*parts: str | float) -> str:
    text = " ".join(part if isinstance(part, str) else coordinate(part) for part in parts)
    return re.sub(r" ?([A-Z]) ?", r"\1", text)


def _node(box: Box, anchor: Callable[[str], str | None]) -> Markup:
    statuses = list(map(status_of, box.status))
    css = [*(["box"] if box.children else []), *(one.css for one in statuses[:1])]
    # The color is of the worst; the sign of a layer that the failure names has to be there too.
    shown = [*statuses[:1], *(one for one in statuses[1:] if one.word == "named")]
    sign = [tag("tspan", f" {one.sign}", class_=one.css) for one in shown]
    size = {"width": box.width, "height": box.height}
    rect = tag("rect", **size, class_=" ".join(css) or None)
    kind = [tag("tspan", f" {_type(box)}")] if _type(box) else []
    times = [tag("tspan", f" ×{box.times}", class_="times")] if box.times > 1 else []
    text = tag("text", _shortened(box.label), times, kind, _inside(box), sign, x=10, y=16)
    row = anchor(box.layer["name"]) if box.layer else None
    head: list[Child] = [tag("title", _described(box)), rect, text]
    content = tag("a", head, href=f"#{row}") if row else head
    place = f"translate({coordinate(box.x)} {coordinate(box.y)})"
    return tag("g", content, _drawn(box, anchor), transform=place)


def _inside(box: Box) -> str:
    return f" +{box.hidden}" if box.hidden and not box.children else ""


def _shortened(label: str) -> str:
    label = printable(label)  # as it is shown: the width of a node follows
    half = _MOST_CHARACTERS // 2
    return label if len(label) <= _MOST_CHARACTERS else f"{label[:half]}…{label[1 - half :]}"


def _type(box: Box) -> str:
    return _shortened(box.layer["type"]) if box.layer else ""


def _title(box: Box) -> str:
    """Return the text of a node or of the head of a box, as long as it is drawn."""
    times = f" ×{box.times}" if box.times > 1 else ""
    return f"{_shortened(box.label)}{times} {_type(box)}{_inside(box)}".rstrip() + "  " * min(2, len(box.status))


def _described(box: Box) -> str:
    """Return the text that is shown when the mouse is over a node."""
    layer = box.layer
    name = ".".join(box.path) if layer is None else layer["name"]
    facts = [name if box.times == 1 else f"{name}, and {box.times - 1} more like it"]
    facts += [box.again] if box.again else []
    if layer is not None:
        facts.append(layer["type"])
        # The shape in the results is that of the first call.
        facts += [shape(output["shape"]) for output in layer["outputs"][:1]] if not box.again else []
        facts += [count(layer["parameters"], "parameter")] if layer["parameters"] else []
        facts += [f"{layer['calls']} calls"] if layer["calls"] > 1 else []
    facts += [f"{count(box.hidden, 'layer')} in it"] if box.hidden else []
    return ": ".join(filter(None, [", ".join(facts), ", ".join(box.status)]))
