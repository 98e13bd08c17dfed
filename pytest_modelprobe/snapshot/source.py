"""Causes as reports show them, each with the place where the layer's class is written.

The place is read in the file of the module, which another process may have imported.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_modelprobe.comparison import Cause
from pytest_modelprobe.comparison import text as comparison_text
from pytest_modelprobe.record import ROOT, Record, parent
from pytest_modelprobe.report.results import ShownCause, Source


def shown_causes(
    causes: Iterable[Cause], record: Record, root: Path, sources: Mapping[str, str] | None = None
) -> tuple[ShownCause, ...]:
    """Return causes for reports, equal ones of several layers once.

    Args:
        causes: The causes.
        record: The record that has the layers.
        root: The folder to which the files of classes are relative.
        sources: The modules of the classes → their files; by default those that this process imported.
    """
    return tuple(
        ShownCause(
            kind=cause.kind,
            layer=cause.layer,
            said=comparison_text.cause_text(cause),
            layers=layers,
            what=cause.what,
            actual=cause.actual,
            expected=cause.expected,
            change=cause.change,
            noise=cause.noise,
            evidence=cause.evidence,
            hints=tuple(cause.hints),
            source=source_of(record, cause.layer, root, sources),
        )
        for cause, layers in comparison_text.grouped(causes)
    )


def source_of(record: Record, layer: str, root: Path, sources: Mapping[str, str] | None = None) -> Source | None:
    """Return file and line of the class of a layer, or of the nearest container whose file is in ``root``.

    The file is relative to ``root``. It is ``None`` for classes of installed packages, and for classes that are not
    written at the top of a module, such as one that a function made.

    Args:
        record: The record that has the layer.
        layer: The layer.
        root: The folder.
        sources: The modules of the classes → their files; by default those that this process imported.

    >>> source_of(Record(model="Net"), "fc", Path()) is None
    True
    """
    name = layer
    while True:
        found = record.layers.get(name)
        where = None if found is None or found.functional else _class_source(found.type, root, sources)
        if where is not None or name == ROOT:
            return where
        name = parent(name)


def _class_source(type_name: str, root: Path, sources: Mapping[str, str] | None) -> Source | None:
    module, _, name = type_name.rpartition(".")
    given = getattr(sys.modules.get(module), "__file__", None) if sources is None else sources.get(module)
    if not isinstance(given, str):
        return None
    file, root = Path(given).resolve(), root.resolve()
    if not file.is_relative_to(root) or "site-packages" in file.parts:
        return None
    line = _classes(file, file.stat().st_mtime_ns).get(name) if file.is_file() else None
    return None if line is None else Source(file=file.relative_to(root).as_posix(), line=line)


@functools.lru_cache(maxsize=32)
def _classes(file: Path, changed: int) -> dict[str, int]:
    """Return the classes of a module → the line of the first decorator, or of ``class``. Outer ones go first.

    A file that changed is read again.
    """
    lines: dict[str, int] = {}
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # it is compiled
        return lines
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            first = node.decorator_list[0] if node.decorator_list else node
            lines.setdefault(node.name, first.lineno)
    return lines
