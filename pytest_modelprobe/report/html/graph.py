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

from pytest_modelprobe.record import ROOT, Layer, elements
from pytest_modelprobe.report.results import Run
from pytest_modelprobe.text import count, printable, shape

from .elements import STATUSES, Child, Markup, coordinate, outputs_of, tag

MOST_NODES = 150
"""If there are more nodes, the deepest boxes are drawn as one node each, those without a status first."""

_MOST_DRAWN = 1000
"""If there are more nodes when all boxes are drawn as one, there is no graph."""

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
    layer: Layer | None = None
    words: Sequence[str] = ()
    """The words of the status of the layer."""
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
            return [word for word in STATUSES if word in self.statuses][:1]
        return list(self.words)

    def boxes(self) -> Iterator[Box]:
        """Yield the box and those in it."""
        yield self
        for child in self.children.values():
            yield from child.boxes()

    @property
    def nodes(self) -> int:
        """How many are drawn, repeated ones once."""
        return sum(child.nodes for child in self.children.values()) or 1


def graph(run: Run, anchor: Callable[[str], str | None]) -> Markup:
    """Return the graph of the layers of a run.

    Args:
        run: The run.
        anchor: Name of a layer → the id of its row in the table.
    """
    root = _tree(run)
    _fold(root)
    for with_status in (False, True):
        _close_innermost(root, with_status=with_status)
    if root.nodes > _MOST_DRAWN:
        return tag("p", f"{count(root.nodes, 'layer')} side by side are too many to be drawn.")
    _arrange(root)
    drawn = [tag("g", _drawn(root, anchor, inner=True))]
    size = {"width": root.width, "height": root.height}
    box = f"0 0 {coordinate(root.width)} {coordinate(root.height)}"
    return tag("svg", drawn, class_="graph", viewBox=box, **size, role="group", aria_label="Graph of the layers")


# --- the tree and its links ---------------------------------------------------------------------------------------


def _tree(run: Run) -> Box:
    root, layers = Box(""), run.record.layers
    paths = {name: () if name == ROOT else tuple(name.split(".", _MOST_PARTS)) for name in layers}
    inside = {path[:n] for path in paths.values() for n in range(len(path))}
    places = []
    for call in run.flow:
        path, number, more = paths[call.layer], call.call, call.more
        again = f"calls {number:,} to {number + more:,}" if more else f"call {number:,}" if number > 1 else ""
        places.append((*path[:-1], f"{path[-1]} ({again})") if again and path else path)
        box = _add(root, places[-1])
        box.layer, box.words, box.again = layers[call.layer], run.status.get(call.layer, ()), again
    for name, layer in layers.items():
        if layer.calls or layer.parameters or name in run.status or paths[name] in inside:
            box = _add(root, paths[name])
            box.layer, box.words = layer, run.status.get(name, ())
    for call, to in zip(run.flow, places, strict=True):
        for source in call.sources:
            _join(root, places[source], to, guessed=False)
        if call.after is not None:
            _join(root, places[call.after], to, guessed=True)
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
        least = 2 if representative.children else 3
        if len(same) >= least and representative.times == 1:
            representative.times = len(same)
            representative.label += f" … {same[-1][1].again or same[-1][1].label}"
            owner |= {name: first for name, _ in same}
            kept[first] = representative
        else:
            kept |= dict(same)
    box.children = kept
    box.links, box.guesses = (
        {(a, b) for x, y in pairs if (a := owner.get(x, x)) != (b := owner.get(y, y))}
        for pairs in (box.links, box.guesses)
    )


def _structure(box: Box) -> object:
    """Return what repeated siblings have in common, beside the pattern of their names."""
    layer = box.layer
    own = () if layer is None else (layer.type, len(layer.calls), elements(layer.parameters), tuple(box.words))
    inside = tuple((child.label, _structure(child)) for child in box.children.values())
    return own, box.times, inside


def _close_innermost(root: Box, *, with_status: bool) -> None:
    """Draw the deepest boxes as one node each, until few enough nodes are left."""
    while root.nodes > MOST_NODES:
        holding = [box for box in root.boxes() if box is not root and box.children]
        boxes = [box for box in holding if with_status or not _words(box)]
        deepest = max((len(box.path) for box in boxes), default=0)
        for box in [box for box in boxes if len(box.path) == deepest]:
            layers = {one.layer.name for one in box.boxes() if one is not box and one.layer is not None}
            box.hidden, box.statuses = len(layers) + sum(one.hidden for one in box.boxes()), _words(box)
            box.children, box.links, box.guesses = {}, set(), set()
        if not boxes:
            return


def _words(box: Box) -> set[str]:
    """Return the words of the status of all layers in a box, drawn or not."""
    return {word for one in box.boxes() for word in (*one.words, *one.statuses)}


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
    return any(one.hidden or (one.layer and one.layer.calls) for one in box.boxes())


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
    statuses = [STATUSES[word] for word in box.status]
    css = [*(["box"] if box.children else []), *(one.css for one in statuses[:1])]
    # The color is of the worst; the sign of a layer that the failure names has to be there too.
    shown = [*statuses[:1], *(one for one in statuses[1:] if one.word == "named")]
    sign = [tag("tspan", f" {one.sign}", class_=one.css) for one in shown]
    size = {"width": box.width, "height": box.height}
    rect = tag("rect", **size, class_=" ".join(css) or None)
    kind = [tag("tspan", f" {_type(box)}")] if _type(box) else []
    times = [tag("tspan", f" ×{box.times}", class_="times")] if box.times > 1 else []
    text = tag("text", _shortened(box.label), times, kind, _inside(box), sign, x=10, y=16)
    row = anchor(box.layer.name) if box.layer else None
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
    return _shortened(box.layer.type_name) if box.layer else ""


def _title(box: Box) -> str:
    """Return the text of a node or of the head of a box, as long as it is drawn."""
    times = f" ×{box.times}" if box.times > 1 else ""
    return f"{_shortened(box.label)}{times} {_type(box)}{_inside(box)}".rstrip() + "  " * min(2, len(box.status))


def _described(box: Box) -> str:
    """Return the text that is shown when the mouse is over a node."""
    layer = box.layer
    name = ".".join(box.path) if layer is None else layer.name
    facts = [name if box.times == 1 else f"{name}, and {box.times - 1} more like it"]
    facts += [box.again] if box.again else []
    if layer is not None:
        facts.append(layer.type_name)
        # The shape in the results is that of the first call.
        facts += [shape(output.shape) for output in outputs_of(layer)[:1]] if not box.again else []
        facts += [count(n, "parameter")] if (n := elements(layer.parameters)) else []
        facts += [f"{len(layer.calls)} calls"] if len(layer.calls) > 1 else []
    facts += [f"{count(box.hidden, 'layer')} in it"] if box.hidden else []
    return ": ".join(filter(None, [", ".join(facts), ", ".join(box.status)]))
