"""What the runs need: torchvision's operators for timm, and the page that ``--results PATH`` writes."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

COMMAND = "./dev real-models"
ONE = "pytest evidence/real_models/test_timm.py --results evidence/real_models/RESULTS.md"
VERSIONS = ("pytest-modelprobe", "torch", "transformers", "timm")


def define_operators() -> None:
    """Declare what torchvision imports of its compiled part, where that is made for another build of torch."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        KEPT.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ImportError:
        pass


KEPT: list[torch.library.Library] = []
"""A library takes its operators with it when it goes."""
define_operators()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one check said of one model."""

    library: str
    model: str
    check: str
    verdict: str
    """``holds``, ``not applicable``, ``explained`` (a break that is) or ``failed``."""
    line: str = ""
    """The first line of a break; why a check is not applicable."""
    explanation: str = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, metavar="PATH", help="write what the checks said of the models to a page")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--results") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(config.getoption("--results")))


class Results:
    """Collects the verdicts of a run and writes the page at its end."""

    def __init__(self, path: Path) -> None:
        self.path, self.verdicts, self.start = path, list[Verdict](), time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome == "failed":
            self.verdicts.append(verdict_of(report))

    @pytest.hookimpl(tryfirst=True)  # of a run that is interrupted, other plugins may raise
    def pytest_sessionfinish(self) -> None:
        before = self.path.read_text("utf-8") if self.path.exists() else ""
        self.path.write_text(page(self.verdicts, seconds=time.monotonic() - self.start, before=before), "utf-8")


def verdict_of(report: pytest.TestReport) -> Verdict:
    """Return what a test said. Its name ends with ``[model-check]``."""
    model, _, check = report.nodeid.partition("[")[2].removesuffix("]").rpartition("-")
    explanation = getattr(report, "wasxfail", "")
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.outcome == "passed":
        verdict, line = "holds", ""
    elif report.outcome == "failed" or explanation:
        verdict = "explained" if explanation else "failed"
        line = (str(report.longrepr) if crash is None else crash.message).partition("\n")[0]
    else:
        assert isinstance(report.longrepr, tuple)
        verdict, line = "not applicable", report.longrepr[2].partition(": ")[2].partition(": ")[2]
    return Verdict(
        library=Path(report.nodeid.partition("::")[0]).stem.removeprefix("test_"),
        model=model,
        check=check,
        verdict=verdict,
        line=line.removeprefix("AssertionError: "),
        explanation=explanation,
    )


HEAD = ("", "models", "tests", "hold", "not applicable", "broken, explained", "broken, not explained")


def page(verdicts: Sequence[Verdict], *, seconds: float, before: str = "") -> str:
    """Return the page of a run: a table of all, then a section for each library.

    Args:
        verdicts: What the run said.
        seconds: How long it took.
        before: The page as it is: of a library that did not run it keeps its row and its section.
    """
    of = {name: [one for one in verdicts if one.library == name] for name in {one.library for one in verdicts}}
    ran = f"{versions()}. Machine: {machine()}. {seconds / 60:.0f} minutes."
    sections = sections_of(before) | {name: section(name, ran, those) for name, those in of.items()}
    rows = rows_of(before) | {name: row(those) for name, those in of.items()}
    known = sorted(rows.keys() & sections.keys())
    parts = [
        "# The standard checks on real models",
        f"Command: `{COMMAND}`; `{ONE}` writes the part of one library alone.",
        "The models are tiny and their weights are random: how good they are, nothing here says.",
        table(
            HEAD,
            [
                *((name, *rows[name]) for name in known),
                ("all", *map(sum, zip(*(rows[name] for name in known), strict=True))),
            ],
        ),
        *(sections[name] for name in known),
    ]
    return "\n\n".join(parts) + "\n"


def sections_of(page: str) -> dict[str, str]:
    """Return the section of each library on a page."""
    _, *sections = page.strip().split("\n\n## ")
    return {section.partition("\n")[0]: f"## {section}" for section in sections}


def rows_of(page: str) -> dict[str, tuple[int, ...]]:
    """Return the counts of each library in the table at the head of a page."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.partition("\n## ")[0].split("\n")]
    return {
        name: tuple(map(int, counts))
        for name, *counts in lines
        if len(counts) == len(HEAD) - 1 and all(count.isdecimal() for count in counts)
    }


def section(library: str, ran: str, verdicts: Sequence[Verdict]) -> str:
    """Return what is said of the models of one library."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in verdicts:
        if one.verdict == "not applicable":
            reasons[one.check, one.line].append(one.model)
    of_check = sorted(reasons.items(), key=lambda item: (item[0][0], -len(item[1]), item[0][1]))
    broken = [
        (one.model, f"`{one.check}`", one.line, one.explanation or "**not explained**")
        for one in verdicts
        if one.verdict in ("explained", "failed")
    ]
    parts = [
        f"## {library}",
        ran,
        ", ".join(dict.fromkeys(one.model for one in verdicts)),
        "### Broken",
        table(["model", "check", "what the check says", "why that is true"], broken),
        "### Not applicable",
        table(
            ["check", "reason", "models", "which"],
            [(f"`{check}`", reason, len(models), listed(models)) for (check, reason), models in of_check],
        ),
    ]
    return "\n\n".join(parts)


def row(verdicts: Sequence[Verdict]) -> tuple[int, ...]:
    """Return the counts of one library."""
    counts = Counter(one.verdict for one in verdicts)
    kinds = (counts[kind] for kind in ("holds", "not applicable", "explained", "failed"))
    return len({one.model for one in verdicts}), len(verdicts), *kinds


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    lines = [f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(list(head)) + "|", *lines[1:]])


def listed(models: Sequence[str], *, most: int = 6) -> str:
    """Return the first of the names, and how many more there are."""
    more = f" and {len(models) - most} more" if len(models) > most else ""
    return ", ".join(models[:most]) + more


def versions() -> str:
    def one(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"no {name}"

    return ", ".join(one(name) for name in VERSIONS)


def machine() -> str:
    return f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, no GPU used"
