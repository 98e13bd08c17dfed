"""Which files of a repository a test depends on: what it imports, as far as imports are written, and what it opened.

A test need not run on the other side if none of these differs there. Python 3.12 and newer tell which functions run. So
a file that is only imported, as the ``__init__`` of a package imports all of it, does not count if it differs within
functions alone.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import itertools
import json
import os
import sys
import sysconfig
import types
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from .pairs import folder_of

_FILES = "files.json"

_NO_CODE = (".pyc", ".md", ".rst", ".ipynb")
"""Endings of files that no test reads, unless it was seen to open them."""

_MAY_NAME_CLASSES = (".yaml", ".yml", ".json", ".pkl", ".pt", ".pth", ".ckpt")
"""Endings of files from which a library may import classes by name."""

_STDLIB = sysconfig.get_path("stdlib") + os.sep

_IMPORTERS = {"import_module", "__import__", "iter_modules", "walk_packages", "entry_points", "run_path", "run_module"}
"""Functions that import what is not written as an import."""


_HIDING = ("/subprocess.py", "/multiprocessing/", "/torch/_dynamo/symbolic_convert.py", "/torch/jit/frontend.py")
"""Files whose functions run code unseen: in another process, or compiled from its source."""

monitoring: Any = getattr(sys, "monitoring", None)
"""Tells which functions run, since Python 3.12."""


@dataclass(slots=True)
class _Used:
    """What a test used."""

    opened: set[str] = field(default_factory=set)
    executed: set[str] = field(default_factory=set)
    """The files of the functions that ran, if it is known."""


class TestFiles:
    """A plugin that writes which files of a repository each test depends on. It looks on, and changes nothing.

    Args:
        folder: The folder to write into.
        root: The root of the repository.
    """

    __test__ = False

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder, self._root = folder, root
        self._tests: dict[str, tuple[Path, _Used]] = {}
        """Test → its file, and what was used while it ran."""
        self._shared = _Used()
        """What was used while tests were collected, or fixtures of wider scope were set up."""
        self._now: _Used | None = self._shared
        self._files: set[Path] = set()
        """The files with tests, also with those that do not run."""
        self._early = {*_loaded().values()}
        """The files of modules that were imported before."""
        self._tool = next((n for n in (3, 4) if monitoring and monitoring.get_tool(n) is None), None)
        if self._tool is not None:
            monitoring.use_tool_id(self._tool, "pytest-modelprobe")
            monitoring.register_callback(self._tool, monitoring.events.PY_START, self._begins)
            monitoring.set_events(self._tool, monitoring.events.PY_START)
        sys.addaudithook(self._receive)  # Python cannot take it off again

    def _receive(self, event: str, args: tuple[Any, ...]) -> None:
        now = self._now  # another thread may end the test
        if now is not None and event == "open" and isinstance(args[0], str):
            with contextlib.suppress(OSError):  # the working directory may be gone
                now.opened.add(os.path.realpath(args[0]))

    def _begins(self, code: types.CodeType, _: int) -> object:
        if (now := self._now) is not None and code.co_flags & inspect.CO_OPTIMIZED:  # no body of a module or class
            now.executed.add(code.co_filename)
        return monitoring.DISABLE

    @contextlib.contextmanager
    def _noting(self, used: _Used | None) -> Iterator[None]:
        before = self._now
        self._note(used)
        try:
            yield
        finally:
            self._note(before)

    def _note(self, used: _Used | None) -> None:
        if self._now is not used and self._tool is not None:
            monitoring.restart_events()  # functions that ran before are told again
        self._now = used

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Note where tests are written."""
        self._files.add(item.path.resolve())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note what a test uses."""
        _, used = self._tests[item.nodeid] = item.path.resolve(), _Used()
        with self._noting(used):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Note what a fixture uses that other tests have too."""
        with self._noting(self._now if fixturedef.scope == "function" else self._shared):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, Any, Any]:
        """Write the files, when all that tests import is imported."""
        self._now = None
        result = yield
        modules = {name: Path(file) for name, file in _loaded().items()}
        if any(is_elsewhere(self._root, module, file) for module, file in modules.items()):
            return result  # the comparison says so
        ours = {file for file in modules.values() if _is_own(file, self._root)}
        written = self._files.union(*map(self._conftests, self._files))
        # What no import in a test leads to was imported by a plugin, or by name.
        unexplained = ours.difference(*map(imported_files, written))
        for test, (file, used) in self._tests.items():
            conftests = [*self._conftests(file)]
            opened = {*map(Path, used.opened | self._shared.opened)} - ours
            imported = frozenset().union(*map(imported_files, (file, *conftests)))
            imported |= {*map(Path, used.opened)} & ours
            found = self._own({*opened, *unexplained, *imported})
            if any(one.suffix in _MAY_NAME_CLASSES or imports_by_name(one) for one in found):
                found |= ours
            executed = used.executed | self._shared.executed
            if self._tool is None or any(_is_hiding(name) for name in executed):
                needed = found
            else:
                early = {one for one in found if str(one) in self._early}
                ran = {Path(os.path.realpath(name)) for name in executed}
                needed = self._own({file, *conftests, *early, *ran, *found - ours})
            self._write(test, needed, found)
        return result

    def pytest_unconfigure(self) -> None:
        """Look on no more."""
        self._now = None
        if self._tool is not None:
            monitoring.set_events(self._tool, 0)
            monitoring.register_callback(self._tool, monitoring.events.PY_START, None)
            monitoring.free_tool_id(self._tool)

    def _own(self, files: set[Path]) -> set[Path]:
        return {one for one in files if _is_own(one, self._root)}

    def _write(self, test: str, needed: set[Path], found: set[Path]) -> None:
        names = (
            [one.relative_to(self._root).as_posix() for one in sorted(those)] for those in (needed, found - needed)
        )
        place = folder_of(self._folder, test)
        place.mkdir(parents=True, exist_ok=True)
        (place / _FILES).write_text(json.dumps([*names]), "utf-8")

    def _conftests(self, file: Path) -> Iterator[Path]:
        above = (folder / "conftest.py" for folder in file.parents)
        yield from (one for one in above if one.is_relative_to(self._root) and one.is_file())


def _loaded() -> dict[str, str]:
    """Return the modules of Python that are imported, with their files."""
    found = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    # Modules of `torch.ops` have names of files without a folder.
    return {name: os.path.realpath(file) for name, file in found.items() if file and Path(file).is_absolute()}


def _is_own(file: Path, root: Path) -> bool:
    return file.is_relative_to(root) and not _is_installed(str(file))


def _is_installed(file: str) -> bool:
    """Whether a file is of an installed package, or comes with Python."""
    return "site-packages" in file or "dist-packages" in file or file.startswith(_STDLIB)


def is_elsewhere(root: Path, module: str, file: Path) -> bool:
    """Whether a module was imported from elsewhere, although a tree has one of its own."""
    place = module.replace(".", "/")
    own = (root / top / f"{place}{end}" for top in ("", "src") for end in (".py", "/__init__.py"))
    return not file.is_relative_to(root) and any(path.is_file() for path in own)


def _is_hiding(file: str) -> bool:
    return any(part in file.replace("\\", "/") for part in _HIDING)


def files_of(folder: Path, test: str) -> list[str] | None:
    """Return the files of the repository that a test depends on, as `TestFiles` wrote them; `None` if nobody knows."""
    found = _read(folder, test)
    return None if found is None else [*found[0], *found[1]]


def _read(folder: Path, test: str) -> tuple[list[str], list[str]] | None:
    """Return the files whose code ran or that were opened, and those that were only imported."""
    path = folder_of(folder, test) / _FILES
    return tuple(json.loads(path.read_text("utf-8"))) if path.is_file() else None


def is_affected(folder: Path, test: str, changed: Mapping[str, bool]) -> bool:
    """Whether a test may depend on one of some files that differ, or it is not known.

    Python files are told apart. Of others a test may depend without opening them from Python, but on documentation.

    Args:
        folder: The folder to which `TestFiles` wrote.
        test: The node id.
        changed: The path of each file that differs, relative to the root of the repository → whether it differs within
            functions alone (`differs_within`).
    """
    found = _read(folder, test)
    if found is None:
        return True
    needed, imported = found
    known = (".py", *_NO_CODE)
    return any(
        name in needed
        or (name in imported and not within)
        or PurePosixPath(name).suffix not in known
        or PurePosixPath(name).name == "conftest.py"
        for name, within in changed.items()
    )


def differs_within(here: str | None, there: str | None) -> bool:
    r"""Whether two sources of a module differ within functions alone, and none of these keeps what it computes.

    >>> differs_within("def f(x):\n    return x", "def f(x):\n    return x + 1")
    True
    >>> differs_within("def f(x=1): ...", "def f(x=2): ...")
    False
    """
    outlines = {_outline(source) for source in (here, there)}
    return len(outlines) == 1 and None not in outlines


def _outline(source: str | None) -> str | None:
    """Return a module without the bodies of its functions; `None` if that does not tell what other code sees of it."""
    try:
        tree = ast.parse(source or "?")
    except (SyntaxError, ValueError):
        return None
    nodes = [*ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    keeps = any("cache" in ast.dump(one) for node in functions for one in node.decorator_list)
    if keeps or any(isinstance(node, ast.Global) for node in nodes):
        return None
    for node in functions:
        node.body = []
    return ast.dump(tree)


@functools.cache
def code_differs(here: str, there: str) -> bool:
    """Whether a file of Python, or one that it imports, differs between two sides. Of installed ones it is not known.

    Args:
        here: The path of the file on this side.
        there: Its path on the other side, whose process this is.
    """
    if here == there:
        return False
    if _is_installed(there):
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
        new = {*_imports(waiting.pop(), executed)[0]} - found
        found |= new
        waiting += new
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
    package = _package_of(file)
    names = {name for node in nodes for name in _names(node, package, executed)}
    if executed:
        names |= {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)}
    files = (getattr(sys.modules.get(name), "__file__", None) for name in sorted(names))
    found = tuple(Path(one).resolve() for one in files if isinstance(one, str) and not _is_installed(one))
    said = {getattr(node, "id", None) or getattr(node, "attr", None) for node in nodes}
    return found, not said.isdisjoint(_IMPORTERS)


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


def _package_of(file: Path) -> str:
    """Return the package that relative imports in a file start from."""
    return _packages(len(sys.modules)).get(file, "")


@functools.lru_cache(maxsize=1)
def _packages(_: int) -> dict[Path, str]:
    found = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not _is_installed(file):
            found[Path(file).resolve()] = getattr(module, "__package__", None) or ""
    return found
