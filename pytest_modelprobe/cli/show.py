"""`modelprobe show`: one or several snapshots as tables, data or a page.

Each snapshot is printed before the next one is read, because a folder of them may not fit into memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_modelprobe.exceptions import ModelProbeError, SelectionError
from pytest_modelprobe.gate import SnapshotVersion
from pytest_modelprobe.record import Record, layer_rows, layer_table, select
from pytest_modelprobe.record.text import headline
from pytest_modelprobe.report import markdown
from pytest_modelprobe.report.results import write_text
from pytest_modelprobe.text import listed, printable

from .common import SAME, as_json, resolve_source


def run_show(options: argparse.Namespace) -> int:
    """Print snapshots as tables, or one as a page."""
    if options.output and options.format != "html":
        raise ModelProbeError("-o is for the page of --html; redirect other formats with >")
    left_out: list[tuple[str, SelectionError]] = []
    shown = _shown(resolve_source(options.snapshot)[0].read(), options.layers, left_out)
    # Each is printed before the next is read: together they may not fit into memory.
    if options.format == "json":
        _print_json({"snapshot": snapshot.path, **record.to_dict()} for snapshot, record in shown)
    elif options.format == "html":
        _write_page(shown, options.output)
    elif options.format == "markdown":
        for pair in shown:
            print("\n".join(_shown_as_markdown(*pair)))
    else:
        for i, pair in enumerate(shown):
            print(("\n" if i else "") + _shown_as_text(*pair))
    for path, why in left_out:
        print(printable(f"modelprobe: {path} is left out: {why}"), file=sys.stderr)
    return SAME


def _shown(
    snapshots: Mapping[str, SnapshotVersion], globs: Sequence[str] | None, left_out: list[tuple[str, SelectionError]]
) -> Iterator[tuple[SnapshotVersion, Record]]:
    """Yield snapshots with the layers that are asked for. Those without such a layer are added to ``left_out``.

    Raises:
        SelectionError: No snapshot has such a layer.
    """
    found = False
    for snapshot in snapshots.values():
        try:
            record = _only(snapshot.record, globs)
        except SelectionError as error:
            left_out.append((snapshot.path, error))
            continue
        found = True
        yield snapshot, record
    if not found:
        raise left_out[0][1]


def _print_json(data: Iterator[dict[str, Any]]) -> None:
    """Print one snapshot, or a list of several."""
    first = as_json(next(data))
    several = False
    for one in data:
        print("," if several else "[\n" + textwrap.indent(first, " ") + ",")
        print(textwrap.indent(as_json(one), " "), end="")
        several = True
    print("\n]" if several else first)


def _write_page(shown: Iterable[tuple[SnapshotVersion, Record]], output: str | None) -> None:
    """Write the page of the one snapshot that is shown."""
    page, paths = "", []
    for snapshot, record in shown:
        page = page or record.to_html()
        paths.append(snapshot.path)
    if len(paths) > 1:
        raise ModelProbeError(f"a page shows one snapshot, not {len(paths)}: name one of {listed(paths)}")
    if output:
        write_text(Path(output), page)
    else:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(encoding="utf-8")  # as the page says of itself, whatever the console has
        print(page, end="")


def _only(record: Record, globs: Sequence[str] | None) -> Record:
    """Return a record of the layers that are asked for."""
    if not globs:
        return record
    return dataclasses.replace(record, layers={name: record.layers[name] for name in select(record.layers, globs)})


def _shown_as_text(snapshot: SnapshotVersion, record: Record) -> str:
    lines = [headline(snapshot.record)]
    lines += [printable(f"Reason: {snapshot.reason}")] if snapshot.reason else []
    return "\n".join([*lines, "", *layer_table(record, most=None)])


def _shown_as_markdown(snapshot: SnapshotVersion, record: Record) -> list[str]:
    return [f"### {markdown.escaped(headline(snapshot.record))}", "", *markdown.table(*layer_rows(record)), ""]
