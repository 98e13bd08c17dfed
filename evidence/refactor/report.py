"""The results as Markdown: what became of refactorings and bugs, and every miss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = dict[str, Any]

VERDICTS = ["first line", "table", "possible", "missed"]
AIMS = {"bug": 0.95, "bug, refactoring": 0.90, "bug, other weights": 0.80, "bug, refactoring, other weights": 0.80}


REASONS = [
    "Why, as far as it was read: most are one case. The refactoring adds or removes a child of the very layer that has",
    "the bug: what such a layer answers alone differs for that already, so its code is not judged. Of a layer that",
    "gets other tensors than before, a change of its code is possible only. With other weights besides, the run",
    "itself tells nothing of code.",
]


def report(results: Mapping[str, list[Row]], machine: str) -> str:
    """Return the whole document."""
    refactorings = {kind: rows for kind, rows in results.items() if kind not in AIMS}
    for rows in refactorings.values():
        check(rows)
    bugs = {kind: [row for row in results[kind] if row["changed"]] for kind in AIMS}
    unseen = [row for row in results["bug"] if not row["changed"]]
    lines = [
        "# Refactorings and bugs in the source of real classes",
        "",
        f"Made by `tox -e refactor` ({machine}).",
        "",
        "A piece of the source of a class is another one; the model with the edited class is compared with a snapshot",
        "of the model as it was. Whether outputs or gradients changed, with the same weights, is measured apart.",
        "",
        "## Refactorings",
        "",
        "An *alarm* does not say that the output is unchanged, with the same weights, or blames other than the",
        "weights, with others. Code or attributes may be named beside an output that is unchanged.",
        "",
        *table(
            ["", "tried", "test passes", "output unchanged is said", "other than weights blamed", "alarms"],
            (
                [
                    kind,
                    len(rows),
                    count(rows, "same"),
                    count(rows, "unchanged"),
                    count(rows, "blamed"),
                    count(rows, "alarm"),
                ]
                for kind, rows in refactorings.items()
            ),
        ),
        "",
        "## Bugs",
        "",
        "In the first line is a bug whose layer is the first that is named, as a cause that is not its weights.",
        "",
        *table(
            ["", "tried", *VERDICTS, "share in the first line", "aim"],
            ([kind, len(rows), *verdicts(rows), share(rows), f"{AIMS[kind]:.0%}"] for kind, rows in bugs.items()),
        ),
        *section(
            "## Refactorings blamed", (r for rows in refactorings.values() for r in rows if r["alarm"] or r["blamed"])
        ),
        *section(
            "## Not in the first line", (r for rows in bugs.values() for r in rows if r["verdict"] != VERDICTS[0])
        ),
    ]
    lines += ["", *REASONS]
    if unseen:
        titles = ", ".join(f"{row['edits'][-1]} ({row['model']})" for row in unseen)
        lines += ["", f"Not counted, for neither outputs nor gradients changed: {titles}."]
    return "\n".join(lines)


def check(rows: Iterable[Row]) -> None:
    """Raise an error for what is no refactoring, as the function is another."""
    for row in rows:
        if row["changed"]:
            really = f"outputs by {row['outputs']:.1g}, gradients by {row['gradients']:.1g}"
            raise AssertionError(f"{row['edits']} of {row['model']} is no refactoring: it changes {really}")


def section(title: str, rows: Iterable[Row]) -> list[str]:
    """Return each row that is not as it should be."""
    cells = [
        [
            row["model"],
            " + ".join(row["edits"]),
            row["weights"],
            f"{row['outputs']:.1g}, {row['gradients']:.1g}",
            row["verdict"] or ("alarm" if row["alarm"] else "blamed"),
            row["line"],
        ]
        for row in rows
    ]
    head = ["model", "edited", "weights", "outputs, gradients really changed by", "verdict", "first line"]
    return ["", title, "", *(table(head, cells) if cells else ["None."])]


def count(rows: Iterable[Row], key: str) -> int:
    return sum(bool(row[key]) for row in rows)


def verdicts(rows: list[Row]) -> list[int]:
    said = [row["verdict"] for row in rows]
    return [said.count(verdict) for verdict in VERDICTS]


def share(rows: list[Row]) -> str:
    return f"{verdicts(rows)[0] / len(rows):.1%}" if rows else "-"


def table(head: list[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    lines = [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]
