"""`modelprobe bisect`: the commit that changed what a model does."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.gate import Repository
from pytest_modelprobe.text import count, printable

from .common import SAME


def run_bisect(options: argparse.Namespace) -> int:
    """Find the commit, and print its diagnosis."""
    from pytest_modelprobe.comparison.text import text
    from pytest_modelprobe.revisions import bisect, differs

    if not options.tests:
        raise UsageError("name a test behind --, such as: modelprobe bisect v1.0 -- tests/test_model.py::test_run")
    repository = Repository(Path.cwd())

    def tell(text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    found = bisect(repository, options.good, options.bad, options.tests, tell=tell)
    author = repository.author(found.commit)
    print(printable(f"{author} is the first commit with a change; {count(found.runs, 'run')} of the tests"))
    for pair in found.pairs:
        if differs(pair):
            print()
            print(printable(f"{pair.here.test}, {pair.here.key}, beside {options.good}:"))
            print(text(pair.diagnosis))
    return SAME
