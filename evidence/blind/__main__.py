"""What the standard checks say of 40 models of transformers that nobody chose: `python evidence/blind OUT.json`.

The rule: of the classes of transformers that have a configuration and a name that ends in `Model`, in the order of the
alphabet, 40 at equal distances. Each is made small (`hf-tiny:NAME`), and its inputs are guessed. One that cannot be
made or guessed, or takes more than three minutes, is left out, and told. Run it with two versions of this package on
`PYTHONPATH`, and compare:
`python evidence/blind --compare BEFORE.json AFTER.json` prints what only one of the two says.
`python evidence/blind OUT.json models held_out` takes the models of `evidence/guesses` instead; a name such as
`models:monai__unet` is one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COUNT = 40
SECONDS = 180


class OutOfTimeError(BaseException):
    """A model took too long."""


def out_of_time(*_: object) -> None:
    raise OutOfTimeError


def names() -> list[str]:
    import transformers

    def has_configuration(name: str) -> bool:
        try:
            return getattr(getattr(transformers, name), "config_class", None) is not None
        except ImportError:  # of a library that is not installed
            return False

    every = [
        name for name in sorted(dir(transformers)) if name.endswith("Model") and not name.endswith("PreTrainedModel")
    ]
    every = [name for name in every if has_configuration(name)]
    return [f"hf-tiny:{every[i * len(every) // COUNT]}" for i in range(COUNT)]


def functions(module: str) -> Iterator[str]:
    """Yield the models of a module of `evidence/guesses`."""
    for name, one in vars(importlib.import_module(module)).items():
        if inspect.isfunction(one) and one.__module__ == module:
            yield f"{module}:{name}"


def checked(name: str) -> dict[str, Any]:
    """Return what the findings, the hints and the standard checks say of a model."""
    from pytest_modelprobe import ModelProbe
    from pytest_modelprobe.extras.scan.scanning import ScannedModel
    from pytest_modelprobe.extras.scan.target import load

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(SECONDS)
    try:
        with ModelProbe() as probe:
            scanned = ScannedModel(load(name), probe)
            hints = [*scanned.hints(), *(f"in training: {line}" for line in training_hints(scanned))]
            said = {"findings": scanned.findings(), "hints": hints}
            started = time.process_time()
            outcomes = {one.check: [one.verdict, one.text.partition("\n")[0]] for one in scanned.outcomes()}
            return {**said, "outcomes": outcomes, "seconds": round(time.process_time() - started, 1)}
    except Exception as error:  # noqa: BLE001 - whatever a model raises
        return {"left out": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    except OutOfTimeError:
        return {"left out": f"it took more than {SECONDS} s"}
    finally:
        signal.alarm(0)


def training_hints(scanned: Any) -> list[str]:
    """Return the hints of a watch of three steps of SGD, each with two backward passes."""
    import torch

    from pytest_modelprobe.assertions.findings import hints
    from pytest_modelprobe.models import flatten

    model = scanned.probe.build(scanned.target.make).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        return []
    optimizer = torch.optim.SGD(parameters, 1e-3)
    args, kwargs = scanned.arguments
    watch = scanned.probe.watch(model)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            outputs = [x for _, x in flatten("output", model(*args, **kwargs)).tensors if x.requires_grad]
            sum(x.abs().square().mean() for x in outputs).backward()
        optimizer.step()
    return hints(watch.record)


def told(row: dict[str, Any]) -> set[str]:
    """Return what a row says is wrong, or may be."""
    outcomes = row.get("outcomes", {})
    checks = {
        f"{name}: {verdict}: {text}" for name, (verdict, text) in outcomes.items() if verdict in ("broken", "hint")
    }
    return {*checks, *row.get("findings", ()), *(f"hint: {line}" for line in row.get("hints", ()))}


def compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    both = [name for name in before if "outcomes" in before[name] and "outcomes" in after.get(name, {})]
    print(
        f"{len(both)} of {len(before)} models; seconds {sum(before[n]['seconds'] for n in both):.0f} before, ", end=""
    )
    print(f"{sum(after[n]['seconds'] for n in both):.0f} after")
    for name in both:
        was, now = told(before[name]), told(after[name])
        for sign, lines in (("-", was - now), ("+", now - was)):
            for line in sorted(lines):
                print(f"{sign} {name}: {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--compare", type=Path, nargs=2)
    given = parser.parse_args()
    if given.compare:
        compare(*(json.loads(path.read_text("utf-8")) for path in given.compare))
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    sys.path.append(str(Path(__file__).parents[1] / "guesses"))
    chosen = [one for name in given.names for one in ([name] if ":" in name else functions(name))]
    found: dict[str, Any] = {}
    for name in chosen or names():
        with contextlib.redirect_stderr(None):
            found[name] = checked(name)
        print(name, found[name].get("seconds", found[name].get("left out")), flush=True)
        given.out.write_text(json.dumps(found, indent=1), "utf-8")


if __name__ == "__main__":
    main()
