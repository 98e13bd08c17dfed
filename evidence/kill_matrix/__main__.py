"""Which faults the snapshot finds and names, on which architecture; what other tests find; what raises false alarms.

    python evidence/kill_matrix                             # all, and writes RESULTS.md and RESULTS.json beside this
    python evidence/kill_matrix --quick                     # a tenth, printed only
    python evidence/kill_matrix --lowest VENV/bin/python    # also against snapshots of the Python of another venv

A fault is planted in a fresh model, the model is run, and the record is judged against a snapshot of the clean model
that went through its files. What is true of each fault was written beforehand, in `faults`; how large it is, is
measured on whole tensors, in `truth`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from architectures import ARCHITECTURES
from faults import NOT_SHOWN
from report import report
from trials import elsewhere, of_architecture, record_all

RESULTS = Path(__file__).with_name("RESULTS.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of it, printed only")
    parser.add_argument("--only", choices=ARCHITECTURES, help="one architecture, printed only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--lowest", metavar="PYTHON", help="of a venv with the oldest torch")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.record:
        return record_all(options.record, options.only)
    started = time.monotonic()
    part = 10 if options.quick else 1
    names = [options.only] if options.only else sorted(ARCHITECTURES, key=["MoE", "Encoder", "ViT"].__contains__)[::-1]
    results: dict[str, list[dict[str, Any]]] = {"single": [], "several": [], "harmless": []}
    places = {f"ATEN_CPU_CAPABILITY={c}": (sys.executable, {"ATEN_CPU_CAPABILITY": c}) for c in ("default", "avx2")}
    if options.lowest:
        places["oldest torch"] = options.lowest, {"PYTHONPATH": os.pathsep.join(sys.path[1:])}
    machine = (
        f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, Python {platform.python_version()}"
    )

    def tell() -> None:
        text = report(results, NOT_SHOWN, machine)
        print(text, f"{time.monotonic() - started:.0f} s", sep="\n", flush=True)
        if not options.quick and not options.only:
            RESULTS.write_text(text + "\n", encoding="utf-8")
            RESULTS.with_suffix(".json").write_text(json.dumps(results, default=str) + "\n", encoding="utf-8")

    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        models = [pool.submit(of_architecture, name, part) for name in names]
        others = [] if options.quick else [pool.submit(elsewhere, t, *p, options.only) for t, p in places.items()]
        for name, future in zip(names, models, strict=True):
            for key, rows in future.result().items():
                results[key] += rows
            print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        tell()  # what follows depends on other processes, and may fail by itself
        for future in others:
            results["harmless"] += future.result()
        if others:
            tell()


if __name__ == "__main__":
    main()
