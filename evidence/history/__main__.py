"""What snapshots say of the upgrades of libraries: written under one released version, compared under the next.

    python evidence/history                                        # all pairs, and writes RESULTS.md
    python evidence/history --pairs timm torch_geometric-2.3.1     # those whose names begin so
    python evidence/history --pairs timm-0.6.13 --slice 1/2        # every second model of a pair
    python evidence/history --kept                                 # the page of what was found before

Each version of a library gets a virtual environment of its own, kept for the next run, and with it the wheel of this
checkout. Four processes then run one after the other: `truth.py` saves weights and what each model computes in the
first version, pytest writes snapshots with these weights, `truth.py` says what differs in the second version, and
pytest compares. Rows of earlier slices and pairs are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from expected import EXPECTED, FALSE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHANGED = 1e-9
"""Relative change of outputs or gradients above which the function is another, measured in float64."""
CHANGED_IN_FLOAT32 = 1e-5
"""The same for a model that cannot run in float64: reordered kernels stay below."""
BESIDE = {
    "timm": ["torchvision==0.28.0"],
    "diffusers-0.27.2": ["huggingface_hub<0.26"],
    "diffusers-0.35.2": ["huggingface_hub<1"],
}
"""What a library, or a version of it, needs beside it."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """Two versions of a library."""

    library: str
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.library}-{self.old}-{self.new}"


PAIRS = [
    Pair("timm", "0.6.13", "0.9.16"),
    Pair("timm", "0.9.16", "1.0.31"),
    Pair("diffusers", "0.27.2", "0.35.2"),
    Pair("torch_geometric", "2.3.1", "2.7.0"),
    Pair("transformers", "4.57.6", "5.23.0"),
]


class Environments:
    """The virtual environments, in a folder; the wheel of this checkout is made once, when it is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _wheel(self) -> Path:
        folder = self._folder / "wheel"
        shutil.rmtree(folder, ignore_errors=True)
        self._pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", folder, ROOT)
        return next(folder.glob("*.whl"))

    def python(self, library: str, version: str) -> Path:
        """Return the interpreter of an environment with that version of a library, and with this checkout."""
        home = self._folder / f"{library}-{version}"
        python = home / "bin" / "python"
        if not (home / "ready").exists():
            venv.create(home, clear=True, with_pip=True)
            beside = BESIDE.get(library, []) + BESIDE.get(home.name, [])
            self._pip(python, "install", f"{library}=={version}", "torch==2.13.0", "numpy", "pytest", "syrupy", *beside)
            (home / "ready").touch()
        self._pip(python, "install", "--no-deps", "--force-reinstall", self._wheel)
        return python

    def _pip(self, python: str | Path, *arguments: object) -> None:
        subprocess.run([python, "-m", "pip", "-q", *map(str, arguments)], check=True)


def judged(pair: Pair, environments: Environments, work: Path, part: str) -> list[Row]:
    """Return a row for each model of a pair, or of a slice of it."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shutil.copy(HERE / "test_models.py", work / f"test_{pair.library}.py")
    (work / "pytest.ini").write_text("[pytest]\n", "utf-8")  # not the one of this checkout
    old, new = (environments.python(pair.library, version) for version in (pair.old, pair.new))
    truth, tests = HERE / "truth.py", ["-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore"]
    _run(old, work, "truth.log", truth, "save", pair.library, work, part)
    _run(old, work, "written.log", *tests, "--snapshot-update")
    _run(new, work, "truth.log", truth, "compare", pair.library, work)
    _run(new, work, "compared.log", *tests, "--modelprobe-json", "compared.json")
    return list(_rows(work))


def _run(python: Path, work: Path, log: str, *arguments: object) -> None:
    """Run Python in the folder of a pair, and append what it prints to a file there."""
    settings = {
        **os.environ, "PYTHONPATH": str(HERE), "PYTHONSAFEPATH": "1", "COLUMNS": "120",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
    }  # fmt: skip
    with (work / log).open("a", encoding="utf-8") as file:
        command = [str(python), *map(str, arguments)]
        code = subprocess.run(command, cwd=work, env=settings, stdout=file, stderr=file, check=False).returncode
    if code not in (0, 1):  # 1: tests fail, which is what is counted
        raise SystemExit(f"{' '.join(command)} ended with {code}: see {work / log}")


def _rows(work: Path) -> Iterator[Row]:
    """Yield what is known of each model: what really changed, and what the test said."""
    path = work / "compared.json"
    tests = json.loads(path.read_text("utf-8"))["tests"] if path.exists() else []
    said = {test["id"].partition("[")[2].removesuffix("]"): test for test in tests}
    for path in sorted(work.glob("*.truth.json"), key=lambda path: path.stat().st_mtime):
        row = json.loads(path.read_text("utf-8"))
        test = said.get(row["model"])
        yield {**row, **_said(test)} if test else {"error": "no test", **row}


def _said(test: dict[str, Any]) -> Row:
    """Return what a test said: whether it passed, its first line, its causes and the whole text."""
    if not test["snapshots"]:
        return {"error": test["message"] or test["outcome"]}
    (found,) = test["snapshots"]
    if found["verdict"] not in ("same", "changed"):
        return {"error": found["first_line"]}
    return {
        "passed": test["outcome"] == "passed",
        "first_line": found["first_line"],
        "causes": [{key: cause[key] for key in ("kind", "layer", "said")} for cause in found["causes"]],
        "text": found["text"],
        "lines": len(test["failure"].splitlines()) if test["failure"] else 0,
    }


# --- the page ---------------------------------------------------------------------------------------------------------

SAME = ["passes", "said unchanged", "false"]
OTHER = ["first line", "in the table", "wrong", "missed"]
VERDICTS = [*SAME, *OTHER, "not run"]


def changed(row: Row) -> bool:
    limit = CHANGED_IN_FLOAT32 if row["not in float64"] else CHANGED
    return any(not change <= limit for change in row["really"].values())


def verdict(pair: str, row: Row) -> str:
    """Return what became of one model, a column of the table."""
    if "error" in row or (changed(row) and _lost(row)):
        return "not run"
    unchanged = row["first_line"].startswith("output unchanged")
    if not changed(row):
        if row["passed"]:
            return "passes"
        blamed = "  behavior  " in row["text"]  # a cause of that class has an effect
        # The path of an output that one version alone has says so too.
        return "said unchanged" if (unchanged and not blamed) or _names_output_of_one(row) else "false"
    if row["passed"]:
        return "missed"
    pattern, _ = EXPECTED.get((pair, row["model"]), ("(?!)", ""))
    if re.search(f"(?:^|: |; |^possibly )(?:{pattern})", row["first_line"]):
        return "first line"
    if re.search(f"^(?:{pattern})", row["text"], re.MULTILINE):
        return "in the table"
    return "missed" if unchanged else "wrong"


def _names_output_of_one(row: Row) -> bool:
    return any(f"{path} " in row["first_line"] for path in row["outputs of one"])


def _lost(row: Row) -> list[str]:
    """Return the weights of the second version for which the first had none: what they compute is not comparable."""
    return [line for line in row["unmatched"] if line.endswith(" = None")]


def page(results: dict[str, list[Row]]) -> Iterator[str]:
    yield from HEAD
    yield from table(results)
    for pair, rows in results.items():
        yield f"\n## {pair}"
        for name in VERDICTS[1:]:
            found = [row for row in rows if verdict(pair, row) == name]
            if found:
                yield f"\n### {TITLES[name]}\n"
                yield from details(pair, found)


def table(results: dict[str, list[Row]]) -> Iterator[str]:
    yield "| pair | models | " + " | ".join(VERDICTS) + " | lines |"
    yield "|---" * (len(VERDICTS) + 3) + "|"
    total: Counter[str] = Counter()
    for pair, rows in results.items():
        found = Counter(verdict(pair, row) for row in rows)
        found.update(models=len(rows), lines=sum(row.get("lines", 0) for row in rows))
        total += found
        yield _line(pair, found)
    yield _line("all", total)


def _line(name: str, found: Counter[str]) -> str:
    return f"| {name} | " + " | ".join(str(found[column]) for column in ("models", *VERDICTS, "lines")) + " |"


def details(pair: str, rows: list[Row]) -> Iterator[str]:
    yield "| model | outputs, gradients really changed by | first line | reason |"
    yield "|---|---|---|---|"
    for row in rows:
        really = ", ".join(f"{change:.1g}" for change in row["really"].values()) if "really" in row else ""
        really += " (in float32)" if row.get("not in float64") else ""
        name = (pair, row["model"])
        why = EXPECTED[name][1] if name in EXPECTED else FALSE.get(name, "")
        line = row.get("first_line") or row.get("error", "")
        cells = (row["model"], really, line, why or ", ".join(row.get("unmatched", [])))
        yield "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


TITLES = {
    "said unchanged": "Said: output unchanged, structure differs",
    "false": "False verdicts",
    "first line": "Changed, and named in the first line",
    "in the table": "Changed, and named further down",
    "wrong": "Changed, and not named",
    "missed": "Changed, and missed",
    "not run": "Not run",
}
HEAD = [
    "# Snapshots and the history of libraries",
    "",
    "Made by `tox -e history`, with torch 2.13.0 on the CPU. A snapshot of each model is written under one released",
    "version and compared under the next by a test, with the same weights: perturbed, so that nothing is at zero or",
    "one. Whether the function changed is measured apart, in float64: outputs that both versions have, and the",
    f"gradients of a random projection of each, by more than {CHANGED:g}.",
    "",
    'Where the function is the same, the test should pass; *said unchanged* is that it fails with "output unchanged;',
    'structure differs"; *false* is any other failure. Where the function changed, the first line should name what',
    "changed, as read in the two sources (`expected.py`); *wrong* is that no line does, *missed* that the test passes",
    "or says that only the structure differs. *Not run* are models that a version lacks or cannot run, and those for",
    "which the first version has no weights. *lines* are those that pytest prints of failures.",
    "",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=[""], metavar="NAME", help="how names of pairs begin (all)")
    parser.add_argument("--slice", default="1/1", metavar="I/N", help="every N-th model, from the I-th (all)")
    parser.add_argument("--environments", type=Path, default=ROOT / ".tox" / "history-environments")
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--kept", action="store_true", help="write the page of what was found before, and run nothing")
    options = parser.parse_args()
    folder = options.environments / "results"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [] if options.kept else [pair for pair in PAIRS if pair.name.startswith(tuple(options.pairs))]
    environments = Environments(options.environments)
    for pair in wanted:
        found = judged(pair, environments, folder / pair.name, options.slice)
        kept = _kept(folder, pair) if options.slice != "1/1" else []
        rows = {row["model"]: row for row in [*kept, *found]}
        (folder / f"{pair.name}.json").write_text(json.dumps([*rows.values()], indent=1), "utf-8")
    results = {f"{pair.library} {pair.old} → {pair.new}": _kept(folder, pair) for pair in PAIRS}
    options.results.write_text("\n".join(page(results)) + "\n", "utf-8")
    print("\n".join(table(results)))


def _kept(folder: Path, pair: Pair) -> list[Row]:
    path = folder / f"{pair.name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else []


if __name__ == "__main__":
    main()
