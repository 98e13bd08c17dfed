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
        self.path.write_text(page(self.verdicts, seconds=time.monotonic() - self.start), "utf-8")


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


def page(verdicts: Sequence[Verdict], *, seconds: float) -> str:
    """Return the page of a run: a table of all, then a section for each library."""
    of = {name: [one for one in verdicts if one.library == name] for name in sorted({v.library for v in verdicts})}
    head = ["", "models", "tests", "hold", "not applicable", "broken, explained", "broken, not explained"]
    parts = [
        "# The standard checks on real models",
        f"Command: `{COMMAND}`. {versions()}. Machine: {machine()}. {seconds / 60:.0f} minutes.",
        "The models are tiny and their weights are random: how good they are, nothing here says.",
        table(head, [*(row(*item) for item in of.items()), row("all", verdicts)]),
        *(section(*item) for item in of.items()),
    ]
    return "\n\n".join(parts) + "\n"


def section(library: str, verdicts: Sequence[Verdict]) -> str:
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


def row(name: str, verdicts: Sequence[Verdict]) -> tuple[object, ...]:
    """Return the line of one library, or of all."""
    counts = Counter(one.verdict for one in verdicts)
    kinds = (counts[kind] for kind in ("holds", "not applicable", "explained", "failed"))
    return name, len({(one.library, one.model) for one in verdicts}), len(verdicts), *kinds


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
