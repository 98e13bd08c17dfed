"""Compare commits of public repositories with those before them: `python evidence/repositories FOLDER`.

FOLDER holds a clone of each repository of `commits.json`, by its name. None of their code is kept here: `commits.json`
names commits and says what each does, read from its diff before the run. The environment needs what the tests import.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COMMITS = HERE / "commits.json"
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


def first_lines(results: dict[str, Any]) -> list[str]:
    """Return the first line of each model that changed, each once, the most frequent first."""
    pairs = [pair for test in results["tests"] for pair in test.get("base", ())]
    lines = Counter(pair["first_line"] for pair in pairs if pair["verdict"] == "changed")
    return [line for line, _ in lines.most_common()]


def rows(clones: Path, only: str) -> Iterator[str]:
    """Yield a row for each commit."""
    for repository in json.loads(COMMITS.read_text("utf-8")):
        folder = clones / repository["name"]
        tests = repository["tests"]
        for commit in repository["commits"] if only in repository["name"] else ():
            git(folder, "checkout", "-q", "-f", commit["commit"])
            with tempfile.TemporaryDirectory() as place:
                path = Path(place) / "results.json"
                plain, outcomes, _ = ran(folder, *tests)
                base = ["--modelprobe-base=HEAD~1", f"--modelprobe-json={path}"]
                compared, watched, said = ran(folder, *tests, *base)
                results = json.loads(path.read_text("utf-8")) if path.exists() else {"tests": [], "base": None}
            verdicts = Counter((results.get("base") or {}).get("verdicts") or {})
            changed, lines = verdicts["changed"], first_lines(results)
            told = "changed" if changed else "same" if verdicts.total() else "not comparable"
            if re.search(r"no file that they use differs", said) and not verdicts:
                told = "not run"
            same = "" if outcomes == watched else f"**{dict(outcomes)} → {dict(watched)}**"
            counted = ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items()))
            cells = (
                repository["name"], commit["commit"], commit["truth"], told, counted, "; ".join(lines[:2]), same,
                f"{plain:.0f}", f"{compared:.0f}",
            )  # fmt: skip
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(arguments: Sequence[str]) -> None:
    found = []
    for row in rows(Path(arguments[0]).resolve(), arguments[1] if len(arguments) > 1 else ""):
        print(row, flush=True)
        found.append(row)
    head = "| repository | commit | what it does | told | models | first line | outcomes | plain, s | compared, s |"
    table = [head, "|" + "---|" * head.count(" | ") + "---|", *found]
    kept = (
        RESULTS.read_text("utf-8").partition("\n## ")[0] if RESULTS.exists() else "# Commits of public repositories\n"
    )
    if len(arguments) > 1:  # one repository is printed only
        return
    RESULTS.write_text(f"{kept}\n## Commits\n\n" + "\n".join(table) + "\n", "utf-8")


main(sys.argv[1:])
