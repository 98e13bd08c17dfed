"""The rooms of the house import what they may, and nothing else."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

PACKAGE = Path(importlib.util.find_spec("pytest_modelprobe").origin).parent

# What each room may import besides the standard library: other rooms, and these packages.
MAY_IMPORT = {
    "__init__": {"assertions", "exceptions", "probe", "record", "snapshot"},
    "__main__": {"cli"},
    "exceptions": set(),
    "record": set(),
    "selection": {"exceptions"},
    "shapes": {"exceptions"},
    "fingerprint": {"torch", "numpy", "record"},
    "statistics": {"torch", "numpy", "fingerprint", "record"},
    "units": {"torch"},
    "flatten": {"torch", "record"},
    "memory": {"torch"},
    "seeding": {"torch", "numpy"},
    "initialisation": {"torch", "exceptions", "memory", "seeding"},
    "restoring": {"torch", "memory"},
    "layers": {"torch", "record", "exceptions"},
    "observation": {"torch", "attention", "record", "statistics"},
    "owned": {"torch", "layers", "observation", "record", "statistics"},
    "functionals": {"torch", "capture"},
    "attention": {"torch", "functionals", "statistics"},
    "capture": {
        "torch", "attention", "exceptions", "flatten", "functionals", "layers", "observation", "owned", "record",
        "statistics", "units",
    },
    "assembly": {"torch", "numpy", "attention", "capture", "layers", "observation", "owned", "record", "statistics"},
    "origin": {"torch", "flatten", "record"},
    "architecture": {"torch", "assembly", "capture", "flatten", "layers", "record", "restoring", "seeding"},
    "noise": {"torch", "numpy", "memory", "record", "seeding"},
    "isolation": {
        "torch", "numpy", "flatten", "layers", "memory", "noise", "record", "restoring", "seeding", "statistics",
    },
    "probe": {
        "torch", "architecture", "assembly", "capture", "exceptions", "flatten", "initialisation", "isolation",
        "layers", "noise", "observation", "origin", "owned", "record", "restoring", "seeding", "selection",
    },
    "files": {"exceptions", "record"},
    "course": {"record"},
    "matching": {"exceptions", "record"},
    "tolerance": {"record"},
    "compare": {"exceptions", "matching", "record", "selection", "tolerance"},
    "diagnosis": {"compare", "course", "record", "tolerance"},
    "gate": {"compare", "record"},
    "report": {"compare", "diagnosis", "gate", "record"},
    "assertions": {"compare", "course", "diagnosis", "exceptions", "record", "report", "selection", "shapes"},
    "checks": {
        "pytest", "torch", "capture", "exceptions", "flatten", "layers", "memory", "origin", "probe", "record",
        "report", "restoring", "seeding", "selection",
    },
    "summary": {"assertions", "record", "report"},
    "git": {"exceptions"},
    "actions": {"git"},
    "sources": {"exceptions", "files", "gate", "git", "selection"},
    "cli": {"actions", "compare", "exceptions", "files", "gate", "git", "record", "report", "selection", "sources"},
    "snapshot": {
        "pytest", "syrupy", "assertions", "compare", "diagnosis", "exceptions", "files", "gate", "record", "report",
        "selection", "summary",
    },
    "plugin": {"pytest", "exceptions", "probe", "report", "seeding", "snapshot", "summary", "torch"},
}  # fmt: skip

# Loaded in every run of pytest: these import nothing of theirs before a test needs it.
LAZY = {"__init__", "plugin"}


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """Return the rooms and packages that a file imports, outside `if TYPE_CHECKING` too."""
    tree = ast.parse(path.read_text("utf-8"))
    nodes = [n for n in tree.body if not isinstance(n, ast.If)] if top_level else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = "pytest_modelprobe." if node.level else ""
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            if node.module == "pytest_modelprobe" and not node.level:
                modules = [f"pytest_modelprobe.{alias.name}" for alias in node.names]
            found |= {f"{inside}{module}" for module in modules}
    return found


def foreign(names: set[str], room: str) -> set[str]:
    """Reduce dotted names to rooms and third-party packages."""
    kept = set()
    for name in names:
        first, _, rest = name.partition(".")
        if first == "pytest_modelprobe":
            kept.add(rest.split(".")[0])
        elif first in {"torch", "numpy", "pytest", "syrupy"}:
            kept.add(first)
    return kept - {room}


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_room_is_in_the_table() -> None:
    assert {room_of(path) for path in FILES} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    room = room_of(path)
    inside = {p.stem for p in path.parent.glob("*.py")} if path.parent != PACKAGE else set()
    assert foreign(imports(path), room) - inside <= MAY_IMPORT[room]


@pytest.mark.parametrize("room", sorted(LAZY))
def test_what_every_run_loads_imports_nothing_at_its_top(room: str) -> None:
    assert foreign(imports(PACKAGE / f"{room}.py", top_level=True), room) <= {"pytest"}


def test_nothing_imports_the_plugin() -> None:
    assert not any("plugin" in foreign(imports(path), room_of(path)) for path in FILES)
