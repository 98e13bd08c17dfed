"""The results as Markdown: what was noticed of each error, and the alarms of programs without one."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable

from cases import Case
from trials import WITNESSES, Said, Trial, names

Row = tuple[Case, Trial]

LEGEND = """\
A program with an error is compared with one that differs in the error alone. All are small: a network on images of
digits or a decoder of three blocks, five steps on the CPU, and two processes with gloo for what takes several devices.
What a library did is imitated in a few lines. So this says what notices the symptom; no original program was run.

- *Blind*: what somebody asserts who does not know the error, the same for all: `checks.standard` of the new model, and
  `assert_finite`, `assert_grad_finite`, `assert_params_updated`, `assert_update_ratio` (without biases),
  `assert_training_loop`, `assert_no_dead_layers` and the findings of the watch.
- *Learned*: `assert_invariants`, by what was the same in each step of the healthy program, without its numbers.
- *Run before*: the records in `watch.steps` of the healthy program, and those of the other one compared with them,
  step by step, by `assert_same_behavior`; with the same weights and data. After the steps, the evaluations.
- *By name*: the check or assertion that is made for it, if there is one.

*Right* means that the first line names the layer, the parameter or the mistake that is at fault; *table*, that it
stands below the first line; *other*, that the failure names something else; *refused*, that nothing is asserted, but an
error says why it could not be looked at, which it does not say of the healthy program. Steps count from 0."""


REASONS = """## Why, as far as it was read

- `deepspeed-5489`: the running statistics of the norm after the layer at fault are named before its weights.
- `accelerate-2665`: the optimizer has the parameters before they were sharded, of other shapes, so it is not taken for
  that of another copy; the failure says that the steps were of others.
- A merged record shows what differs between ranks: not a gradient that is wrong alike in all of them.
- Alarms of healthy programs: `assert_update_ratio` counts a step before which the parameter was frozen; projections of
  queries that begin close to 0 move by less than 1e-6 in a step of SGD; the bias of keys has no effect behind a
  softmax, so that it is never updated."""


def noticed(witness: dict[str, list[Said]]) -> list[Said]:
    """Return what fails of the faulty program; an assertion that fails of the healthy one too tells nothing."""
    healthy = {said.by for said in witness["healthy"]}
    return [said for said in witness["faulty"] if said.by not in healthy]


def best(case: Case, found: list[Said]) -> Said | None:
    """Return what tells most: that which names what is at fault."""
    order = ("right", "table", "other", "refused")
    return min(found, key=lambda said: order.index(verdict(case, said)), default=None)


def verdict(case: Case, said: Said) -> str:
    named = {"first line": "right", "table": "table", "no": "refused" if said.error else "other"}
    return named[names(case, said)]


def cell(case: Case, name: str, trial: Trial) -> str:
    if name == "by name" and case.by is None:
        return "–"
    said = best(case, noticed(trial[name]))
    if said is None:
        return "**no**"
    by = f", `{said.by}`" if name == "blind" else ""
    after = ", evaluations" if name == "run before" else ""
    step = f", step {said.step}" if said.step is not None else after
    return f"{verdict(case, said)}{step}{by}"


def report(rows: list[Row], machine: str) -> str:
    """Return the whole page."""
    lines = ["# Silent errors of training", "", f"Made by `tox -e training` ({machine}).", "", LEGEND, ""]
    lines += [*totals(rows), "", "## Each error", ""]
    lines += table(
        ["error", "kind", "what it is", *WITNESSES],
        ([f"{c.id} ({c.source})", c.kind, c.what, *(cell(c, name, trial) for name in WITNESSES)] for c, trial in rows),
    )
    lines += ["", "## What is said", ""]
    lines += table(
        ["error", "by", "first line"],
        (
            [case.id, name, short(said.line)]
            for case, trial in rows
            for name in WITNESSES
            if (said := best(case, noticed(trial[name]))) is not None
        ),
    )
    lines += ["", "## Alarms of healthy programs", "", alarms_text(rows), ""]
    lines += table(
        ["program of", "run", "by", "first line"],
        (
            [case.id, kind, said.by, short(said.line)]
            for case, trial in rows
            for name in WITNESSES
            for kind in ("healthy", "other seed")
            for said in trial[name][kind]
            if name != "run before" or kind == "healthy"
        ),
    )
    return "\n".join([*lines, "", REASONS])


def totals(rows: list[Row]) -> list[str]:
    """Return the counts, of all and of each source."""
    sources = ["all", *dict.fromkeys(case.source for case, _ in rows)]
    cells = []
    for source in sources:
        some = [(case, trial) for case, trial in rows if source in ("all", case.source)]
        row: list[object] = [source, len(some)]
        for name in WITNESSES:
            asked = [(case, trial) for case, trial in some if name != "by name" or case.by is not None]
            said = [(case, one) for case, trial in asked if (one := best(case, noticed(trial[name]))) is not None]
            right = sum(verdict(case, one) == "right" for case, one in said)
            row.append(f"{len(said)} of {len(asked)}, {right} right")
        some_way = sum(any(noticed(trial[name]) for name in WITNESSES) for _, trial in some)
        cells.append([*row, some_way])
    head = ["errors of", "rebuilt", *WITNESSES, "noticed by any"]
    text = (
        "TrainCheck reports 18 of its 20 errors detected within one iteration: with invariants inferred from other "
        "programs, and on the original programs, which these are not."
    )
    return [*table(head, cells), "", text]


def alarms_text(rows: list[Row]) -> str:
    """Return how many healthy programs raise an alarm."""
    count: collections.Counter[tuple[str, str]] = collections.Counter()
    for _, trial in rows:
        for name, of in trial.items():
            for kind in ("healthy", "other seed"):
                count[name, kind] += any(not said.error for said in of[kind])
    total = len(rows)
    return (
        f"Of {total} healthy programs, run again: blind {count['blind', 'healthy']}, compared with the run before "
        f"{count['run before', 'healthy']}, by name {count['by name', 'healthy']}, judged by what was learned "
        f"{count['learned', 'healthy']}. With another seed, so with other weights and data: blind "
        f"{count['blind', 'other seed']}, by name {count['by name', 'other seed']}, learned "
        f"{count['learned', 'other seed']}; "
        f"`assert_same_behavior` fails in {count['run before', 'other seed']}, as it has to: a run before is one with "
        "the same seed. The standard checks were not run with the other seed."
    )


def short(line: str) -> str:
    return line if len(line) <= 200 else f"{line[:200]} …"


def table(head: list[str], rows: Iterable[Iterable[object]]) -> list[str]:
    cells = [[escaped(str(one)) for one in row] for row in rows]
    if not cells:
        return ["None."]
    lines = [f"| {' | '.join(row)} |" for row in (head, *cells)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def escaped(cell: str) -> str:
    """Return the text of a cell; one with marks of its own stays as it is."""
    return cell.replace("|", "/") if "`" in cell or "**" in cell else re.sub(r"([|*_<\[])", r"\\\1", cell)
