"""What changed in the source of a class between two sides: the lines of its methods, without docstrings."""

from __future__ import annotations

import ast
import difflib
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_modelprobe.comparison import Cause, Diagnosis
from pytest_modelprobe.record import ROOT, containers

from .pairs import Written

_MOST_LINES = 12
"""Lines of source that are shown of a model."""

_IN_CONSTRUCTOR = ("architecture", "attribute", "weights", "buffers")
"""Kinds of causes that the constructor of a class sets, often that of a container."""


class Hunk(NamedTuple):
    """A method that differs."""

    file: str
    """The path of this side, relative to the current directory."""
    line: int
    """The first line that differs here."""
    name: str
    """Class and method."""
    lines: list[str]
    """Each begins with ``- `` or ``+ ``."""


def source_lines(diagnosis: Diagnosis, here: Written, there: Written) -> Iterator[str]:
    """Yield what differs in the source of the classes that the causes name, in at most 12 lines.

    Where the class of a layer is as it was, it is the nearest container whose class differs.
    """
    left, told = _MOST_LINES, set[str]()
    for cause in (*diagnosis.causes, *diagnosis.possible):
        for hunk in _hunks_of(cause, here, there):
            if hunk.name in told or left < 2:
                continue
            told.add(hunk.name)
            yield f"  {hunk.file}:{hunk.line} {hunk.name}"
            yield from (f"  {line}" for line in hunk.lines[:left])
            if len(hunk.lines) > left:
                yield f"  ... {len(hunk.lines) - left} more lines"
            left -= len(hunk.lines)


def _hunks_of(cause: Cause, here: Written, there: Written) -> list[Hunk]:
    layer = here.record.layers.get(cause.layer)
    around = containers(cause.layer)
    names = [cause.layer, *reversed(around)] if layer is not None else [*reversed(around)] or [ROOT]
    first = "__init__" if cause.kind in _IN_CONSTRUCTOR else "forward"
    for name in names:
        found = here.record.layers.get(name)
        module, _, cls = ("", "", "") if found is None or found.functional else found.type.rpartition(".")
        files = here.sources.get(module), there.sources.get(module)
        if None in files:
            continue
        hunks = _hunks(cls, *(Path(file) for file in files if file is not None))
        if hunks:
            return sorted(hunks, key=lambda hunk: not hunk.name.endswith(f".{first}"))
    return []


def _hunks(cls: str, here: Path, there: Path) -> list[Hunk]:
    """Return the methods of a class that differ, in the order of this side."""
    try:
        now, then = (_methods(file.read_text("utf-8"), cls) for file in (here, there))
    except (OSError, ValueError, SyntaxError):
        return []
    found = []
    for name, (start, lines) in now.items():
        before = then.get(name, (0, []))[1]
        marked = list(difflib.unified_diff(before, lines, lineterm="", n=0))[2:]
        if marked:
            first = int(marked[0].split("+")[1].split(",")[0].split()[0])
            shown = [line for line in marked if not line.startswith("@@")]
            found.append(Hunk(_relative(here), start + first - 1, f"{cls}.{name}", _dedented(shown)))
    return found


def _methods(text: str, cls: str) -> dict[str, tuple[int, list[str]]]:
    """Return the methods of a class, each with its first line and its lines, those of docstrings empty."""
    lines = text.splitlines()
    body: Sequence[ast.AST] = ast.parse(text).body
    for name in cls.split("."):
        found = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)
        body = () if found is None else found.body
    methods = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            start = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            own = lines[start - 1 : node.end_lineno]
            if ast.get_docstring(node) is not None:
                said = node.body[0]
                own[said.lineno - start : (said.end_lineno or said.lineno) - start + 1] = []
            methods[node.name] = start, own
    return methods


def _dedented(marked: Sequence[str]) -> list[str]:
    """Return lines without the indentation that all of them have after their mark."""
    plain = textwrap.dedent("\n".join(line[1:] for line in marked)).split("\n")
    return [f"{mark[0]} {line}" for mark, line in zip(marked, plain, strict=True)]


def _relative(file: Path) -> str:
    try:
        return Path(os.path.relpath(file)).as_posix()
    except ValueError:  # on another drive
        return file.as_posix()
