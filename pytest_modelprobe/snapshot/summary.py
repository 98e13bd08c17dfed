"""The lines on snapshots in the terminal summary.

Syrupy counts snapshots; these lines say what it cannot know: what a new record has in it, which cause several tests
share, which files are unused and why one is kept. They are made of the results that the reports carry, because under
xdist the records stay in the workers. Without anything to say there are no lines, and nothing is imported.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from .options import Policy

_MOST = 10  # lines of a kind; --snapshot-details shows the rest of the unused files

Results = Sequence[dict[str, Any]]


@dataclasses.dataclass
class UnusedFiles:
    """Files that no test uses. Paths are relative to the directory where pytest was started."""

    unused: list[str] = dataclasses.field(default_factory=list)
    deleted: list[str] = dataclasses.field(default_factory=list)
    kept: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Why they were kept → paths."""

    def add(self, path: str, why_kept: str | None, *, delete: bool) -> None:
        """Add a file: kept if there is a reason, else deleted or reported."""
        (self.kept.setdefault(why_kept, []) if why_kept else self.deleted if delete else self.unused).append(path)


def shown_path(path: Path, config: pytest.Config) -> str:
    """Return a path relative to the directory where pytest was started, else to the root directory."""
    for base in (config.invocation_params.dir, config.rootpath):
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return str(path)


def lines(
    results: Results, unused: UnusedFiles, policy: Policy, caught: Results = (), *, details: bool
) -> Iterator[str]:
    """Yield the lines, printable; no line if there is nothing to report."""
    if not results and unused == UnusedFiles() and not policy.reason:
        return
    from pytest_modelprobe.text import printable

    for part in (
        _caught(caught),
        _written(results),
        _shared_causes(results),
        _stale(results, details=details),
        _not_compared(results, policy),
        _unused_lines(unused, len(unused.unused) if details else _MOST),
        _unused_reason(results, policy),
        _for_pull_request(results, unused, policy),
    ):
        yield from map(printable, part)


def _caught(results: Results) -> Iterator[str]:
    """Yield each failure that a test has caught or skipped."""
    for result in results:
        yield (
            f"{result['snapshot']} differs, and {result['test']} did not fail, so the run does: {result['first_line']}"
            ". If it is to differ, write pytest.raises around the assertion, or assert ... != modelprobe_snapshot"
        )


def _written(results: Results) -> Iterator[str]:
    """Yield each snapshot that was written, and its findings."""
    from pytest_modelprobe.text import count

    created = [result for result in results if result["verdict"] == "created"]
    shown = created[:_MOST] + [result for result in created[_MOST:] if result["findings"]]
    for result in shown:
        seen = f": {'; '.join(result['findings'])}" if result["findings"] else ""
        yield f"created {result['snapshot']}: {count(result['layers'], 'layer')}{seen}"
    if len(created) > len(shown):
        yield f"created {len(created) - len(shown)} more: nothing dead, all finite"
    for result in results:
        if result["verdict"] == "updated":
            yield f"updated {result['snapshot']}: {result['first_line']}"
            yield from (f"  {line}".rstrip() for line in result["text"].splitlines()[1:])


def _shared_causes(results: Results) -> Iterator[str]:
    """Yield each cause that several tests share, once."""
    tests: dict[str, dict[str, None]] = {}
    texts: dict[str, str] = {}
    for result in results:
        for cause in result["causes"]:
            texts.setdefault(cause["key"], cause["said"])
            tests.setdefault(cause["key"], {})[result["test"]] = None
    for key, nodeids in tests.items():
        if len(nodeids) > 1:
            more = f" and {len(nodeids) - _MOST} more" if len(nodeids) > _MOST else ""
            yield f"{len(nodeids)} tests: {texts[key]}: {', '.join(_short(list(nodeids))[:_MOST])}{more}"


def _short(nodeids: Sequence[str]) -> list[str]:
    """Return node ids without the directories of their files, unless two would be equal.

    >>> _short(["a/test_x.py::test_x[big/model]", "b/test_x.py::test_x[big/model]", "b/test_y.py::test_y"])
    ['a/test_x.py::test_x[big/model]', 'b/test_x.py::test_x[big/model]', 'test_y.py::test_y']
    """
    ends = [_without_folders(nodeid) for nodeid in nodeids]
    times = Counter(ends)
    return [end if times[end] == 1 else nodeid for nodeid, end in zip(nodeids, ends, strict=True)]


def _without_folders(nodeid: str) -> str:
    path = re.split(r"::|\[", nodeid, maxsplit=1)[0]  # the rest are names by the user, with any character
    return nodeid[path.rfind("/") + 1 :]


def _unused_reason(results: Results, policy: Policy) -> Iterator[str]:
    """Yield what to do if a reason was given and no architecture changed.

    The message of a refused update says it itself, so nothing is said beside one.
    """
    if policy.reason and not any(result["declared"] or result["verdict"] == "changed" for result in results):
        yield (
            "no architecture changed in this run, so the reason was not written; to add a reason to a change that is "
            "already in the files, check out the files of the base first"
        )


def _for_pull_request(results: Results, unused: UnusedFiles, policy: Policy) -> Iterator[str]:
    """Yield a paragraph on what an update wrote, for the description of a pull request."""
    from pytest_modelprobe.text import count

    verdicts = Counter(result["verdict"] for result in results)
    counts = {verb: verdicts[verb] for verb in ("updated", "created")} | {"deleted": len(unused.deleted)}
    what = ", ".join(f"{n} {verb}" for verb, n in counts.items() if n)
    if not what:
        return
    causes = {c["key"]: c["said"] for r in results if r["verdict"] == "updated" for c in r["causes"]}
    because = f" {'; '.join(list(causes.values())[:_MOST])}." if causes else ""
    because += f" And {count(len(causes) - _MOST, 'more cause')}." if len(causes) > _MOST else ""
    yield "for the pull request:"
    yield f"  Model snapshots: {what}.{because}{f' {policy.reason}' if policy.reason else ''}"


def stale_of(results: Results) -> Results:
    """Return the comparisons that passed with a stale file: one of the same function, written otherwise."""
    return [result for result in results if result["verdict"] == "same" and result["notes"]]


def _stale(results: Results, *, details: bool) -> Iterator[str]:
    """Yield how many files are stale, and in how many places their models are written otherwise; as details, each."""
    from pytest_modelprobe.text import count

    stale = stale_of(results)
    if not stale:
        return
    places = sum(note["layers"] for result in stale for note in result["notes"])
    seen = f"{count(len(stale), 'snapshot')} stale: same function, written otherwise in {count(places, 'place')}"
    yield f"{seen}:" if details else f"{seen}; --snapshot-details lists them, --snapshot-update writes them"
    if details:
        said = Counter((note["said"], note["layers"]) for result in stale for note in result["notes"])
        for (text, layers), models in said.items():
            yield f"  {text}{f' x{layers}' if layers > 1 else ''}{f' in {models} models' if models > 1 else ''}"


def _not_compared(results: Results, policy: Policy) -> Iterator[str]:
    from pytest_modelprobe.comparison import text as comparison_text
    from pytest_modelprobe.text import count

    for part, n in Counter(r["not_compared"] for r in results if r["not_compared"]).items():
        yield f"the {part} of {count(n, 'snapshot')} was not compared ({policy.compare_from})"
    unknown = [n for result in results if (n := result["values_not_compared"])]
    if unknown:
        yield f"{comparison_text.not_compared_sentence(sum(unknown))[0]} They are of {count(len(unknown), 'snapshot')}."


def _unused_lines(unused: UnusedFiles, most: int) -> Iterator[str]:
    from pytest_modelprobe.text import count

    sentences = [
        ("deleted {} that no test uses", unused.deleted),
        ("{} unused, --snapshot-update deletes them", unused.unused),
        *((f"{{}} unused, and kept: {why}", paths) for why, paths in unused.kept.items()),
    ]
    for sentence, paths in sentences:
        if paths:
            yield sentence.format(count(len(paths), "snapshot file")) + ":"
            yield from (f"  {path}" for path in paths[:most])
            if len(paths) > most:
                yield f"  ... {len(paths) - most} more, with --snapshot-details"
