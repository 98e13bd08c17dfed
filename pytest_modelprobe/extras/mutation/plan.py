"""Which faults are tried on which tests, in which order, and what became of them.

There are more faults than time. So each layer gets one fault before any gets two, and the fastest tests come first. A
fault is tried on the tests of one file at a time, because the table says for each file what its tests miss.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

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
