"""Measures the layout of the package and draws it: docs/house.svg, from the package's own imports.

Run it with ``python docs/make_house_map.py`` after a change of the layout, and commit the picture. With the path of
another checkout it prints the numbers of that one, and draws nothing.

A room is a folder or a file of `pytest_modelprobe/`. An import inside a function counts. One for annotations alone,
under ``if TYPE_CHECKING``, is an arrow between rooms, but closes no circle of modules.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import statistics
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

NAME = "pytest_modelprobe"
HERE = Path(__file__).parent
PICTURE = HERE / "house.svg"

MODELS = "models"
"""The room of live models: what reaches it needs one, and stands on the right."""

SHORT = 40
"""Lines of code below which a module is counted as short."""

Graph = dict[str, set[str]]


# --- what a module imports --------------------------------------------------------------------------------------------


def is_for_annotations(node: ast.AST) -> bool:
    """Whether a statement is ``if TYPE_CHECKING``."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def statements(node: ast.AST, annotations: bool) -> Iterator[ast.AST]:
    """Yield the statements inside a node, with what stands there for annotations alone or without."""
    for child in ast.iter_child_nodes(node):
        # No expression has a statement in it.
        if not isinstance(child, ast.expr) and (annotations or not is_for_annotations(child)):
            yield child
            yield from statements(child, annotations)


def imports(tree: ast.Module, package: str, known: Mapping[str, object], *, annotations: bool) -> Iterator[str]:
    """Yield the modules that a module imports, each once for each import.

    Args:
        tree: The module.
        package: The package that it is in.
        known: All modules of the package: ``from .record import text`` imports a module if there is one of that name.
        annotations: Whether imports for annotations alone count.
    """
    for node in statements(tree, annotations):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            parents = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def room_of(module: str) -> str:
    """Return the room of a module: the folder or file below the package.

    >>> room_of("pytest_modelprobe.record.text"), room_of("pytest_modelprobe.probe"), room_of("pytest_modelprobe")
    ('record', 'probe', '__init__')
    """
    return [*module.split("."), "__init__"][1]


# --- circles and floors -----------------------------------------------------------------------------------------------


def circles(graph: Graph) -> list[set[str]]:
    """Return the sets of nodes that reach each other, the largest first."""
    reached = {node: _reached(graph, node) for node in graph}
    groups = {frozenset(n for n in reached[node] if node in reached[n]) for node in graph}
    return sorted((set(group) for group in groups if group), key=len, reverse=True)


def _reached(graph: Graph, start: str) -> set[str]:
    """Return the nodes that a node reaches, itself only if a circle leads back to it."""
    found: set[str] = set()
    left = list(graph[start])
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += graph[node]
    return found


def floors(graph: Graph) -> dict[str, int]:
    """Return node → floor: one above the highest that it imports. Nodes of a circle stand on one floor."""
    found: dict[str, int] = {}
    together = {node: group for group in circles(graph) for node in group}

    def floor(node: str) -> int:
        if node not in found:
            group = together.get(node, {node})
            below = {other for one in group for other in graph[one]} - group
            level = 1 + max((floor(other) for other in below), default=0)
            found.update(dict.fromkeys(group, level))
        return found[node]

    for node in graph:
        floor(node)
    return found


def not_implied(graph: Graph) -> Graph:
    """Return the arrows that no way over other nodes replaces."""
    return {
        node: {to for to in straight if not any(to in _reached(graph, other) for other in straight - {to, node})}
        for node, straight in graph.items()
    }


# --- lines ------------------------------------------------------------------------------------------------------------


@dataclass
class Lines:
    """The lines of a module by what is in them."""

    code: set[int] = field(default_factory=set)
    comments: set[int] = field(default_factory=set)
    docstrings: set[int] = field(default_factory=set)
    functions: dict[str, int] = field(default_factory=dict)
    """Function → its lines of code, the ``def`` included."""


_NOTHING = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of(text: str, module: str) -> Lines:
    """Sort the lines of a module into code, comments and docstrings."""
    found = Lines()
    tree = ast.parse(text)
    # A string that is a statement: docstrings, and those below an attribute.
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        rows = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            found.comments |= set(rows)
        elif token.type not in _NOTHING:
            found.code |= set(rows) - found.docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            rows = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            found.functions[f"{module}:{node.name}:{node.lineno}"] = len(found.code & set(rows))
    return found


# --- the house --------------------------------------------------------------------------------------------------------


@dataclass
class House:
    """What is known of a package."""

    modules: Graph
    """Module → the modules of the package that it imports."""
    rooms: Graph
    """Room → the rooms that it imports."""
    folders: set[str]
    live: set[str]
    """Rooms that need a live model."""
    texts: dict[str, str]
    """Module → its source."""

    @functools.cached_property
    def lines(self) -> dict[str, Lines]:
        """Module → its lines."""
        return {module: lines_of(text, module) for module, text in self.texts.items()}


def read(root: Path) -> House:
    """Read the package in a checkout."""
    package = root / NAME
    paths: dict[str, Path] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    modules: Graph = {}
    rooms: Graph = {room_of(module): set() for module in paths}
    texts = {module: path.read_text("utf-8") for module, path in paths.items()}
    for module, path in paths.items():
        inside = module if path.name == "__init__.py" else module.rpartition(".")[0]
        tree = ast.parse(texts[module])
        modules[module] = {name for name in imports(tree, inside, paths, annotations=False) if name in paths} - {module}
        every = {name for name in imports(tree, inside, paths, annotations=True) if name in paths} - {NAME}
        rooms[room_of(module)] |= {room_of(name) for name in every} - {room_of(module)}
    live = {room for room in rooms if MODELS in _reached(rooms, room)} | {MODELS, "_torch"}
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    return House(modules, rooms, folders, live, texts)


def figures(house: House) -> Iterator[tuple[str, str]]:
    """Yield the numbers of a house, each with what it is of."""
    ring = circles(house.modules)
    code = {module: len(lines.code) for module, lines in house.lines.items()}
    total = sum(code.values())
    comments = sum(len(lines.comments) for lines in house.lines.values())
    docstrings = sum(len(lines.docstrings) for lines in house.lines.values())
    functions = {name: size for lines in house.lines.values() for name, size in lines.functions.items()}
    longest = max(functions, key=lambda name: functions[name])
    short = [m for m in code if code[m] < SHORT and not any(other.startswith(f"{m}.") for other in code)]
    back = [(a, b) for group in circles(house.rooms) for a in group for b in house.rooms[a] & group]
    yield "rooms", f"{len(house.folders)} folders, {len(house.rooms) - len(house.folders)} modules beside them"
    yield "modules", f"{len(house.modules)}"
    yield "arrows between rooms", f"{sum(map(len, house.rooms.values()))}, of which {len(back)} in circles"
    yield "floors", f"{max(floors(house.rooms).values())}"
    yield "modules in circles", f"{sum(map(len, ring))}, in the largest {max(map(len, ring), default=0)}"
    yield "lines of code", f"{total:,}, without blank lines, comments and docstrings"
    yield "comments", f"{comments / (total + comments + docstrings):.1%} of the lines that are not blank"
    yield "docstrings", f"{docstrings / (total + comments + docstrings):.1%} of them"
    yield "functions", f"{len(functions):,}, median {statistics.median(functions.values()):g} lines of code"
    yield "longest function", f"{functions[longest]} lines: {longest.split(':')[0]}.{longest.split(':')[1]}"
    yield f"modules below {SHORT} lines", f"{len(short)}, each `__init__` left out"


# --- the picture ------------------------------------------------------------------------------------------------------

_WIDTH, _ROW, _BOX, _GAP = 1180, 84, 30, 14
_CHARACTER = 7.4


def drawn(house: House) -> str:
    """Return the house as an SVG: floors from below to above, and the arrows that no longer way replaces."""
    level = floors(house.rooms)
    highest = max(level.values())
    height = highest * _ROW + 50
    place = {}
    for floor in range(1, highest + 1):
        rooms = [room for room in sorted(house.rooms) if level[room] == floor]
        y = height - floor * _ROW + 6
        for side, wing in enumerate(([r for r in rooms if r not in house.live], [r for r in rooms if r in house.live])):
            widths = [len(room) * _CHARACTER + 22 for room in wing]
            x = 50 + _WIDTH * (1 + 2 * side) / 4 - (sum(widths) + _GAP * (len(wing) - 1)) / 2
            for room, width in zip(wing, widths, strict=True):
                place[room] = (x, y, width)
                x += width + _GAP
    parts = list(_ground(highest, height))
    for room, below in sorted(not_implied(house.rooms).items()):
        parts += [_arrow(place[room], place[other], f"{room} → {other}") for other in sorted(below)]
    parts += [_room(room, place[room], room in house.folders) for room in sorted(place)]
    title = f"The rooms of {NAME}, floor by floor"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + 70} {height}" '
        'font-family="ui-monospace, monospace" font-size="12">'
    )
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>", ""])


def _ground(highest: int, height: int) -> Iterator[str]:
    yield f'<rect width="{_WIDTH + 70}" height="{height}" fill="#ffffff"/>'
    for side, text in enumerate(("numbers only", "with a live model")):
        x = 50 + _WIDTH * (1 + 2 * side) / 4
        yield f'<text x="{x:g}" y="24" text-anchor="middle" fill="#57606a" font-size="14">{text}</text>'
    for floor in range(1, highest + 1):
        y = height - floor * _ROW + 6
        yield f'<rect x="34" y="{y - 12}" width="{_WIDTH + 26}" height="{_BOX + 24}" rx="6" fill="#f6f8fa"/>'
        yield f'<text x="24" y="{y + 20}" text-anchor="end" fill="#57606a">{floor}</text>'


def _arrow(above: tuple[float, float, float], below: tuple[float, float, float], title: str) -> str:
    x1, y1 = above[0] + above[2] / 2, above[1] + _BOX
    x2, y2 = below[0] + below[2] / 2, below[1]
    bend = (y2 - y1) / 2
    path = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
    head = f"M{x2 - 4:.0f} {y2 - 7:.0f}L{x2:.0f} {y2:.0f}L{x2 + 4:.0f} {y2 - 7:.0f}"
    return f'<path d="{path}{head}" fill="none" stroke="#8c959f"><title>{escape(title)}</title></path>'


def _room(name: str, place: tuple[float, float, float], is_folder: bool) -> str:
    x, y, width = place
    stroke, shown = ("#0969da", f"{name}/") if is_folder else ("#8c959f", name)
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{_BOX}" rx="4" fill="#ffffff" stroke="{stroke}"/>'
        f'<text x="{x + width / 2:.0f}" y="{y + 20:.0f}" text-anchor="middle" fill="#1f2328">{escape(shown)}</text>'
    )


def table(house: House) -> Iterator[str]:
    """Yield the floors as text, the highest first."""
    level = floors(house.rooms)
    ordered = sorted(house.rooms, key=lambda room: (-level[room], room))
    for floor, rooms in itertools.groupby(ordered, key=lambda room: level[room]):
        yield f"{floor:2}  {'  '.join(_named(rooms, house))}"


def _named(rooms: Iterable[str], house: House) -> Iterator[str]:
    return (f"{room}/" if room in house.folders else room for room in rooms)


def main(arguments: list[str]) -> None:
    """Print the numbers and the floors, and draw the picture of this checkout."""
    house = read(Path(arguments[0]) if arguments else HERE.parent)
    numbers = list(figures(house))
    width = max(len(name) for name, _ in numbers)
    print("\n".join(f"{name:<{width}}  {text}" for name, text in numbers))
    print()
    print("\n".join(table(house)))
    if not arguments:
        PICTURE.write_text(drawn(house), "utf-8")
        print(f"\nwritten: {PICTURE.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main(sys.argv[1:])
