"""What snapshots say of the upgrades of libraries: written under one released version, compared under the next.

    python evidence/history                                        # all pairs, and writes RESULTS.md
    python evidence/history --pairs timm torch_geometric-2.3.1     # those whose names begin so
    python evidence/history --pairs timm-0.6.13 --slice 1/2        # every second model of a pair
    python evidence/history --kept                                 # the page of what was found before
    python evidence/history --eligible                             # which models should pass if their function is kept

Each version of a library gets a virtual environment of its own, kept for the next run, and with it the wheel of this
checkout. Four processes then run one after the other: `truth.py` saves weights and what each model computes in the
first version, pytest writes snapshots with these weights, `truth.py` says what differs in the second version, and
pytest compares. Rows of earlier slices and pairs are kept.

Which models no test should fail while their function is the same is written into `eligible.json` by `--eligible`,
without the tool, and committed before a run.
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
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from eligible import differing
from expected import EXPECTED, FAILED_BEFORE, FALSE

HERE = Path(__file__).parent
ELIGIBLE = HERE / "eligible.json"
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

    @property
    def title(self) -> str:
        return f"{self.library} {self.old} → {self.new}"


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

    def python(self, library: str, version: str, *, with_checkout: bool = True) -> Path:
        """Return the interpreter of an environment with that version of a library, and with this checkout."""
        home = self._folder / f"{library}-{version}"
        python = home / "bin" / "python"
        if not (home / "ready").exists():
            venv.create(home, clear=True, with_pip=True)
            beside = BESIDE.get(library, []) + BESIDE.get(home.name, [])
            self._pip(python, "install", f"{library}=={version}", "torch==2.13.0", "numpy", "pytest", "syrupy", *beside)
            (home / "ready").touch()
        if with_checkout:
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


def compared_facts(pair: Pair, environments: Environments, work: Path, part: str) -> dict[str, dict[str, str]]:
    """Return each model of a pair, and what makes it not eligible: nothing if it is."""
    work.mkdir(parents=True, exist_ok=True)
    sides = []
    for version in (pair.old, pair.new):
        path = work / f"facts-{version}.json"
        python = environments.python(pair.library, version, with_checkout=False)
        _run(python, work, "facts.log", HERE / "facts.py", pair.library, work, path, part)
        sides.append(json.loads(path.read_text("utf-8")))
    old, new = sides
    found = {}
    for model in old:
        error = old[model].get("error") or new.get(model, {"error": "no such model"}).get("error")
        found[model] = {"error": error} if error else differing(old[model], new[model])
    return found


def write_eligible(found: dict[str, dict[str, dict[str, str]]]) -> None:
    """Write the list of models, with those of pairs and models that were not looked at now."""
    lists = json.loads(ELIGIBLE.read_text("utf-8")) if ELIGIBLE.exists() else {}
    for pair, models in found.items():
        lists[pair] = lists.get(pair, {}) | models
    ELIGIBLE.write_text(json.dumps(lists, indent=1, ensure_ascii=False) + "\n", "utf-8")


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
    if not test.get("snapshots"):
        return {"error": test.get("message") or test["outcome"]}
    (found,) = test["snapshots"]
    if found["verdict"] not in ("same", "changed"):
        return {"error": found.get("first_line", "")}
    return {
        "passed": test["outcome"] == "passed",
        "stale": bool(found.get("notes")),
        "first_line": found.get("first_line", ""),
        "causes": [{key: cause[key] for key in ("kind", "layer", "said")} for cause in found.get("causes", ())],
        "text": found.get("text", ""),
        "lines": len(test.get("failure", "").splitlines()),
    }


# --- the page ---------------------------------------------------------------------------------------------------------

SAME = ["passes", "by the rule", "false"]
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
        is_said = (unchanged and not blamed) or _names_output_of_one(row)
        return "by the rule" if is_said and why_not(pair, row["model"]) else "false"
    if row["passed"]:
        return "missed"
    pattern, _ = EXPECTED.get((pair, row["model"]), ("(?!)", ""))
    if re.search(f"(?:^|: |; |^possibly )(?:{pattern})", row["first_line"]):
        return "first line"
    if re.search(f"^(?:{pattern})", row["text"], re.MULTILINE):
        return "in the table"
    return "missed" if unchanged else "wrong"


def why_not(pair: str, model: str) -> dict[str, str]:
    """Return what makes a model not eligible: then a test may fail though the function is the same."""
    found: dict[str, str] = _eligible().get(pair, {}).get(model, {"unknown": "not in the list"})
    return found


@cache
def _eligible() -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, dict[str, str]]] = json.loads(ELIGIBLE.read_text("utf-8")) if ELIGIBLE.exists() else {}
    return found


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
    columns = ["models", "passes", "stale", *VERDICTS[1:], "lines", "eligible", "of these pass", "before"]
    yield "| pair | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    counted = {pair: _counted(pair, rows) for pair, rows in results.items()}
    for name, found in {**counted, "all": sum(counted.values(), Counter())}.items():
        yield f"| {name} | " + " | ".join(str(found[column]) for column in columns) + " |"


def _counted(pair: str, rows: list[Row]) -> Counter[str]:
    verdicts = {row["model"]: verdict(pair, row) for row in rows}
    found = Counter(verdicts.values())
    found.update(models=len(rows), lines=sum(row.get("lines", 0) for row in rows))
    found["stale"] = sum(verdicts[row["model"]] == "passes" and row["stale"] for row in rows)
    eligible = [model for model, name in verdicts.items() if name in SAME and not why_not(pair, model)]
    found["eligible"] = len(eligible)
    found["of these pass"] = sum(verdicts[model] == "passes" for model in eligible)
    found["before"] = sum(model not in FAILED_BEFORE[pair].split() for model in eligible)
    return found


def details(pair: str, rows: list[Row]) -> Iterator[str]:
    yield "| model | outputs, gradients really changed by | first line | reason |"
    yield "|---|---|---|---|"
    for row in rows:
        really = ", ".join(f"{change:.1g}" for change in row["really"].values()) if "really" in row else ""
        really += " (in float32)" if row.get("not in float64") else ""
        name = (pair, row["model"])
        why = EXPECTED[name][1] if name in EXPECTED else FALSE.get(name, "")
        line = row.get("first_line") or row.get("error", "")
        if not why and "really" in row and not changed(row):
            why = "; ".join(f"{name}: {place}" for name, place in why_not(pair, row["model"]).items())
        cells = (row["model"], really, line, why or ", ".join(row.get("unmatched", [])))
        yield "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


TITLES = {
    "by the rule": "Unchanged, and not eligible: the test fails by the rule",
    "false": "Unchanged, and the test fails although the model is eligible, or for a reason that is none",
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
    "Where the function is the same, the test should pass; it may have a *stale* file. *By the rule* is a failure",
    'that says "output unchanged" of a model that is not eligible: its checkpoint, what is trainable, its inputs or',
    "outputs, attributes of both versions or mode layers differ, as `eligible.py` finds without the tool",
    "(`eligible.json`, written and committed before the run). *False* is any other failure. Where the function",
    "changed, the first line should name what changed, as read in the two sources (`expected.py`); *wrong* is that no",
    "line does, *missed* that the test passes or says that only the structure differs. *Not run* are models that a",
    "version lacks or cannot run, and those for which the first version has no weights. *lines* are those that pytest",
    "prints of failures. The last columns count the eligible models whose function is the same, how many of these",
    "pass, and how many passed when any difference of structure failed.",
    "",
    "The lists stood before the tool compared, with two exceptions: that of timm 0.9.16 was written before and",
    "committed after; in that of transformers marian and whisper were taken out and mt5 put in afterwards, because",
    "version 5 makes weights trainable and ties them when it loads a model, and the list was of models as they are",
    "made. In the first comparison by the rule 255 of 284 eligible models of four pairs passed: 101 of 105 of timm",
    "0.9.16, 29 of 30 of diffusers, 80 of 80 of torch_geometric, 45 of 69 of transformers. What failed showed what",
    "was wrong in the code of the rule, and the table is of the code as it is since. The pair of timm 0.6.13 was",
    "compared after most of that, with a list that was committed before: 82 of 84 passed. In one of its four",
    "comparisons efficientnetv2_rw_t failed, and in no other: its gradients in float32 moved by 2 %, where their",
    "noise was measured as more than all of them.",
    "",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=[""], metavar="NAME", help="how names of pairs begin (all)")
    parser.add_argument("--slice", default="1/1", metavar="I/N", help="every N-th model, from the I-th (all)")
    parser.add_argument("--environments", type=Path, default=ROOT / ".tox" / "history-environments")
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--kept", action="store_true", help="write the page of what was found before, and run nothing")
    parser.add_argument("--eligible", action="store_true", help=f"write {ELIGIBLE.name}, and compare nothing")
    options = parser.parse_args()
    folder = options.environments / "results"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [] if options.kept else [pair for pair in PAIRS if pair.name.startswith(tuple(options.pairs))]
    environments = Environments(options.environments)
    if options.eligible:
        facts = options.environments / "facts"
        for pair in wanted:
            write_eligible({pair.title: compared_facts(pair, environments, facts / pair.name, options.slice)})
        return
    for pair in wanted:
        found = judged(pair, environments, folder / pair.name, options.slice)
        kept = _kept(folder, pair) if options.slice != "1/1" else []
        rows = {row["model"]: row for row in [*kept, *found]}
        (folder / f"{pair.name}.json").write_text(json.dumps([*rows.values()], indent=1), "utf-8")
    results = {pair.title: _kept(folder, pair) for pair in PAIRS}
    options.results.write_text("\n".join(page(results)) + "\n", "utf-8")
    print("\n".join(table(results)))


def _kept(folder: Path, pair: Pair) -> list[Row]:
    path = folder / f"{pair.name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else []


if __name__ == "__main__":
    main()
