"""The records of a run compared with those that the other side makes of the same tests.

Most models are as they were, so the first run there makes nothing but records. Only the tests whose records differ run
once more, on both sides, with what a diagnosis needs.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .pairs import Pair, compare_records, first_difference, is_suspect, judged
from .recorder import Written, read_written
from .side import Job, Ran, Side

Records = Mapping[tuple[str, str], Written]
"""By test and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsOn:
    """Tests on a side.

    Args:
        side: The side.
        root: The root directory of pytest there, to which node ids are relative.
        options: The options of pytest there.
        plugins: The values of ``-p``.
        processes: How many processes run at the same time.
        logs: A folder for what the processes print.
    """

    __test__ = False

    side: Side
    root: Path
    options: Mapping[str, Any]
    plugins: Sequence[str]
    processes: int
    logs: Path

    def run(self, tests: Collection[str], records: Path, **more: Any) -> Ran:
        """Run tests of files that are there, and write their records."""
        files = sorted({str(self.root / test.partition("::")[0]) for test in tests})
        files = [file for file in files if Path(file).is_file()]
        job = functools.partial(
            Job, tests=tests, options=self.options, plugins=self.plugins, records=str(records), **more
        )
        parts = (files[number :: self.processes] for number in range(self.processes))
        return self.side.run([job(files=part) for part in parts if part], self.logs / records.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """What the two sides have in common, and what not."""

    tests: Set[str] = frozenset()
    """Tests that made records here."""
    pairs: Sequence[Pair] = ()
    ran: Ran = dataclasses.field(default_factory=Ran)
    """What became of the tests on the other side."""
    only_here: Collection[str] = ()
    """Tests that the other side does not have."""
    unpaired: int = 0
    """Records of tests of both sides that only one side made."""


def side_by_side(
    here: Records,
    ours: TestsOn,
    theirs: TestsOn,
    *,
    folder: Path,
    kept: Path,
    check: Callable[[Records], None],
) -> SideBySide:
    """Run the tests of the records on the other side, and compare.

    Args:
        here: The records of this side.
        ours: Where the tests ran.
        theirs: Where they run again.
        folder: A folder for records.
        kept: A folder for evidence and tensors, which stays.
        check: Raises `SideError` if the records of the other side are not of its own code.

    Raises:
        SideError: The other side cannot run.
    """
    tests = {test for test, _ in here}
    ran = theirs.run(tests, folder / "there")
    there = read_written(folder / "there")
    check(there)
    only_here = tests - set(ran.collected)
    both = [key for key in here if key in there]
    unpaired = sum(test not in only_here for test, _ in here.keys() ^ there.keys())
    suspects = [key for key in both if is_suspect(here[key].record, there[key].record)]
    now, then = _with_evidence(suspects, here, there, ours, theirs, kept)
    pairs = [judged(now[key], then[key], (here[key].record, there[key].record)) for key in both]
    return SideBySide(tests=tests, pairs=pairs, ran=ran, only_here=sorted(only_here), unpaired=unpaired)


def _with_evidence(
    suspects: Sequence[tuple[str, str]], here: Records, there: Records, ours: TestsOn, theirs: TestsOn, kept: Path
) -> tuple[Records, Records]:
    """Return the records of both sides, those that differ with evidence.

    The other side is first, because responses are made to what the expected ones were made to.
    """
    if not suspects:
        return here, there
    keep_here: dict[str, dict[str, str]] = {}
    keep_there: dict[str, dict[str, str]] = {}
    for test, key in suspects:
        first = first_difference(compare_records(here[test, key].record, there[test, key].record))
        if first is not None:
            keep_here.setdefault(test, {})[key] = first.layer
            keep_there.setdefault(test, {})[key] = first.name_there
    tests = {test for test, _ in suspects}
    for part in ("here", "there"):
        shutil.rmtree(kept / part, ignore_errors=True)
    theirs.run(tests, kept / "there", evidence=True, keep=keep_there)
    ours.run(tests, kept / "here", evidence=True, keep=keep_here, like=str(kept / "there"))
    now, then = read_written(kept / "here"), read_written(kept / "there")
    found = [key for key in suspects if key in now and key in then]
    return {**here, **{key: now[key] for key in found}}, {**there, **{key: then[key] for key in found}}
