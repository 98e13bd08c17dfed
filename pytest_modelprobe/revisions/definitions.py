"""Which definitions of a file of Python a test can reach, as far as names are written.

A file that differs need not matter to a test that imports it: what a function or a class says matters where its name
is used. So a definition reaches those whose names it uses, as a name, an attribute or in a text, and a test reaches
what it uses, and what the import of a file executes.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from pytest_modelprobe.gate import Repository

Node = tuple[Path, str]
"""A file and a name that is bound at its top; an empty one for what its import executes, two stars for all names."""

_EXECUTED, _ALL = "", "**"

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_DYNAMIC = frozenset({"attrgetter", "eval", "exec", "getattr", "globals", "vars"})
"""Functions that find others by names that are not written."""

_KNOWN_DECORATORS = frozenset({
    "abstractmethod", "allow_in_graph", "beartype", "cache", "cached_property", "classmethod", "compile",
    "contextmanager", "custom_bwd", "custom_fwd", "dataclass", "disable", "enable_grad", "final", "fixture", "ignore",
    "inference_mode", "jaxtyped", "lru_cache", "mark", "no_grad", "overload", "override", "property", "script",
    "setter", "staticmethod", "typecheck", "unused", "wraps",
})  # fmt: skip
"""Decorators that do not register what they decorate."""

_HOOKS = re.compile(r"autouse|pytestmark|(setup|teardown)_(module|function)|(setUp|tearDown)Module|pytest_\w+")
"""Names in a file of tests that all of its tests use."""

_WORD = re.compile(r"[^\W\d]\w*")


class _File:
    """The statements at the top of a file, by the names that they bind, and what its imports bind."""

    def __init__(self, text: bytes, package: str = "") -> None:
        self.names: dict[str, list[ast.stmt]] = defaultdict(list)
        self.imports: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
        """Name → module and the name there, or `None` for the module itself."""
        self.stars: list[str] = []
        self.modules: set[str] = set()
        """What it imports, with dots before what is relative."""
        tree = ast.parse(text)
        for statement in tree.body:
            for name, part in _bound(statement):
                self.names[name].append(part)
            if _acts(statement):
                self.names[_EXECUTED].append(statement)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.modules.update(alias.name for alias in node.names)
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    self.imports[bound].append((alias.name if alias.asname else bound, None))
            elif isinstance(node, ast.ImportFrom):
                self._note(node, package)

    def _note(self, node: ast.ImportFrom, package: str) -> None:
        self.modules.add("." * node.level + (node.module or ""))
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join(filter(None, [*above, node.module]))
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(module)
            else:
                self.imports[alias.asname or alias.name].append((module, alias.name))


def _bound(statement: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that a statement at the top of a file binds, each with the part of it that does."""
    if isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name, ast.ImportFrom(statement.module, [alias], statement.level)
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0], ast.Import([alias])
    elif isinstance(statement, _DEFINITIONS):
        yield statement.name, statement
    else:
        for node in ast.walk(statement):
            if isinstance(node, _DEFINITIONS):
                yield node.name, statement
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, statement


def _acts(statement: ast.stmt) -> bool:
    """Whether to execute a statement may do more than bind a name: a call, or a decorator that may register."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return False
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return False
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return any(isinstance(node, ast.Call) for node in ast.walk(statement))
    if not isinstance(statement, _DEFINITIONS):
        return True
    inside = statement.body if isinstance(statement, ast.ClassDef) else ()
    defined = [node for node in (statement, *inside) if isinstance(node, _DEFINITIONS)]
    words = (_words(decorator) for node in defined for decorator in node.decorator_list)
    return any(_KNOWN_DECORATORS.isdisjoint(some) for some in words) or bool(getattr(statement, "keywords", ()))


def _words(node: ast.AST) -> set[str]:
    """Return all that may be a name in a part of a file."""
    found: set[str] = set()
    for one in ast.walk(node):
        names = (getattr(one, field, None) for field in ("id", "attr", "arg", "name"))
        found.update(name for name in names if isinstance(name, str))
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            found.update((one.value, *_WORD.findall(one.value)))
    return found


def _bare(node: ast.AST) -> Iterator[str]:
    """Yield the names that are used by themselves, and not to take an attribute."""
    attributes = {id(one.value) for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    yield from (one.id for one in ast.walk(node) if isinstance(one, ast.Name) and id(one) not in attributes)


def differing(here: bytes, there: bytes, own: Collection[str] = ()) -> set[str]:
    """Return the names at the top of a file that two versions of it define otherwise.

    Args:
        here: The version that runs here.
        there: The other one.
        own: Packages of the repository. What it executes to import other ones is not known.

    Raises:
        SyntaxError: One of them is no Python.

    >>> differing(b"f = lambda: 1; g = lambda: f()", b"f = lambda: 2; g = lambda: f()")
    {'f'}
    """
    ours, theirs = _File(here), _File(there)
    dumps = [{name: [*map(ast.dump, some)] for name, some in file.names.items()} for file in (ours, theirs)]
    found = {name for name in dumps[0].keys() | dumps[1].keys() if dumps[0].get(name) != dumps[1].get(name)}
    came = {module for module in ours.modules - theirs.modules if module[:1] != "." and module.split(".")[0] not in own}
    return found | {_EXECUTED} if came or theirs.modules - ours.modules else found


def differing_definitions(repository: Repository, commit: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each file of Python that differs between a commit and the working tree, with the names that do.

    A ``pyproject.toml`` differs in nothing where its part for pytest is as it was: both sides have one environment.
    """
    for name in repository.changed_files(commit):
        file = repository.root / name
        there = repository.text_at(commit, file) or ""
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            if file.suffix == ".py":
                yield name, sorted(differing(file.read_bytes(), there.encode(), Path(name).parts))
            elif file.name == "pyproject.toml":
                tools = (tomllib.loads(text).get("tool", {}) for text in (file.read_text("utf-8"), there))
                ours, theirs = (one.get("pytest") for one in tools)
                if ours == theirs:
                    yield name, []


class Definitions:
    """The definitions of the files of a repository.

    Args:
        files: The files that are imported, with the names of their modules and packages.
    """

    def __init__(self, files: Collection[tuple[Path, str, str]]) -> None:
        self._packages = {file: package for file, _, package in files}
        self._modules = {module: file for file, module, _ in files}

    def reached(self, test: str, file: Path, executed: Collection[Path], whole: Collection[Path]) -> set[Node]:
        """Return what a test reaches.

        Args:
            test: The names of the class and function in the node id.
            file: The file of the test.
            executed: The files that are imported with it.
            whole: Those of them of which all is used.
        """
        own = self._file(file)
        first = re.split(r"::|\[", test)[0]
        starts = [name for name in own.names if name and _HOOKS.search(" ".join({name, *self._words_of((file, name))}))]
        starts += [first] if first in own.names else own.names
        waiting = [(file, name) for name in starts]
        waiting += [(one, _EXECUTED) for one in executed if one != file]  # a file of tests decorates what it defines
        waiting += [(one, name) for one in whole for name in self._file(one).names]
        found = set(waiting)
        while waiting:
            new = self._edges(waiting.pop()) - found
            found |= new
            waiting += new
        return found

    @functools.cache  # noqa: B019 - it lives as long as the files are read
    def _file(self, file: Path) -> _File:
        return _File(file.read_bytes() if file.suffix == ".py" else b"", self._packages.get(file, ""))

    def _words_of(self, node: Node) -> set[str]:
        return {word for statement in self._file(node[0]).names.get(node[1], ()) for word in _words(statement)}

    @functools.cache  # noqa: B019
    def _edges(self, node: Node) -> frozenset[Node]:
        file, statements = self._file(node[0]), self._file(node[0]).names.get(node[1], ())
        words, bare = self._words_of(node) | {node[1]}, {name for one in statements for name in _bare(one)}
        is_dynamic = node[1] == _ALL or "__dict__" in words or not _DYNAMIC.isdisjoint(bare)
        if is_dynamic:
            words |= {*file.names, *file.imports}
        found = {(node[0], word) for word in words if word in file.names}
        for word in words:
            for module, name in file.imports.get(word, ()):
                found.update(self._imported(module, name, None if is_dynamic or word in bare else words))
            module, _, name = word.rpartition(".")
            if module in self._modules:  # a text, as of what is patched
                found.update(self._imported(module, name, words))
        for module in file.stars:
            found.add((node[0], "*"))
            found |= {(self._modules[module], word) for word in words if module in self._modules}
        return frozenset(found)

    def _imported(self, module: str, name: str | None, words: set[str] | None) -> Iterator[Node]:
        """Yield what an imported name leads to; if it is a module, its names among some words, or all inside it."""
        inner = module if name is None else f"{module}.{name}"
        if inner in self._modules and words is None:
            yield from ((file, _ALL) for one, file in self._modules.items() if f"{one}.".startswith(f"{inner}."))
        elif inner in self._modules:
            for word in words or ():
                yield self._modules[inner], word
                if f"{inner}.{word}" in self._modules:
                    yield from self._imported(inner, word, words)
        if name is not None and module in self._modules:
            yield self._modules[module], name
