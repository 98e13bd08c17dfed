"""What the package says of fifty public models. Writes a file of JSON, one row for each outcome.

    pip install --no-deps braindecode ...                # the packages of `models.NAMESPACES`, and what they import
    PYTHONPATH=CHECKOUT python evidence/public_models FILE.json          # all: 20 minutes if no other work runs
    PYTHONPATH=CHECKOUT python evidence/public_models FILE.json NAME ... # parts of names; keeps the rows of others

Each model has a process of its own, which may take `SECONDS` of the processor. There, one after the other: inputs are
guessed as `modelprobe scan` does, but those of `models` are used from there on; the standard checks; a run with its
findings and hints; four steps of SGD that are watched, and the assertions that any training is expected to pass. At the
end pytest writes the snapshots of all models, and compares them in a second process. `verdicts.md` says of each
complaint whether it is true.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO
from xml.etree import ElementTree

HERE = Path(__file__).parent
SECONDS = 120
"""Of the processor, for each model."""
STEPS = 4
ASSERTIONS = (
    "assert_finite", "assert_grad_finite", "assert_no_dead_layers", "assert_grad_flow", "assert_all_params_have_grad",
    "assert_params_updated", "assert_training_loop", "assert_no_leftover_hooks",
)  # fmt: skip
COMPLAINTS = ("broken", "hint", "refused", "crash")
Row = dict[str, str]
"""The part, what was asked, its verdict and what it said."""


def asked(part: str, what: str, ask: Callable[[], Any]) -> Iterator[Row]:
    """Yield a row for what an assertion says, and one for each warning."""
    from pytest_modelprobe import HintWarning, ModelProbeError

    verdict, text = "holds", ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", HintWarning)
        try:
            ask()
        except AssertionError as error:
            verdict, text = "broken", str(error)
        except ModelProbeError as error:
            verdict, text = "refused", f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - whatever a model raises
            verdict, text = "crash", f"{type(error).__name__}: {error}"
    yield {"part": part, "what": what, "verdict": verdict, "text": text}
    for one in caught:
        yield {"part": part, "what": what, "verdict": "hint", "text": str(one.message)}


def rows(name: str) -> Iterator[Row]:
    """Yield what is said of one model."""
    import models
    import torch

    from pytest_modelprobe import ModelProbe, assertions, checks
    from pytest_modelprobe.assertions.findings import findings, hints
    from pytest_modelprobe.extras.scan.scanning import ScannedModel
    from pytest_modelprobe.extras.scan.target import Target

    make = functools.partial(models.make, name)
    probe, (args, kwargs) = ModelProbe(), models.inputs(name)
    try:
        target = Target(name, make, *name.split(":"), "make()")
        guess = {"verdict": "guessed", "text": " ".join(map(str, ScannedModel(target, probe).inputs))}
    except Exception as error:  # noqa: BLE001 - whatever a model raises
        guess = {"verdict": "not guessed", "text": f"{type(error).__name__}: {error}"}
    yield {"part": "inputs", "what": "scan", **guess}

    model = probe.build(make)
    for what, check in checks.STANDARD.items():
        options = {"factory": make} if "factory" in check.options else {}
        found = []
        ask = functools.partial(check.outcome, probe, model, *args, kwargs=kwargs, **options)
        for row in asked("checks", what, lambda ask=ask, found=found: found.append(ask())):  # type: ignore[misc]
            told = {"verdict": found[0].verdict, "text": str(found[0])} if found and row["verdict"] == "holds" else {}
            yield {**row, **told}

    records: list[Any] = []
    run = functools.partial(probe.run, probe.build(make), *args, kwargs=kwargs, loss="random")
    yield from asked("run", "run", lambda: records.append(run()))
    for record in records:
        yield from ({"part": "run", "what": "finding", "verdict": "broken", "text": text} for text in findings(record))
        yield from ({"part": "run", "what": "hint", "verdict": "hint", "text": text} for text in hints(record))

    model = probe.build(make).train()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 1e-2)
    targets = torch.Generator().manual_seed(1)
    watch = probe.watch(model)

    def train() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = torch.zeros(())
            targets.manual_seed(1)
            for output in outputs_of(model(*args, **kwargs)):
                target = torch.randn(output.shape, generator=targets)
                loss = loss + (output.masked_fill(~output.isfinite(), 0) - target).square().mean()
            loss.backward()
            optimizer.step()

    yield from asked("training", "train", train)
    for assertion in ASSERTIONS:
        subject = model if assertion == "assert_no_leftover_hooks" else watch
        if assertion == ASSERTIONS[-1]:
            probe.close()
        yield from asked("training", assertion, functools.partial(getattr(assertions, assertion), subject))


def outputs_of(value: Any) -> Iterator[Any]:
    """Yield the floating tensors with a gradient in an output."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from outputs_of(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from outputs_of(one)


def alone(name: str) -> list[Row]:
    """Return the rows of a model, which has a fork of this process."""
    importlib.import_module(name.partition(":")[0])
    with tempfile.TemporaryFile("w+") as out:
        process = multiprocessing.get_context("fork").Process(target=write, args=(name, out))
        process.start()
        process.join()
        out.seek(0)
        found = [json.loads(line) for line in out]
    if process.exitcode != 0:
        text = f"it ended with {process.exitcode}; {-signal.SIGXCPU} is the limit of {SECONDS} s"
        found.append({"part": "process", "what": "process", "verdict": "crash", "text": text})
    return found


def write(name: str, out: TextIO) -> None:
    """Write the rows of a model, as soon as they are known."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    for row in rows(name):
        print(json.dumps(row), file=out, flush=True)
    os._exit(0)  # some packages leave threads that do not end


SNAPSHOT = """
import warnings
import models
import pytest


@pytest.mark.parametrize("name", {names!r})
def test_snapshot(name, modelprobe, modelprobe_snapshot):
    args, kwargs = models.inputs(name)
    model = modelprobe.build(lambda: models.make(name))
    assert modelprobe.run(model, *args, kwargs=kwargs, loss="random", mode="eval") == modelprobe_snapshot
"""


def snapshots(names: list[str]) -> dict[str, list[Row]]:
    """Return the rows of models whose snapshots pytest writes, and compares in a second process."""
    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        path, results = Path(folder, "test_snapshots.py"), Path(folder, "results.xml")
        path.write_text(SNAPSHOT.format(names=names), "utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-W", "ignore", f"--rootdir={folder}",
                   "--junitxml", str(results), str(path)]  # fmt: skip
        paths = map(os.path.abspath, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        where = os.pathsep.join([str(HERE), *paths])  # pytest runs in another folder
        for what in ("--snapshot-update", "compared"):
            results.unlink(missing_ok=True)
            options = [what] if what.startswith("--") else []
            ran = subprocess.run([*command, *options], env={**os.environ, "PYTHONPATH": where}, cwd=folder,
                                 capture_output=True, text=True)  # fmt: skip
            cases = list(ElementTree.parse(results).iter("testcase")) if results.exists() else []
            if not cases:
                found[names[0]].append(
                    {"part": "snapshot", "what": what, "verdict": "crash", "text": ran.stdout + ran.stderr}
                )
            for case in cases:
                name = case.get("name", "").partition("[")[2].removesuffix("]")
                failures = [one for one in case if one.tag in ("failure", "error")]
                said = [(one.get("message") or "") + "\n\n" + (one.text or "") for one in failures]
                found[name].append(
                    {"part": "snapshot", "what": what, "verdict": "broken" if failures else "holds",
                     "text": "\n".join(said)}
                )  # fmt: skip
    return found


def main() -> None:
    """Run, and write the file after each model."""
    sys.path.insert(0, str(HERE))
    warnings.simplefilter("ignore")
    import models

    path, parts = Path(sys.argv[1]), sys.argv[2:]
    names = list(dict.fromkeys(name for part in parts or [""] for name in models.MODELS if part in name))
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for name in names:
        started = time.monotonic()
        known[name] = alone(name)
        path.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
        told = sum(row["verdict"] in COMPLAINTS for row in known[name])
        print(f"{name}: {told} complaints in {time.monotonic() - started:.0f} s", flush=True)
    for name, more in snapshots(names).items():
        known[name] += more
    path.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
