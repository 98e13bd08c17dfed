"""What a watched step of small public models costs: models of timm with random weights, two images each.

    python benchmarks/public_models.py            # all; writes PUBLIC.md and PUBLIC.json beside this file
    python benchmarks/public_models.py resnet10t   # some; keeps what was known of the others

A step is a forward and a backward on one thread, timed by the processor, in the modes of `modes.py` in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import timm
import torch
from modes import MODES, in_turns, ratios, step_of

RESULTS = Path(__file__).with_name("PUBLIC.md")
AS_PUBLISHED = [
    "convnext_atto", "convnext_tiny", "edgenext_xx_small", "efficientvit_m0", "ghostnet_050", "lcnet_035", "levit_128s",
    "mnasnet_small", "mobilenetv3_small_050", "mobilenetv3_small_100", "mobilevitv2_050", "pvt_v2_b0", "regnetx_002",
    "repghostnet_050", "resnet10t", "starnet_s050", "tinynet_e", "vit_tiny_patch16_224", "xcit_nano_12_p16_224",
]  # fmt: skip
FOR_TESTS = [
    "test_byobnet", "test_coatnet", "test_convnext", "test_convnext2", "test_convnext3", "test_efficientnet",
    "test_efficientnet_gn", "test_efficientnet_ln", "test_mambaout", "test_nfnet", "test_resnet", "test_vit",
    "test_vit2", "test_vit3", "test_vit4", "test_vit_relpos",
]  # fmt: skip
"""Of timm's own tests: 160 x 160 pixels and few layers."""
TOLD = ("hooks alone", "statistics alone", "watched", "naive hooks")


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of an unwatched step of a model, its layer calls, and the ratios of the modes."""
    torch.manual_seed(0)
    model = timm.create_model(name).train()
    size = model.pretrained_cfg["input_size"]
    inputs = {"input": torch.randn(2, *size)}
    modes = {mode: MODES[mode] for mode in ("unwatched", *TOLD)}
    times = in_turns(model, step_of(model, inputs), modes, rounds, time_of_processor=True)
    middles = {mode: middle for mode, (_, middle, _) in ratios(times).items()}
    return {"seconds": statistics.median(times["unwatched"]), "modules": len(list(model.modules()))} | middles


def report(results: dict[str, Any]) -> str:
    """Return the page."""
    above = [name for name, found in results.items() if found["watched"] > 2 > found["naive hooks"]]
    middle = statistics.median(found["watched"] for found in results.values())
    head = f"""# A watched step of small public models

Command: `./dev public-models`, with timm {timm.__version__} and torch {torch.__version__}.
A training step of two images, forward and backward, on one thread of a CPU, in unwatched steps: time of the
processor, the median of ratios within a round. *Naive hooks*: eight statistics of each output and its gradient, read
with `.item()`.

{len(results)} models; watched with fingerprints {middle:.2f} in the median.
Above 2 where naive hooks are below: {", ".join(above) or "none"}.

| model | modules | step, ms | {" | ".join(TOLD)} |
|---|---|---|{"---|" * len(TOLD)}
"""
    lines = []
    for name, found in results.items():
        cells = " | ".join(f"{found[mode]:.2f}" for mode in TOLD)
        lines.append(f"| {name} | {found['modules']} | {found['seconds'] * 1e3:.0f} | {cells} |")
    return head + "".join(f"{line}\n" for line in lines)


def main() -> None:
    """Measure, and write down what is known after each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*AS_PUBLISHED, *FOR_TESTS])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = RESULTS.with_suffix(".json")
    results: dict[str, Any] = json.loads(known.read_text("utf-8")) if known.exists() else {}
    for name in options.names:
        results[name] = measured(name, options.rounds)
        print(name, json.dumps(results[name]), flush=True)
        results = {each: results[each] for each in (*AS_PUBLISHED, *FOR_TESTS) if each in results}
        known.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        RESULTS.write_text(report(results), encoding="utf-8")


if __name__ == "__main__":
    main()
