"""Whether each fault, planted by `intervene` in each layer of six architectures, is named, and leaves no trace.

    python evidence/interventions                  # all, and writes RESULTS.md beside this
    python evidence/interventions --every 7        # each seventh trial: each fault in another layer

A trial plants one fault in one layer, runs the model once with its loss, and asks two witnesses: the diagnosis of a
snapshot of the clean model, which names the layer if one of its causes does; and the assertion made for such faults,
which names it if the first line of its failure, or a row of its table, does; where a fault leaves no gradient, the
error of the run stands for it. A fault that changes no bit where it is planted is not counted, nor is one that changes
no bit of the output of the model and of the gradients of its parameters: a NaN in the gradient of a unit that ReLU has
closed. Afterwards every parameter, buffer and hook has to be as before.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import hashlib
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kill_matrix"))

import tool
from faults import start

from pytest_modelprobe import (
    ModelProbe,
    UsageError,
    assert_all_params_have_grad,
    assert_finite,
    assert_grad_finite,
    assert_grad_flow,
    assert_no_dead_layers,
    faults,
    intervene,
)
from pytest_modelprobe.record import Record
from pytest_modelprobe.runs import NoGradientError

NAMES = ["MLP", "CNN", "LSTM", "GPT", "ViT", "Encoder"]
BLOCKS = {"MLP": 2, "CNN": 2, "GPT": 1, "ViT": 1, "Encoder": 1}
"""How many blocks of each model are kept: those of one model are alike."""

RESULTS = Path(__file__).with_name("RESULTS.md")

PLANTED: list[tuple[str, Any, tuple[Callable[[Record], object], ...]]] = [
    ("output", faults.nan, (assert_finite,)),
    ("output", faults.inf, (assert_finite,)),
    ("output", faults.zero, (assert_no_dead_layers,)),
    ("output", faults.stuck(0.5), (assert_grad_flow,)),
    ("output", faults.scale(1.1), ()),
    ("output", faults.noise(0.01), ()),
    ("output", faults.clamp(-0.1, 0.1), ()),
    ("output", faults.flip_sign, ()),
    ("output", faults.shuffle_batch, ()),
    ("output", faults.shift_sequence, ()),
    ("output", faults.detach, (assert_all_params_have_grad,)),
    ("input", faults.scale(1.1), ()),
    ("input", faults.normalize_input(0.5, 0.5), ()),
    ("gradient", faults.nan, (assert_grad_finite,)),
    ("gradient", faults.zero, (assert_grad_flow,)),
    ("gradient", faults.drop_gradient, (assert_all_params_have_grad,)),
    ("gradient", faults.clip_gradient(1e-4), ()),
    ("gradient", faults.flip_sign, ()),
    ("weight", faults.zero, ()),
    ("weight", faults.scale(1.1), ()),
]


class Counted:
    """A fault that knows whether it changed a bit."""

    def __init__(self, fault: Any) -> None:
        self.fault, self.effect, self.__name__ = fault, False, repr(fault)

    def __call__(self, tensor: Any) -> Any:
        changed = self.fault(tensor)
        if changed is None or changed.requires_grad != tensor.requires_grad:
            self.effect = True
        else:
            self.effect |= not torch.equal(torch.nan_to_num(changed, 7.0), torch.nan_to_num(tensor, 7.0))
        return changed


def of_architecture(name: str, every: int) -> list[dict[str, Any]]:
    """Return a row for each trial."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trial = start(name)
    if name in BLOCKS:
        trial.model.blocks = trial.model.blocks[: BLOCKS[name]]
    expected = tool.snapshot(tool.record(trial))
    state, hooks, clean = bits(trial.model), hooks_of(trial.model), computed(trial)
    rows = []
    for layer, (what, fault, assertions) in [p for i, p in enumerate(pairs(trial, expected)) if i % every == 0]:
        counted = Counted(fault)
        row = {
            "model": name,
            "layer": layer,
            "what": what,
            "fault": repr(fault),
            "diagnosis": False,
            "assertion": False,
        }
        with intervene(trial.model, layer, **{what: counted}) as planted:
            probe = ModelProbe(seed=trial.seed)
            try:
                record = probe.run(trial.model, *trial.inputs, loss=trial.loss)
            except NoGradientError as error:  # no parameter stands behind the layer: there is no record to judge
                row |= {"causes": [str(error)], "assertion": layer in str(error).replace("'", " ").split()}
            except UsageError:  # the fault is for floating-point tensors, and the layer takes token ids
                counted.effect = False
            planted._fired += 1  # a gradient may not arrive: no effect
            if counted.effect and "causes" not in row:
                causes = tool.judge(record, expected).causes
                row["causes"] = [tool.told(cause) for cause in causes]
                row["diagnosis"] = any(cause.layer in homes(expected, layer, what) for cause in causes)
                row["assertion"] = any(names(assertion, record, layer) for assertion in assertions)
                if not (row["diagnosis"] or row["assertion"]):
                    counted.effect = computed(trial) != clean
        row |= {"effect": counted.effect, "restored": (bits(trial.model), hooks_of(trial.model)) == (state, hooks)}
        rows.append(row)
    return rows


def pairs(trial: Any, expected: Record) -> Iterator[tuple[str, tuple[str, Any, Any]]]:
    modules = dict(trial.model.named_modules())
    for layer in expected.layers.values():
        module = modules.get("" if layer.name == "(root)" else layer.name)
        if layer.calls and module is not None:
            for planted in PLANTED:
                if planted[0] != "weight" or any("bias" not in p.name for p in layer.parameters):
                    yield layer.name, planted


def homes(expected: Record, layer: str, what: str) -> set[str]:
    """Return the layers where a fault is: a tied weight is that of an earlier layer, too."""
    tied = [parameter.tied_to for parameter in expected.layers[layer].parameters if parameter.tied_to]
    return {layer, *(name.rpartition(".")[0] for name in tied if what == "weight")}


def names(assertion: Callable[[Record], object], record: Record, layer: str) -> bool:
    """Whether an assertion fails and its message names the layer, or a parameter of it."""
    try:
        assertion(record)
    except AssertionError as error:
        words = str(error).replace("'", " ").replace(",", " ").split()
        return any(word == layer or word.startswith(f"{layer}.") for word in words)
    except Exception:  # noqa: BLE001 - it refuses the record
        return False
    return False


def bits(model: torch.nn.Module) -> list[bytes]:
    return list(map(digest, (*model.parameters(), *model.buffers())))


def digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha1(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).digest()


def computed(trial: Any) -> list[bytes]:
    """Return the bits of the output and of each gradient, without a probe."""
    torch.manual_seed(0)
    output = trial.model(*trial.inputs)
    parameters = [parameter for parameter in trial.model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(trial.loss(output), parameters, allow_unused=True)
    return [digest(output), *(b"" if gradient is None else digest(gradient) for gradient in gradients)]


def hooks_of(model: torch.nn.Module) -> list[int]:
    return [key for m in model.modules() for t in (m._forward_pre_hooks, m._forward_hooks) for key in t]


UNDONE = "a LayerNorm undoes another scale of its input: the code before it is named, where the input is made"


def report(rows: list[dict[str, Any]], every: int) -> str:
    """Return the page."""
    every_text = f" -- --every {every}" if every > 1 else ""
    counted = [row for row in rows if row["effect"]]
    named = [row for row in counted if row["diagnosis"] or row["assertion"]]
    restored = sum(row["restored"] for row in rows)
    summary = (
        f"{len(rows):,} trials in {len({r['model'] for r in rows})} architectures: one fault in one layer each. "
        f"{len(rows) - len(counted):,} change no bit where they are planted, or none of the output and the gradients, "
        f"and are not counted. Of the other {len(counted):,}, {len(named):,} ({len(named) / max(1, len(counted)):.1%}) "
        "are named: by a cause of the snapshot's diagnosis with their layer, or by the assertion made for them. Where "
        "a fault leaves no gradient, the error of the run counts as the assertion. Blocks of one model are alike: "
        f"{' and '.join(name for name, blocks in BLOCKS.items() if blocks > 1)} have two, the others with blocks one."
    )
    lines = [
        "# Planted faults",
        "",
        f"Command: `tox -e interventions{every_text}`. {platform.machine()}, torch {torch.__version__}.",
        "",
        summary,
        "",
        f"Parameters, buffers and hooks were as before, bit for bit, after {restored:,} of {len(rows):,} trials.",
        "",
        "| change | fault | counted | diagnosis | assertion | either |",
        "|---|---|---|---|---|---|",
    ]
    groups = collections.defaultdict(list)
    for row in counted:
        groups[row["what"], row["fault"]].append(row)
    for (what, fault), group in groups.items():
        either = sum(row["diagnosis"] or row["assertion"] for row in group)
        sums = [sum(row[key] for row in group) for key in ("diagnosis", "assertion")]
        lines.append(f"| `{what}=` | `{fault}` | {len(group)} | {sums[0]} | {sums[1] or '-'} | {either} |")
    lines += ["", "| architecture | counted | named |", "|---|---|---|"]
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in counted if row["model"] == model]
        lines.append(f"| {model} | {len(mine)} | {sum(r['diagnosis'] or r['assertion'] for r in mine)} |")
    missed = [row for row in counted if not (row["diagnosis"] or row["assertion"])]
    if missed:
        lines += [
            "",
            "Not named:",
            "",
            "| model | layer | change | fault | said instead | why |",
            "|---|---|---|---|---|---|",
        ]
        for row in missed:
            said = "; ".join(row["causes"][:3]) or "nothing"
            fault = f"`{row['what']}=` | `{row['fault']}`"
            reason = UNDONE if row["what"] == "input" and "norm" in row["layer"] else ""
            lines.append(f"| {row['model']} | `{row['layer']}` | {fault} | {said} | {reason} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="only each n-th trial")
    parser.add_argument("--only", choices=NAMES, help="one architecture, printed only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes: one architecture in each")
    options = parser.parse_args()
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        wanted = [options.only] if options.only else NAMES
        for found in pool.map(of_architecture, wanted, [options.every] * len(wanted)):
            rows += found
            print(f"{found[0]['model']}: {len(found)} trials, {time.monotonic() - began:.0f} s", file=sys.stderr)
            if not options.only:
                RESULTS.write_text(report(rows, options.every) + "\n", encoding="utf-8")
    print(report(rows, options.every))


if __name__ == "__main__":
    main()
