"""What each witness says of the runs of a case: of the program with the error, and of healthy ones.

A witness is a function of a run and of the healthy run before it. It returns what failed, in the order of the steps.
Another is one function more in `WITNESSES`, and a column.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, Case
from programs import Run

from pytest_modelprobe import (
    assert_finite,
    assert_grad_finite,
    assert_invariants,
    assert_no_dead_layers,
    assert_params_updated,
    assert_same_behavior,
    assert_training_loop,
    assert_update_ratio,
)
from pytest_modelprobe.assertions.findings import findings
from pytest_modelprobe.extras.training_state.invariants import FEWEST
from pytest_modelprobe.record import Record


@dataclass(frozen=True)
class Said:
    """A failure of one witness, or that it could not look."""

    by: str
    step: int | None
    text: str
    error: bool = False

    @property
    def line(self) -> str:
        return self.text.partition("\n")[0]


Witness = Callable[[Case, Run, Run], list[Said]]


def asked(by: str, assertion: Callable[[], object], step: int | None = None) -> list[Said]:
    try:
        assertion()
    except AssertionError as error:
        found = re.search(r" in step (\d+)", str(error).partition("\n")[0]) if step is None else None
        return [Said(by, int(found[1]) if found else step, str(error))]
    except Exception as error:  # noqa: BLE001 - it could not be looked at, whatever the reason
        return [Said(by, step, f"{type(error).__name__}: {error}", error=True)]
    return []


def found_nothing(record: Any) -> None:
    found = findings(record if isinstance(record, Record) else record.record)
    if found:
        raise AssertionError(found[0])


def updated_enough(subject: Any) -> None:
    assert_update_ratio(subject, ignore="**.bias")


ASSERTED = (
    assert_finite,
    assert_grad_finite,
    assert_params_updated,
    updated_enough,
    assert_training_loop,
    assert_no_dead_layers,
    found_nothing,
)


def blind(case: Case, run: Run, healthy: Run) -> list[Said]:
    """What is asserted without knowing of any error: on the watch of all steps, and of the model as it is new."""
    said = []
    if run.standard is not None:
        error = not isinstance(run.standard, AssertionError)
        said.append(Said("checks.standard", None, str(run.standard), error=error))
    for assertion in ASSERTED:
        name = {"updated_enough": "assert_update_ratio", "found_nothing": "findings"}.get(
            assertion.__name__, assertion.__name__
        )
        said += asked(name, functools.partial(assertion, run.watch))
    return said


def run_before(case: Case, run: Run, healthy: Run) -> list[Said]:
    """What differs from the healthy run, step by step; then in the evaluations."""
    records: list[tuple[int | None, Callable[[Run], Record]]] = [
        (number, lambda of, number=number: of.watch.steps[number]) for number in range(len(healthy.watch.steps))
    ]
    if healthy.watch.evaluations.forwards:
        records.append((None, lambda of: of.watch.evaluations))
    for number, of in records:

        def compared(of: Callable[[Run], Record] = of) -> None:
            actual, expected = of(run), of(healthy)
            if case.ranks > 1 or run.seed != healthy.seed:  # a layer that is called alone would wait for the other rank
                actual, expected = Record.from_dict(actual.to_dict()), Record.from_dict(expected.to_dict())
            assert_same_behavior(actual, expected)

        said = asked("assert_same_behavior", compared, number)
        if said:
            return said
    return []


def by_name(case: Case, run: Run, healthy: Run) -> list[Said]:
    """What the check or assertion says that is made for it."""
    return [] if case.by is None else asked("by name", functools.partial(case.by, run))


def learned(case: Case, run: Run, healthy: Run) -> list[Said]:
    """What does not hold that was the same in each step of the healthy run, whatever the numbers were."""
    if len(healthy.watch.steps) < FEWEST:
        return []
    return asked("assert_invariants", functools.partial(assert_invariants, run.watch, healthy.watch.invariants))


WITNESSES: dict[str, Witness] = {"blind": blind, "learned": learned, "run before": run_before, "by name": by_name}

Trial = dict[str, dict[str, list[Said]]]
"""Witness → run → what it said."""


def of_rank(case: Case, rank: int) -> Trial:
    """Make the runs, and return what is said of them."""
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)

    def made(seed: int, faulty: bool, standard: bool) -> Run:
        run = Run(seed, rank, case.ranks, standard)
        case.program(run, faulty)
        run.watch.close()
        return run

    healthy = made(0, False, False)
    runs = {
        "faulty": made(0, True, not rank),
        "healthy": made(0, False, not rank),
        "other seed": made(1, False, False),
    }
    return {
        name: {kind: witness(case, run, healthy) for kind, run in runs.items()} for name, witness in WITNESSES.items()
    }


def start_rank(rank: int, numbers: list[int], folder: str) -> None:
    """Be one rank of all cases with two."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
    for number in numbers:
        said = of_rank(CASES[number], rank)
        plain = {w: {kind: [asdict(one) for one in found] for kind, found in runs.items()} for w, runs in said.items()}
        Path(folder, f"{number} {rank}.json").write_text(json.dumps(plain), encoding="utf-8")
        dist.barrier()
    dist.destroy_process_group()


def trials_of_two_ranks(numbers: list[int]) -> list[Trial]:
    """Return what is said of cases with two ranks: what the rank says that has more to say."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(start_rank, (numbers, folder), nprocs=2)
        files = [[Path(folder, f"{number} {rank}.json") for rank in range(2)] for number in numbers]
        return [of_both(*(json.loads(file.read_bytes()) for file in pair)) for pair in files]


def trial(number: int) -> Trial:
    """Return what is said of a case of one process."""
    return of_rank(CASES[number], 0)


def of_both(first: Any, second: Any) -> Trial:
    return {
        name: {kind: [Said(**one) for one in min(first[name][kind], second[name][kind], key=urgency)] for kind in runs}
        for name, runs in first.items()
    }


def urgency(said: list[dict[str, Any]]) -> tuple[bool, int]:
    """Return what is smaller for a rank that has more to say, or says it at an earlier step."""
    failures = [one for one in said if not one["error"]]
    return not failures, min((one["step"] or 0 for one in failures), default=0) if failures else -len(said)


def names(case: Case, said: Said) -> str:
    """Return where a message names what is at fault: in its first line, in its table, or not."""
    if re.search(case.at, said.line):
        return "first line"
    return "table" if re.search(case.at, said.text) else "no"
