"""The section on mutants in the terminal.

It leads with the score and what survived, because each surviving fault asks for a test. The rest says what the score
leaves out.
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from pytest_modelprobe.record import label_of
from pytest_modelprobe.text import Cell, count, printable, table

from .plan import Place, Results, Verdict
from .selection import FAULTS

_HOW_THEY_ENDED = {
    "failed": "failed without a fault",
    "skipped": "skipped",
    "xfailed": "expected to fail",
    "xpassed": "expected to fail, and passed",
    "rerun": "passed only when repeated",
}


def lines(
    results: Results, least: float | None = None, *, most: int | None = 20, goes_on: bool = True
) -> Iterator[str]:
    """Yield the lines of the section: score, survivors and what notices them, score by file, what was left out.

    Args:
        results: What was found.
        least: The score that was asked for, in percent.
        most: How many rows each table has, or `None` for all.
        goes_on: Whether the next run takes over what was found.
    """
    faults, survivors, score = results.faults(), results.survivors(), results.score
    if score is None:
        no_model = bool(results.tests) and not any(test.places for test in results.tests)
        yield "no fault was tried that has an effect" + (": no test runs a module of torch" if no_model else "")
    else:
        noticed = len(faults) - len(survivors)
        said = f"{score:.0f} % of the faults were noticed: {noticed:,} of {len(faults):,}"
        if results.not_tried > 0:  # no percentage: the rest may survive
            said = f"{noticed:,} noticed of {len(faults):,} tried; {results.not_tried:,} not tried"
        yield f"{said}, in {results.seconds:.0f} s, with {count(results.runs, 'run')} of tests"
    if least is not None and (score is None or score < least):
        yield f"--modelprobe-mutate-min={least:g} asks for {least:g} %"
    if survivors:
        yield from _survivors(results, survivors, most)
    if any(mutant.place.is_call for mutant in results.verdicts):
        yield from _of_training(results)
    if faults:
        yield from _by_file(results, most)
    yield from _left_out(results, goes_on)


def _survivors(results: Results, survivors: list[tuple[Place, str]], most: int | None) -> Iterator[str]:
    by_layer: dict[Place, list[str]] = defaultdict(list)
    for place, operator in survivors:
        by_layer[place].append(operator)
    tests = Counter(place for test in results.tests if test.outcome == "passed" for place in test.places)
    yield ""
    trains = " or train" if any(place.is_call for place, _ in survivors) else ""
    yield f"{count(len(survivors), 'fault')} survived: the tests that run the layer{trains} passed"
    ordered = sorted(by_layer.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    for place, operators in ordered[:most]:
        name = place.model.partition(":")[2]
        label = f"{place.layer} in {name}" if place.is_call else f"{name} {label_of(place.layer, place.type)}"
        text = f"{label}, {count(tests[place], 'test')}: {', '.join(sorted(operators))}"
        yield from textwrap.wrap(printable(text), 110, subsequent_indent="    ", break_long_words=False)
    if len(ordered) > (most or len(ordered)):
        yield f"{count(len(ordered) - (most or 0), 'more layer')}: -v shows them"
    tried = Counter(operator for _, operator in results.faults())
    left = Counter(operator for place, operator in survivors if not place.is_call)  # The others have their own table.
    if not left:
        return
    yield ""
    yield "What notices them"
    yield from table(
        ["fault", "survived", "tried", "noticed by"],
        [
            [name, n, tried[name], FAULTS[name].noticed_by]
            for name, n in sorted(left.items(), key=lambda pair: (-pair[1], pair[0]))
        ],
        len(left),
    )


def _of_training(results: Results) -> Iterator[str]:
    """Yield the table of faults of training programs: what became of each kind, and what notices it."""
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    by_fault: dict[tuple[Place, str], list[Verdict]] = defaultdict(list)
    for mutant, verdict in results.verdicts.items():
        if mutant.place.is_call:
            by_fault[mutant.place, mutant.operator].append(verdict)
    for (_, operator), verdicts in by_fault.items():
        outcomes[operator][_outcome(verdicts)] += 1
    columns = ("noticed", "survived", "no effect", "not reached")
    yield ""
    yield from table(
        ["fault of training", *columns, "noticed by"],
        [
            [name, *(found[column] for column in columns), FAULTS[name].noticed_by]
            for name, found in sorted(outcomes.items(), key=lambda pair: (-pair[1]["survived"], pair[0]))
        ],
        len(outcomes),
    )


def _outcome(verdicts: Iterable[Verdict]) -> str:
    """Return what became of a fault, which the tests of several files may see."""
    said = {"noticed" if verdict.is_noticed else verdict.outcome for verdict in verdicts}
    return next((one for one in ("noticed", "survived", "no effect", "not reached") if one in said), "not tried")


def _by_file(results: Results, most: int | None) -> Iterator[str]:
    rows: list[list[Cell]] = []
    for file in sorted({mutant.file for mutant in results.counted()}):
        tried = results.counted(file).values()
        noticed = sum(verdict.is_noticed for verdict in tried)
        rows.append([file, len(tried), noticed, f"{100 * noticed / len(tried):.0f} %"])
    yield ""
    yield from table(["file", "faults", "noticed", "score"], rows, most or len(rows))


def _left_out(results: Results, goes_on: bool) -> Iterator[str]:
    verdicts = results.verdicts.values()
    lost = Counter((verdict.outcome, verdict.by) for verdict in verdicts if verdict.outcome in ("crashed", "timed out"))
    said = [f"{count(n, 'fault')} {outcome} in {test}" for (outcome, test), n in lost.items()]
    for outcome, words in (("no effect", "that changed nothing"), ("not reached", "that no test reached again")):
        without = sum(verdict.outcome == outcome for verdict in verdicts)
        if without:
            said.append(f"not counted: {count(without, 'fault')} {words}")
    ended = Counter(test.outcome for test in results.tests)
    reasons = [f"{ended[outcome]:,} {words}" for outcome, words in _HOW_THEY_ENDED.items() if ended[outcome]]
    idle = sum(test.outcome == "passed" and not test.places for test in results.tests)
    reasons += [f"{idle:,} that run no model"] if idle else []
    if reasons:
        said.append(f"tests left out: {', '.join(reasons)}")
    said += [f"left out: {test}, which when run again without a fault {why}" for test, why in results.left_out.items()]
    if results.known:
        said.append(f"{count(results.known, 'result')} from an earlier run: --cache-clear forgets them")
    if results.not_tried > 0:
        why = results.stopped or "the run was interrupted"
        then = "the next run goes on there" if goes_on else "without pytest's cache the next run begins anew"
        said.append(f"{count(results.not_tried, 'fault')} of {results.total:,} not tried: {why}; {then}")
    elif results.stopped:
        said.append(f"no fault was tried: {results.stopped}")
    if said:
        yield ""
        yield from map(printable, said)
