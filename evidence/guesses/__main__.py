"""Which inputs `modelprobe scan` guesses for forty public models. Prints a page of Markdown.

    python evidence/guesses models > evidence/guesses/RESULTS.md
    python evidence/guesses held_out   # forty others, the second table there
    PYTHONPATH=CHECKOUT python evidence/guesses models   # another version: the column *before*, put in by hand

It needs the packages of `PACKAGES` in the module, of which `pip install --no-deps` is enough for most. A package that
cannot be imported is said in its row.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
import time
import warnings
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = map(str, (HERE, HERE.parent))


def guessed(module: str, name: str) -> tuple[str, float, str]:
    """Return the inputs, the seconds of the processor that finding them took, and why there are none."""
    from pytest_modelprobe import ModelProbe
    from pytest_modelprobe.extras.scan.scanning import ScannedModel
    from pytest_modelprobe.extras.scan.target import load

    target = load(f"{module}:{name}")
    try:
        target.make()
    except Exception as error:  # noqa: BLE001 - a package that is not there
        return "", 0.0, f"not made: {type(error).__name__}: {error}"
    started = time.process_time()
    try:
        scanned = ScannedModel(target, ModelProbe())
        scanned.record  # noqa: B018 - the model runs on them
    except Exception as error:  # noqa: BLE001 - whatever a model raises
        return "", time.process_time() - started, str(error).partition("\n")[0]
    return " ".join(map(str, scanned.inputs)), time.process_time() - started, ""


def main() -> None:
    """Print the page."""
    warnings.simplefilter("ignore")
    import real_models.conftest  # noqa: F401 - it declares operators that torchvision imports

    listed, *asked = sys.argv[1:] or ["models"]
    made = vars(importlib.import_module(listed))
    names = [name for name, one in made.items() if inspect.isfunction(one) and one.__module__ == listed]
    rows = []
    for name in asked or names:
        inputs, seconds, why = guessed(listed, name)
        rows.append((name, inputs, seconds, why))
        print(name, inputs or why, file=sys.stderr, flush=True)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", *made["PACKAGES"]))
    print(f"# Inputs of public models, guessed\n\nCommand: `python evidence/guesses {listed}`. ", end="")
    print(f"{versions}.\n\n{sum(bool(row[1]) for row in rows)} of {len(rows)} models run on inputs that were guessed.")
    print("The seconds are those of the processor for guessing and for the run with which the guess ends.\n")
    print("| model | inputs | s |\n|---|---|---|")
    for name, inputs, seconds, why in rows:
        shown = f"`{inputs}`" if inputs else why.replace("|", "\\|")
        print(f"| `{name.replace('__', ': ')}` | {shown} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
