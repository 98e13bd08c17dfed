"""What is tried and what came of it: faults that were planted, tests that noticed them, and the report."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pytest_modelprobe.record import label_of
from pytest_modelprobe.text import Cell, count, printable, table

from .operators import FAULTS, Operator, TrainingFault

# --- which faults are tried on which tests ----------------------------------------------------------------------------

PROGRAM = "(program)"
"""The type of a place that is a call of a training program."""


class Place(NamedTuple):
    """A layer of the models of a class, or a call that a function of a training program makes."""

    model: str
    """Module and name of the class: ``package.module:Net``. Of a call, those of the function that makes it."""
    layer: str
    """Name of the layer. Of a call, what is called: ``Adam.step``."""
    type: str
    """Name of the layer's class. Of a call, `PROGRAM`."""

    @property
    def is_call(self) -> bool:
        """Whether it is a call of a training program."""
        return self.type == PROGRAM


class Mutant(NamedTuple):
    """A fault in a layer or in a call, tried on the tests of a file."""

    file: str
    place: Place
    operator: str

    @property
    def key(self) -> str:
        """A text that names the mutant in every run."""
        return "|".join((self.file, *self.place, self.operator))


@dataclass
class BaselineTest:
    """A test of the run without faults."""

    id: str
    file: str
    outcome: str
    """``passed``, ``failed``, ``skipped``, ``xfailed``, ``xpassed`` or ``rerun``."""
    seconds: float
    """How long the test itself takes, with the fixtures of wider scope that make or run models."""
    places: dict[Place, set[str]] = field(default_factory=dict)
    """Layer or call that the test, or one of its fixtures, runs → the names of the operators that fit it."""
    sources: list[str] = field(default_factory=list)
    """The files of the classes of its models."""
    path: str = ""
    """The path of its file."""


@dataclass(frozen=True)
class Planned:
    """A mutant and the tests that it is tried on."""

    mutant: Mutant
    tests: tuple[str, ...]
    """The ids of the tests, the fastest first."""


def planned(
    tests: Collection[BaselineTest], most: int | None = None, operators: Collection[str] | None = None
) -> list[Planned]:
    """Return the mutants in the order in which they are tried: those of some operators, or of all.

    Each layer of each file comes once before one comes twice, and the layers with the fastest tests come first. Which
    operator comes first in a layer depends on a digest, so that a part of the list has all kinds of operators. Which
    mutants are among the first ``most`` does not depend on how fast tests are, so it is the same in every run.

    >>> fast = BaselineTest("a.py::fast", "a.py", "passed", 0.1, {Place("m:Net", "fc", "Linear"): {"nan", "zero"}})
    >>> slow = BaselineTest("a.py::slow", "a.py", "passed", 9.0, fast.places)
    >>> for one in planned([slow, fast]):
    ...     print(one.mutant.operator, one.tests)
    zero ('a.py::fast', 'a.py::slow')
    nan ('a.py::fast', 'a.py::slow')
    """
    by_layer: dict[tuple[str, Place], list[BaselineTest]] = defaultdict(list)
    for test in tests:
        if test.outcome == "passed":
            for place in test.places:
                by_layer[test.file, place].append(test)
    ordered: list[tuple[int, float, Planned]] = []
    for (file, place), its_tests in by_layer.items():
        its_tests.sort(key=lambda test: (test.seconds, test.id))
        fitting = set().union(*(test.places[place] for test in its_tests))
        mutants = [Mutant(file, place, name) for name in fitting if operators is None or name in operators]
        mutants.sort(key=lambda mutant: _digest(mutant.key))
        names = tuple(test.id for test in its_tests)
        ordered += [(turn, its_tests[0].seconds, Planned(mutant, names)) for turn, mutant in enumerate(mutants)]
    ordered.sort(key=lambda one: (one[0], _digest(one[2].mutant.key)))
    return [one for _, _, one in sorted(ordered[:most], key=lambda one: one[:2])]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


class Verdict(NamedTuple):
    """What became of a mutant, and which test decided it."""

    outcome: str
    """``noticed``, ``survived`` or ``no effect``; ``crashed`` or ``timed out``, which are noticed too; ``not reached``
    if no test came to the place with the fault; or ``not tried`` if no test could be run again."""
    by: str = ""
    """The test that noticed it."""

    @property
    def is_noticed(self) -> bool:
        """Whether a test notices the fault: the test fails, ends its process or never ends."""
        return self.outcome in ("noticed", "crashed", "timed out")


@dataclass
class Results:
    """What a run found."""

    tests: list[BaselineTest] = field(default_factory=list)
    verdicts: dict[Mutant, Verdict] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Tests that could not be run again → why."""
    known: int = 0
    """How many verdicts are from earlier runs."""
    runs: int = 0
    """How many times a test ran with a fault."""
    seconds: float = 0.0
    stopped: str = ""
    """Why not all mutants were tried; empty if they were."""
    total: int = 0
    """How many mutants were planned."""

    @property
    def not_tried(self) -> int:
        """How many mutants have no verdict."""
        return self.total - len(self.verdicts)

    def counted(self, file: str | None = None) -> dict[Mutant, Verdict]:
        """Return the verdicts that count: those of faults that changed something."""
        found = self.verdicts.items()
        return {m: v for m, v in found if (v.is_noticed or v.outcome == "survived") and file in (None, m.file)}

    def faults(self) -> Mapping[tuple[Place, str], list[tuple[Mutant, Verdict]]]:
        """Return the verdicts that count for each fault, which the tests of several files may see."""
        found: dict[tuple[Place, str], list[tuple[Mutant, Verdict]]] = defaultdict(list)
        for mutant, verdict in self.counted().items():
            found[mutant.place, mutant.operator].append((mutant, verdict))
        return found

    def survivors(self) -> list[tuple[Place, str]]:
        """Return the faults that no test of any file noticed."""
        faults = self.faults().items()
        return [fault for fault, tried in faults if all(verdict.outcome == "survived" for _, verdict in tried)]

    @property
    def score(self) -> float | None:
        """The percentage of the faults that a test noticed, or `None` if no fault had an effect."""
        faults = self.faults()
        return 100 * (len(faults) - len(self.survivors())) / len(faults) if faults else None


# --- what a test does, and the fault that is planted ------------------------------------------------------------------


@dataclass
class Seen:
    """What one test, or one fixture of wider scope, did with models."""

    places: dict[Place, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Layers that were called, and the names of the operators that fit them."""
    of_training: dict[Place, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Calls that a training program makes, and the names of the faults that fit them."""
    calls: int = 0
    """How many times modules were called."""
    steps: int = 0
    """How many steps optimizers took."""
    makes_models: bool = False
    backward: set[str] = field(default_factory=set)
    """Models whose outputs a gradient reached."""
    outputs: Any = field(default_factory=hashlib.sha256)
    """A digest of all that models returned, of the gradients of that, and of gradients and parameters at each step of
    an optimizer, in order."""

    @property
    def has_models(self) -> bool:
        """Whether a model or an optimizer was made or called."""
        return self.makes_models or self.calls > 0

    def differs(self, other: Seen) -> bool:
        """Whether models returned something else, or were trained to something else."""
        return bool(self.outputs.digest() != other.outputs.digest())


@dataclass
class Planted:
    """A fault, and what became of it in a run."""

    place: Place
    operator: Operator | TrainingFault
    fired: bool = False
    """Whether the layer was called with it, or the training program made the call."""
    state: dict[str, Any] = field(default_factory=dict)
    """What a fault keeps from one call to the next."""


# --- the report -------------------------------------------------------------------------------------------------------

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
    if faults:
        rows: list[list[Cell]] = []
        for file in sorted({mutant.file for mutant in results.counted()}):
            tried = results.counted(file).values()
            seen = sum(verdict.is_noticed for verdict in tried)
            rows.append([file, len(tried), seen, f"{100 * seen / len(tried):.0f} %"])
        yield ""
        yield from table(["file", "faults", "noticed", "score"], rows, most or len(rows))
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
    left = Counter(operator for _, operator in survivors)
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


# --- what earlier runs know of mutants --------------------------------------------------------------------------------

_PACKAGE = Path(__file__).parents[1]


class Known:
    """Verdicts of this run and of earlier ones. Each is written as soon as it is known, because the run may be killed.

    Args:
        cache: Pytest's cache, or `None` if nothing is read or written.
    """

    def __init__(self, cache: Any) -> None:
        self._path: Path | None = None
        with contextlib.suppress(OSError):  # The folder cannot be written to.
            self._path = None if cache is None else cache.mkdir("modelprobe-mutation") / "verdicts.jsonl"

    @property
    def is_kept(self) -> bool:
        """Whether the next run finds what this one knows."""
        return self._path is not None

    def read(self) -> dict[str, Verdict]:
        """Return key → verdict."""
        lines = self._path.read_text("utf-8").splitlines() if self._path and self._path.exists() else []
        found: dict[str, Verdict] = {}
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # A run that was killed wrote a part of a line.
                key, *verdict = json.loads(line)
                found[key] = Verdict(*verdict)
        return found

    def add(self, key: str, verdict: Verdict) -> None:
        """Write a verdict."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                # The line begins with its break, because what stands before it may be a part of a line.
                file.write(f"\n{json.dumps([key, *verdict])}")


def keys_of(plan: Iterable[Planned], tests: Iterable[BaselineTest], modules: Iterable[str]) -> dict[str, Planned]:
    """Return the mutants, each by a digest of what decides on it.

    That is the fault, the names of its tests, the code of this package and of the project, the snapshots of all tests,
    and torch.

    Args:
        plan: The mutants.
        tests: All tests.
        modules: The files of the project that were imported.
    """
    shared = hashlib.sha256(f"{sys.version}|{torch.__version__}".encode())
    folders = {Path(test.path).parent / name for test in tests for name in ("__modelprobe__", "__snapshots__")}
    files = {*modules, *(source for test in tests for source in test.sources)}
    files.update(str(file) for folder in (_PACKAGE, *folders) for file in folder.rglob("*") if file.is_file())
    for file in sorted(file for file in files if "__pycache__" not in file):
        shared.update(file.encode(errors="surrogatepass"))
        with contextlib.suppress(OSError):
            shared.update(Path(file).read_bytes())
    digest = shared.hexdigest()
    return {_digest(f"{digest}|{one.mutant.key}|{sorted(one.tests)}").hex()[:32]: one for one in plan}


def modules_of(root: Path) -> list[str]:
    """Return the files below a folder that were imported, without those of installed packages."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    paths = [Path(file) for file in files if isinstance(file, str)]
    return sorted(str(path) for path in paths if path.is_relative_to(root) and "site-packages" not in path.parts)
