"""The records of a run compared with those that the other side makes of the same tests.

The other side compares each of its records with that of this side as soon as it is made. Most models are as they were.
The others get what a diagnosis needs at once there, and this side runs their tests once more for the same.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .pairs import Pair, judged
from .records import Written, read_written
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
        folder: A folder for records, with those of this side in ``here``.
        kept: A folder for tensors, which stays.
        check: Raises `SideError` if the records of the other side are not of its own code.

    Raises:
        SideError: The other side cannot run.
    """
    tests = {test for test, _ in here}
    for part in ("here", "there"):
        shutil.rmtree(kept / part, ignore_errors=True)
    ran = theirs.run(tests, folder / "there", beside=str(folder / "here"), tensors=str(kept / "there"))
    there = read_written(folder / "there")
    check(there)
    only_here = tests - set(ran.collected)
    both = [key for key in here if key in there]
    unpaired = sum(test not in only_here for test, _ in here.keys() ^ there.keys())
    now = here
    if differing := {test for test, key in both if there[test, key].evidence}:
        again = ours.run(differing, folder / "again", like=str(folder / "there"), tensors=str(kept / "here"))
        now = {**here, **read_written(folder / "again")}
        for key in (key for key in both if there[key].evidence and not now[key].evidence):
            now[key] = _without_evidence(now[key], again.failed.get(key[0], "it made other records"))
    pairs = [judged(now[key], there[key]) for key in both]
    return SideBySide(tests=tests, pairs=pairs, ran=ran, only_here=sorted(only_here), unpaired=unpaired)


def _without_evidence(one: Written, why: str) -> Written:
    """Return a record with the note why there is nothing to tell a cause from what follows it."""
    note = f"no layer was called alone: the test did not run again as it had run ({why})"
    return dataclasses.replace(one, record=dataclasses.replace(one.record, notes=(*one.record.notes, note)))
