"""What each use of the package costs a test, in bare steps (forward and backward) of the same model.

    python benchmarks/costs.py            # all models, with one thread and with two; writes COSTS.md beside this file
    python benchmarks/costs.py BERT-base  # one, printed alone

Every use is measured in turns with the bare step in a process of its own, and the median over rounds is given. The base
is a run of pytest, in which a test steps often enough to take some seconds, in runs without the base.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from modes import mean_square
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, assert_same_behavior, checks, files
from pytest_modelprobe.cli import main
from pytest_modelprobe.comparison import compare, layers_behind_zeros
from pytest_modelprobe.extras.scan.search import arguments, parse_input

HERE = Path(__file__).parent
PAGE = HERE / "COSTS.md"
ROUNDS = 3
ONCE = {"update", "comparison, failing", "checks.standard", "scan"}
"""What takes so many steps that it is measured once. *step* and *run* warm up."""

HEAD = """# What a test costs

Command: `python benchmarks/costs.py`. Machine: {cores} cores, torch {torch}, float32 on the CPU. The rows are bare
steps (forward and backward) of the same model, where nothing else is said: the median of three rounds, *update*,
*comparison, failing*, *checks.standard* and *scan* once. *comparison* and *update* have a `run` in them. *base* is a
run of pytest with `--modelprobe-base` and all tests run on both sides, in runs without. Peaks are of a process that
does nothing else, in peaks of one with a bare step.

A run of pytest with a test that uses no model takes {pytest:.0f} ms of a core, {syrupy:.0f} with syrupy, and {all:.0f}
with this package too: the least of forty runs.

"""

BEFORE = """
Before states shared their memory, layers that are alike their synthetic weights, and the noise of sums of products was
known, with one thread, and the code of that time:

| | ResNet-50 | BERT-base | GPT-2 | CNN | MLP |
|---|---|---|---|---|---|
| run | 3.14 | 1.98 | 3.65 | 1.93 | 7.21 |
| update | 42.2 | 21.5 | 21.6 | 46.7 | 175 |
| comparison, passing | 3.17 | 1.96 | 3.38 | 1.56 | 8.59 |
| comparison, failing | 14.3 | 5.25 | 9.11 | 18.6 | 87.4 |
| base | 3.05 | 3.44 | 3.45 | 2.67 | 2.67 |
| run, peak | 1.15 | 1.21 | 1.17 | 1 | 1.01 |
| update, peak | 1.5 | 1.75 | 1.61 | 1.13 | 1.02 |
"""

# --- models -------------------------------------------------------------------------------------------------------


def resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(ResNetConfig()).eval()


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()).eval()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=6, use_cache=False)).eval()


class Layers(nn.Sequential):
    """A model of the repository: those of classes of torch alone are not compared with a commit."""


def cnn() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    return Layers(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def mlp() -> nn.Module:
    return Layers(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())))


MODELS = {
    "ResNet-50, 2 x 224²": (resnet50, "pixel_values=2x3x224x224"),
    "BERT-base, 2 x 64": (bert, "input_ids=2x64:30000"),
    "GPT-2, 6 blocks, 2 x 64": (gpt2, "input_ids=2x64:50000"),
    "CNN of 7 layers, 16 x 32²": (cnn, "16x3x32x32"),
    "MLP of 8 layers, 64 x 256": (mlp, "64x256"),
}
"""Each with its input, as `modelprobe scan` reads it."""


def made(title: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    make, given = MODELS[title]
    torch.manual_seed(0)
    return make(), *arguments([parse_input(given)], ModelProbe())


# --- uses ---------------------------------------------------------------------------------------------------------


def uses(title: str, folder: Path) -> dict[str, Callable[[], object]]:
    """Return the bare step, each use of the package, and what a test would do without it."""
    model, args, kwargs = made(title)
    probe, stored = ModelProbe(), folder / "test_model.arch.json"
    weight = next(model.parameters())

    def step() -> None:
        model.zero_grad()
        mean_square(model(*args, **kwargs)).backward()

    def run() -> Any:
        return probe.run(model, *args, loss=mean_square, **kwargs)

    def update() -> None:
        record = run()
        files.write(stored, files.encode(record.live_run.measured(record, record)))

    def passing() -> None:
        record, expected = run(), files.read(stored).record
        assert compare(record, expected).same
        if behind := layers_behind_zeros(record):
            compare(record.live_run.isolated(record, like=expected, only=behind), expected)

    def failing() -> None:
        with torch.no_grad():
            weight.mul_(2)
        with contextlib.suppress(AssertionError):
            assert_same_behavior(run(), files.read(stored).record)
            raise RuntimeError("the change was not noticed")
        with torch.no_grad():
            weight.div_(2)

    def scan() -> None:
        make, given = MODELS[title]
        with contextlib.redirect_stdout(io.StringIO()):
            main(["scan", f"costs:{make.__name__}", "--input", given])

    def golden(path: Path, *, update: bool) -> None:
        with torch.no_grad():
            output = model(*args, **kwargs)
        output = output if isinstance(output, Tensor) else dict(output)
        if update:
            torch.save(output, path)
        else:
            torch.testing.assert_close(output, torch.load(path))

    def pytest_torch(path: Path, *, update: bool) -> None:
        from pytest_torch.golden import Golden

        with torch.no_grad():
            output = model(*args, **kwargs)
        Golden(path, update=update).check(output if isinstance(output, Tensor) else dict(output))

    return {
        "step": step,
        "run": run,
        "update": update,
        "comparison, passing": passing,
        "comparison, failing": failing,
        "checks.standard": lambda: judged(probe, model, args, kwargs),
        "scan": scan,
        "torch.save": functools.partial(golden, folder / "output.pt", update=True),
        "torch.load and compare": functools.partial(golden, folder / "output.pt", update=False),
        "pytest-torch, golden written": functools.partial(pytest_torch, folder / "golden.pt", update=True),
        "pytest-torch, golden compared": functools.partial(pytest_torch, folder / "golden.pt", update=False),
    }


def judged(probe: ModelProbe, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with warnings.catch_warnings(action="ignore"):
        checks.standard(probe, model, *args, loss=mean_square, kwargs=kwargs)


def measured(title: str) -> dict[str, float]:
    """Return milliseconds of the bare step, each use in bare steps, and bytes of what is stored."""
    with tempfile.TemporaryDirectory() as name:
        folder, seconds = Path(name), dict[str, list[float]]()
        for turn in range(-1, ROUNDS):
            for use, job in uses(title, folder).items():
                if use in ONCE if turn > 0 else turn < 0 and use not in ("step", "run"):
                    continue
                start = time.perf_counter()
                job()
                if turn >= 0:
                    seconds.setdefault(use, []).append(time.perf_counter() - start)
        step, *others = (statistics.median(some) for some in seconds.values())
        sizes = {f"{one.name}, kB": one.stat().st_size / 1e3 for one in sorted(folder.iterdir())}
    return {"step, ms": 1e3 * step, **{use: s / step for use, s in zip([*seconds][1:], others, strict=True)}, **sizes}


# --- whole processes ----------------------------------------------------------------------------------------------


def peak(title: str, use: str) -> dict[str, float]:
    """Return the megabytes that this process, which does nothing else, takes for a use at most."""
    with tempfile.TemporaryDirectory() as folder:
        uses(title, Path(folder))[use]()
    status = Path("/proc/self/status").read_text()  # not ru_maxrss, which counts the process that started this one
    return {"MB": int(status.partition("VmHWM:")[2].split()[0]) / 1024}


TEST = """
import sys
sys.path.insert(0, {here!r})
import pytest
from costs import uses

@pytest.mark.parametrize("i", range(4))
def test_model(i, tmp_path):
    step = uses({title!r}, tmp_path)["step"]
    for _ in range({steps}):
        step()
"""


def beside(title: str, milliseconds: float) -> dict[str, float]:
    """Return a run of pytest beside the commit before, from which nothing differs, in runs without it.

    Its four tests compute for ten seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        text = TEST.format(here=str(HERE), title=title, steps=round(2500 / milliseconds))
        Path(folder, "test_model.py").write_text(text)
        git = ["git", "-c", "user.name=a", "-c", "user.email=a"]
        for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "before"]):
            subprocess.run([*git, *command], cwd=folder, check=True)
        # With as many threads as cores, which is what the variable need not say, both sides share the cores.
        env = {key: v for key, v in os.environ.items() if key != "OMP_NUM_THREADS" or int(v) < (os.cpu_count() or 1)}
        seconds = []
        for options in ([], ["--modelprobe-base=HEAD", "--modelprobe-base-all"]):
            start = time.perf_counter()
            ran = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", *options],
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
            assert ran.returncode == 0, ran.stdout
            seconds.append(time.perf_counter() - start)
    return {"base": seconds[1] / seconds[0]}


def start() -> dict[str, float]:
    """Return the least milliseconds of a core that a run of pytest takes by itself, with syrupy, and with all."""
    without = ["-p", "no:modelprobe"]
    chosen = {"pytest": [*without, "-p", "no:syrupy"], "syrupy": without, "all": []}
    least = dict.fromkeys(chosen, math.inf)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_nothing.py").write_text("def test_nothing(): pass")
        for _ in range(40):
            for name, options in chosen.items():
                command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
                process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
                _, status, used = os.wait4(process.pid, 0)
                assert status == 0
                least[name] = min(least[name], 1e3 * (used.ru_utime + used.ru_stime))
    return least


# --- the page -----------------------------------------------------------------------------------------------------


def told(what: str, threads: int, *arguments: object) -> dict[str, float]:
    """Return what a function of this module returns, called in a process of its own with some threads."""
    code = f"import costs, json; print(json.dumps(costs.{what}(*{arguments!r})))"
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    out = subprocess.run([sys.executable, "-c", code], cwd=HERE, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return found


def column(title: str, threads: int) -> dict[str, float]:
    """Return all that is measured of a model."""
    found = told("measured", threads, title)
    found |= told("beside", threads, title, found["step, ms"])
    bare, run, update = (told("peak", threads, title, use)["MB"] for use in ("step", "run", "update"))
    return {**found, "step, peak MB": bare, "run, peak": run / bare, "update, peak": update / bare}


def page(columns: dict[str, dict[str, float]], started: dict[str, float]) -> str:
    """Return the page of all columns, and of what `start` returned."""
    rows = [*next(iter(columns.values()))]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += ["| " + " | ".join([row, *(f"{one[row]:,.3g}" for one in columns.values())]) + " |" for row in rows]
    return HEAD.format(torch=torch.__version__, cores=os.cpu_count(), **started) + "\n".join(lines) + "\n" + BEFORE


if __name__ == "__main__":
    chosen = [title for title in MODELS if not sys.argv[1:] or title.startswith(tuple(sys.argv[1:]))]
    columns: dict[str, dict[str, float]] = {}
    started = start()
    for threads in (1, 2):
        for title in chosen:
            columns[f"{title}, {threads} thread{'s' * (threads > 1)}"] = column(title, threads)
            if sys.argv[1:]:
                print(page(columns, started))
            else:
                PAGE.write_text(page(columns, started))
