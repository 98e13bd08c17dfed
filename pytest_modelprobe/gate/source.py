"""What changed in the source of the class that a cause names: the lines of its methods, without docstrings."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pytest_modelprobe.comparison import Cause, Diagnosis
from pytest_modelprobe.record import ROOT, Record, containers

from .git import GitError, Repository

_MOST_LINES = 12
"""Lines of source that are shown of a model."""

_MOST_COMMITS = 3

_IN_CONSTRUCTOR = ("architecture", "attribute", "weights", "buffers")
"""Kinds of causes that the constructor of a class sets, often that of a container."""

Before = Callable[[str], str | None]
"""Takes the name of a module of Python, and returns its source as it was before."""


class Hunk(NamedTuple):
    """A method that differs."""

    file: Path
    line: int
    """The first line that differs now."""
    last: int
    name: str
    """Class and method."""
    lines: list[str]
    """Each begins with ``- `` or ``+ ``."""


def changed_methods(diagnosis: Diagnosis, files: Mapping[str, str], before: Before) -> list[Hunk]:
    """Return the methods that differ of the classes that the causes name, each once.

    Where the class of a layer is as it was, it is the nearest container whose class differs.

    Args:
        diagnosis: The causes.
        files: The modules of the classes → their files.
        before: The source before.
    """
    record = diagnosis.comparison.actual
    causes = (*diagnosis.causes, *diagnosis.possible)
    found = {hunk.name: hunk for cause in reversed(causes) for hunk in _hunks_of(cause, record, files, before)[::-1]}
    return list(found.values())[::-1]


def changed_definitions(found: Iterable[tuple[Path, str]], before: Callable[[Path], str | None]) -> list[Hunk]:
    """Return what differs in definitions: in classes their methods, functions and constants as a whole.

    Args:
        found: Files, and names that are bound at their top.
        before: Takes a file, and returns its source before.
    """
    return [hunk for file, name in found for hunk in _hunks(name, file, before(file) or "")]


def source_lines(hunks: Iterable[Hunk], more: Callable[[Hunk], Iterator[str]] = lambda _: iter(())) -> Iterator[str]:
    """Yield what differs in methods, in at most 12 lines of source, and what else ``more`` says of each."""
    left = _MOST_LINES
    for hunk in hunks:
        if left < 2:
            return
        yield f"  {_relative(hunk.file)}:{hunk.line} {hunk.name}"
        yield from (f"  {line}" for line in hunk.lines[:left])
        if len(hunk.lines) > left:
            yield f"  ... {len(hunk.lines) - left} more lines"
        yield from more(hunk)
        left -= len(hunk.lines)


def source_since(diagnosis: Diagnosis, files: Mapping[str, str], snapshot: Path) -> list[str]:
    """Return what changed since the commit in which a snapshot was last written, and the commits that changed it.

    It is empty where git does not know, or nothing differs in these classes.
    """
    found: list[str] = []
    with contextlib.suppress(GitError):
        repository = Repository(snapshot.parent)
        commit = repository.last_commit_of(snapshot)

        @functools.cache
        def before(module: str) -> str | None:
            return repository.text_at(commit, Path(files[module]))

        def commits(hunk: Hunk) -> Iterator[str]:
            since = repository.commits_since(commit, hunk.file, hunk.line, hunk.last)
            yield from (f"  in {one}" for one in since[:_MOST_COMMITS])
            if len(since) > _MOST_COMMITS:
                yield f"  and {len(since) - _MOST_COMMITS} earlier ones"

        lines = list(source_lines(changed_methods(diagnosis, files, before), commits)) if commit else []
        found = [f"Since its snapshot was written, in {commit[:10]}:", *lines] if lines else []
    return found


def _hunks_of(cause: Cause, record: Record, files: Mapping[str, str], before: Before) -> list[Hunk]:
    around = [*reversed(containers(cause.layer))]
    names = [cause.layer, *around] if cause.layer in record.layers else around or [ROOT]
    first = "__init__" if cause.kind in _IN_CONSTRUCTOR else "forward"
    for name in names:
        found = record.layers.get(name)
        module, _, cls = ("", "", "") if found is None or found.functional else found.type.rpartition(".")
        then = before(module) if module in files else None
        if then is not None and (hunks := _hunks(cls, Path(files[module]), then)):
            return sorted(hunks, key=lambda hunk: not hunk.name.endswith(f".{first}"))
    return []


def _hunks(cls: str, file: Path, before: str) -> list[Hunk]:
    """Return the methods of a class that differ, in the order of the file."""
    try:
        now, then = (_methods(text, cls) for text in (file.read_text("utf-8"), before))
    except (OSError, ValueError, SyntaxError):
        return []
    found = []
    for name in {**now, **then}:
        own = now.get(name, {})
        numbers, lines = list(own) or [1], list(own.values())
        marked = list(difflib.unified_diff(list(then.get(name, {}).values()), lines, lineterm="", n=0))[2:]
        if marked:
            first = int(marked[0].split("+")[1].split(",")[0].split()[0])  # 0 if lines before the first one are gone
            shown = [line for line in marked if not line.startswith("@@")]
            full = f"{cls}.{name}".removesuffix(".")
            found.append(Hunk(file, numbers[max(first, 1) - 1], numbers[-1], full, _dedented(shown)))
    return found


def _methods(text: str, cls: str) -> dict[str, dict[int, str]]:
    """Return the methods of a class, each as its lines by number, without docstrings.

    What is no class has an empty name.
    """
    lines = text.splitlines()
    body: Sequence[Any] = ast.parse(text).body
    others = [node for node in body if not isinstance(node, ast.ClassDef) and _binds(node, cls)]
    methods = {"": {n: lines[n - 1] for node in others for n in range(node.lineno, (node.end_lineno or 0) + 1)}}
    for name in cls.split("."):
        found = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)
        body = () if found is None else found.body
    for node in body:
        if isinstance(node, ast.FunctionDef):
            start = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            own = range(start, (node.end_lineno or start) + 1)
            said = node.body[0] if ast.get_docstring(node) is not None else None
            left_out = () if said is None else range(said.lineno, (said.end_lineno or said.lineno) + 1)
            methods[node.name] = {number: lines[number - 1] for number in own if number not in left_out}
    return methods


def _binds(node: Any, name: str) -> bool:
    """Whether a statement is the definition of a function, or assigns to the name itself."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return name in (getattr(node, "name", None), *(getattr(target, "id", None) for target in targets))


def _dedented(marked: Sequence[str]) -> list[str]:
    """Return lines without the indentation that all of them have after their mark."""
    plain = textwrap.dedent("\n".join(line[1:] for line in marked)).split("\n")
    return [f"{mark[0]} {line}" for mark, line in zip(marked, plain, strict=True)]


def _relative(file: Path) -> str:
    try:
        return Path(os.path.relpath(file)).as_posix()
    except ValueError:  # on another drive
        return file.as_posix()
