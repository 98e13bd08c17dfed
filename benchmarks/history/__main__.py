"""What a snapshot says of the upgrades of a library: written under one released version, compared under the next.

    python benchmarks/history [--versions 4.40.2 4.48.3 ...] [--environments DIR] [--kept]

Each version gets a virtual environment of its own, kept for the next run. A pair of versions, each with the next and
the first with the last, is a row of the table in RESULTS.md; each model of which the function changed, and each that
the first line misjudges, is listed below it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VERSIONS = ["4.40.2", "4.48.3", "4.57.1", "5.17.0", "5.23.0"]
CHANGED = 1e-5
"""Relative change of outputs or gradients above which the function is another: reordered kernels stay below."""


def environment(folder: Path, version: str) -> Path:
    """Return the interpreter of an environment with that version of the library."""
    home = folder / version
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        venv.create(home, clear=True, with_pip=True)
        wanted = [f"transformers=={version}", "torch==2.13.0", "numpy", "pytest", "syrupy"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        (home / "ready").touch()
    return python


def run(python: Path, *arguments: object) -> None:
    paths = os.pathsep.join(map(str, (HERE.parents[1], HERE)))
    settings = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [python, "-W", "ignore", HERE / "under_one_version.py", *arguments]
    subprocess.run(list(map(str, command)), check=True, env=settings)


def changed(row: dict[str, Any]) -> bool:
    return any(not change <= CHANGED for change in row["really"].values())


def verdict(row: dict[str, Any]) -> str:
    """Return what became of one model, a column of the table."""
    if "error" in row:
        return "not run"
    causes = [*row["causes"], *row["possible"]]
    if not changed(row):
        if row["same"]:
            return "equal"
        blamed = any(cause["class"] == "behavior" for cause in causes)
        return "said unchanged" if row["unchanged"] and not blamed else "false alarm"
    if row["same"] or row["unchanged"]:
        return "missed"
    sized = {cause["layer"] for cause in causes if cause["change"] and cause["class"] != "weights"}
    named = row["line"].removeprefix("possibly ").partition(":")[0]
    return "first line" if any(re.fullmatch(pattern(named), layer) for layer in sized) else "in the table"


def pattern(shown: str) -> str:
    """Return the expression of the layers that the first line may mean: ``layers.*`` stands for several."""
    return re.escape(shown).replace(re.escape("*"), "[^.]+")


COLUMNS = ["equal", "said unchanged", "false alarm", "first line", "in the table", "missed", "not run"]


def table(results: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    yield "| pair | models | " + " | ".join(COLUMNS) + " |"
    yield "|---" * (len(COLUMNS) + 2) + "|"
    for pair, rows in results.items():
        found = [verdict(row) for row in rows]
        yield f"| {pair} | {len(rows)} | " + " | ".join(str(found.count(name)) for name in COLUMNS) + " |"


def details(results: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    for pair, rows in results.items():
        yield f"\n## {pair}\n"
        yield "| model | outputs, gradients really changed by | verdict | first line |"
        yield "|---|---|---|---|"
        for row in rows:
            said = verdict(row)
            if said in ("equal", "said unchanged"):
                continue
            really = ", ".join(f"{change:.1g}" for change in row.get("really", {}).values())
            line = row.get("line") or row.get("error", "").partition("\n")[0]
            yield f"| {row['model']} | {really} | {said} | {line.replace('|', '/')} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("--environments", type=Path, default=HERE.parents[1] / ".tox" / "history-environments")
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--kept", action="store_true", help="write the page of what was judged before, and run nothing")
    options = parser.parse_args()
    results = {}
    for old, new in pairs(options.versions):
        snapshots, result = (options.environments / name for name in (f"snapshots-{old}", f"{old}-{new}.json"))
        if not options.kept:
            run(environment(options.environments, old), "record", snapshots)
            run(environment(options.environments, new), "judge", snapshots, result)
        rows = json.loads(result.read_text("utf-8"))["rows"] if result.exists() else []
        results[f"transformers {old} → {new}"] = rows
    lines = [*HEAD, *table(results), *details(results)]
    options.results.write_text("\n".join(lines) + "\n", "utf-8")
    print("\n".join(table(results)))


def pairs(versions: list[str]) -> list[tuple[str, str]]:
    """Return each version with the next, and the first with the last."""
    return list(dict.fromkeys([*pairwise(versions), (versions[0], versions[-1])]))


HEAD = [
    "# Snapshots and the history of a library",
    "",
    "Made by `tox -e history`. A snapshot of each model is written under one released version and compared under the",
    f"next, with the same weights. Whether the function changed (by more than {CHANGED:g}) is measured apart.",
    "`equal` and `said unchanged` are right where it did not; a cause of the class `behavior` is a false alarm.",
    "Where it did, `first line` says that a layer whose change has a size is named there: whether it is the right one",
    "has to be read, below. A pair with fewer models than others was cut short.",
    "",
    "What they are, as read in the source of the library. Of `mistral`, `model` builds another mask; from 4.48.3 to",
    "4.57.1 one that masks the same, as bools: a query that may look at nothing gets zeros of a boolean mask, and a",
    "mean of one of the smallest floats, so its dtype is the change. Of `deberta_v2`, `attention.self` gives such a",
    "query a mean now, and gave it zeros. A synthetic mask has no such row, so that the run alone shows it. Not",
    "counted: a table of `whisper` that was frozen is trainable since 5.x, as its causes say. Gradients are",
    "compared as if nothing was frozen, and those of `mixtral`, whose experts are one parameter since 5.x, by the",
    "norm of all.",
    "",
]

if __name__ == "__main__":
    sys.exit(main())
