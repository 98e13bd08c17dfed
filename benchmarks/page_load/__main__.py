"""How long a browser takes to open the HTML report of many tests, in turns with an empty page.

    MODELPROBE_NODE_MODULES=.tox/browser/node python benchmarks/page_load

Needs Chromium, Node.js and the packages that `./dev browser` installs. Writes RESULTS.md beside this file. In each of
two models a weight grew by a tenth, so that all layers after it moved: both histograms of each are in the page.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.comparison import compare, diagnose
from pytest_modelprobe.report.html import render
from pytest_modelprobe.report.results import CaseResult, Results
from pytest_modelprobe.report.runs import Known, Observed, run_of

HERE = Path(__file__).parent
TESTS = 50
BLOCKS = (19, 197)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.fc1, self.act = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU()
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


def results(blocks: int) -> tuple[Results, int]:
    """Return the results of 50 tests of models with so many blocks, and the number of layers of each."""
    runs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), *(Block(8) for _ in range(blocks)), nn.Linear(8, 8))
        probe, x = ModelProbe(), torch.randn(16, 8)
        before = probe.run(model, x, loss="random", histograms=True)
        with torch.no_grad():
            model[0].weight.mul_(1.1)
        after = probe.run(model, x, loss="random", histograms=True)
        known = Known(after, diagnose(compare(after, before)), before)
        runs.append(run_of(Observed("Sequential", "run", after), known))
    tests = tuple(
        CaseResult(
            id=f"tests/test_models.py::test_model[{i}]", outcome="failed", duration=0.1, file="tests/test_models.py",
            line=3, message="stem: weights changed", runs=(runs[i % 2],),
        )
        for i in range(TESTS)
    )  # fmt: skip
    return Results(tests=tests, exit_status=1, root="page_load", seed=0, devices=("cpu",)), 5 * blocks + 3


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    packages = os.environ.get("MODELPROBE_NODE_MODULES")
    if not (chromium and packages):
        sys.exit("needs Chromium, and MODELPROBE_NODE_MODULES, the folder of Node.js packages of ./dev browser")
    with tempfile.TemporaryDirectory() as folder:
        pages = {"empty page": Path(folder, "empty.html")}
        pages["empty page"].write_text("<!doctype html><p>empty", "utf-8")
        for blocks in BLOCKS:
            data, layers = results(blocks)
            page = Path(folder, f"{layers}.html")
            page.write_text(render(data), "utf-8")
            pages[f"{TESTS} tests, {layers} layers each"] = page
        command = ["node", HERE / "open.mjs", chromium, packages, 7, *pages.values()]
        times = json.loads(subprocess.run(list(map(str, command)), check=True, capture_output=True).stdout)
        sizes = [page.stat().st_size / 1e6 for page in pages.values()]
    lines = [
        "# How long a report takes to open",
        "",
        "Command: `MODELPROBE_NODE_MODULES=.tox/browser/node python benchmarks/page_load`. Headless Chromium, two",
        "cores, medians of seven rounds in turns, in milliseconds from the request. Every layer moved.",
        "",
        "| page | MB | first paint | can be used |",
        "|---|---|---|---|",
    ]
    for name, size, found in zip(pages, sizes, times, strict=True):
        paint, ready = (statistics.median(column) for column in zip(*found, strict=True))
        lines.append(f"| {name} | {size:.1f} | {paint:,.0f} | {ready:,.0f} |")
    (HERE / "RESULTS.md").write_text("\n".join(lines) + "\n", "utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
