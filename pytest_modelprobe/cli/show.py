"""`modelprobe show`: one or several snapshots as tables, data or a page.

Each snapshot is printed before the next one is read, because a folder of them may not fit into memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pytest_modelprobe.exceptions import ModelProbeError
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
    snapshots = resolve_source(options.snapshot)[0].read().values()
    shown = ((snapshot, _only(snapshot.record, options.layers)) for snapshot in snapshots)
    if options.format == "json":
        found = [{"snapshot": snapshot.path, **record.to_dict()} for snapshot, record in shown]
        print(as_json(found if len(found) > 1 else found[0]))
    elif options.format == "html":
        _write_page(shown, options.output)
    elif options.format == "markdown":
        for snapshot, record in shown:
            lines = [f"### {markdown.escaped(headline(snapshot.record))}", "", *markdown.table(*layer_rows(record)), ""]
            print("\n".join(lines))
    else:
        for i, pair in enumerate(shown):
            print(("\n" if i else "") + _shown_as_text(*pair))
    return SAME


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
