"""Changes, and the results of a run, as GitHub-flavored Markdown: for the summary of a job, or a pull request.

Names are untrusted: nothing in them may become a link, a tag or a row of a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from pytest_modelprobe.gate import Verdict
from pytest_modelprobe.gate.text import (
    SHARED_CAUSE_COLUMNS,
    VERDICT_COLUMNS,
    diff_parts,
    next_steps,
    reasons,
    shared_cause_rows,
    verdict_line,
    verdict_rows,
)
from pytest_modelprobe.text import LONGEST, Cell, count, number, printable

from .results import Base, Compared, PairResult, Results
from .results import verdict as run_verdict

MOST_ROWS = 50
"""How many rows of a table are shown; the rest is folded."""

MOST_SUMMARY_BYTES = 900_000
"""The size of a summary. GitHub drops a summary above 1 MiB."""


def escaped(text: str) -> str:
    """Return text escaped for Markdown, also for cells of tables.

    >>> escaped("a|b <script> `c` @you")
    'a&#124;b &lt;script&gt; &#96;c&#96; <span>@</span>you'
    """
    shown = printable(text)
    shown = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}…"
    return _SIGNS.sub(_literal, shown)


_SIGNS = re.compile(r"[&<>|`*_\[\]~\\]|[@$]|#(?=\d)|:(?=//|[\w+-]+:)|(?<=www)\.|(?<=GH)-(?=\d)", re.IGNORECASE)


def _literal(sign: re.Match[str]) -> str:
    """Return a special character as an entity, inside and outside tables.

    GitHub looks for addresses, people, issues, formulas and emoji after rendering, where entities are resolved: their
    first character is put into an element.
    """
    if sign[0] in "&<>|`*_[]~\\":
        return f"&{_ENTITIES.get(sign[0]) or f'#{ord(sign[0])}'};"
    return f"<span>{sign[0]}</span>"


_ENTITIES = {"&": "amp", "<": "lt", ">": "gt"}


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], most: int = MOST_ROWS) -> list[str]:
    """Return the lines of a table; rows beyond ``most`` are folded.

    >>> table(["layer", "zeros"], [["fc|1", 3]])
    ['| layer | zeros |', '|---|---|', '| fc&#124;1 | 3 |']
    """
    lines = [_line([escaped(cell if isinstance(cell, str) else number(cell)) for cell in row]) for row in rows]
    head = [_line(columns), "|" + "---|" * len(columns)]
    if len(lines) <= most:
        return [*head, *lines]
    summary = f"<details><summary>{count(len(lines) - most, 'row')} more</summary>"
    return [*head, *lines[:most], "", summary, "", *head, *lines[most:], "", "</details>"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def verdict(verdict: Verdict, most_bytes: int = MOST_SUMMARY_BYTES) -> str:
    """Return the verdict, the most severe first, and how to declare what is denied."""
    head = [f"### modelprobe: {escaped(verdict_line(verdict))}", ""]
    if verdict.changes:
        head += [*table(VERDICT_COLUMNS, verdict_rows(verdict)), ""]
    tail = [line for reason in reasons(verdict) for line in (escaped(reason), "")]
    for step in next_steps(verdict):
        said, *commands = step.split("\n")
        tail += [escaped(said), ""] + (
            ["```", *(printable(line.strip()) for line in commands), "```", ""] * bool(commands)
        )
    causes = shared_cause_rows(verdict)
    parts = [causes[first : first + MOST_ROWS] for first in range(0, len(causes), MOST_ROWS)]
    blocks = [_folded(count(len(part), "cause"), SHARED_CAUSE_COLUMNS, part) for part in parts]
    return bounded(head, blocks, tail, most_bytes)


def _folded(heading: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    title = f"<details><summary>{escaped(heading)}</summary>"
    return [title, "", *table(columns, rows, most=len(rows)), "", "</details>", ""]


def bounded(
    head: Sequence[str], blocks: Sequence[Sequence[str]], tail: Sequence[str], most_bytes: int, noun: str = "table"
) -> str:
    """Return the blocks that fit between head and tail, and the number of those left out."""
    bytes_left = most_bytes - _size(head) - _size(tail) - 200
    if bytes_left < 0:
        return "\n".join([*head[:2], "This is too long to be shown here: run the same command locally.", ""])
    kept: list[str] = []
    left_out = 0
    for block in blocks:
        size = _size(block)
        if size <= bytes_left and not left_out:
            kept += block
            bytes_left -= size
        else:
            left_out += 1
    if left_out:
        kept += [f"{count(left_out, noun)} more do not fit here: run the same command locally.", ""]
    return "\n".join([*head, *kept, *tail]).rstrip() + "\n"


def _size(lines: Iterable[str]) -> int:
    return sum(len(line.encode("utf-8", "replace")) + 1 for line in lines)


def diff(verdict: Verdict) -> str:
    """Return the changes and their causes."""
    if not verdict.changes:
        return f"### modelprobe: nothing changed in {count(verdict.unchanged, 'snapshot')}\n"
    blocks = [[*_fenced(part), ""] for part in diff_parts(verdict)]
    return bounded([], blocks, [f"{count(verdict.unchanged, 'snapshot')} unchanged."], MOST_SUMMARY_BYTES, "text")


def render(results: Results) -> str:
    """Return the results of a run: the tests that failed, and each snapshot and model that changed.

    >>> print(render(Results(tests=())), end="")
    ### modelprobe: No test used a probe.
    """
    head = [f"### modelprobe: {escaped(run_verdict(results))}", ""]
    if results.stopped is not None:
        head += [escaped(f"Not every test ran to its end: {results.stopped}"), ""]
    failed = [[test.id, test.message or test.outcome] for test in results.tests if test.failed]
    head += [*table(["failed test", "message"], failed), ""] if failed else []
    head += [] if results.base is None else _beside(results.base)
    snapshots = [
        _changed(f"{test.id}, {one.snapshot}", one)
        for test in results.tests
        for one in test.snapshots
        if one.verdict == "changed"
    ]
    models = [_changed(f"{test.id}, {pair.record}", pair) for test in results.tests for pair in test.changed]
    return bounded(head, [*snapshots, *models], [], MOST_SUMMARY_BYTES, "text")


def beside(base: Base, pairs: Mapping[str, Sequence[PairResult]]) -> str:
    """Return what was compared with another side, the pairs by test."""
    head = [f"### modelprobe: beside {escaped(base.name)}", "", *_beside(base)]
    changed = ((test, pair) for test, found in pairs.items() for pair in found if pair.verdict == "changed")
    models = [_changed(f"{test}, {pair.record}", pair) for test, pair in changed]
    return bounded(head, models, [], MOST_SUMMARY_BYTES, "text")


def _beside(base: Base) -> list[str]:
    versions = [[name, *pair] for name, pair in base.versions.items()]
    lines = [escaped(base.said), ""]
    lines += [*table(["package", "here", "there"], versions), ""] if versions else []
    failed = list(base.failed.items())
    return lines + ([*table(["did not run there", "why"], failed), ""] if failed else [])


def _changed(name: str, found: Compared) -> list[str]:
    """Return the text of a snapshot or model that changed, folded under its first line."""
    title = escaped(f"{name}: {found.first_line}")
    return [f"<details><summary>{title}</summary>", "", *_fenced(found.text), "", "</details>", ""]


def _fenced(text: str) -> list[str]:
    """Return the lines of text between fences. A fence is closed by one of as many backticks."""
    lines = [printable(line) for line in text.split("\n")]
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *lines, fence]
