"""The subcommands: `show`, `report`, `init`, `diff`, `check` and `declare`.

`diff`, `check` and `declare` compare the working tree with a base. `check` exits with 1 if a change that needs a reason
has none, and `declare` writes the reason for what `check` denies.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_modelprobe.exceptions import ModelProbeError, SnapshotError, UsageError
from pytest_modelprobe.files import DIRECTORY, Removal, removal_text, with_reason
from pytest_modelprobe.gate import (
    CLASSES,
    DEFAULTS,
    LEVELS,
    Class,
    Level,
    Repository,
    SnapshotSource,
    SnapshotVersion,
    SourceError,
    Verdict,
    base_of_event,
    declared_removals,
    has_words,
    in_revision,
    in_working_tree,
    judge,
    on_disk,
    refuse_links,
    removal_path,
    scope_in,
    superseded,
    without_ending,
)
from pytest_modelprobe.gate import text as gate_text
from pytest_modelprobe.record import Record, layer_rows, layer_table, select
from pytest_modelprobe.record.text import headline
from pytest_modelprobe.report import ci, markdown
from pytest_modelprobe.report.results import SCHEMA, Results, write_text
from pytest_modelprobe.text import listed, printable

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
        render = markdown.render
        if options.format == "html":
            from pytest_modelprobe.report import html  # it imports the assertions, which no other command needs

            render = html.render
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


# --- diff, check and declare: what changed, whether it was declared, and the declaration ------------------------------

_DIFF_LEVELS: Mapping[Class, Level] = {kind: "allow" if kind == "format" else "warn" for kind in CLASSES}
"""The levels of `diff`, which denies nothing and leaves out changes of format."""


def run_diff(options: argparse.Namespace) -> int:
    """Print what changed and why; return 1 if anything did."""
    if options.base is None and options.paths:
        if len(options.paths) != 2:
            raise UsageError("diff compares two: give OLD and NEW, or --base REF")
        sides = []
        for source, start in map(resolve_source, options.paths):  # by their names relative to the argument
            pairs = {name.removeprefix(start).lstrip("/"): pair for name, pair in source.pairs.items()}
            sides.append(dataclasses.replace(source, pairs=pairs).read())
        verdict = judge(*sides, levels=_DIFF_LEVELS)
    else:
        verdict = _since_base(options, _DIFF_LEVELS)
    differing = Verdict(
        changes=tuple(change for change in verdict.changes if change.level != "allow"), unchanged=verdict.unchanged
    )
    _print(options.format, differing, gate_text.diff_text, markdown.diff)
    return DIFFERENT if differing.changes else SAME


def run_check(options: argparse.Namespace) -> int:
    """Print the verdict of the gate; return 1 if a change is denied."""
    levels: dict[Class, Level] = dict(DEFAULTS)
    for level in LEVELS:
        for kind in getattr(options, level):
            if levels[kind] != level and any(kind in getattr(options, other) for other in LEVELS if other != level):
                raise UsageError(f"{kind} is given two levels: choose one of {', '.join(LEVELS)}")
            levels[kind] = level
    if "interface" in options.deny and not any("calls" in getattr(options, level) for level in LEVELS):
        levels["calls"] = "deny"  # as a test with compare="all", which fails too where only calls are written otherwise
    verdict = _since_base(options, levels)
    _print(options.format, verdict, gate_text.verdict_text, markdown.verdict)
    return DIFFERENT if verdict.denied else SAME


def _since_base(options: argparse.Namespace, levels: Mapping[Class, Level]) -> Verdict:
    """Return what changed in the working tree since the base; files with the same content are not read."""
    repository = Repository(Path.cwd())
    if options.base is None and os.environ.get("GITHUB_ACTIONS") != "true":
        raise UsageError("name what to compare with: --base origin/main")
    base = options.base or base_of_event(repository, os.environ)
    commit, *others = repository.merge_bases(base)
    if others:
        # A merge leaves in the base what both have there, so nothing that it changes is missed. Each of the merge bases
        # may have a value that was changed since, and that a branch may bring back.
        what = f"{base} and HEAD have {1 + len(others)} merge bases, so {base} itself is compared with"
        print(printable(f"modelprobe: {what}: merge it to leave out what changed there alone"), file=sys.stderr)
        commit = repository.commit(base)
    before, now = in_revision(repository, base, commit), in_working_tree(repository)
    scopes = [scope_in(repository, path) for path in options.paths]
    refuse_links(repository, commit, scopes or [""])
    if options.paths:
        for scope in scopes:
            if not before.within([scope]).pairs:  # else it may be one that was deleted
                now.only(scope)
        before, now = before.within(scopes), now.within(scopes)
    same = {name for name, state in now.states.items() if before.states.get(name) == state}
    verdict = judge(
        _readable(before, before.states.keys() - same),
        now.read(now.states.keys() - same),
        levels=levels,
        unchanged=len(same),
        removals=declared_removals(repository, commit),
    )
    return dataclasses.replace(verdict, base=commit)


def _readable(source: SnapshotSource, names: Collection[str]) -> Mapping[str, SnapshotVersion]:
    """Return the snapshots that can be read, in whole or their structure alone. The others count as new.

    If a snapshot of the base were an error, no commit could repair it.
    """
    said: set[str] = set()

    def instead(name: str, error: SourceError) -> SnapshotVersion:
        structure = source.structure(name)
        rest = "the snapshot is taken as new" if structure is None else "of it the structure alone is compared"
        if name not in said:
            print(printable(f"modelprobe: {error}; {rest}"), file=sys.stderr)
        said.add(name)
        if structure is None:
            raise KeyError(name)
        return structure

    return source.read(names, instead)


def _print(
    form: str, verdict: Verdict, as_text: Callable[[Verdict], str], as_markdown: Callable[[Verdict], str]
) -> None:
    if form == "json":
        print(as_json(ci.as_data(verdict)))
    elif form == "markdown":
        print(as_markdown(verdict), end="")
    else:
        said = as_text(verdict)
        print(ci.without_commands(said) if form == "github" else said)
    if form == "github":
        print(*ci.annotation_commands(verdict), sep="\n")
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary:
            ci.write_summary(Path(summary), as_markdown(verdict))


def run_declare(options: argparse.Namespace) -> int:
    """Write a reason for every denied change."""
    if not has_words(options.reason):
        raise UsageError("the reason is empty: say why the snapshots changed")
    root = Repository(Path.cwd()).root
    verdict = _since_base(options, {**DEFAULTS, **dict.fromkeys(options.deny, "deny")})
    written: dict[str, str] = {}
    for change in verdict.denied:
        before, now = change.before, change.now
        if now is None:  # on all devices on which it was deleted
            gone = [one.before for one in verdict.changes if one.now is None and one.path == change.path]
            removal = Removal(frozenset(one.content for one in gone if one is not None), options.reason)
            written[removal_path(change.path)] = removal_text(removal)
            continue
        digest = now.architecture if before is None else before.architecture
        chain = superseded(None if before is None else " ".join(before.supersedes), digest, now.architecture)
        try:
            written[change.path] = with_reason(now.read_text(), options.reason, chain)
        except SnapshotError as error:
            raise SourceError(f"{now.path}: {error}") from error
    for path in written:
        if (root / path).is_symlink():
            raise SourceError(f"{path} is a symbolic link: remove it, a declaration belongs there")
    for path, text in written.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, "utf-8", newline="\n")
        print(printable(f"declared in {path}"))
    if not written:
        print(f"nothing to declare since {options.base}; for a whole branch name its base: --base main")
    return SAME
