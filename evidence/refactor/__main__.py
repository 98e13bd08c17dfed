"""What a snapshot says of commits: refactorings and bugs as edits of the source of real classes.

    python evidence/refactor                # all, and writes RESULTS.md beside this
    python evidence/refactor --quick        # an eighth, printed only
    python evidence/refactor --only llama   # one model, printed only

A piece of text in the source of a class is replaced, the model is built with the edited class and compared with a
snapshot of the model as it was. Whether the function changed is measured apart, on outputs and gradients with the same
weights. Each bug is tried alone, with a refactoring of the same model, with other weights, and with both.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from bugs import BUGS
from models import MODELS
from report import report
from trials import of_model

RESULTS = Path(__file__).with_name("RESULTS.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of it, printed only")
    parser.add_argument("--only", choices=MODELS, help="one model, printed only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    started = time.monotonic()
    names = [options.only] if options.only else sorted(MODELS, key=lambda name: -sum(b.model == name for b in BUGS))
    results: dict[str, list[dict[str, Any]]] = {}
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(of_model, name, 8 if options.quick else 1) for name in names]
        for name, future in zip(names, futures, strict=True):
            future.add_done_callback(functools.partial(tell, name, started))
        for future in futures:
            for kind, rows in future.result().items():
                results.setdefault(kind, []).extend(rows)
    machine = (
        f"{options.jobs} processes ({platform.machine()}), torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {time.monotonic() - started:,.0f} s"
    )
    text = report(results, machine)
    print(text)
    if not options.quick and not options.only:
        RESULTS.write_text(text + "\n", encoding="utf-8")


def tell(name: str, started: float, future: concurrent.futures.Future[dict[str, list[dict[str, Any]]]]) -> None:
    """Say what a model's trials came to, as soon as they are done."""
    rows = [row for rows in future.result().values() for row in rows]
    missed = [row for row in rows if (row["verdict"] != "first line" if row["verdict"] else row["alarm"])]
    print(
        f"{name}: {len(rows) - len(missed)} of {len(rows)} right, {time.monotonic() - started:.0f} s", file=sys.stderr
    )
    for row in missed:
        print(f"  {row['edits']}, {row['weights']} weights: {row['line']}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
