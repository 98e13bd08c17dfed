"""Everything to try on a GPU, in one command of under ten minutes, which writes a page in Markdown for each part.

    python benchmarks/gpu.py gpu                         # into the folder gpu
    python benchmarks/gpu.py gpu --device cpu --quick    # tries the script: sizes that mean nothing

It needs torch, pytest, numpy and syrupy, and a checkout, with or without git. What a machine without a network lacks is
carried there and installed first:

    pip download --no-deps --dest wheels --constraint constraints.txt syrupy hypothesis sortedcontainers attrs \
        cmarkgfm cffi pycparser pytest-randomly
    python benchmarks/gpu.py gpu --wheels wheels

A file of tests whose imports are missing is left out, and the page says so. Each part runs in a process of its own, in
which its page grows line by line, and has a time limit: an error or a hang is on its page, and the other parts run. The
exit code is 1 if one failed. What a step costs is a ratio within a
round, in which every mode runs, in an order that changes; on CUDA it is measured by events on the stream.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib.metadata
import importlib.util
import math
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
Step = Callable[[], None]

# --- models -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """GPT-2 small, by default."""

    def __init__(
        self, blocks: int = 12, width: int = 768, heads: int = 12, words: int = 50257, places: int = 1024
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


class Bottleneck(nn.Module):
    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(given, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride > 1 or given != 4 * width:
            self.shortcut.append(nn.Conv2d(given, 4 * width, 1, stride, bias=False)).append(nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def resnet(stages: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """Return ResNet-50, by default."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    given = width
    for number, blocks in enumerate(stages):
        for block in range(blocks):
            layers.append(Bottleneck(given, width << number, 2 if number and not block else 1))
            given = width << number + 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, classes))


def gpt2_step(device: str, quick: bool) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    words, batch, length = (100, 2, 32) if quick else (50257, 8, 1024)
    model = GPT2(2, 64, 4, words, length) if quick else GPT2()
    model = model.to(device, torch.bfloat16)
    ids = torch.randint(0, words, (batch, length)).to(device)

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()

    return model, step


def resnet_step(device: str, quick: bool) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model = (resnet((1, 1), 8, 10) if quick else resnet()).to(device)
    batch, size = (2, 32) if quick else (32, 224)
    images, labels = torch.randn(batch, 3, size, size).to(device), torch.randint(0, 10, (batch,)).to(device)

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()

    return model, step


# --- what is measured ---------------------------------------------------------------------------------------------


def elapsed(device: str, job: Step) -> float:
    """Return the seconds of a job, on CUDA as the stream sees them."""
    if device == "cpu":
        start = time.perf_counter()
        job()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    job()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


@contextlib.contextmanager
def without_fingerprints() -> Iterator[None]:
    from pytest_modelprobe import statistics as reduction

    options = reduction.reduce.__kwdefaults__
    options["fingerprint"] = False
    try:
        yield
    finally:
        options["fingerprint"] = True


def modes_of(model: nn.Module) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    from pytest_modelprobe import Watch

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        with without_fingerprints(), Watch(model):
            yield

    return {"unwatched": contextlib.nullcontext, "statistics": alone, "with fingerprints": lambda: Watch(model)}


def cost(make: Callable[[str, bool], tuple[nn.Module, Step]], device: str, quick: bool) -> Iterator[str]:
    """Yield a table of what the modes cost."""
    model, step = make(device, quick)
    modes = modes_of(model)
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    order, shuffle = list(modes), random.Random(0).shuffle
    start, turn = time.perf_counter(), -1
    while turn < 2 or (turn < 12 and time.perf_counter() - start < (2 if quick else 40)):
        shuffle(order)
        for name in order:
            gc.collect()
            with modes[name]():
                step()
                found = elapsed(device, step)
            if turn >= 0:  # the first round compiles
                seconds[name].append(found)
        turn += 1
    yield "| | of the unwatched step | middle half | ms |"
    yield "|---|---|---|---|"
    for name, values in seconds.items():
        each = [a / b for a, b in zip(values, seconds["unwatched"], strict=True)]
        low, middle, high = statistics.quantiles(each, n=4)
        yield f"| {name} | {middle:.3f} | {low:.3f} – {high:.3f} | {statistics.median(values) * 1e3:.2f} |"
    yield ""
    yield f"{turn} rounds. Aim: at most 1.10 for statistics, 1.15 with fingerprints."


def part_gpt2(device: str, quick: bool) -> Iterator[str]:
    """GPT-2 small, 8 x 1024, bfloat16"""
    yield from cost(gpt2_step, device, quick)


def part_resnet(device: str, quick: bool) -> Iterator[str]:
    """ResNet-50, 32 x 224², float32"""
    yield from cost(resnet_step, device, quick)


def part_numbers(device: str, quick: bool) -> Iterator[str]:
    """The same numbers as on the CPU"""
    yield "| tensor | furthest mean, std | fingerprint | counts, range, units |"
    yield "|---|---|---|---|"
    yield from numbers(device, quick)
    yield ""
    yield "Mean and std are in units of the rms, fingerprints relative."


def numbers(device: str, quick: bool) -> Iterator[str]:
    from pytest_modelprobe.statistics import collect, reduce

    shapes = [((40, 256), -1), ((3, 64, 30, 30), -3), ((8, 40, 7, 7), -3), ((9, 1000), -1), ((2_000_000,), None)]
    for shape, axis in shapes[: 3 if quick else None]:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            x = torch.randn(shape).relu().sub(0.25).to(dtype)
            x.view(-1)[7:10] = torch.tensor([math.nan, math.inf, -math.inf]).to(dtype)
            here, there = collect([reduce(x, axis=axis), reduce(x.to(device), axis=axis)])
            a, b = here.statistics, there.statistics
            assert a
            assert b
            names = ("count", "nan", "posinf", "neginf", "zeros", "min", "max")
            # A unit with a NaN is not equal to itself.
            same = all(getattr(a, n) == getattr(b, n) for n in names) and repr(here.units) == repr(there.units)
            moments = max(abs(a.mean - b.mean), abs(a.std - b.std)) / a.rms
            assert here.fingerprint
            assert there.fingerprint
            far = math.dist(here.fingerprint, there.fingerprint) / math.hypot(*here.fingerprint)
            kind = str(dtype).removeprefix("torch.")
            yield f"| {kind} {shape} | {moments:.1e} | {far:.1e} | {'the same' if same else '**other**'} |"
            if not (same and moments < 1e-5 and far < 1e-5):
                raise RuntimeError(f"{device} computes other numbers of {kind} {shape} than the CPU")


def part_waiting(device: str, quick: bool) -> Iterator[str]:
    """Nothing waits for the device"""
    from pytest_modelprobe import Watch

    for make in (gpt2_step, resnet_step):
        model, step = make(device, True)
        step()
        with Watch(model):
            step()  # compiles
        with Watch(model) as watch:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the mode is a beta feature
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("error")
            try:
                step()
                step()
            finally:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        yield f"- {type(model).__name__}: two steps, {watch.record.forwards} forwards recorded."
    if device != "cuda":
        yield ""
        yield "Not on CUDA: nothing was looked for."


def part_machine(device: str, quick: bool) -> Iterator[str]:
    """Machine"""
    yield f"- {platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores"
    yield f"- torch {torch.__version__}, CUDA {torch.version.cuda}"
    for name in ("numpy", "pytest", "syrupy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"- {name} {importlib.metadata.version(name)}"
    if device == "cuda":
        found = torch.cuda.get_device_properties(0)
        yield f"- {found.name}, {found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} multiprocessors, "
        yield f"  compute capability {found.major}.{found.minor}"
    with contextlib.suppress(FileNotFoundError):  # there is no git
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        yield f"- commit {commit.stdout.strip() or 'unknown'}"


# --- tests --------------------------------------------------------------------------------------------------------


def part_tests(device: str, quick: bool) -> Iterator[str]:
    """Tests marked `cuda`"""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.cuda" in path.read_text("utf-8")]
    yield from results_of(files, "-m", "cuda")


def part_examples(device: str, quick: bool) -> Iterator[str]:
    """Examples"""
    files = sorted((ROOT / "examples").glob("test_*.py"))
    yield from results_of([path for path in files if path.name != "test_snapshots.py"], f"--modelprobe-device={device}")


def part_snapshots(device: str, quick: bool) -> Iterator[str]:
    """Snapshots written on the CPU, compared on the device"""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        shutil.copy(Path(__file__), here / "models.py")
        own = here / "test_own.py"
        own.write_text(OWN_SNAPSHOTS, encoding="utf-8")
        example = here / "test_snapshots.py"
        shutil.copy(ROOT / "examples" / "test_snapshots.py", example)
        yield from results_of([own, example], "--modelprobe-device=cpu", "--snapshot-update", at=here)
        for path in sorted(here.rglob("*.probe.json")) if device != "cpu" else ():
            text = path.read_text("utf-8").replace('"device": "cpu"', f'"device": "{device}"')
            path.with_name(path.name.replace(".probe.json", f".{device}.probe.json")).write_text(text, "utf-8")
        yield from results_of([own, example], f"--modelprobe-device={device}", at=here)


OWN_SNAPSHOTS = """
import models


def test_gpt2(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(lambda: models.GPT2(2, 64, 4, 200, 16)).eval()
    assert modelprobe.run(model, modelprobe.randint(0, 200, (2, 16)), loss="random") == modelprobe_snapshot


def test_resnet(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(lambda: models.resnet((1, 1), 8, 10)).train()
    assert modelprobe.run(model, modelprobe.randn(4, 3, 32, 32), loss="random") == modelprobe_snapshot
"""


def lacking(path: Path) -> list[str]:
    """Return the packages that a file imports and this environment lacks."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return sorted(name for name in found - {"models"} if importlib.util.find_spec(name) is None)


def results_of(paths: list[Path], *options: str, at: Path = ROOT) -> Iterator[str]:
    """Run the files whose imports are there; yield what pytest counted, and what failed."""
    there = []
    for path in paths:
        missing = lacking(path)
        if missing:
            yield f"- `{path.name}`: left out, no {', '.join(missing)}"
        else:
            there.append(path)
    if not there:
        return
    installed = any(e.value.startswith("pytest_modelprobe") for e in importlib.metadata.entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "pytest_modelprobe.plugin"]
    # The configuration of the checkout has options of plugins that may be missing.
    ini = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(at), "-W", "ignore::pytest.PytestConfigWarning"]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *plugin, *ini, *options, *map(str, there)]
    run = subprocess.run(command, cwd=at, env=environment(), capture_output=True, text=True)
    lines = run.stdout.strip().splitlines() or run.stderr.strip().splitlines() or [f"exit {run.returncode}"]
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|errors?|deselected)\b.* in ", line)]
    names = ", ".join(f"`{path.name}`" for path in there)
    yield f"- {names} {' '.join(options)}: {(counts or lines)[-1].strip('= ')}"
    if run.returncode not in (0, 5):  # 5: no test
        yield from quoted("\n".join(lines[-60:]))
        FAILED.append(counts[-1] if counts else "pytest failed")


FAILED: list[str] = []
"""What failed in this process, whose other files of tests run all the same."""


def environment() -> dict[str, str]:
    """Return the environment in which the package of this checkout is imported, and no test is left out as long."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "MODELPROBE_LONG": "1"}


# --- the page -----------------------------------------------------------------------------------------------------

# The most important first, each with its limit in seconds: 470 in all.
PARTS: dict[str, tuple[Callable[[str, bool], Iterator[str]], float]] = {
    "machine": (part_machine, 20),
    "waiting": (part_waiting, 40),
    "numbers": (part_numbers, 60),
    "gpt2": (part_gpt2, 70),
    "resnet": (part_resnet, 70),
    "tests": (part_tests, 120),
    "snapshots": (part_snapshots, 45),
    "examples": (part_examples, 45),
}


def quoted(text: str) -> Iterator[str]:
    yield from ("", "```text", *text.rstrip().splitlines(), "```", "")


def part(name: str, arguments: list[str], limit: float, page: Path) -> bool:
    """Run a part in a process of its own, which writes its page, and return whether it ended well."""
    command = [sys.executable, str(Path(__file__).resolve()), "--part", name, *arguments]
    with page.open("w", encoding="utf-8") as out, tempfile.TemporaryFile("w+") as errors:
        # A session of its own, so that what it started ends with it.
        process = subprocess.Popen(command, env=environment(), stdout=out, stderr=errors, start_new_session=True)
        try:
            process.wait(limit)
            said = f"**Failed with exit code {process.returncode}.**" if process.returncode else ""
        except subprocess.TimeoutExpired:
            said = f"**Stopped after {limit:.0f} seconds.**"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        if said:
            errors.seek(0)
            out.write("\n".join(["", said, *quoted("\n".join(errors.read().splitlines()[-30:]))]))
        return not said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("gpu"), help="where the pages are written")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: tries the script")
    parser.add_argument("--part", choices=PARTS, help="one part, in this process")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, which are installed first")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --device cpu --quick tries the script")
    if options.part:
        sys.path.insert(0, str(ROOT))
        function = PARTS[options.part][0]
        print(f"## {(function.__doc__ or options.part).strip()}\n", flush=True)
        for line in function(options.device, options.quick):
            print(line, flush=True)
        return 1 if FAILED else 0
    if options.wheels:
        wheels = sorted(map(str, options.wheels.glob("*.whl")))
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *wheels], check=True
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    arguments = ["--device", options.device, *(["--quick"] if options.quick else [])]
    failed = []
    for number, (name, (_, limit)) in enumerate(PARTS.items()):
        page = options.folder / f"{number}-{name}.md"
        if not part(name, arguments, limit, page):
            failed.append(name)
        print(page.read_text("utf-8"), flush=True)
    print(f"{time.monotonic() - start:.0f} seconds in all. Failed: {', '.join(failed) or 'nothing'}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
