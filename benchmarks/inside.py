"""What `watch(compiled="inside")` costs: a compiled step of training watched, as a ratio to the same step unwatched.

Prints a row of Markdown for each model: the ratio of the medians of processor time, steps in turns; graph breaks; and
the largest distance of a mean or standard deviation from that of an eager watch, in units of the root mean square.

    python benchmarks/inside.py [--models gpt2 resnet] [--backend inductor] [--steps 21]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, Record


def gpt2() -> tuple[nn.Module, Tensor]:
    """Two blocks of GPT-2 in their width, 512 tokens."""
    config = transformers.GPT2Config(n_layer=2, vocab_size=4096, bos_token_id=0, eos_token_id=0, use_cache=False)
    return transformers.GPT2LMHeadModel(config), torch.randint(4096, (4, 128))


def resnet() -> tuple[nn.Module, Tensor]:
    """The stem and two stages of a ResNet, 8 images of 64 x 64."""
    config = transformers.ResNetConfig(embedding_size=64, hidden_sizes=[64, 128], depths=[1, 1], layer_type="basic")
    return transformers.ResNetForImageClassification(config), torch.randn(8, 3, 64, 64)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"gpt2": gpt2, "resnet": resnet}


def stepper(model: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> Callable[[], float]:
    """Return a step of training that returns its processor time."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> float:
        began = time.process_time()
        optimizer.zero_grad()
        call(x).logits.float().square().mean().backward()
        optimizer.step()
        return time.process_time() - began

    return step


def distance(one: Record, two: Record) -> float:
    """Return the largest distance of a moment, in units of the root mean square."""
    worst = 0.0
    for name in one.layers:
        for a, b in zip(one.layers[name].calls, two.layers[name].calls, strict=True):
            floating = [value for value in a.outputs if value.dtype.startswith("float")]
            for v, w in zip(floating, b.outputs, strict=True):
                for r, s in ((v.forward, w.forward), (v.backward, w.backward)):
                    if r is not None and s is not None and r.statistics and s.statistics and r.statistics.rms:
                        off = max(
                            abs((r.statistics.mean or 0) - (s.statistics.mean or 0)),
                            abs((r.statistics.std or 0) - (s.statistics.std or 0)),
                        )
                        worst = max(worst, off / r.statistics.rms)
    return worst


def measure(name: str, backend: str, steps: int) -> str:
    """Return the row of a model."""

    def made() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        model, x = MODELS[name]()
        return model.eval(), x

    with ModelProbe() as probe:
        eager, x = made()
        watch = probe.watch(eager)
        stepper(eager, eager, x)()
        expected = watch.first_step
        watch.close()
        watched, _ = made()
        inside = probe.watch(watched, compiled="inside")
        torch._dynamo.utils.counters.clear()
        with_watch = stepper(watched, torch.compile(watched, backend=backend), x)
        compile_with = with_watch()
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        off = distance(expected, inside.first_step)
        plain, _ = made()
        without = stepper(plain, torch.compile(plain, backend=backend), x)
        compile_without = without()
        times = [(with_watch(), without()) for _ in range(steps)][2:]
        ratio = statistics.median(a for a, _ in times) / statistics.median(b for _, b in times)
        milliseconds = statistics.median(b for _, b in times) * 1e3
        return (
            f"| {name} | {len(expected.layers)} | {milliseconds:.0f} ms | {ratio:.2f} | {breaks} | {off:.0e} "
            f"| {compile_without:.0f} s | {compile_with:.0f} s |"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=21)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | layers | step unwatched | ratio | graph breaks | moments off | compiling unwatched | watched |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in options.models:
        print(measure(name, options.backend, options.steps), flush=True)


if __name__ == "__main__":
    main()
