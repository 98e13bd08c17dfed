"""What the standard checks say of 40 models of transformers that nobody chose: `python evidence/blind OUT.json`.

The rule: of the classes of transformers that have a configuration and a name that ends in `Model`, in the order of the
alphabet, 40 at equal distances. Each is made small (`hf-tiny:NAME`), and its inputs are guessed. One that cannot be
made or guessed, or takes more than three minutes, is left out, and told. Run it with two versions of this package on
`PYTHONPATH`, and compare:
`python evidence/blind --compare BEFORE.json AFTER.json` prints what only one of the two says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
import warnings
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
    return [every[i * len(every) // COUNT] for i in range(COUNT)]


def checked(name: str) -> dict[str, Any]:
    """Return what the findings, the hints and the standard checks say of a model."""
    from pytest_modelprobe import ModelProbe
    from pytest_modelprobe.exceptions import ModelProbeError
    from pytest_modelprobe.extras.scan.scanning import ScannedModel
    from pytest_modelprobe.extras.scan.target import load

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(SECONDS)
    try:
        with ModelProbe() as probe:
            scanned = ScannedModel(load(f"hf-tiny:{name}"), probe)
            said = {"findings": scanned.findings(), "hints": scanned.hints()}
            started = time.perf_counter()
            outcomes = {one.check: [one.verdict, one.text.partition("\n")[0]] for one in scanned.outcomes()}
            return {**said, "outcomes": outcomes, "seconds": round(time.perf_counter() - started, 1)}
    except (ModelProbeError, ImportError) as error:
        return {"left out": str(error).partition("\n")[0]}
    except OutOfTimeError:
        return {"left out": f"it took more than {SECONDS} s"}
    finally:
        signal.alarm(0)


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
    parser.add_argument("--compare", type=Path, nargs=2)
    given = parser.parse_args()
    if given.compare:
        compare(*(json.loads(path.read_text("utf-8")) for path in given.compare))
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name in names():
        with contextlib.redirect_stderr(None):
            found[name] = checked(name)
        print(name, found[name].get("seconds", found[name].get("left out")), flush=True)
        given.out.write_text(json.dumps(found, indent=1), "utf-8")


if __name__ == "__main__":
    main()
