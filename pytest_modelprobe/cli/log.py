"""`modelprobe log`: the changes of a snapshot, or of one of its layers, in git.

Each commit is compared with its parents as a test would compare, so the log shows layers and values and no lines of
text. A snapshot or a layer that had another name is followed through the commit that renamed it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pytest_modelprobe.comparison import Comparison, Difference, compare, rows
from pytest_modelprobe.exceptions import ModelProbeError, UsageError
from pytest_modelprobe.files import ARCH
from pytest_modelprobe.gate import (
    ENDINGS,
    Commit,
    Repository,
    SnapshotVersion,
    SourceError,
    in_revision,
    in_working_tree,
    scope_in,
    without_ending,
)
from pytest_modelprobe.record import Glob
from pytest_modelprobe.report import markdown
from pytest_modelprobe.text import count, listed, printable, table

from .common import SAME, as_json


@dataclasses.dataclass(frozen=True, slots=True)
class _LogEntry:
    """What one commit did to a snapshot."""

    commit: Commit
    rows: list[rows.Row]
    said: str
    """What is said if there are no rows: that it was recorded, or that it cannot be read."""
    reason: str | None = None
    """The reason that was declared with it."""


def run_log(options: argparse.Namespace) -> int:
    """Print what each commit changed of a snapshot."""
    repository = Repository(Path.cwd())
    every = _log_entries(repository, _name(repository, options.snapshot), options.layer)
    entries = [entry for entry in every if entry.rows or entry.said]
    if options.layer and not entries:
        raise SourceError(f"no version of {options.snapshot} has a layer {options.layer}")
    if options.format == "json":
        print(as_json([_entry_data(entry) for entry in entries]))
    elif options.format == "markdown":
        print("\n".join(line for entry in entries for line in _entry_as_markdown(entry)))
    else:
        print("\n\n".join(_entry_as_text(entry) for entry in entries))
    return SAME


def _name(repository: Repository, argument: str) -> str:
    """Return the name of the one snapshot that an argument means."""
    name = without_ending(scope_in(repository, argument))
    try:
        names = list(in_working_tree(repository).only(name).pairs)
    except SourceError:
        if not repository.history([name + ARCH]):  # else it was deleted
            raise
        return name
    if len(names) > 1:
        exact = [found for found in names if found == name]
        if not exact:
            raise UsageError(f"log follows one snapshot; {argument} has {len(names)}: {listed(names)}")
        names = exact
    return names[0]


def _log_entries(repository: Repository, name: str, glob: str | None) -> Iterator[_LogEntry]:
    """Yield what each commit did to what its parents had, the newest first; renamed layers are followed."""
    versions = _versions(repository, name)
    if not versions:
        raise SourceError(f"{name} is in no commit yet: there is nothing to follow")
    states = {commit.name: state for commit, state in versions}
    asked_for: dict[str, set[str]] = {}
    """Commit → the names that the layers which are asked for have after it."""
    for commit, state in versions:
        wanted = asked_for.get(commit.name, set())
        before = [states[parent] for parent in commit.parents if parent in states]
        found: list[Comparison] = []
        if isinstance(state, str):
            yield _LogEntry(commit, [], state)
        else:
            if glob is not None and not wanted:
                wanted = {layer for layer in state.record.layers if Glob(glob).matches(layer)}
            chosen = None if glob is None else wanted
            found = [
                compare(state.record, old.record, strict=True) for old in before if isinstance(old, SnapshotVersion)
            ]
            yield _log_entry(commit, state, before, found, chosen, glob)
        was = [comparison.names_before.layers for comparison in found] or [{}]
        for parent in commit.parents:
            for names in was:
                asked_for.setdefault(parent, set()).update(names.get(layer, layer) for layer in wanted)


def _log_entry(
    commit: Commit,
    now: SnapshotVersion,
    before: Sequence[SnapshotVersion | str],
    found: Sequence[Comparison],
    wanted: set[str] | None,
    glob: str | None,
) -> _LogEntry:
    """Return what one commit did. A merge did what is in neither of its parents."""
    given = [(old.reason, old.supersedes) for old in before if isinstance(old, SnapshotVersion)]
    reason = now.reason if (now.reason, now.supersedes) not in given else None
    if not found:
        layers = [layer for layer in now.record.layers if wanted is None or layer in wanted]
        first = "recorded anew" if before else "recorded"
        return _LogEntry(commit, [], f"{first}: {count(len(layers), 'layer')}" if layers else "", reason)
    others = [{(d.layer, d.kind, d.what) for d in comparison.differences} for comparison in found[1:]]
    here = [
        d
        for d in found[0].differences
        if (wanted is None or d.layer in wanted or _removed(d, glob))
        and all((d.layer, d.kind, d.what) in other for other in others)
    ]
    return _LogEntry(commit, rows.rows(here, found[0].actual, found[0].expected), "", reason)


def _removed(difference: Difference, glob: str | None) -> bool:
    return glob is not None and difference.kind == "layer removed" and Glob(glob).matches(difference.layer)


def _versions(repository: Repository, name: str) -> list[tuple[Commit, SnapshotVersion | str]]:
    """Return the commits that changed a snapshot and what it was after each, or why it cannot be read."""
    found: list[tuple[Commit, SnapshotVersion | str]] = []
    start, path = "HEAD", name
    while True:
        commits = repository.history([path + ending for ending in ENDINGS], start)
        if found and commits:  # the commit that gave the snapshot its name came after these
            found[-1] = (dataclasses.replace(found[-1][0], parents=(commits[0].name,)), found[-1][1])
        found += [(commit, _after(repository, commit, path)) for commit in commits]
        old = repository.renamed_from(commits[-1].name, path + ARCH) if commits else None
        if old is None:
            return found
        start, path = f"{commits[-1].name}^", without_ending(old)


def _after(repository: Repository, commit: Commit, path: str) -> SnapshotVersion | str:
    source = in_revision(repository, commit.short, commit.name).within([path])
    if path not in source.pairs:
        return "deleted"
    try:
        return source.read([path])[path]
    except ModelProbeError as error:
        return str(error)


def _entry_data(entry: _LogEntry) -> dict[str, Any]:
    rows = [{"layers": row.layers, "what": row.what, "now": row.now, "was": row.was} for row in entry.rows]
    commit = {"commit": entry.commit.name, "date": entry.commit.date, "subject": entry.commit.subject}
    declared = {"reason": entry.reason} if entry.reason else {}
    return commit | declared | ({"said": entry.said} if entry.said else {"changes": rows})


def _entry_as_text(entry: _LogEntry) -> str:
    head = printable(f"{entry.commit.date}  {entry.commit.short}  {entry.commit.subject}")
    cells = [row.cells for row in entry.rows]
    lines = table(rows.CHANGE_COLUMNS, cells) if cells else [printable(entry.said)]
    lines += [printable(f"declared: {entry.reason}")] if entry.reason else []
    return "\n".join([head, *(f"  {line}" for line in lines)])


def _entry_as_markdown(entry: _LogEntry) -> list[str]:
    commit = entry.commit
    said = f": {markdown.escaped(entry.said)}" if entry.said else ""
    lines = [f"**{commit.date}** {commit.short} {markdown.escaped(commit.subject)}{said}", ""]
    lines += [f"Declared: {markdown.escaped(entry.reason)}", ""] if entry.reason else []
    return (
        [*lines, *markdown.table(rows.CHANGE_COLUMNS, [row.cells for row in entry.rows]), ""] if entry.rows else lines
    )
