"""`modelprobe show`: a snapshot as a table."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_modelprobe.exceptions import ModelProbeError, SelectionError
from pytest_modelprobe.gate import (
    SnapshotVersion,
)
from pytest_modelprobe.record import Record, select
from pytest_modelprobe.report import markdown
from pytest_modelprobe.report.record import headline
from pytest_modelprobe.report.text import layer_rows, listed, printable, table
from pytest_modelprobe.results import write_text

from .common import SAME, as_json, resolve_source


def run_show(options: argparse.Namespace) -> int:
    """Print snapshots as tables, or one as a page."""
    shown, without = [], []
    for snapshot in resolve_source(options.snapshot)[0].read().values():
        try:
            shown.append((snapshot, _only(snapshot.record, options.layers)))
        except SelectionError as error:
            without.append((snapshot, error))
    if not shown:
        raise without[0][1]
    if options.output and options.format != "html":
        raise ModelProbeError("-o is for the page of --html; redirect other formats with >")
    for snapshot, why in without:
        print(printable(f"modelprobe: {snapshot.path} is left out: {why}"), file=sys.stderr)
    if options.format == "json":
        data = [{"snapshot": snapshot.path, **record.to_dict()} for snapshot, record in shown]
        print(as_json(data if len(data) > 1 else data[0]))
    elif options.format == "html":
        _write_page(shown, options.output)
    elif options.format == "markdown":
        print("\n".join(line for pair in shown for line in _shown_as_markdown(*pair)))
    else:
        print("\n\n".join(_shown_as_text(*pair) for pair in shown))
    return SAME


def _write_page(shown: Sequence[tuple[SnapshotVersion, Record]], output: str | None) -> None:
    """Write the page of the one snapshot that is shown."""
    if len(shown) > 1:
        names = listed([snapshot.path for snapshot, _ in shown])
        raise ModelProbeError(f"a page shows one snapshot, not {len(shown)}: name one of {names}")
    page = shown[0][1].to_html()
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
    columns, rows = layer_rows(record)
    return "\n".join([*lines, "", *table(columns, rows, len(rows))])


def _shown_as_markdown(snapshot: SnapshotVersion, record: Record) -> list[str]:
    return [f"### {markdown.escaped(headline(snapshot.record))}", "", *markdown.table(*layer_rows(record)), ""]
