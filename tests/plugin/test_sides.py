"""`--modelprobe-base`: what a run says and returns, beside a side that is played in this process."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.plugin.revisions import NOTHING_COMPARED
from pytest_modelprobe.revisions import Pair, Ran, SideBySide, SideError, TestsOn, Written, judged

TESTS = """
import torch

def test_a(modelprobe): modelprobe.run(torch.nn.Linear(2, 2), torch.ones(1, 2))
def test_b(modelprobe): modelprobe.run(torch.nn.Linear(2, 2), torch.ones(1, 2))
def test_c(modelprobe): modelprobe.run(torch.nn.Linear(2, 2), torch.ones(1, 2))
"""
Beside = Callable[..., pytest.RunResult]


def git(*commands: str) -> None:
    for command in commands:
        user = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *user, *command.split()], check=True, capture_output=True)


@pytest.fixture
def beside(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Beside:
    """Runs three tests in this process. The models of the first have these verdicts."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    pytester.makepyfile(test_a=TESTS)
    git("init -q -b main", "add .", "commit -q -m one")

    def run(*arguments: str, verdicts: str = "unchanged", stopped: str = "", **found: Any) -> pytest.RunResult:
        def played(tests: Collection[str], ours: TestsOn, theirs: TestsOn, *, folder: Path, **_: Any) -> SideBySide:
            assert ours.root == pytester.path
            assert (theirs.root / "test_a.py").read_text("utf-8") == (ours.root / "test_a.py").read_text("utf-8")
            assert theirs.root != ours.root
            assert (ours.options["rootdir"], theirs.options["rootdir"]) == (str(ours.root), str(theirs.root))
            roots.extend((folder, theirs.root))
            if stopped:
                raise SideError(stopped)
            record = ModelProbe().run(torch.nn.Linear(2, 2), torch.ones(1, 2))
            ones = [Written(test, "run 1", record) for test in sorted(tests)]
            pairs = [
                Pair(one, one, verdict, judged(one, one).diagnosis)  # type: ignore[arg-type]
                for one, verdict in zip(ones, verdicts.split(", "), strict=False)
            ]
            return SideBySide(**{"tests": {*tests}, "pairs": pairs, **found})

        roots: list[Path] = []
        with monkeypatch.context() as patch:
            patch.setattr("pytest_modelprobe.revisions.side_by_side", played)
            result = pytester.runpytest("--modelprobe-base=main", "--modelprobe-base-all", *arguments)
        assert not any(root.exists() for root in roots)
        return result

    return run


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ("unchanged", 0),
        ("rounding, unchanged", 0),
        ("unchanged, changed", 0),
        ("not repeatable, unchanged", 0),
        ("not repeatable", NOTHING_COMPARED),
        ("not run, unchanged", 0),
        ("not run", NOTHING_COMPARED),
    ],
)
def test_a_change_is_reported_and_nothing_compared_has_an_exit_code(beside: Beside, verdicts: str, status: int) -> None:
    result = beside(verdicts=verdicts)
    assert result.ret == status
    assert ("model changed" in result.outlines[-1]) == ("changed" in verdicts.split(", "))


def test_a_run_fails_on_a_change_if_that_is_asked_for(
    beside: Beside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert beside("--modelprobe-base-fail-on=changed", verdicts="unchanged, changed").ret == 1
    assert beside("--modelprobe-base-fail-on=changed", verdicts="unchanged").ret == 0
    event = tmp_path / "event.json"
    monkeypatch.setenv("GITHUB_EVENT_PATH", str(event))
    for request, status in (
        ({"labels": [], "body": "Model change:\nfaster"}, 1),
        ({"labels": [{"name": "model-change"}], "body": None}, 0),
        ({"labels": [], "body": "Faster.\r\nModel change: the scale was wrong"}, 0),
    ):
        event.write_text(json.dumps({"pull_request": request}))
        assert beside("--modelprobe-base-fail-on=undeclared", verdicts="unchanged, changed").ret == status, request


def test_a_run_that_failed_already_keeps_its_status(beside: Beside) -> None:
    assert beside("-k", "no_such_test", "-p", "no:syrupy").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert beside("--collect-only").ret == 0
    result = beside(stopped="the other side is on fire")
    assert result.ret == NOTHING_COMPARED
    assert "nothing was compared: the other side is on fire" in result.outlines


def test_what_was_not_compared_is_counted_and_named(beside: Beside) -> None:
    failed = {f"test_a.py::test_{n}": f"failed: {n}" for n in range(6)}
    ran = Ran(unread={"test_z.py": "ImportError: z"}, failed=failed, with_probe=["test_a.py::test_a", "test_a.py::new"])
    said = beside(
        verdicts="unchanged", ran=ran, only_here=["test_a.py::test_b"], unpaired=2, tests={"test_a.py::test_a"}
    )
    assert "1 the same; 1 test only here; 1 test only there; 2 records of one side alone; 2 tests" in str(said.stdout)
    told = [line for line in said.outlines if line.startswith("there ")]
    assert told == [
        "there test_z.py: ImportError: z",
        *(f"there {test}: {why}" for test, why in list(failed.items())[:4]),
    ]
    assert "... 2 more" in said.outlines


def test_a_test_that_failed_or_was_not_asked_for_here_is_not_missed_there(
    beside: Beside, pytester: pytest.Pytester
) -> None:
    path = pytester.path / "test_a.py"
    path.write_text(
        path.read_text("utf-8").replace("torch.ones(1, 2))\ndef test_b", "torch.ones(1, 2)); assert 0\ndef test_b")
    )
    git("commit -qam two")
    everything = [f"test_a.py::test_{name}" for name in "abc"]
    ran = Ran(with_probe=everything, failed={"test_a.py::test_a": "failed: assert 0"})
    said = str(beside("-k", "not test_c", ran=ran).stdout)
    assert "1 test ran 1 model of 1 class: 1 the same\n" in said
    assert "there test_a" not in said
    said = str(beside("test_a.py::test_b", ran=ran).stdout)
    assert "only there" not in said  # nobody asked for the others


def test_its_records_go_when_the_run_ends(beside: Beside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    beside()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("modelprobe-")]


def test_a_base_that_is_not_one_commit_is_refused(beside: Beside) -> None:
    git("switch -q -c other", "commit -q --allow-empty -m other", "switch -q main", "commit -q --allow-empty -m two")
    git("branch before", "merge -q other", "switch -q other", "merge -q before")
    result = beside()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "HEAD and main have 2 newest commits in common, as they were merged crosswise" in str(result.stderr)
