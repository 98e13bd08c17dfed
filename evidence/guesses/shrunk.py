"""Which classes of transformers `hf-tiny:CLASS` makes small, and which of them run. Prints a page of Markdown.

    python evidence/guesses/shrunk.py > evidence/guesses/SHRUNK.md

Fifteen of each of four kinds of classes, drawn by a seed.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
import warnings
from collections.abc import Iterator

import torch
import transformers

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.extras.scan.scanning import ScannedModel
from pytest_modelprobe.extras.scan.target import load

ENDINGS = ("ForCausalLM", "ForSequenceClassification", "ForImageClassification", "Model")
OF_EACH = 15


def is_made_of_a_configuration(name: str) -> bool:
    """Whether it is a class of models that is installed with all that it imports."""
    try:
        return getattr(getattr(transformers, name), "config_class", None) is not None
    except ImportError:
        return False


def sample() -> Iterator[str]:
    """Yield the names of the classes."""
    left_out = ("PreTrainedModel", "EncoderDecoderModel")
    for ending in ENDINGS:
        names = [n for n in dir(transformers) if n.endswith(ending) and not n.endswith(left_out) and n[:4] != "Auto"]
        random.Random(0).shuffle(names)
        yield from itertools.islice(filter(is_made_of_a_configuration, names), OF_EACH)


def main() -> None:
    """Print the page."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows, ran, made = [], 0, 0
    for name in sys.argv[1:] or sample():
        started, parameters, inputs = time.process_time(), "", ""
        try:
            target = load(f"hf-tiny:{name}")
            parameters = f"{sum(p.numel() for p in target.make().parameters()):,}"
            made += 1
            scanned = ScannedModel(target, ModelProbe())
            scanned.record  # noqa: B018 - the model runs on the inputs
            ran += 1
            inputs = f"`{' '.join(map(str, scanned.inputs))}`"
        except Exception as error:  # noqa: BLE001 - whatever a class raises
            why = str(error).rpartition("furthest on these: ")[2].partition("\n")[0]
            inputs = why.replace("|", "\\|")[:160]
        rows.append((name, parameters, inputs, time.process_time() - started))
        print(name, parameters, inputs, file=sys.stderr, flush=True)
    print("# Classes of transformers, shrunk\n\nCommand: `python evidence/guesses/shrunk.py`. ", end="")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}.\n")
    print(f"Of {len(rows)} classes, drawn by a seed, {made} are made and {ran} run on inputs that were guessed.\n")
    print("| class | parameters | inputs, or why not | s |\n|---|---|---|---|")
    for name, parameters, inputs, seconds in rows:
        print(f"| `{name}` | {parameters} | {inputs} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
