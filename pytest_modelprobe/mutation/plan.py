"""Which faults are tried on which tests, and in which order."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """A layer of the models of a class."""

    model: str
    """Module and name of the class: ``package.module:Net``."""
    layer: str
    type: str
    """Name of the layer's class."""


class Mutant(NamedTuple):
    """A fault in a layer, tried on the tests of a file."""

    file: str
    place: Place
    operator: str

    @property
    def key(self) -> str:
        """A text that is the same in each run."""
        return "|".join((self.file, *self.place, self.operator))


@dataclass
class BaselineTest:
    """A test of the run without faults."""

    id: str
    file: str
    outcome: str
    """``passed``, ``failed``, ``skipped``, ``xfailed``, ``xpassed`` or ``rerun``."""
    seconds: float
    """Of its own, without fixtures of wider scope."""
    places: dict[Place, set[str]] = field(default_factory=dict)
    """Layers that it calls, also in fixtures of wider scope; names of the operators that fit them."""
    sources: list[str] = field(default_factory=list)
    """Files of the classes of its models."""
    path: str = ""
    """Of its file."""


@dataclass(frozen=True)
class Planned:
    """A mutant and the tests that it is tried on."""

    mutant: Mutant
    tests: tuple[str, ...]
    """The fastest first."""


def planned(tests: Collection[BaselineTest], most: int | None = None) -> list[Planned]:
    """Return the mutants in the order in which they are tried.

    Each layer of each file comes once before one comes twice, the layers with the fastest tests first. Which operator
    is first in a layer depends on a digest of its name, so that a part of the list has all operators; which mutants
    are among the first ``most`` does not depend on how fast tests are.

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
        mutants = [Mutant(file, place, operator) for operator in set().union(*(t.places[place] for t in its_tests))]
        mutants.sort(key=lambda mutant: _digest(mutant.key))
        names = tuple(test.id for test in its_tests)
        ordered += [(turn, its_tests[0].seconds, Planned(mutant, names)) for turn, mutant in enumerate(mutants)]
    ordered.sort(key=lambda one: (one[0], _digest(one[2].mutant.key)))
    return [one for _, _, one in sorted(ordered[:most], key=lambda one: one[:2])]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


class Verdict(NamedTuple):
    """What became of a mutant."""

    outcome: str
    """``noticed``, ``survived`` or ``no effect``; ``crashed`` or ``timed out``, which are noticed too; or ``not tried``
    if no test could be run again."""
    by: str = ""
    """The test that noticed it."""

    @property
    def is_noticed(self) -> bool:
        """Whether a test notices the fault: it fails, ends its process or never ends."""
        return self.outcome in ("noticed", "crashed", "timed out")


@dataclass
class Results:
    """What a run found."""

    tests: list[BaselineTest] = field(default_factory=list)
    verdicts: dict[Mutant, Verdict] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Tests that could not be run again → why."""
    known: int = 0
    """Verdicts of earlier runs."""
    runs: int = 0
    """Of tests with a fault."""
    seconds: float = 0.0
    stopped: str = ""
    """Why not all mutants were tried."""
    total: int = 0
    """Mutants that were planned."""

    @property
    def not_tried(self) -> int:
        """Mutants of which nothing is known."""
        return self.total - len(self.verdicts)

    def counted(self, file: str | None = None) -> dict[Mutant, Verdict]:
        """Return the verdicts that count: those of faults with an effect."""
        found = self.verdicts.items()
        return {m: v for m, v in found if (v.is_noticed or v.outcome == "survived") and file in (None, m.file)}

    def faults(self) -> Mapping[tuple[Place, str], list[tuple[Mutant, Verdict]]]:
        """Return the verdicts that count by fault: tests in several files may see one layer."""
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
        """Percent of the faults that a test noticed; None where no fault had an effect."""
        faults = self.faults()
        return 100 * (len(faults) - len(self.survivors())) / len(faults) if faults else None
