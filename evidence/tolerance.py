"""How well measured noise covers harmless changes: what `MULTIPLE` and `FLOORS` of a comparison are derived from.

    python evidence/tolerance.py              # all, and writes TOLERANCE.md beside this
    python evidence/tolerance.py gpt2 lstm    # of some models

Each model is run and its noise measured, then run again as another machine would: one thread, no oneDNN, other
instructions, another memory layout, another kernel for attention. None of these changes is the model's, so each
reading has to stay within a multiple of its noise, or below a floor.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as t
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.record import Reading, Record
from pytest_modelprobe.runs import noise

PAGE = Path(__file__).with_name("TOLERANCE.md")
HEAD = """\
# How far harmless changes move a value

Command: `tox -e tolerance`. Machine: {machine}.

Each model is recorded with its noise, then run again as another machine would. *Ratio*: the change of a reading over
its measured noise. *Floor at m*: the least floor with which every reading stays within m times its noise; none is
needed where there is a dash. The comparison allows 4 times the noise, and never less than 2e-6
(of parameters and buffers 3e-6).
"""

MULTIPLES = (2, 3, 4, 5)
OTHER_CPU = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}

# --- models -------------------------------------------------------------------------------------------------------


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


class Conv(nn.Module):
    """Max-pools and ReLUs without a norm or a residual to soften what flips."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, o in ((3, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def resnet() -> nn.Module:
    return t.ResNetModel(t.ResNetConfig(depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], embedding_size=32))


def gpt2() -> nn.Module:
    return t.GPT2LMHeadModel(t.GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=1000))


LLAMA = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 1000}  # fmt: skip


def llama() -> nn.Module:
    return t.LlamaForCausalLM(t.LlamaConfig(**LLAMA))


def mixtral() -> nn.Module:
    return t.MixtralForCausalLM(t.MixtralConfig(**LLAMA, num_local_experts=4))


def bert() -> nn.Module:
    config = t.BertConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=1000,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return t.BertModel(config)


def vit() -> nn.Module:
    config = t.ViTConfig(
        hidden_size=192, intermediate_size=384, num_hidden_layers=4, num_attention_heads=3, image_size=96
    )
    return t.ViTModel(config)


def image(probe: ModelProbe) -> dict[str, Any]:
    return {"pixel_values": probe.randn(4, 3, 96, 96)}


def ids(probe: ModelProbe) -> dict[str, Any]:
    return {"input_ids": probe.randint(0, 1000, (2, 64)), "use_cache": False}


def pixels(probe: ModelProbe) -> dict[str, Any]:
    return {"x": probe.randn(4, 3, 64, 64)}


Case = tuple[Callable[[], nn.Module], Callable[[ModelProbe], dict[str, Any]], Any, torch.dtype]
CASES: dict[str, Case] = {
    "resnet train": (resnet, image, "train", torch.float32),
    "resnet eval": (resnet, image, "eval", torch.float32),
    "conv": (Conv, pixels, "train", torch.float32),
    "gpt2": (gpt2, ids, "eval", torch.float32),
    "gpt2 float64": (gpt2, ids, "eval", torch.float64),
    "gpt2 bfloat16": (gpt2, ids, "eval", torch.bfloat16),
    "llama": (llama, ids, "eval", torch.float32),
    "llama bfloat16": (llama, ids, "eval", torch.bfloat16),
    "mixtral": (mixtral, ids, "eval", torch.float32),
    "bert": (bert, lambda probe: {"input_ids": ids(probe)["input_ids"]}, "train", torch.float32),
    "vit": (vit, image, "eval", torch.float32),
    "lstm": (LSTM, lambda probe: {"x": probe.randn(4, 20, 32)}, "train", torch.float32),
}


def model_of(name: str, weights: Path) -> tuple[nn.Module, dict[str, Any], Any]:
    """Return model, inputs and mode, with weights from the disk, for other instructions draw other numbers."""
    factory, inputs, mode, dtype = CASES[name]
    model = factory().to(dtype)
    path = weights / f"{name}.pt"
    if not path.exists():
        torch.save((ModelProbe().build(factory).state_dict(), inputs(ModelProbe())), path)
    state, given = torch.load(path)
    model.load_state_dict(state)
    given = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in given.items()}
    return model, given, mode


# --- harmless changes ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def no_onednn() -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


VARIANTS = {"one thread": one_thread, "no oneDNN": no_onednn, "plain attention": plain_attention}
WITHOUT_ATTENTION = ("resnet", "conv", "lstm")
WITHOUT_ONEDNN = ("llama", "mixtral", "gpt2", "gpt2 float64")


def run(name: str, weights: Path, *, like: Record | None = None, channels_last: bool = False) -> Record:
    """Return the record of one run, each layer called alone too."""
    model, inputs, mode = model_of(name, weights)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        inputs = {k: v.to(memory_format=torch.channels_last) for k, v in inputs.items()}
    probe = ModelProbe()  # kept, for the record asks it for more
    record = probe.run(model, loss="random", mode=mode, **inputs)
    assert record.live_run is not None
    return record.live_run.measured(record, record) if like is None else record.live_run.isolated(record, like)


def variants(name: str, weights: Path, like: Record) -> Iterator[tuple[str, Record]]:
    """Yield the record of each harmless change that can be made in this process."""
    for variant, context in VARIANTS.items():
        same = {"plain attention": name.startswith(WITHOUT_ATTENTION), "no oneDNN": name in WITHOUT_ONEDNN}
        if not same.get(variant):
            with context():
                yield variant, run(name, weights, like=like)
    if name.startswith(("resnet", "conv")):
        yield "channels last", run(name, weights, like=like, channels_last=True)


# --- the table ----------------------------------------------------------------------------------------------------


Pair = tuple[float, float]
"""Change and noise of one reading."""


def pairs(measured: Record, variant: Record) -> Iterator[tuple[str, Pair]]:
    """Yield direction, change and noise of each reading."""
    others = noise.readings(variant)
    found: list[tuple[str, Reading | None, Reading | None]] = []
    for key, reading in noise.readings(measured).items():
        direction = "forward" if key[-1] in ("forward", "after") else "backward"
        found.append(("integers" if reading.digest else direction, reading, others.get(key)))
    for (_, mine), (_, theirs) in zip(measured.calls, variant.calls, strict=True):
        if mine.response is not None and theirs.response is not None:
            assert mine.response.recipes == theirs.response.recipes
            handed = zip(mine.response.handed, theirs.response.handed, strict=True)
            found += [("response", a.reading, b.reading) for a, b in handed]
            found.append(("response gradient", mine.response.gradient, theirs.response.gradient))
    for direction, a, b in found:
        change = None if a is None else noise.relative_change(a, b)
        if a is not None and change is not None:
            yield direction, (change, a.noise or 0.0)


def rows(name: str, variant: str, found: Iterator[tuple[str, Pair]]) -> Iterator[str]:
    """Yield the lines of the table."""
    directions: dict[str, list[Pair]] = {}
    for direction, pair in found:
        directions.setdefault(direction, []).append(pair)
    for direction, some in directions.items():
        # What is zero in the repeats too leaves no ratio; a floor has to cover it.
        ratios = sorted(c / n for c, n in some if n) or [0.0]
        floors = [max((c for c, n in some if c > m * n), default=0.0) for m in MULTIPLES]
        noises = sorted(n for _, n in some)
        yield (
            "| "
            + " | ".join(
                [
                    *(name, variant, direction, str(len(some))),
                    *(f"{n:.1e}" for n in (noises[len(noises) // 2], noises[-1], max(c for c, _ in some))),
                    *(f"{r:.2f}" for r in (ratios[int(0.999 * (len(ratios) - 1))], ratios[-1])),
                    *(f"{f:.1e}" if f else "-" for f in floors),
                ]
            )
            + " |"
        )


def machine() -> str:
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, Python {platform.python_version()}"
    )


def main(names: list[str]) -> None:
    head = ["model", "change", "of", "readings", "median noise", "largest", "largest change", "99.9 % ratio", "largest"]
    head += [f"floor at {m}" for m in MULTIPLES]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder)
        records = {}
        for name in names:
            measured = records[name] = run(name, weights)
            assert measured.noise == "measured", measured.notes
            for variant, other in variants(name, weights, measured):
                lines += rows(name, variant, pairs(measured, other))
                print(lines[-1], flush=True)
        (weights / "records").write_text(json.dumps({name: record.to_dict() for name, record in records.items()}))
        command = [sys.executable, __file__, "--other-cpu", folder]
        done = subprocess.run(command, env=os.environ | OTHER_CPU, check=True, stdout=subprocess.PIPE, text=True)
        lines += done.stdout.splitlines()
    if set(names) == set(CASES):
        PAGE.write_text("\n".join([HEAD.format(machine=machine()), *lines, ""]), "utf-8")


def other_cpu(folder: Path) -> None:
    """Print the rows of this process, whose instructions are others."""
    for name, plain in json.loads((folder / "records").read_text()).items():
        measured = Record.from_dict(plain)
        print(*rows(name, "other CPU", pairs(measured, run(name, folder, like=measured))), sep="\n", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--other-cpu"]:
        other_cpu(Path(sys.argv[2]))
    else:
        main([name for name in CASES if not sys.argv[1:] or name.startswith(tuple(sys.argv[1:]))])
