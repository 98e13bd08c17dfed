"""What the probe costs, as ratios to the same step without it, measured in turns in one process.

    python benchmarks/run.py            # all, and writes RESULTS.md beside this file
    python benchmarks/run.py gpt2 load  # some, and keeps what was known of the others

A step is a forward and a backward. In each round every mode runs once, in an order that changes; a ratio is the median
over rounds of (mode / unwatched) within a round, for a machine's speed drifts between rounds. Spread: the middle half.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import itertools
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers
import pytest
import scale
import tensors
import torch
from modes import MODES, Step, forward_of, in_turns, mean_square, ratios, step_of
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetModel, ViTConfig, ViTModel

from pytest_modelprobe import ModelProbe, Watch, files
from pytest_modelprobe.comparison import compare, layers_behind_zeros

RESULTS = Path(__file__).with_name("RESULTS.md")

# --- models -------------------------------------------------------------------------------------------------------


def resnet50() -> tuple[nn.Module, dict[str, Any]]:
    return ResNetModel(ResNetConfig()).train(), {"pixel_values": torch.randn(8, 3, 224, 224)}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    model = GPT2LMHeadModel(GPT2Config(n_layer=6)).train()
    return model, {"input_ids": torch.randint(0, 50257, (2, 256)), "use_cache": False}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    return ViTModel(ViTConfig(num_hidden_layers=6)).train(), {"pixel_values": torch.randn(4, 3, 224, 224)}


def tiny() -> tuple[nn.Module, dict[str, Any]]:
    layers = [layer for _ in range(16) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers), {"input": torch.randn(4, 8)}


def in_bfloat16() -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = gpt2()
    return model.to(torch.bfloat16), inputs


MODELS = {"ResNet-50, 8 x 224²": resnet50, "GPT-2, 6 blocks, 2 x 256": gpt2, "ViT-B, 6 blocks, 4 x 224²": vit}

# --- measuring ----------------------------------------------------------------------------------------------------


def bench_model(make: Callable[[], tuple[nn.Module, dict[str, Any]]], rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs = make()
    times = in_turns(model, step_of(model, inputs), MODES, rounds)
    return {"seconds": statistics.median(times["unwatched"]), "ratios": ratios(times)}


def bench_forward(rounds: int = 5) -> dict[str, Any]:
    """The same for a forward alone, without gradient."""
    found = {}
    for title, make in MODELS.items():
        torch.manual_seed(0)
        model, inputs = make()
        with torch.no_grad():
            times = in_turns(model.eval(), forward_of(model, inputs), MODES, rounds)
        found[title] = {"seconds": statistics.median(times["unwatched"]), "ratios": ratios(times)}
    return found


def bench_bfloat16(rounds: int = 7) -> dict[str, Any]:
    """The same in bfloat16, where the CPU multiplies in it."""
    if not torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported():
        return {}
    return {"GPT-2, 6 blocks, 2 x 256, bfloat16": bench_model(in_bfloat16, rounds)}


@contextlib.contextmanager
def one_thread() -> Iterator[Callable[[], float]]:
    """Compute on one thread within the block, and yield the clock of the processor, which others disturb less."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield time.process_time
    finally:
        torch.set_num_threads(threads)


def bench_isolation(rounds: int = 3) -> dict[str, dict[str, float]]:
    """Calling each layer alone: in forwards, where there is no loss, and in steps, where there is one."""
    found = {}
    for title, make in MODELS.items():
        torch.manual_seed(0)
        model, inputs = make()
        probe, step, forward = ModelProbe(), step_of(model, inputs), forward_of(model, inputs)
        each: dict[str, list[float]] = {"forward": [], "step": []}
        with one_thread() as clock:
            for turn in range(-1, rounds):
                for name, loss, base in (("forward", None, forward), ("step", mean_square, step)):
                    start = clock()
                    with torch.set_grad_enabled(loss is not None):
                        base()
                    seconds = clock() - start
                    record = probe.run(model, loss=loss, **inputs)
                    start = clock()
                    isolated = record.live_run.isolated(record)
                    assert isolated.calls[0][1].response is not None  # it was not refused
                    if turn >= 0:
                        each[name].append((clock() - start) / seconds)
        found[title] = {name: statistics.median(values) for name, values in each.items()}
    return found


def bench_python(rounds: int = 100) -> dict[str, Any]:
    """Microseconds a layer call, forward and backward: tensors so small that only Python counts."""
    model, inputs = tiny()
    times = in_turns(model, step_of(model, inputs), MODES, rounds)
    calls = len(list(model.modules()))
    base = statistics.median(times["unwatched"])
    return {name: (statistics.median(values) - base) / calls * 1e6 for name, values in times.items()}


def bench_attach(rounds: int = 15) -> dict[str, dict[str, float]]:
    """Milliseconds to attach and detach again, beside torch's own part in it: the hooks, and no garbage collected."""
    config = GPT2Config(n_layer=77, n_embd=16, n_head=2, vocab_size=200, bos_token_id=0, eos_token_id=0)
    models = {
        "10,000 modules without parameters": nn.Sequential(*(nn.Identity() for _ in range(10_000))),
        "a GPT-2 of 1,009 layers": GPT2LMHeadModel(config),
    }
    found = {}
    for title, model in models.items():

        def hooks_alone(model: nn.Module = model) -> None:
            handles = []
            for module in model.modules():
                handles.append(module.register_forward_pre_hook(print, with_kwargs=True))
                handles.append(module.register_forward_hook(print, with_kwargs=True, always_call=True))
            handles += [parameter.register_hook(print) for parameter in model.parameters()]
            for handle in handles:
                handle.remove()

        def watch(model: nn.Module = model) -> None:
            Watch(model).close()

        jobs: dict[str, Step] = {"watch": watch, "hooks of torch alone": hooks_alone}
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        gc.collect()
        gc.disable()  # it would make the part of torch twice as long; attaching pauses it
        try:
            for turn in range(-1, rounds):
                for name, job in jobs.items():
                    start = time.process_time()
                    job()
                    if turn >= 0:
                        seconds[name].append(time.process_time() - start)
        finally:
            gc.enable()
        found[title] = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    return found


def bench_tensors() -> dict[str, Any]:
    """One tensor, in sums of it."""
    return tensors.measure()


def bench_limit(rounds: int = 7) -> dict[str, dict[str, float]]:
    """What each model's step would cost with one sum over each recorded tensor, and how much it would read."""
    found = {}
    for title, make in MODELS.items():
        torch.manual_seed(0)
        model, inputs = make()
        step = step_of(model, inputs)
        with Watch(model) as watch:
            step()
        sizes = read_by_kind(watch)
        buffers = [torch.ones(size) for kind in sizes.values() for size in kind]
        seconds: list[list[float]] = [[], []]
        for turn in range(-1, rounds):
            for job, times in zip((step, lambda b=buffers: [x.sum() for x in b]), seconds, strict=True):
                start = time.perf_counter()
                job()
                if turn >= 0:
                    times.append(time.perf_counter() - start)
        ratio = statistics.median(b / a for a, b in zip(*seconds, strict=True))
        found[title] = {"ratio": 1 + ratio} | {kind: sum(each) * 4 / 1e6 for kind, each in sizes.items()}
    return found


def read_by_kind(watch: Watch) -> dict[str, list[int]]:
    """Return the elements of each tensor that a step reads once, by what they are."""
    activations: dict[int, int] = {}
    gradients: dict[int, int] = {}
    parameters: list[int] = []
    for layer in watch.record.layers.values():
        for call in layer.calls:
            for value in (*call.inputs, *call.outputs):
                size = math.prod(n for n in value.shape if isinstance(n, int))
                activations[value.tensor] = size
                if value.backward is not None:
                    gradients[value.tensor] = size
        parameters += [math.prod(p.shape) for p in layer.parameters if p.gradient is not None and p.tied_to is None]
    return {
        "activations": list(activations.values()),
        "gradients of activations": list(gradients.values()),
        "gradients of parameters": parameters,
    }


def bench_peers(rounds: int = 3) -> dict[str, dict[str, float | str]]:
    """Other tools on the same models, one forward each."""
    found = {}
    for title, make in MODELS.items():
        torch.manual_seed(0)
        model, inputs = make()
        found[title] = peers.compare(model.eval(), inputs, rounds)
    return found


def bench_scale() -> dict[str, Any]:
    """Memory and time against steps and layers, and a figure of it."""
    results = scale.measure()
    scale.draw(results)
    return results


def bench_run(rounds: int = 2) -> dict[str, float]:
    """`run` end to end, and what an update asks of it besides, in plain steps of the same model."""
    torch.manual_seed(0)
    model, inputs = gpt2()
    probe = ModelProbe()
    step = step_of(model, inputs)
    each: dict[str, list[float]] = {"run": [], "isolated": [], "measured": [], "measured, of the answers too": []}
    with one_thread() as clock:
        for turn in range(-1, rounds):
            times = [clock()]
            step()
            times.append(clock())
            record = probe.run(model, loss=lambda out: out[0].float().pow(2).mean(), **inputs)
            times.append(clock())
            isolated = record.live_run.isolated(record)
            times.append(clock())
            if turn >= 0:
                record.live_run.measured(record)
                times.append(clock())
                isolated.live_run.measured(isolated)
                times.append(clock())
                base, *seconds = (b - a for a, b in itertools.pairwise(times))
                for name, value in zip(each, seconds, strict=True):
                    each[name].append(value / base)
    return {name: statistics.median(values) for name, values in each.items()}


def mlp() -> tuple[nn.Module, dict[str, Any]]:
    """Six layers, of which each weighs little beside what is told of it."""
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))).eval(), {"input": torch.randn(8, 32)}


def bench_passing(rounds: int = 15) -> dict[str, float]:
    """A test that passes: `run`, the files read and compared, layers behind zeros called alone; in plain steps.

    In time of the processor, which other processes disturb less.
    """
    found = {}
    for title, make in {"MLP of 6 layers": mlp, "GPT-2, 6 blocks, 2 x 256": gpt2}.items():
        torch.manual_seed(0)
        model, inputs = make()
        probe, step = ModelProbe(), step_of(model, inputs)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "test_model.arch.json")
            record = probe.run(model, loss="random", **inputs)
            files.write(path, files.encode(record.live_run.isolated(record)))
            ratios = []
            with one_thread() as clock:
                for turn in range(-1, rounds):
                    times = [clock()]
                    step()
                    times.append(clock())
                    record, expected = probe.run(model, loss="random", **inputs), files.read(path).record
                    assert compare(record, expected).same
                    if behind := layers_behind_zeros(record):
                        assert compare(record.live_run.isolated(record, like=expected, only=behind), expected).same
                    times.append(clock())
                    base, whole = (b - a for a, b in itertools.pairwise(times))
                    if turn >= 0:
                        ratios.append(whole / base)
            found[title] = statistics.median(ratios)
    return found


def bench_measures(rounds: int = 7) -> dict[str, dict[str, float]]:
    """What reports ask of a `run`, in runs without: histograms and the profile, by time of the processor."""
    options = {"alone": {}, "histograms": {"histograms": True}, "profile": {"profile": True}}
    options["both"] = options["histograms"] | options["profile"]
    found = {}
    for title, make in {"MLP of 6 layers": mlp, "GPT-2, 6 blocks, 2 x 256": gpt2}.items():
        torch.manual_seed(0)
        model, inputs = make()
        probe = ModelProbe()
        each: dict[str, list[float]] = {name: [] for name in options}
        for turn in range(-1, rounds):
            for name, asked in options.items():
                start = time.process_time()
                probe.run(model, loss="random", **asked, **inputs)
                if turn >= 0:
                    each[name].append(time.process_time() - start)
        found[title] = {name: middle for name, (_, middle, _) in ratios(each, "alone").items() if name != "alone"}
    return found


REPORTED = """
import os, pytest
from torch import nn

@pytest.mark.parametrize("i", range(10))
def test_model(modelprobe, i):
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.GELU())))
    profile = "PROFILE" in os.environ
    assert modelprobe.run(model, modelprobe.randn(64, 256), loss="random", profile=profile).layers
"""


def bench_reports(rounds: int = 7) -> dict[str, float]:
    """What each report makes of a run of pytest, in runs without one, by time of the processor."""
    modes = {"none": [], "the results file": ["--modelprobe-json=r.json"], "HTML": ["--modelprobe-html=r.html"]}
    modes["all, with the profile and JUnit XML"] = [*modes["the results file"], *modes["HTML"], "--junitxml=r.xml"]
    each: dict[str, list[float]] = {name: [] for name in modes}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("test_reported.py").write_text(REPORTED, "utf-8")
        command = ["-q", "--rootdir=.", "--import-mode=importlib", "-p", "no:cacheprovider", "test_reported.py"]
        for turn in range(-1, rounds):
            for name, arguments in modes.items():
                os.environ.pop("PROFILE", None)
                os.environ.update({"PROFILE": "1"} if name.startswith("all") else {})
                gc.collect()
                start = time.process_time()
                with contextlib.redirect_stdout(io.StringIO()):
                    status = pytest.main([*command, *arguments])
                assert status == 0, name
                if turn >= 0:
                    each[name].append(time.process_time() - start)
    return {name: middle for name, (_, middle, _) in ratios(each, "none").items() if name != "none"}


def bench_snapshot(rounds: int = 7) -> dict[str, float]:
    """Bytes of a snapshot of a GPT-2 of 12 blocks; milliseconds to read, compare and write 1,000 layers.

    The least time of the processor, which other processes disturb less.
    """
    probe = ModelProbe()
    found = {}
    for layers, width in ((12, 48), (77, 16)):  # 77 blocks are 1,006 layers
        config = GPT2Config(n_layer=layers, n_embd=width, n_head=2, vocab_size=200, bos_token_id=0, eos_token_id=0)
        model = probe.build(lambda config=config: GPT2LMHeadModel(config)).eval()
        record = probe.run(model, probe.randint(0, 200, (2, 16)), loss="random", use_cache=False)
        record = record.live_run.isolated(record)
        if layers == 12:
            texts = files.encode(record.live_run.measured(record))
            found["architecture, bytes"], found["numbers, bytes"] = (len(text.encode()) for text in texts)
            continue
        found["layers"] = len(record.layers)
        texts = files.encode(record)
        expected = files.decode(*texts, where="here").record
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "test_gpt2.arch.json")
            files.write(path, texts)
            seconds: dict[str, list[float]] = {"read": [], "compare": [], "write": []}
            for _ in range(rounds):
                times = [time.process_time()]
                files.read(path)
                times.append(time.process_time())
                compare(record, expected)
                times.append(time.process_time())
                files.write(path, files.encode(record))
                times.append(time.process_time())
                for name, (start, end) in zip(seconds, itertools.pairwise(times), strict=True):
                    seconds[name].append(end - start)
        found |= {f"{name}, ms": min(values) * 1e3 for name, values in seconds.items()}
        found["a million additions, ms"] = _million_additions()
    return found


def _million_additions(rounds: int = 7) -> float:
    """Milliseconds of a loop of Python: how fast this machine is, for who compares it with his own."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        total = 0
        for i in range(1_000_000):
            total += i
        seconds.append(time.process_time() - start)
    return min(seconds) * 1e3


LLAMA = """
import re, time, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from pytest_modelprobe import ModelProbe, files
config = LlamaConfig(vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80,
    num_attention_heads=64, num_key_value_heads=8, dtype=torch.bfloat16)
start = time.perf_counter()
with torch.device("meta"):
    model = LlamaForCausalLM(config)
record = ModelProbe().architecture(model, torch.empty(2, 4096, dtype=torch.int64), use_cache=False)
text = files.encode(record).architecture
seconds = time.perf_counter() - start
# Not ru_maxrss, which counts what the process was before it became this one.
most = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(seconds, most / 2**20, len(text.encode()), len(record.layers))
"""


def bench_llama() -> dict[str, float]:
    """The architecture of a Llama of 70 billion parameters: seconds, gigabytes at most, bytes of its file, layers."""
    done = subprocess.run([sys.executable, "-c", LLAMA], capture_output=True, text=True, check=True)
    return dict(zip(("seconds", "gigabytes", "bytes", "layers"), map(float, done.stdout.split()), strict=True))


def bench_load(rounds: int = 40) -> dict[str, float]:
    """Milliseconds of `pytest --collect-only` on one empty test: without, with ours, with another, in turns.

    Time of the processor, the mean of the quickest quarter. The first turn, which is not counted, writes the compiled
    files, as the first run of a project does: with ``PYTHONDONTWRITEBYTECODE`` each turn would compile them again.
    """
    ours, other = (["-p", f"no:{name}"] for name in ("modelprobe", "pytest_torch"))
    modes = {"without": [*ours, *other], "with": other}
    if importlib.util.find_spec("pytest_torch"):
        modes["pytest-torch"] = ours
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_empty.py").write_text("def test_nothing(): pass\n", encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(folder, "compiled"))}
        for turn in range(-1, rounds):
            for name, arguments in modes.items():
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run([*command, *arguments], cwd=folder, env=environment, check=True, capture_output=True)
                now = resource.getrusage(resource.RUSAGE_CHILDREN)
                if turn >= 0:
                    seconds[name].append(sum(now[:2]) - sum(before[:2]))  # user and system
    found = {name: statistics.mean(sorted(values)[: rounds // 4]) * 1e3 for name, values in seconds.items()}
    return found | {"difference": found["with"] - found["without"]}


# --- telling ------------------------------------------------------------------------------------------------------


def machine() -> str:
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"Python {platform.python_version()}, float32 on the CPU"
    )


def table(results: dict[str, Any]) -> list[str]:
    names = [name for name in MODES if name != "unwatched"]
    lines = [f"| model | step, ms | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for model, result in results.items():
        known = (result["ratios"].get(name) for name in names)
        cells = (f"{m[1]:.3f} ({m[0]:.3f} to {m[2]:.3f})" if m else "" for m in known)
        lines.append(f"| {model} | {result['seconds'] * 1e3:,.0f} | {' | '.join(cells)} |")
    return lines


def report(results: dict[str, Any]) -> str:
    parts = ["# Results", "", "Command: `tox -e bench`. Machine: " + machine() + "."]
    parts += ["Where the time goes, and what stands in the way of less: [PROFILE.md](PROFILE.md).", ""]
    if "models" in results:
        parts += ["## A step, forward and backward, in steps without a probe", ""]
        parts += ["Median over rounds, and the middle half. *Naive hooks*: eight statistics an output and a gradient,"]
        parts += ["each read with `.item()`.", "", *table(results["models"]), ""]
    if results.get("bfloat16"):
        parts += ["In bfloat16:", "", *table(results["bfloat16"]), ""]
    if "forward" in results:
        parts += ["A forward alone, without gradient:", "", *table(results["forward"]), ""]
    if "limit" in results:
        parts += [
            "One `x.sum()` over each tensor that the probe reads would make of a step, and so much is read, in MB:",
            "",
        ]
        kinds = [kind for kind in next(iter(results["limit"].values())) if kind != "ratio"]
        parts += [f"| model | step | {' | '.join(kinds)} |", f"|---|---|{'---|' * len(kinds)}"]
        for model, numbers in results["limit"].items():
            cells = " | ".join(f"{numbers[kind]:,.0f}" for kind in kinds)
            parts += [f"| {model} | {numbers['ratio']:.3f} | {cells} |"]
        parts += [""]
    if "tensors" in results:
        parts += [
            "## One tensor",
            "",
            "In sums of it, `x.sum()`, in turns, on one thread, by time of the processor.",
            "",
            *tensors.table(results["tensors"]),
            "",
        ]
    if "peers" in results:
        parts += ["## Other tools", "", "One forward with each, all that it does included, in forwards without."]
        parts += ["The probe's record also holds each parameter and buffer, which no other tool reads.", ""]
        parts += [*peers.table(results["peers"]), ""]
    if "scale" in results:
        parts += ["## Steps and layers", "", *scale.table(results["scale"]), ""]
    if "python" in results:
        parts += [
            "## The price of Python",
            "",
            "Microseconds a layer call beyond the unwatched step, forward and backward,",
        ]
        parts += ["on 32 layers of 8 units:", ""]
        parts += [f"- {name}: {value:.0f}" for name, value in results["python"].items() if name != "unwatched"] + [""]
    if "attach" in results:
        parts += [
            "Milliseconds of the processor to attach and detach, and to register and remove hooks of torch that do",
            "nothing, two on each module and one on each parameter; without garbage collection:",
            "",
        ]
        parts += [
            f"- {title}: {watch:.0f}, and {alone:.0f} ({watch / alone:.2f})"
            for title, (watch, alone) in ((title, n.values()) for title, n in results["attach"].items())
        ]
        parts.append("")
    if "run" in results:
        n = results["run"]
        parts += ["## A run and an update", ""]
        parts += [
            "By time of the processor, on one thread.",
            f"`run` of the GPT-2 end to end (state kept and put back, record made): {n['run']:.2f} steps.",
            f"An update, and a failure, also call each module alone: {n['isolated']:.1f} steps.",
            f"An update measures the noise: {n['measured']:.1f} steps,",
            f"and {n['measured, of the answers too']:.1f} with the noise of those answers.",
            "",
        ]
    if "isolation" in results:
        parts += ["| each layer called alone | forwards, without a loss | steps, with one |", "|---|---|---|"]
        parts += [f"| {title} | {n['forward']:.1f} | {n['step']:.1f} |" for title, n in results["isolation"].items()]
        parts.append("")
    if "snapshot" in results:
        n = results["snapshot"]
        both = n["architecture, bytes"] + n["numbers, bytes"]
        parts += ["## Snapshots", ""]
        parts += [
            f"GPT-2 of 12 blocks, forward and backward: {both / 1e3:.1f} kB in both files,",
            f"{n['architecture, bytes'] / 1e3:.1f} of them architecture.",
            f"{n['layers']:,.0f} layers: read in {n['read, ms']:.0f} ms, compared in {n['compare, ms']:.0f} ms,",
            f"written in {n['write, ms']:.0f} ms of the processor,",
            f"on a machine whose Python takes {n['a million additions, ms']:.0f} ms for a loop of a million additions.",
            "",
            *_passing_lines(results.get("passing", {})),
            "What each use costs a whole test, beside stored outputs: [COSTS.md](COSTS.md).",
            "What shows that snapshots and checks find what they say: [evidence](../evidence/README.md).",
            "Records of up to 1,024 ranks: [RANKS.md](RANKS.md).",
            "What a watched step of small public models costs: [PUBLIC.md](PUBLIC.md).",
            "How long an HTML report takes to open: [page_load/RESULTS.md](page_load/RESULTS.md).",
            "The tests beside a commit, with `--modelprobe-base`: [BASE.md](BASE.md).",
            "",
        ]
    if "llama" in results:
        n = results["llama"]
        parts += [
            "Architecture of a Llama of 70 billion parameters on the meta device, with the shapes of a forward:",
            f"{n['seconds']:.0f} s, {n['gigabytes']:.1f} GB at most, Python and torch included;",
            f"a file of {n['bytes'] / 1e3:,.0f} kB, {n['layers']:,.0f} layers.",
            "",
        ]
    if "measures" in results and "reports" in results:
        parts += [*_report_lines(results["measures"], results["reports"])]
    if "load" in results:
        load = results["load"]
        parts += [
            "## A project that does not use the probe",
            "",
            "`pytest --collect-only` on one empty test, time of the processor, the quickest quarter of 40 turns:",
        ]
        times = f"{load['without']:.0f} ms without the plugin, {load['with']:.0f} ms with it"
        parts += [f"{times}: {load['difference']:.0f} ms more. torch is not imported."]
        if "pytest-torch" in load:
            parts += [f"With pytest-torch instead: {load['pytest-torch']:.0f} ms."]
        parts += [""]
    return "\n".join(parts)


BENCHES = (
    bench_forward, bench_bfloat16, bench_limit, bench_tensors, bench_peers, bench_scale, bench_python, bench_attach,
    bench_run, bench_isolation, bench_snapshot, bench_passing, bench_measures, bench_reports, bench_llama, bench_load,
)  # fmt: skip


def name_of(bench: Callable[[], Any]) -> str:
    return bench.__name__.removeprefix("bench_")


def _passing_lines(found: dict[str, float]) -> Iterator[str]:
    if found:
        yield "A test that passes, `run` and all that a comparison does, in plain steps by time of the processor,"
        yield "on one thread:"
        yield from (f"- {title}: {ratio:.1f}" for title, ratio in found.items())
        yield ""


def _report_lines(measures: dict[str, dict[str, float]], reports: dict[str, float]) -> Iterator[str]:
    yield from ("## Reports", "")
    yield "With none asked for, nothing of them is computed or imported: "
    yield "`tests/report/test_results.py` holds it."
    yield "What they ask of a `run` with a backward, as ratios to a run without, by time of the processor:"
    yield ""
    yield from ("| model | histograms | profile | both |", "|---|---|---|---|")
    for title, found in measures.items():
        yield f"| {title} | {' | '.join(f'{ratio:.2f}' for ratio in found.values())} |"
    yield ""
    yield "A run of pytest of ten tests with 24 layers each, as ratios to the run without a report, start of Python and"
    yield "imports apart: " + "; ".join(f"{name}: {ratio:.2f}" for name, ratio in reports.items()) + "."
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "which", nargs="*", help=f"resnet, gpt2, vit, {', '.join(name_of(bench) for bench in BENCHES)}; all by default"
    )
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    chosen = set(options.which)

    def wanted(name: str) -> bool:
        return not chosen or name in chosen

    known = RESULTS.with_suffix(".json")
    results: dict[str, Any] = json.loads(known.read_text("utf-8")) if chosen and known.exists() else {}
    for title, make in MODELS.items():
        if wanted(make.__name__.removesuffix("50")):
            results.setdefault("models", {})[title] = bench_model(make, options.rounds)
            print(title, json.dumps(results["models"][title]), flush=True)
            keep(results)
    for bench in BENCHES:
        name = name_of(bench)
        if wanted(name):
            results[name] = bench()
            keep(results)
    print(report(results))


def keep(results: dict[str, Any]) -> None:
    """Write down what is known by now: a run takes long, and may be stopped."""
    RESULTS.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    RESULTS.write_text(report(results), encoding="utf-8")


if __name__ == "__main__":
    main()
