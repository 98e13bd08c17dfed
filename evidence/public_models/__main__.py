"""What the package says of fifty public models. Writes a file of JSON, one row for each complaint.

    pip install --no-deps braindecode ...                  # the packages of `models.NAMESPACES`, and what they import
    PYTHONPATH=CHECKOUT python evidence/public_models FILE.json          # all: about 20 minutes
    PYTHONPATH=CHECKOUT python evidence/public_models FILE.json NAME ... # parts of names; keeps the rows of others

Each model has a process of its own, which may take `SECONDS`. There, one after the other: inputs are guessed as
`modelprobe scan` does, but those of `models` are used from there on; the standard checks; a run with its findings and
hints; four steps of SGD that are watched, and the assertions that any training is expected to pass. Then pytest writes
the snapshots of a package, and compares them in a second process. `verdicts.json` says of each complaint whether it is
true, and RESULTS.md what came of it.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).parent
SECONDS = 400
STEPS = 4
ASSERTIONS = (
    "assert_finite", "assert_grad_finite", "assert_no_dead_layers", "assert_grad_flow", "assert_all_params_have_grad",
    "assert_params_updated", "assert_training_loop", "assert_no_leftover_hooks",
)  # fmt: skip
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
    from pytest_modelprobe.cli.scanning import ScannedModel, Target

    make = functools.partial(models.make, name)
    probe, (args, kwargs) = ModelProbe(), models.inputs(name)
    try:
        target = Target(name, make, *name.split(":"), "make()")
        guess = {"verdict": "guessed", "text": " ".join(map(str, ScannedModel(target, probe).inputs))}
    except Exception as error:  # noqa: BLE001 - whatever a model raises
        guess = {"verdict": "not guessed", "text": f"{type(error).__name__}: {error}"}
    yield {"part": "inputs", "what": "scan", **guess}

    for what, check in checks.STANDARD.items():
        options = {"factory": make} if "factory" in check.options else {}
        found = []
        ask = functools.partial(check.outcome, probe, probe.build(make), *args, kwargs=kwargs, **options)
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


def alone(names: list[str]) -> dict[str, list[Row]]:
    """Return the rows of models of one package: a process imports it, and each model has a fork of that process."""
    with tempfile.TemporaryFile("w+") as out:
        subprocess.run([sys.executable, str(HERE), "--fork", *names], stdout=out, check=True)
        out.seek(0)
        lines = [json.loads(line[4:]) for line in out if line.startswith("ROW ")]
    return {name: [row for of, row in lines if of == name] for name in names}


def fork(names: list[str]) -> None:
    """Print the rows of each model, as soon as they are known."""
    import models
    import torch  # noqa: F401 - before the forks

    from pytest_modelprobe import checks  # noqa: F401

    models.make(names[0])
    for name in names:
        process = multiprocessing.get_context("fork").Process(target=show, args=(name,))
        process.start()
        process.join(SECONDS)
        if process.exitcode != 0:
            ended = f"not done after {SECONDS} s" if process.exitcode is None else f"it ended with {process.exitcode}"
            process.kill()
            process.join()
            shown(name, {"part": "process", "what": "process", "verdict": "crash", "text": ended})


def show(name: str) -> None:
    for row in rows(name):
        shown(name, row)
    os._exit(0)  # some packages leave threads that do not end


def shown(name: str, row: Row) -> None:
    print("\nROW " + json.dumps([name, row]), flush=True)


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
        where = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        for what in ("--snapshot-update", "compared"):
            results.unlink(missing_ok=True)
            options = [what] if what.startswith("--") else []
            ran = subprocess.run([*command, *options], env={**os.environ, "PYTHONPATH": where}, cwd=folder,
                                 capture_output=True, text=True, timeout=SECONDS * len(names))  # fmt: skip
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
    """Run, and write the file after each package."""
    sys.path.insert(0, str(HERE))
    warnings.simplefilter("ignore")
    if sys.argv[1] == "--fork":
        return fork(sys.argv[2:])
    path, parts = Path(sys.argv[1]), sys.argv[2:]
    import models

    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    packages = defaultdict(list)
    for name in models.MODELS:
        if not parts or any(part in name for part in parts):
            packages[name.partition(".")[0].partition(":")[0]].append(name)
    for names in packages.values():
        started = time.monotonic()
        found = alone(names)
        for name, more in snapshots(names).items():
            found[name] = found.get(name, []) + more
        path.write_text(json.dumps({**known, **found}, indent=1) + "\n", "utf-8")
        known |= found
        told = [row for of in found.values() for row in of if row["verdict"] in ("broken", "hint", "crash", "refused")]
        print(f"{names[0]}: {len(told)} complaints in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
