"""The command `modelprobe`: shows snapshots, compares them, and tells whether a change was declared.

It reads files and asks git; it runs no model, and needs neither torch nor pytest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import doctor
from .comparison import Comparison, Difference, compare
from .exceptions import ModelProbeError, SelectionError, SnapshotError, UsageError
from .files import ARCH, DIRECTORY, with_reason
from .gate import (
    CLASSES,
    DEFAULTS,
    ENDINGS,
    LEVELS,
    MEANING,
    Class,
    Commit,
    GitError,
    Level,
    Repository,
    Snapshot,
    Source,
    SourceError,
    Verdict,
    in_revision,
    in_working_tree,
    on_disk,
    refuse_directory,
    refuse_links,
    scope_in,
    superseded,
    without_ending,
)
from .gate import event as actions
from .gate import verdict as gate
from .record import Glob, Record, select
from .report import changes, github, markdown
from .report.record import headline
from .report.text import count, layer_rows, listed, printable, table

SAME, DIFFERENT, INCOMPLETE = 0, 1, 2
"""Exit codes: nothing to object; differences, or denied changes; could not complete."""

_TOLD: Mapping[Class, Level] = {kind: "allow" if kind == "format" else "warn" for kind in CLASSES}
"""What `diff` makes of each class: it denies nothing, and leaves out what says the same."""

GIT_ATTRIBUTES = (
    f"**/{DIRECTORY}/**/*.arch.json text eol=lf",
    f"**/{DIRECTORY}/**/*.probe.json text eol=lf -merge linguist-generated",
)
"""What git has to know: two branches' numbers never mix into a model that nobody ran."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names may hold what a console cannot show
            stream.reconfigure(errors="backslashreplace")
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # as in `modelprobe show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INCOMPLETE
    except (ModelProbeError, OSError) as error:
        said = printable(str(error))
        print(f"modelprobe: {said}", file=sys.stderr)
        if getattr(options, "format", "") == "github":
            print(github.command("error", said, title="modelprobe could not complete"))
        return INCOMPLETE
    return code


class _Parser(argparse.ArgumentParser):
    """A parser whose errors hold names as they can be printed."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="modelprobe",
        description="Show and compare snapshots of models, and gate changes of them.",
        epilog="Exit code: 0 nothing to object, 1 differences or denied changes, 2 could not complete.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    path = f"an .arch.json, a .probe.json, either without its ending, or a folder with {DIRECTORY} below it"
    snapshot = f"{path}, as it is or, as REF:PATH, as it was"

    show = commands.add_parser("show", help="print a snapshot as a table")
    show.add_argument("snapshot", metavar="SNAPSHOT", help=snapshot)
    show.add_argument("--layers", action="append", metavar="GLOB", help="only these layers, such as 'blocks.*.attn'")
    _add_format(show, "text", "markdown", "json")
    show.set_defaults(run=_show)

    diff = commands.add_parser("diff", help="say what changed between two snapshots, and why")
    diff.add_argument("paths", nargs="*", metavar="PATH", help=f"OLD and NEW: {snapshot}; with --base what to look at")
    _add_base(diff)
    _add_format(diff, "text", "markdown", "json", "github")
    diff.set_defaults(run=_diff)

    check = commands.add_parser(
        "check",
        help="tell whether what changed was declared",
        description="Tell whether what changed since REF was declared.",
        epilog="Classes: " + "; ".join(f"{kind} ({DEFAULTS[kind]}): {MEANING[kind]}" for kind in CLASSES) + ".",
    )
    check.add_argument("paths", nargs="*", metavar="PATH", help=f"what to look at; all by default: {path}")
    _add_base(check)
    for level in LEVELS:
        told = f"{level} changes of this class; may be repeated"
        check.add_argument(f"--{level}", action="append", choices=CLASSES, default=[], metavar="CLASS", help=told)
    _add_format(check, "text", "markdown", "json", "github")
    check.set_defaults(run=_check)

    declare = commands.add_parser(
        "declare",
        help="write the reason of a change into its snapshots, after the fact",
        description="Write why snapshots changed since REF into them, for `check` to find; it runs no test.",
    )
    declare.add_argument("reason", metavar="WHY", help="the reason")
    declare.add_argument("paths", nargs="*", metavar="PATH", help=f"what it is for; all by default: {path}")
    declare.add_argument(
        "--base", metavar="REF", default="HEAD", help="compare with where HEAD left this revision (default: HEAD)"
    )
    declare.set_defaults(run=_declare)

    log = commands.add_parser("log", help="print what became of a snapshot, or of one of its layers, in git")
    log.add_argument("snapshot", metavar="SNAPSHOT", help=path)
    log.add_argument("layer", nargs="?", metavar="LAYER", help="a name or a glob")
    _add_format(log, "text", "markdown", "json")
    log.set_defaults(run=_log)

    init = commands.add_parser("init", help="tell git how to treat snapshots (.gitattributes)")
    init.set_defaults(run=_init)

    examine = commands.add_parser("doctor", help="print versions, devices and what is switched off, for a bug report")
    examine.add_argument("--json", action="store_true", help="print JSON instead of text")
    examine.set_defaults(run=doctor.run)
    return parser


def _add_format(parser: argparse.ArgumentParser, *formats: str) -> None:
    parser.add_argument("--format", choices=formats, default="text")


def _add_base(parser: argparse.ArgumentParser) -> None:
    told = "compare with where HEAD left this revision; in GitHub Actions the event tells it"
    parser.add_argument("--base", metavar="REF", help=told)


# --- show ---------------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    shown, without = [], []
    for snapshot in _source(options.snapshot)[0].read().values():
        try:
            shown.append((snapshot, _only(snapshot.record, options.layers)))
        except SelectionError as error:
            without.append((snapshot, error))
    if not shown:
        raise without[0][1]
    for snapshot, why in without:
        print(printable(f"modelprobe: {snapshot.path} is left out: {why}"), file=sys.stderr)
    if options.format == "json":
        data = [{"snapshot": snapshot.path, **record.to_dict()} for snapshot, record in shown]
        print(_json(data if len(data) > 1 else data[0]))
    elif options.format == "markdown":
        print("\n".join(line for pair in shown for line in _shown_as_markdown(*pair)))
    else:
        print("\n\n".join(_shown_as_text(*pair) for pair in shown))
    return SAME


def _only(record: Record, globs: Sequence[str] | None) -> Record:
    """Return a record of the layers that are asked for."""
    if not globs:
        return record
    return dataclasses.replace(record, layers={name: record.layers[name] for name in select(record.layers, globs)})


def _shown_as_text(snapshot: Snapshot, record: Record) -> str:
    lines = [headline(snapshot.record)]
    lines += [printable(f"Reason: {snapshot.reason}")] if snapshot.reason else []
    columns, rows = layer_rows(record)
    return "\n".join([*lines, "", *table(columns, rows, len(rows))])


def _shown_as_markdown(snapshot: Snapshot, record: Record) -> list[str]:
    return [f"### {markdown.escaped(headline(snapshot.record))}", "", *markdown.table(*layer_rows(record)), ""]


def _source(argument: str) -> tuple[Source, str]:
    """Return what an argument means, a path or a path in a revision, and how the names of its snapshots begin."""
    ref, colon, path = argument.partition(":")
    if colon and ref and not Path(argument).exists() and not _is_drive(ref):
        repository = Repository(Path.cwd())
        # As for git: from the root, but ./ from here.
        scope = scope_in(repository, path) if path.startswith("./") else path.strip("/")
        return in_revision(repository, ref).only(scope), without_ending(scope)
    start = without_ending(Path(argument).as_posix())
    return on_disk(argument), "" if start == "." else start


def _is_drive(letter: str) -> bool:
    """Whether what stands before a colon is a drive of Windows, and not a branch with a name as short."""
    if os.name != "nt" or len(letter) > 1:
        return False
    try:
        Repository(Path.cwd()).commit(letter)
    except GitError:
        return True
    return False


# --- diff and check -----------------------------------------------------------------------------------------------


def _diff(options: argparse.Namespace) -> int:
    if options.base is None and options.paths:
        if len(options.paths) != 2:
            raise UsageError("diff compares two: give OLD and NEW, or --base REF")
        verdict = _between(*options.paths)
    else:
        verdict = _since_base(options, _TOLD)
    differing = Verdict(
        changes=tuple(change for change in verdict.changes if change.level != "allow"), unchanged=verdict.unchanged
    )
    _print(options.format, differing, changes.diff_text, markdown.diff)
    return DIFFERENT if differing.changes else SAME


def _check(options: argparse.Namespace) -> int:
    levels: dict[Class, Level] = dict(DEFAULTS)
    for level in LEVELS:
        for kind in getattr(options, level):
            if levels[kind] != level and any(kind in getattr(options, other) for other in LEVELS if other != level):
                raise UsageError(f"{kind} is given two levels: choose one of {', '.join(LEVELS)}")
            levels[kind] = level
    verdict = _since_base(options, levels)
    _print(options.format, verdict, changes.text, markdown.verdict)
    return DIFFERENT if verdict.denied else SAME


def _between(old: str, new: str) -> Verdict:
    """Return what changed between what two arguments mean: two snapshots, or all of two folders by their names."""
    return gate.judge(_relative(old), _relative(new), levels=_TOLD)


def _relative(argument: str) -> dict[str, Snapshot]:
    """Return what an argument means, by names that begin where the argument ends."""
    source, start = _source(argument)
    return {name.removeprefix(start).lstrip("/"): snapshot for name, snapshot in source.read().items()}


def _since_base(options: argparse.Namespace, levels: Mapping[Class, Level]) -> Verdict:
    """Return what changed in the working tree since the base; only what has another content is read."""
    repository = Repository(Path.cwd())
    base = options.base
    if base is None:
        if os.environ.get("GITHUB_ACTIONS") != "true":
            raise UsageError("name what to compare with: --base origin/main")
        base = actions.base(repository, os.environ)
    commit = repository.merge_base(base)
    before, now = in_revision(repository, base, commit), in_working_tree(repository)
    scopes = [scope_in(repository, path) for path in options.paths]
    refuse_links(repository, commit, scopes or [""])
    if options.paths:
        for path, scope in zip(options.paths, scopes, strict=True):
            refuse_directory(Path(path).as_posix())
            if not before.within([scope]).pairs:  # else it may be one that was deleted
                now.only(scope)
        before, now = before.within(scopes), now.within(scopes)
    same = {name for name, state in now.states.items() if before.states.get(name) == state}
    for path in (path for name, pair in before.pairs.items() if name not in same for path in pair if path):
        refuse_directory(path, repository.root)  # else it would be said to be deleted
    # What could not be read then is taken as new, else no change could repair it; not so what of it can be read.
    was, broken = before.readable(before.states.keys() - same)
    was |= (structures := before.structures(broken))
    for name, error in broken.items():
        taken = "of it the structure alone is compared" if name in structures else "the snapshot is taken as new"
        print(printable(f"modelprobe: {error}; {taken}"), file=sys.stderr)
    verdict = gate.judge(
        was,
        now.read(now.states.keys() - same),
        levels=levels,
        unchanged=len(same),
        approvals=repository.trailers(changes.TRAILER, commit),
    )
    return dataclasses.replace(verdict, base=commit, shallow=repository.shallow) if verdict.denied else verdict


def _print(
    form: str, verdict: Verdict, as_text: Callable[[Verdict], str], as_markdown: Callable[[Verdict], str]
) -> None:
    if form == "json":
        print(_json(changes.plain(verdict)))
    elif form == "markdown":
        print(as_markdown(verdict), end="")
    else:
        said = as_text(verdict)
        print(github.unheard(said) if form == "github" else said)
    if form == "github":
        print(*github.shown(verdict), sep="\n")
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary:
            github.write_summary(Path(summary), as_markdown(verdict))


def _json(data: Any) -> str:
    """Return strict JSON that is no command where it stands in the log of a job."""
    return json.dumps(data, indent=1, ensure_ascii=True, allow_nan=False).replace("##[", r"##\u005b")


# --- declare ------------------------------------------------------------------------------------------------------


def _declare(options: argparse.Namespace) -> int:
    if not options.reason.strip():
        raise UsageError("the reason is empty: say why the snapshots changed")
    root = Repository(Path.cwd()).root
    verdict = _since_base(options, DEFAULTS)
    there = [change for change in verdict.denied if change.now is not None]
    written: dict[str, str] = {}
    for change in there:
        now, before = change.now, change.before
        assert now is not None
        digest = now.architecture if before is None else before.architecture
        chain = None if before is None else " ".join(before.supersedes)
        try:
            written[now.path] = with_reason(now.text, options.reason, superseded(chain, digest, now.architecture))
        except SnapshotError as error:
            raise SourceError(f"{now.path}: {error}") from error
    for path, text in written.items():
        (root / path).write_text(text, "utf-8", newline="\n")
        print(printable(f"declared in {path}"))
    deleted = [change.path for change in verdict.denied if change.now is None]
    if deleted:
        print(printable(f"{listed(deleted)}: what is deleted cannot declare it; `modelprobe check` prints the trailer"))
    if not written and not deleted:
        print(f"nothing to declare since {options.base}; for the whole of a branch name what it left: --base main")
    return DIFFERENT if deleted else SAME


# --- log ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """What one commit did to a snapshot."""

    commit: Commit
    rows: list[changes.Row]
    said: str
    """Where there are no rows: that it was recorded, or cannot be read."""
    reason: str | None = None
    """What was declared with it."""


def _log(options: argparse.Namespace) -> int:
    repository = Repository(Path.cwd())
    entries = list(_entries(repository, _name(repository, options.snapshot), options.layer))
    if options.layer and not any(entry.rows or entry.said for entry in entries):
        raise SourceError(f"no version of {options.snapshot} has a layer {options.layer}")
    entries = [entry for entry in entries if entry.rows or entry.said]
    if options.format == "json":
        print(_json([_plain_entry(entry) for entry in entries]))
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


def _entries(repository: Repository, name: str, glob: str | None) -> Iterator[_Entry]:
    """Yield what each commit did to what its parents had, the newest first; renamed layers are followed."""
    versions = _versions(repository, name)
    if not versions:
        raise SourceError(f"{name} is in no commit yet: there is nothing to follow")
    states = {commit.name: state for commit, state in versions}
    asked_for: dict[str, set[str]] = {}
    """The layers that are asked for, by the names that they have after each commit."""
    for commit, state in versions:
        wanted = asked_for.get(commit.name, set())
        before = [states[parent] for parent in commit.parents if parent in states]
        found: list[Comparison] = []
        if isinstance(state, str):
            yield _Entry(commit, [], state)
        else:
            if glob is not None and not wanted:
                wanted = {layer for layer in state.record.layers if Glob(glob).matches(layer)}
            chosen = None if glob is None else wanted
            found = [compare(state.record, old.record) for old in before if isinstance(old, Snapshot)]
            yield _entry(commit, state, before, found, chosen, glob)
        was = [comparison.names_before for comparison in found] or [{}]
        for parent in commit.parents:
            for names in was:
                asked_for.setdefault(parent, set()).update(names.get(layer, layer) for layer in wanted)


def _entry(
    commit: Commit,
    now: Snapshot,
    before: Sequence[Snapshot | str],
    found: Sequence[Comparison],
    wanted: set[str] | None,
    glob: str | None,
) -> _Entry:
    """Return what one commit did: of a merge, what neither of its parents had."""
    given = [(old.reason, old.supersedes) for old in before if isinstance(old, Snapshot)]
    reason = now.reason if (now.reason, now.supersedes) not in given else None
    if not found:
        layers = [layer for layer in now.record.layers if wanted is None or layer in wanted]
        first = "recorded anew" if before else "recorded"
        return _Entry(commit, [], f"{first}: {count(len(layers), 'layer')}" if layers else "", reason)
    others = [{(d.layer, d.kind, d.what) for d in comparison.differences} for comparison in found[1:]]
    here = [
        d
        for d in found[0].differences
        if (wanted is None or d.layer in wanted or _gone(d, glob))
        and all((d.layer, d.kind, d.what) in other for other in others)
    ]
    return _Entry(commit, changes.rows(here, found[0].actual, found[0].expected), "", reason)


def _gone(difference: Difference, glob: str | None) -> bool:
    return glob is not None and difference.kind == "layer removed" and Glob(glob).matches(difference.layer)


def _versions(repository: Repository, name: str) -> list[tuple[Commit, Snapshot | str]]:
    """Return the commits that changed a snapshot and what it was after each, or why it cannot be read."""
    found: list[tuple[Commit, Snapshot | str]] = []
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


def _after(repository: Repository, commit: Commit, path: str) -> Snapshot | str:
    source = in_revision(repository, commit.short, commit.name).within([path])
    if path not in source.pairs:
        return "deleted"
    try:
        return source.read([path])[path]
    except ModelProbeError as error:
        return str(error)


def _plain_entry(entry: _Entry) -> dict[str, Any]:
    rows = [{"layers": row.layers, "what": row.what, "now": row.now, "was": row.was} for row in entry.rows]
    commit = {"commit": entry.commit.name, "date": entry.commit.date, "subject": entry.commit.subject}
    declared = {"reason": entry.reason} if entry.reason else {}
    return commit | declared | ({"said": entry.said} if entry.said else {"changes": rows})


def _entry_as_text(entry: _Entry) -> str:
    head = printable(f"{entry.commit.date}  {entry.commit.short}  {entry.commit.subject}")
    cells = [row.cells for row in entry.rows]
    lines = table(changes.COLUMNS, cells) if cells else [printable(entry.said)]
    lines += [printable(f"declared: {entry.reason}")] if entry.reason else []
    return "\n".join([head, *(f"  {line}" for line in lines)])


def _entry_as_markdown(entry: _Entry) -> list[str]:
    commit = entry.commit
    said = f": {markdown.escaped(entry.said)}" if entry.said else ""
    lines = [f"**{commit.date}** {commit.short} {markdown.escaped(commit.subject)}{said}", ""]
    lines += [f"Declared: {markdown.escaped(entry.reason)}", ""] if entry.reason else []
    return [*lines, *markdown.table(changes.COLUMNS, [row.cells for row in entry.rows]), ""] if entry.rows else lines


# --- init ---------------------------------------------------------------------------------------------------------


def _init(options: argparse.Namespace) -> int:
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
  modelprobe check --format github"""
