"""The subcommands `show`, `report`, `init` and `bisect`, and what all subcommands share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_modelprobe.exceptions import ModelProbeError, UsageError
from pytest_modelprobe.files import DIRECTORY
from pytest_modelprobe.gate import (
    Repository,
    SnapshotSource,
    SnapshotVersion,
    in_revision,
    on_disk,
    scope_in,
    without_ending,
)
from pytest_modelprobe.record import Record, layer_rows, layer_table, select
from pytest_modelprobe.record.text import headline
from pytest_modelprobe.report import html, markdown
from pytest_modelprobe.report.results import SCHEMA, Results, write_text
from pytest_modelprobe.text import count, listed, printable

# --- what the subcommands share ---------------------------------------------------------------------------------------

SAME, DIFFERENT, INCOMPLETE = 0, 1, 2
"""Exit codes: success; differences, or denied changes; could not complete."""


def resolve_source(argument: str) -> tuple[SnapshotSource, str]:
    """Return the snapshots of an argument, ``PATH`` or ``REF:PATH``, and the prefix of their names."""
    ref, colon, path = argument.partition(":")
    if colon and ref and not Path(argument).exists():
        repository = Repository(Path.cwd())
        # As for git: from the root, but ./ from here.
        scope = scope_in(repository, path) if path.startswith("./") else path.strip("/")
        return in_revision(repository, ref).only(scope), without_ending(scope)
    start = without_ending(Path(argument).as_posix())
    return on_disk(argument), "" if start == "." else start


def as_json(data: Any) -> str:
    """Return strict JSON without commands to GitHub Actions."""
    return json.dumps(data, indent=1, ensure_ascii=True, allow_nan=False).replace("##[", r"##\u005b")


# --- show: snapshots as tables, data or a page ------------------------------------------------------------------------


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
        page, paths = "", []
        for snapshot, record in shown:
            page = page or record.to_html()
            paths.append(snapshot.path)
        if len(paths) > 1:
            raise ModelProbeError(f"a page shows one snapshot, not {len(paths)}: name one of {listed(paths)}")
        if options.output:
            write_text(Path(options.output), page)
            return SAME
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(encoding="utf-8")  # as the page says of itself, whatever the console has
        print(page, end="")
    elif options.format == "markdown":
        for snapshot, record in shown:
            lines = [f"### {markdown.escaped(headline(snapshot.record))}", "", *markdown.table(*layer_rows(record)), ""]
            print("\n".join(lines))
    else:
        for i, pair in enumerate(shown):
            print(("\n" if i else "") + _shown_as_text(*pair))
    return SAME


def _only(record: Record, globs: Sequence[str] | None) -> Record:
    """Return a record of the layers that are asked for."""
    if not globs:
        return record
    return dataclasses.replace(record, layers={name: record.layers[name] for name in select(record.layers, globs)})


def _shown_as_text(snapshot: SnapshotVersion, record: Record) -> str:
    lines = [headline(snapshot.record)]
    lines += [printable(f"Reason: {snapshot.reason}")] if snapshot.reason else []
    return "\n".join([*lines, "", *layer_table(record, most=None)])


# --- report: the results of a run of pytest as a page or as Markdown --------------------------------------------------

ENDINGS = {"html": ".html", "markdown": ".md"}
"""Each format, and how the name of its file ends where none is given."""


def run_report(options: argparse.Namespace) -> int:
    """Write the report, beside the results if no other place is named."""
    path = Path(options.results)
    output = Path(options.output) if options.output else path.with_name(path.stem + ENDINGS[options.format])
    try:
        results = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    found = results.get("schema") if isinstance(results, dict) else None
    if found != SCHEMA:
        raise UsageError(
            f"{path} has schema {found!r}, and this version reads {SCHEMA}: write it with pytest "
            "--modelprobe-json=PATH of the same version"
        )
    try:
        render = html.render if options.format == "html" else markdown.render
        text = render(Results.from_dict(results))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = textwrap.shorten(repr(error), 300)
        raise UsageError(f"{path} is not what pytest --modelprobe-json=PATH writes: {why}") from error
    write_text(output, text)
    if not options.output:
        print(printable(f"Wrote {output}"))
    return SAME


# --- init: the attributes of snapshots in git -------------------------------------------------------------------------

GIT_ATTRIBUTES = (
    f"**/{DIRECTORY}/**/*.arch.json text eol=lf",
    f"**/{DIRECTORY}/**/*.probe.json text eol=lf -merge linguist-generated",
)
"""What git has to know: two branches' numbers never mix into a model that nobody ran."""


def run_init(options: argparse.Namespace) -> int:
    """Add the attributes of snapshots to .gitattributes."""
    root = Repository(Path.cwd()).root
    path = root / ".gitattributes"
    there = path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else ""
    known = {" ".join(line.split()) for line in there.splitlines()}
    missing = [line for line in GIT_ATTRIBUTES if line not in known]
    if missing:
        end = "\r\n" if "\r\n" in there else "\n"
        gap = "" if not there or there.endswith("\n") else end
        added = there + gap + "".join(line + end for line in missing)
        path.write_bytes(added.encode("utf-8", "surrogateescape"))
        print(f"Added to {path}:", *(f"  {line}" for line in missing), sep="\n")
    else:
        print(f"{path} has all that git needs to know.")
    print(_AFTER_INIT)
    return SAME


_AFTER_INIT = f"""
Next, to have every change of an architecture reviewed, a line in .github/CODEOWNERS:
  **/{DIRECTORY}/**/*.arch.json @your-organization/model-owners
and in a workflow of pull requests, after a checkout with fetch-depth: 0:
  modelprobe check --format github --deny behavior"""


# --- bisect: the commit that changed what a model does ----------------------------------------------------------------


def run_bisect(options: argparse.Namespace) -> int:
    """Find the commit, and print its diagnosis."""
    from pytest_modelprobe.comparison.text import text
    from pytest_modelprobe.revisions import bisect, differs

    if not options.tests:
        raise UsageError("name a test behind --, such as: modelprobe bisect v1.0 -- tests/test_model.py::test_run")
    repository = Repository(Path.cwd())

    def tell(text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    found = bisect(repository, options.good, options.bad, options.tests, tell=tell)
    author = repository.author(found.commit)
    print(printable(f"{author} is the first commit with a change; {count(found.runs, 'run')} of the tests"))
    for pair in found.pairs:
        if differs(pair):
            print()
            print(printable(f"{pair.here.test}, {pair.here.key}, beside {options.good}:"))
            print(text(pair.diagnosis))
    return SAME
