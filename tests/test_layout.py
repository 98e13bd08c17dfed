"""Each room of the package imports what the table in CONTRIBUTING lists, from lower floors, and never in a circle."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import runpy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from pytest_modelprobe import extension

PACKAGE = Path(importlib.util.find_spec("pytest_modelprobe").origin).parent

# Of a checkout; the tests of an installed wheel run there too.
CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"


ROWS = re.findall(r"^\| (\d+) \| `(\w+)` \|([^|]*)\|", CONTRIBUTING.read_text("utf-8"), re.MULTILINE)

EXTRAS = PACKAGE / "extras"

MAY_IMPORT = {room: {*filter(None, allowed.strip().split(", ")), "exceptions"} for _, room, allowed in ROWS}
if not EXTRAS.exists():
    del MAY_IMPORT["extras"]
"""What each room of the table in CONTRIBUTING may import."""

FLOORS = {room: int(floor) for floor, room, _ in ROWS if room in MAY_IMPORT}

# Modules with the words of a folder, which others import directly.
DIRECTLY = {"rows", "text"}

# Loaded in every run of pytest: these import nothing of theirs before a test needs it.
LAZY = {"__init__", "plugin"}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """Return the modules and packages that a file imports, outside `if TYPE_CHECKING` too."""
    tree = parsed(path)
    nodes = [n for n in tree.body if not isinstance(n, ast.If)] if top_level else list(ast.walk(tree))
    # A module or a name: `from pytest_modelprobe import report` imports a module too.
    return {f"{base}.{name}" if name and base == PACKAGE.name else base for base, name in imported(path, nodes)}


def imported(path: Path, nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each module that statements of a file import from, and the name that they import, if it has one."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = [PACKAGE.name, *path.relative_to(PACKAGE).parent.parts]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            yield from ((base, alias.name) for alias in node.names)


def foreign(names: set[str], module: str) -> set[str]:
    """Reduce dotted names to modules and third-party packages."""
    kept = set()
    for name in names:
        first, _, rest = name.partition(".")
        if first == "pytest_modelprobe":
            kept.add(rest.split(".")[0])
        elif first in {"torch", "numpy", "pytest", "syrupy"}:
            kept.add(first)
    return kept - {module, "extras"}  # who imports those has a test of its own


FILES = sorted(PACKAGE.rglob("*.py"))
CORE = [path for path in FILES if not path.is_relative_to(EXTRAS)]


BY_NAME = {
    ".".join([PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in FILES
}


def at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements inside a node, less what `if TYPE_CHECKING` has."""
    for child in ast.iter_child_nodes(node):
        annotations = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not annotations and not isinstance(child, ast.expr):
            yield child
            yield from at_run_time(child)


def modules_imported(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, inside functions too."""
    named = imported(path, at_run_time(parsed(path)))
    found = {f"{base}.{name}" if f"{base}.{name}" in BY_NAME else base for base, name in named}
    return {name for name in found if name in BY_NAME and BY_NAME[name] != path}


def wrong(files: Iterable[Path], names_of: Callable[[Path], set[str]]) -> dict[str, set[str]]:
    """Return the names that a file has and should not have, by file."""
    return {path.relative_to(PACKAGE).as_posix(): names for path in files if (names := names_of(path))}


@pytest.fixture(scope="module")
def used() -> dict[str, set[str]]:
    """Return what each room imports."""
    rooms: dict[str, set[str]] = {module_of(path): set() for path in FILES}
    for path in FILES:
        rooms[module_of(path)] |= foreign(imports(path), module_of(path))
    return rooms


@pytest.fixture(scope="module", autouse=True)
def _forget_the_trees() -> Iterator[None]:
    """Forget the syntax trees after these tests: the garbage collector would read them in all others."""
    yield
    parsed.cache_clear()


def test_every_module_is_in_the_table() -> None:
    assert {module_of(path) for path in FILES} == set(MAY_IMPORT)


def test_a_module_imports_only_what_the_table_lists() -> None:
    def more(path: Path) -> set[str]:
        allowed = MAY_IMPORT[module_of(path)]
        return foreign(imports(path), module_of(path)) - allowed - ({"_torch"} if "torch" in allowed else set())

    assert wrong(FILES, more) == {}


def test_the_table_lists_only_what_is_imported(used: dict[str, set[str]]) -> None:
    unused = {
        name: MAY_IMPORT[name] - its - {"exceptions"} - ({"torch"} if "_torch" in its else set())
        for name, its in used.items()
    }
    assert {name: modules for name, modules in unused.items() if modules} == {}


def test_a_room_imports_from_lower_floors_alone() -> None:
    def not_lower(path: Path) -> set[str]:
        room = module_of(path)
        return {name for name in foreign(imports(path), room) & FLOORS.keys() if FLOORS[name] >= FLOORS[room]}

    assert wrong(FILES, not_lower) == {}


def test_a_room_stands_right_above_the_highest_that_it_imports(used: dict[str, set[str]]) -> None:
    below = {room: [FLOORS[name] for name in names if name in FLOORS and name != room] for room, names in used.items()}
    assert {room: 1 + max(floors, default=0) for room, floors in below.items()} == FLOORS


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count; those for annotations alone do not."""
    left = {name: modules_imported(path) for name, path in BY_NAME.items()}
    assert sum(map(len, left.values())) > len(left)
    # Again and again, take away what imports nothing that is left: what remains is in a circle, or above one.
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert sorted(left) == []


def test_the_picture_of_the_house_is_of_these_imports() -> None:
    """After a change of the layout, `python docs/make_house_map.py` draws it again."""
    pytest.importorskip("pytest_modelprobe.extras", reason="the picture has them")
    script = runpy.run_path(str(CONTRIBUTING.parent / "docs" / "make_house_map.py"))
    assert script["drawn"](script["read"](PACKAGE.parent)) == script["PICTURE"].read_text("utf-8")


def test_what_every_run_loads_imports_nothing_at_its_top() -> None:
    loaded = [path for path in FILES if module_of(path) in LAZY]
    assert loaded
    loaded += [*EXTRAS.rglob("__init__.py"), *EXTRAS.glob("*/plugin.py")]
    free = {"pytest", "extension", "plugin"}
    assert wrong(loaded, lambda path: foreign(imports(path, top_level=True), module_of(path)) - free) == {}


def test_other_folders_are_imported_through_their_init() -> None:
    def deeper(path: Path) -> set[str]:
        inside = {name for name in imports(path) if name.startswith(f"{PACKAGE.name}.") and name.count(".") > 1}
        inside = {name for name in inside if name.rpartition(".")[2] not in DIRECTLY}
        found = {name.split(".")[1] for name in inside}
        return found - {module_of(path), "assertions", "checks", "extras", "report", "snapshot"}

    assert wrong(FILES, deeper) == {}


def test_only_extras_import_the_plugin() -> None:
    assert wrong(CORE, lambda path: foreign(imports(path), module_of(path)) & {"plugin"}) == {}


def test_nothing_imports_an_extra_but_the_extra_itself() -> None:
    """`extension` finds them; a door of the core names them for annotations alone."""

    def other(path: Path) -> set[str]:
        named = {f"{base}.{name}" for base, name in imported(path, at_run_time(parsed(path)))}
        its = {".".join(name.split(".")[:3]) for name in named if name.startswith(f"{PACKAGE.name}.extras")}
        folder = path.relative_to(PACKAGE).parts[1:2]
        allowed = {*folder, *(needed for name in folder if name in table for needed in table[name].needs)}
        return its - {f"{PACKAGE.name}.extras.{name}" for name in allowed}

    table = extension._extras()
    assert wrong(FILES, other) == {}


def test_the_files_that_contributing_names_exist() -> None:
    named = re.findall(r"`(\w+/[\w./]+\.\w+)`", CONTRIBUTING.read_text("utf-8"))
    named = [name for name in named if EXTRAS.exists() or "extras/" not in name]
    assert named
    roots = (CONTRIBUTING.parent, CONTRIBUTING.parent / "pytest_modelprobe")  # the installed package has no C
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


# --- private names ----------------------------------------------------------------------------------------------------

# Attributes of modules and tensors that may be used anywhere: `_torch` says why.
ANYWHERE = {"_buffers", "_forward_hooks", "_forward_pre_hooks", "_modules", "_parameters", "_version"}
OBJECTS = [torch.nn.Module(), torch.ones(1), torch.ones(1).untyped_storage(), torch.ops.aten.add.Tensor]
OF_TORCH = {name for thing in OBJECTS for name in dir(thing) if name.startswith("_") and not name.startswith("__")}
OF_TORCH |= {"_orig_mod", "_checkpoint_wrapped_module"}


def private_names(path: Path) -> set[str]:
    """Return the private names of torch in a file: imported, as an attribute, or in a string."""
    found, own = set(), set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [f"{getattr(node, 'module', '')}.{alias.name}".removeprefix(".") for alias in node.names]
            found |= {name for name in names if name.startswith("torch.") and "._" in name}
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if ast.unparse(node.value) in ("self", "cls"):
                own.add(node.attr)
            elif node.attr in OF_TORCH or ast.unparse(node).startswith(("torch.", "nn.", "F.")):
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & OF_TORCH or set(re.findall(r"^(?:torch\.[\w.]*\b_\w+|aten::_\w+)$", node.value))
    return found - own - ANYWHERE


def test_private_names_of_torch_stand_in_one_module() -> None:
    found = wrong(FILES, private_names)
    assert found.pop("_torch.py")
    assert found == {}


OF_PYTEST = {"_fixtureinfo", "_fixturemanager", "_pyfuncitem", "_arg2fixturedefs", "name2fixturedefs"}
OF_SYRUPY = {"_write_mode", "_executions", "executions", "num_executions", "asserted_data", "recalled_data"}


def test_private_names_of_pytest_and_syrupy_stand_in_one_module_each() -> None:
    def names(path: Path) -> set[str]:
        nodes = list(ast.walk(parsed(path)))
        found = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        return found | {node.attr for node in nodes if isinstance(node, ast.Attribute)}

    assert wrong(FILES, lambda path: names(path) & OF_PYTEST).keys() == {"_pytest.py"}
    assert wrong(FILES, lambda path: names(path) & OF_SYRUPY).keys() == {"snapshot/extension.py"}
    assert wrong(FILES, lambda path: {name for name in imports(path) if name.partition(".")[0] == "_pytest"}) == {}
