"""What notices silent errors of training: programs with one, and their healthy twins.

    python evidence/training                     # all, and writes RESULTS.md beside this
    python evidence/training --quick             # a fourth of those of one process, printed only
    python evidence/training --only zero_grad    # those whose function has the word in its name, printed only

Each error of TrainCheck's list, of TTrace's and of public issues that fits on a CPU is a program of a few lines
(`cases.py`). It is judged by what a user asserts who does not know it, by a comparison with the run before it, and by
what is made for it; its healthy twin is judged alike.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import multiprocessing
import os
import platform
import sys
import time
from pathlib import Path

import torch
from cases import CASES
from report import cell, report
from trials import WITNESSES, Trial, trial, trials_of_two_ranks

RESULTS = Path(__file__).with_name("RESULTS.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fourth of them, none with several ranks, printed only")
    parser.add_argument("--only", default="", help="part of the name of a case's function, printed only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    started = time.monotonic()
    chosen = [number for number, case in enumerate(CASES) if options.only in case.program.__name__]
    if options.quick:
        chosen = [number for number in chosen if CASES[number].ranks == 1][::4]
    apart = [number for number in chosen if CASES[number].ranks > 1]
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        of_ranks = pool.submit(trials_of_two_ranks, apart) if apart else None
        futures = {number: pool.submit(trial, number) for number in chosen if number not in apart}
        for number, future in futures.items():
            future.add_done_callback(functools.partial(tell, number, started))
        found = {number: future.result() for number, future in futures.items()}
        found |= dict(zip(apart, of_ranks.result(), strict=True)) if of_ranks else {}
    rows = [(CASES[number], found[number]) for number in chosen]
    machine = f"{options.jobs} processes ({platform.machine()}), torch {torch.__version__}"
    text = report(rows, f"{machine}, {time.monotonic() - started:,.0f} s")
    print(text)
    if len(chosen) == len(CASES):
        RESULTS.write_text(text + "\n", encoding="utf-8")


def tell(number: int, started: float, future: concurrent.futures.Future[Trial]) -> None:
    """Say what was noticed of an error, as soon as it is known."""
    case, found = CASES[number], future.result()
    said = "; ".join(f"{name}: {cell(case, name, found)}" for name in WITNESSES)
    print(f"{case.program.__name__}: {said}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
