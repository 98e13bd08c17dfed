"""Which files of a repository a test depends on: what it imports, as far as imports are written, and what it opened.

A test need not run on the other side if none of these differs there.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import re
import sys
import sysconfig
import types
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from pytest_modelprobe import extension
from pytest_modelprobe.gate import Repository

from .pairs import folder_of

_FILES = "files.json"

_NO_CODE = (".pyc", ".md", ".rst", ".ipynb")
"""Endings of files that no test reads, unless it was seen to open them."""

_MAY_NAME_CLASSES = (".yaml", ".yml", ".json", ".pkl", ".pt", ".pth", ".ckpt")
"""Endings of files from which a library may import classes by name."""

_STDLIB = sysconfig.get_path("stdlib") + os.sep

_BY_NAME = {
    "import_module", "__import__", "iter_modules", "walk_packages", "entry_points", "run_path", "run_module",
    "__subclasses__", "__init_subclass__", "spec_from_file_location", "SourceFileLoader",
}  # fmt: skip
"""What imports, or finds, what no import names."""


class TestFiles:
    """A plugin that writes which files of a repository each test depends on. It looks on, and changes nothing.

    Args:
        folder: The folder to write into.
        root: The root of the repository.
        differing: What the `Extra.selection` says of files that differ.
        made: Its plugin that notes what tests make.
    """

    __test__ = False

    def __init__(self, folder: Path, root: Path, differing: Mapping[str, Sequence[str]], made: Any) -> None:
        self._folder, self._root, self._made = folder, root, made
        self._differing = {root / name: names for name, names in differing.items() if (root / name).is_file()}
        self._missing = {root / name: names[0] for name, names in differing.items() if not (root / name).exists()}
        """Files that the other side alone has, with the names of their modules."""
        self._tests: dict[str, tuple[Path, set[str], bool]] = {}
        """Test → its file, the files that were opened while it ran, and whether it is a function of Python."""
        self._shared: set[str] = set()
        """The files that were opened while tests were collected, or fixtures of wider scope were set up."""
        self._opened: set[str] | None = self._shared
        self._files: set[Path] = set()
        """The files with tests, also with those that do not run."""
        sys.addaudithook(self._receive)  # Python cannot take it off again

    def _receive(self, event: str, args: tuple[Any, ...]) -> None:
        opened = self._opened  # another thread may end the test
        if opened is not None and event == "open" and isinstance(args[0], str):
            with contextlib.suppress(OSError):  # the working directory may be gone
                opened.add(_source_of(os.path.realpath(args[0])))

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Note where tests are written."""
        self._files.add(item.path.resolve())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note what a test opens."""
        self._opened = set()
        try:
            return (yield)
        finally:
            is_function = isinstance(item, pytest.Function)
            self._tests[item.nodeid], self._opened = (item.path.resolve(), self._opened, is_function), None

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Note what a fixture opens that other tests have too."""
        before = self._opened
        self._opened = before if fixturedef.scope == "function" else self._shared
        try:
            return (yield)
        finally:
            self._opened = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, Any, Any]:
        """Write the files, when all that tests import is imported."""
        self._opened = None
        result = yield
        modules = {name: Path(file) for name, file in _loaded().items()}
        places = module_places(Repository(self._root).working_files())
        if any(is_elsewhere(self._root, places, module, file) for module, file in modules.items()):
            return result  # the comparison says so
        ours = {file for file in modules.values() if _is_own(file, self._root)}
        written = self._files.union(*map(self._conftests, self._files))
        # What no import in a test leads to was imported by a plugin, or by name.
        unexplained = ours.difference(*map(imported_files, written))
        named = [(file, name, package_of(file)) for name, file in modules.items() if file in ours]
        use = selection.Use(named, self._differing) if (selection := extension.selection()) else None
        shared = {file for file in self._own(self._shared) if file.suffix != ".pyc"} - ours - written
        reads = {test: self._own(opened) for test, (_, opened, _) in self._tests.items()}
        loaded = {file for read in reads.values() for file in read if file.suffix == ".py"}
        for test, (file, _, is_function) in self._tests.items():
            used: list[tuple[Path, str]] = []
            read = reads[test] | shared
            found = {*read, *unexplained}.union(*map(imported_files, (file, *self._conftests(file), *read)))
            found = self._own(found)
            is_by_name = any(one.suffix in _MAY_NAME_CLASSES or imports_by_name(one) for one in found)
            if is_by_name or not is_function:
                found |= ours | loaded | self._missing.keys()
            elif use is not None and found & self._differing.keys() - read:
                whole = {*self._conftests(file), *unexplained, *read}
                used, unused = use.of_test(test, file, found, whole, self._made.of_test(test))
                found -= unused - read
            found |= {gone for gone, name in self._missing.items() if any(_says(one, name) for one in found)}
            written_down = {
                "files": sorted(one.relative_to(self._root).as_posix() for one in found),
                "differing": [(str(one), name) for one, name in used],
            }
            place = folder_of(self._folder, test)
            place.mkdir(parents=True, exist_ok=True)
            (place / _FILES).write_text(json.dumps(written_down), "utf-8")
        return result

    def _own(self, files: Iterable[str | Path]) -> set[Path]:
        return {path for path in map(Path, files) if _is_own(path, self._root)}

    def _conftests(self, file: Path) -> Iterator[Path]:
        above = (folder / "conftest.py" for folder in file.parents)
        yield from (one for one in above if one.is_relative_to(self._root) and one.is_file())


def _loaded() -> dict[str, str]:
    """Return the modules of Python that are imported, with their files."""
    found = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    # Modules of `torch.ops` have names of files without a folder.
    return {name: os.path.realpath(file) for name, file in found.items() if file and Path(file).is_absolute()}


def _source_of(file: str) -> str:
    """Return the file of Python that was compiled into a file, or this file."""
    with contextlib.suppress(ValueError):
        return importlib.util.source_from_cache(file) if file.endswith(".pyc") else file
    return file


@functools.cache
def _says(file: Path, name: str) -> bool:
    """Whether a name is written in a file of Python."""
    text = file.read_bytes() if file.suffix == ".py" and file.is_file() else b""
    return re.search(rb"\b%b\b" % re.escape(name).encode(), text) is not None


def _is_own(file: Path, root: Path) -> bool:
    return file.is_relative_to(root) and not is_installed(str(file))


def is_installed(file: str) -> bool:
    """Whether a file is of an installed package, or comes with Python."""
    return "site-packages" in file or "dist-packages" in file or file.startswith(_STDLIB)


def module_places(names: Iterable[str]) -> frozenset[str]:
    """Return where modules of Python may be, relative to some folder from which they are imported, no package itself.

    >>> sorted(module_places(["lib/net/head.py", "src/run.py", "README.md"]))
    ['lib/net/head.py', 'net/head.py', 'run.py', 'src/run.py']
    >>> sorted(module_places(["norse/__init__.py", "norse/torch/utils.py"]))
    ['norse/__init__.py', 'norse/torch/utils.py']
    """
    files = {name for name in names if name.endswith(".py")}
    paths = [PurePosixPath(name.removeprefix(top)).parts for name in files for top in ("", "src/")]
    return frozenset(
        "/".join(parts[n:])
        for parts in paths
        for n in range(max(1, len(parts) - 1))
        if not n or "/".join((*parts[:n], "__init__.py")) not in files
    )


def is_elsewhere(root: Path, places: Collection[str], module: str, file: Path) -> bool:
    """Whether a module was imported from elsewhere, although a tree has one of its own.

    Args:
        root: The root of the tree.
        places: The `module_places` of its files.
        module: The name of the module.
        file: Its file.
    """
    place = module.replace(".", "/")
    return not _is_own(file, root) and any(place + end in places for end in (".py", "/__init__.py"))


def files_of(folder: Path, test: str) -> list[str] | None:
    """Return the files of the repository that a test depends on, as `TestFiles` wrote them; `None` if nobody knows."""
    found: list[str] | None = _written(folder, test)["files"]
    return found


def differing_of(folder: Path, test: str) -> list[tuple[Path, str]]:
    """Return the files and names of definitions that a test uses and that differ, as far as `TestFiles` knows them."""
    return [(Path(file), name) for file, name in _written(folder, test)["differing"]]


def _written(folder: Path, test: str) -> dict[str, Any]:
    path = folder_of(folder, test) / _FILES
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {"files": None, "differing": []}
    return found


def is_affected(folder: Path, test: str, changed: Collection[str]) -> bool:
    """Whether a test may depend on one of some files that differ, or it is not known.

    Python files are told apart. On others a test may depend without opening them from Python, but not on documentation
    and what begins with a dot, as the workflows of GitHub.

    Args:
        folder: The folder to which `TestFiles` wrote.
        test: The node id.
        changed: The paths of the files that differ, relative to the root of the repository.
    """
    read = files_of(folder, test)
    if read is None:
        return True
    known = (".py", *_NO_CODE)
    return any(
        name in read
        or not (name.startswith(".") or PurePosixPath(name).suffix in known)
        or PurePosixPath(name).name == "conftest.py"
        for name in changed
    )


@functools.cache
def code_differs(here: str, there: str) -> bool:
    """Whether a file of Python, or one that it imports, differs between two sides, comments and layout aside.

    Of installed ones it is not known.

    Args:
        here: The path of the file on this side.
        there: Its path on the other side, whose process this is.
    """
    if here == there:
        return False
    if is_installed(there):
        return True
    ours, theirs = Path(here), Path(there)
    pairs = zip(ours.parts[::-1], theirs.parts[::-1], strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    roots = [Path(*path.parts[: len(path.parts) - common]) for path in (ours, theirs)]
    files = [
        file.relative_to(roots[1]) for file in imported_files(theirs, executed=False) if file.is_relative_to(roots[1])
    ]
    return any(_says_otherwise(roots[0] / file, roots[1] / file) for file in files)


@functools.cache
def _says_otherwise(here: Path, there: Path) -> bool:
    """Whether two files of Python differ, comments and layout aside, or one of them is missing."""
    ours, theirs = (path.read_bytes() if path.is_file() else None for path in (here, there))
    if ours == theirs or ours is None or theirs is None:
        return ours != theirs
    try:
        return ast.dump(ast.parse(ours)) != ast.dump(ast.parse(theirs))
    except (SyntaxError, ValueError):
        return True


@functools.cache
def imported_files(
    file: Path, *, executed: bool = True, new: frozenset[tuple[Path, Path]] = frozenset()
) -> frozenset[Path]:
    """Return a file of Python and those that it imports, and so on, but for installed packages.

    Args:
        file: The file.
        executed: Whether to follow all that an import executes, as the ``__init__`` of packages; else only to where the
            names that are imported come from.
        new: Files with what they import that is not to be followed.
    """
    found = {file}
    waiting = [file]
    while waiting:
        one = waiting.pop()
        more = {to for to in _imports(one, executed)[0] if (one, to) not in new} - found
        found |= more
        waiting += more
    return frozenset(found)


def imports_by_name(file: Path) -> bool:
    """Whether a file of Python may import what it does not name."""
    return _imports(file, True)[1]


@functools.cache
def _imports(file: Path, executed: bool) -> tuple[tuple[Path, ...], bool]:
    """Return the files that a file imports, and whether it may import others."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))] if file.suffix == ".py" else []
    except (OSError, SyntaxError, ValueError):
        return (), False
    package = package_of(file)
    names = {name for node in nodes for name in _names(node, package, executed)}
    if executed:
        names |= {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)}
    files = (str(getattr(sys.modules.get(name), "__file__", None)) for name in sorted(names))
    found = tuple(Path(one).resolve() for one in files if Path(one).is_absolute() and not is_installed(one))
    said = {getattr(node, field, None) for node in nodes for field in ("id", "attr", "name")}
    return found, not said.isdisjoint(_BY_NAME)


def _names(node: ast.AST, package: str, executed: bool) -> Iterator[str]:
    """Yield the modules that a statement imports, or from which what it imports comes."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        name = node.module or ""
        with contextlib.suppress(ImportError):
            name = importlib.util.resolve_name("." * node.level + name, package) if node.level else name
        for alias in node.names:
            inside = f"{name}.{alias.name}"
            found = vars(sys.modules[name]).get(alias.name) if name in sys.modules else None
            defined = found.__module__ if isinstance(found, type | types.FunctionType) else None
            yield inside if inside in sys.modules else str(defined or name)
        if executed:
            yield name
    elif executed and isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isprintable():
        yield node.value  # it may be the name of a module, or of what is in it


def package_of(file: Path) -> str:
    """Return the package that relative imports in a file start from."""
    return _packages(len(sys.modules)).get(file, "")


@functools.lru_cache(maxsize=1)
def _packages(_: int) -> dict[Path, str]:
    files = {name: file for name, file in _loaded().items() if not is_installed(file)}
    return {Path(file): getattr(sys.modules.get(name), "__package__", None) or "" for name, file in files.items()}
