"""`modelprobe scan NAME --base REF`: a model beside the one that another commit makes under the same name."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pytest_modelprobe.gate import Repository
from pytest_modelprobe.revisions import Pair, Ran, Side, SideError, TestsOn, Worktree, import_roots, side_by_side

_FILE, _TEST = "test_scan.py", "test_scan"


def beside(repository: Repository, commit: str, name: str, inputs: Sequence[str], *, device: str) -> Pair:
    """Return the record of a model, and that of the model of the same name at another commit.

    A test that runs the model is written to a temporary folder, and runs on both sides as the tests of a repository do
    with ``--modelprobe-base``. The working tree stays as it is.

    Args:
        repository: The repository of the current folder.
        commit: The hash of the commit.
        name: What makes the model, as `load` takes it.
        inputs: Its inputs, as the command line takes them.
        device: Where it runs.

    Raises:
        GitError: Git cannot check out the commit.
        SideError: The model does not run on one of the two sides.
    """
    here = Path.cwd().resolve()
    with tempfile.TemporaryDirectory(prefix="modelprobe-scan-") as temporary, Worktree(repository, commit) as tree:
        folder = Path(temporary).resolve()
        (folder / "pytest.ini").write_text("[pytest]\n")  # no file above is read
        (folder / _FILE).write_text(_test(name, inputs), "utf-8")

        def tests_on(directory: Path, root: Path, without: Path | None = None) -> TestsOn:
            side = Side(sys.executable, directory, [directory, *import_roots(repository.root, root)], without=without)
            options = {"modelprobe_device": [device]}
            return TestsOn(side=side, root=folder, options=options, plugins=(), processes=1, logs=folder / "logs")

        ours, theirs = tests_on(here, repository.root), tests_on(tree.folder(here), tree.root, repository.root)
        found = side_by_side({f"{_FILE}::{_TEST}"}, ours, theirs, folder=folder / "records", check=tree.check)
        if not found.pairs:
            there = f"at {commit[:10]}"
            told = [(where, why) for where, ran in (("here", found.here), (there, found.ran)) for why in _why(ran)]
            where, why = (*told, (there, "the model records nothing"))[0]
            raise SideError(f"nothing was compared: {name} does not run {where}: {why}")
        (pair,) = found.pairs
        if pair.verdict == "not repeatable":
            where = pair.where_unrepeatable(commit[:10])
            raise SideError(f"nothing was compared: {name} gives other numbers when it runs again {where}")
        return pair


def _why(ran: Ran) -> list[str]:
    return [*ran.unread.values(), *ran.failed.values()]


def _test(name: str, inputs: Sequence[str]) -> str:
    return f"""
from pytest_modelprobe.extras.scan.scanning import ScannedModel
from pytest_modelprobe.extras.scan.search import parse_input
from pytest_modelprobe.extras.scan.target import load


def {_TEST}(modelprobe):
    assert ScannedModel(load({name!r}), modelprobe, [parse_input(text) for text in {list(inputs)!r}]).record
"""
