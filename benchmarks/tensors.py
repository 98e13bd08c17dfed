"""What one tensor costs, in sums of it: the nearest thing to reading it once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from pytest_modelprobe.statistics import reduce

Job = Callable[[], object]

SHAPES = {"25 MB": (8, 64, 112, 112), "200 MB": (64, 64, 112, 112)}


def layouts(shape: tuple[int, ...]) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Return the same numbers in each layout, with the axis of its units; plainly: without units."""
    x = torch.randn(shape)
    return {
        "contiguous": (x, None),
        "contiguous, range of each channel": (x, -3),
        "channels_last, range of each channel": (x.to(memory_format=torch.channels_last), -3),
        "not contiguous": (x.transpose(-1, -2), None),
        "no zeros possible": (x.abs() + 1, None),
    }


def measure(rounds: int = 9) -> dict[str, dict[str, tuple[float, float]]]:
    """Return medians of the time of statistics, and with the fingerprint, in sums of the tensor in the same round.

    It is the time of the processor, on one thread.
    """
    results: dict[str, dict[str, tuple[float, float]]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for size, shape in SHAPES.items():
        results[size] = {}
        for name, (x, axis) in layouts(shape).items():
            results[size][name] = _ratios(x, axis, rounds)
    torch.set_num_threads(threads)
    return results


def _ratios(x: torch.Tensor, axis: int | None, rounds: int) -> tuple[float, float]:
    jobs: list[Job] = [
        lambda: x.sum(),
        lambda: reduce(x, axis=axis, fingerprint=False),
        lambda: reduce(x, axis=axis),
    ]
    seconds: list[list[float]] = [[] for _ in jobs]
    for turn in range(-2, rounds):
        for job, times in zip(jobs, seconds, strict=True):
            start = time.process_time()
            job()
            if turn >= 0:
                times.append(time.process_time() - start)
    base, *others = seconds
    one, two = (statistics.median(a / b for a, b in zip(times, base, strict=True)) for times in others)
    return one, two


def table(results: dict[str, dict[str, tuple[float, float]]]) -> list[str]:
    """Return a table of layouts by sizes."""
    sizes = list(results)
    heads = " | ".join(f"{size}: statistics | with fingerprint" for size in sizes)
    lines = [f"| float32 tensor | {heads} |", f"|---|{'---|' * 2 * len(sizes)}"]
    for name in results[sizes[0]]:
        cells = (f"{value:.1f}" for size in sizes for value in results[size][name])
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines
