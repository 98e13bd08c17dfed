"""Causes in builtin types, for reports: of a snapshot that differs, and of two sides that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pytest_modelprobe.comparison import Cause
from pytest_modelprobe.comparison import text as comparison_text
from pytest_modelprobe.record import Record
from pytest_modelprobe.text import json_number

from .source import source_of


def causes_data(
    causes: Iterable[Cause], record: Record, root: Path, sources: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return causes in builtin types, equal ones of several layers once, with the place of each layer's class.

    Args:
        causes: The causes.
        record: The record that has the layers.
        root: The folder to which the files of classes are relative.
        sources: The modules of the classes → their files; by default those that this process imported.

    >>> causes_data([], Record(model="Net"), Path())
    []
    """
    return [
        {**_cause_data(cause, layers), "source": source_of(record, cause.layer, root, sources)}
        for cause, layers in comparison_text.grouped(causes)
    ]


def _cause_data(cause: Cause, layers: int) -> dict[str, Any]:
    return {
        "kind": cause.kind,
        "layer": cause.layer,
        "layers": layers,
        "what": cause.what,
        **{name: json_number(getattr(cause, name)) for name in ("actual", "expected", "change", "noise")},
        "evidence": cause.evidence,
        "hints": list(cause.hints),
        "said": comparison_text.cause_text(cause),
        # Equal for the same cause in two tests, which the summary tells once.
        "key": "|".join(map(str, (cause.kind, cause.layer, cause.what, cause.actual, cause.expected))),
    }
