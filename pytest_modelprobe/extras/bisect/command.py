"""The command `modelprobe bisect`: its options, and what is printed of the commit that is found."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pytest_modelprobe.cli import SAME
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.gate import Repository
from pytest_modelprobe.text import count, printable


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of `modelprobe`."""
    bisect = commands.add_parser(
        "bisect",
        help="find the commit that changed what the model of a test does",
        description="Run tests at commits between GOOD and BAD, and find the first whose model differs from GOOD's.",
        usage="modelprobe bisect GOOD [BAD] -- TESTS [options of pytest]",
    )
    bisect.add_argument("good", metavar="GOOD", help="a commit whose model is right")
    bisect.add_argument("bad", metavar="BAD", nargs="?", default="HEAD", help="a later one whose model is not (HEAD)")
    bisect.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Find the commit, and print its diagnosis."""
    from pytest_modelprobe.comparison.text import text

    from .search import bisect, differs, git_in

    if not options.tests:
        raise UsageError("name a test behind --, such as: modelprobe bisect v1.0 -- tests/test_model.py::test_run")
    repository = Repository(Path.cwd())

    def tell(text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    found = bisect(repository, options.good, options.bad, options.tests, tell=tell)
    # Its short hash, day, author and subject.
    said = git_in(repository.root, "log", "-1", "--abbrev=10", "--format=%h (%as, %an: %s)", found.commit).strip()
    print(printable(f"{said} is the first commit with a change; {count(found.runs, 'run')} of the tests"))
    for pair in found.pairs:
        if differs(pair):
            print()
            print(printable(f"{pair.here.test}, {pair.here.key}, beside {options.good}:"))
            print(text(pair.diagnosis))
    return SAME
