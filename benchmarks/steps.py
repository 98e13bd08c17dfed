r"""What watching costs of a step in wall time, on one thread and on two, and what that says of more.

Of each model the unwatched step, the watched one, hooks that take one sum, and hooks as one writes them by hand run in
turns, on one thread and on two. A step on c cores is taken to last ``serial + parallel / c``, and what is added to it
likewise. Two numbers of threads give both parts, and so the ratio on 8, 16 and 64. Two hyperthreads are less than two
cores, so this says too much of the serial part here.

Run it on a quiet machine, and with memory kept by the allocator:

    OMP_NUM_THREADS=2 MALLOC_TOP_PAD_=536870912 MALLOC_TRIM_THRESHOLD_=4294967296 \
        MALLOC_MMAP_THRESHOLD_=4294967296 python benchmarks/steps.py [--rounds 11] [MODEL ...]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from modes import Step, in_turns, naive, nothing, ratios, step_of, unwatched, watched
from torch import nn

Case = tuple[nn.Module, dict[str, Any]]


def mlp() -> Case:
    """Four layers of width 64, a batch of 32."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers), {"input": torch.randn(32, 64)}


def bert() -> Case:
    """Four blocks of width 256, 8 x 128 tokens."""
    config = transformers.BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    return model, {"input_ids": torch.randint(0, 1000, (8, 128))}


def llama() -> Case:
    """Six blocks of width 512, 4 x 128 tokens."""
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_attention_heads=8
    )
    return transformers.LlamaModel(config), {"input_ids": torch.randint(0, 1000, (4, 128)), "use_cache": False}


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


def of_timm(name: str, size: int) -> Callable[[], Case]:
    """Return what makes a model of timm, four images of this size."""

    def make() -> Case:
        import timm

        return timm.create_model(name, pretrained=False), {"input": torch.randn(4, 3, size, size)}

    return make


CASES: dict[str, Callable[[], Case]] = {
    function.__name__: function for function in (mlp, bert, llama, convnext, convolutions)
} | {name: of_timm(name, 160) for name in ("convnext_atto", "resnet34", "mobilenetv3_small_100")}


@contextlib.contextmanager
def one_sum(model: nn.Module) -> Iterator[Step]:
    """Takes one sum of each output and of its gradient."""

    def add_up(x: torch.Tensor) -> None:
        x.detach().sum()

    def see(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            add_up(output)
            if output.requires_grad:
                output.register_hook(add_up)

    handles = [module.register_forward_hook(see) for module in model.modules()]
    yield nothing
    for handle in handles:
        handle.remove()


MODES = {"unwatched": unwatched, "watched": watched, "one sum": one_sum, "naive hooks": naive}


def parts(one: float, two: float) -> tuple[float, float]:
    """Return the serial and the parallel part of a time on one thread and on two.

    >>> parts(3.0, 2.0)
    (1.0, 2.0)
    """
    parallel = min(max(2 * (one - two), 0), one)
    return one - parallel, parallel


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    without_timm = [] if importlib.util.find_spec("timm") else [n for n, f in CASES.items() if f.__name__ == "make"]
    if without_timm:
        print(f"timm is not installed, so left out: {', '.join(without_timm)}\n")
    print(f"torch {torch.__version__}\n\n| model | threads | step, ms | {' | '.join(list(MODES)[1:])} |")
    print(f"|---|---|---|{'---|' * (len(MODES) - 1)}")
    told = []
    for name, make in CASES.items():
        if name in without_timm or (options.models and name not in options.models):
            continue
        torch.manual_seed(0)
        model, inputs = make()
        step, calls = step_of(model, inputs), sum(1 for _ in model.modules())
        plain, added = [], []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            times = in_turns(model, step, MODES, options.rounds)
            shown = [f"{middle:.2f} ({low:.2f} to {high:.2f})" for low, middle, high in ratios(times).values()]
            plain.append(statistics.median(times["unwatched"]))
            added.append(plain[-1] * (ratios(times)["watched"][1] - 1))
            print(f"| {name} | {threads} | {1e3 * plain[-1]:.1f} | {' | '.join(shown[1:])} |", flush=True)
        (serial, parallel), (ours, shared) = parts(*plain), parts(*added)
        on = [1 + (ours + shared / cores) / (serial + parallel / cores) for cores in (8, 16, 64)]
        told.append(f"| {name} | {1e6 * ours / calls:.0f} | {' | '.join(f'{ratio:.2f}' for ratio in on)} |")
    print("\n| model | serial, µs a layer | on 8 cores | 16 | 64 |\n|---|---|---|---|---|")
    print("\n".join(told))


if __name__ == "__main__":
    main()
