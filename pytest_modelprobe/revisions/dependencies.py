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
import sys
import types
from collections.abc import Collection, Generator, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from pytest_modelprobe._pytest import fixtures_of

from .pairs import folder_of, read_written

_FILES = "files.json"

_NO_CODE = (".pyc", ".md", ".rst", ".ipynb")
"""Endings of files that no test reads, unless it was seen to open them."""


class TestFiles:
    """A plugin that writes which files of a repository each test depends on.

    Args:
        folder: The folder of records to write into.
        root: The root of the repository.
    """

    __test__ = False

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder, self._root = folder, root
        self._tests: dict[str, tuple[set[Path], set[str]]] = {}
        """Test → the files of it and of its fixtures, and the files that were opened while it ran."""
        self._opened: set[str] | None = None
        sys.addaudithook(self._receive)  # Python cannot take it off again

    def _receive(self, event: str, args: tuple[Any, ...]) -> None:
        opened = self._opened  # another thread may end the test
        if opened is not None and event == "open" and isinstance(args[0], str):
            with contextlib.suppress(OSError):  # the working directory may be gone
                opened.add(os.path.realpath(args[0]))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note what a test opens."""
        self._opened = set()
        try:
            return (yield)
        finally:
            names = {one.func.__module__ for one in fixtures_of(item) if hasattr(one, "func")}
            files = (getattr(sys.modules.get(name), "__file__", None) for name in names)
            starts = {item.path.resolve(), *(Path(file).resolve() for file in files if isinstance(file, str))}
            self._tests[item.nodeid], self._opened = (starts, self._opened), None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, Any, Any]:
        """Write the files, when all that tests import is imported."""
        result = yield
        for test, (starts, opened) in self._tests.items():
            records = read_written(self._folder, test).values()
            if not records:  # it is not compared
                continue
            modules = {module: Path(file) for one in records for module, file in one.sources.items()}
            if any(is_elsewhere(self._root, module, file) for module, file in modules.items()):
                continue  # the comparison says so
            sources = {*modules.values()}
            above = (folder / "conftest.py" for file in starts for folder in file.parents)
            starts |= {file for file in above if file.is_relative_to(self._root) and file.is_file()} | sources
            found = {*map(Path, opened)}.union(*map(imported_files, starts))
            names = sorted(file.relative_to(self._root).as_posix() for file in found if file.is_relative_to(self._root))
            place = folder_of(self._folder, test)
            place.mkdir(parents=True, exist_ok=True)
            (place / _FILES).write_text(json.dumps(names), "utf-8")
        return result


def is_elsewhere(root: Path, module: str, file: Path) -> bool:
    """Whether a module was imported from elsewhere, although a tree has one of its own."""
    place = module.replace(".", "/")
    own = (root / top / f"{place}{end}" for top in ("", "src") for end in (".py", "/__init__.py"))
    return not file.is_relative_to(root) and any(path.is_file() for path in own)


def is_affected(folder: Path, test: str, changed: Collection[str]) -> bool:
    """Whether a test may depend on one of some files that differ, or it is not known.

    Python files are told apart. Of others a test may depend without opening them from Python, but on documentation.

    Args:
        folder: The folder of records, to which `TestFiles` wrote.
        test: The node id.
        changed: The paths of the files that differ, relative to the root of the repository.
    """
    path = folder_of(folder, test) / _FILES
    if not path.is_file():
        return True
    read = set(json.loads(path.read_text("utf-8")))
    known = (".py", *_NO_CODE)
    return any(
        name in read or PurePosixPath(name).suffix not in known or PurePosixPath(name).name == "conftest.py"
        for name in changed
    )


@functools.cache
def code_differs(here: str, there: str) -> bool:
    """Whether a file of Python, or one that it imports, differs between two sides. Of installed ones it is not known.

    Args:
        here: The path of the file on this side.
        there: Its path on the other side, whose process this is.
    """
    if here == there:
        return False
    if "site-packages" in there:
        return True
    ours, theirs = Path(here), Path(there)
    pairs = zip(ours.parts[::-1], theirs.parts[::-1], strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    roots = [Path(*path.parts[: len(path.parts) - common]) for path in (ours, theirs)]
    files = [
        file.relative_to(roots[1]) for file in imported_files(theirs, executed=False) if file.is_relative_to(roots[1])
    ]
    return any(_bytes(roots[0] / file) != _bytes(roots[1] / file) for file in files)


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


@functools.cache
def imported_files(file: Path, *, executed: bool = True) -> frozenset[Path]:
    """Return a file of Python and those that it imports, and so on, but for installed packages.

    Args:
        file: The file.
        executed: Whether to follow all that an import executes, as the ``__init__`` of packages; else only to where the
            names that are imported come from.
    """
    found = {file}
    waiting = [file]
    while waiting:
        new = {*_imports(waiting.pop(), executed)} - found
        found |= new
        waiting += new
    return frozenset(found)


@functools.cache
def _imports(file: Path, executed: bool) -> tuple[Path, ...]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    package = _package_of(file)
    names = {name for node in ast.walk(tree) for name in _names(node, package, executed)}
    if executed:
        names |= {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)}
    files = (getattr(sys.modules.get(name), "__file__", None) for name in sorted(names))
    return tuple(Path(found).resolve() for found in files if isinstance(found, str) and "site-packages" not in found)


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


def _package_of(file: Path) -> str:
    """Return the package that relative imports in a file start from."""
    return _packages(len(sys.modules)).get(file, "")


@functools.lru_cache(maxsize=1)
def _packages(_: int) -> dict[Path, str]:
    found = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and "site-packages" not in file:
            found[Path(file).resolve()] = getattr(module, "__package__", None) or ""
    return found
