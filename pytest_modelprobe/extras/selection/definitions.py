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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from pytest_modelprobe.gate import Repository

Node = tuple[Path, str]
"""A file and a name that is bound at its top; an empty one for what its import executes.

A star behind it says that it is passed on: if it is a module, all inside it is used.
"""

_EXECUTED, _ALL = "", "*"

IMPORT = "import "
"""What stands before a module that a file imports on this side alone, among the names that differ."""

METHODS = "methods of "
"""What stands before the name of a class that differs in its methods alone, among the names that differ."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_DYNAMIC = frozenset({"__dict__", "dir", "eval", "exec", "globals", "locals", "vars"})
"""What finds something in a module by names that are not written."""

_KNOWN_DECORATORS = frozenset({
    "abstractmethod", "allow_in_graph", "beartype", "cache", "cached_property", "classmethod", "compile",
    "contextmanager", "custom_bwd", "custom_fwd", "dataclass", "disable", "enable_grad", "final", "fixture", "ignore",
    "inference_mode", "jaxtyped", "lru_cache", "mark", "no_grad", "overload", "override", "property", "script",
    "setter", "staticmethod", "typecheck", "unused", "wraps",
})  # fmt: skip
"""Decorators that do not register what they decorate."""

_HOOKS = re.compile(r"autouse|pytestmark|(setup|teardown)_(module|function)|(setUp|tearDown)Module|pytest_\w+")
"""Names that all tests use that import them."""

_WORD = re.compile(r"[^\W\d]\w*")


class _File:
    """The statements at the top of a file, by the names that they bind, and what its imports bind.

    Args:
        text: The text of the file.
        package: The package that it is in.
        own: Names of modules and packages of the repository.
    """

    def __init__(self, text: bytes, package: str = "", own: Collection[str] = ()) -> None:
        tree = ast.parse(text)
        self.bound = [one for statement in tree.body for one in _bound(statement)]
        """The names in the order in which they are bound, each with the part of a statement that does."""
        self.names: dict[str, list[ast.stmt]] = defaultdict(list)
        for name, part in self.bound:
            self.names[name].append(part)
        self.acting = {one.name for one in tree.body if isinstance(one, _DEFINITIONS) and _acts(one)}
        """Definitions that may do more than bind their names."""
        self.imports: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
        """Name → module and the name there, or `None` for the module itself."""
        self.stars: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    self.imports[bound].append((alias.name if alias.asname else bound, None))
            elif isinstance(node, ast.ImportFrom):
                self._note(node, package)
        self.modules = dict.fromkeys(name for one in tree.body for name in _modules(one, own))
        """What its import imports, in order, with dots before what is relative."""

    def _note(self, node: ast.ImportFrom, package: str) -> None:
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join(filter(None, [*above, node.module]))
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(module)
            else:
                self.imports[alias.asname or alias.name].append((module, alias.name))

    def signatures(self, *, methods: bool = True) -> dict[str, list[object]]:
        """Return what each name is bound to, with how often what it uses was bound before, for the order may matter.

        Args:
            methods: Whether the methods of classes are part of it, those without decorators.
        """
        found: dict[str, list[object]] = defaultdict(list)
        for name, part in self.bound:
            again = sorted(word for word in set().union(*_words(part)) if len(self.names.get(word, ())) > 1)
            before = [(word, len(found.get(word, ()))) for word in (_EXECUTED, *again)]
            found[name].append((ast.dump(part if methods else _without_methods(part)), before))
        return found


def _without_methods(statement: ast.stmt) -> ast.stmt:
    """Return a class without what only its objects execute, and any other statement as it is."""
    if not isinstance(statement, ast.ClassDef):
        return statement
    methods = (one for one in statement.body if isinstance(one, ast.FunctionDef) and not one.decorator_list)
    executed = {one for one in methods if one.name not in ("__new__", "__init_subclass__", "__class_getitem__")}
    kept = [one for one in statement.body if one not in executed]
    return ast.ClassDef(statement.name, statement.bases, statement.keywords, kept, statement.decorator_list)


def _modules(statement: ast.AST, own: Collection[str]) -> Iterator[str]:
    """Yield the modules that a statement imports when it is executed, and what may be one of the repository."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        yield (module := "." * statement.level + (statement.module or ""))
        above = module if module.endswith(".") else f"{module}."
        yield from (above + alias.name for alias in statement.names if alias.name in own)
    elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from (name for child in ast.iter_child_nodes(statement) for name in _modules(child, own))


def _bound(statement: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that a statement at the top of a file binds, each with the part of it that does."""
    if isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            name = _EXECUTED if alias.name == "*" else alias.asname or alias.name
            yield name, ast.ImportFrom(statement.module, [alias], statement.level)
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0], ast.Import([alias])
    elif isinstance(statement, _DEFINITIONS):
        yield statement.name, statement
        for node in (keyword for one in statement.decorator_list for keyword in getattr(one, "keywords", ())):
            if node.arg == "name" and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield node.value.value, statement  # of a fixture
    else:
        for node in ast.walk(statement):
            if isinstance(node, _DEFINITIONS):
                yield node.name, statement
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, statement
        if _acts(statement):
            yield _EXECUTED, statement


def _acts(statement: ast.stmt) -> bool:
    """Whether to execute a statement may do more than bind a name: a call, or a decorator that may register."""
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass):
        return False
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return False
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return _stores(statement) or any(isinstance(node, ast.Call) for node in ast.walk(statement))
    if not isinstance(statement, _DEFINITIONS):
        return True
    called = (one.func if isinstance(one, ast.Call) else one for one in statement.decorator_list)
    if any(_KNOWN_DECORATORS.isdisjoint(_path(one)) for one in called):
        return True
    if not isinstance(statement, ast.ClassDef):
        return False
    if statement.keywords or any(isinstance(base, ast.Call) for base in statement.bases):
        return True
    return any(_stores(one) if isinstance(one, ast.Assign | ast.AnnAssign) else _acts(one) for one in statement.body)


def _stores(statement: ast.stmt) -> bool:
    """Whether a statement assigns to something else than a name."""
    places = (one for one in ast.walk(statement) if isinstance(one, ast.Attribute | ast.Subscript))
    return any(isinstance(place.ctx, ast.Store) for place in places)


def _path(node: ast.expr) -> list[str]:
    """Return the names of a name with dots; the first is empty if it begins with something else."""
    return [*_path(node.value), node.attr] if isinstance(node, ast.Attribute) else [getattr(node, "id", "")]


def _words(node: ast.AST, foreign: Collection[str] = ()) -> tuple[set[str], set[str]]:
    """Return the names in a part of a file, and what may be a name elsewhere: attributes, parameters and in texts.

    Attributes of foreign modules are left out.
    """
    names: set[str] = set()
    loose: set[str] = set()
    docstrings = set()
    for one in ast.walk(node):
        names.update(word for field in ("id", "name") if isinstance(word := getattr(one, field, None), str))
        if isinstance(one, ast.Attribute) and (_path(one)[0] not in foreign or one.attr == "modules"):
            loose.add(one.attr)
        elif isinstance(one, ast.arg | ast.keyword) and one.arg:
            loose.add(one.arg)
        if isinstance(one, ast.Expr):
            docstrings.add(one.value)
        elif isinstance(one, ast.Constant) and isinstance(one.value, str) and one not in docstrings:
            loose.update((one.value, *_WORD.findall(one.value)))
    return names, loose


def _passed_on(node: ast.AST, modules: Collection[str]) -> Iterator[str]:
    """Yield the names, and attributes of some modules, that are used by themselves, and not to take an attribute."""
    attributes = {one.value for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and one not in attributes:
            yield one.id
        elif isinstance(one, ast.Attribute) and one not in attributes and _path(one)[0] in modules:
            yield one.attr


def differing(here: bytes, there: bytes, own: Collection[str] = ()) -> set[str]:
    r"""Return the names at the top of a file that two versions of it define otherwise.

    Args:
        here: The version that runs here.
        there: The other one.
        own: Packages of the repository. What it executes to import other ones is not known.

    Raises:
        SyntaxError: One of them is no Python.

    >>> differing(b"f = lambda: 1; g = lambda: f()", b"f = lambda: 2; g = lambda: f()")
    {'f'}
    >>> sorted(differing(b"class A:\n  def f(self): 1", b"class A:\n  def f(self): 2"))
    ['A', 'methods of A']
    """
    ours, theirs = (_File(text, own=own) for text in (here, there))
    dumps = [file.signatures() for file in (ours, theirs)]
    found = {name for name in dumps[0].keys() | dumps[1].keys() if dumps[0].get(name) != dumps[1].get(name)}
    rest = [file.signatures(methods=False) for file in (ours, theirs)]
    found |= {f"{METHODS}{name}" for name in found if rest[0].get(name) == rest[1].get(name)}
    if "__all__" in found:
        exported = [set().union(*(_words(one)[1] for one in file.names["__all__"])) for file in (ours, theirs)]
        found |= exported[0] ^ exported[1]
    came = [module for module in ours.modules if module not in theirs.modules]
    found |= {f"{IMPORT}{module}" for module in came}
    is_known = all(module[:1] == "." or module.split(".")[0] in own for module in came)
    is_same = [module for module in ours.modules if module in theirs.modules] == [*theirs.modules]
    return found if is_known and is_same else found | {_EXECUTED}


def differing_definitions(repository: Repository, commit: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each file of Python that differs between a commit and the working tree, with the names that do.

    Of one that is missing here, the name is that of the module. A ``pyproject.toml`` differs in nothing where its part
    for pytest is as it was: both sides have one environment.
    """
    files = [Path(name) for name in {*repository.working_files(), *repository.files(commit)} if name.endswith(".py")]
    own = {part for file in files for part in file.with_suffix("").parts}
    for name in repository.changed_files(commit):
        file = repository.root / name
        is_python = file.suffix == ".py"
        if is_python and not file.is_file():
            yield name, [file.parent.name if file.stem == "__init__" else file.stem]
        elif file.is_file() and (is_python or file.name == "pyproject.toml"):
            there = repository.text_at(commit, file) or ""
            with contextlib.suppress(SyntaxError, ValueError):
                if is_python:
                    yield name, sorted(differing(file.read_bytes(), there.encode(), own))
                elif _of_pytest(file.read_text("utf-8")) == _of_pytest(there):
                    yield name, []


def _of_pytest(text: str) -> object:
    return tomllib.loads(text).get("tool", {}).get("pytest")


class Definitions:
    """The definitions of the files of a repository.

    Args:
        files: The files that are imported, with the names of their modules and packages.
        differing: The names in them that differ, also those that are not here.
    """

    def __init__(
        self, files: Collection[tuple[Path, str, str]], differing: Mapping[Path, Collection[str]] = MappingProxyType({})
    ) -> None:
        self._packages = {file: package for file, _, package in files}
        self._modules = {module: file for file, module, _ in files}
        self._differing = differing

    def reached(self, test: str, file: Path, executed: Collection[Path], whole: Collection[Path]) -> set[Node]:
        """Return what a test reaches.

        Args:
            test: The names of the class and function in the node id.
            file: The file of the test.
            executed: The files that are imported with it.
            whole: Those of them of which all is used.
        """
        own = self._file(file).names
        first = re.split(r"::|\[", test)[0]
        waiting = [(file, name) for name in ([first] if first in own else [*own, first])]
        waiting += [node for one in {file, *executed} for node in self._always(one, one == file)]
        waiting += [(one, name) for one in whole for name in self._file(one).names]
        scope, found = {file, *executed, *whole}, set(waiting)
        while waiting:
            new = {node for node in self._edges(waiting.pop()) if node[0] in scope} - found
            found |= new
            waiting += new
        return found

    @functools.cache  # noqa: B019 - it lives as long as the files are read
    def _file(self, file: Path) -> _File:
        text = file.read_bytes() if file.suffix == ".py" and file.is_file() else b""
        found = _File(text, self._packages.get(file, ""))
        for name in self._differing.get(file, ()):
            found.names[name]
        return found

    @functools.cached_property
    def _files_with(self) -> dict[str, list[Path]]:
        found = defaultdict(list)
        for file in self._packages:
            for name in self._file(file).names:
                found[name].append(file)
        return found

    @functools.cached_property
    def _of_metaclasses(self) -> set[str]:
        """The names of classes with a metaclass, which may register them, and of those that are derived from them."""
        parts = [part for file in self._packages for _, part in self._file(file).bound]
        statements = [part for part in parts if isinstance(part, ast.ClassDef)]
        bases = {one.name: set().union(*_words(ast.Tuple(one.bases))) for one in statements}
        found = {one.name for one in statements if any(keyword.arg == "metaclass" for keyword in one.keywords)}
        while new := {name for name in bases.keys() - found if bases[name] & found}:
            found |= new
        return found

    @functools.cached_property
    def _attributes(self) -> list[ast.Attribute]:
        nodes = (node for file in self._packages for _, part in self._file(file).bound for node in ast.walk(part))
        return [node for node in nodes if isinstance(node, ast.Attribute)]

    @functools.cached_property
    def asked(self) -> set[str]:
        """The names of which some file takes an attribute, as of a class whose method it calls with another object."""
        return {_path(node.value)[-1] for node in self._attributes}

    @functools.cached_property
    def puts_classes(self) -> bool:
        """Whether some file gives an object another class."""
        return any(node.attr == "__class__" and isinstance(node.ctx, ast.Store) for node in self._attributes)

    def acts(self, file: Path) -> bool:
        """Whether the import of a file may do more than bind names."""
        return bool(self._file(file).names.get(_EXECUTED) or self._file(file).acting)

    @functools.cache  # noqa: B019
    def _always(self, file: Path, has_test: bool) -> list[Node]:
        """Return what a test reaches of a file that is imported, though it names nothing of it."""
        names = self._file(file).names
        hooks = {name for name in names if name and _HOOKS.search(" ".join(self._words_of((file, name))))}
        found = hooks | self._file(file).acting | (names.keys() & self._of_metaclasses)
        found -= {name for name in found if has_test and any(map(_is_test, names[name]))}
        return [(file, name) for name in (_EXECUTED, *found)]

    def _words_of(self, node: Node) -> set[str]:
        statements = self._file(node[0]).names.get(node[1], ())
        return {node[1]}.union(*(words for statement in statements for words in _words(statement)))

    @functools.cache  # noqa: B019
    def _edges(self, node: Node) -> frozenset[Node]:
        path, name = node[0], node[1].removesuffix("*")
        file = self._file(path)
        statements = file.names.get(name, ())
        words = [_words(one, self._foreign(path)) for one in statements]
        names = {name, "__getattr__"}.union(*(one for one, _ in words))
        loose = set().union(*(one for _, one in words))
        passed_on = {one for statement in statements for one in _passed_on(statement, file.imports)}
        if node[1].endswith("*"):
            passed_on.add(name)
        found = {(path, name)}
        is_dynamic = not _DYNAMIC.isdisjoint(passed_on | (loose & {"__dict__"})) or {"sys", "modules"} <= names | loose
        if node[1] == _ALL or is_dynamic:
            names |= {*file.names, *file.imports}
            passed_on |= names
            found |= {(self._modules[module], _ALL) for module in file.stars if module in self._modules}
        found |= {(path, word) for word in names | loose if word in file.names}
        for word in names | loose:
            for module, inner in file.imports.get(word, ()):
                found.update(self._imported(module, inner, word in passed_on))
        unbound = names - file.imports.keys() - file.names.keys() if file.stars else set()
        for word in loose | unbound:
            found |= {(one, word) for one in self._files_with.get(word, ())}
        for word in loose & passed_on:
            found |= {(one, f"{word}*") for one in self._files_with.get(word, ())}
            found |= {(one, _ALL) for module, one in self._modules.items() if f".{module}".endswith(f".{word}")}
        texts = (word.strip(".") for word in loose if "." in word)
        found |= {(self._modules[module], _ALL) for module in texts if module in self._modules}
        return frozenset(found)

    @functools.cache  # noqa: B019
    def _foreign(self, path: Path) -> set[str]:
        """Return the names in a file that imports bind to what is not of the repository."""
        tops = {"", *(module.partition(".")[0] for module in self._modules)}
        imports = self._file(path).imports.items()
        return {name for name, some in imports if tops.isdisjoint(module.partition(".")[0] for module, _ in some)}

    def _imported(self, module: str, name: str | None, is_passed_on: bool) -> Iterator[Node]:
        """Yield what an imported name leads to; if it is a module that is passed on, all inside it."""
        inner = module if name is None else f"{module}.{name}"
        if is_passed_on:
            yield from ((file, _ALL) for one, file in self._modules.items() if f"{one}.".startswith(f"{inner}."))
        if name is not None and module in self._modules:
            yield self._modules[module], f"{name}*" if is_passed_on else name


def _is_test(statement: ast.stmt) -> bool:
    inside = [*statement.body, statement] if isinstance(statement, ast.ClassDef) else [statement]
    return any(isinstance(one, ast.FunctionDef) and one.name.startswith("test") for one in inside)
