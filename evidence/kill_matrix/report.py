"""The matrix as Markdown."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Row = dict[str, Any]

EXPLAINED: dict[tuple[str, str], str] = {}
"""Why a fault is not named exactly, by its title and a glob of architectures. One that is named again is an error."""


def report(results: Mapping[str, list[Row]], not_shown: Mapping[str, str], machine: str) -> str:
    """Return the whole document."""
    single, several, harmless = (results[key] for key in ("single", "several", "harmless"))
    parts = [
        ["# Kill matrix", "", f"Command: `python evidence/kill_matrix`. Machine: {machine}.", ""],
        summary(single, several, harmless),
        misses(single),
        with_more(single),
        witnesses(single),
        others(single, harmless),
        at_once(several),
        nothing_planted(harmless),
        ["## Not shown at this level", "", *table(["row", "why"], not_shown.items())],
        every(single),
    ]
    return "\n".join(line for part in parts for line in (*part, "")).rstrip()


def table(head: list[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    lines = [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}" + (f" ({part / whole:.1%})" if whole else "")


def count(rows: Iterable[Row], key: str) -> int:
    return sum(bool(row[key]) for row in rows)


def summary(single: list[Row], several: list[Row], harmless: list[Row]) -> list[str]:
    visible = [row for row in single if row["visible"]]
    named, planted, invented = tally(several)
    return [
        (
            f"- Single faults: {len({row['fault'] for row in single})} operators, {len(single)} planted, "
            f"{len(visible)} visible; detected {share(count(visible, 'detected'), len(visible))}, "
            f"named exactly {share(count(visible, 'exact'), len(visible))}."
        ),
        (
            f"- Several at once: {len(several)} combinations; {share(named, planted)} of the visible faults named; "
            f"{share(invented, len(several))} combinations with a cause that nothing planted explains."
        ),
        f"- Nothing planted: {share(count(harmless, 'alarm'), len(harmless))} trials raised an alarm.",
    ]


def tally(rows: list[Row]) -> tuple[int, int, int]:
    """Return visible faults named, visible faults, and combinations with an invented cause."""
    pairs = [pair for row in rows for pair in zip(row["named"], row["visible"], strict=True)]
    return sum(n for n, v in pairs if v), sum(v for _, v in pairs), count(rows, "invented")


def explanation(row: Row) -> str:
    for (title, on), text in EXPLAINED.items():
        if row["fault"] == title and fnmatch.fnmatchcase(row["architecture"], on):
            return text
    return "not explained yet"


def misses(single: list[Row]) -> list[str]:
    missed = [row for row in single if not row["exact"] or (row["visible"] and not row["detected"])]
    for title, on in EXPLAINED:
        tried = [r for r in single if r["fault"] == title and fnmatch.fnmatchcase(r["architecture"], on)]
        if tried and not any(row in missed for row in tried):
            raise AssertionError(f"{title!r} on {on} is named exactly again: take its explanation out")
    head = ["fault", "architecture", "detected", "true", "said", "why"]
    rows = (
        [
            row["fault"],
            row["architecture"],
            yes(row["detected"]),
            row["truth"],
            "; ".join(row["said"]) or ("possible: " + "; ".join(row["possible"]) if row["possible"] else "nothing"),
            explanation(row),
        ]
        for row in missed
    )
    return ["## Not named exactly", "", *(table(head, rows) if missed else ["None."])]


def with_more(single: list[Row]) -> list[str]:
    """Return what is said of each fault that comes with something else."""
    visible = [row for row in single if row["visible"]]
    kinds = list(visible[0]["beside"]) if visible else []
    shares, missed = [], []
    for kind in kinds:
        tried = [(row, row["beside"][kind]) for row in visible if row["beside"][kind] is not None]
        found = [said for _, said in tried]
        keys = ("detected", "named", "first", "exact")
        shares.append([kind, len(tried), *(share(count(found, key), len(tried)) for key in keys)])
        missed += [
            [kind, row["fault"], row["architecture"], row["truth"], "; ".join(said["said"]) or "nothing"]
            for row, said in tried
            if not (said["named"] and said["first"])
        ]
    head = ["besides", "faults", "detected", "named", "first of the causes", "named, and nothing else"]
    lines = ["## Each fault with something else", "", *table(head, shares)]
    if missed:
        lines += ["", *table(["besides", "fault", "architecture", "true", "said"], missed)]
    return lines


def witnesses(single: list[Row]) -> list[str]:
    counts = Counter(row["witnesses"][0] for row in single if row["named"][0])
    places = Counter(row["place"] for row in single if row["exact"])
    return [
        "## Which witness names them",
        "",
        *table(["witness", "faults"], counts.most_common()),
        "",
        (
            f"Own code of a module with children: the place in the code is right too in {places[True]}, wrong in "
            f"{places[False]}."
        ),
    ]


def others(single: list[Row], harmless: list[Row]) -> list[str]:
    visible = [row for row in single if row["visible"]]
    calm = [row for row in harmless if row["rivals"]]
    names = list(dict.fromkeys(name for row in visible for name in row["rivals"]))
    rows: list[list[str]] = []
    for name in names:
        found = sum(row["rivals"][name] for row in visible)
        alarms = (
            share(sum(row["rivals"][name] for row in calm), len(calm)) if calm and name in calm[0]["rivals"] else "–"
        )
        rows.append([name, share(found, len(visible)), alarms])
    own = [share(count(visible, key), len(visible)) for key in ("detected", "exact")]
    own_alarms = share(count(calm, "alarm"), len(calm))
    rows += [["snapshot: detected", own[0], own_alarms], ["snapshot: named exactly", own[1], "–"]]
    return [
        "## Other tests, on the same faults",
        "",
        "Of the visible single faults; false alarms on the harmless trials that each of them can run.",
        "`localize_divergence` needs the old model at hand, and is said to name a fault if its first layer is the",
        "right one, or the right container where it says that the error entered between layers.",
        "",
        *table(["test", "faults detected", "false alarms"], rows),
    ]


def at_once(several: list[Row]) -> list[str]:
    groups: dict[str, list[Row]] = {}
    for row in several:
        groups.setdefault(row["background"] or "2 to 5 faults", []).append(row)
    rows = []
    for title, found in groups.items():
        named, planted, invented = tally(found)
        rows.append([title, len(found), share(named, planted), share(count(found, "exact"), len(found)), invented])
    head = ["besides", "combinations", "visible faults named", "all named, nothing else", "with an invented cause"]
    lines = ["## Several faults at once", "", *table(head, rows)]
    wrong = [
        row
        for row in several
        if row["invented"] or not all(n or not v for n, v in zip(row["named"], row["visible"], strict=True))
    ]
    if wrong:
        cells = (
            [
                row["architecture"],
                row["background"],
                "; ".join(f for f, n, v in zip(row["faults"], row["named"], row["visible"], strict=True) if v and not n)
                or "–",
                "; ".join(row["invented"]) or "–",
                "; ".join(row["faults"]),
            ]
            for row in wrong
        )
        lines += ["", *table(["architecture", "besides", "not named", "invented", "planted"], cells)]
    return lines


def nothing_planted(harmless: list[Row]) -> list[str]:
    groups: dict[str, list[Row]] = {}
    for row in harmless:
        groups.setdefault(row["variant"], []).append(row)
    rows = [
        [title, len(found), count(found, "alarm"), f"{max(row['nearest'] for row in found):.2f}"]
        for title, found in groups.items()
    ]
    lines = ["## Nothing planted", "", "*Nearest*: the largest change seen, in units of what is allowed.", ""]
    lines += table(["variant", "trials", "alarms", "nearest"], rows)
    alarms = [row for row in harmless if row["alarm"]]
    if alarms:
        cells = (
            [
                r["variant"],
                r["architecture"],
                r["mode"],
                r["loss"],
                "; ".join(r["said"]),
                "; ".join(r["differences"][:2]),
            ]
            for r in alarms
        )
        lines += ["", *table(["variant", "architecture", "mode", "loss", "said", "differences"], cells)]
    return lines


def every(single: list[Row]) -> list[str]:
    """Return one line a planted fault."""
    marks = {"loss to 1e-4": "loss", "output to 1e-3/1e-4 (timm)": "timm", "pytest-torch golden, output": "golden",
             "localize_divergence names it": "localized", "moments to 1e-3": "moments"}  # fmt: skip
    shown = [name for name in marks if single and name in single[0]["rivals"]]
    head = ["row", "fault", "architecture", "effect", "spread", "detected", "named", "witness"]
    rows = (
        [
            row["row"],
            row["fault"],
            row["architecture"] + (", train" if row["train"] else ""),
            f"{row['effect_change']:.1e}",
            f"{row['effect_spread']:.1e}",
            yes(row["detected"]),
            yes(row["exact"]),
            ", ".join(dict.fromkeys(row["witnesses"])),
            *(yes(row["rivals"][name]) for name in shown),
        ]
        for row in sorted(single, key=lambda row: (row["row"] or "~", row["fault"]))
    )
    return ["## Every planted fault", "", *table([*head, *(marks[name] for name in shown)], rows)]


def yes(value: bool) -> str:
    return "yes" if value else "no"
