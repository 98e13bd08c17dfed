r"""What watching costs of a step in wall time, on as many threads as torch has: watched and unwatched steps in turns.

Prints a row of Markdown for each model: milliseconds of an unwatched step, the median ratio of pairs, and the middle
half. Run it on a quiet machine, once with each number of threads, and with memory kept by the allocator:

    OMP_NUM_THREADS=2 MALLOC_TOP_PAD_=536870912 MALLOC_TRIM_THRESHOLD_=4294967296 \
        MALLOC_MMAP_THRESHOLD_=4294967296 python benchmarks/steps.py [--steps 14]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import transformers
from torch import nn

from pytest_modelprobe import ModelProbe

Case = tuple[nn.Module, dict[str, torch.Tensor]]


def bert() -> Case:
    """Four blocks of width 256, 8 x 128 tokens."""
    config = transformers.BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    return model, {"input_ids": torch.randint(0, 1000, (8, 128))}


class ConvNeXtBlocks(nn.Module):
    """Four blocks as in ConvNeXt, of width 48."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(48, 48, 7, padding=3, groups=48),
                nn.GroupNorm(1, 48),
                nn.Conv2d(48, 192, 1),
                nn.GELU(),
                nn.Conv2d(192, 48, 1),
            )
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def convnext() -> Case:
    """Images of 128 x 128."""
    return ConvNeXtBlocks(), {"x": torch.randn(8, 3, 128, 128)}


def convolutions() -> Case:
    """Six convolutions with batch normalization, of width 64 to 256, images of 96 x 96."""

    def block(width: int, out: int, stride: int) -> list[nn.Module]:
        first = [nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
        return [*first, nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    layers = [nn.Conv2d(3, 64, 3, 2, 1), *block(64, 64, 1), *block(64, 128, 2), *block(128, 256, 2)]
    return nn.Sequential(*layers), {"input": torch.randn(8, 3, 96, 96)}


def step(model: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Return the seconds of a forward and a backward."""
    started = time.perf_counter()
    model.zero_grad(set_to_none=True)
    output: Any = model(**inputs)
    getattr(output, "last_hidden_state", output).square().mean().backward()
    return time.perf_counter() - started


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    steps = parser.parse_args().steps
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}\n\n| model | ms | ratio |\n|---|---|---|")
    for make in (bert, convnext, convolutions):
        torch.manual_seed(0)
        model, inputs = make()
        pairs = []
        for _ in range(steps + 2):
            plain = step(model, inputs)
            with ModelProbe() as probe:
                probe.watch(model, isolate=False)
                pairs.append((plain, step(model, inputs)))
        plains, ratios = zip(*((plain, watched / plain) for plain, watched in pairs[2:]), strict=True)
        low, _, high = statistics.quantiles(ratios, n=4)
        shown = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
        print(f"| {make.__name__} | {1e3 * statistics.median(plains):.0f} | {shown} |")


if __name__ == "__main__":
    main()
