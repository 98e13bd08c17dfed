"""Compare commits of public repositories with those before them: `python evidence/repositories FOLDER [NAME ...]`.

FOLDER holds a clone of each repository of `commits.json`, by its name. None of their code is kept here: `commits.json`
names commits and says what each does, and what a first line should name, read from its diff before the run. The
environment needs what the tests import. Rows are kept in `rows.json`; those of the repositories that are named are made
anew, or of all. `--every N` runs the tests by themselves too at every Nth commit, to compare outcomes and seconds;
`--first N` leaves out commits after the first N of each list, of repositories whose tests take long.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROWS = HERE / "rows.json"
RESULTS = HERE / "RESULTS.md"


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=True)


def ran(folder: Path, *arguments: str) -> tuple[float, Counter[str], str]:
    """Return the seconds of a run of pytest, how many tests ended how, and what was said."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = done.stdout.strip().rpartition("\n")[2]
    found = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)", last)}
    return time.perf_counter() - started, Counter(found), done.stdout


def told(base: dict[str, Any] | None, said: str) -> str:
    """Return what the run told of all models."""
    verdicts = Counter((base or {}).get("verdicts") or {})
    if verdicts["changed"]:
        return "changed"
    if verdicts["unchanged"] or verdicts["rewritten"] or verdicts["rounding"]:
        return "same"
    return "not run" if re.search(r"nothing that they use differs", said) and not verdicts else "not comparable"


def causes(results: dict[str, Any]) -> list[str]:
    """Return the first line and the place in the source of each model that changed, the most frequent first."""
    pairs = [pair for test in results["tests"] for pair in test.get("base", ()) if pair["verdict"] == "changed"]
    lines = [[*pair["text"].splitlines(), ""][:2] for pair in pairs]
    found = Counter(f"{first} [{second.strip()}]" if ".py:" in second else first for first, second in lines)
    return [line for line, _ in found.most_common()]


def rows(clones: Path, repository: dict[str, Any], every: int, first: int | None) -> Iterator[dict[str, Any]]:
    """Yield what was seen at each commit."""
    folder, tests = clones / repository["name"], repository["tests"]
    for number, commit in enumerate(repository["commits"][:first]):
        git(folder, "checkout", "-q", "-f", commit["commit"])
        plain = ran(folder, *tests) if number % every == 0 else None
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "results.json"
            seconds, outcomes, said = ran(folder, *tests, "--modelprobe-base=HEAD~1", f"--modelprobe-json={path}")
            results = json.loads(path.read_text("utf-8")) if path.exists() else {"tests": [], "base": None}
        lines = causes(results)
        yield {
            "repository": repository["name"],
            "commit": commit["commit"],
            "truth": commit["truth"],
            "told": told(results["base"], said),
            "models": (results["base"] or {}).get("verdicts") or {},
            "lines": lines[:2],
            "named": any(name in line for name in commit.get("names", ()) for line in lines[:1]),
            "outcomes": {k: v for k, v in outcomes.items() if k != "models"},
            "plain": None if plain is None else dict(plain[1]),
            "seconds": [None if plain is None else round(plain[0]), round(seconds)],
        }


def page(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the tables."""
    changed = [row for row in found if row["truth"].startswith("changed") and row["told"] != "not comparable"]
    same = [row for row in found if row["truth"].startswith("same") and row["told"] != "not comparable"]
    noticed = [row for row in changed if row["told"] == "changed"]
    plain = [row for row in found if row["plain"] is not None]
    ratios = [row["seconds"][1] / row["seconds"][0] for row in plain if row["told"] != "not run"]
    facts = {
        "commits": f"{len(found)} of {len({row['repository'] for row in found})} repositories",
        "changed, found": f"{len(noticed)} of {len(changed)}",
        "found, the first line names what changed": f"{sum(row['named'] for row in noticed)} of {len(noticed)}",
        "the same, told the same or not run": f"{sum(row['told'] != 'changed' for row in same)} of {len(same)}",
        "not comparable": f"{len(found) - len(changed) - len(same)}",
        "runs in which a test had another outcome": f"{sum(row['plain'] != row['outcomes'] for row in plain)} of "
        f"{len(plain)}",
    }
    if ratios:
        told = f"{statistics.median(ratios):.1f}, {min(ratios):.1f}, {max(ratios):.1f}"
        facts["seconds beside plain where tests ran again: median, least, most"] = told
    yield from ("", "| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in facts.items()))
    head = "| repository | commit | what it does | told | models | first lines | plain, s | compared, s |"
    yield from ("", "## Commits", "", head, "|" + "---|" * (head.count("|") - 1))
    for row in found:
        models = ", ".join(f"{n} {verdict}" for verdict, n in sorted(row["models"].items()))
        right = row["told"] in ("same", "not run") or row["named"] or not row["truth"].startswith("changed")
        lines = "; ".join(row["lines"]) + ("" if right else " **(not what changed)**")
        seconds = ("" if n is None else str(n) for n in row["seconds"])
        cells = (row["repository"], row["commit"], row["truth"], row["told"], models, lines, *seconds)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int)
    given = parser.parse_args()
    known = json.loads((HERE / "commits.json").read_text("utf-8"))
    for repository in known:
        if given.names and repository["name"] not in given.names:
            continue
        new = []
        for row in rows(given.folder.resolve(), repository, given.every, given.first):
            print(json.dumps(row), flush=True)
            new.append(row)
        kept = json.loads(ROWS.read_text("utf-8")) if ROWS.exists() else []
        kept = [row for row in kept if row["repository"] != repository["name"]] + new
        order = [one["name"] for one in known]
        kept.sort(key=lambda row: order.index(row["repository"]))
        ROWS.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n", "utf-8")
        text = RESULTS.read_text("utf-8").partition("\n| |")[0].rstrip("\n")
        RESULTS.write_text(f"{text}\n" + "\n".join(page(kept)) + "\n", "utf-8")


main()
