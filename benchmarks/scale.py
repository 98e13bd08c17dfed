"""Memory and time of a watch against the number of steps, where both should be flat, and of layers, where linear."""

from __future__ import annotations

import gc
import time
import tracemalloc
from pathlib import Path

import torch
from torch import nn

from pytest_modelprobe import Watch

STEPS = (1, 10, 100, 1000)
LAYERS = (10, 100, 1000, 10_000)
_LAYERS_OF_STEPS = 8
FIGURE = Path(__file__).with_name("scale.svg")

Point = tuple[int, float, float]
"""Of so many: milliseconds (of a step, or of attaching and one forward), and kilobytes held."""


def measure() -> dict[str, list[Point]]:
    """Return what steps and layers cost."""
    return {"steps": [_of_steps(n) for n in STEPS], "layers": [_of_layers(n) for n in LAYERS]}


def _mlp(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Tanh() if i % 2 else nn.Linear(8, 8) for i in range(layers)))


def _of_steps(steps: int) -> Point:
    model, x = _mlp(_LAYERS_OF_STEPS), torch.randn(4, 8)

    def run() -> None:
        for _ in range(steps):
            model.zero_grad()
            model(x).square().mean().backward()

    with Watch(model):
        start = time.perf_counter()
        run()
        milliseconds = (time.perf_counter() - start) * 1e3 / steps
    tracemalloc.start()
    with Watch(model) as watch:
        run()
        held = _held()
        assert watch.record.forwards == steps
    tracemalloc.stop()
    return steps, milliseconds, held


def _of_layers(layers: int) -> Point:
    model, x = _mlp(layers), torch.randn(4, 8)
    start = time.perf_counter()
    with Watch(model), torch.no_grad():
        model(x)
    milliseconds = (time.perf_counter() - start) * 1e3
    tracemalloc.start()
    with Watch(model), torch.no_grad():
        model(x)
        held = _held()
    tracemalloc.stop()
    return layers, milliseconds, held


def _held() -> float:
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / 1e3


def draw(results: dict[str, list[Point]]) -> None:
    """Draw both into `scale.svg`."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "scale"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2))
    titles = {"steps": f"{_LAYERS_OF_STEPS} layers, against steps", "layers": "one forward, against layers"}
    for axis, (name, points) in zip(axes, results.items(), strict=True):
        counts, milliseconds, kilobytes = zip(*points, strict=True)
        unit = "ms a step" if name == "steps" else "ms, attach and detach included"
        axis.plot(counts, milliseconds, marker="o", label=unit)
        axis.plot(counts, kilobytes, marker="s", label="kB held")
        axis.set(xscale="log", yscale="log", xlabel=name, title=titles[name])
        axis.grid(visible=True, alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})


def table(results: dict[str, list[Point]]) -> list[str]:
    """Return both as tables, and the figure."""
    lines = [f"| steps of {_LAYERS_OF_STEPS} layers | ms a step | kB held |", "|---|---|---|"]
    lines += [f"| {n:,} | {ms:.1f} | {kb:,.0f} |" for n, ms, kb in results["steps"]]
    lines += ["", "| layers, one forward | ms, attach and detach included | kB held |", "|---|---|---|"]
    lines += [f"| {n:,} | {ms:,.1f} | {kb:,.0f} |" for n, ms, kb in results["layers"]]
    return [*lines, "", f"![Memory and time against steps and layers]({FIGURE.name})"]
